// What the persistent kernels forward and backward share: the tile of a block, its threads, its memory.
//
// A block has eight warps and 16 * unit_tiles hidden units. A warp multiplies the weights of 16 units, or of
// several times as many, by one slice of K, for a tile of 8 rows of the batch. The partial sums of the slices
// meet in shared memory, where a thread takes over for a pair: two adjacent units of one row.
#pragma once

#include "common/fast_math.cuh"
#include "common/portable.h"
#include "common/ptx.cuh"
#include "recurrence/cell.h"
#include "recurrence/persistent/exchange.cuh"
#include "recurrence/persistent/pair.cuh"
#include "recurrence/persistent/product.cuh"
#include "recurrence/persistent/shape.h"
#include "recurrence/persistent/units.cuh"

namespace lltm_ext {

// A block's tile of the recurrent product.
template <typename T, int kUnitTiles, int kChunks>
struct BlockTile {
  static constexpr int kUnits = 16 * kUnitTiles;
  static constexpr int kVectorElements = 16 / sizeof(T);
  static constexpr int kChunkElements = kChunkBytes / sizeof(T);
  static constexpr int kPairs = kUnits * kRowTile / 2;
  static constexpr int kPairsPerThread = (kPairs + kBlockThreads - 1) / kBlockThreads;
  static constexpr int kSectors = kUnits * sizeof(T) / 32;  // 32-byte sectors of memory in a row of the tile
};

// A persistent kernel's parameters at compile time: a cell, a type, a variant of the type's table, a
// direction, and the type of SequenceForwardArguments::reset: bool, float, or NoReset.
struct NoReset {};
template <class Cell_, typename T_, int kVariantIndex, bool kBackward_, class Reset_ = NoReset,
          int kHeads_ = 1>
struct PersistentConfig {
  using Cell = Cell_;
  using T = T_;
  using Projection = projection_t<Cell, T>;
  static constexpr bool kHasResets =
      !kIsSame<Reset_, NoReset>;  // whether rows keep only some of their states
  using Reset = typename Conditional<kHasResets, Reset_, bool>::type;
  static constexpr bool kBackward = kBackward_;
  static constexpr PersistentVariant kVariant = variants_of<T>()[kVariantIndex];
  static constexpr PersistentShape kShape = {kCellShape<Cell>, kVariant, sizeof(T), kBackward};
  static constexpr int kHeads = kHeads_;  // into which the product with h is divided
  static constexpr bool kAnyRows = kVariant.any_rows;
  static constexpr int kUnitTiles = kVariant.unit_tiles, kChunks = kVariant.chunks;
  static constexpr int kGates = Cell::kGates;
  static constexpr int kSavedInGates = kShape.cell.saved_in_gates(), kExtra = kShape.cell.extra();
  static constexpr int kInputs = kShape.inputs(), kOutputs = kShape.outputs();
  static constexpr int kWarpTiles = kShape.warp_tiles(), kWarpOutputs = kOutputs * kWarpTiles;
  static constexpr ExchangeThrough kThrough = kShape.through();
  static constexpr int kArchitecture = kThrough == ExchangeThrough::kCluster ? 900 : 800;  // at least

  using Math = typename Conditional<kVariant.tf32, Tf32Math, typename MathOf<T>::type>::type;
  using Tile = BlockTile<T, kUnitTiles, kChunks>;
  template <int kInputs>
  using ExchangeOf = StateExchange<kThrough, T, kInputs, kChunks, Tile::kUnits, kShape.most_hidden(),
                                   kShape.sharing_warps(), kHeads>;
  using Exchange = ExchangeOf<kInputs>;
  using Product = typename Conditional<kVariant.tf32, Tf32Product, typename ProductOf<T>::type>::type;
  using Weights =
      WarpWeights<kShape.weights() * kWarpTiles, kChunks, kShape.weights_in_registers() * kWarpTiles>;
  static constexpr bool kHasWholeHeads = kShape.has_whole_heads();
  static constexpr int kInputsPerProduct = kShape.inputs_per_product();
  using WarpProduct = lltm_ext::WarpProduct<Product, kWarpOutputs, kInputsPerProduct, kChunks>;

  // Whether the kernel is compiled for an architecture. If not, it is never launched.
  static constexpr bool is_compiled(int architecture) {
    if (!kShape.exists()) return false;
    return kVariant.on_hopper_only ? kForHopper : architecture >= kArchitecture;
  }
};

// What a thread works on.
template <class Config>
struct ThreadMap {
  using Tile = typename Config::Tile;
  int lane, g, t;          // the lane in the warp, and its coordinates in a product (product.cuh)
  int k_slice, unit_tile;  // the warp's part of the product; its first tile
  int first_unit;          // the block's first unit
  int first_row, end_row;  // the group's rows of the batch
  int tiles;               // row tiles in the group
  int element, vectors;    // the lane's first element of K, and its vectors below the hidden size

  __device__ ThreadMap(const GroupGrid& grid, int batch, int hidden, int first_group) {
    constexpr int kKSlices = Config::kShape.k_slices();
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    k_slice = warp % kKSlices, unit_tile = warp / kKSlices * Config::kWarpTiles;
    first_unit = static_cast<int>(blockIdx.x) % grid.group_blocks * Tile::kUnits;
    first_row = (first_group + static_cast<int>(blockIdx.x) / grid.group_blocks) * grid.rows;
    end_row = min(first_row + grid.rows, batch);
    tiles = (end_row - first_row + kRowTile - 1) / kRowTile;
    element = k_slice * Config::kChunks * Tile::kChunkElements + t * Tile::kVectorElements;
    vectors = element < hidden ? min(Config::kChunks, (hidden - element - 1) / Tile::kChunkElements + 1) : 0;
  }

  __device__ Group group(const GroupGrid& grid, int hidden) const {
    return {hidden, grid.group_blocks, static_cast<int>(blockIdx.x) % grid.group_blocks, end_row - first_row};
  }

  // The row and unit of the thread's i-th pair in a tile.
  __device__ __forceinline__ int pair_row(int i) const { return pair(i) / (Tile::kUnits / 2); }
  __device__ __forceinline__ int pair_unit(int i) const { return pair(i) % (Tile::kUnits / 2) * 2; }
  __device__ __forceinline__ bool has_pair(int i, int hidden) const {
    return pair(i) < Tile::kPairs && first_unit + pair_unit(i) < hidden;
  }
  // If a block has all units, the pairs of a warp are in one row, and most groups have few rows.
  __device__ __forceinline__ bool warp_has_pair(int i) const {
    if (Config::kThrough == ExchangeThrough::kBlock && first_row + pair_row(i) >= end_row) return false;
    return Tile::kPairs % kBlockThreads == 0 || i * kBlockThreads + (threadIdx.x & ~31u) < Tile::kPairs;
  }

 private:
  __device__ __forceinline__ static int pair(int i) { return threadIdx.x + i * kBlockThreads; }
};

// Loads a warp's weights: rows g and g + 8 of its 16 units, for each gate and each product with the cell's
// own weights that has all of K. `row(i, unit)` is the start of row g, and row g + 8 follows `to_lower`
// elements later.
template <class Config, class Row>
__device__ __forceinline__ void load_weights(typename Config::Weights& weights, const ThreadMap<Config>& map,
                                             int hidden, size_t to_lower, Row&& row) {
  using Product = typename Config::Product;
#pragma unroll
  for (int i = 0; i < Config::kShape.weights() * Config::kWarpTiles; ++i) {
    const int unit = map.first_unit + (map.unit_tile + i % Config::kWarpTiles) * 16 + map.g;
#pragma unroll
    for (int c = 0; c < Config::kChunks; ++c) {
      const auto* upper = row(i / Config::kWarpTiles, unit) + map.element + c * Config::Tile::kChunkElements;
      WeightChunk w = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
      if (c < map.vectors && unit < hidden) w.upper = __ldg(reinterpret_cast<const uint4*>(upper));
      if (c < map.vectors && unit + 8 < hidden)
        w.lower = __ldg(reinterpret_cast<const uint4*>(upper + to_lower));
      if constexpr (Product::kRoundsWeights) w = {Product::round(w.upper), Product::round(w.lower)};
      weights.set(i, c, w);
    }
  }
}

// The partial sums of a tile: [k_slices][kOutputs][kRowTile][sum_stride] floats in shared memory.
template <class Config>
struct PartialSums {
  static constexpr int kOutputs = Config::kOutputs, kSlices = Config::kShape.k_slices(),
                       kStride = Config::kShape.sum_stride(), kSize = Config::kShape.partial_sums();

  // A warp's tiles of an output follow each other.
  template <int kCount>
  __device__ static __forceinline__ void write(float* tile, const float (&sums)[kCount][4],
                                               const ThreadMap<Config>& map) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      constexpr int kTiles = Config::kWarpTiles;
      const int out = map.k_slice * (kCount / kTiles) + i / kTiles, unit_tile = map.unit_tile + i % kTiles;
      float* at = tile + (out * kRowTile + 2 * map.t) * kStride + 16 * unit_tile + map.g;
      at[0] = sums[i][0];
      at[kStride] = sums[i][1];
      at[8] = sums[i][2];
      at[kStride + 8] = sums[i][3];
    }
  }

  // The total of a pair. The order of the slices is fixed, and so are the bits of the result.
  template <int kCount = kOutputs>
  __device__ static __forceinline__ float2 total(const float* tile, int out, int row, int unit) {
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const float2 part =
          *reinterpret_cast<const float2*>(tile + ((slice * kCount + out) * kRowTile + row) * kStride + unit);
      sum.x += part.x;
      sum.y += part.y;
    }
    return sum;
  }
};

// A block's shared memory: two tiles of partial sums; each warp's scratch and the weights that don't fit in
// its registers; what the rows of several tiles carry; the exchange's buffers.
template <class Config>
class SharedStorage {
  static constexpr PersistentShape kShape = Config::kShape;
  static constexpr int kScratch = 2 * kShape.partial_sums();
  static constexpr int kWeights = kScratch + kBlockWarps * kShape.warp_scratch();
  static constexpr int kWeightsOfHeads = kWeights + kBlockWarps * kShape.warp_weights();
  static constexpr int kRowParts = kWeightsOfHeads + kBlockWarps * kShape.warp_weights_of_heads();
  static constexpr int kLiveStates = kRowParts + kShape.row_parts();

 public:
  __device__ explicit SharedStorage(float* base) : base_(base) {}
  __device__ float* sums() const { return base_; }
  __device__ float* scratch() const { return base_ + kScratch + threadIdx.x / 32 * kShape.warp_scratch(); }
  __device__ float* weights() const { return base_ + kWeights + threadIdx.x / 32 * kShape.warp_weights(); }
  __device__ float* weights_of_heads() const {
    return base_ + kWeightsOfHeads + threadIdx.x / 32 * kShape.warp_weights_of_heads();
  }
  __device__ RowParts row_parts() const {
    return {reinterpret_cast<char*>(base_ + kRowParts), kShape.most_row_parts()};
  }
  __device__ float* live_states() const { return base_ + kLiveStates; }
  __device__ char* exchange(int rows) const {
    return reinterpret_cast<char*>(live_states() + rows * kShape.live_states_per_row());
  }
  __device__ char* second_exchange(int rows) const {
    return exchange(rows) + kShape.exchange_bytes(kShape.inputs());
  }
  __device__ char* given_to_heads(int rows) const {
    return second_exchange(rows) + kShape.exchange_bytes(kShape.exchanged_call().inputs);
  }

 private:
  float* const base_;
};

// Prefetches into L2 what the block reads or writes kStepsAhead steps later; otherwise polling would fetch
// these lines from memory. Warps without pairs do this, or all warps if each has some.
constexpr int kStepsAhead = 3;

template <class Config, int kPlanes>
class L2Prefetcher {
  using T = typename Config::T;
  using Tile = typename Config::Tile;
  static constexpr int kFirst = Tile::kPairs < kBlockThreads ? Tile::kPairs : 0;
  static constexpr int kThreads = kBlockThreads - kFirst;
  static constexpr int kSectors = kRowTile * kPlanes * Tile::kSectors;
  static constexpr int kPerThread = kSectors ? (kSectors + kThreads - 1) / kThreads : 1;

 public:
  __device__ L2Prefetcher() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) row_[i] = 1 << 30;  // beyond all rows
  }

  // Adds arrays [rows, planes, H], whose first `used` planes are fetched: kPlanes of T in total. A null array
  // has none.
  class Arrays {
   public:
    __device__ Arrays(L2Prefetcher& prefetcher, const ThreadMap<Config>& map, int hidden)
        : prefetcher_(prefetcher), map_(map), hidden_(hidden) {}
    template <typename X>
    __device__ void add(const X* base, int planes) {
      add(base, planes, planes);
    }
    template <typename X>
    __device__ void add(const X* base, int planes, int used) {
      constexpr int kSize = sizeof(X), kSectors = Tile::kSectors * kSize / static_cast<int>(sizeof(T));
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int at = static_cast<int>(threadIdx.x) - kFirst + i * kThreads;
        const int sector = at / kRowTile - first_sector_, plane = sector / kSectors;
        const int j = map_.first_unit + sector % kSectors * (32 / kSize);
        if (!base || at < 0 || sector < 0 || plane >= used || j >= hidden_) continue;
        const int row = map_.first_row + at % kRowTile;
        prefetcher_.address_[i] =
            reinterpret_cast<const char*>(base + (static_cast<int64_t>(row) * planes + plane) * width() + j);
        prefetcher_.row_[i] = row;
        prefetcher_.stride_[i] = planes * width() * kSize;
      }
      first_sector_ += used * kSectors;
    }

   private:
    __device__ int width() const { return Config::kHeads * hidden_; }

    L2Prefetcher& prefetcher_;
    const ThreadMap<Config>& map_;
    int hidden_, first_sector_ = 0;
  };

  // If every step has `rows` rows (negative in reverse), addresses move from step to step.
  __device__ __forceinline__ void begin(int64_t first_row, int end_row) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (row_[i] < end_row) address_[i] += first_row * stride_[i];
    }
  }
  __device__ __forceinline__ void fetch_next(int64_t rows, int end_row) {
    if (static_cast<int>(threadIdx.x) < kFirst) return;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (row_[i] >= end_row) continue;
      prefetch_global_l2(address_[i]);
      address_[i] += rows * stride_[i];
    }
  }

  __device__ __forceinline__ void fetch(const StepRows& rows, int tile, int end_row) const {
    if (static_cast<int>(threadIdx.x) < kFirst) return;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (row_[i] + tile * kRowTile < min(end_row, rows.count)) {
        prefetch_global_l2(address_[i] + (rows.first + tile * kRowTile) * stride_[i]);
      }
    }
  }

 private:
  const char* address_[kPerThread];           // a sector's, in the first tile of a step that begins at row 0
  int row_[kPerThread], stride_[kPerThread];  // stride_: bytes from row to row
};

}  // namespace lltm_ext
