// The products of a large layer's step. The weights are wgmma's first operand and stay in registers for the
// whole sequence: read from shared memory, that operand takes as long as the product does. What does not fit
// is in shared memory, spread over K. Rows of the batch are the product's columns.
#pragma once

#include "recurrence/large/block.cuh"

namespace lltm_ext {
namespace hopper {

// One of the two warpgroups that multiply: 64 rows of the weights by the block's part of K.
template <class Config>
class LargeProduct {
 public:
  __device__ LargeProduct(const LargeStorage<Config>& storage, const LargePlace<Config>& place, int warpgroup)
      : storage_(storage),
        place_(place),
        warpgroup_(warpgroup),
        warp_(uniform_warp() % 4),
        lane_(threadIdx.x % 32) {}

 protected:
  using T = typename Config::T;
  using Operand = typename Config::Operand;
  static constexpr LargeShape kShape = Config::kShape;
  static constexpr int kRows = Config::kRows, kTiles = Config::kTile.k_tiles, kSteps = kTileK / 16,
                       kStageTiles = Config::kTile.stage_tiles, kRoundStages = kShape.round_stages();

  // ---- weights. weights_at(tile, step): what the lane has of 16 of K.

  // The tiles in registers are spread over K.
  __device__ static constexpr int registers_before(int tile) {
    return tile * Config::kRegisterTiles / kTiles;
  }
  __device__ static constexpr bool in_registers(int tile) {
    return registers_before(tile + 1) > registers_before(tile);
  }

  // Tiles for shared memory come first, while the others do not yet take registers.
  template <class At>
  __device__ __forceinline__ void load_weights(const At& weights_at) {
    if constexpr (Config::kSharedTiles > 0) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (!in_registers(i)) store_in_tile(shared_tile(i), step, weights_at(i, step));
        }
      }
      fence_proxy_async();
      warpgroup_sync(warpgroup_);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (in_registers(i)) keep(weights_[registers_before(i)][step], weights_at(i, step));
      }
    }
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
        WgmmaOfRegisters<Operand, kRows>::run(d, weights_[registers_before(tile)][step], b, adds);
      } else {
        const uint32_t at = shared_weights + (tile - registers_before(tile)) * LargeShape::kTileBytes;
        const uint64_t a = matrix_descriptor(at + step * 32, kBlockBytes);
        Wgmma<Operand, kRows, false, false>::run(d, a, b, adds);
      }
    }
  }
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 128 == 0) mbarrier_arrive(storage_.empty(stage));
  }

  // Sends the sums to another block's cells: at each eight rows of the batch, 16 bytes of a lane.
  __device__ __forceinline__ static void send(const float (&d)[kRows / 2], uint32_t slot,
                                              int eight_rows_bytes, uint32_t full) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const uint4 x = make_uint4(__float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]),
                                 __float_as_uint(d[4 * j + 2]), __float_as_uint(d[4 * j + 3]));
      st_async(slot + j * eight_rows_bytes, x, full);
    }
  }

  const LargeStorage<Config>& storage_;
  const LargePlace<Config>& place_;
  const int warpgroup_, warp_, lane_;

 private:
  uint4 weights_[Config::kRegisterTiles][kSteps];
};

}  // namespace hopper
}  // namespace lltm_ext
