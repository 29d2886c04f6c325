// A sequence of a single step forward, in one launch with the products of the input and of h: calls that
// carry their states from step to step, as control loops and streams of audio do.
#pragma once

#include "recurrence/persistent/launch.h"

namespace lltm_ext {

// I is the input size; the other letters are those of cell.h.
template <typename T>
struct SingleStepArguments {
  int batch, hidden, input_size;
  bool narrow_states;   // whether states0 and states_n have values of T, not of acc_t<T>
  const T* input;       // [B, I]
  const T* h0;          // [B, H]
  const void* states0;  // [S, B, H]
  const T* weight_ih;   // [G * H, I]
  const T* weight_hh;   // [G * H, H]
  const T* bias;        // [G * H], or null
  const T* bias_hh;     // [G * H] added to it, or null
  T *output, *h_n;      // [B, H] twice
  void* states_n;       // [S, B, H]
  T* gates;             // [B, G, H] the first G saved values, or null
  T* extra;             // [B, E, H] the others, if `gates` is given
};

constexpr int kSingleStepUnits = 2, kSingleStepRows = 8;  // of a block; one row if the batch has one

LLTM_HOST_DEVICE constexpr int single_step_columns(int64_t hidden) {
  return static_cast<int>(ceil_div(hidden, kSingleStepUnits));
}
constexpr int64_t single_step_blocks(int64_t batch, int64_t hidden) {
  return single_step_columns(hidden) * ceil_div(batch, kSingleStepRows);
}

// Whether it is the fastest way. Every block reads its units' weights, so many rows read them often; and
// blocks of eight rows take half of a multiprocessor's registers, so those of many rows and units run in
// turns.
constexpr bool single_step_pays(int64_t batch, int64_t hidden, int64_t input_size, int gates,
                                int element_size) {
  const int64_t most_blocks = batch == 1 ? 1 << 20 : 512;
  return batch > 0 && hidden > 0 && input_size < (1 << 24) &&
         single_step_blocks(batch, hidden) <= most_blocks &&
         ceil_div(batch, kSingleStepRows) * gates * hidden * (hidden + input_size) * element_size <=
             int64_t{1} << 25;
}

template <class Cell, typename T>
cudaError_t launch_single_step(const SingleStepArguments<T>& arguments, cudaStream_t stream);

}  // namespace lltm_ext
