// The grid of the kernels of independent units, and how it divides the steps. For host and device.
#pragma once

#include "common/portable.h"
#include "recurrence/cell.h"

namespace lltm_ext {

// A block is a warp, so that a few thousand threads still spread over all multiprocessors.
constexpr int kIndependentThreads = 32;

// Adjacent units of a thread: two where every row of H is aligned to a pair. But if one thread runs all steps
// of few units, they spread over twice as many warps one by one, unless they are of 2 bytes, for which
// cp.async has no copy.
constexpr int independent_units(int64_t batch, int64_t hidden, int value_bytes, bool has_segments) {
  constexpr int64_t kFewUnits = 1 << 16;
  const bool pairs = value_bytes == 2 || has_segments || batch * hidden >= kFewUnits;
  return hidden % 2 == 0 && pairs ? 2 : 1;
}

// A segment is some successive steps of a row, in the order in which a kernel computes them. Segments run in
// parallel (parallel.cuh): blockIdx.y is the segment. Before they do, the values that each one starts from
// replace the rests of its map.
template <typename A>
struct Segments {
  int steps;            // of each; a row's last segment has the rest of its steps
  A* maps;              // [segments, map_planes, B, H]; null: one thread runs all steps of a row
  int stage_steps = 0;  // that a block copies ahead at once (IndependentUnits::for_steps)
};

// The values that steps hand on: h and the states. A map from them to those after a segment has a rest for
// each, and a coefficient for each pair of those that steps read.
LLTM_HOST_DEVICE constexpr int map_planes(const CellShape& cell) {
  return 1 + cell.states + cell.live_states() * cell.live_states();
}
constexpr int kMostMappedStates = 4;

// What a step of a thread reads, at most, in bytes. A is the type of sums.
template <typename T, typename A>
constexpr int64_t independent_step_bytes(const CellShape& cell, int units, bool backward, bool dense) {
  constexpr int64_t kValue = sizeof(T), kSum = sizeof(A);
  const int64_t others = cell.step_inputs + (backward ? cell.saved + 2 : 0), aligned_to = units * kSum,
                bytes = (cell.gates * (cell.wide ? kSum : kValue) + others * kValue) * units;
  return (bytes + (dense ? 0 : kSum) + aligned_to - 1) / aligned_to * aligned_to;
}
constexpr int kRingStages = 4;
// The steps that are read together, given what one reads.
constexpr int step_group(int64_t step_bytes) { return step_bytes <= 16 ? 8 : step_bytes <= 48 ? 4 : 2; }

}  // namespace lltm_ext
