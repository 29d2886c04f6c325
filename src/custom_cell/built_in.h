// The dispatcher ops of a cell with a name of its own (built_in_schemas.h). They are lltm_ext::custom_cell
// and its kin (custom_cell/custom_cell.cpp) with the name as the program, and one state, c0. Exported
// programs and C++ programs call them. The portable library has them in Python (lltm_ext/_portable_rules.py).
#pragma once

#include <ATen/ops/_unsafe_view.h>

#include <string>
#include <tuple>
#include <vector>

#include "common/library.h"
#include "custom_cell/call.h"

namespace lltm_ext {

// Op is a struct { static constexpr const char* kName; }.
template <class Op>
struct BuiltInOps {
  using T = at::Tensor;
  using Optional = OptionalTensor;
  using Sizes = at::OptionalIntArrayRef;

  // c_n [B, H] of states_n [1, B, H], which is no view for autograd: a view cannot be detached in place.
  static T as_c(const T& states) {
    return states.dim() == 3 ? at::_unsafe_view_symint(states, states.sym_sizes().slice(1)) : states;
  }

  static Tensors3 sequence(const T& input, const Optional& h0, const Optional& c0, const T& weight_ih,
                           const T& weight_hh, const Optional& bias, Sizes batch_sizes, bool reverse,
                           string_view algorithm, const Optional& reset, const Optional& bias_hh) {
    static const auto op = find_op<CellSignature>("lltm_ext::custom_cell");
    const auto [output, h_n, states_n] = op.call(input, h0, c0, weight_ih, weight_hh, bias, {}, {}, reset,
                                                 batch_sizes, reverse, algorithm, Op::kName, bias_hh);
    return {output, h_n, as_c(states_n)};
  }

  static std::tuple<T, T, T, T, T> forward(const T& input, const Optional& h0, const Optional& c0,
                                           const T& weight_ih, const T& weight_hh, const Optional& bias,
                                           Sizes batch_sizes, bool reverse, string_view algorithm,
                                           const Optional& reset, const Optional& bias_hh) {
    static const auto op = find_op<ForwardSignature>("lltm_ext::custom_cell_forward");
    const auto [output, h_n, states_n, gates, extra, h] =
        op.call(input, h0, c0, weight_ih, weight_hh, bias, {}, {}, reset, batch_sizes, reverse, algorithm,
                Op::kName, bias_hh);
    return {output, h_n, as_c(states_n), gates, extra};
  }

  static Tensors6 backward(const Optional& grad_output, const Optional& grad_h_n, const Optional& grad_c_n,
                           const T& input, const Optional& h0, const Optional& c0, const T& weight_ih,
                           const T& weight_hh, const T& output, const T& gates, const T& extra,
                           Sizes batch_sizes, bool reverse, string_view algorithm, bool input_needs_grad,
                           bool bias_needs_grad, const Optional& reset) {
    static const auto op = find_op<BackwardSignature<variable_list>>("lltm_ext::custom_cell_backward");
    const Optional of_states = grad_c_n && !c0 ? Optional(grad_c_n->unsqueeze(0)) : grad_c_n;
    const variable_list g = op.call(grad_output, grad_h_n, of_states, output, gates, extra, input, h0, c0,
                                    weight_ih, weight_hh, {}, {}, {}, reset, batch_sizes, reverse, algorithm,
                                    Op::kName, input_needs_grad, bias_needs_grad);
    return {g[0], g[1], g[2], g[3], g[4], g[5]};
  }

  static std::string algorithm(const T& input, const T& h0, const T& c0, const T& weight_ih,
                               const T& weight_hh, const Optional& bias, Sizes batch_sizes,
                               string_view algorithm, bool backward) {
    static const auto op = find_op<AlgorithmSignature>("lltm_ext::custom_cell_algorithm");
    return op.call(input, h0, c0, weight_ih, weight_hh, bias, {}, {}, {}, batch_sizes, /*reverse=*/false,
                   algorithm, Op::kName, backward);
  }

  // ---- both directions; one is given as [h0, c0, weight_ih, weight_hh] or these and bias

  static TensorsOfDirection direction(at::TensorList given) {
    TORCH_CHECK(
        given.size() == 4 || given.size() == 5, Op::kName,
        "_bidirectional: expected a direction to be [h0, c0, weight_ih, weight_hh] or these and bias, "
        "got ",
        given.size(), " tensors");
    TensorsOfDirection all;
    for (const T& x : given) all.push_back(x);
    while (all.size() < Direction::kTensors) all.push_back(std::nullopt);
    return all;
  }

  static variable_list bidirectional(const T& input, at::TensorList forward_direction,
                                     at::TensorList reverse_direction, Sizes batch_sizes,
                                     string_view algorithm) {
    static const auto op = find_op<BothSignature>("lltm_ext::custom_cell_bidirectional");
    return op.call(input, direction(forward_direction), direction(reverse_direction), batch_sizes, algorithm,
                   Op::kName);
  }

  static variable_list bidirectional_forward(const T& input, at::TensorList forward_direction,
                                             at::TensorList reverse_direction, Sizes batch_sizes,
                                             string_view algorithm) {
    static const auto op = find_op<BothSignature>("lltm_ext::custom_cell_bidirectional_forward");
    variable_list y = op.call(input, direction(forward_direction), direction(reverse_direction), batch_sizes,
                              algorithm, Op::kName);
    y.erase(y.begin() + 11);  // h of every step, which these ops return as the output
    y.erase(y.begin() + 5);
    return y;
  }

  static variable_list bidirectional_backward(const c10::List<Optional>& grad_outputs, const T& input,
                                              at::TensorList forward_direction,
                                              at::TensorList reverse_direction, at::TensorList saved,
                                              Sizes batch_sizes, string_view algorithm, bool input_needs_grad,
                                              bool bias_needs_grad) {
    static const auto op = find_op<BothBackwardSignature>("lltm_ext::custom_cell_bidirectional_backward");
    variable_list g = op.call(grad_outputs, input, direction(forward_direction), direction(reverse_direction),
                              saved, batch_sizes, algorithm, Op::kName, input_needs_grad, bias_needs_grad);
    g.erase(g.begin() + 12);  // the gradient of parameters, which these cells lack
    g.erase(g.begin() + 6);
    return g;
  }

  // ---- registration

  static void implement(torch::Library& m) {
    impl(m, "", sequence);
    impl(m, "_forward", forward);
    impl(m, "_backward", backward);
    impl(m, "_algorithm", algorithm);
    impl(m, "_bidirectional", bidirectional);
    impl(m, "_bidirectional_forward", bidirectional_forward);
    impl(m, "_bidirectional_backward", bidirectional_backward);
  }

  template <typename F>
  static void impl(torch::Library& m, const char* suffix, F* function) {
    const std::string name = std::string(Op::kName) + suffix;
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, function));
  }
};

}  // namespace lltm_ext
