// The sizes of a persistent kernel: its tiles, and how it divides registers and shared memory. The kernels
// take them at compile time, the planner at run time. For host and device.
#pragma once

#include "recurrence/cell.h"
#include "recurrence/over_units.h"
#include "recurrence/persistent/variants.h"

namespace lltm_ext {

constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / 32;
constexpr int kRowTile = 8;             // rows of the batch in a product
constexpr int kChunkBytes = 64;         // a warp's step through K, in bytes of a row
constexpr int kLanesOfUnit = 4;         // lanes that compute a unit in a block of one row
constexpr int kRegisters = 1 << 16;     // registers of a multiprocessor
constexpr int kNumberedPartBytes = 64;  // of NumberedPart (units.cuh)

// How the blocks of a group exchange values; kBlock: a block has all units.
enum class ExchangeThrough { kL2, kCluster, kBlock };

// A block's group, and the block's number in it.
struct Group {
  int hidden;
  int blocks;
  int block;
  int rows;  // rows of the batch
};

// Bytes from one row to the next in shared memory. An offset of half the banks puts the two rows that a
// quarter of a warp reads into different banks.
LLTM_HOST_DEVICE constexpr int padded_row_bytes(int bytes) { return (bytes + 127) / 128 * 128 + 64; }

// Floats from one row to the next in the scratch of a product in IEEE float32. Avoids bank conflicts.
constexpr int scratch_stride(int chunks) { return chunks * 16 + (chunks % 2 ? 0 : 16); }

// Everything is counted in floats of shared memory where no other unit is given.
struct PersistentShape {
  CellShape cell;
  PersistentVariant variant;
  int element_size;
  bool backward;

  constexpr bool on_tensor_cores() const { return element_size == 2 || variant.tf32; }

  constexpr int inputs() const { return backward ? cell.gates : 1; }  // values of a unit that blocks exchange
  constexpr int outputs() const {
    return backward ? 1 : cell.gates + cell.products_of_h;
  }  // sums that a unit needs
  constexpr int units() const { return 16 * variant.unit_tiles; }
  constexpr int threads() const { return variant.row_per_block ? kLanesOfUnit * units() : kBlockThreads; }
  // How many blocks of one row a multiprocessor has room for: their weights are in registers.
  constexpr int resident_blocks() const {
    const int registers = cell.gates * units() / kLanesOfUnit + 56;  // registers per thread
    return registers > 255 ? 0 : kRegisters / (threads() * registers);
  }
  // How many blocks a multiprocessor must have room for, which limits the registers of a thread.
  constexpr int blocks() const {
    if (!variant.row_per_block || threads() > 256) return 1;
    const int wanted = 512 / threads(), fit = resident_blocks();
    return fit < 1 ? 1 : fit < wanted ? fit : wanted;
  }
  // Whether a warp has so many rows or columns of a weight that its registers have no room for another.
  constexpr bool has_one_weight() const { return warp_tiles() * variant.chunks > 8; }
  constexpr bool exists() const {
    if (variant.row_per_block) return resident_blocks() > 0;
    return !has_one_weight() || (weights() == 1 && !cell.mixes_units());
  }
  constexpr int row_tile() const { return variant.row_per_block ? 1 : kRowTile; }
  // Tiles of units that a warp has, one after the other.
  constexpr int warp_tiles() const {
    return variant.unit_tiles > kBlockWarps ? variant.unit_tiles / kBlockWarps : 1;
  }
  constexpr int k_slices() const { return warp_tiles() * kBlockWarps / variant.unit_tiles; }
  constexpr int most_hidden() const {
    return variant.row_per_block ? units() : k_slices() * variant.chunks * (kChunkBytes / element_size);
  }

  constexpr ExchangeThrough through() const {
    if (units() >= most_hidden()) return ExchangeThrough::kBlock;
    return variant.algorithm == Algorithm::kCluster ? ExchangeThrough::kCluster : ExchangeThrough::kL2;
  }

  // How many warps of different units share, through shared memory, the loading of vectors that all of them
  // need. Two do in an exchange through L2, if it has room and is not read for weights in every tile.
  constexpr int sharing_warps() const {
    return through() != ExchangeThrough::kL2 || variant.unit_tiles == 1 ||
                   (variant.any_rows && variant.chunks > 4) || inputs() * variant.chunks > 24
               ? 1
               : 2;
  }
  // Inputs that an exchange loads at once, and the vectors that it then holds in registers. Products of
  // several inputs don't wait for each other.
  constexpr int inputs_per_load() const {
    if (through() == ExchangeThrough::kL2) return sharing_warps() == 1 ? inputs() : 1;
    int loaded = inputs();
    while (loaded > 1 && (loaded * variant.chunks > 16 || inputs() % loaded > 0)) --loaded;
    return loaded;
  }
  constexpr int vectors() const {
    if (sharing_warps() == 1) return inputs_per_load() * variant.chunks;
    return inputs() * variant.chunks / 2 + variant.chunks;
  }
  constexpr int inputs_per_product() const { return on_tensor_cores() ? inputs_per_load() : 1; }

  // Whether a block has whole heads of the products with block-diagonal weights. It then keeps only its
  // blocks of these weights, and its units exchange what such a product takes among themselves.
  constexpr bool has_whole_heads() const {
    return cell.head_units > 0 && through() == ExchangeThrough::kCluster && units() % cell.head_units == 0;
  }
  constexpr int weights_of_heads() const { return has_whole_heads() ? cell.block_diagonal : 0; }
  constexpr int weights() const {
    return cell.gates + cell.products - weights_of_heads();
  }  // of a unit, that have all of K
  // Chunks of a block's own units that a warp multiplies.
  constexpr int head_chunks() const {
    const int slice = k_slices() * kChunkBytes;
    return (units() * element_size + slice - 1) / slice;
  }
  // How many blocks of weights fit in registers, given those of the exchanged vectors and of the cell. The
  // others are in shared memory.
  constexpr int free_registers() const {
    const int others =
        cell.products > 0 ? 110 : 55;  // products in the middle of a step wait with all its values
    return 255 - others - 4 * vectors();
  }
  constexpr int weights_in_registers() const {
    const int fit = free_registers() / (8 * (variant.chunks > 0 ? variant.chunks : 1));
    return fit < 1 ? 1 : fit > weights() ? weights() : fit;
  }
  constexpr int weights_of_heads_in_registers() const {
    if (!has_whole_heads()) return 0;
    const int fit = (free_registers() - 8 * variant.chunks * weights_in_registers()) / (8 * head_chunks());
    return fit < 1 ? 1 : fit > weights_of_heads() ? weights_of_heads() : fit;
  }
  constexpr int warp_weights() const {
    return (weights() - weights_in_registers()) * variant.chunks * 2 * 32 * 4;
  }
  constexpr int warp_weights_of_heads() const {
    return (weights_of_heads() - weights_of_heads_in_registers()) * head_chunks() * 2 * 32 * 4;
  }
  // A product in IEEE float32 reads its rows from shared memory.
  constexpr int warp_scratch() const {
    return on_tensor_cores() ? 0 : kRowTile * scratch_stride(inputs_per_product() * variant.chunks);
  }

  constexpr int sum_stride() const { return units() + 4; }  // avoids bank conflicts
  // The most inputs and outputs of a product in the middle of a step.
  constexpr OwnCall own_call() const { return backward ? cell.back_call : cell.call; }
  // As own_call(), of those whose inputs the blocks of a group exchange.
  constexpr OwnCall exchanged_call() const {
    if (!has_whole_heads()) return own_call();
    return backward ? cell.dense_back_call : cell.dense_call;
  }
  constexpr int partial_sums() const {
    const int most = outputs() > own_call().outputs ? outputs() : own_call().outputs;
    return k_slices() * most * kRowTile * sum_stride();
  }
  // Of a cell whose units read values over all units of their row: the parts of a row, one for each of its
  // warps, and the memory for what these find (RowParts in units.cuh), in whole lines of shared memory.
  constexpr int most_row_parts() const {
    return through() == ExchangeThrough::kL2 ? most_hidden() / units() : 2 * kMostRowBlocks;
  }
  constexpr int row_parts() const {
    const int turns = through() == ExchangeThrough::kL2 ? 1 : 2;
    return cell.over_units ? turns * kRowTile * kRowSlots * most_row_parts() + 32 : 0;
  }
  // Memory through which the blocks of a group exchange that.
  constexpr int64_t row_parts_bytes(int group_blocks) const {
    const bool needed = cell.over_units && through() == ExchangeThrough::kL2;
    return needed ? int64_t{2} * kRowTile * group_blocks * kNumberedPartBytes : 0;
  }
  // If a group may have several tiles, what their rows carry from step to step is in shared memory.
  constexpr int live_states_per_row() const { return variant.any_rows ? cell.live_states() * units() : 0; }

  // Of what blocks exchange at once.
  constexpr int exchange_bytes(int inputs) const {
    const int tile = kRowTile * padded_row_bytes(inputs * most_hidden() * element_size);
    if (inputs == 0) return 0;
    if (through() == ExchangeThrough::kBlock) return tile;
    if (through() == ExchangeThrough::kCluster) {
      return kRowTile * inputs * units() * element_size + 2 * tile + 2 * 8;
    }
    return sharing_warps() == 1 ? 0 : kBlockWarps * inputs * variant.chunks / 2 * 32 * 16;
  }
  // Of what a block's units give to each other.
  constexpr int heads_bytes() const {
    return has_whole_heads() ? kRowTile * padded_row_bytes(own_call().inputs * units() * element_size) : 0;
  }
  constexpr int shared_bytes(const Group& group) const {
    if (variant.row_per_block) return 4 * 2 * inputs() * units();
    const int of_warp = warp_scratch() + warp_weights() + warp_weights_of_heads();
    const int floats =
        2 * partial_sums() + kBlockWarps * of_warp + row_parts() + group.rows * live_states_per_row();
    return 4 * floats + exchange_bytes(inputs()) + exchange_bytes(exchanged_call().inputs) + heads_bytes();
  }
};

}  // namespace lltm_ext
