// Launches of the persistent kernels (engine.h). A .cu file for each cell and type includes this and says
// INSTANTIATE_RECURRENCE(Cell, T).
#pragma once

#include "common/fast_math.cuh"
#include "common/launch.cuh"
#include "recurrence/persistent/backward.cuh"
#include "recurrence/persistent/forward.cuh"
#include "recurrence/persistent/launch.h"

namespace lltm_ext {

template <typename T>
struct ProductOf;
template <>
struct ProductOf<float> {
  using type = IeeeProduct;
};
template <>
struct ProductOf<__half> {
  using type = Float16Product;
};
template <>
struct ProductOf<__nv_bfloat16> {
  using type = Bfloat16Product;
};

// How many gates' weights registers have room for, beside the `pieces` of 16 bytes that are exchanged; the
// other gates' lie in shared memory.
constexpr int gates_in_registers(const Variant& v, int gates, int pieces) {
  return std::clamp((255 - 55 - 4 * pieces) / (8 * v.chunks), 1, gates);
}

template <class Kernel, class Sequence>
cudaError_t launch_persistent(Kernel* kernel, const PerDirection<Sequence>& sequences, const Plan& plan,
                              size_t shared_bytes, cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  if (plan.algorithm == Algorithm::kCluster) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(plan.grid.members), 1, 1};
  } else {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.grid.groups * plan.grid.members, sequences.count);
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, sequences, plan.grid);
}

template <typename T>
struct VariantsOf {
  static constexpr const auto& value = kHalfVariants;
};
template <>
struct VariantsOf<float> {
  static constexpr const auto& value = kFloatVariants;
};

// The kernel of the i-th variant for T.
template <class Cell, typename T, size_t i, bool kBackward>
struct KernelOf {
  static constexpr Variant kVariant = VariantsOf<T>::value[i];
  static constexpr int kTiles = kVariant.unit_tiles, kChunks = kVariant.chunks;
  static constexpr bool kOnHopperOnly = kVariant.on_hopper_only;
  static constexpr int kExchanged = kBackward ? Cell::kGates : 1;  // values a unit
  static constexpr Exchange kWay =
      kVariant.algorithm == Algorithm::kCluster ? Exchange::kCluster : Exchange::kL2;
  static constexpr int kSharers = sharing_warps(kVariant.general, kTiles, kChunks, kExchanged);
  static constexpr int kPieces = Exchanger<kWay, T, kExchanged, kChunks, 16 * kTiles, kSharers>::kPieces;
  static constexpr int kInRegisters = gates_in_registers(kVariant, Cell::kGates, kPieces);
  using Math = typename MathOf<T>::type;
  using Product = std::conditional_t<kVariant.tf32, Tf32Product, typename ProductOf<T>::type>;
  using type =
      std::conditional_t<kBackward,
                         Backward<Cell, Math, Product, kWay, kTiles, kChunks, kInRegisters, kVariant.general>,
                         Forward<Cell, Math, Product, kWay, kTiles, kChunks, kInRegisters, kVariant.general>>;
};

// Calls f(KernelOf{}) for the kernel of a variant, which is one of the table.
template <class Cell, typename T, bool kBackward, size_t i = 0, class F>
auto with_kernel(const Variant& wanted, F&& f) {
  using Found = KernelOf<Cell, T, i, kBackward>;
  if constexpr (i + 1 < std::size(VariantsOf<T>::value)) {
    constexpr Variant v = Found::kVariant;
    const bool is_it = v.algorithm == wanted.algorithm && v.general == wanted.general &&
                       v.unit_tiles == wanted.unit_tiles && v.chunks == wanted.chunks &&
                       v.tf32 == wanted.tf32;
    return is_it ? f(Found{}) : with_kernel<Cell, T, kBackward, i + 1>(wanted, f);
  } else {
    return f(Found{});
  }
}

template <class Cell, typename T>
size_t persistent_shared_bytes(const Variant& variant, const GridShape& grid, int hidden, bool backward) {
  const GroupPlace group = {hidden, grid.members, 0, grid.rows};
  const auto bytes = [&](auto found) { return decltype(found)::type::Memory::bytes(group); };
  return backward ? with_kernel<Cell, T, true>(variant, bytes) : with_kernel<Cell, T, false>(variant, bytes);
}

template <class Cell, typename T>
cudaError_t persistent_compute_capability(int& capability) {
  using Any = KernelOf<Cell, T, 0, false>;
  return compute_capability<recurrence_persistent_forward_kernel<typename Any::type, T, Any::kOnHopperOnly>>(
      capability);
}

template <class Cell, typename T>
cudaError_t launch_sequence_forward(const PerDirection<SequenceForwardArguments<T>>& sequences,
                                    const Plan& plan, cudaStream_t stream) {
  if constexpr (kHasFusedSteps && sizeof(T) == 2) {
    if (plan.step.parts > 0) return launch_fused_steps_forward<Cell>(sequences.of[0], plan.step, stream);
  }
  for (int i = 0; plan.algorithm == Algorithm::kGrid && i < sequences.count; ++i) {
    const SequenceForwardArguments<T>& sequence = sequences.of[i];
    const size_t bytes = sequence.rows * sequence.hidden * sizeof(T);
    const cudaError_t error = cudaMemsetAsync(sequence.output, kUnwrittenByte, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  const size_t shared_bytes =
      persistent_shared_bytes<Cell, T>(plan.variant, plan.grid, sequences.of[0].hidden, /*backward=*/false);
  return with_kernel<Cell, T, false>(plan.variant, [&](auto found) {
    using Found = decltype(found);
    return launch_persistent(
        recurrence_persistent_forward_kernel<typename Found::type, T, Found::kOnHopperOnly>, sequences, plan,
        shared_bytes, stream);
  });
}

template <class Cell, typename T>
cudaError_t launch_sequence_backward(const PerDirection<SequenceBackwardArguments<T>>& sequences,
                                     const Plan& plan, cudaStream_t stream) {
  if constexpr (kHasFusedSteps && sizeof(T) == 2) {
    if (plan.step.parts > 0) return launch_fused_steps_backward<Cell>(sequences.of[0], plan.step, stream);
  }
  for (int i = 0; plan.algorithm == Algorithm::kGrid && i < sequences.count; ++i) {
    const SequenceBackwardArguments<T>& sequence = sequences.of[i];
    const size_t bytes = sequence.rows * Cell::kGates * sequence.hidden * sizeof(T);
    const cudaError_t error = cudaMemsetAsync(sequence.grad_gates, kUnwrittenByte, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  const size_t shared_bytes =
      persistent_shared_bytes<Cell, T>(plan.variant, plan.grid, sequences.of[0].hidden, /*backward=*/true);
  return with_kernel<Cell, T, true>(plan.variant, [&](auto found) {
    using Found = decltype(found);
    return launch_persistent(
        recurrence_persistent_backward_kernel<typename Found::type, T, Found::kOnHopperOnly>, sequences, plan,
        shared_bytes, stream);
  });
}

}  // namespace lltm_ext

#define INSTANTIATE_RECURRENCE(Cell, T)                                                                    \
  template size_t lltm_ext::persistent_shared_bytes<Cell, T>(const Variant&, const GridShape&, int, bool); \
  template cudaError_t lltm_ext::persistent_compute_capability<Cell, T>(int&);                             \
  template cudaError_t lltm_ext::launch_sequence_forward<Cell, T>(                                         \
      const PerDirection<SequenceForwardArguments<T>>&, const Plan&, cudaStream_t);                        \
  template cudaError_t lltm_ext::launch_sequence_backward<Cell, T>(                                        \
      const PerDirection<SequenceBackwardArguments<T>>&, const Plan&, cudaStream_t);
