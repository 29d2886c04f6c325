// relu on CUDA: one pass of the elementwise engine each way.
#include "common/elementwise.cuh"
#include "relu/relu.h"

namespace lltm_ext {

template <typename T>
cudaError_t relu_forward(const T* input, T* output, int64_t n, cudaStream_t stream) {
  return launch_elementwise(ReluForward{}, n, stream, output, input);
}

template <typename T>
cudaError_t relu_backward(const T* grad_output, const T* output, T* grad_input, int64_t n,
                          cudaStream_t stream) {
  return launch_elementwise(ReluBackward{}, n, stream, grad_input, grad_output, output);
}

#define INSTANTIATE(T)                                                    \
  template cudaError_t relu_forward(const T*, T*, int64_t, cudaStream_t); \
  template cudaError_t relu_backward(const T*, const T*, T*, int64_t, cudaStream_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)

}  // namespace lltm_ext
