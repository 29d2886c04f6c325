// In place of src/common/divisor.h.
#pragma once

#include "cuda_on_cpu.h"

namespace lltm_ext {

struct Divisor {
  Divisor() = default;
  explicit Divisor(int64_t divisor_) : divisor(divisor_) {}
  int64_t quotient(int64_t a) const { return a / divisor; }
  int64_t remainder(int64_t a) const { return a % divisor; }

  int64_t divisor = 1;
};

}  // namespace lltm_ext
