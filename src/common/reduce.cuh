// Sums over the lanes of a warp.
#pragma once

#include "common/portable.h"

namespace lltm_ext {

// Adds up every lane's sums [kColumns][kRows] over all lanes. Afterwards sums[column][0] of a lane is the
// total of row lane * kRows / 32. kRows is a power of two up to 32; in each round a lane keeps half of its
// rows and gives half away.
template <int kRows, int kBit = 16, int kColumns, int kAllRows, typename A>
__device__ __forceinline__ void reduce_over_lanes(A (&sums)[kColumns][kAllRows]) {
  constexpr int kKept = kRows > 1 ? kRows / 2 : 1;
  const bool upper = threadIdx.x & kBit;
#pragma unroll
  for (int column = 0; column < kColumns; ++column) {
#pragma unroll
    for (int r = 0; r < kKept; ++r) {
      const A low = sums[column][r], high = kRows > 1 ? sums[column][r + kKept * (kRows > 1)] : low;
      sums[column][r] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kBit);
    }
  }
  if constexpr (kBit > 1) reduce_over_lanes<kKept, kBit / 2>(sums);
}

}  // namespace lltm_ext
