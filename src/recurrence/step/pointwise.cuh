// One step of a cell on CUDA, a thread a unit (step.h).
#pragma once

#include "common/fast_math.cuh"
#include "common/launch.cuh"
#include "recurrence/step/step.h"

namespace lltm_ext {

// It may begin before the product that it takes is there.
template <class Cell, class Step, typename T>
__global__ void __launch_bounds__(kThreads) recurrence_pointwise_step_kernel(Step step) {
  griddepcontrol_wait();
  CUDA_KERNEL_LOOP(i, step.batch * step.hidden) {
    step_unit<Cell, typename MathOf<T>::type>(step, i / step.hidden, i % step.hidden);
  }
}

template <class Cell, typename T, class Step>
cudaError_t launch_step(const Step& step, cudaStream_t stream) {
  constexpr auto* kKernel = recurrence_pointwise_step_kernel<Cell, Step, T>;
  int capability = 0;
  const cudaError_t error = compute_capability<kKernel>(capability);
  if (error != cudaSuccess) return error;
  return launch_kernel(kKernel, dim3(blocks_for(step.batch * step.hidden)), dim3(kThreads),
                       /*shared_bytes=*/0, /*programmatic=*/capability >= 90, stream, step);
}

template <class Cell, typename T>
cudaError_t recurrence_step(const StepForwardArguments<T>& step, cudaStream_t stream) {
  return launch_step<Cell, T>(step, stream);
}
template <class Cell, typename T>
cudaError_t recurrence_step(const StepBackwardArguments<T>& step, cudaStream_t stream) {
  return launch_step<Cell, T>(step, stream);
}

}  // namespace lltm_ext

#define INSTANTIATE_RECURRENCE_STEP(Cell, T)                                                             \
  template cudaError_t lltm_ext::recurrence_step<Cell, T>(const StepForwardArguments<T>&, cudaStream_t); \
  template cudaError_t lltm_ext::recurrence_step<Cell, T>(const StepBackwardArguments<T>&, cudaStream_t);
