// A sequence of a single step forward, in one launch with the products of the input and of h. It is for
// callers that carry the states from call to call, as control loops and streams of audio do.
#pragma once

#include "recurrence/persistent/launch.h"

namespace lltm_ext {

// I is the input size; the other letters are those of cell.h.
template <typename T>
struct SingleStepArguments {
  int batch, hidden, input_size;
  bool narrow_states;  // whether states0 and states_n have values of T, not of acc_t<T>
  bool on_tensor_cores;
  const T* input;       // [B, I]
  const T* h0;          // [B, H]
  const void* states0;  // [S, B, H]
  const T* weight_ih;   // [G * H, I]
  const T* weight_hh;   // [G * H, H]
  const T* bias;        // [G * H], or null
  const T* bias_hh;     // [G * H] added to bias, or null
  T *output, *h_n;      // [B, H] the new h, in both
  void* states_n;       // [S, B, H]
  T* gates;             // [B, G, H] the first G saved values, or null
  T* extra;             // [B, E, H] the other saved values, if `gates` is given
};

// The units and rows of a block: on tensor cores, or with a thread's own multiply-adds.
struct SingleStepTile {
  int units, rows;
  constexpr int64_t blocks(int64_t batch, int64_t hidden) const {
    return ceil_div(hidden, units) * ceil_div(batch, rows);
  }
};
constexpr SingleStepTile single_step_tile(int64_t batch, bool on_tensor_cores) {
  return on_tensor_cores ? SingleStepTile{16, batch <= 8 ? 8 : 16} : SingleStepTile{2, batch == 1 ? 1 : 8};
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
constexpr bool single_step_pays(int64_t batch, int64_t hidden, int64_t input_size, int gates,
                                int element_size, bool on_tensor_cores) {
  if (batch == 0 || hidden == 0 || input_size >= (1 << 24)) return false;
  const SingleStepTile tile = single_step_tile(batch, on_tensor_cores);
  const int64_t blocks = tile.blocks(batch, hidden), k = hidden + input_size;
  if (on_tensor_cores)
    return blocks * (gates * tile.units + tile.rows) * k * element_size <= int64_t{1} << 27;
  return (batch == 1 || blocks <= 512) &&
         ceil_div(batch, tile.rows) * gates * hidden * k * element_size <= int64_t{1} << 25;
}

template <class Cell, typename T>
cudaError_t launch_single_step(const SingleStepArguments<T>& arguments, cudaStream_t stream);

}  // namespace lltm_ext
