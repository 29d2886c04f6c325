// stochastic_round: the formulas, for CPU and GPU alike, and what its files agree on. No torch.
#pragma once

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include <cmath>
#include <cstring>

#include "common/types.h"
#include "stochastic_round/philox.h"

namespace lltm_ext {

// Elements that share a block of random bits, 16 for each.
constexpr int kRandomGroup = 8;

LLTM_HOST_DEVICE uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}
LLTM_HOST_DEVICE float from_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

constexpr uint32_t kSign = 0x80000000;

// Each gives a float32 that the half type holds exactly: one of x's two neighbours there, up with the
// probability of the part that is cut off, in units of the last place kept. `random` is of 16 bits. Adding
// them below the cut carries into what is kept just as often as that. What lies beyond the largest value,
// and NaN, is left to be rounded as usual.

struct RoundToBFloat16 {
  static constexpr uint32_t kLargest = 0x7f7f0000;

  LLTM_HOST_DEVICE float operator()(float x, uint32_t random) const {
    const uint32_t bits = bits_of(x);
    if ((bits & ~kSign) > kLargest) return x;
    return from_bits((bits + random) & 0xffff0000);
  }
};

struct RoundToFloat16 {
  static constexpr uint32_t kLargest = 0x477fe000;         // 65504
  static constexpr uint32_t kSmallestNormal = 0x38800000;  // 2^-14

  LLTM_HOST_DEVICE float operator()(float x, uint32_t random) const {
    const uint32_t bits = bits_of(x), magnitude = bits & ~kSign;
    if (magnitude > kLargest) return x;
    if (magnitude >= kSmallestNormal) return from_bits((bits + (random >> 3)) & 0xffffe000);
    // Below, the values are the multiples of 2^-24, and more is cut off than there are random bits: its
    // probability is rounded to 16 bits.
    const float units = from_bits(magnitude) * 0x1p24f, down = std::floor(units);
    const float up = std::nearbyint((units - down) * 0x1p16f) > static_cast<float>(random) ? 1.0f : 0.0f;
    return from_bits(bits_of((down + up) * 0x1p-24f) | (bits & kSign));
  }
};

// Element i has the bits of group i / kRandomGroup, wherever it lies and whoever computes it.
template <typename T, class Round>
void stochastic_round(const float* input, T* output, int64_t n, PhiloxState state, Round round);
#ifdef LLTM_EXT_WITH_CUDA
template <typename T, class Round>
cudaError_t stochastic_round(const float* input, T* output, int64_t n, PhiloxState state, Round round,
                             cudaStream_t stream);
#endif

}  // namespace lltm_ext
