// relu: the contract between the op's files. A stream as last argument means CUDA, none means the CPU.
#pragma once

#include <cstdint>

#include "common/math.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

struct ReluForward {
  template <typename A>
  LLTM_HOST_DEVICE A operator()(A input) const {
    return relu(input);
  }
};

struct ReluBackward {
  template <typename A>
  LLTM_HOST_DEVICE A operator()(A grad_output, A output) const {
    return relu_backward(grad_output, output);
  }
};

template <typename T>
void relu_forward(const T* input, T* output, int64_t n);
template <typename T>
void relu_backward(const T* grad_output, const T* output, T* grad_input, int64_t n);

#ifdef LLTM_EXT_WITH_CUDA
template <typename T>
cudaError_t relu_forward(const T* input, T* output, int64_t n, cudaStream_t stream);
template <typename T>
cudaError_t relu_backward(const T* grad_output, const T* output, T* grad_input, int64_t n,
                          cudaStream_t stream);
#endif

}  // namespace lltm_ext
