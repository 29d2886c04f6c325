// The fourth warpgroup of a large layer's kernel: its warps load h or, backward, the gates' gradients, or
// release what the cells have stored.
#pragma once

#include "recurrence/large/block.cuh"

namespace lltm_ext {
namespace hopper {

// Source is what products read (LargeH, LargeGradGates): how many steps have products, which units a tile of
// K is of, how many steps these must have stored, and a load of the tile.
template <class Config, class Source>
class LargeLoads {
  using Arguments = typename Source::Arguments;
  static constexpr LargeShape kShape = Config::kShape;
  static constexpr int kRounds = Config::kRounds, kStageTiles = Config::kTile.stage_tiles,
                       kLoaders = LargeShape::kLoadingWarps, kReleasers = LargeShape::kReleasingWarps,
                       kOwnStages = kShape.own_stages(), kOwnTiles = kOwnStages * kStageTiles;
  static_assert(kOwnTiles <= 32, "each lane polls for one tile");

 public:
  __device__ LargeLoads(const LargeStorage<Config>& storage, const LargePlace<Config>& place,
                        const LargeArrivals<Config>& arrivals)
      : storage_(storage),
        place_(place),
        arrivals_(arrivals),
        warp_(uniform_warp() % 4),
        lane_(threadIdx.x % 32),
        stage_(warp_) {}

  __device__ __forceinline__ void run(const Arguments& args) {
    if (warp_ < kLoaders) {
      load(args);
    } else if (lane_ == 0) {
      release(args);
    }
  }

 private:
  // Every kLoaders-th stage is this warp's.
  __device__ __forceinline__ int k_tile(int own_stage, int tile) const {
    return place_.rank * Config::kTile.k_tiles + (warp_ + own_stage * kLoaders) * kStageTiles + tile;
  }

  __device__ __forceinline__ void load(const Arguments& args) {
    const int own = lane_ % kOwnTiles, unit = Source::unit(k_tile(own / kStageTiles, own % kStageTiles));
    // Tiles beyond the group's units are zeros, for which there is nothing to wait.
    const bool polls = lane_ < kOwnTiles && unit < 32 * args.group_pairs;
    const int steps = Source::steps(args);
    for (int step = 0; step < steps; ++step) {
      for (int round = 0; round < kRounds; ++round) {
        const unsigned* const count = arrivals_.of(round, polls ? unit : 0);
        const int stored_steps = Source::stored_steps(step);
        const unsigned needed = static_cast<unsigned>(LargeShape::kArrivalsAStep) * stored_steps;
        unsigned ready = stored_steps > 0 ? 0 : ~0u;
#pragma unroll
        for (int i = 0; i < kOwnStages; ++i) {
          constexpr unsigned kTiles = (1u << kStageTiles) - 1;
          wait_for(kTiles << (i * kStageTiles), ready, polls ? count : nullptr, needed);
          if (lane_ == 0) {
            mbarrier_wait_limited(storage_.empty(stage_), phase_ ^ 1);
            load_stage(args, step, round, i);
          }
          __syncwarp();
          advance();
        }
      }
    }
  }
  // Polls until the tiles of `wanted`, a bit each, are ready.
  __device__ __forceinline__ void wait_for(unsigned wanted, unsigned& ready, const unsigned* count,
                                           unsigned needed) const {
    if ((ready & wanted) == wanted) return;
    const long long since = clock64();
    while (true) {
      ready = __ballot_sync(~0u, !count || ld_acquire(count) >= needed);
      if ((ready & wanted) == wanted) break;
      trap_after(since);
    }
    __syncwarp();
    fence_proxy_async_global();  // the first lane's reads by TMA come after all acquires
  }
  __device__ __forceinline__ void load_stage(const Arguments& args, int step, int round,
                                             int own_stage) const {
    const Source source(args, step, (place_.group * kRounds + round) * Config::kRows);
    mbarrier_arrive_expect_tx(storage_.full(stage_), Config::kStageBytes);
#pragma unroll
    for (int i = 0; i < kStageTiles; ++i) {
      source.load(storage_.stage(stage_) + i * Config::kHTileBytes, k_tile(own_stage, i),
                  storage_.full(stage_));
    }
  }
  __device__ __forceinline__ void advance() {
    stage_ += kLoaders;
    if (stage_ >= Config::kStages) stage_ -= Config::kStages, phase_ ^= 1;
  }

  // A release waits until the stores before it are visible, which would keep the cells' warps. The next
  // step's stores of a round come after this release.
  __device__ __forceinline__ void release(const Arguments& args) const {
    const int unit = place_.first_unit(place_.rank), steps = Source::steps(args);
    for (int step = 0; step < steps; ++step) {
      for (int round = warp_ - kLoaders; round < kRounds; round += kReleasers) {
        mbarrier_wait_limited(storage_.stored(round), step & 1);
        red_release(arrivals_.of(round, unit), 1);
      }
    }
  }

  const LargeStorage<Config>& storage_;
  const LargePlace<Config>& place_;
  const LargeArrivals<Config>& arrivals_;
  const int warp_, lane_;
  int stage_;
  uint32_t phase_ = 0;
};

}  // namespace hopper
}  // namespace lltm_ext
