// What the warpgroups of a large layer's kernel share: its parameters, its memory, its barriers.
//
// A block has four warpgroups. Two multiply, with their weights in registers; one computes the cell; the
// warps of the last one load h. A group's tiles of rows take turns, so that each warpgroup works on another
// tile.
#pragma once

#include "common/fast_math.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/split.cuh"
#include "common/ptx.cuh"
#include "recurrence/cell.h"
#include "recurrence/large/arguments.h"
#include "recurrence/large/shape.h"
#include "recurrence/persistent/pair.cuh"

namespace lltm_ext {
namespace hopper {

// A kernel's parameters at compile time: a cell, a type, an index in kLargeTiles or kLargeBackwardTiles, and
// whether rows may lose their states before a step.
template <class Cell_, typename T_, int kTileIndex, bool kHasResets_ = false, bool kBackward = false>
struct LargeConfig {
  using Cell = Cell_;
  using T = T_;
  // Of the products. h and weights of float32 are scaled (LargeExchange, LargeRowScale).
  using Operand = typename Conditional<sizeof(T) == 2, T, __half>::type;
  static constexpr bool kIsScaled = sizeof(T) > 2;
  using Math = typename Conditional<kIsScaled, LargeTf32Math, typename MathOf<T>::type>::type;
  static constexpr bool kHasResets = kHasResets_;
  static constexpr LargeTile kTile = kBackward ? kLargeBackwardTiles[kTileIndex] : kLargeTiles[kTileIndex];
  static constexpr LargeShape kShape = {kCellShape<Cell>, kTile, kBackward, sizeof(T)};
  static constexpr int kClusterBlocks = kShape.cluster_blocks();
  static constexpr int kRows = kTile.rows, kRounds = kTile.rounds, kGates = Cell::kGates;
  static constexpr int kStages = kShape.stages(), kStageBytes = kShape.stage_bytes(),
                       kHTileBytes = kShape.h_tile_bytes(), kPartialBytes = kShape.partial_bytes();
  static constexpr int kRegisterTiles = kShape.register_tiles(), kSharedTiles = kShape.shared_tiles();
  static constexpr int kProductWarpgroups = 2, kCellWarpgroup = 2, kLoaderWarpgroup = 3;
  static_assert(kShape.exists() && kShape.shared_bytes() <= LargeShape::kMostShared - 1024);
  static_assert(kShape.round_stages() % LargeShape::kLoadingWarps == 0);
  static_assert(2 * kTile.product_registers + kTile.cell_registers + kTile.loader_registers <= 512);
};

template <class Cell, typename T, int kTileIndex, bool kHasResets = false>
using LargeBackwardConfig = LargeConfig<Cell, T, kTileIndex, kHasResets, /*kBackward=*/true>;

// Where a block is in its group.
template <class Config>
struct LargePlace {
  static constexpr int kClusterBlocks = Config::kClusterBlocks;
  int group, cluster, rank;  // rank: the block's in its cluster

  __device__ explicit LargePlace(int first_group, int group_pairs)
      : group(first_group + cluster_number() / clusters_of(group_pairs)),
        cluster(cluster_number() % clusters_of(group_pairs)),
        rank(static_cast<int>(cluster_rank())) {}
  // The first of the 16 units whose cells a block of the cluster computes.
  __device__ int first_unit(int of_rank) const {
    return LargeShape::kUnits * (kClusterBlocks * cluster + of_rank);
  }

 private:
  __device__ static int cluster_number() { return static_cast<int>(blockIdx.x) / kClusterBlocks; }
  __device__ static int clusters_of(int pairs) { return pairs / (kClusterBlocks / 2); }
};

// Stages and weights are first: tiles with the 128-byte swizzle start at multiples of 1,024 bytes.
template <class Config>
class LargeStorage {
  static constexpr LargeShape kShape = Config::kShape;
  static constexpr int kRing = kShape.weight_bytes(),
                       kPartials = kRing + Config::kStages * Config::kStageBytes,
                       kLive = kPartials + Config::kClusterBlocks * Config::kPartialBytes,
                       kSums = kLive + kShape.live_bytes(), kInputs = kSums + kShape.sum_bytes(),
                       kBarriers = kInputs + Config::kTile.rounds_ahead * kShape.input_bytes();

 public:
  __device__ explicit LargeStorage(unsigned char* base) : base_(base) {}

  __device__ unsigned char* weights(int warpgroup) const {
    return base_ + warpgroup * Config::kSharedTiles * LargeShape::kTileBytes;
  }
  __device__ unsigned char* stage(int i) const { return base_ + kRing + i * Config::kStageBytes; }
  // The sums of a part of K, from the block of that rank.
  __device__ unsigned char* partials(int rank) const {
    return base_ + kPartials + rank * Config::kPartialBytes;
  }
  __device__ unsigned char* live() const { return base_ + kLive; }
  __device__ unsigned char* sums() const { return base_ + kSums; }
  __device__ unsigned char* inputs() const { return base_ + kInputs; }

  __device__ uint64_t* full(int stage) const { return barriers() + stage; }
  __device__ uint64_t* empty(int stage) const { return full(LargeShape::kMostStages + stage); }
  __device__ uint64_t* partials_full() const { return empty(LargeShape::kMostStages); }
  // Whether the cells of the block of that rank have read what this one sent.
  __device__ uint64_t* partials_free(int rank) const { return partials_full() + 1 + rank; }
  __device__ uint64_t* stored(int round) const { return partials_free(Config::kClusterBlocks) + round; }

  // One thread calls this.
  __device__ void init_barriers() const {
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(full(i), 1);
      mbarrier_init(empty(i), Config::kProductWarpgroups);
    }
    // One thread expects bytes. Forward, this block's own warps arrive, too.
    mbarrier_init(partials_full(), kShape.backward ? 1 : 4 + 1);
    for (int i = 0; i < Config::kClusterBlocks; ++i) mbarrier_init(partials_free(i), 4);
    for (int i = 0; i < Config::kRounds; ++i) mbarrier_init(stored(i), 4);
    fence_mbarrier_init();
  }

 private:
  __device__ uint64_t* barriers() const { return reinterpret_cast<uint64_t*>(base_ + kBarriers); }

  unsigned char* const base_;
};

// A sum's place: lane 4 * eighth + quad of a product's warp stores 16 bytes of each eighth row of the batch
// into slot (eight rows, warp, this). Neither these warps nor the cells' have bank conflicts.
__device__ __forceinline__ int partial_slot(int warp, int eighth, int quad) {
  return (4 * eighth + quad) ^ ((warp >> 1) << 2) ^ ((warp & 1) << 1) ^ (eighth >> 1 & 1);
}
constexpr int kSlotBytes = 16, kWarpSlots = 32, kEightRowsBytes = 4 * kWarpSlots * kSlotBytes;

// After this many clocks, some ten seconds, a block assumes that another one has failed. The kernel traps,
// and the next CUDA call reports the error.
constexpr long long kMostClocks = 1ll << 34;
__device__ __forceinline__ void trap_after(long long since) {
  if (clock64() - since > kMostClocks) __trap();
}

// As mbarrier_wait, for a limited time. Warps that wait without a limit keep others waiting that have one.
__device__ __forceinline__ void mbarrier_wait_limited(uint64_t* barrier, uint32_t parity) {
  if (mbarrier_try_wait(barrier, parity)) return;
  const long long since = clock64();
  while (!mbarrier_try_wait(barrier, parity)) trap_after(since);
}

// Counters of what the group's blocks have stored: for each tile of rows, one for 64 units.
template <class Config>
class LargeArrivals {
  static constexpr int kStride = LargeShape::kArrivalBytes / sizeof(unsigned);

 public:
  __device__ LargeArrivals(unsigned* counters, const LargePlace<Config>& place, int group_pairs)
      : counters_(counters + int64_t{place.group} * Config::kRounds * (group_pairs / 2) * kStride),
        of_round_(group_pairs / 2 * kStride) {}
  __device__ unsigned* of(int round, int unit) const {
    return counters_ + round * of_round_ + unit / kTileK * kStride;
  }

 private:
  unsigned* const counters_;
  const int of_round_;
};

}  // namespace hopper
}  // namespace lltm_ext
