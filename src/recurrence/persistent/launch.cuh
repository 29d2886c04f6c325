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
template <class Cell, typename T>
constexpr bool kHasLargeForward = sizeof(T) == 2 || kIsBounded<Cell>;
#else
template <typename T>
constexpr bool kHasFusedSteps = false;
template <class Cell, typename T>
constexpr bool kHasLargeForward = false;
#endif

template <typename T, bool kBackward>
using PersistentKernel = void (*)(
    PerDirection<std::conditional_t<kBackward, SequenceBackwardArguments<T>, SequenceForwardArguments<T>>>,
    GroupGrid);

// Null if the cell has no kernel of the variant.
template <class Config>
constexpr PersistentKernel<typename Config::T, Config::kBackward> persistent_kernel() {
  if constexpr (!Config::kShape.exists()) {
    return nullptr;
  } else if constexpr (Config::kBackward) {
    return recurrence_persistent_backward_kernel<Config>;
  } else {
    return recurrence_persistent_forward_kernel<Config>;
  }
}
// The kernels of T's variants, in the order of their table.
template <class Cell, typename T, bool kBackward, size_t... kVariants>
constexpr auto persistent_kernels(std::index_sequence<kVariants...>) {
  return std::array{persistent_kernel<PersistentConfig<Cell, T, kVariants, kBackward>>()...};
}
template <typename T>
using VariantIndices =
    std::make_index_sequence<sizeof(T) == 2 ? std::size(kHalfVariants) : std::size(kFloatVariants)>;
template <class Cell, typename T>
constexpr auto kForwardKernels = persistent_kernels<Cell, T, false>(VariantIndices<T>());
template <class Cell, typename T>
constexpr auto kBackwardKernels = persistent_kernels<Cell, T, true>(VariantIndices<T>());

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

template <class Cell, typename T, class Arguments, class Kernels>
cudaError_t launch_sequence(const Kernels& kernels, const PerDirection<Arguments>& sequences,
                            const Plan& plan, cudaStream_t stream) {
  if constexpr (kHasFusedSteps<T>) {
    if (plan.fused_step.split_k > 0) {
      return launch_fused_steps<Cell>(sequences.of[0], plan.fused_step, stream);
    }
  }
  if constexpr (std::is_same_v<T, float>) {
    if (plan.small_batch.rows > 0)
      return launch_small_batch_steps<Cell>(sequences.of[0], plan.small_batch, stream);
  }
  const auto kernel = kernels.at(plan.variant);
  return launch_persistent(reinterpret_cast<const void*>(kernel), kCellShape<Cell>, sequences, plan, stream);
}

template <class Cell, typename T>
cudaError_t launch_sequence_forward(const PerDirection<SequenceForwardArguments<T>>& sequences,
                                    const Plan& plan, void* links, cudaStream_t stream) {
  if constexpr (kHasLargeForward<Cell, T>) {
    if (plan.large.tile >= 0) return launch_large_layers<Cell>(sequences, plan.large, links, stream);
  }
  return launch_sequence<Cell, T>(kForwardKernels<Cell, T>, sequences, plan, stream);
}
template <class Cell, typename T>
cudaError_t launch_sequence_backward(const PerDirection<SequenceBackwardArguments<T>>& sequences,
                                     const Plan& plan, void* links, cudaStream_t stream) {
  if constexpr (kHasFusedSteps<T>) {
    if (plan.large.tile >= 0) return launch_large_layers<Cell>(sequences, plan.large, links, stream);
  }
  return launch_sequence<Cell, T>(kBackwardKernels<Cell, T>, sequences, plan, stream);
}

}  // namespace lltm_ext

#define INSTANTIATE_RECURRENCE(Cell, T)                                                    \
  template cudaError_t lltm_ext::plan_sequence<Cell, T>(const Problem&, Algorithm, Plan&); \
  template cudaError_t lltm_ext::launch_sequence_forward<Cell, T>(                         \
      const PerDirection<SequenceForwardArguments<T>>&, const Plan&, void*, cudaStream_t); \
  template cudaError_t lltm_ext::launch_sequence_backward<Cell, T>(                        \
      const PerDirection<SequenceBackwardArguments<T>>&, const Plan&, void*, cudaStream_t);
