// gemm: the contract between the op's files. A stream as last argument means CUDA, none means the CPU.
#pragma once

#include <cstdint>

#include "common/activations.h"
#include "common/types.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif
#ifdef __CUDACC__
#include "common/fast_math.cuh"
#endif

namespace lltm_ext {

// How float32 is multiplied: as the sum of three bfloat16 each, with the six largest or all nine products, or
// rounded to TF32. GPUs without kernels for it, and other types, compute as kIeee.
enum class Precision { kIeee, kBf16x6, kBf16x9, kTf32 };

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

// c = activation(a @ b + bias), computed in the accumulate type and rounded once.
template <typename T>
void gemm(const GemmArgs<T>& args);

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

// On the current device.
template <typename T>
int64_t gemm_workspace_bytes(const GemmArgs<T>& args);
template <typename T>
cudaError_t gemm(const GemmArgs<T>& args, cudaStream_t stream);
#endif

}  // namespace lltm_ext
