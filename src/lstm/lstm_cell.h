// The LSTM's cell, for src/recurrence; gates in the order of torch.nn.LSTM.
//   i, f, g, o = gates;  c' = sigmoid(f) * c + sigmoid(i) * tanh(g);  h' = sigmoid(o) * tanh(c')
#pragma once

#include "common/math.h"
#include "recurrence/cell.h"

namespace lltm_ext {

struct LstmCell : CellDefaults {
  static constexpr int kGates = 4;   // input, forget, cell, output
  static constexpr int kStates = 1;  // c
  static constexpr int kSaved = 5;   // the activated gates, folded; and c, from which backward recomputes c'
  static constexpr bool kBounded = true;

  template <typename Math, typename A>
  LLTM_HOST_DEVICE static A forward(const CellInputs<LstmCell, A>& in, A (&states)[1], A (&saved)[kSaved]) {
    A& c = states[0];
    const A input_gate = Math::sigmoid(in.x[0]), forget_gate = Math::sigmoid(in.x[1]);
    const A candidate = Math::tanh(in.x[2]), output_gate = Math::sigmoid(in.x[3]);
    saved[0] = folded(input_gate);
    saved[1] = folded(forget_gate);
    saved[2] = Math::folded_tanh(candidate);
    saved[3] = folded(output_gate);
    saved[4] = c;
    c = forget_gate * c + input_gate * candidate;
    return output_gate * Math::tanh(c);
  }

  template <typename Math, typename A>
  LLTM_HOST_DEVICE static void backward(const A (&saved)[kSaved], const CellInputs<LstmCell, A>&, A grad_h,
                                        A (&grad_states)[1], CellGradients<LstmCell, A>& grads) {
    A& grad_c = grad_states[0];
    const A input_gate = unfolded(saved[0]), forget_gate = unfolded(saved[1]);
    const A candidate = Math::unfolded_tanh(saved[2]), output_gate = unfolded(saved[3]), c = saved[4];
    const A tanh_c = Math::tanh(forget_gate * c + input_gate * candidate);
    grad_c += grad_h * output_gate * tanh_derivative(tanh_c);
    grads.x[0] = grad_c * candidate * sigmoid_derivative(input_gate);
    grads.x[1] = grad_c * c * sigmoid_derivative(forget_gate);
    grads.x[2] = grad_c * input_gate * tanh_derivative(candidate);
    grads.x[3] = grad_h * tanh_c * sigmoid_derivative(output_gate);
    grad_c *= forget_gate;
  }
};

}  // namespace lltm_ext
