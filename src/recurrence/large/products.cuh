// The products of a large layer's step. The weights of 16 units' gates are wgmma's first operand, 64 rows,
// and stay in registers for the whole sequence: read from shared memory, that operand takes as long as the
// product does. What does not fit is in shared memory, spread over K. Rows of the batch are the product's
// columns.
#pragma once

#include "recurrence/large/block.cuh"

namespace lltm_ext {
namespace hopper {

// One of the two warpgroups that multiply. It has the units of the pair's block `warpgroup`, and its own
// block's half of K.
template <class Config>
class LargeProducts {
  using T = typename Config::T;
  using Arguments = LargeForwardArguments<T>;
  static constexpr LargeShape kShape = Config::kShape;
  static constexpr int kRows = Config::kRows, kTiles = Config::kTile.k_tiles, kSteps = kTileK / 16,
                       kStageTiles = Config::kTile.stage_tiles, kRoundStages = kShape.round_stages();

 public:
  __device__ LargeProducts(const LargeStorage<Config>& storage, const LargePlace& place, int warpgroup)
      : storage_(storage),
        place_(place),
        warpgroup_(warpgroup),
        warp_(uniform_warp() % 4),
        lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run(const Arguments& args) {
    load_weights(args.s);
    const Partials partials = where_partials_go();
    PipelineState<Config::kStages> ring;
    uint32_t free_parity = 1;
    const int products = args.s.steps.length * Config::kRounds;
#pragma unroll 1
    for (int i = 0; i < products; ++i) {
      float d[kRows / 2];
      multiply(d, ring);
      mbarrier_wait(storage_.partials_free(warpgroup_), free_parity);
      free_parity ^= 1;
      send(d, partials);
    }
  }

 private:
  struct Partials {
    uint32_t slot, full;  // of the block whose cells take them
    bool in_other_block;
  };

  // ---- weights

  // The tiles in registers are spread over K.
  __device__ static constexpr int registers_before(int tile) {
    return tile * Config::kRegisterTiles / kTiles;
  }
  __device__ static constexpr bool in_registers(int tile) {
    return registers_before(tile + 1) > registers_before(tile);
  }

  // Tiles for shared memory come first, while the others do not yet take registers.
  __device__ __forceinline__ void load_weights(const SequenceForwardArguments<T>& s) {
    if constexpr (Config::kSharedTiles > 0) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (!in_registers(i)) store_in_tile(shared_tile(i), step, weights_at(s, i, step));
        }
      }
      fence_proxy_async();
      warpgroup_sync(warpgroup_);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (in_registers(i)) keep(weights_[registers_before(i)][step], weights_at(s, i, step));
      }
    }
  }
  // Rows of a warp: four units of the first gate, then those of the next one. A missing gate has zeros.
  __device__ __forceinline__ uint4 weights_at(const SequenceForwardArguments<T>& s, int tile,
                                              int step) const {
    const int unit = place_.first_unit(warpgroup_) + 4 * warp_ + lane_ / 4 % 4, gate = lane_ / 16;
    const int k = (place_.rank * kTiles + tile) * kTileK + step * 16 + 2 * (lane_ % 4);
    const auto pair_at = [&](int gate, int k) -> unsigned {
      if (unit >= s.hidden || gate >= Config::kGates || k >= s.hidden) return 0;
      const int64_t row = int64_t{gate} * s.hidden + unit;
      return *reinterpret_cast<const unsigned*>(s.weight + row * s.hidden + k);
    };
    return make_uint4(pair_at(gate, k), pair_at(gate + 2, k), pair_at(gate, k + 8), pair_at(gate + 2, k + 8));
  }
  __device__ static __forceinline__ void keep(uint4& to, const uint4& x) {
    to = x;
    keep_in_register(to.x), keep_in_register(to.y), keep_in_register(to.z), keep_in_register(to.w);
  }
  __device__ __forceinline__ unsigned char* shared_tile(int i) const {
    return storage_.weights(warpgroup_) + (i - registers_before(i)) * LargeShape::kTileBytes;
  }
  // With the 128-byte swizzle.
  __device__ __forceinline__ void store_in_tile(unsigned char* tile, int step, const uint4& x) const {
    const int row = 16 * warp_ + lane_ / 4, quad = lane_ % 4;
    const auto to = [&](int more_rows, int half) {
      const int chunk = (2 * step + half) ^ (row & 7);
      return reinterpret_cast<uint32_t*>(tile + (row + more_rows) * kSwizzleBytes + chunk * 16 + quad * 4);
    };
    *to(0, 0) = x.x, *to(8, 0) = x.y, *to(0, 1) = x.z, *to(8, 1) = x.w;
  }

  // ---- a round

  __device__ __forceinline__ void multiply(float (&d)[kRows / 2], PipelineState<Config::kStages>& ring) {
    int last = 0;
#pragma unroll
    for (int i = 0; i < kRoundStages; ++i) {
      mbarrier_wait(storage_.full(ring.stage), ring.phase);
      const uint32_t stage = shared_address(storage_.stage(ring.stage));
      uint32_t shared_weights = shared_address(storage_.weights(warpgroup_));
      keep_in_register(shared_weights);  // else the descriptors of all tiles are, which have no room
      fence_accumulator(d);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < kStageTiles; ++j) {
        multiply_tile(d, i * kStageTiles + j, stage + j * Config::kHTileBytes, shared_weights);
      }
      wgmma_commit_group();
      fence_accumulator(d);
      wgmma_wait_group<1>();  // the products of the stage before are done
      if (i > 0) release(last);
      last = ring.stage;
      ring.advance();
    }
    wgmma_wait_group<0>();
    fence_accumulator(d);
    release(last);
  }
  __device__ __forceinline__ void multiply_tile(float (&d)[kRows / 2], int tile, uint32_t h,
                                                uint32_t shared_weights) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t b = matrix_descriptor(h + step * 32, kBlockBytes);
      const bool adds = tile + step > 0;
      if (in_registers(tile)) {
        WgmmaOfRegisters<T, kRows>::run(d, weights_[registers_before(tile)][step], b, adds);
      } else {
        const uint32_t at = shared_weights + (tile - registers_before(tile)) * LargeShape::kTileBytes;
        const uint64_t a = matrix_descriptor(at + step * 32, kBlockBytes);
        Wgmma<T, kRows, false, false>::run(d, a, b, adds);
      }
    }
  }
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 128 == 0) mbarrier_arrive(storage_.empty(stage));
  }

  // ---- the sums

  __device__ __forceinline__ Partials where_partials_go() const {
    const uint32_t slot = warp_ * kWarpSlots + partial_slot(warp_, lane_ / 4, lane_ % 4);
    const unsigned char* const partials = storage_.partials(place_.rank) + slot * kSlotBytes;
    if (warpgroup_ == place_.rank) {
      return {shared_address(partials), shared_address(storage_.partials_full()), false};
    }
    return {mapa(partials, warpgroup_), mapa(storage_.partials_full(), warpgroup_), true};
  }
  __device__ __forceinline__ void send(const float (&d)[kRows / 2], const Partials& to) const {
    if (to.in_other_block) {
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const uint4 x = make_uint4(__float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]),
                                   __float_as_uint(d[4 * j + 2]), __float_as_uint(d[4 * j + 3]));
        st_async(to.slot + j * kEightRowsBytes, x, to.full);
      }
      return;
    }
    if (threadIdx.x % 128 == 0) mbarrier_arrive_expect_tx(storage_.partials_full(), Config::kPartialBytes);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      st_shared(to.slot + j * kEightRowsBytes,
                make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]));
    }
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(storage_.partials_full());
  }

  const LargeStorage<Config>& storage_;
  const LargePlace& place_;
  const int warpgroup_, warp_, lane_;
  uint4 weights_[Config::kRegisterTiles][kSteps];
};

}  // namespace hopper
}  // namespace lltm_ext
