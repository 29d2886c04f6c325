// relu on the CPU, from the same formulas as the kernels.
#include "common/elementwise_cpu.h"
#include "relu/relu.h"

namespace lltm_ext {

template <typename T>
void relu_forward(const T* input, T* output, int64_t n) {
  run_elementwise(ReluForward{}, n, output, input);
}

template <typename T>
void relu_backward(const T* grad_output, const T* output, T* grad_input, int64_t n) {
  run_elementwise(ReluBackward{}, n, grad_input, grad_output, output);
}

#define INSTANTIATE(T)                               \
  template void relu_forward(const T*, T*, int64_t); \
  template void relu_backward(const T*, const T*, T*, int64_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(c10::Half)
INSTANTIATE(c10::BFloat16)

}  // namespace lltm_ext
