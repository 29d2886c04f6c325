// The launchers of a planned sequence, for host code.
#pragma once

#include "recurrence/cell.h"
#include "recurrence/plan.h"

#ifdef LLTM_EXT_WITH_CUDA
#include "common/shared_memory.h"
#endif

namespace lltm_ext {

#ifndef LLTM_EXT_WITH_CUDA
// Stand-ins, so that code which is generic over the device compiles. Nothing calls functions of these types.
using cudaError_t = int;
using cudaStream_t = void*;
#endif

// Plans a sequence of T on the current device (plan.h).
template <class Cell, typename T>
cudaError_t plan_sequence(const Problem& problem, Algorithm requested, Plan& plan);

// Runs a fused plan: a persistent kernel for all directions, or fused steps for one sequence. First fills the
// memory through which blocks exchange values. If the kernel does not fit (does_not_fit in
// custom_cell/launch.h), nothing has run. `links`: memory of LargeGrid::bytes.
template <class Cell, typename T>
cudaError_t launch_sequence_forward(const PerDirection<SequenceForwardArguments<T>>& sequences,
                                    const Plan& plan, void* links, cudaStream_t stream);
template <class Cell, typename T>
cudaError_t launch_sequence_backward(const PerDirection<SequenceBackwardArguments<T>>& sequences,
                                     const Plan& plan, void* links, cudaStream_t stream);

#ifdef LLTM_EXT_WITH_CUDA
// Fills the memory [rows, width] through which a grid's blocks exchange values.
template <typename T>
cudaError_t fill_unwritten(T* data, int64_t rows, int64_t width, cudaStream_t stream) {
  return cudaMemsetAsync(data, kUnwrittenByte, rows * width * sizeof(T), stream);
}
template <typename T>
cudaError_t fill_unwritten(const CellShape&, const PerDirection<SequenceForwardArguments<T>>& sequences,
                           int i, cudaStream_t stream) {
  return fill_unwritten(sequences.of[i].output, sequences.rows, sequences.of[i].hidden, stream);
}
template <typename T>
cudaError_t fill_unwritten(const CellShape& cell, const PerDirection<SequenceBackwardArguments<T>>& sequences,
                           int i, cudaStream_t stream) {
  const SequenceBackwardArguments<T>& s = sequences.of[i];
  if (cell.products > 0) {
    const cudaError_t error =
        fill_unwritten(s.grad_products, s.rows, int64_t{cell.products} * s.hidden, stream);
    if (error != cudaSuccess) return error;
  }
  return fill_unwritten(s.grad_gates, s.rows, int64_t{cell.gates} * s.hidden, stream);
}

// Launches a persistent kernel: a __global__ function or a cudaKernel_t. `links`: memory for GroupGridOfRows.
template <template <typename> class Arguments, typename T>
cudaError_t launch_persistent(const void* kernel, const CellShape& cell,
                              const PerDirection<Arguments<T>>& sequences, const Plan& plan,
                              cudaStream_t stream, void* links = nullptr) {
  constexpr bool kBackward = std::is_same_v<Arguments<T>, SequenceBackwardArguments<T>>;
  const bool cluster = plan.algorithm == Algorithm::kCluster;
  for (int i = 0; !cluster && i < sequences.count; ++i) {
    const cudaError_t error = fill_unwritten(cell, sequences, i, stream);
    if (error != cudaSuccess) return error;
  }
  const PersistentShape shape = {cell, variants_of<T>()[plan.variant], sizeof(T), kBackward};
  const Group group = {sequences.of[0].hidden / plan.heads, plan.grid.group_blocks, 0, plan.grid.rows};
  // Kernels of other cells take the first part of it.
  GroupGridOfRows grid = {plan.grid, 0, links, static_cast<char*>(links) + plan.row_parts_bytes};
  if (plan.given_bytes > 0) {
    const cudaError_t error = cudaMemsetAsync(grid.given, kUnwrittenByte, plan.given_bytes, stream);
    if (error != cudaSuccess) return error;
  }
  const int shared_bytes = shape.shared_bytes(group);
  const cudaError_t error = set_max_dynamic_shared(kernel, shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  if (cluster) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(group.blocks), 1, 1};
  } else {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(shape.threads());
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const int most_groups = plan.most_groups > 0 ? plan.most_groups : plan.grid.groups;
  for (; grid.first_group < plan.grid.groups; grid.first_group += most_groups) {
    if (plan.row_parts_bytes > 0) {
      const cudaError_t cleared = cudaMemsetAsync(grid.row_parts, 0, plan.row_parts_bytes, stream);
      if (cleared != cudaSuccess) return cleared;
    }
    const int groups = std::min(most_groups, plan.grid.groups - grid.first_group);
    config.gridDim = dim3(groups * group.blocks, sequences.count * plan.heads);
    const void* arguments[] = {&sequences, &grid};
    const cudaError_t launched = cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments));
    if (launched != cudaSuccess) return launched;
  }
  return cudaSuccess;
}
#endif

// Launches the fused steps (stepwise/fused_hopper.cuh).
template <class Cell, typename T>
cudaError_t launch_fused_steps(const SequenceForwardArguments<T>& sequence, const FusedStepTile& tile,
                               cudaStream_t stream);
template <class Cell, typename T>
cudaError_t launch_fused_steps(const SequenceBackwardArguments<T>& sequence, const FusedStepTile& tile,
                               cudaStream_t stream);

// Launches large layers (large/forward.cuh, large/backward.cuh).
template <class Cell, template <typename> class Arguments, typename T>
cudaError_t launch_large_layers(const PerDirection<Arguments<T>>& sequences, const LargeGrid& grid,
                                void* memory, cudaStream_t stream);

// Launches the fused steps of few rows (stepwise/small_batch.cuh).
template <class Cell>
cudaError_t launch_small_batch_steps(const SequenceForwardArguments<float>& sequence,
                                     const SmallBatchTile& tile, cudaStream_t stream);
template <class Cell>
cudaError_t launch_small_batch_steps(const SequenceBackwardArguments<float>& sequence,
                                     const SmallBatchTile& tile, cudaStream_t stream);

}  // namespace lltm_ext
