// The stable ABI has no pool of streams, so directions run one after the other.
#pragma once

#include "stable/tensor.h"

namespace lltm_ext {

// Calls f(i) for each direction.
template <typename F>
void run_side_by_side(const at::Tensor&, size_t directions, F&& f) {
  for (size_t i = 0; i < directions; ++i) f(i);
}

}  // namespace lltm_ext
