// The LLTM's cell, for src/recurrence: an LSTM without a forget gate.
//   i, o, z = gates;  c' = c + elu(z) * sigmoid(i);  h' = tanh(c') * sigmoid(o)
#pragma once

#include "common/math.h"
#include "recurrence/cell.h"

namespace lltm_ext {

struct LltmCell : CellDefaults {
  static constexpr int kGates = 3;   // input, output, candidate
  static constexpr int kStates = 1;  // c
  static constexpr int kSaved = 4;   // sigmoid(i), sigmoid(o), elu(z), tanh(c'); all but elu(z) folded
  static constexpr bool kBounded = true;

  template <typename Math, typename A>
  LLTM_HOST_DEVICE static A forward(const CellInputs<LltmCell, A>& in, A (&states)[1], A (&saved)[kSaved]) {
    A& c = states[0];
    const A input_gate = Math::sigmoid(in.x[0]), output_gate = Math::sigmoid(in.x[1]);
    const A candidate = Math::elu(in.x[2]);
    c += candidate * input_gate;
    const A tanh_c = Math::tanh(c);
    saved[0] = folded(input_gate);
    saved[1] = folded(output_gate);
    saved[2] = candidate;
    saved[3] = Math::folded_tanh(tanh_c);
    return tanh_c * output_gate;
  }

  // Without a forget gate, the gradient of c passes unscaled.
  template <typename Math, typename A>
  LLTM_HOST_DEVICE static void backward(const A (&saved)[kSaved], const CellInputs<LltmCell, A>&, A grad_h,
                                        A (&grad_states)[1], CellGradients<LltmCell, A>& grads) {
    A& grad_c = grad_states[0];
    const A input_gate = unfolded(saved[0]), output_gate = unfolded(saved[1]), candidate = saved[2];
    const A tanh_c = Math::unfolded_tanh(saved[3]);
    grad_c += grad_h * output_gate * tanh_derivative(tanh_c);
    grads.x[0] = grad_c * candidate * sigmoid_derivative(input_gate);
    grads.x[1] = grad_h * tanh_c * sigmoid_derivative(output_gate);
    grads.x[2] = grad_c * input_gate * elu_derivative(candidate);
  }
};

}  // namespace lltm_ext
