// The contract of a recurrent cell, and a sequence of its steps as kernels see it: pointers, sizes, the order
// of the steps. No torch.
//
// A cell is a struct that computes one unit of one row, from its pre-activations to the next h and back:
//
//   struct Cell {
//     static constexpr int kGates;  // pre-activations of a unit
//     static constexpr int kSaved;  // values saved for backward; the first kGates overwrite the gates
//     // Returns the new h, updates the cell state c and fills `saved`.
//     template <typename Math, typename A>
//     static A forward(const A (&gates)[kGates], A& c, A (&saved)[kSaved]);
//     // Computes the gradients of the gates from that of h, and replaces the gradient of the new c by that
//     // of the old c.
//     template <typename Math, typename A>
//     static void backward(const A (&saved)[kSaved], A grad_h, A& grad_c, A (&grad_gates)[kGates]);
//   };
//
// In shapes, B is the batch, H the hidden size, N the rows of all steps (length * B if every step has the
// whole batch), G = kGates, and E = kSaved - kGates the values saved in addition to the gates.
#pragma once

#include "common/types.h"

namespace lltm_ext {

// The rows of a step.
struct StepRows {
  int64_t first;
  int count;
};

// Which rows belong to which step. The rows of a step are the first `count` rows of the batch. Steps are
// numbered in the order in which forward computes them.
struct StepOrder {
  int length, batch;
  bool reverse;               // from the last time step to the first
  const int64_t* first_rows;  // [length + 1] on the device for a packed sequence; null if all have `batch`

  // No rows before the first step and after the last.
  LLTM_HOST_DEVICE StepRows at(int k) const {
    if (k < 0 || k >= length) return {0, 0};
    const int t = reverse ? length - 1 - k : k;
    if (!first_rows) return {static_cast<int64_t>(t) * batch, batch};
    return {first_rows[t], static_cast<int>(first_rows[t + 1] - first_rows[t])};
  }
};

// The arguments of kernels that run all steps forward.
template <typename T>
struct SequenceForwardArguments {
  StepOrder steps;
  int64_t rows;  // N
  int hidden;
  const T* weight;  // [G * H, H]
  const T* h0;      // [B, H]
  const float* c0;  // [B, H]
  T* gates;         // [N, G, H] the input's projections; if `extra` is given, replaced by what backward needs
  T* extra;         // [N, E, H] the other values that backward needs, or null
  T* output;        // [N, H]
  T* h_n;           // [B, H]
  float* c_n;       // [B, H]
};

// The arguments of kernels that run steps [begin, end) backward.
template <typename T>
struct SequenceBackwardArguments {
  StepOrder steps;
  int begin, end;
  int64_t first_row, rows;  // of these steps
  int hidden;
  const T* weight_t;     // [H, G * H]
  const T* gates;        // [N, G, H] as forward left them
  const T* extra;        // [N, E, H]
  const T* grad_output;  // [N, H], or null for zeros
  T* grad_gates;         // [rows, G, H]
  T* grad_h;             // [B, H] gradient of h after these steps; replaced by the one before them
  float* grad_c;         // [B, H] likewise
  float* grad_bias;      // [B, G, H] += grad_gates, a group's tiles all in the first tile's rows; or null
};

// The sequences of a layer's directions, which one launch runs side by side (blockIdx.y). All sizes agree.
constexpr int kMaxDirections = 2;
template <class Arguments>
struct PerDirection {
  Arguments of[kMaxDirections];
  int count;
};

}  // namespace lltm_ext
