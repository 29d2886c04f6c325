// The grid of the kernels of independent units, and how it divides the steps. For host and device.
#pragma once

#include "common/portable.h"
#include "recurrence/cell.h"

namespace lltm_ext {

// A block has one warp, so that a few thousand threads still spread over all multiprocessors.
constexpr int kIndependentThreads = 32;

// Adjacent units of a thread: two where every row of H is aligned to a pair. But few units spread over twice
// as many warps one by one, unless they are of 2 bytes, for which cp.async has no copy.
constexpr int independent_units(int64_t batch, int64_t hidden, int value_bytes) {
  constexpr int64_t kFewUnits = 1 << 16;
  const bool pairs = value_bytes == 2 || batch * hidden >= kFewUnits;
  return hidden % 2 == 0 && pairs ? 2 : 1;
}
// In tiles, pairs of 4 bytes leave room for fewer tiles, of fewer steps.
constexpr int tile_units(int64_t hidden, int value_bytes) {
  return hidden % 2 == 0 && value_bytes == 2 ? 2 : 1;
}

// The values that steps hand on and read: h and states. Maps of more would take too many registers.
constexpr int kMostMappedStates = 4;
// The bytes of a map of a thread's units (UnitMap), and of what it maps.
constexpr int64_t map_bytes(int units, int live_states) {
  return int64_t{units} * at_least_one(live_states) * (at_least_one(live_states) + 1) * 8;
}
constexpr int64_t mapped_bytes(int units, int live_states) {
  return int64_t{units} * at_least_one(live_states) * 8;
}

// How the kernels divide the steps.
struct UnitTiles {
  int stage_steps;  // that a thread of all steps copies ahead at once (IndependentUnits::for_steps)
  // Of tiles (tiles.cuh): a thread has some successive steps, a row of threads as many units or pairs, and a
  // tile the rows of a block. Tiles are in groups of the same units.
  int threads;  // of a block; 0: without tiles, one thread has all steps of its units
  int units;    // of a thread
  int thread_steps;
  int width_bits;   // the width of a row is a power of two, this its exponent
  int depth;        // LookBack::before
  int input_bytes;  // of shared memory for what steps read
  unsigned groups;
  int64_t tiles;  // of a group
  void* links;    // TileLinks

  constexpr int rows() const { return threads >> width_bits; }
  // Of a block.
  constexpr int64_t shared_bytes(int live_states) const {
    return input_bytes +
           threads * (2 * map_bytes(units, live_states) + 3 * mapped_bytes(units, live_states) + 1);
  }
  // Of `links`.
  constexpr int64_t link_bytes(int live_states) const {
    if (tiles < 2) return 0;
    return (groups * (tiles + (tiles + 7) / 8) << width_bits) * map_bytes(units, live_states) + 4;
  }
};

// What a step of a thread reads, at most, in bytes, given those of a value.
constexpr int64_t independent_step_bytes(const CellShape& cell, int units, int value_bytes, bool backward,
                                         bool dense) {
  const int sum_bytes = value_bytes == 8 ? 8 : 4, projection_bytes = cell.wide ? sum_bytes : value_bytes,
            others = cell.step_inputs + (backward ? cell.saved + 1 + cell.outputs : 0);
  const int64_t bytes = int64_t{units} * (cell.gates * projection_bytes + others * value_bytes) +
                        (dense ? 0 : sum_bytes),
                aligned_to = units * sum_bytes;
  return (bytes + aligned_to - 1) / aligned_to * aligned_to;
}
constexpr int kRingStages = 4;
// The steps that are read together, given what one reads.
constexpr int step_group(int64_t step_bytes) { return step_bytes <= 16 ? 8 : step_bytes <= 48 ? 4 : 2; }

// The steps of a thread of a tile, of so many threads. Long ones have few tiles to look back at.
constexpr int tile_thread_steps(const CellShape& cell, int value_bytes, bool backward,
                                const UnitTiles& tiles) {
  constexpr int64_t kTileBytes = 58 << 10;  // of what steps read: room for three tiles of a multiprocessor
  const int64_t step_bytes = independent_step_bytes(cell, tiles.units, value_bytes, backward, /*dense=*/true),
                steps = kTileBytes / (tiles.threads * larger<int64_t>(step_bytes, 1)),
                group = step_group(step_bytes);
  return static_cast<int>(clamped<int64_t>(steps / group * group, group, 32));
}
// The shared memory of a tile for what its steps read, or for the sums of its gradients.
constexpr int tile_input_bytes(const CellShape& cell, int value_bytes, bool backward, bool dense,
                               const UnitTiles& tiles) {
  const int64_t step_bytes = independent_step_bytes(cell, tiles.units, value_bytes, backward, dense),
                of_sums = backward ? int64_t{tiles.units} * cell.sums() * (value_bytes == 8 ? 8 : 4) : 0;
  return static_cast<int>(ceil_div(tiles.threads * larger(tiles.thread_steps * step_bytes, of_sums), 16) *
                          16);
}

}  // namespace lltm_ext
