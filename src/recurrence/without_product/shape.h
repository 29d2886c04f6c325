// The grid of the kernels of independent units. For host and device.
#pragma once

#include "common/portable.h"

namespace lltm_ext {

// A block is a warp, so that a few thousand threads still spread over all multiprocessors.
constexpr int kIndependentThreads = 32;

// Adjacent units of a thread: two where every row of H is aligned to a pair.
LLTM_HOST_DEVICE constexpr int independent_units(int64_t hidden) { return hidden % 2 == 0 ? 2 : 1; }

LLTM_HOST_DEVICE constexpr int64_t independent_blocks(int64_t batch, int64_t hidden) {
  return (batch * (hidden / independent_units(hidden)) + kIndependentThreads - 1) / kIndependentThreads;
}

}  // namespace lltm_ext
