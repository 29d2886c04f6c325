// Division by a number that the host knows. The GPU's own 64-bit division takes 80 instructions.
#pragma once

#include "common/portable.h"

namespace lltm_ext {

// For 0 <= a < 2^63, a / divisor is the exact product of a and 2^(63 + shift) / divisor, rounded up.
struct Divisor {
  Divisor() = default;
  explicit Divisor(int64_t divisor_) : divisor(divisor_) {
    while (int64_t{1} << shift < divisor) ++shift;
    multiplier =
        static_cast<uint64_t>(((static_cast<unsigned __int128>(1) << (63 + shift)) + divisor - 1) / divisor);
  }
  LLTM_HOST_DEVICE int64_t quotient(int64_t a) const {
#ifdef __CUDA_ARCH__
    return __umul64hi(2 * static_cast<uint64_t>(a), multiplier) >> shift;
#else
    return a / divisor;
#endif
  }
  LLTM_HOST_DEVICE int64_t remainder(int64_t a) const { return a - quotient(a) * divisor; }

  int64_t divisor = 1;
  uint64_t multiplier = uint64_t{1} << 63;
  int shift = 0;
};

}  // namespace lltm_ext
