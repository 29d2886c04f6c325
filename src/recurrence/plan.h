// Which kernel runs a sequence, and how its grid shares out the work. Host code without torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "recurrence/cell.h"

namespace lltm_ext {

enum class Algorithm { kAuto, kStepwise, kCluster, kGrid };

// A persistent kernel: how its blocks exchange values, and the share of the weights that a block holds.
struct Variant {
  Algorithm algorithm;
  bool general;    // whether a group may have several tiles of rows, and steps may differ in theirs
  int unit_tiles;  // of 16 hidden units, a block
  int chunks;      // of 64 bytes, of the reduction, a warp
  bool on_hopper_only = false;
  bool tf32 = false;  // rounds the float32 that it multiplies
};

// The first that fits and pays is the fastest. A block of few units makes for many blocks, and slow exchange;
// one of many units for much work a step. The order and the limits below are measured
// (docs/design/recurrence.md) on Hopper. Variants that others can stand in for are compiled for it only: for
// all chips they were a fifth of the wheel.
constexpr Variant kHalfVariants[] = {
    {Algorithm::kCluster, false, 2, 2},    {Algorithm::kGrid, false, 2, 4, true},
    {Algorithm::kGrid, false, 1, 4, true}, {Algorithm::kGrid, false, 2, 8, true},
    {Algorithm::kGrid, false, 1, 8},       {Algorithm::kCluster, false, 4, 8},
    {Algorithm::kGrid, true, 2, 4},        {Algorithm::kGrid, true, 2, 8},
};
constexpr Variant kFloatVariants[] = {
    // on tensor cores, if TF32 is allowed
    {Algorithm::kGrid, false, 1, 2, true, true},
    {Algorithm::kGrid, false, 2, 4, true, true},
    {Algorithm::kGrid, false, 1, 4, true, true},
    {Algorithm::kGrid, false, 2, 8, true, true},
    {Algorithm::kGrid, false, 1, 8, true, true},
    {Algorithm::kGrid, true, 2, 8, true, true},
    {Algorithm::kGrid, true, 1, 8, true, true},
    // IEEE
    {Algorithm::kGrid, false, 1, 2, true},
    {Algorithm::kGrid, false, 1, 4, true},
    {Algorithm::kGrid, false, 1, 8, true},
    {Algorithm::kGrid, true, 1, 4},
    {Algorithm::kGrid, true, 1, 8},
    {Algorithm::kCluster, false, 1, 2},
};

// A step's product and cell in one kernel: so many rows of the batch a block, and so many blocks that share
// out the product of a tile. No parts: that kernel does not run, a product and a pointwise kernel do.
struct StepTile {
  int rows = 0, parts = 0;
};
constexpr int kForwardUnits = 32;
constexpr int backward_units(int rows) { return rows > 64 ? 144 : 64; }

struct Plan {
  Algorithm algorithm = Algorithm::kStepwise;
  Variant variant = {};
  GridShape grid = {};
  StepTile step = {};   // if stepwise
  std::string why_not;  // the algorithm that was asked for can't run

  bool is_fused() const { return algorithm != Algorithm::kStepwise || step.parts > 0; }
};

struct Problem {
  int64_t hidden, batch;
  bool dense;  // every step has all of the batch
  bool backward;
  int element_size, gates;
  int sequences = 1;  // of these sizes, side by side in one launch
  bool tf32 = false;  // products of float32 may be rounded to it
};

struct Chip {
  int compute_capability;  // major * 10 + minor
  int multiprocessors;
  bool hopper;  // and the build has code for just that: step_hopper.cuh, all variants
};

namespace plan_detail {

constexpr int kWarps = 8, kTileRows = 8, kClusterBlocks = 8;

inline int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// Whether a variant can run the problem; the plan's grid, if so.
inline bool fits(const Variant& v, const Problem& p, const Chip& chip, GridShape& grid) {
  const int units = 16 * v.unit_tiles;
  if (v.on_hopper_only && !chip.hopper) return false;
  if (v.tf32 && !p.tf32) return false;
  if (p.hidden > kWarps / v.unit_tiles * v.chunks * (64 / p.element_size)) return false;
  if (!p.dense && !v.general) return false;
  grid.members = static_cast<int>((p.hidden + units - 1) / units);
  const bool cluster = v.algorithm == Algorithm::kCluster;
  // A block alone is no cluster, and may not send to itself as to one: an idle one stands beside it.
  if (cluster) grid.members = std::max(grid.members, 2);
  if (cluster && (grid.members > kClusterBlocks || chip.compute_capability < 90)) return false;
  // Clusters lie within a GPC, of which they rarely fill the last multiprocessors.
  const int blocks = cluster ? chip.multiprocessors / 11 * 10 : chip.multiprocessors;
  const int resident = blocks / (p.sequences * grid.members);
  if (resident == 0) return false;
  int64_t rows = (p.batch + resident - 1) / resident;
  if (rows > kTileRows) {
    if (cluster) {
      rows = kTileRows;  // further clusters wait
    } else if (v.general) {
      rows = (rows + kTileRows - 1) / kTileRows * kTileRows;
    } else {
      return false;
    }
  }
  // The cell states of a group's rows stay in shared memory, beside what fills nearly all of it.
  if (rows * units * 4 > 20 * 1024 || p.batch > INT32_MAX / 2) return false;
  grid.rows = static_cast<int>(rows);
  grid.groups = static_cast<int>((p.batch + rows - 1) / rows);
  return true;
}

// Whether a variant that fits is faster than stepwise and than the variants after it: up to some number of
// clusters that wait for others to end, or of tiles that a group works through one after the other. Several
// sequences at once: where they are faster so than one after the other.
inline bool pays(const Variant& v, const Problem& p, const Chip& chip, const GridShape& grid,
                 const StepTile& step) {
  if (v.algorithm == Algorithm::kCluster) {
    const int rounds = p.backward || p.sequences > 1 ? 1 : 9;
    return p.sequences * grid.groups <= rounds * (chip.multiprocessors / 11 * 10 / grid.members);
  }
  // A second tile, beyond the size up to which clusters take one sequence after the other.
  if (p.sequences > 1) return grid.rows <= kTileRows * (p.element_size == 2 && p.hidden > 512 ? 2 : 1);
  const int tiles = p.element_size > 2 ? 4 : (p.backward ? 6 : 8) - (step.parts > 0 ? 2 : 0);
  return grid.rows <= kTileRows * tiles;
}

// Four parts, two or one, each with some of K.
inline int parts_of(bool four, bool two, int64_t k) {
  int parts = four ? 4 : two ? 2 : 1;
  while (parts > 1 && parts * 64 > k) parts /= 2;
  return parts;
}

// Tiles of many rows read the weights less often, ones of few make more blocks. Four parts if all blocks then
// have a multiprocessor of their own, two if a half. A block that has much of the product has few others
// beside it that read the same rows: there a library's product and a kernel for the cell are faster. So are
// they where a tile has 128 rows of more than three gates.
inline StepTile forward_tile(const Problem& p, const Chip& chip) {
  const int64_t columns = tiles_of(p.hidden, kForwardUnits), of_64 = tiles_of(p.batch, 64) * columns;
  const bool few = p.batch <= 64 || p.hidden <= 512 || 2 * of_64 <= chip.multiprocessors;
  const int rows = few ? 64 : 128;
  const int64_t tiles = tiles_of(p.batch, rows) * columns;
  const int parts = parts_of(4 * tiles <= chip.multiprocessors, tiles <= chip.multiprocessors, p.hidden);
  if (p.hidden > 1024 * parts || (rows > 64 && p.gates > 3)) return {};
  return {rows, parts};
}

// K is longer here by the gates. Four parts even where some multiprocessors have two blocks. Large tiles in
// clusters of eight if all of these run at once.
inline StepTile backward_tile(const Problem& p, const Chip& chip) {
  const int64_t k = p.gates * p.hidden;
  const int64_t tiles = tiles_of(p.batch, 64) * tiles_of(p.hidden, backward_units(64));
  const int parts = parts_of(8 * tiles <= 3 * chip.multiprocessors, tiles <= chip.multiprocessors, k);
  if (k <= (parts == 4 ? 8192 : 1024 * parts)) return {64, parts};
  const int64_t large = tiles_of(p.batch, 128) * tiles_of(p.hidden, backward_units(128));
  if (kClusterBlocks * large <= chip.multiprocessors / 11 * 10) return {128, kClusterBlocks};
  return {};
}

inline StepTile step_tile(const Problem& p, const Chip& chip) {
  if (!chip.hopper || p.element_size != 2 || !p.dense || p.hidden % 8 != 0) return {};
  if (p.batch * p.hidden == 0 || p.batch > INT32_MAX / 2 || p.sequences > 1) return {};
  return p.backward ? backward_tile(p, chip) : forward_tile(p, chip);
}

inline std::string why_not(const Problem& p, const Chip& chip, Algorithm wanted) {
  if (p.element_size == 8) return "takes float16, bfloat16 and float32, got float64";
  if (p.hidden % 8 != 0)
    return "needs a hidden_size that is a multiple of 8, got " + std::to_string(p.hidden);
  const int needed = wanted == Algorithm::kCluster ? 90 : 80;
  const auto dotted = [](int x) { return std::to_string(x / 10) + "." + std::to_string(x % 10); };
  if (chip.compute_capability < needed) {
    return "needs compute capability " + dotted(needed) + ", got " + dotted(chip.compute_capability);
  }
  if (wanted == Algorithm::kCluster && !p.dense) return "takes no packed sequences";
  return "has no room on this GPU for hidden_size = " + std::to_string(p.hidden) +
         " and batch = " + std::to_string(p.batch);
}

}  // namespace plan_detail

// Plans `wanted`, or for kAuto what is fastest. Stepwise runs everything. `has_room(variant, grid)` says
// whether a multiprocessor has the shared memory for a block.
template <class HasRoom>
Plan plan_recurrence(const Problem& problem, const Chip& chip, Algorithm wanted, HasRoom&& has_room) {
  const StepTile step = plan_detail::step_tile(problem, chip);
  Plan plan;
  plan.step = step;
  if (wanted == Algorithm::kStepwise) return plan;
  const bool possible = problem.element_size <= 4 && problem.hidden % 8 == 0 && problem.hidden > 0 &&
                        problem.batch > 0 && chip.compute_capability >= 80;
  const auto choose = [&](const auto& variants) {
    for (const Variant& v : variants) {
      GridShape grid;
      if (wanted != Algorithm::kAuto && wanted != v.algorithm) continue;
      // Backward, weights of four gates, gradients of all and no tensor cores are more than a multiprocessor
      // holds. Who asks for the forward by name wants both.
      const bool only_forward = problem.element_size == 4 && !v.tf32 && problem.gates > 3 && v.chunks > 4;
      if (only_forward && (problem.backward || wanted != Algorithm::kAuto)) continue;
      if (!plan_detail::fits(v, problem, chip, grid)) continue;
      if (wanted == Algorithm::kAuto && !plan_detail::pays(v, problem, chip, grid, step)) continue;
      if (!has_room(v, grid)) continue;
      plan.algorithm = v.algorithm;
      plan.step = {};
      plan.variant = v;
      plan.grid = grid;
      return;
    }
  };
  if (possible) problem.element_size == 2 ? choose(kHalfVariants) : choose(kFloatVariants);
  if (wanted != Algorithm::kAuto && plan.algorithm != wanted) {
    plan.why_not = plan_detail::why_not(problem, chip, wanted);
  }
  return plan;
}

}  // namespace lltm_ext
