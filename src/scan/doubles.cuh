// What the functions of parts of a recurrence need of double (affine.cuh,
// recurrence/without_product/tiles.cuh).
#pragma once

namespace lltm_ext {

// Whether |x| is below 2^kExponent. NaN is not.
template <int kExponent>
__device__ __forceinline__ bool is_below(double x) {
  return (__double2hiint(x) & 0x7ff00000) < (1023 + kExponent) << 20;
}

__device__ __forceinline__ double plain_nan(double x) {
  return x == x ? x : __longlong_as_double(0x7ff8ll << 48);
}

__device__ __forceinline__ double shuffle_up(double x, int lanes) { return __shfl_up_sync(~0u, x, lanes); }

}  // namespace lltm_ext
