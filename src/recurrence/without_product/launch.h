// The host side of the kernels of independent units.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/portable.h"
#include "common/shared_memory.h"
#include "recurrence/cell.h"
#include "recurrence/without_product/shape.h"

namespace lltm_ext {

// Runs a kernel (a __global__ function or a cudaKernel_t) with so many threads for each segment, in
// blocks of a warp.
template <class Arguments>
cudaError_t run_independent_units(const void* kernel, const Arguments& sequence, int64_t threads,
                                  int64_t segment_count, Segments<typename Arguments::A> segments,
                                  int64_t step_bytes, const DeviceInfo& device, cudaStream_t stream) {
  if (sequence.steps.batch * sequence.hidden == 0) return cudaSuccess;
  // The blocks of a multiprocessor share its memory, so that no block waits for another one's end, or all
  // waves of blocks are equal. Rings of 48 KB keep enough bytes in flight. A block needs 1 KB besides.
  constexpr int64_t kMostBytes = 48 << 10, kMostResident = 24;
  const int64_t blocks = ceil_div(threads, kIndependentThreads);
  const int64_t blocks_each = ceil_div(blocks * segment_count, int64_t{device.multiprocessors}),
                resident = ceil_div(blocks_each, ceil_div(blocks_each, kMostResident)),
                share = (device.shared_bytes + 1024) / resident - 1024;
  const int64_t stage_bytes = kRingStages * kIndependentThreads * step_bytes, group = step_group(step_bytes);
  segments.stage_steps = static_cast<int>(clamped<int64_t>(std::min(kMostBytes, share) / stage_bytes, 1, 32));
  if (segments.stage_steps > group) segments.stage_steps -= segments.stage_steps % group;
  const int bytes = static_cast<int>(segments.stage_steps * stage_bytes);
  const cudaError_t error = set_max_dynamic_shared(kernel, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(segment_count));
  config.blockDim = dim3(kIndependentThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  const void* arguments[] = {&sequence, &segments};
  return cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments));
}

}  // namespace lltm_ext
