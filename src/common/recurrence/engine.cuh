// Launches of the persistent kernels (engine.h). A .cu file for each cell and type includes this and says
// INSTANTIATE_RECURRENCE(Cell, T).
#pragma once

#include "common/recurrence/backward.cuh"
#include "common/recurrence/engine.h"
#include "common/recurrence/forward.cuh"
#include "common/recurrence/math.cuh"

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
cudaError_t launch_persistent(Kernel* kernel, const Sequence& sequence, const Plan& plan, size_t shared_bytes,
                              cudaStream_t stream) {
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
  config.gridDim = dim3(plan.grid.groups * plan.grid.members);
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, sequence, plan.grid);
}

// Calls f with the compile-time form of a variant of `variants`, the one that is `wanted`.
template <const auto& variants, size_t i = 0, class F>
cudaError_t with_variant(const Variant& wanted, F&& f) {
  if constexpr (i < std::size(variants)) {
    constexpr Variant v = variants[i];
    if (v.algorithm == wanted.algorithm && v.general == wanted.general && v.unit_tiles == wanted.unit_tiles &&
        v.chunks == wanted.chunks) {
      return f(std::integral_constant<size_t, i>{});
    }
    return with_variant<variants, i + 1>(wanted, f);
  } else {
    return cudaErrorInvalidConfiguration;
  }
}

template <typename T>
struct VariantsOf {
  static constexpr const auto& value = kHalfVariants;
};
template <>
struct VariantsOf<float> {
  static constexpr const auto& value = kFloatVariants;
};

template <class Cell, typename T>
cudaError_t recurrence_forward(const ForwardSequence<T>& sequence, const Plan& plan, cudaStream_t stream) {
  if (plan.algorithm == Algorithm::kGrid) {
    const size_t rows = sequence.rows;
    const cudaError_t error =
        cudaMemsetAsync(sequence.output, kUnwrittenByte, rows * sequence.hidden * sizeof(T), stream);
    if (error != cudaSuccess) return error;
  }
  return with_variant<VariantsOf<T>::value>(plan.variant, [&](auto index) {
    constexpr Variant v = VariantsOf<T>::value[index];
    constexpr Exchange kWay = v.algorithm == Algorithm::kCluster ? Exchange::kCluster : Exchange::kL2;
    constexpr int kSharers = sharing_warps(v.general, v.unit_tiles, v.chunks, 1);
    constexpr int kPieces = Exchanger<kWay, T, 1, v.chunks, 16 * v.unit_tiles, kSharers>::kPieces;
    using Kernel = Forward<Cell, typename MathOf<T>::type, typename ProductOf<T>::type, kWay, v.unit_tiles,
                           v.chunks, gates_in_registers(v, Cell::kGates, kPieces), v.general>;
    const GroupPlace group = {sequence.hidden, plan.grid.members, 0, plan.grid.rows};
    return launch_persistent(recurrence_forward_kernel<Kernel, T>, sequence, plan,
                             Kernel::shared_bytes(group), stream);
  });
}

template <class Cell, typename T>
cudaError_t recurrence_backward(const BackwardSequence<T>& sequence, const Plan& plan, cudaStream_t stream) {
  if (plan.algorithm == Algorithm::kGrid) {
    const size_t rows = sequence.rows;
    const cudaError_t error = cudaMemsetAsync(sequence.grad_gates, kUnwrittenByte,
                                              rows * Cell::kGates * sequence.hidden * sizeof(T), stream);
    if (error != cudaSuccess) return error;
  }
  return with_variant<VariantsOf<T>::value>(plan.variant, [&](auto index) {
    constexpr Variant v = VariantsOf<T>::value[index];
    constexpr Exchange kWay = v.algorithm == Algorithm::kCluster ? Exchange::kCluster : Exchange::kL2;
    constexpr int kSharers = sharing_warps(v.general, v.unit_tiles, v.chunks, Cell::kGates);
    constexpr int kPieces = Exchanger<kWay, T, Cell::kGates, v.chunks, 16 * v.unit_tiles, kSharers>::kPieces;
    using Kernel = Backward<Cell, typename MathOf<T>::type, typename ProductOf<T>::type, kWay, v.unit_tiles,
                            v.chunks, gates_in_registers(v, Cell::kGates, kPieces), v.general>;
    const GroupPlace group = {sequence.hidden, plan.grid.members, 0, plan.grid.rows};
    return launch_persistent(recurrence_backward_kernel<Kernel, T>, sequence, plan,
                             Kernel::shared_bytes(group), stream);
  });
}

}  // namespace lltm_ext

#define INSTANTIATE_RECURRENCE(Cell, T)                                                                \
  template cudaError_t lltm_ext::recurrence_forward<Cell, T>(const ForwardSequence<T>&, const Plan&,   \
                                                             cudaStream_t);                            \
  template cudaError_t lltm_ext::recurrence_backward<Cell, T>(const BackwardSequence<T>&, const Plan&, \
                                                              cudaStream_t);
