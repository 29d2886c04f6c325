// stochastic_round: the formulas for CPU and GPU, and the launchers' contract. No torch.
#pragma once

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include <cmath>
#include <cstring>

#include "common/types.h"
#include "stochastic_round/philox.h"

namespace lltm_ext {

// The number of elements that share a block of random bits, 16 bits for each. Element i uses stream
// i / kRandomGroup, whichever thread computes it.
constexpr int kRandomGroup = 8;

template <typename To, typename From>
LLTM_HOST_DEVICE To bit_cast(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

constexpr uint32_t kSign = 0x80000000;

// Each functor returns one of the two values of the half type that are next to x, as a float32. It rounds up
// in magnitude with probability equal to the discarded fraction: adding random bits below the cut carries
// that often. NaN and values beyond the largest finite one are left to be rounded as usual.

struct RoundToBFloat16 {
  static constexpr uint32_t kLargest = 0x7f7f0000;

  LLTM_HOST_DEVICE float operator()(float x, uint32_t random) const {
    const uint32_t bits = bit_cast<uint32_t>(x);
    if ((bits & ~kSign) > kLargest) return x;
    return bit_cast<float>((bits + random) & 0xffff0000);
  }
};

struct RoundToFloat16 {
  static constexpr uint32_t kLargest = 0x477fe000;         // 65504
  static constexpr uint32_t kSmallestNormal = 0x38800000;  // 2^-14

  LLTM_HOST_DEVICE float operator()(float x, uint32_t random) const {
    const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & ~kSign;
    if (magnitude > kLargest) return x;
    if (magnitude >= kSmallestNormal) return bit_cast<float>((bits + (random >> 3)) & 0xffffe000);
    // Subnormals are multiples of 2^-24. More than 16 bits are cut off, so their probability is rounded to 16
    // bits.
    const float units = bit_cast<float>(magnitude) * 0x1p24f, down = std::floor(units);
    const float up = std::nearbyint((units - down) * 0x1p16f) > static_cast<float>(random) ? 1.0f : 0.0f;
    return bit_cast<float>(bit_cast<uint32_t>((down + up) * 0x1p-24f) | (bits & kSign));
  }
};

template <typename T, class Round>
void stochastic_round(const float* input, T* output, int64_t n, PhiloxState state, Round round);
#ifdef LLTM_EXT_WITH_CUDA
template <typename T, class Round>
cudaError_t stochastic_round(const float* input, T* output, int64_t n, PhiloxState state, Round round,
                             cudaStream_t stream);
#endif

}  // namespace lltm_ext
