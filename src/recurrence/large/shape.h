// The sizes of the kernels of large layers: their tiles, and how they divide registers and shared memory. The
// kernels take them at compile time, the planner and the launches at run time. For host and device.
//
// Forward, a pair of blocks has 32 units and the rows of a group. Each block multiplies one half of K for all
// 32, and computes the cell for 16 of them. Backward, a cluster of eight blocks has 128 units, and each block
// multiplies an eighth of K, which is all gates of all units.
#pragma once

#include "common/hopper/sizes.h"
#include "recurrence/cell.h"

namespace lltm_ext {

// A kernel's part of the problem. Registers are those of a thread.
struct LargeTile {
  int rows, rounds;  // a group has `rounds` tiles of 32 or 64 rows, which take turns
  int k_tiles;       // in a block's part of K, each of 64
  int stage_tiles;   // of h, or of the gates' gradients, in a stage
  int rounds_ahead;  // whose inputs the cells' threads have begun to load
  int product_registers, cell_registers, loader_registers;

  constexpr int group_rows() const { return rows * rounds; }
};

// Tiles of 32 rows have a shorter way from the product to the next step, those of 64 rows read weights from
// shared memory half as often. The order of several rounds hides that way behind the products of others.
constexpr LargeTile kLargeTiles[] = {
    {32, 2, 8, 4, 2, 176, 120, 40},  {32, 4, 8, 4, 4, 176, 120, 40},  {64, 4, 8, 2, 2, 192, 104, 24},
    {32, 2, 12, 3, 2, 184, 104, 40}, {32, 4, 12, 3, 4, 184, 104, 40}, {64, 4, 12, 2, 2, 192, 104, 24},
    {32, 2, 16, 2, 2, 184, 104, 40}, {64, 2, 16, 1, 1, 192, 104, 24},
};

// Backward, K is as long as the number of gates says. Of equally fast tiles the first is taken.
constexpr LargeTile kLargeBackwardTiles[] = {
    {32, 4, 4, 2, 4, 176, 120, 40}, {64, 4, 4, 2, 2, 192, 104, 24},  {32, 4, 6, 3, 4, 176, 120, 40},
    {64, 4, 6, 3, 2, 192, 104, 24}, {32, 2, 8, 4, 2, 176, 120, 40},  {32, 4, 8, 4, 4, 176, 120, 40},
    {64, 4, 8, 2, 2, 192, 104, 24}, {32, 2, 12, 3, 2, 184, 104, 40}, {64, 2, 12, 2, 2, 192, 104, 24},
};

// A launch of groups that share nothing.
struct LargeGrid {
  int tile = -1;        // in kLargeTiles or kLargeBackwardTiles; -1: none
  int group_pairs = 0;  // of blocks of a group
  int groups = 0;
  int most_groups = 0;  // that are resident at the same time, and so of one launch
  // The memory that its blocks share: counters; of float32, the exchanged h and each sequence's product
  // with h0, from these bytes on.
  int64_t exchanged_at = 0, products_at = 0, product_bytes = 0, bytes = 0;
};

struct LargeShape {
  static constexpr int kThreads = 512, kUnits = 16;             // units of a block
  static constexpr int kLoadingWarps = 2, kReleasingWarps = 2;  // of the fourth warpgroup
  static constexpr int kTileUnits = 64;                         // of a tile of K, and of a counter
  static constexpr int kMostShared = 227 * 1024, kMostRegisterTiles = 8, kMostStages = 24;
  static constexpr int kTileBytes = 64 * hopper::kSwizzleBytes;  // of weights: 16 units of four gates
  static constexpr int kArrivalBytes = 128;                      // of a counter, which has an L2 line

  CellShape cell;
  LargeTile tile;
  bool backward = false;
  int element_size = 2;  // of the tensors; weights and h have two bytes on the chip

  // ---- clusters, which have 16 units for each of their blocks
  constexpr int cluster_blocks() const { return backward ? 8 : 2; }
  constexpr int cluster_units() const { return cluster_blocks() * kUnits; }
  constexpr int64_t most_hidden() const {
    return int64_t{kTileUnits} * (cluster_blocks() * tile.k_tiles / (backward ? cell.gates : 1));
  }

  // ---- weights: as many tiles of K as fit in registers, the others in shared memory
  constexpr int register_tiles() const {
    return tile.k_tiles < kMostRegisterTiles ? tile.k_tiles : kMostRegisterTiles;
  }
  constexpr int shared_tiles() const { return tile.k_tiles - register_tiles(); }

  // ---- the ring of stages, which each loading warp fills in turn
  constexpr int round_stages() const { return tile.k_tiles / tile.stage_tiles; }
  constexpr int own_stages() const { return round_stages() / kLoadingWarps; }
  constexpr int h_tile_bytes() const { return tile.rows * hopper::kSwizzleBytes; }
  constexpr int stage_bytes() const { return tile.stage_tiles * h_tile_bytes(); }
  constexpr int stages() const {
    const int fit = (kMostShared - 1024 - other_bytes()) / stage_bytes();
    return fit < kMostStages ? fit : kMostStages;
  }

  // ---- the cells: a thread has two rows of some units
  constexpr int units_of_thread() const { return tile.rows / 16; }
  constexpr int values_of_thread() const { return 2 * units_of_thread(); }
  // What the cells of a round read, in shared memory.
  constexpr int projection_bytes() const {
    return 128 * values_of_thread() * cell.gates * (cell.wide ? 4 : element_size);
  }
  constexpr int input_bytes() const {
    const int values = 128 * values_of_thread() * element_size;
    if (backward) return values * (cell.saved + cell.outputs + cell.step_inputs);
    return projection_bytes() + values * cell.step_inputs;
  }
  constexpr int saved_registers() const {
    return (cell.saved + (cell.outputs_h ? 0 : cell.outputs)) * values_of_thread() * element_size / 4;
  }
  constexpr int parameter_registers() const { return cell.parameters * units_of_thread() * element_size / 4; }
  // States and h, where cells read it, stay in registers if there are few. Their gradients do not.
  constexpr bool live_in_registers() const {
    return !backward && cell.live_states() * values_of_thread() * tile.rounds <= 16;
  }
  constexpr int live_bytes() const {
    return live_in_registers() ? 0 : cell.live_states() * tile.group_rows() * kUnits * 4;
  }
  // Backward, a thread's sums of the gradients of projections and parameters.
  constexpr int sum_bytes() const { return backward ? 128 * cell.sums() * units_of_thread() * 4 : 0; }
  // ---- shared memory
  constexpr int weight_bytes() const { return 2 * shared_tiles() * kTileBytes; }
  // Of one block's part of K.
  constexpr int partial_bytes() const { return (backward ? kUnits : 64) * tile.rows * 4; }
  constexpr int barriers() const { return 2 * kMostStages + 1 + cluster_blocks() + tile.rounds; }
  constexpr int other_bytes() const {
    return weight_bytes() + cluster_blocks() * partial_bytes() + live_bytes() + sum_bytes() +
           tile.rounds_ahead * input_bytes() + 8 * barriers();
  }
  constexpr int shared_bytes() const { return other_bytes() + stages() * stage_bytes(); }

  // Whether there is such a kernel.
  constexpr bool exists() const {
    const bool has_type = element_size == 2 || (element_size == 4 && cell.bounded && !backward);
    return has_type && cell.recurrent && cell.gates <= 4 && !cell.mixes_units() && !cell.resets_to_initial &&
           (backward ? backward_registers() : forward_registers()) <= tile.cell_registers - 16 &&
           stages() >= kLoadingWarps;
  }
  // What a cell's thread keeps in a round.
  constexpr int forward_registers() const {
    return input_bytes() / 128 / 4 + saved_registers() + parameter_registers() +
           (live_in_registers() ? 16 : values_of_thread());
  }
  constexpr int backward_registers() const {
    const int results = (1 + cell.separate) * cell.gates * values_of_thread() / 2;
    return results + parameter_registers() + cell.sums() * units_of_thread() +
           (1 + cell.live_states()) * values_of_thread();
  }

  // ---- a step's clocks, by a model of measured times that the planner compares tiles with: all rounds'
  // products or cells, or one round's and the way to the next step, or the reads of h, of which L2 has 2,200
  // bytes a clock for all blocks of a launch. The products of 16 of K by one warpgroup take half a clock a
  // row, and 32 more if the weights are in shared memory.
  constexpr int round_clocks() const {
    const int products = 8 * (tile.k_tiles * tile.rows / 2 + 32 * shared_tiles()) + 200;
    const int cells = backward ? 450 + 60 * tile.rows : 1050 + 30 * tile.rows;
    return products > cells ? products : cells;
  }
  constexpr int64_t step_clocks(int64_t hidden, int blocks) const {
    const int way_between = backward ? 5200 : 4500, of_block = 2200 / blocks;
    const int bytes_a_clock = of_block < 28 ? of_block : 28;
    const int64_t parts = backward ? cluster_blocks() : 2, values = backward ? cell.gates * hidden : hidden;
    const int64_t reads = tile.group_rows() * 2 * values / parts / bytes_a_clock;
    const int busy = tile.rounds * round_clocks(), way = round_clocks() + way_between;
    const int least = busy > way ? busy : way;
    return least > reads ? least : reads;
  }

  // ---- the counters of what the blocks of a group have stored: of each tile of rows, one for 64 units. A
  // group has whole tiles of units, so every counter gets as many arrivals a step.
  static constexpr int kArrivalsAStep = kTileUnits / kUnits;
  constexpr int group_pairs(int64_t hidden) const {
    const int units = backward ? cluster_units() : kTileUnits;
    return static_cast<int>((hidden + units - 1) / units) * (units / (2 * kUnits));
  }
  constexpr int64_t arrival_bytes(const LargeGrid& grid) const {
    return int64_t{kArrivalBytes} * grid.groups * tile.rounds * (grid.group_pairs / 2);
  }
  constexpr void place_memory(LargeGrid& grid, int64_t batch, int64_t hidden, int sequences) const {
    const int64_t state = element_size == 4 ? batch * hidden : 0, in_lines = kArrivalBytes;
    grid.exchanged_at = arrival_bytes(grid);
    grid.products_at = grid.exchanged_at + ceil_div(2 * state * 2, in_lines) * in_lines;
    grid.product_bytes = ceil_div(state * cell.gates * 4, in_lines) * in_lines;
    grid.bytes = grid.products_at + sequences * grid.product_bytes;
  }
};

}  // namespace lltm_ext
