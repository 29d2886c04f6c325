// What the kernels forward and backward share: who does what in a block.
//
// A block has eight warps and 16 * kUnitTiles hidden units. A warp multiplies the weights of 16 units by one
// slice of the reduction, for a tile of 8 rows of the batch. The sums of the slices meet in shared memory,
// where a thread takes over for a pair: two neighbouring units of one row.
#pragma once

#include <cuda_runtime.h>

#include "common/portable.h"
#include "recurrence/cell.h"
#include "recurrence/persistent/exchange.cuh"
#include "recurrence/persistent/pair.cuh"
#include "recurrence/persistent/product.cuh"

namespace lltm_ext {

constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / 32;

// Whether the code for an architecture has the kernel. One that it lacks is never launched.
template <class Kernel, bool kOnHopperOnly, int kArchitecture>
constexpr bool kIsCompiled = kOnHopperOnly ? kForHopper : kArchitecture >= Kernel::kArchitecture;

template <typename T, int kUnitTiles, int kChunks>
struct BlockShape {
  static constexpr int kSlices = kBlockWarps / kUnitTiles;  // of the reduction
  static constexpr int kUnits = 16 * kUnitTiles;
  static constexpr int kStride = kUnits + 4;  // of sums in shared memory, free of bank conflicts
  static constexpr int kPerPiece = 16 / sizeof(T);
  static constexpr int kPerChunk = kChunkBytes / sizeof(T);
  static constexpr int kMaxHidden = kSlices * kChunks * kPerChunk;
  static constexpr int kPairs = kUnits * kRowTile / 2;  // in a tile of rows
  static constexpr int kPairsPerThread = (kPairs + kBlockThreads - 1) / kBlockThreads;
  static constexpr int kSectors = kUnits * sizeof(T) / 32;  // of memory, that the units of a row fill
};

// A thread's place.
template <class Shape, int kChunks>
struct Place {
  int lane, g, t;          // of the warp; of a product (product.cuh)
  int slice, unit_tile;    // of the warp
  int first_unit;          // of the block
  int first_row, end_row;  // of the group, in the batch
  int tiles;
  int element, valid;  // of the reduction: the lane's first, and its pieces below the hidden size

  __device__ Place(const GridShape& grid, int batch, int hidden) {
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    slice = warp % Shape::kSlices, unit_tile = warp / Shape::kSlices;
    first_unit = static_cast<int>(blockIdx.x) % grid.members * Shape::kUnits;
    first_row = static_cast<int>(blockIdx.x) / grid.members * grid.rows;
    end_row = min(first_row + grid.rows, batch);
    tiles = (end_row - first_row + kRowTile - 1) / kRowTile;
    element = slice * kChunks * Shape::kPerChunk + t * Shape::kPerPiece;
    valid = element < hidden ? min(kChunks, (hidden - element - 1) / Shape::kPerChunk + 1) : 0;
  }

  __device__ GroupPlace in_group(const GridShape& grid, int hidden) const {
    return {hidden, grid.members, static_cast<int>(blockIdx.x) % grid.members, end_row - first_row};
  }

  // The thread's i-th pair in a tile.
  __device__ __forceinline__ int pair_row(int i) const { return pair(i) / (Shape::kUnits / 2); }
  __device__ __forceinline__ int pair_unit(int i) const { return pair(i) % (Shape::kUnits / 2) * 2; }
  __device__ __forceinline__ bool has_pair(int i, int hidden) const {
    return pair(i) < Shape::kPairs && first_unit + pair_unit(i) < hidden;
  }

 private:
  __device__ __forceinline__ static int pair(int i) { return threadIdx.x + i * kBlockThreads; }
};

// Loads a warp's weights: for each gate rows g and g + 8 of its 16 units. `row(gate)` is where row g starts,
// `lower` how far row g + 8 lies from it.
template <class Product, class Shape, int kGates, int kChunks, class Weights, class Position, class Row>
__device__ __forceinline__ void load_weights(Weights& weights, const Position& place, int hidden,
                                             size_t lower, Row&& row) {
  const int unit = place.first_unit + place.unit_tile * 16 + place.g;
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const auto* upper = row(gate, unit) + place.element + c * Shape::kPerChunk;
      WeightChunk w = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
      if (c < place.valid && unit < hidden) w.upper = __ldg(reinterpret_cast<const uint4*>(upper));
      if (c < place.valid && unit + 8 < hidden)
        w.lower = __ldg(reinterpret_cast<const uint4*>(upper + lower));
      if constexpr (Product::kRounds) w = {Product::round(w.upper), Product::round(w.lower)};
      weights.set(gate, c, w);
    }
  }
}

// The warps' sums of a tile of rows: [kSlices][kOut][kRowTile][kStride] floats, units side by side.
template <class Shape, int kOut>
struct TileSums {
  static constexpr int kSize = Shape::kSlices * kOut * kRowTile * Shape::kStride;

  template <class Position>
  __device__ static __forceinline__ void write(float* tile, const float (&sums)[kOut][4],
                                               const Position& place) {
#pragma unroll
    for (int out = 0; out < kOut; ++out) {
      float* at = tile + ((place.slice * kOut + out) * kRowTile + 2 * place.t) * Shape::kStride +
                  16 * place.unit_tile + place.g;
      at[0] = sums[out][0];
      at[Shape::kStride] = sums[out][1];
      at[8] = sums[out][2];
      at[Shape::kStride + 8] = sums[out][3];
    }
  }

  // Of a pair, in the order of the slices.
  __device__ static __forceinline__ float2 read(const float* tile, int out, int row, int unit) {
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int slice = 0; slice < Shape::kSlices; ++slice) {
      const float2 part = *reinterpret_cast<const float2*>(
          tile + ((slice * kOut + out) * kRowTile + row) * Shape::kStride + unit);
      sum.x += part.x;
      sum.y += part.y;
    }
    return sum;
  }
};

// A block's shared memory, part after part: two tiles of sums; of each warp its scratch and those weights
// that registers have no room for; kCells values a row of the group; what blocks exchange.
template <class Sums, class Warp, class Weights, class Exchanger, int kCells>
class BlockMemory {
  static constexpr int kScratch = 2 * Sums::kSize, kWeights = kScratch + kBlockWarps * Warp::kScratch;
  static constexpr int kFixed = kWeights + kBlockWarps * Weights::kShared;

 public:
  static size_t bytes(const GroupPlace& group) {
    return sizeof(float) * (kFixed + group.rows * kCells) + Exchanger::shared_bytes(group);
  }

  __device__ explicit BlockMemory(float* base) : base_(base) {}
  __device__ float* sums() const { return base_; }
  __device__ float* scratch() const { return base_ + kScratch + threadIdx.x / 32 * Warp::kScratch; }
  __device__ float* weights() const { return base_ + kWeights + threadIdx.x / 32 * Weights::kShared; }
  __device__ float* cells() const { return base_ + kFixed; }
  __device__ char* exchanged(int rows) const { return reinterpret_cast<char*>(cells() + rows * kCells); }

 private:
  float* const base_;
};

// Fetches into L2 what comes from memory kStepsAhead steps later, and what is written then: a line that is
// not in L2 would be fetched by those who poll it. Done by the warps that have no pairs; if all have, by all.
constexpr int kStepsAhead = 3;

template <class Shape, typename T, int kPlanes>
class Prefetcher {
  static constexpr int kFirst = Shape::kPairs < kBlockThreads ? Shape::kPairs : 0;
  static constexpr int kThreads = kBlockThreads - kFirst;
  static constexpr int kSectors =
      kRowTile * kPlanes * Shape::kSectors;  // of a tile, shared out among threads
  static constexpr int kOwn = kSectors ? (kSectors + kThreads - 1) / kThreads : 1;

 public:
  // Takes arrays [rows, planes, H] until their planes make kPlanes; a null array is not fetched.
  template <class Position>
  class Adder {
   public:
    __device__ Adder(Prefetcher& prefetcher, const Position& place, int hidden)
        : prefetcher_(prefetcher), place_(place), hidden_(hidden) {}
    __device__ void add(const T* base, int planes) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int at = static_cast<int>(threadIdx.x) - kFirst + i * kThreads;
        const int plane = at / kRowTile / Shape::kSectors - first_plane_;
        const int j =
            place_.first_unit + at / kRowTile % Shape::kSectors * (32 / static_cast<int>(sizeof(T)));
        if (!base || at < 0 || plane < 0 || plane >= planes || j >= hidden_) continue;
        const int row = place_.first_row + at % kRowTile;
        prefetcher_.address_[i] = base + (static_cast<int64_t>(row) * planes + plane) * hidden_ + j;
        prefetcher_.row_[i] = row;
        prefetcher_.stride_[i] = planes * hidden_;
      }
      first_plane_ += planes;
    }

   private:
    Prefetcher& prefetcher_;
    const Position& place_;
    int hidden_, first_plane_ = 0;
  };

  __device__ __forceinline__ void fetch(const StepRows& rows, int tile, int end_row) const {
    if (static_cast<int>(threadIdx.x) < kFirst) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (row_[i] + tile * kRowTile < min(end_row, rows.count)) {
        prefetch(address_[i] + (rows.first + tile * kRowTile) * stride_[i]);
      }
    }
  }

 private:
  const T* address_[kOwn];  // of 32 bytes, in the first tile if the step began at row 0
  int row_[kOwn], stride_[kOwn];

 public:
  __device__ Prefetcher() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) row_[i] = 1 << 30;  // beyond all rows
  }
};

}  // namespace lltm_ext
