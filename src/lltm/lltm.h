// lltm: the contract between the op's files. A stream as last argument means CUDA, none means the CPU.
//
// The cell, of B rows (batch) and H units (hidden_size), from pre-activations i, o, z of its three gates:
//   new_cell = old_cell + elu(z) * sigmoid(i)
//   new_h    = tanh(new_cell) * sigmoid(o)
// T is the type of activations, C that of the cell state: T itself or float32, in which it accumulates.
#pragma once

#include <cstdint>

#include "common/types.h"

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
  Gates<T> gates;     // [B, 3, H] pre-activations
  const C* old_cell;  // [B, H]
  C* new_cell;        // [B, H]; may be old_cell itself
  T* new_h;           // [B, H]
  T* output;          // [B, H] a second copy of new_h, or null
  Gates<T>
      activated;  // [B, 3, H] sigmoid(i), sigmoid(o), elu(z) for the backward; may be gates itself, or null
  C* saved_cell;  // [B, H] a second copy of new_cell for the backward, or null
};

// One step backward.
template <typename T, typename C>
struct BackwardStep {
  int64_t batch, hidden;
  Matrix<T> grad_output;  // [B, H] gradient of new_h from outside
  const T* grad_h;        // [B, H] gradient of new_h from the step after, or null for none
  Matrix<C> grad_cell;    // [B, H] gradient of new_cell
  Gates<T> activated;     // [B, 3, H] as the forward saved them
  const C* new_cell;      // [B, H]
  Gates<T> grad_gates;    // [B, 3, H] gradients of the pre-activations
  C* grad_old_cell;       // [B, H]; may be grad_cell itself
  Gates<acc_t<T>>
      grad_bias;  // [B, 3, H] to which grad_gates are added: the bias's gradient, a row each; or null
};

template <typename T, typename C>
void lltm_forward_step(const ForwardStep<T, C>& step);
template <typename T, typename C>
void lltm_backward_step(const BackwardStep<T, C>& step);

#ifdef LLTM_EXT_WITH_CUDA
template <typename T, typename C>
cudaError_t lltm_forward_step(const ForwardStep<T, C>& step, cudaStream_t stream);
template <typename T, typename C>
cudaError_t lltm_backward_step(const BackwardStep<T, C>& step, cudaStream_t stream);
#endif

// Unit j of row b, forward. Every load comes before the first store: the pointers may alias.
template <typename T, typename C>
LLTM_HOST_DEVICE void lltm_forward_unit(const ForwardStep<T, C>& s, int64_t b, int64_t j) {
  using A = acc_t<T>;
  const int64_t at = b * s.hidden + j;
  const A input_gate = sigmoid(widen(s.gates.at(b, 0, j)));
  const A output_gate = sigmoid(widen(s.gates.at(b, 1, j)));
  const A candidate = elu(widen(s.gates.at(b, 2, j)));
  const A new_cell = widen(s.old_cell[at]) + candidate * input_gate;
  const T new_h = narrow<T>(std::tanh(new_cell) * output_gate);

  s.new_cell[at] = narrow<C>(new_cell);
  s.new_h[at] = new_h;
  if (s.output) s.output[at] = new_h;
  if (s.activated.data) {
    s.activated.at(b, 0, j) = narrow<T>(input_gate);
    s.activated.at(b, 1, j) = narrow<T>(output_gate);
    s.activated.at(b, 2, j) = narrow<T>(candidate);
  }
  if (s.saved_cell) s.saved_cell[at] = narrow<C>(new_cell);
}

// Unit j of row b, backward. There is no forget gate: the cell's gradient goes straight through.
template <typename T, typename C>
LLTM_HOST_DEVICE void lltm_backward_unit(const BackwardStep<T, C>& s, int64_t b, int64_t j) {
  using A = acc_t<T>;
  const int64_t at = b * s.hidden + j;
  const A input_gate = widen(s.activated.at(b, 0, j));
  const A output_gate = widen(s.activated.at(b, 1, j));
  const A candidate = widen(s.activated.at(b, 2, j));
  const A tanh_cell = std::tanh(widen(s.new_cell[at]));
  const A grad_h = s.grad_output.at(b, j) + (s.grad_h ? widen(s.grad_h[at]) : A(0));
  const A grad_cell = s.grad_cell.at(b, j) + grad_h * output_gate * tanh_derivative(tanh_cell);

  const A grad_gates[] = {
      grad_cell * candidate * sigmoid_derivative(input_gate),
      grad_h * tanh_cell * sigmoid_derivative(output_gate),
      grad_cell * input_gate * elu_derivative(candidate),
  };
  for (int g = 0; g < 3; ++g) {
    s.grad_gates.at(b, g, j) = narrow<T>(grad_gates[g]);
    if (s.grad_bias.data) s.grad_bias.at(b, g, j) += grad_gates[g];
  }
  s.grad_old_cell[at] = narrow<C>(grad_cell);
}

}  // namespace lltm_ext
