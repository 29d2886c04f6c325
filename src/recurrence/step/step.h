// One step of a cell, pointwise: what follows the gates' matrix products, for every unit of every row. For
// the steps of a sequence that no fused kernel runs, and for ops of a single step. A stream as last argument
// means CUDA, none the CPU.
//
// B rows of the batch, H units, G = Cell::kGates, E = Cell::kSaved - G. T is the type of activations, C that
// of the cell state: T or acc_t<T>.
#pragma once

#include "recurrence/cell.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

// A value for each gate of every unit.
template <typename T>
struct Gates {
  T* data;
  int64_t row, gate;  // strides

  // [B, G, H] and [G, B, H] in memory.
  static Gates in_rows(T* data, int64_t gates, int64_t hidden) { return {data, gates * hidden, hidden}; }
  static Gates stacked(T* data, int64_t batch, int64_t hidden) { return {data, hidden, batch * hidden}; }

  LLTM_HOST_DEVICE T& at(int64_t b, int g, int64_t j) const { return data[b * row + g * gate + j]; }
};

// [B, H] of any strides, for gradients from autograd: that of a sum is one number, expanded.
template <typename T>
struct StridedGradient {
  const T* data;  // null means zeros
  int64_t row, unit;

  LLTM_HOST_DEVICE acc_t<T> at(int64_t b, int64_t j) const {
    return data ? widen(data[b * row + j * unit]) : acc_t<T>(0);
  }
};

template <typename T, typename C = acc_t<T>>
struct StepForwardArguments {
  int64_t batch, hidden;
  Gates<const T> gates;     // [B, G, H] pre-activations, or the input's part of them
  const acc_t<T>* product;  // [B, G, H] the other part, h times the recurrent weight, or null
  const C* old_c;           // [B, H]
  C* new_c;                 // [B, H]; may be old_c
  T* h;                     // [B, H] the new state
  T* output;                // [B, H] a second copy of it, or null
  Gates<T> saved;           // [B, G, H] the first G saved values; may be `gates`, or null
  T* extra;                 // [B, E, H] the other saved values, or null
};

// Extra is the type of the saved values after the first G.
template <typename T, typename C = acc_t<T>, typename Extra = T>
struct StepBackwardArguments {
  int64_t batch, hidden;
  Gates<const T> saved;            // [B, G, H]
  const Extra* extra;              // [B, E, H]
  StridedGradient<T> grad_output;  // [B, H] gradient of h from outside the recurrence
  const T* grad_h;                 // [B, H] gradient of h from the next step, or null
  StridedGradient<C> grad_new_c;   // [B, H]
  C* grad_old_c;                   // [B, H], or null; may be grad_new_c.data
  Gates<T> grad_gates;             // [B, G, H]
  acc_t<T>* grad_bias_rows;        // [B, G, H] to which grad_gates are added, or null
  T* grad_bias;                    // [G, H] the sums of grad_gates over the batch, or null; CUDA only
};

template <class Cell, typename T, typename C>
void recurrence_step(const StepForwardArguments<T, C>& step);
template <class Cell, typename T, typename C, typename Extra>
void recurrence_step(const StepBackwardArguments<T, C, Extra>& step);

#ifdef LLTM_EXT_WITH_CUDA
template <class Cell, typename T, typename C>
cudaError_t recurrence_step(const StepForwardArguments<T, C>& step, cudaStream_t stream);
template <class Cell, typename T, typename C, typename Extra>
cudaError_t recurrence_step(const StepBackwardArguments<T, C, Extra>& step, cudaStream_t stream);
#endif

// Unit j of row b forward, from the pre-activations of its gates.
template <class Cell, class Math, typename T, typename C>
LLTM_HOST_DEVICE void step_unit(const StepForwardArguments<T, C>& s, int64_t b, int64_t j,
                                const acc_t<T> (&gates)[Cell::kGates]) {
  constexpr int kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;
  const int64_t at = b * s.hidden + j;
  acc_t<T> saved[Cell::kSaved], c = widen(s.old_c[at]);
  const T h = narrow<T>(Cell::template forward<Math>(gates, c, saved));
  s.new_c[at] = narrow<C>(c);
  s.h[at] = h;
  if (s.output) s.output[at] = h;
  if (!s.saved.data) return;
  for (int g = 0; g < kGates; ++g) s.saved.at(b, g, j) = narrow<T>(saved[g]);
  if (!s.extra) return;
  for (int e = 0; e < kExtra; ++e) s.extra[(b * kExtra + e) * s.hidden + j] = narrow<T>(saved[kGates + e]);
}

// The same, with the gates from memory.
template <class Cell, class Math, typename T, typename C>
LLTM_HOST_DEVICE void step_unit(const StepForwardArguments<T, C>& s, int64_t b, int64_t j) {
  constexpr int kGates = Cell::kGates;
  acc_t<T> gates[kGates];
  for (int g = 0; g < kGates; ++g) {
    gates[g] = widen(s.gates.at(b, g, j));
    if (s.product) gates[g] += s.product[(b * kGates + g) * s.hidden + j];
  }
  step_unit<Cell, Math>(s, b, j, gates);
}

// Unit j of row b backward: computes the gradients of its gates, and stores that of its cell state in
// grad_old_c, unless it is null.
template <class Cell, class Math, typename T, typename C, typename Extra>
LLTM_HOST_DEVICE void step_unit(const StepBackwardArguments<T, C, Extra>& s, int64_t b, int64_t j,
                                acc_t<T> (&grad_gates)[Cell::kGates], C* grad_old_c) {
  constexpr int kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;
  const int64_t at = b * s.hidden + j;
  acc_t<T> saved[Cell::kSaved], grad_h = s.grad_output.at(b, j), grad_c = s.grad_new_c.at(b, j);
  for (int g = 0; g < kGates; ++g) saved[g] = widen(s.saved.at(b, g, j));
  for (int e = 0; e < kExtra; ++e) saved[kGates + e] = widen(s.extra[(b * kExtra + e) * s.hidden + j]);
  if (s.grad_h) grad_h += widen(s.grad_h[at]);
  Cell::template backward<Math>(saved, grad_h, grad_c, grad_gates);
  if (grad_old_c) grad_old_c[at] = narrow<C>(grad_c);
}

}  // namespace lltm_ext
