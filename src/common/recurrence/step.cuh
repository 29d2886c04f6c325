// One step of a cell on CUDA, a thread a unit (step.h).
#pragma once

#include "common/launch.cuh"
#include "common/recurrence/math.cuh"
#include "common/recurrence/step.h"

namespace lltm_ext {

template <class Cell, class Step, typename T>
__global__ void __launch_bounds__(kThreads) recurrence_step_kernel(Step step) {
  CUDA_KERNEL_LOOP(i, step.batch * step.hidden) {
    step_unit<Cell, typename MathOf<T>::type>(step, i / step.hidden, i % step.hidden);
  }
}

template <class Cell, typename T>
cudaError_t recurrence_step(const StepForward<T>& step, cudaStream_t stream) {
  recurrence_step_kernel<Cell, StepForward<T>, T>
      <<<blocks_for(step.batch * step.hidden), kThreads, 0, stream>>>(step);
  return cudaGetLastError();
}

template <class Cell, typename T>
cudaError_t recurrence_step(const StepBackward<T>& step, cudaStream_t stream) {
  recurrence_step_kernel<Cell, StepBackward<T>, T>
      <<<blocks_for(step.batch * step.hidden), kThreads, 0, stream>>>(step);
  return cudaGetLastError();
}

}  // namespace lltm_ext

#define INSTANTIATE_RECURRENCE_STEP(Cell, T)                                                    \
  template cudaError_t lltm_ext::recurrence_step<Cell, T>(const StepForward<T>&, cudaStream_t); \
  template cudaError_t lltm_ext::recurrence_step<Cell, T>(const StepBackward<T>&, cudaStream_t);
