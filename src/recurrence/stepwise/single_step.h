// A sequence of a single step forward, in one launch with the products of the input and of h. It is for
// callers that carry the states from call to call, as control loops and streams of audio do.
#pragma once

#include "common/vec.cuh"
#include "recurrence/cell.h"
#ifndef __CUDACC_RTC__
#include "recurrence/persistent/launch.h"
#endif

namespace lltm_ext {

constexpr int kSingleStepThreads = 256, kSingleStepWarps = kSingleStepThreads / 32;

// I is the input size; the other letters are those of cell.h.
template <typename T>
struct SingleStepArguments {
  int batch, hidden, input_size;
  bool narrow_states;  // whether states0 and states_n have values of T, not of acc_t<T>
  bool on_tensor_cores;
  bool save;                // whether to leave in `gates` and `extra` what backward needs
  bool shared_step_inputs;  // whether all units share the values of the step inputs
  const T* input;           // [B, I]
  const T* h0;              // [B, H]
  const void* states0;      // [S, B, H]
  const T* weight_ih;       // [G * H, I]
  const T* weight_hh;       // [G * H, H]
  const T* bias;            // [G * H], or null
  const T* bias_hh;         // [G * H] added to bias, or null
  const T* parameters;      // [P, H]
  const T* step_inputs;     // [B, K, H] or, shared, [B, K]
  T *output, *h_n;          // [B, H] the new h, in both
  void* states_n;           // [S, B, H]
  T* gates;                 // [B, G, H] the first G saved values, unless the cell is wide
  T* extra;                 // [B, E, H] the other saved values

  // Whether the operands of the products are aligned as tensor cores load them.
  LLTM_HOST_DEVICE bool has_vectors() const {
    return is_vec_aligned(input) && is_vec_aligned(h0) && is_vec_aligned(weight_ih) &&
           is_vec_aligned(weight_hh);
  }
};

// The units and rows of a block: on tensor cores, or with a thread's own multiply-adds.
struct SingleStepTile {
  int units, rows;
  constexpr int64_t blocks(int64_t batch, int64_t hidden) const {
    return ceil_div(hidden, units) * ceil_div(batch, rows);
  }
};
// `products` is the number of sums of a unit. Shared memory holds at most four of them in 16 rows.
constexpr SingleStepTile single_step_tile(int64_t batch, int products, bool on_tensor_cores) {
  if (!on_tensor_cores) return {2, batch == 1 ? 1 : 8};
  return {16, batch <= 8 || products > 4 ? 8 : 16};
}

constexpr int products_of_single_step(const CellShape& cell) {
  return cell.separate ? 2 * cell.gates : cell.gates;
}
// Whether a cell has this kernel. The sums of more products fit neither in shared memory nor in registers.
constexpr bool has_single_step(const CellShape& cell) {
  return cell.recurrent && !cell.mixes_units() && !cell.has_output_apart() &&
         products_of_single_step(cell) <= 8;
}

// Whether tensor cores can take a step: it needs several rows, of whole vectors.
constexpr bool single_step_on_tensor_cores(int64_t batch, int64_t hidden, int64_t input_size,
                                           int element_size, bool rounds_to_tf32) {
  const int vector = 16 / element_size;
  return batch > 1 && hidden % vector == 0 && input_size % vector == 0 &&
         (element_size == 2 || rounds_to_tf32);
}

// Whether this kernel is the fastest way. Every block reads its units' weights and its rows, so many blocks
// read them often. Blocks with eight rows and no tensor cores take half of a multiprocessor's registers, so
// many of them run in turns.
constexpr bool single_step_pays(int64_t batch, int64_t hidden, int64_t input_size, const CellShape& cell,
                                int element_size, bool on_tensor_cores) {
  const int gates = cell.gates;
  if (batch == 0 || hidden == 0 || input_size >= (1 << 24)) return false;
  const SingleStepTile tile = single_step_tile(batch, products_of_single_step(cell), on_tensor_cores);
  const int64_t blocks = tile.blocks(batch, hidden), k = hidden + input_size;
  if (on_tensor_cores)
    return blocks * (gates * tile.units + tile.rows) * k * element_size <= int64_t{1} << 27;
  return (batch == 1 || blocks <= 512) &&
         ceil_div(batch, tile.rows) * gates * hidden * k * element_size <= int64_t{1} << 25;
}

#ifndef __CUDACC_RTC__
template <class Cell, typename T>
cudaError_t launch_single_step(const SingleStepArguments<T>& arguments, cudaStream_t stream);
#endif

}  // namespace lltm_ext
