// lltm, one step: the contract between the op's files. A stream as last argument means CUDA, none means the
// CPU.
//
// The cell, of B rows (batch) and H units (hidden_size), from pre-activations i, o, z of its three gates:
//   new_cell = old_cell + elu(z) * sigmoid(i)
//   new_h    = tanh(new_cell) * sigmoid(o)
// T is the type of activations, C that of the cell state: T itself or float32, in which it accumulates.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "common/types.h"
#include "lltm/lltm_cell.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

// One value a gate of every unit: gate g of unit j in row b lies at b * row + g * gate + j.
// The gates come in the order input, output, candidate.
template <typename T>
struct Gates {
  T* data;
  int64_t row;
  int64_t gate;

  LLTM_HOST_DEVICE T& at(int64_t b, int g, int64_t j) const { return data[b * row + g * gate + j]; }
};

// [B, H] of any strides, for gradients that come from outside: that of a sum is one number, expanded.
template <typename T>
struct Matrix {
  const T* data;  // null stands for zeros
  int64_t row, unit;

  LLTM_HOST_DEVICE acc_t<T> at(int64_t b, int64_t j) const {
    return data ? widen(data[b * row + j * unit]) : acc_t<T>(0);
  }
};

// One step forward.
template <typename T, typename C>
struct ForwardStep {
  int64_t batch, hidden;
  Gates<T> gates;      // [B, 3, H] pre-activations
  const C* old_cell;   // [B, H]
  C* new_cell;         // [B, H]; may be old_cell itself
  T* new_h;            // [B, H]
  Gates<T> activated;  // [B, 3, H] sigmoid(i), sigmoid(o), elu(z) for the backward, or null
};

// One step backward.
template <typename T, typename C>
struct BackwardStep {
  int64_t batch, hidden;
  Matrix<T> grad_h;     // [B, H] gradient of new_h
  Matrix<C> grad_cell;  // [B, H] gradient of new_cell
  Gates<T> activated;   // [B, 3, H] as the forward saved them
  const C* new_cell;    // [B, H]
  Gates<T> grad_gates;  // [B, 3, H] gradients of the pre-activations
  T* grad_bias;         // [3, H] their sums over the batch, or null
  C* grad_old_cell;     // [B, H], or null
};

// [old_h, input], the columns that the weights multiply: the two lie apart, each with its columns side by
// side. No offset in what a whole step takes needs more than 32 bits.
template <typename T>
struct CellInput {
  const T *old_h, *input;
  int old_h_row, input_row;
  int hidden, columns;  // H, H + I

  LLTM_HOST_DEVICE acc_t<T> at(int b, int k) const {
    const bool of_h = k < hidden;
    const T* from = of_h ? old_h : input;
    return widen(from[b * (of_h ? old_h_row : input_row) + (of_h ? k : k - hidden)]);
  }
};

// A whole step forward, its products included.
template <typename T, typename C>
struct WholeForward {
  ForwardStep<T, C> units;  // but for their gates
  CellInput<T> X;
  const T* weights;  // [3H, H + I]
  int weights_row;
  const T* bias;  // [3H], or null
};

// A whole step backward, but for what is null.
template <typename T, typename C>
struct WholeBackward {
  BackwardStep<T, C> units;  // but for grad_gates
  CellInput<T> X;
  const T* weights;  // [3H, H + I]
  int weights_row;
  T* grad_weights;             // [3H, H + I]
  T *grad_old_h, *grad_input;  // [B, H], [B, I], or null
};

// Up to this batch, a step backward sums the bias's gradient too. A larger one wants a reduction of its own.
constexpr int64_t kMaxBatchForBias = 256;

template <typename T, typename C>
void lltm_forward_step(const ForwardStep<T, C>& step);
template <typename T, typename C>
void lltm_backward_step(const BackwardStep<T, C>& step);

#ifdef LLTM_EXT_WITH_CUDA
template <typename T, typename C>
cudaError_t lltm_forward_step(const ForwardStep<T, C>& step, cudaStream_t stream);
template <typename T, typename C>
cudaError_t lltm_backward_step(const BackwardStep<T, C>& step, cudaStream_t stream);

// The whole step in one launch, of few units. Up to here that takes an H200 no longer than the products of a
// library do in float32, and the host a third of their time. Not for float64.
constexpr bool lltm_is_small(int64_t batch, int64_t hidden, int64_t columns) {
  return batch <= 64 && columns <= 512 && batch * 3 * hidden * columns <= int64_t{3} << 21;
}
template <typename T, typename C>
cudaError_t lltm_whole_forward(const WholeForward<T, C>& step, cudaStream_t stream);
template <typename T, typename C>
cudaError_t lltm_whole_backward(const WholeBackward<T, C>& step, cudaStream_t stream);
#endif

// Unit j of row b, forward, from the pre-activations of its gates.
template <class Math, typename T, typename C>
LLTM_HOST_DEVICE void lltm_unit_of_gates(const ForwardStep<T, C>& s, int64_t b, int64_t j,
                                         const acc_t<T> (&gates)[3]) {
  using A = acc_t<T>;
  const int64_t at = b * s.hidden + j;
  A saved[LltmCell::kSaved], cell = widen(s.old_cell[at]);
  s.new_h[at] = narrow<T>(LltmCell::forward<Math>(gates, cell, saved));
  s.new_cell[at] = narrow<C>(cell);
  if (!s.activated.data) return;
  for (int g = 0; g < 3; ++g) s.activated.at(b, g, j) = narrow<T>(saved[g]);
}
template <class Math, typename T, typename C>
LLTM_HOST_DEVICE void lltm_forward_unit(const ForwardStep<T, C>& s, int64_t b, int64_t j) {
  acc_t<T> gates[3];
  for (int g = 0; g < 3; ++g) gates[g] = widen(s.gates.at(b, g, j));
  lltm_unit_of_gates<Math>(s, b, j, gates);
}

// Unit j of row b, backward: gives the gradients of its gates, and stores that of its old cell.
template <class Math, typename T, typename C>
LLTM_HOST_DEVICE void lltm_gate_gradients(const BackwardStep<T, C>& s, int64_t b, int64_t j,
                                          acc_t<T> (&grad_gates)[3], C* grad_old_cell) {
  using A = acc_t<T>;
  const int64_t at = b * s.hidden + j;
  A saved[LltmCell::kSaved], grad_cell = s.grad_cell.at(b, j);
  for (int g = 0; g < 3; ++g) saved[g] = widen(s.activated.at(b, g, j));
  saved[3] = Math::tanh(A(widen(s.new_cell[at])));
  LltmCell::backward<Math>(saved, s.grad_h.at(b, j), grad_cell, grad_gates);
  if (grad_old_cell) grad_old_cell[at] = narrow<C>(grad_cell);
}

// The same, stored. Adds the gradients of its gates to `sums`.
template <class Math, typename T, typename C>
LLTM_HOST_DEVICE void lltm_backward_unit(const BackwardStep<T, C>& s, int64_t b, int64_t j,
                                         acc_t<T> (&sums)[3]) {
  acc_t<T> grad_gates[3];
  lltm_gate_gradients<Math>(s, b, j, grad_gates, s.grad_old_cell);
  for (int g = 0; g < 3; ++g) {
    s.grad_gates.at(b, g, j) = narrow<T>(grad_gates[g]);
    sums[g] += grad_gates[g];
  }
}

}  // namespace lltm_ext
