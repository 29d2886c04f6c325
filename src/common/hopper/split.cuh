// Split-K within a cluster on Hopper: each block puts its partial sums into its shared memory. Then each
// block adds up those of all blocks, in one order, for its share of the tile.
#pragma once

#include "common/hopper/ptx.cuh"
#include "common/hopper/sizes.h"

namespace lltm_ext {
namespace hopper {

template <int kTileM, int kTileN>
class SplitKPartials {
  static constexpr int kStride = partial_sums_stride(kTileN);

 public:
  static constexpr int kBytes = partial_sums_bytes(kTileM, kTileN);

  __device__ explicit SplitKPartials(unsigned char* shared) : values_(reinterpret_cast<float*>(shared)) {}

  // Stores this warpgroup's 64 rows of the block's partial sums.
  __device__ __forceinline__ void store(const float (&d)[kTileN / 2], int warpgroup) {
    const int thread = threadIdx.x % 128, row = 64 * warpgroup + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 2) {
      float* at = values_ + (row + i % 4 / 2 * 8) * kStride + i / 4 * 8 + thread % 4 * 2;
      *reinterpret_cast<float2*>(at) = make_float2(d[i], d[i + 1]);
    }
  }

  // The sums of all blocks' partials, for four neighbours in a row.
  __device__ __forceinline__ float4 reduce(int row, int column, int splits) const {
    const float4* here = reinterpret_cast<const float4*>(values_ + row * kStride + column);
    float4 sum = load_shared_cluster(here, 0);
    for (int split = 1; split < splits; ++split) {
      const float4 more = load_shared_cluster(here, split);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    return sum;
  }

 private:
  float* const values_;
};

// A launch's dynamic shared memory, aligned for TMA's 128-byte swizzle.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char shared[];
  return shared;
}

}  // namespace hopper
}  // namespace lltm_ext
