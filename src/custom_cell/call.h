// A call of a cell over a sequence: its arguments as one value, and the dispatcher ops that take them.
//
// T is the length, B the batch, I the input size, H the hidden size; G, S, O, P, K and E as in
// recurrence/cell.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/optional_tensor.h"

namespace lltm_ext {

using c10::string_view;
using torch::autograd::variable_list;

inline void append(variable_list& to, at::TensorList tensors) {
  to.insert(to.end(), tensors.begin(), tensors.end());
}

// The inputs that differ between a layer's directions. An undefined tensor is one that was not given.
struct Direction {
  at::Tensor h0, states;   // [B, H]; [S, B, H], or [B, H] of a single state; undefined: zeros
  at::Tensor weight_ih;    // [G * H, I], undefined: the input is its product
  at::Tensor weight_hh;    // [G * H, H] or, of heads, block-diagonal [G * H, H / heads]
  at::Tensor bias;         // [G * H]
  at::Tensor parameters;   // [P, H] or [P * H]
  at::Tensor step_inputs;  // [T, B, K * H] or [N, K * H]; with K for K * H, the same for all units
  at::Tensor reset;    // [T, B] or [N], what a row loses of h and its states before a step: bool, or a number
  at::Tensor bias_hh;  // [G * H], a second bias, as nn.LSTM has
  bool reverse = false;

  // The tensors, in the order of the ops' arguments.
  static constexpr size_t kTensors = 9, kBias = 4, kParameters = 5, kBiasHh = 8;
  std::array<at::Tensor*, kTensors> tensors() {
    return {&h0, &states, &weight_ih, &weight_hh, &bias, &parameters, &step_inputs, &reset, &bias_hh};
  }
  std::array<const at::Tensor*, kTensors> tensors() const {
    return {&h0, &states, &weight_ih, &weight_hh, &bias, &parameters, &step_inputs, &reset, &bias_hh};
  }
};
using Directions = at::ArrayRef<Direction>;

// Two directions are those of a bidirectional layer, forward and in reverse.
struct CellCall {
  at::Tensor input;  // [T, B, I], or packed rows [N, I] with their batch_sizes; I = G * H without weight_ih
  std::vector<Direction> directions;
  at::OptionalIntArrayRef batch_sizes;
  string_view algorithm, program;

  CellCall with(std::vector<Direction> others) const {
    return {input, std::move(others), batch_sizes, algorithm, program};
  }
};

// ---- the ops of one direction

template <typename R, typename Last>
using OneDirection = R(const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& states,
                       const OptionalTensor& weight_ih, const OptionalTensor& weight_hh,
                       const OptionalTensor& bias, const OptionalTensor& parameters,
                       const OptionalTensor& step_inputs, const OptionalTensor& reset,
                       at::OptionalIntArrayRef batch_sizes, bool reverse, string_view algorithm,
                       string_view program, Last);

using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors6 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Tensors7 =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// output [T, B, O * H], h_n [B, H], states_n [S, B, H], or [B, H] if the only state was given so; the last
// argument is bias_hh
using CellSignature = OneDirection<Tensors3, const OptionalTensor&>;
// Also returns, for the backward: gates [T, B, G * H], or [T, B, 0] of a wide cell; extra [T, B, E * H]; h of
// every step, [T, B, H], or [T, B, 0] if that is the output.
using ForwardSignature = OneDirection<Tensors6, const OptionalTensor&>;
// Returns the algorithm that a call would take; the last argument says whether backward.
using AlgorithmSignature = OneDirection<std::string, bool>;

// Returns the gradients of input, h0, states, weight_ih, weight_hh, bias and parameters. Those that are not
// needed, or that the cell lacks, are empty. h is that of every step, [T, B, H].
template <typename R>
using BackwardSignature = R(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                            const OptionalTensor& grad_states_n, const at::Tensor& h, const at::Tensor& gates,
                            const at::Tensor& extra, const at::Tensor& input, const OptionalTensor& h0,
                            const OptionalTensor& states, const OptionalTensor& weight_ih,
                            const OptionalTensor& weight_hh, const OptionalTensor& bias,
                            const OptionalTensor& parameters, const OptionalTensor& step_inputs,
                            const OptionalTensor& reset, at::OptionalIntArrayRef batch_sizes, bool reverse,
                            string_view algorithm, string_view program, bool input_needs_grad,
                            bool bias_needs_grad);

inline CellCall cell_call(const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& states,
                          const OptionalTensor& weight_ih, const OptionalTensor& weight_hh,
                          const OptionalTensor& bias, const OptionalTensor& parameters,
                          const OptionalTensor& step_inputs, const OptionalTensor& reset,
                          at::OptionalIntArrayRef batch_sizes, bool reverse, string_view algorithm,
                          string_view program, const OptionalTensor& bias_hh) {
  const Direction only = {or_undefined(h0),          or_undefined(states),
                          or_undefined(weight_ih),   or_undefined(weight_hh),
                          or_undefined(bias),        or_undefined(parameters),
                          or_undefined(step_inputs), or_undefined(reset),
                          or_undefined(bias_hh),     reverse};
  return {input, {only}, batch_sizes, algorithm, program};
}

// Calls an op of one direction, whose arguments are those from `input` to `bias_hh`.
template <typename Op>
auto call_with(const Op& op, const CellCall& call) {
  const Direction& d = call.directions[0];
  return op.call(call.input, if_defined(d.h0), if_defined(d.states), if_defined(d.weight_ih),
                 if_defined(d.weight_hh), if_defined(d.bias), if_defined(d.parameters),
                 if_defined(d.step_inputs), if_defined(d.reset), call.batch_sizes, d.reverse, call.algorithm,
                 call.program, if_defined(d.bias_hh));
}

// ---- the ops of both directions of a layer

// The tensors of a direction as a list.
using TensorsOfDirection = c10::List<OptionalTensor>;

// Returns the results of the op of one direction, for each.
using BothSignature = variable_list(const at::Tensor& input, const TensorsOfDirection& forward_direction,
                                    const TensorsOfDirection& reverse_direction,
                                    at::OptionalIntArrayRef batch_sizes, string_view algorithm,
                                    string_view program);
// Returns grad_input, and then the other results of custom_cell_backward for each direction. grad_outputs are
// those of each direction's outputs, and saved are each direction's {h, gates, extra}.
using BothBackwardSignature = variable_list(const c10::List<OptionalTensor>& grad_outputs,
                                            const at::Tensor& input,
                                            const TensorsOfDirection& forward_direction,
                                            const TensorsOfDirection& reverse_direction, at::TensorList saved,
                                            at::OptionalIntArrayRef batch_sizes, string_view algorithm,
                                            string_view program, bool input_needs_grad, bool bias_needs_grad);

// A tensor of such a list. The dispatcher materializes negated views among the other arguments, but not those
// in a list of optional tensors.
inline at::Tensor materialized(const OptionalTensor& x) { return x ? x->resolve_neg() : at::Tensor(); }

// Defined in custom_cell.cpp, because it checks the lists.
CellCall cell_call(const at::Tensor& input, const TensorsOfDirection& forward_direction,
                   const TensorsOfDirection& reverse_direction, at::OptionalIntArrayRef batch_sizes,
                   string_view algorithm, string_view program);

// ---- functions of a call as kernels of the dispatcher

template <typename... Tensors>
variable_list list_of(const std::tuple<Tensors...>& y) {
  return std::apply([](const Tensors&... x) { return variable_list{x...}; }, y);
}
template <typename R, size_t... i>
R tuple_of(const variable_list& y, std::index_sequence<i...>) {
  return R(y[i]...);
}
template <typename R>
R results_as(const variable_list& y) {
  if constexpr (std::is_same_v<R, variable_list>) {
    return y;
  } else {
    return tuple_of<R>(y, std::make_index_sequence<std::tuple_size_v<R>>());
  }
}

template <typename Signature>
struct Kernel;
template <typename R, typename... Args>
struct Kernel<R(Args...)> {
  template <variable_list (*function)(const CellCall&)>
  static R of(Args... args) {
    return results_as<R>(function(cell_call(args...)));
  }
};

}  // namespace lltm_ext
