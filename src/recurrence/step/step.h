// One step of a cell, pointwise: what follows the product of h with the recurrent weight, for every unit of
// every row. The fallback of the persistent kernels, and the CPU's way. A stream as last argument means CUDA,
// none the CPU.
//
// B rows of the batch, H units, G = Cell::kGates, E = Cell::kSaved - G. T is the type of activations; the
// cell state and its gradient are acc_t<T>.
#pragma once

#include "recurrence/cell.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

template <typename T>
struct StepForwardArguments {
  int64_t batch, hidden;
  T* gates;  // [B, G, H] the input's part of the gates; if `extra` is given, what backward needs replaces it
  const acc_t<T>* product;  // [B, G, H] the other part: h times the recurrent weight
  T* extra;                 // [B, E, H] what else backward needs, or null
  acc_t<T>* c;              // [B, H] the cell state, which the step moves on
  T* h;                     // [B, H] the new state
  T* output;                // [B, H] a second copy of it
};

template <typename T>
struct StepBackwardArguments {
  int64_t batch, hidden;
  const T* gates;                   // [B, G, H] as the forward left them
  const T* extra;                   // [B, E, H]
  const T* grad_output;             // [B, H] of any strides, or null for zeros
  int64_t output_row, output_unit;  // its strides
  const T* grad_h;                  // [B, H] gradient of h from the step after
  acc_t<T>* grad_c;                 // [B, H] gradient of the cell state, which the step moves back
  T* grad_gates;                    // [B, G, H]
  acc_t<T>* grad_bias;              // [B, G, H] to which grad_gates are added, or null
};

template <class Cell, typename T>
void recurrence_step(const StepForwardArguments<T>& step);
template <class Cell, typename T>
void recurrence_step(const StepBackwardArguments<T>& step);

#ifdef LLTM_EXT_WITH_CUDA
template <class Cell, typename T>
cudaError_t recurrence_step(const StepForwardArguments<T>& step, cudaStream_t stream);
template <class Cell, typename T>
cudaError_t recurrence_step(const StepBackwardArguments<T>& step, cudaStream_t stream);
#endif

// Unit j of row b, forward.
template <class Cell, class Math, typename T>
LLTM_HOST_DEVICE void step_unit(const StepForwardArguments<T>& s, int64_t b, int64_t j) {
  constexpr int kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;
  using A = acc_t<T>;
  A gates[kGates], saved[Cell::kSaved];
  for (int g = 0; g < kGates; ++g) {
    const int64_t at = (b * kGates + g) * s.hidden + j;
    gates[g] = widen(s.gates[at]) + s.product[at];
  }
  const int64_t at = b * s.hidden + j;
  A c = s.c[at];
  const T h = narrow<T>(Cell::template forward<Math>(gates, c, saved));
  s.c[at] = c;
  s.h[at] = h;
  s.output[at] = h;
  if (!s.extra) return;
  for (int g = 0; g < kGates; ++g) s.gates[(b * kGates + g) * s.hidden + j] = narrow<T>(saved[g]);
  for (int e = 0; e < kExtra; ++e) s.extra[(b * kExtra + e) * s.hidden + j] = narrow<T>(saved[kGates + e]);
}

// Unit j of row b, backward.
template <class Cell, class Math, typename T>
LLTM_HOST_DEVICE void step_unit(const StepBackwardArguments<T>& s, int64_t b, int64_t j) {
  constexpr int kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;
  using A = acc_t<T>;
  A saved[Cell::kSaved], grad_gates[kGates];
  for (int g = 0; g < kGates; ++g) saved[g] = widen(s.gates[(b * kGates + g) * s.hidden + j]);
  for (int e = 0; e < kExtra; ++e) saved[kGates + e] = widen(s.extra[(b * kExtra + e) * s.hidden + j]);
  const int64_t at = b * s.hidden + j;
  A grad_h = widen(s.grad_h[at]), grad_c = s.grad_c[at];
  if (s.grad_output) grad_h += widen(s.grad_output[b * s.output_row + j * s.output_unit]);
  Cell::template backward<Math>(saved, grad_h, grad_c, grad_gates);
  s.grad_c[at] = grad_c;
  for (int g = 0; g < kGates; ++g) {
    const int64_t to = (b * kGates + g) * s.hidden + j;
    s.grad_gates[to] = narrow<T>(grad_gates[g]);
    if (s.grad_bias) s.grad_bias[to] += grad_gates[g];
  }
}

}  // namespace lltm_ext
