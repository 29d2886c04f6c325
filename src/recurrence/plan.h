// The planner: which kernel runs a sequence, and how its grid divides the work. Host code without torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>

#include "common/device.h"
#include "common/portable.h"
#include "recurrence/large/shape.h"
#include "recurrence/persistent/shape.h"
#include "recurrence/stepwise/fused_shape.h"
#include "recurrence/stepwise/small_batch_shape.h"
#include "recurrence/without_product/shape.h"

namespace lltm_ext {

struct Plan {
  Algorithm algorithm = Algorithm::kStepwise;
  int variant = -1;  // a persistent kernel's index in kHalfVariants or kFloatVariants
  GroupGrid grid = {};
  FusedStepTile fused_step = {};    // for kStepwise only
  SmallBatchTile small_batch = {};  // for kStepwise only
  LargeGrid large = {};             // for kGrid only: another persistent kernel, in place of a variant
  bool independent = false;  // for kStepwise only: one kernel runs all steps of a cell without a product
  UnitTiles tiles = {};      // for these cells
  int most_groups = 0;       // of one launch, if the groups are launched in parts; else 0
  int heads = 1;             // that a persistent kernel runs side by side, each with its block of the weights
  int64_t row_parts_bytes = 0, given_bytes = 0;  // of memory for GroupGridOfRows
  std::string why_not;                           // why the requested algorithm can't run

  bool is_fused() const { return runs_all_steps() || fused_step.split_k > 0 || small_batch.rows > 0; }
  // Whether one launch runs all steps. The states then stay on the chip between them.
  bool runs_all_steps() const { return algorithm != Algorithm::kStepwise || independent; }
};

struct Problem {
  CellShape cell;
  int64_t hidden, batch;
  bool dense;  // every step has the whole batch
  bool backward;
  int element_size;
  int sequences = 1;          // sequences of these sizes that one launch runs side by side
  bool tf32 = false;          // float32 operands may be rounded to TF32
  bool side_by_side = false;  // another such sequence runs on another stream
  int64_t steps;              // that one launch runs
  int heads = 1;              // into which the product with h is divided; `hidden` is that of a head
};

namespace plan_detail {

// The multiprocessors that groups of blocks can fill.
inline int multiprocessors(const GroupGrid& grid, const PersistentVariant& v, const DeviceInfo& device) {
  const bool clusters = v.algorithm == Algorithm::kCluster && grid.group_blocks > 1;
  return clusters ? device.cluster_multiprocessors[grid.group_blocks] : device.multiprocessors;
}

// Whether a variant can run the problem; sets the grid if so.
inline bool fits(const PersistentVariant& v, const Problem& p, const DeviceInfo& device, GroupGrid& grid) {
  const PersistentShape shape = {p.cell, v, p.element_size, p.backward};
  const int units = shape.units();
  if (v.on_hopper_only && !device.has_sm90a) return false;
  if (p.cell.mixes_units() && (v.any_rows || v.row_per_block)) return false;
  if (p.heads > 1 && (p.cell.mixes_units() || v.row_per_block)) return false;
  if (v.tf32 && !p.tf32) return false;
  if (p.hidden > shape.most_hidden()) return false;
  if (!v.row_per_block && p.hidden % 8 != 0) return false;
  if (!shape.exists()) return false;
  if (!p.dense && !v.any_rows) return false;
  const bool cluster = v.algorithm == Algorithm::kCluster;
  grid.group_blocks = static_cast<int>(ceil_div(p.hidden, units));
  // A single block can't send to itself through distributed shared memory, so it gets an idle neighbor.
  if (shape.through() == ExchangeThrough::kCluster) grid.group_blocks = std::max(grid.group_blocks, 2);
  if (cluster && (grid.group_blocks > kMostClusterBlocks || device.compute_capability < 90)) return false;
  const int resident = multiprocessors(grid, v, device) / (p.sequences * p.heads * grid.group_blocks);
  if (resident == 0) return false;
  int64_t rows = ceil_div(p.batch, resident);
  if (rows > shape.row_tile()) {
    if (cluster || p.cell.mixes_units()) {
      // Clusters beyond the resident ones wait for a place, other groups for another launch.
      rows = shape.row_tile();
    } else if (v.any_rows) {
      rows = ceil_div(rows, kRowTile) * kRowTile;
    } else {
      return false;
    }
  }
  // The states of a group's rows must fit in the shared memory that the weights leave free.
  if (rows * units * 4 * std::max(p.cell.live_states(), 1) > 20 * 1024 || p.batch > INT32_MAX / 2)
    return false;
  grid.rows = static_cast<int>(rows);
  grid.groups = static_cast<int>(ceil_div(p.batch, rows));
  return shape.shared_bytes({static_cast<int>(p.hidden), grid.group_blocks, 0, grid.rows}) <=
         device.shared_bytes;
}

// The most row tiles per group with which a grid's steps are faster than those of other kernels.
inline int most_row_tiles_of_grid(const PersistentVariant& v, const Problem& p, bool has_fused_steps) {
  if (p.element_size > 2) {
    if (p.tf32) return p.backward ? 4 : 6;
    // Stepwise, backward is slow with few units and many rows: its products have little work.
    return v.chunks == 1 && p.backward ? 8 : 4;
  }
  if (!has_fused_steps) return p.backward ? 6 : 8;
  // Two grids cannot run at the same time, but the fused steps of two sequences can.
  if (p.side_by_side) return 3;
  return p.backward ? 4 : 6;
}

// A block of many units takes longer than an exchange between smaller ones, but has room for more rows. In
// IEEE float32 clusters of two blocks begin where smaller blocks have more than one row.
inline bool has_rows_for(const PersistentVariant& v, const Problem& p, const DeviceInfo& device,
                         const GroupGrid& grid) {
  const bool on_tensor_cores = p.element_size == 2 || v.tf32;
  if (grid.group_blocks == 2 && v.unit_tiles == 4 && !on_tensor_cores) {
    const int multiprocessors =
        p.cell.mixes_units() ? device.cluster_multiprocessors[kMostClusterBlocks] : device.multiprocessors;
    return p.heads * p.batch * ceil_div(p.hidden, 16) > multiprocessors;
  }
  if (v.unit_tiles * v.chunks < 64) return true;
  return p.batch > (v.unit_tiles > kBlockWarps ? 64 : v.tf32 || v.chunks == 8 ? 160 : 128);
}

// The most waves of clusters of several blocks that take less time than the kernels after them. Each wave
// loads the weights again, so fused steps, where there are any, replace many waves, and few steps have few.
inline int most_cluster_waves(const PersistentVariant& v, const Problem& p, bool has_fused_steps) {
  // In TF32, clusters of larger blocks take over after one wave of clusters of smaller ones.
  if (v.tf32 && v.unit_tiles < 4) return 1;
  if (!v.tf32 && p.sequences > 1) return 1;
  const bool large_blocks = v.unit_tiles >= 8, few_steps = p.backward && p.steps < 16;
  if (p.element_size == 2 && p.backward && (!large_blocks || few_steps)) return 1;
  if (!has_fused_steps) return few_steps ? 4 : 9;
  if (large_blocks) return p.backward ? 6 : 9;
  // Blocks with more of K are for the hidden sizes that the others do not hold.
  return v.chunks <= 4 ? 7 : p.hidden > 256 ? 4 : 0;
}

inline bool cluster_pays_off(const PersistentVariant& v, const Problem& p, const DeviceInfo& device,
                             const GroupGrid& grid, bool has_fused_steps) {
  const PersistentShape shape = {p.cell, v, p.element_size, p.backward};
  int waves = 9;
  if (grid.group_blocks == 1) {
    if (p.backward && p.hidden > 64 && p.batch <= 32) return false;
    // On tensor cores, waves of single blocks take less time than any other steps, however many there are.
    if (p.element_size == 2 || (v.tf32 && p.hidden > 32)) return true;
  } else {
    if (p.hidden <= shape.units()) return false;  // a block would be idle
    // Without heads, the same products would be as many times larger.
    if (p.heads == 1) waves = most_cluster_waves(v, p, has_fused_steps);
  }
  return int64_t{p.sequences} * p.heads * grid.groups <=
         waves * (multiprocessors(grid, v, device) / grid.group_blocks);
}

// Whether a fitting variant beats the stepwise loop and all later variants: up to some number of cluster
// waves, or of row tiles per group. For several sequences: whether it beats running them apart.
inline bool pays_off(const PersistentVariant& v, const Problem& p, const DeviceInfo& device,
                     const GroupGrid& grid, const FusedStepTile& fused_step) {
  const int64_t side_by_side = int64_t{p.sequences} * p.heads, rows = side_by_side * p.batch;
  if (!has_rows_for(v, p, device, grid)) return false;
  // A step of a loop takes a product and a kernel that waits for it, as long as eight waves of clusters or
  // one of a grid, which exchanges through L2. With products of its own it takes as long as three.
  if (p.cell.mixes_units()) {
    // Backward, four gates of such a block do not fit in registers.
    if (v.unit_tiles == 8 && v.chunks == 8 && p.backward && p.cell.gates > 3) return false;
    const int of_grid = p.cell.products > 0 ? 3 : 1, waves = v.algorithm == Algorithm::kCluster ? 8 : of_grid;
    return side_by_side * grid.groups <= waves * (multiprocessors(grid, v, device) / grid.group_blocks);
  }
  if (v.row_per_block) {  // with more rows, blocks of several rows are faster
    const int64_t rows_each = ceil_div(rows, device.multiprocessors);
    if (p.element_size == 2) return p.hidden <= 32 ? rows_each <= 2 : p.hidden % 8 != 0 && rows_each == 1;
    if (p.tf32) return rows_each <= (p.hidden <= 32 ? 2 : 1);
    if (p.hidden > 96) return rows_each <= 2;
    return p.hidden <= 32 || p.hidden > 64 || rows_each <= 4;
  }
  const bool has_fused_steps = fused_step.split_k > 0;
  if (v.algorithm == Algorithm::kCluster) return cluster_pays_off(v, p, device, grid, has_fused_steps);
  if (v.tf32 && v.chunks == 1) return rows <= 96;  // clusters are faster with more rows
  // Two sequences take a second row tile only at hidden sizes that are too large for clusters.
  if (p.sequences > 1) return grid.rows <= kRowTile * (p.element_size == 2 && p.hidden > 512 ? 2 : 1);
  return grid.rows <= kRowTile * most_row_tiles_of_grid(v, p, has_fused_steps);
}

// 4, 2 or 1, with at least 64 of K in each part.
inline int split_k_of(bool four, bool two, int64_t k) {
  int split_k = four ? 4 : two ? 2 : 1;
  while (split_k > 1 && split_k * 64 > k) split_k /= 2;
  return split_k;
}

inline FusedStepShape fused_shape(const Problem& p, int rows) { return {p.cell.gates, rows, p.backward}; }
inline int64_t fused_tiles(const Problem& p, int rows) {
  return ceil_div(p.batch, rows) * ceil_div(p.hidden, fused_shape(p, rows).units());
}

// Tiles of many rows read the weights less often; tiles of few rows make more blocks. K is split in four if
// every block then gets its own multiprocessor, in two if every tile does. A library's product and a
// pointwise kernel are faster where a block gets much of K, since few other blocks then read the same rows.
// Only cells of three gates have a tile of 128 rows, so others may have twice as many of 64. Above that many,
// and above 1024 units, a product and a pointwise kernel were faster.
inline FusedStepTile fused_forward_tile(const Problem& p, const DeviceInfo& device) {
  const bool has_many = fused_shape(p, 128).exists();
  const int64_t most_tiles = device.multiprocessors / (has_many || p.hidden > 1024 ? 2 : 1);
  const bool few = p.batch <= 64 || p.hidden <= 512 || fused_tiles(p, 64) <= most_tiles;
  const int rows = few ? 64 : 128;
  const int64_t tiles = fused_tiles(p, rows);
  const int split_k =
      split_k_of(4 * tiles <= device.multiprocessors, tiles <= device.multiprocessors, p.hidden);
  if (p.hidden > 1024 * split_k || !fused_shape(p, rows).exists()) return {};
  return {rows, split_k};
}

// Here K is gates * hidden, so it is split in four even if some multiprocessors then get two blocks. Large
// tiles run in clusters of eight if all clusters are resident.
inline FusedStepTile fused_backward_tile(const Problem& p, const DeviceInfo& device) {
  const int64_t k = p.cell.gates * p.hidden;
  const int64_t tiles = fused_tiles(p, 64);
  const int split_k = split_k_of(8 * tiles <= 3 * device.multiprocessors, tiles <= device.multiprocessors, k);
  if (k <= (split_k == 4 ? 8192 : 1024 * split_k)) return {64, split_k};
  if (kMostClusterBlocks * fused_tiles(p, 128) <= device.cluster_multiprocessors[kMostClusterBlocks]) {
    return {128, kMostClusterBlocks};
  }
  return {};
}

inline FusedStepTile fused_step_tile(const Problem& p, const DeviceInfo& device) {
  if (!device.has_sm90a || !p.cell.recurrent || p.cell.mixes_units()) return {};
  if (p.element_size != 2 || !p.dense || p.hidden % 8 != 0) return {};
  if (p.heads > 1 || p.sequences > 1) return {};
  if (p.batch * p.hidden == 0 || p.batch > 64 * 65535) return {};  // limit of blockIdx.y
  FusedStepTile tile = p.backward ? fused_backward_tile(p, device) : fused_forward_tile(p, device);
  tile.is_spread = tile.rows > 0 && tile.split_k * fused_tiles(p, tile.rows) <= 2 * device.multiprocessors;
  return tile;
}

// Every multiprocessor gets the same number of blocks, one if the hidden size allows: all blocks read the
// same operands, so fewer blocks read less. Warps beyond those that a block's columns need split K.
inline SmallBatchTile small_batch_tile(const Problem& p, const DeviceInfo& device) {
  if (p.element_size != 4 || !p.cell.recurrent || p.cell.mixes_units() || p.sequences > 1 || p.heads > 1)
    return {};
  // With more rows, tensor cores are faster.
  const int most_rows = p.tf32 ? kMostSmallBatch / 2 : kMostSmallBatch;
  if (p.batch == 0 || p.batch > most_rows || p.hidden == 0 || p.hidden % 4 != 0) return {};
  SmallBatchShape shape = {p.backward ? 1 : p.cell.gates, {}};
  const int most_units = SmallBatchShape::kMostColumns / shape.products;
  const int64_t k = p.backward ? p.cell.gates * p.hidden : p.hidden;
  if (most_units == 0 || k > INT32_MAX / kMostSmallBatch) return {};
  const int64_t waves = ceil_div(p.hidden, int64_t{most_units} * device.multiprocessors);
  SmallBatchTile& tile = shape.tile;
  tile.rows = *std::lower_bound(std::begin(kSmallBatch), std::end(kSmallBatch), static_cast<int>(p.batch));
  tile.units = static_cast<int>(ceil_div(p.hidden, waves * device.multiprocessors));
  tile.split_k = static_cast<int>(std::min<int64_t>(SmallBatchShape::kMostWarps / shape.column_tiles(),
                                                    ceil_div(k, SmallBatchShape::kDepth)));
  while (tile.split_k > 1 && shape.shared_bytes() > device.shared_bytes) --tile.split_k;
  return tile;
}

// Tiles of units without a product, where the units leave most of the device idle. A map of what steps hand
// on takes further operations, so with many units one thread for all steps is faster.
inline UnitTiles unit_tiles(const Problem& p, const DeviceInfo& device) {
  constexpr int64_t kMostThreads = 64, kLeastSteps = 128;
  const int live = p.cell.live_states();
  if (live > kMostMappedStates || !(p.backward || p.cell.affine)) return {};
  UnitTiles tiles = {};
  tiles.units = tile_units(p.hidden, p.element_size);
  const int64_t all = p.batch * (p.hidden / tiles.units);
  if (all == 0 || all > kMostThreads * device.multiprocessors || p.steps < kLeastSteps) return {};
  while (1 << tiles.width_bits < std::min<int64_t>(all, 32)) ++tiles.width_bits;
  tiles.groups = static_cast<unsigned>(ceil_div(all, int64_t{1} << tiles.width_bits));
  // Small blocks do not all wait at the same time. With few groups many tiles of one run at once, and more
  // rows look farther back. Maps of more states take more registers.
  const bool many_rows = live <= 1 && !p.backward && tiles.groups < 64;
  tiles.threads = many_rows ? 256 : live <= 2 ? 128 : 64;
  tiles.thread_steps = tile_thread_steps(p.cell, p.element_size, p.backward, tiles);
  tiles.input_bytes = tile_input_bytes(p.cell, p.element_size, p.backward, /*dense=*/false, tiles);
  const int64_t shared_bytes = tiles.shared_bytes(live);
  if (shared_bytes > device.shared_bytes) return {};
  tiles.tiles = ceil_div(p.steps, int64_t{tiles.rows()} * tiles.thread_steps);
  if (tiles.groups * tiles.tiles > INT32_MAX) return {};
  // Of as many tiles as run at once, some segment has a known state before it, or soon has.
  const int64_t at_once = device.multiprocessors * (device.shared_bytes / shared_bytes);
  tiles.depth = static_cast<int>(ceil_div(at_once, int64_t{tiles.groups} * 8)) + 1;
  return tiles;
}

inline LargeShape large_shape(const Problem& p, int tile) {
  return {p.cell, p.backward ? kLargeBackwardTiles[tile] : kLargeTiles[tile], p.backward, p.element_size};
}

// A large layer's kernel, where it is faster than fused steps, or than float32's stepwise loop, which is no
// faster than these. Groups that are not resident at the same time have launches one after the other.
inline LargeGrid large_grid(const Problem& p, const DeviceInfo& device) {
  constexpr int64_t kLeastUnits = 64 * 1024;
  // Clusters hold 512 units of one gate in half types.
  const int64_t least_hidden = p.element_size == 2 && p.cell.gates == 1 ? 520 : 512;
  const bool is_alone = p.heads == 1 && !p.side_by_side;  // two directions run one after the other
  const bool has_type = p.element_size == 2 || (p.element_size == 4 && p.tf32);
  if (!device.has_sm90a || !has_type || !p.dense || !is_alone) return {};
  if (p.hidden < least_hidden || p.hidden % 8 != 0) return {};
  // Of fewer rows, grids take half types, and float32 up to their largest size.
  const bool has_small_grid = p.element_size == 2 || p.hidden <= 1024;
  if (has_small_grid && p.batch * p.hidden < kLeastUnits) return {};
  // Weights of float32 are read twice, to find their scale.
  if (p.steps < (p.element_size == 2 ? 2 : 4)) return {};
  LargeGrid best;
  // Of a fused step, as measured on an H200.
  const int64_t products = p.batch * p.hidden * p.hidden * p.cell.gates;
  int64_t best_clocks = p.backward ? 12'500 + products / 100'000 : 9'500 + products / 115'000;
  const int tiles = static_cast<int>(p.backward ? std::size(kLargeBackwardTiles) : std::size(kLargeTiles));
  for (int i = 0; i < tiles; ++i) {
    const LargeShape shape = large_shape(p, i);
    if (!shape.exists() || p.hidden > shape.most_hidden()) continue;
    if (shape.shared_bytes() > device.shared_bytes) continue;
    const int pairs = shape.group_pairs(p.hidden);
    const int resident = device.cluster_multiprocessors[shape.cluster_blocks()] / (2 * pairs);
    if (resident == 0) continue;
    const int groups = static_cast<int>(ceil_div(p.batch, shape.tile.group_rows()));
    const int at_once = std::min(groups, resident);
    const int64_t clocks =
        int64_t{ceil_div(groups, resident)} * shape.step_clocks(p.hidden, 2 * pairs * at_once);
    if (clocks >= best_clocks) continue;
    best = {i, pairs, groups, at_once};
    best_clocks = clocks;
  }
  if (best.tile >= 0) large_shape(p, best.tile).place_memory(best, p.batch, p.hidden, p.sequences);
  return best;
}

// The same for an algorithm requested by name, which must serve forward and backward. Float32 has no large
// layers backward.
inline LargeGrid large_grid(const Problem& p, const DeviceInfo& device, Algorithm requested) {
  if (requested == Algorithm::kCluster) return {};
  const LargeGrid found = large_grid(p, device);
  if (requested == Algorithm::kAuto) return found;
  if (p.element_size != 2) return {};
  Problem other = p;
  other.backward = !p.backward;
  const auto serves_other = [&](const PersistentVariant& v) {
    GroupGrid grid;
    return v.algorithm == requested && fits(v, other, device, grid);
  };
  const bool served = large_grid(other, device).tile >= 0 ||
                      std::any_of(std::begin(kHalfVariants), std::end(kHalfVariants), serves_other);
  return served ? found : LargeGrid();
}

inline std::string why_not(const Problem& p, const DeviceInfo& device, Algorithm requested) {
  if (!p.cell.recurrent) return "takes cells with a product of h, got one without";
  if (p.element_size == 8) return "takes float16, bfloat16 and float32, got float64";
  if (p.hidden % 8 != 0)
    return "needs a hidden_size that is a multiple of 8, got " + std::to_string(p.hidden);
  const int needed = requested == Algorithm::kCluster ? 90 : 80;
  const auto dotted = [](int x) { return std::to_string(x / 10) + "." + std::to_string(x % 10); };
  if (device.compute_capability < needed) {
    return "needs compute capability " + dotted(needed) + ", got " + dotted(device.compute_capability);
  }
  if (requested == Algorithm::kCluster && !p.dense) return "takes no packed sequences";
  if (p.cell.mixes_units() && !p.dense) return "takes no packed sequences of cells that read other units";
  return "has no room on this GPU for hidden_size = " + std::to_string(p.hidden) +
         " and batch = " + std::to_string(p.batch);
}

}  // namespace plan_detail

// Plans the requested algorithm, or the fastest for kAuto. The stepwise loop runs everything.
inline Plan plan_recurrence(const Problem& problem, const DeviceInfo& device, Algorithm requested) {
  Plan plan;
  const FusedStepTile fused_step = plan_detail::fused_step_tile(problem, device);
  plan.fused_step = fused_step;
  plan.small_batch = plan_detail::small_batch_tile(problem, device);
  plan.independent = !problem.cell.recurrent && !problem.cell.mixes_units() && problem.sequences == 1 &&
                     std::max(problem.batch, problem.hidden) <= INT32_MAX;
  if (plan.independent) plan.tiles = plan_detail::unit_tiles(problem, device);
  if (requested == Algorithm::kStepwise) return plan;
  const LargeGrid large = plan_detail::large_grid(problem, device, requested);
  if (large.tile >= 0) {
    const LargeShape shape = plan_detail::large_shape(problem, large.tile);
    plan = {Algorithm::kGrid, -1, {2 * large.group_pairs, large.groups, shape.tile.group_rows()}};
    plan.most_groups = large.groups > large.most_groups ? large.most_groups : 0;
    plan.large = large;
    return plan;
  }
  // An algorithm requested by name takes the variant that kAuto would take of it, if there is one.
  const auto choose = [&](const auto& variants, Algorithm algorithm, bool if_it_pays, bool in_parts) {
    for (int i = 0; i < static_cast<int>(std::size(variants)); ++i) {
      const PersistentVariant& v = variants[i];
      GroupGrid grid;
      if (algorithm != Algorithm::kAuto && algorithm != v.algorithm) continue;
      // In IEEE float32 with four gates these variants do not fit a multiprocessor backward. An algorithm
      // requested by name must serve forward and backward.
      const bool only_forward =
          problem.element_size == 4 && !v.tf32 && problem.cell.gates > 3 && v.chunks > 4;
      if (only_forward && (problem.backward || requested != Algorithm::kAuto)) continue;
      if (!plan_detail::fits(v, problem, device, grid)) continue;
      if (if_it_pays && !plan_detail::pays_off(v, problem, device, grid, fused_step)) continue;
      const int resident = device.multiprocessors / (problem.sequences * problem.heads * grid.group_blocks);
      const bool needs_parts = v.algorithm == Algorithm::kGrid && grid.groups > resident;
      if (needs_parts && !in_parts) continue;
      plan = {v.algorithm, i, grid};
      plan.heads = problem.heads;
      const PersistentShape shape = {problem.cell, v, problem.element_size, problem.backward};
      if (needs_parts) plan.most_groups = resident;
      plan.row_parts_bytes = problem.sequences * grid.groups * shape.row_parts_bytes(grid.group_blocks);
      if (!problem.backward && shape.through() == ExchangeThrough::kL2) {
        plan.given_bytes = problem.sequences * problem.steps * problem.batch * problem.hidden *
                           problem.cell.fed_apart() * problem.element_size;
      }
      return;
    }
  };
  const auto choose_of = [&](const auto& variants) {
    const bool any = requested == Algorithm::kAuto;
    // Of cells that read other units. They take further exchanges, which are faster in a cluster, and one
    // launch of larger blocks is faster than several of smaller ones.
    const bool cluster_first = any && problem.cell.mixes_units();
    choose(variants, cluster_first ? Algorithm::kCluster : requested, /*if_it_pays=*/true, false);
    for (const bool in_parts : {false, true}) {
      if (plan.variant < 0 && cluster_first)
        choose(variants, Algorithm::kGrid, /*if_it_pays=*/true, in_parts);
      if (plan.variant < 0 && !any) choose(variants, requested, /*if_it_pays=*/false, in_parts);
    }
  };
  const bool possible = problem.cell.recurrent && problem.element_size <= 4 && problem.hidden > 0 &&
                        problem.batch > 0 && device.compute_capability >= 80;
  if (possible) problem.element_size == 2 ? choose_of(kHalfVariants) : choose_of(kFloatVariants);
  if (requested != Algorithm::kAuto && plan.algorithm != requested) {
    plan.why_not = plan_detail::why_not(problem, device, requested);
  }
  return plan;
}

}  // namespace lltm_ext
