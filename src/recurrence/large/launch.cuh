// The launcher of large layers, declared in persistent/launch.h. A .cu file for each cell includes this and
// calls INSTANTIATE_LARGE_LAYER(Cell, T).
#pragma once

#include <array>
#include <iterator>
#include <utility>

#include "recurrence/large/backward.cuh"
#include "recurrence/large/forward.cuh"
#include "recurrence/large/launch.h"
#include "recurrence/persistent/launch.h"

namespace lltm_ext {

// The kernel of a tile, or null if the cell has none.
template <class Cell, typename T, bool kBackward, int kTile>
const void* large_kernel() {
  constexpr LargeTile kSizes = kBackward ? kLargeBackwardTiles[kTile] : kLargeTiles[kTile];
  if constexpr (!LargeShape{kCellShape<Cell>, kSizes, kBackward}.exists()) {
    return nullptr;
  } else if constexpr (kBackward) {
    using Config = hopper::LargeBackwardConfig<Cell, T, kTile>;
    return reinterpret_cast<const void*>(hopper::recurrence_large_backward_kernel<Config>);
  } else {
    using Config = hopper::LargeConfig<Cell, T, kTile>;
    return reinterpret_cast<const void*>(hopper::recurrence_large_forward_kernel<Config>);
  }
}
template <class Cell, typename T, bool kBackward, size_t... kTiles>
const void* large_kernel(int tile, std::index_sequence<kTiles...>) {
  return std::array{large_kernel<Cell, T, kBackward, kTiles>()...}.at(tile);
}

template <class Cell, typename T>
cudaError_t launch_large_layer(const SequenceForwardArguments<T>& s, const LargeGrid& grid, void* arrivals,
                               cudaStream_t stream) {
  constexpr std::make_index_sequence<std::size(kLargeTiles)> kTiles;
  return run_large_layer(large_kernel<Cell, T, false>(grid.tile, kTiles), kCellShape<Cell>, s, grid, arrivals,
                         stream);
}
template <class Cell, typename T>
cudaError_t launch_large_layer(const SequenceBackwardArguments<T>& s, const LargeGrid& grid, void* arrivals,
                               cudaStream_t stream) {
  constexpr std::make_index_sequence<std::size(kLargeBackwardTiles)> kTiles;
  return run_large_layer(large_kernel<Cell, T, true>(grid.tile, kTiles), kCellShape<Cell>, s, grid, arrivals,
                         stream);
}

}  // namespace lltm_ext

#define INSTANTIATE_LARGE_LAYER(Cell, T)                                                          \
  template cudaError_t lltm_ext::launch_large_layer<Cell, T>(const SequenceForwardArguments<T>&,  \
                                                             const LargeGrid&, void*, cudaStream_t); \
  template cudaError_t lltm_ext::launch_large_layer<Cell, T>(const SequenceBackwardArguments<T>&, \
                                                             const LargeGrid&, void*, cudaStream_t);
