// The host side of the kernels of independent units.
#pragma once

#include <cuda_runtime_api.h>

#include "recurrence/cell.h"
#include "recurrence/without_product/shape.h"

namespace lltm_ext {

// Runs a kernel (a __global__ function or a cudaKernel_t) with `blocks` of a warp for each segment.
template <class Arguments>
cudaError_t run_independent_units(const void* kernel, const Arguments& sequence, int64_t blocks,
                                  int64_t segment_count, const Segments<typename Arguments::A>& segments,
                                  cudaStream_t stream) {
  if (sequence.steps.batch * sequence.hidden == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(segment_count));
  config.blockDim = dim3(kIndependentThreads);
  config.stream = stream;
  const void* arguments[] = {&sequence, &segments};
  return cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments));
}

}  // namespace lltm_ext
