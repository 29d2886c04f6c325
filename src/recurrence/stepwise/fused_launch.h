// The host side of fused steps (fused_hopper.cuh): tensor maps, and a launch a step.
#pragma once

#include "common/hopper/launch.h"
#include "recurrence/stepwise/fused_arguments.h"
#include "recurrence/stepwise/fused_shape.h"

namespace lltm_ext {
namespace hopper {

// Launches steps first, first + by, ... and last.
template <class Arguments>
cudaError_t launch_steps(const void* kernel, const FusedStepShape& shape, const FusedStepTile& tile,
                         const Arguments& args, int first, int last, int by, cudaStream_t stream) {
  const int split_k = tile.split_k, bytes = tile.is_spread ? shape.spread_bytes() : shape.shared_bytes();
  const dim3 grid(tiles_of(args.s.hidden, shape.units()), tiles_of(args.s.steps.batch, shape.rows), split_k);
  cudaError_t error = set_max_dynamic_shared(kernel, bytes);
  for (int step = first; error == cudaSuccess && step != last + by; step += by) {
    const void* arguments[] = {&args, &step};
    error = launch_clusters(kernel, grid, dim3(1, 1, split_k), shape.threads(), bytes,
                            /*programmatic=*/step != first, stream, arguments);
    // Later steps can't fall back to another algorithm: earlier ones have overwritten their inputs.
    if (error != cudaSuccess && step != first) return cudaErrorLaunchFailure;
  }
  return error;
}

}  // namespace hopper

// Runs all steps of a sequence. `kernel`, a __global__ function or a cudaKernel_t, is compiled for the tile
// and this number of gates.
template <typename T>
cudaError_t run_fused_steps(const void* kernel, int gates, const SequenceForwardArguments<T>& s,
                            const FusedStepTile& tile, cudaStream_t stream) {
  using namespace hopper;
  const FusedStepShape shape = {gates, tile.rows, /*backward=*/false};
  FusedForwardArguments<T> args = {s, {}, {}, {}};
  const int64_t hidden = s.hidden, batch = s.steps.batch, length = s.steps.length;
  cudaError_t error = encode_tensor_map<T>(args.h0, {s.h0, hidden, batch, 1, hidden, 0}, shape.rows);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map<T>(args.output, {s.output, hidden, batch, length, hidden, batch * hidden},
                               shape.rows);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map<T>(args.weight, {s.weight, hidden, hidden, gates, hidden, hidden * hidden},
                               shape.units());
  if (error != cudaSuccess) return error;
  return launch_steps(kernel, shape, tile, args, 0, s.steps.length - 1, 1, stream);
}

template <typename T>
cudaError_t run_fused_steps(const void* kernel, int gates, const SequenceBackwardArguments<T>& s,
                            const FusedStepTile& tile, cudaStream_t stream) {
  using namespace hopper;
  const FusedStepShape shape = {gates, tile.rows, /*backward=*/true};
  FusedBackwardArguments<T> args = {s, {}, {}};
  const int64_t width = int64_t{gates} * s.hidden, batch = s.steps.batch, length = s.end - s.begin;
  cudaError_t error = encode_tensor_map<T>(
      args.grad_gates, {s.grad_gates, width, batch, length, width, batch * width}, shape.rows);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map<T>(args.weight_t, {s.weight_t, width, s.hidden, 1, width, 0}, shape.units());
  if (error != cudaSuccess) return error;
  return launch_steps(kernel, shape, tile, args, s.end - 1, s.begin - 1, -1, stream);
}

}  // namespace lltm_ext
