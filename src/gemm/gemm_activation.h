// The way back through gemm's activations, as a functor of the elementwise engine.
#pragma once

#include "common/types.h"
#include "gemm/gemm.h"

#ifdef __CUDACC__
#include "common/activations.cuh"
#endif

namespace lltm_ext {

// The derivative, from what was saved: the activation's output or its input (saves_output).
template <class Math, typename A>
LLTM_HOST_DEVICE A activation_derivative(Activation activation, A saved) {
  switch (activation) {
    case Activation::kNone:
      return A(1);
    case Activation::kRelu:
      return relu_backward(A(1), saved);
    case Activation::kSigmoid:
      return sigmoid_derivative(saved);
    case Activation::kTanh:
      return tanh_derivative(saved);
    case Activation::kElu:
      return elu_derivative(saved);
    case Activation::kGelu:
      return Math::gelu_derivative(saved);
    case Activation::kGeluTanh:
      return gelu_tanh_derivative<Math>(saved);
    case Activation::kSilu:
      return silu_derivative<Math>(saved);
  }
  return A(1);
}

template <typename T>
struct GemmActivationBackward {
  Activation activation;
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> grad_output, acc_t<T> saved) const {
    // relu by choice, not by product: a gradient of infinity ends at 0.
    if (activation == Activation::kRelu) return relu_backward(grad_output, saved);
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(T) == 2) return grad_output * activation_derivative<FastMath>(activation, saved);
#endif
    return grad_output * activation_derivative<ExactMath>(activation, saved);
  }
};

}  // namespace lltm_ext
