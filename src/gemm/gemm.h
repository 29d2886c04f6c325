// gemm: the contract between the op's files. A stream as last argument means CUDA, none means the CPU.
#pragma once

#include <cstdint>

#include "common/math.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

enum class Activation : int32_t { kNone, kRelu, kSigmoid, kTanh, kElu, kGelu, kGeluTanh, kSilu };

// Whether the derivative follows from the output, so that backward needs nothing else; for the others it
// takes the input.
constexpr bool saves_output(Activation activation) { return activation <= Activation::kElu; }

// How float32 products are computed, for those who ask: as three bfloat16 each, of whose nine products the
// six or all nine that matter are summed in float32; or rounded to TF32. A chip without kernels for it, and
// any other type, computes as kIeee does.
enum class Precision { kIeee, kBf16x6, kBf16x9, kTf32 };

// x[i] = activation(x[i]): one branch for all N.
template <class Math = ExactMath, int N, typename A>
LLTM_HOST_DEVICE void activate(Activation activation, A (&x)[N]) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      for (int i = 0; i < N; ++i) x[i] = relu(x[i]);
      return;
    case Activation::kSigmoid:
      for (int i = 0; i < N; ++i) x[i] = Math::sigmoid(x[i]);
      return;
    case Activation::kTanh:
      for (int i = 0; i < N; ++i) x[i] = Math::tanh(x[i]);
      return;
    case Activation::kElu:
      for (int i = 0; i < N; ++i) x[i] = Math::elu(x[i]);
      return;
    case Activation::kGelu:
      for (int i = 0; i < N; ++i) x[i] = Math::gelu(x[i]);
      return;
    case Activation::kGeluTanh:
      for (int i = 0; i < N; ++i) x[i] = Math::gelu_tanh(x[i]);
      return;
    case Activation::kSilu:
      for (int i = 0; i < N; ++i) x[i] = Math::silu(x[i]);
      return;
  }
}

// A batch of matrices, any strides (in elements): element (i, j) of matrix z stands at
// data[z * batch_stride + i * row_stride + j * column_stride]. A transpose is two strides exchanged.
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
  T* c;       // [batch, m, n], contiguous
  T* before;  // the same before the activation, or null
  int64_t batch, m, n, k;
  Activation activation;
  Precision precision;
  void* workspace;  // gemm_workspace_bytes of it
};

// c = activation(a @ b + bias), summed and activated in the accumulate type, rounded once.
template <typename T>
void gemm(const GemmArgs<T>& args);

// The way back through activation and bias, of contiguous [rows, columns], none of them 0.
template <typename T>
struct BiasBackwardArgs {
  const T *grad_output, *saved;  // saved: the activation's output or its input (saves_output)
  T* grad_input;                 // grad_output * activation'
  T* grad_bias;                  // [columns]: the sum of its rows, in the accumulate type
  int64_t rows, columns;
  Activation activation;
  void* workspace;  // gemm_bias_backward_workspace_bytes of it
};

#ifdef LLTM_EXT_WITH_CUDA
template <typename T>
int64_t gemm_bias_backward_workspace_bytes(const BiasBackwardArgs<T>& args);
template <typename T>
cudaError_t gemm_bias_backward(const BiasBackwardArgs<T>& args, cudaStream_t stream);

// Of the current device's memory, for what gemm makes of its operands.
template <typename T>
int64_t gemm_workspace_bytes(const GemmArgs<T>& args);
template <typename T>
cudaError_t gemm(const GemmArgs<T>& args, cudaStream_t stream);
#endif

}  // namespace lltm_ext
