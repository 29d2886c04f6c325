// What the functions of cells whose units read values over all units of their row need besides operators, of
// numbers; persistent/units.cuh has it for packs of them.
#pragma once

#include "common/math.h"
#include "recurrence/cell.h"

namespace lltm_ext {

constexpr int kMostRowBlocks = 8;  // of a cluster that has a row

// The threads of a row exchange so many numbers at once: of each variance the mean of a part of the row and
// the sum of the squares of the distances from it; then sums.
constexpr int kRowSlots = 8;
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

// Some values by the sum of their distances from one of them, and that of the squares of these. Both are
// found at once, and since the one is among the values, little cancels in the variance.
template <typename A>
struct Distances {
  A sum = 0, squares = 0;
  LLTM_HOST_DEVICE void add(A distance, A count = A(1)) {
    sum += count * distance;
    squares += count * distance * distance;
  }
  // The squares of the distances from the mean, given 1 / count.
  LLTM_HOST_DEVICE A from_mean(A share) const { return relu(squares - sum * (sum * share)); }
};

// What a row has in these slots. A lane adds up part(p, slot) of the row's parts p = first, first + stride,
// ..., which have units_of(p) units, and sum_of_lanes adds up the lanes.
template <class Slots, typename A, class Part, class UnitsOf, class SumOfLanes>
LLTM_HOST_DEVICE void add_parts(int first, int stride, int parts, A share, Part&& part, UnitsOf&& units_of,
                                SumOfLanes&& sum_of_lanes, A (&totals)[kRowSlots]) {
  Distances<A> distances[at_least_one(Slots::kVariances)];
  for (A& total : totals) total = 0;
  for (int p = first; p < parts; p += stride) {
    for (int v = 0; v < Slots::kVariances; ++v) {
      distances[v].add(part(p, 2 * v) - part(0, 2 * v), static_cast<A>(units_of(p)));
      distances[v].squares += part(p, 2 * v + 1);
    }
    for (int i = 2 * Slots::kVariances; i < Slots::kCount; ++i) totals[i] += part(p, i);
  }
  for (int v = 0; v < Slots::kVariances; ++v) {
    distances[v].sum = sum_of_lanes(distances[v].sum);
    distances[v].squares = sum_of_lanes(distances[v].squares);
    totals[2 * v] = part(0, 2 * v) + distances[v].sum * share;
    totals[2 * v + 1] = distances[v].from_mean(share);
  }
  for (int i = 2 * Slots::kVariances; i < Slots::kCount; ++i) totals[i] = sum_of_lanes(totals[i]);
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
