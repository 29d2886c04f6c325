// The host side of a large layer's kernels: tensor maps, counters, and a launch of all groups that fit.
#pragma once

#include "common/hopper/launch.h"
#include "recurrence/large/arguments.h"
#include "recurrence/large/shape.h"

namespace lltm_ext {
namespace hopper {

// `args` for the first group.
template <class Arguments>
cudaError_t launch_large_groups(const void* kernel, const LargeShape& shape, Arguments& args,
                                const LargeGrid& grid, cudaStream_t stream) {
  cudaError_t error = set_max_dynamic_shared(kernel, shape.shared_bytes());
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(args.arrivals, 0, shape.arrival_bytes(grid), stream);
  if (error != cudaSuccess) return error;

  // The blocks of a group wait for each other, so all of a launch must be resident.
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(shape.cluster_blocks()), 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(LargeShape::kThreads);
  config.dynamicSmemBytes = shape.shared_bytes();
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  for (; args.first_group < grid.groups; args.first_group += grid.most_groups) {
    const int groups = std::min(grid.most_groups, grid.groups - args.first_group);
    config.gridDim = dim3(2 * grid.group_pairs * groups);
    const void* arguments[] = {&args};
    error = cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments));
    if (error == cudaSuccess) continue;
    // Another algorithm can't run after a part of the groups: it would read what these have overwritten.
    return args.first_group > 0 ? cudaErrorLaunchFailure : error;
  }
  return cudaSuccess;
}

}  // namespace hopper

// Runs all steps of a sequence, the launch's i-th. `kernel`, a __global__ function or a cudaKernel_t, is
// compiled for the tile and the cell. `memory`: of LargeGrid::bytes, with the products with h0 of float32.
template <typename T>
cudaError_t run_large_layer(const void* kernel, const CellShape& cell, const SequenceForwardArguments<T>& s,
                            int i, const LargeGrid& grid, void* memory, cudaStream_t stream) {
  using namespace hopper;
  const LargeShape shape = {cell, kLargeTiles[grid.tile], /*backward=*/false, sizeof(T)};
  const int64_t hidden = s.hidden, batch = s.steps.batch, length = s.steps.length;
  if (length == 0) return cudaSuccess;
  LargeForwardArguments<T> args = {s, {}, {}, static_cast<unsigned*>(memory), grid.group_pairs, 0};
  GlobalTensor h = {s.output, hidden, batch, length, hidden, batch * hidden};
  using Operand = std::conditional_t<sizeof(T) == 2, T, __half>;
  if constexpr (sizeof(T) == 4) {
    char* const bytes = static_cast<char*>(memory);
    const char* const products = bytes + grid.products_at + i * grid.product_bytes;
    args.exchanged = bytes + grid.exchanged_at;
    args.first_products = s.h0 ? reinterpret_cast<const T*>(products) : nullptr;
    h.data = args.exchanged, h.batch = 2;
  }
  cudaError_t error = encode_tensor_map<Operand>(args.h, h, shape.tile.rows);
  if (error != cudaSuccess) return error;
  args.h0 = args.h;
  if constexpr (sizeof(T) == 2) {
    if (s.h0) error = encode_tensor_map<T>(args.h0, {s.h0, hidden, batch, 1, hidden, 0}, shape.tile.rows);
    if (error != cudaSuccess) return error;
  }
  return launch_large_groups(kernel, shape, args, grid, stream);
}

// The same of steps backward, whose tiles are in kLargeBackwardTiles.
template <typename T>
cudaError_t run_large_layer(const void* kernel, const CellShape& cell, const SequenceBackwardArguments<T>& s,
                            int, const LargeGrid& grid, void* memory, cudaStream_t stream) {
  using namespace hopper;
  const LargeShape shape = {cell, kLargeBackwardTiles[grid.tile], /*backward=*/true};
  const int64_t hidden = s.hidden, gates = cell.gates;
  if (s.begin == s.end) return cudaSuccess;
  LargeBackwardArguments<T> args = {s, {}, static_cast<unsigned*>(memory), grid.group_pairs, 0};
  const cudaError_t error = encode_tensor_map<T>(
      args.grad_gates, {s.grad_gates, hidden, s.rows, gates, gates * hidden, hidden}, shape.tile.rows);
  if (error != cudaSuccess) return error;
  return launch_large_groups(kernel, shape, args, grid, stream);
}

// Those of a layer's directions, one after the other: each needs most of the multiprocessors.
template <class Arguments>
cudaError_t run_large_layers(const void* kernel, const CellShape& cell,
                             const PerDirection<Arguments>& sequences, const LargeGrid& grid, void* memory,
                             cudaStream_t stream) {
  for (int i = 0; i < sequences.count; ++i) {
    const cudaError_t error = run_large_layer(kernel, cell, sequences.of[i], i, grid, memory, stream);
    // Another algorithm can't run after the first direction, as after a part of its groups.
    if (error != cudaSuccess) return i > 0 ? cudaErrorLaunchFailure : error;
  }
  return cudaSuccess;
}

}  // namespace lltm_ext
