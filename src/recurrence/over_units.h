// What the functions of cells whose units read values over all units of their row need besides operators, of
// numbers; persistent/units.cuh has it for packs of them.
#pragma once

#include "recurrence/cell.h"

namespace lltm_ext {

constexpr int kMostRowBlocks = 8;  // of a cluster that has a row

// The threads of a row exchange so many numbers at once: of each variance the sum of the values and that of
// the squares of their distances from their own mean, then sums.
constexpr int kRowSlots = 4;
template <int kFirst_, int kVariances_, int kSums_>
struct Slots {
  static constexpr int kFirst = kFirst_, kVariances = kVariances_, kCount = 2 * kVariances_ + kSums_;
};
// Calls f(Slots) for all of them.
template <int kVariances, int kSums, int kFirst = 0, class F>
LLTM_HOST_DEVICE void for_slots(F&& f) {
  if constexpr (kVariances + kSums > 0) {
    constexpr int kHas = kVariances < kRowSlots / 2 ? kVariances : kRowSlots / 2,
                  kPlaces = kRowSlots - 2 * kHas, kOthers = kSums < kPlaces ? kSums : kPlaces;
    using Now = Slots<kFirst, kHas, kOthers>;
    f(Now{});
    for_slots<kVariances - kHas, kSums - kOthers, kFirst + Now::kCount>(f);
  }
}
// What a row of `units` units has in these slots, from part(p, slot) of its parts, which have units_of(p)
// units.
template <class Slots, typename A, class Part, class UnitsOf>
LLTM_HOST_DEVICE void add_parts(int parts, int units, Part&& part, UnitsOf&& units_of,
                                A (&totals)[kRowSlots]) {
  for (int i = 0; i < Slots::kCount; ++i) totals[i] = part(0, i);
  for (int p = 1; p < parts; ++p) {
    for (int i = 0; i < Slots::kCount; ++i) totals[i] += part(p, i);
  }
  for (int i = 0; i < 2 * Slots::kVariances; i += 2) {
    const A mean = totals[i] / static_cast<A>(units);
    for (int p = 0; p < parts; ++p) {
      if (const int count = units_of(p); count > 0) {
        const A distance = part(p, i) / static_cast<A>(count) - mean;
        totals[i + 1] += static_cast<A>(count) * distance * distance;
      }
    }
  }
}

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
