// gemm: the contract between the op's files. A stream as last argument means CUDA, none means the CPU.
#pragma once

#include <cstdint>

#include "common/activations.h"
#include "common/types.h"
#include "gemm/gemm_choice.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif
#ifdef __CUDACC__
#include "common/fast_math.cuh"
#endif

namespace lltm_ext {

// How float32 is multiplied: as the sum of three bfloat16 each, with the six largest of the nine products, or
// rounded to TF32. GPUs without kernels for it, and other types, compute as kIeee.
enum class Precision { kIeee, kBf16x6, kTf32 };

// A batch of matrices of any strides (in elements): element (i, j) of matrix z is at
// data[z * batch_stride + i * row_stride + j * column_stride].
template <typename T>
struct Matrices {
  const T* data;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t column_stride;
};

template <typename T>
struct GemmArgs {
  Matrices<T> a;  // batch of [m, k]
  Matrices<T> b;  // batch of [k, n]
  const T* bias;  // [n], or null
  int64_t bias_stride;
  T* c;               // [batch, m, n], contiguous
  T* pre_activation;  // as c, or null: a @ b + bias
  int64_t batch, m, n, k;
  Activation activation;
  Precision precision;
  void* workspace;  // gemm_workspace_bytes of it
};

// An operand as matrices of [rows, k]: a, or b transposed.
template <typename T>
struct Rows {
  const T* data;
  int64_t rows, k, row_stride, k_stride;
  int64_t matrices, batch_stride;  // matrices: 1 if one serves the whole batch
};
template <typename T>
LLTM_HOST_DEVICE Rows<T> rows_of_a(const GemmArgs<T>& args) {
  const Matrices<T>& a = args.a;
  return {a.data,        args.m, args.k, a.row_stride, a.column_stride, a.batch_stride == 0 ? 1 : args.batch,
          a.batch_stride};
}
template <typename T>
LLTM_HOST_DEVICE Rows<T> rows_of_b(const GemmArgs<T>& args) {
  const Matrices<T>& b = args.b;
  return {b.data,        args.n, args.k, b.column_stride, b.row_stride, b.batch_stride == 0 ? 1 : args.batch,
          b.batch_stride};
}

// c = activation(a @ b + bias), computed in the accumulate type and rounded once.
template <typename T>
void gemm(const GemmArgs<T>& args);

// The activation, an elementwise functor, as in the kernels.
template <typename T>
struct GemmActivation {
  Activation activation;
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> x) const {
    acc_t<T> values[1] = {x};
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(T) == 2) {
      activate<ActivationMath<T>>(activation, values);
      return values[0];
    }
#endif
    activate(activation, values);
    return values[0];
  }
};

// Backward of the activation, an elementwise functor. saved: see saves_output.
template <typename T>
struct GemmActivationBackward {
  Activation activation;
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> grad_output, acc_t<T> saved) const {
    // A product would make NaN of 0 and an infinite gradient.
    if (activation == Activation::kRelu) return relu_backward(grad_output, saved);
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(T) == 2) return grad_output * activation_derivative<FastMath>(activation, saved);
#endif
    return grad_output * activation_derivative<ExactMath>(activation, saved);
  }
};

// Backward of activation and bias, of contiguous, non-empty [rows, columns].
template <typename T>
struct BiasBackwardArgs {
  const T *grad_output, *saved;
  T* grad_input;  // grad_output * activation'
  T* grad_bias;   // [columns]: the sum of its rows, before they are rounded
  int64_t rows, columns;
  Activation activation;
  void* workspace;  // gemm_bias_backward_workspace_bytes of it
};

#ifdef LLTM_EXT_WITH_CUDA
template <typename T>
int64_t gemm_bias_backward_workspace_bytes(const BiasBackwardArgs<T>& args);
template <typename T>
cudaError_t gemm_bias_backward(const BiasBackwardArgs<T>& args, cudaStream_t stream);

template <typename T>
Lines lines_of(const Rows<T>& x) {
  const auto multiple = [&](int64_t stride, int64_t size, int64_t bytes) {
    return size == 1 || (stride > 0 && stride * static_cast<int64_t>(sizeof(T)) % bytes == 0);
  };
  const auto lines = [&](bool along_k, int64_t stride, int64_t length, int64_t line_stride, int64_t count) {
    const auto start_at = [&](int64_t bytes) {
      return (stride == 1 || length == 1) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
             multiple(line_stride, count, bytes) && multiple(x.batch_stride, x.matrices, 16);
    };
    return Lines{along_k, start_at(16), start_at(128)};
  };
  if (const Lines found = lines(true, x.k_stride, x.k, x.row_stride, x.rows); found.aligned) return found;
  if (const Lines found = lines(false, x.row_stride, x.rows, x.k_stride, x.k); found.aligned) return found;
  return {x.rows == 1 || (x.k > 1 && x.k_stride <= x.row_stride), false, false};
}

// Of args, without their workspace, on the current device. The library's products are the binding's.
template <typename T>
cudaError_t gemm_choice(const GemmArgs<T>& args, Choice& choice);
template <typename T>
int64_t gemm_workspace_bytes(const GemmArgs<T>& args, const Choice& choice);
template <typename T>
cudaError_t gemm(const GemmArgs<T>& args, const Choice& choice, cudaStream_t stream);

// Parts of these, on a device of compute capability 9.0: half types, and float32 as bf16x6.
template <typename T>
int64_t gemm_hopper_workspace_bytes(const GemmArgs<T>& args, const Choice& choice);
template <typename T>
cudaError_t gemm_hopper(GemmArgs<T> args, const Choice& choice, const DeviceInfo& device,
                        cudaStream_t stream);
bool bf16x6_fits(const GemmArgs<float>& args);
int64_t gemm_bf16x6_workspace_bytes(const GemmArgs<float>& args);
cudaError_t gemm_bf16x6(const GemmArgs<float>& args, const DeviceInfo& device, cudaStream_t stream);
#endif

}  // namespace lltm_ext
