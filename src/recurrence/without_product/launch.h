// The host side of the kernels of independent units.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/portable.h"
#include "common/shared_memory.h"
#include "recurrence/cell.h"
#include "recurrence/without_product/shape.h"

namespace lltm_ext {

// Runs a kernel (a __global__ function or a cudaKernel_t) with so many blocks.
template <class Arguments>
cudaError_t launch_units(const void* kernel, const Arguments& sequence, const UnitTiles& tiles,
                         int64_t blocks, int threads, int64_t shared_bytes, cudaStream_t stream) {
  const int bytes = static_cast<int>(shared_bytes);
  const cudaError_t error = set_max_dynamic_shared(kernel, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  const void* arguments[] = {&sequence, &tiles};
  return cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments));
}

// Runs all steps in each of so many threads.
template <class Arguments>
cudaError_t run_independent_units(const void* kernel, const Arguments& sequence, int64_t threads,
                                  int64_t step_bytes, const DeviceInfo& device, cudaStream_t stream) {
  if (threads == 0) return cudaSuccess;
  // The blocks of a multiprocessor share its memory, so that no block waits for another one's end, or all
  // waves of blocks are equal. Rings of 48 KB keep enough bytes in flight. A block needs 1 KB besides.
  constexpr int64_t kMostBytes = 48 << 10, kMostResident = 24;
  const int64_t blocks = ceil_div(threads, kIndependentThreads),
                blocks_each = ceil_div(blocks, int64_t{device.multiprocessors}),
                resident = ceil_div(blocks_each, ceil_div(blocks_each, kMostResident)),
                share = (device.shared_bytes + 1024) / resident - 1024;
  const int64_t stage_bytes = kIndependentThreads * kRingStages * step_bytes, group = step_group(step_bytes);
  UnitTiles tiles = {};
  tiles.stage_steps = static_cast<int>(clamped<int64_t>(std::min(kMostBytes, share) / stage_bytes, 1, 32));
  if (tiles.stage_steps > group) tiles.stage_steps -= tiles.stage_steps % group;
  return launch_units(kernel, sequence, tiles, blocks, kIndependentThreads, tiles.stage_steps * stage_bytes,
                      stream);
}

// Runs tiles, whose `links` are memory of link_bytes.
template <class Arguments>
cudaError_t run_unit_tiles(const void* kernel, const Arguments& sequence, const UnitTiles& tiles,
                           const CellShape& cell, cudaStream_t stream) {
  const int live = cell.live_states();
  const int64_t link_bytes = tiles.link_bytes(live);
  if (link_bytes > 0) {
    const cudaError_t error = cudaMemsetAsync(tiles.links, 0xff, link_bytes, stream);
    if (error != cudaSuccess) return error;
  }
  return launch_units(kernel, sequence, tiles, tiles.groups * tiles.tiles, tiles.threads,
                      tiles.shared_bytes(live), stream);
}

}  // namespace lltm_ext
