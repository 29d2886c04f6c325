// The launcher of large layers, declared in persistent/launch.h. A .cu file for each cell includes this and
// calls INSTANTIATE_LARGE_LAYER(Cell, T).
#pragma once

#include <array>
#include <iterator>
#include <utility>

#include "recurrence/large/forward.cuh"
#include "recurrence/large/launch.h"
#include "recurrence/persistent/launch.h"

namespace lltm_ext {

// The kernel of a tile, or null if the cell has none.
template <class Cell, typename T, int kTile>
const void* large_kernel() {
  if constexpr (LargeShape{kCellShape<Cell>, kLargeTiles[kTile]}.exists()) {
    using Config = hopper::LargeConfig<Cell, T, kTile>;
    return reinterpret_cast<const void*>(hopper::recurrence_large_forward_kernel<Config>);
  } else {
    return nullptr;
  }
}
template <class Cell, typename T, size_t... kTiles>
const void* large_kernel(int tile, std::index_sequence<kTiles...>) {
  return std::array{large_kernel<Cell, T, kTiles>()...}.at(tile);
}

template <class Cell, typename T>
cudaError_t launch_large_layers(const PerDirection<SequenceForwardArguments<T>>& sequences,
                                const LargeGrid& grid, void* arrivals, cudaStream_t stream) {
  constexpr std::make_index_sequence<std::size(kLargeTiles)> kTiles;
  return run_large_layers(large_kernel<Cell, T>(grid.tile, kTiles), kCellShape<Cell>, sequences, grid,
                          arrivals, stream);
}

}  // namespace lltm_ext

#define INSTANTIATE_LARGE_LAYER(Cell, T)                       \
  template cudaError_t lltm_ext::launch_large_layers<Cell, T>( \
      const PerDirection<SequenceForwardArguments<T>>&, const LargeGrid&, void*, cudaStream_t);
