// sigmoid: the contract between the op's files. A stream as last argument means CUDA, none means the CPU.
#pragma once

#include <cstdint>

#include "common/math.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

struct SigmoidForward {
  template <typename A>
  LLTM_HOST_DEVICE A operator()(A input) const {
    return sigmoid(input);
  }
};

struct SigmoidBackward {
  template <typename A>
  LLTM_HOST_DEVICE A operator()(A grad_output, A output) const {
    return grad_output * sigmoid_derivative(output);
  }
};

template <typename T>
void sigmoid_forward(const T* input, T* output, int64_t n);
template <typename T>
void sigmoid_backward(const T* grad_output, const T* output, T* grad_input, int64_t n);

#ifdef LLTM_EXT_WITH_CUDA
template <typename T>
cudaError_t sigmoid_forward(const T* input, T* output, int64_t n, cudaStream_t stream);
template <typename T>
cudaError_t sigmoid_backward(const T* grad_output, const T* output, T* grad_input, int64_t n,
                             cudaStream_t stream);
#endif

}  // namespace lltm_ext
