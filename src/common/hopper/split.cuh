// K shared out among the blocks of a cluster on Hopper: each leaves its products in its shared memory, and
// all read what they finish from all, in one order.
#pragma once

#include "common/hopper/ptx.cuh"

namespace lltm_ext {
namespace hopper {

template <int kTileM, int kTileN>
class Parts {
  static constexpr int kStride = kTileN + 4;  // so that the rows of a warp's stores lie in different banks

 public:
  static constexpr int kBytes = kTileM * kStride * sizeof(float);

  __device__ explicit Parts(unsigned char* shared) : values_(reinterpret_cast<float*>(shared)) {}

  // This warpgroup's 64 rows of the block's part.
  __device__ __forceinline__ void write(const float (&d)[kTileN / 2], int warpgroup) {
    const int thread = threadIdx.x % 128, row = 64 * warpgroup + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 2) {
      float* at = values_ + (row + i % 4 / 2 * 8) * kStride + i / 4 * 8 + thread % 4 * 2;
      *reinterpret_cast<float2*>(at) = make_float2(d[i], d[i + 1]);
    }
  }

  // Four neighbours in a row, of all parts together.
  __device__ __forceinline__ float4 sum(int row, int column, int parts) const {
    const float4* here = reinterpret_cast<const float4*>(values_ + row * kStride + column);
    float4 sum = read_from_block(here, 0);
    for (int part = 1; part < parts; ++part) {
      const float4 more = read_from_block(here, part);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    return sum;
  }

 private:
  float* const values_;
};

// The shared memory of a launch, at a multiple of 1,024 bytes as the copy engine's exchange wants.
__device__ __forceinline__ unsigned char* aligned_shared() {
  extern __shared__ __align__(1024) unsigned char shared[];
  return shared;
}
constexpr int kBarrierBytes = 256;

}  // namespace hopper
}  // namespace lltm_ext
