// What the functions of cells whose units read values over all units of their row need besides operators, of
// numbers; persistent/units.cuh has it for packs of them.
#pragma once

#include "recurrence/cell.h"

namespace lltm_ext {

constexpr int kMostRowBlocks = 8;  // of a cluster that has a row

template <typename T>
LLTM_HOST_DEVICE T choose(bool condition, T a, T b) {
  return condition ? a : b;
}
// Whether a decision is among those that a saved number has (`bit`: 1, 2, 4, ...).
template <typename T>
LLTM_HOST_DEVICE bool has_bit(T saved, int bit) {
  return (static_cast<int>(saved) & bit) != 0;
}

}  // namespace lltm_ext
