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
  if constexpr (!LargeShape{kCellShape<Cell>, kSizes, kBackward, sizeof(T)}.exists()) {
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

template <class Cell, template <typename> class Arguments, typename T>
cudaError_t launch_large_layers(const PerDirection<Arguments<T>>& sequences, const LargeGrid& grid,
                                void* memory, cudaStream_t stream) {
  constexpr bool kBackward = std::is_same_v<Arguments<T>, SequenceBackwardArguments<T>>;
  constexpr std::make_index_sequence<kBackward ? std::size(kLargeBackwardTiles) : std::size(kLargeTiles)>
      kTiles;
  return run_large_layers(large_kernel<Cell, T, kBackward>(grid.tile, kTiles), kCellShape<Cell>, sequences,
                          grid, memory, stream);
}

}  // namespace lltm_ext

#define INSTANTIATE_LARGE_LAYER_FORWARD(Cell, T)                                                             \
  template cudaError_t lltm_ext::launch_large_layers<Cell>(const PerDirection<SequenceForwardArguments<T>>&, \
                                                           const LargeGrid&, void*, cudaStream_t);
#define INSTANTIATE_LARGE_LAYER(Cell, T)                    \
  INSTANTIATE_LARGE_LAYER_FORWARD(Cell, T)                  \
  template cudaError_t lltm_ext::launch_large_layers<Cell>( \
      const PerDirection<SequenceBackwardArguments<T>>&, const LargeGrid&, void*, cudaStream_t);
