// Products with block-diagonal weights in blocks that have whole heads of them. Such a block keeps only its
// own blocks of these weights. What the products take, its units exchange among themselves.
#pragma once

#include "recurrence/persistent/block.cuh"

namespace lltm_ext {

template <class Config>
struct HeadsOfBlock {
  static constexpr PersistentShape kShape = Config::kShape;
  static constexpr int kChunks = kShape.head_chunks(), kWeights = kShape.weights_of_heads();
  using Tile = typename Config::Tile;
  using Product = typename Config::Product;
  using Vectors = uint4[1][kChunks];

  WarpWeights<kWeights, kChunks, kShape.weights_of_heads_in_registers()> weights;
  ExchangeBuffer<typename Config::T, kShape.own_call().inputs, Tile::kUnits> given;
  const int row, element, vectors;  // a lane's: of the batch; the first of its units' values; those there are

  __device__ HeadsOfBlock(float* weights_memory, char* given_memory, const ThreadMap<Config>& map)
      : weights(weights_memory),
        given{given_memory},
        row(map.g),
        element(map.k_slice * kChunks * Tile::kChunkElements + map.t * Tile::kVectorElements),
        vectors(element < Tile::kUnits ? (Tile::kUnits - element - 1) / Tile::kChunkElements + 1 : 0) {
    given.clear();
  }

  // Loads weights of rows whose K begins with the block's first unit. Code that load_weights shared with this
  // would be compiled to other instructions in the kernels of all cells.
  template <class Row>
  __device__ __forceinline__ void load(const ThreadMap<Config>& map, int hidden, size_t to_lower, Row&& row) {
    const int left = hidden - map.first_unit - element;
    const int exist = left > 0 ? min(vectors, (left - 1) / Tile::kChunkElements + 1) : 0;
    const int unit = map.first_unit + map.unit_tile * 16 + map.g;
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const auto* upper = row(i, unit) + map.first_unit + element + c * Tile::kChunkElements;
        WeightChunk w = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (c < exist && unit < hidden) w.upper = __ldg(reinterpret_cast<const uint4*>(upper));
        if (c < exist && unit + 8 < hidden) w.lower = __ldg(reinterpret_cast<const uint4*>(upper + to_lower));
        if constexpr (Product::kRoundsWeights) w = {Product::round(w.upper), Product::round(w.lower)};
        weights.set(i, c, w);
      }
    }
  }
  // Reads a lane's vectors of the units from `first` on.
  template <class Buffer>
  __device__ __forceinline__ void read(Vectors& to, const Buffer& from, int input, int first) const {
    const char* const at = reinterpret_cast<const char*>(from.at(row, input) + first + element);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      to[0][c] = make_uint4(0, 0, 0, 0);
      if (c < vectors) to[0][c] = *reinterpret_cast<const uint4*>(at + c * kChunkBytes);
    }
  }
};

}  // namespace lltm_ext
