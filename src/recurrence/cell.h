// A sequence of a recurrent cell, as its kernels see it: pointers, sizes, the order of the steps. No torch.
//
// A cell is a struct that says what happens between the product of h with the recurrent weight and the next
// h, for one unit of one row of the batch:
//
//   struct Cell {
//     static constexpr int kGates;  // pre-activations a unit
//     static constexpr int kSaved;  // values that backward needs: kGates of them take the gates' places
//     // Returns h, moves the cell state c on, and fills `saved`.
//     template <typename Math, typename A>
//     static A forward(const A (&gates)[kGates], A& c, A (&saved)[kSaved]);
//     // From the gradient of h: the gradients of the gates; moves that of c back.
//     template <typename Math, typename A>
//     static void backward(const A (&saved)[kSaved], A grad_h, A& grad_c, A (&grad_gates)[kGates]);
//   };
//
// Everywhere below B is the batch, H the hidden size, N the rows of all steps (length * B where each step has
// the whole batch), G = kGates, and E = kSaved - kGates the values saved beside the gates.
#pragma once

#include <stdint.h>

#include "common/types.h"

namespace lltm_ext {

// The rows of step k, counted in the order in which the steps are computed.
struct StepRows {
  int64_t first;
  int count;
};

// Which rows of a sequence belong to which step. Rows of a step are the first `count` of the batch.
struct StepOrder {
  int length, batch;
  bool reverse;               // from the last step to the first
  const int64_t* first_rows;  // [length + 1] on the device for a packed sequence; null where all have `batch`

  // None (a count of 0) before the first step and after the last.
  LLTM_HOST_DEVICE StepRows at(int k) const {
    if (k < 0 || k >= length) return {0, 0};
    const int t = reverse ? length - 1 - k : k;
    if (!first_rows) return {static_cast<int64_t>(t) * batch, batch};
    return {first_rows[t], static_cast<int>(first_rows[t + 1] - first_rows[t])};
  }
};

// How a grid shares out a sequence: `groups` of `members` blocks, each group with `rows` of the batch.
struct GridShape {
  int members, groups, rows;
};

// All steps forward.
template <typename T>
struct SequenceForwardArguments {
  StepOrder steps;
  int64_t rows;  // N
  int hidden;
  const T* weight;  // [G * H, H]
  const T* h0;      // [B, H]
  const float* c0;  // [B, H]
  T* gates;    // [N, G, H] the input's projections; if `extra` is given, what backward needs replaces them
  T* extra;    // [N, E, H] what else backward needs, or null
  T* output;   // [N, H]
  T* h_n;      // [B, H]
  float* c_n;  // [B, H]
};

// Steps [begin, end) backward.
template <typename T>
struct SequenceBackwardArguments {
  StepOrder steps;
  int begin, end;
  int64_t first_row, rows;  // of these steps
  int hidden;
  const T* weight_t;     // [H, G * H]
  const T* gates;        // [N, G, H] as the forward left them
  const T* extra;        // [N, E, H]
  const T* grad_output;  // [N, H], or null for zeros
  T* grad_gates;         // [rows, G, H]
  T* grad_h;             // [B, H] gradient of h after these steps; replaced by that before them
  float* grad_c;         // [B, H] likewise
  float* grad_bias;  // [B, G, H] to which grad_gates are added, all tiles of a group to its first; or null
};

// Sequences of the same sizes that one launch runs side by side, each with a grid of its own (blockIdx.y):
// the directions of a layer.
constexpr int kMaxDirections = 2;
template <class Sequence>
struct PerDirection {
  Sequence of[kMaxDirections];
  int count;
};

}  // namespace lltm_ext
