// The launchers of launch.h. A .cu file for each cell and type includes this and calls
// INSTANTIATE_RECURRENCE(Cell, T).
#pragma once

#include <array>
#include <utility>

#include "common/device.cuh"
#include "common/launch.cuh"
#include "recurrence/persistent/backward.cuh"
#include "recurrence/persistent/forward.cuh"
#include "recurrence/persistent/launch.h"

namespace lltm_ext {

#ifdef LLTM_EXT_SM90A
template <typename T>
constexpr bool kHasFusedSteps = sizeof(T) == 2;
#else
template <typename T>
constexpr bool kHasFusedSteps = false;
#endif

// The kernels of T's variants, in the order of their table.
template <class Cell, typename T, size_t... kVariants>
constexpr auto forward_kernels(std::index_sequence<kVariants...>) {
  return std::array{recurrence_persistent_forward_kernel<PersistentConfig<Cell, T, kVariants, false>>...};
}
template <class Cell, typename T, size_t... kVariants>
constexpr auto backward_kernels(std::index_sequence<kVariants...>) {
  return std::array{recurrence_persistent_backward_kernel<PersistentConfig<Cell, T, kVariants, true>>...};
}
template <typename T>
using VariantIndices =
    std::make_index_sequence<sizeof(T) == 2 ? std::size(kHalfVariants) : std::size(kFloatVariants)>;
template <class Cell, typename T>
constexpr auto kForwardKernels = forward_kernels<Cell, T>(VariantIndices<T>());
template <class Cell, typename T>
constexpr auto kBackwardKernels = backward_kernels<Cell, T>(VariantIndices<T>());

template <class Cell, typename T>
cudaError_t plan_sequence(const Problem& problem, Algorithm requested, Plan& plan) {
  DeviceInfo device;
  cudaError_t error = current_device_info(device);
  if (error != cudaSuccess) return error;
  // The driver may have compiled the code for the device from PTX of an older architecture.
  int code = 0;
  error = compute_capability<recurrence_persistent_forward_kernel<PersistentConfig<Cell, T, 0, false>>>(code);
  if (error != cudaSuccess) return error;
  device.compute_capability = std::min(device.compute_capability, code);
  plan = plan_recurrence(problem, device, requested);
  return cudaSuccess;
}

template <class Arguments>
cudaError_t launch_persistent(void (*kernel)(PerDirection<Arguments>, GroupGrid), const PersistentShape& shape,
                              const PerDirection<Arguments>& sequences, const Plan& plan,
                              cudaStream_t stream) {
  const int shared_bytes =
      shape.shared_bytes({sequences.of[0].hidden, plan.grid.group_blocks, 0, plan.grid.rows});
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  if (plan.algorithm == Algorithm::kCluster) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(plan.grid.group_blocks), 1, 1};
  } else {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.grid.groups * plan.grid.group_blocks, sequences.count);
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, sequences, plan.grid);
}

// Marks the memory through which a grid's blocks exchange values as unwritten.
template <class Cell, typename T>
cudaError_t fill_unwritten(const SequenceForwardArguments<T>& s, cudaStream_t stream) {
  return cudaMemsetAsync(s.output, kUnwrittenByte, s.rows * s.hidden * sizeof(T), stream);
}
template <class Cell, typename T>
cudaError_t fill_unwritten(const SequenceBackwardArguments<T>& s, cudaStream_t stream) {
  return cudaMemsetAsync(s.grad_gates, kUnwrittenByte, s.rows * Cell::kGates * s.hidden * sizeof(T), stream);
}

template <class Cell, typename T, bool kBackward, class Arguments, class Kernels>
cudaError_t launch_sequence(const Kernels& kernels, const PerDirection<Arguments>& sequences,
                            const Plan& plan, cudaStream_t stream) {
  if constexpr (kHasFusedSteps<T>) {
    if (plan.fused_step.split_k > 0) {
      return launch_fused_steps<Cell>(sequences.of[0], plan.fused_step, stream);
    }
  }
  for (int i = 0; plan.algorithm == Algorithm::kGrid && i < sequences.count; ++i) {
    const cudaError_t error = fill_unwritten<Cell>(sequences.of[i], stream);
    if (error != cudaSuccess) return error;
  }
  const auto kernel = kernels.at(plan.variant);
  const PersistentVariant variant = sizeof(T) == 2 ? kHalfVariants[plan.variant] : kFloatVariants[plan.variant];
  return launch_persistent(kernel, {kCellShape<Cell>, variant, sizeof(T), kBackward}, sequences, plan, stream);
}

template <class Cell, typename T>
cudaError_t launch_sequence_forward(const PerDirection<SequenceForwardArguments<T>>& sequences,
                                    const Plan& plan, cudaStream_t stream) {
  return launch_sequence<Cell, T, false>(kForwardKernels<Cell, T>, sequences, plan, stream);
}
template <class Cell, typename T>
cudaError_t launch_sequence_backward(const PerDirection<SequenceBackwardArguments<T>>& sequences,
                                     const Plan& plan, cudaStream_t stream) {
  return launch_sequence<Cell, T, true>(kBackwardKernels<Cell, T>, sequences, plan, stream);
}

}  // namespace lltm_ext

#define INSTANTIATE_RECURRENCE(Cell, T)                                                    \
  template cudaError_t lltm_ext::plan_sequence<Cell, T>(const Problem&, Algorithm, Plan&); \
  template cudaError_t lltm_ext::launch_sequence_forward<Cell, T>(                         \
      const PerDirection<SequenceForwardArguments<T>>&, const Plan&, cudaStream_t);        \
  template cudaError_t lltm_ext::launch_sequence_backward<Cell, T>(                        \
      const PerDirection<SequenceBackwardArguments<T>>&, const Plan&, cudaStream_t);
