// Sequences of a built-in cell with resets on CUDA. The package has no kernels for them, which would double
// its size: the cell runs as a user's cell does, in kernels that are compiled at run time. The ops of
// src/custom_cell are called through the dispatcher.
#pragma once

#ifndef LLTM_EXT_STABLE_ABI
#include <string>
#include <tuple>

#include "common/library.h"
#include "common/runtime/compiler.h"
#include "common/runtime/text.h"
#include "recurrence/tensors/inputs.h"

namespace lltm_ext {

inline bool has_resets_on_cuda(const at::Tensor& input, Directions directions) {
  return directions.size() == 1 && directions[0].reset.defined() && input.defined() && input.is_cuda();
}

template <class Op>
struct WithResets {
  using T = at::Tensor;
  using Optional = OptionalTensor;
  using Three = std::tuple<T, T, T>;
  using Six = std::tuple<T, T, T, T, T, T>;
  // The arguments from `input` to `program` of custom_cell's ops.
  template <class Result>
  using Forward = Result(const T&, const Optional&, const Optional&, const T&, const Optional&,
                         const Optional&, const Optional&, const Optional&, const Optional&,
                         at::OptionalIntArrayRef, bool, c10::string_view, c10::string_view);
  using Backward = variable_list(const Optional&, const Optional&, const Optional&, const T&, const T&,
                                 const T&, const T&, const Optional&, const Optional&, const T&,
                                 const Optional&, const Optional&, const Optional&, const Optional&,
                                 const Optional&, at::OptionalIntArrayRef, bool, c10::string_view,
                                 c10::string_view, bool, bool);

  // The cell as text (custom_cell/program.h). The last number: a unit of zeros stays so.
  static const std::string& program() {
    static const std::string text = [] {
      const CellShape shape = Op::shape();
      std::string numbers;
      for (const int x :
           {shape.gates, shape.states, shape.saved, shape.parameters, shape.step_inputs, int{shape.recurrent},
            int{shape.separate}, int{shape.reads_h}, shape.output_state, int{Op::zeros_stay()}}) {
        numbers += (numbers.empty() ? "" : ",") + std::to_string(x);
      }
      // A program's code is inside the namespace, which the header opens itself.
      const std::string code = std::string("}  // namespace lltm_ext\n") + Op::kCellHeader.text +
                               "\nnamespace lltm_ext {\nusing Cell = " + Op::kCellType + ";\n";
      return Op::name() + kSeparator + numbers + kSeparator + code;
    }();
    return text;
  }

  // Users' cells have several states: [1, B, H] of [B, H].
  static Optional stacked(const Optional& state) {
    return state ? Optional(state->unsqueeze(0)) : std::nullopt;
  }

  // {output, h_n, c_n}, and if `save` {gates, extra}.
  static variable_list forward(const T& input, const Direction& d, at::OptionalIntArrayRef batch_sizes,
                               c10::string_view algorithm, bool save) {
    // The ops of users' cells check all inputs, but call c0 the states.
    if (d.states.defined()) check_inputs(Op{}, Op::name().c_str(), input, d, batch_sizes, algorithm);
    const auto call = [&](const auto& op) {
      return op.call(input, if_defined(d.h0), stacked(if_defined(d.states)), d.weight_ih, d.weight_hh, d.bias,
                     std::nullopt, std::nullopt, d.reset, batch_sizes, d.reverse, algorithm, program());
    };
    if (save) {
      static const auto op = find_op<Forward<Six>>("lltm_ext::custom_cell_forward");
      const auto [output, h_n, states_n, gates, extra, h] = call(op);
      return {output, h_n, states_n.squeeze(0), gates, extra};
    }
    static const auto op = find_op<Forward<Three>>("lltm_ext::custom_cell");
    const auto [output, h_n, states_n] = call(op);
    return {output, h_n, states_n.squeeze(0)};
  }

  // As BuiltInBackward::run.
  template <class Given>
  static variable_list backward(const T& input, const Direction& d, const Given& given,
                                at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm,
                                bool input_needs_grad, bool bias_needs_grad) {
    static const auto op = find_op<Backward>("lltm_ext::custom_cell_backward");
    variable_list g =
        op.call(given.grad_output, given.grad_h_n, stacked(given.grad_states_n), given.output, given.gates,
                given.extra, input, if_defined(d.h0), stacked(if_defined(d.states)), d.weight_ih, d.weight_hh,
                d.bias, std::nullopt, std::nullopt, d.reset, batch_sizes, d.reverse, algorithm, program(),
                input_needs_grad, bias_needs_grad);
    if (d.states.defined()) g[2] = g[2].squeeze(0);
    g.pop_back();  // of parameters
    return g;
  }
};

}  // namespace lltm_ext
#endif
