// The host side of the kernels of independent units.
#pragma once

#include <cuda_runtime_api.h>

#include "recurrence/cell.h"
#include "recurrence/independent/shape.h"

namespace lltm_ext {

// Runs a kernel (a __global__ function or a cudaKernel_t) of independent_units(hidden) units a thread.
template <class Arguments>
cudaError_t run_independent_units(const void* kernel, const Arguments& sequence, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(independent_blocks(sequence.steps.batch, sequence.hidden));
  const void* arguments[] = {&sequence};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kIndependentThreads), const_cast<void**>(arguments),
                          /*sharedMem=*/0, stream);
}

}  // namespace lltm_ext
