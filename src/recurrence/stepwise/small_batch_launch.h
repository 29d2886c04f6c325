// The host side of fused steps of few rows (small_batch.cuh): a launch a step.
#pragma once

#include <cuda_runtime_api.h>

#include "common/shared_memory.h"
#include "recurrence/cell.h"
#include "recurrence/stepwise/small_batch_shape.h"

namespace lltm_ext {

// Launches steps first, first + by, ... and last.
template <class Arguments>
cudaError_t launch_small_batch_steps(const void* kernel, const SmallBatchShape& shape, const Arguments& args,
                                     int first, int last, int by, bool programmatic, cudaStream_t stream) {
  cudaError_t error = set_max_dynamic_shared(kernel, shape.shared_bytes());
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((args.hidden + shape.tile.units - 1) / shape.tile.units);
  config.blockDim = dim3(shape.threads());
  config.dynamicSmemBytes = shape.shared_bytes();
  config.stream = stream;
  config.attrs = &attribute;
  for (int step = first; error == cudaSuccess && step != last + by; step += by) {
    config.numAttrs = programmatic && step != first ? 1 : 0;
    const void* arguments[] = {&args, &step, &shape.tile};
    error = cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments));
    // Later steps can't fall back to another algorithm: earlier ones have overwritten their inputs.
    if (error != cudaSuccess && step != first) return cudaErrorLaunchFailure;
  }
  return error;
}

// Runs all steps of a sequence. `kernel`, a __global__ function or a cudaKernel_t, is compiled for the tile
// and this number of gates. programmatic: see launch_kernel of common/launch.cuh.
inline cudaError_t run_small_batch_steps(const void* kernel, int gates,
                                         const SequenceForwardArguments<float>& s, const SmallBatchTile& tile,
                                         bool programmatic, cudaStream_t stream) {
  return launch_small_batch_steps(kernel, {gates, tile}, s, 0, s.steps.length - 1, 1, programmatic, stream);
}
inline cudaError_t run_small_batch_steps(const void* kernel, int, const SequenceBackwardArguments<float>& s,
                                         const SmallBatchTile& tile, bool programmatic, cudaStream_t stream) {
  return launch_small_batch_steps(kernel, {/*products=*/1, tile}, s, s.end - 1, s.begin - 1, -1, programmatic,
                                  stream);
}

}  // namespace lltm_ext
