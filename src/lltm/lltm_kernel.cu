// lltm on CUDA: the pointwise half of one step, forward and backward, a thread a unit. The other half, the
// gates' matrix product, is the binding's.
#include "common/launch.cuh"
#include "common/recurrence/math.cuh"
#include "lltm/lltm.h"

namespace lltm_ext {

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) lltm_forward_kernel(ForwardStep<T, C> step) {
  CUDA_KERNEL_LOOP(i, step.batch * step.hidden)
  lltm_forward_unit<ExactMath>(step, i / step.hidden, i % step.hidden);
}

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) lltm_backward_kernel(BackwardStep<T, C> step) {
  CUDA_KERNEL_LOOP(i, step.batch * step.hidden)
  lltm_backward_unit<ExactMath>(step, i / step.hidden, i % step.hidden);
}

template <typename T, typename C>
cudaError_t lltm_forward_step(const ForwardStep<T, C>& step, cudaStream_t stream) {
  lltm_forward_kernel<<<blocks_for(step.batch * step.hidden), kThreads, 0, stream>>>(step);
  return cudaGetLastError();
}

template <typename T, typename C>
cudaError_t lltm_backward_step(const BackwardStep<T, C>& step, cudaStream_t stream) {
  lltm_backward_kernel<<<blocks_for(step.batch * step.hidden), kThreads, 0, stream>>>(step);
  return cudaGetLastError();
}

#define INSTANTIATE(T, C)                                                         \
  template cudaError_t lltm_forward_step(const ForwardStep<T, C>&, cudaStream_t); \
  template cudaError_t lltm_backward_step(const BackwardStep<T, C>&, cudaStream_t);
INSTANTIATE(float, float)
INSTANTIATE(double, double)
INSTANTIATE(__half, __half)
INSTANTIATE(__half, float)
INSTANTIATE(__nv_bfloat16, __nv_bfloat16)
INSTANTIATE(__nv_bfloat16, float)

}  // namespace lltm_ext
