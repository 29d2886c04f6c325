// An op that runs a whole sequence of a recurrent cell: tensors in, tensors out. SequenceOps<Op> makes the
// dispatcher ops lltm_ext::<op>, <op>_forward, <op>_backward and <op>_algorithm, and for a bidirectional
// layer <op>_bidirectional, <op>_bidirectional_forward and <op>_bidirectional_backward, from
//
//   struct Op : BuiltInOp<Cell> {  // of a cell as in cell.h
//     static std::string name();
//     // The header that declares Cell, and its name there, for kernels that take resets (resets.h).
//     static constexpr Header kCellHeader;
//     static constexpr const char* kCellType;
//     // The cell in torch's differentiable ops, for the double backward: (h, c) from gates [B, G * H] and c.
//     static std::pair<at::Tensor, at::Tensor> composed(const at::Tensor& gates, const at::Tensor& c);
//   };
//
// T is the length, B the batch, I the input size, H the hidden size, G the number of gates. One matrix
// product before the steps projects all inputs; products after them give the weights' gradients. The steps
// run in a persistent kernel, in a fused kernel each, or as a product and a pointwise kernel each. A single
// step that is given its states may be one kernel with all products.
//
// A packed sequence is given as the rows of all steps, one step after the other ([N, I], longest sequence
// first), and the number of rows in each; a dense input has B rows in each. `reverse` runs from the last step
// to the first and leaves every output at its own step.
//
// Everything runs on a list of directions: one for a sequence, two for a bidirectional layer, which share the
// input and run in one launch if the GPU has room for both, else on two streams.
//
// A sequence without h0 or c0 starts from zeros. bias_hh is a second bias, as nn.LSTM has it.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#ifndef LLTM_EXT_STABLE_ABI
#include <ATen/ops/sub.h>
#endif
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/differentiable.h"
#include "common/function.h"
#include "common/library.h"
#include "recurrence/tensors/backward.h"
#include "recurrence/tensors/forward.h"

namespace lltm_ext {

template <class Op>
struct SequenceOps {
  using Forward = BuiltInForward<Op>;
  using Backward = BuiltInBackward<Op>;

  // The dispatcher's name, <op><suffix>.
  static std::string op_name(const char* suffix) { return Op::name() + suffix; }

  // The algorithm that a call would take.
  static std::string algorithm_of(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                                  const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                  const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
                                  c10::string_view algorithm, bool backward) {
    const std::string op = op_name("_algorithm");
    const Direction only = {h0, c0, weight_ih, weight_hh, bias, false};
    check_inputs(Op{}, op.c_str(), input, only, batch_sizes, algorithm);
    if (!backward && takes_single_step(Op{}, input, only, batch_sizes, algorithm)) return "stepwise";
    const KernelGuard guard(input);
    const int64_t hidden = hidden_of_kernels(Op{}, input, h0.size(1), weight_hh, batch_sizes, algorithm);
    return name_of(
        plan_for(Op{}, op.c_str(), input, h0.size(0), hidden, !batch_sizes, backward, algorithm).algorithm);
  }

#ifndef LLTM_EXT_STABLE_ABI
  // ---- autograd

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> call_sequence(
      const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
      const at::Tensor& weight_ih, const at::Tensor& weight_hh, const OptionalTensor& bias,
      at::OptionalIntArrayRef batch_sizes, bool reverse, c10::string_view algorithm,
      const OptionalTensor& reset, const OptionalTensor& bias_hh) {
    static const auto op = find_op<decltype(Forward::sequence)>(qualified("").c_str());
    return op.call(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm, reset,
                   bias_hh);
  }

  static variable_list call_bidirectional(const at::Tensor& input, at::TensorList forward_direction,
                                          at::TensorList reverse_direction,
                                          at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
    static const auto op = find_op<decltype(Forward::bidirectional)>(qualified("_bidirectional").c_str());
    return op.call(input, forward_direction, reverse_direction, batch_sizes, algorithm);
  }

  // What forward saved: nothing for a dense sequence.
  static std::optional<std::vector<int64_t>> saved_batch_sizes(torch::autograd::AutogradContext* ctx) {
    const auto entry = ctx->saved_data.find("batch_sizes");
    if (entry == ctx->saved_data.end()) return std::nullopt;
    return entry->second.toIntVector();
  }

  struct SequenceFunction : Function<SequenceFunction> {
    static constexpr size_t kArguments = 11, kBias = 5, kBiasHh = 10;

    static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                                 const OptionalTensor& h0, const OptionalTensor& c0,
                                 const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                 const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
                                 bool reverse, c10::string_view algorithm, const OptionalTensor& reset,
                                 const OptionalTensor& bias_hh) {
      static const auto op = find_op<decltype(Forward::sequence_forward)>(qualified("_forward").c_str());
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      auto [output, h_n, c_n, gates, extra] =
          op.call(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm, reset, bias_hh);
      ctx->save_for_backward({input, or_undefined(h0), or_undefined(c0), weight_ih, weight_hh,
                              or_undefined(bias), output, gates, extra, or_undefined(reset),
                              or_undefined(bias_hh)});
      ctx->set_materialize_grads(false);
      if (batch_sizes) ctx->saved_data["batch_sizes"] = batch_sizes->vec();
      ctx->saved_data["reverse"] = reverse;
      ctx->saved_data["algorithm"] = std::string(algorithm);
      return {output, h_n, c_n};
    }

    static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
      variable_list gradients(kArguments);
      if (!any_defined(grad_outputs)) return gradients;
      const variable_list saved = ctx->get_saved_variables();
      const auto sizes = saved_batch_sizes(ctx);
      const at::OptionalIntArrayRef batch_sizes(sizes);
      const bool reverse = ctx->saved_data["reverse"].toBool(), input_needs_grad = saved[0].requires_grad();
      const std::string algorithm = ctx->saved_data["algorithm"].toStringRef();
      if (at::GradMode::is_enabled()) {
        variable_list inputs(saved.begin(), saved.begin() + 6);
        inputs.push_back(saved[kBiasHh]);
        gradients = differentiable_gradients(
            [&](const variable_list& x) { return composed(x, batch_sizes, reverse, saved[9]); }, inputs,
            grad_outputs);
        gradients.resize(kArguments);
        std::swap(gradients[6], gradients[kBiasHh]);
        return gradients;
      }
      const auto needs_grad = [](const at::Tensor& x) { return x.defined() && x.requires_grad(); };
      const bool of_bias = needs_grad(saved[kBias]), of_bias_hh = needs_grad(saved[kBiasHh]);
      static const auto op = find_op<decltype(Backward::sequence_backward)>(qualified("_backward").c_str());
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      std::tie(gradients[0], gradients[1], gradients[2], gradients[3], gradients[4], gradients[5]) = op.call(
          if_defined(grad_outputs[0]), if_defined(grad_outputs[1]), if_defined(grad_outputs[2]), saved[0],
          if_defined(saved[1]), if_defined(saved[2]), saved[3], saved[4], saved[6], saved[7], saved[8],
          batch_sizes, reverse, algorithm, input_needs_grad, of_bias || of_bias_hh, if_defined(saved[9]));
      // Two biases have one gradient, but it may be scaled in place: each gets its own memory.
      if (of_bias_hh) gradients[kBiasHh] = of_bias ? gradients[kBias].clone() : gradients[kBias];
      for (const size_t i : {0, 1, 2, 5}) {
        if (!needs_grad(saved[i])) gradients[i] = at::Tensor();
      }
      return gradients;
    }

    // The sequence in torch's differentiable ops: {output, h_n, c_n}.
    static variable_list composed(const variable_list& inputs, at::OptionalIntArrayRef batch_sizes,
                                  bool reverse, const at::Tensor& reset) {
      const at::Tensor &input = inputs[0], &weight_hh = inputs[4];
      const int64_t hidden = weight_hh.size(1);
      at::Tensor h = inputs[1], c = inputs[2];
      for (at::Tensor* state : {&h, &c}) {
        if (state->defined()) continue;
        const int64_t batch = batch_sizes ? (batch_sizes->empty() ? 0 : (*batch_sizes)[0]) : input.size(1);
        *state = at::zeros({batch, hidden}, input.options());
      }
      at::Tensor projection = flatten_rows(input).mm(inputs[3].t());
      for (size_t i = 5; i < inputs.size(); ++i) {
        if (inputs[i].defined()) projection = projection + inputs[i];
      }
      const at::Tensor resets = reset.defined() ? reset.reshape({projection.size(0)}) : reset;
      const auto replace_first_rows = [](const at::Tensor& state, const at::Tensor& rows) {
        if (rows.size(0) == state.size(0)) return rows;
        return at::cat({rows, state.narrow(0, rows.size(0), state.size(0) - rows.size(0))});
      };
      variable_list outputs;
      for (const auto& [first_row, n] :
           rows_of_steps(batch_sizes, length_of(input, batch_sizes), h.size(0), reverse)) {
        at::Tensor old_h = h.narrow(0, 0, n), old_c = c.narrow(0, 0, n);
        if (resets.defined()) {
          const at::Tensor of_step = resets.narrow(0, first_row, n);
          old_h = kept(old_h, of_step).to(h.scalar_type());
          old_c = kept(old_c, of_step).to(c.scalar_type());
        }
        const at::Tensor gates = projection.narrow(0, first_row, n) + old_h.mm(weight_hh.t());
        const auto [new_h, new_cell] = Op::composed(gates, old_c);
        outputs.push_back(new_h);
        h = replace_first_rows(h, new_h);
        c = replace_first_rows(c, new_cell);
      }
      if (reverse) std::reverse(outputs.begin(), outputs.end());
      const auto sizes = sizes_like_input(input, hidden);
      const at::Tensor output =
          outputs.empty() ? at::zeros_symint(sizes, input.options()) : at::cat(outputs).view_symint(sizes);
      return {output, h, c};
    }
  };

  struct BidirectionalFunction : Function<BidirectionalFunction> {
    static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                                 at::TensorList forward_direction, at::TensorList reverse_direction,
                                 at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
      static const auto op =
          find_op<decltype(Forward::bidirectional_forward)>(qualified("_bidirectional_forward").c_str());
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const variable_list y = op.call(input, forward_direction, reverse_direction, batch_sizes, algorithm);
      variable_list saved = {input};
      append(saved, forward_direction);
      append(saved, reverse_direction);
      append(saved, {y[0], y[3], y[4], y[5], y[8], y[9]});
      ctx->save_for_backward(std::move(saved));
      ctx->set_materialize_grads(false);
      if (batch_sizes) ctx->saved_data["batch_sizes"] = batch_sizes->vec();
      ctx->saved_data["forward_direction_size"] = static_cast<int64_t>(forward_direction.size());
      ctx->saved_data["algorithm"] = std::string(algorithm);
      return {y[0], y[1], y[2], y[5], y[6], y[7]};
    }

    static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
      const variable_list all = ctx->get_saved_variables();
      const size_t input_count = all.size() - 6;
      const at::TensorList inputs = at::TensorList(all).slice(0, input_count),
                           saved = at::TensorList(all).slice(input_count);
      const size_t reverse_begin = 1 + ctx->saved_data["forward_direction_size"].toInt();
      variable_list gradients(input_count + 2);
      if (!any_defined(grad_outputs)) return gradients;
      const auto sizes = saved_batch_sizes(ctx);
      const at::OptionalIntArrayRef batch_sizes(sizes);
      if (at::GradMode::is_enabled()) {
        gradients = differentiable_gradients(
            [&](at::TensorList x) {
              variable_list outputs = composed(x[0], x.slice(1, reverse_begin - 1), batch_sizes, false);
              append(outputs, composed(x[0], x.slice(reverse_begin), batch_sizes, /*reverse=*/true));
              return outputs;
            },
            inputs.vec(), grad_outputs);
        gradients.resize(input_count + 2);
        return gradients;
      }
      c10::List<OptionalTensor> grads;
      for (const at::Tensor& x : grad_outputs) grads.push_back(if_defined(x));
      const at::TensorList forward_direction = inputs.slice(1, reverse_begin - 1),
                           reverse_direction = inputs.slice(reverse_begin);
      const auto bias_needs_grad = [](at::TensorList x) { return x.size() > 4 && x[4].requires_grad(); };
      static const auto op =
          find_op<decltype(Backward::bidirectional_backward)>(qualified("_bidirectional_backward").c_str());
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const variable_list g =
          op.call(grads, inputs[0], forward_direction, reverse_direction, saved, batch_sizes,
                  ctx->saved_data["algorithm"].toStringRef(), inputs[0].requires_grad(),
                  bias_needs_grad(forward_direction) || bias_needs_grad(reverse_direction));
      // The op returns five gradients for each direction, whether it has a bias or not.
      for (size_t i = 0; i < input_count; ++i) {
        if (inputs[i].requires_grad()) gradients[i] = g[i < reverse_begin ? i : i - reverse_begin + 6];
      }
      return gradients;
    }

    static variable_list composed(const at::Tensor& input, at::TensorList direction,
                                  at::OptionalIntArrayRef batch_sizes, bool reverse) {
      variable_list inputs = {input};
      append(inputs, direction);
      inputs.resize(6);  // without a bias, with an undefined one
      return SequenceFunction::composed(inputs, batch_sizes, reverse, at::Tensor());
    }
  };

  static variable_list bidirectional_autograd(const at::Tensor& input, at::TensorList forward_direction,
                                              at::TensorList reverse_direction,
                                              at::OptionalIntArrayRef batch_sizes,
                                              c10::string_view algorithm) {
    const auto some_need_grad = [](at::TensorList tensors) {
      return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& x) { return needs_grad(x); });
    };
    const bool records = input.defined() && (needs_grad(input) || some_need_grad(forward_direction) ||
                                             some_need_grad(reverse_direction));
    if (records && (is_half_on_cpu(input) || (input.is_cpu() && Op::has_cpu_layer()))) {
      variable_list outputs;
      for (const Direction& d :
           checked_directions(Op{}, input, forward_direction, reverse_direction, batch_sizes, algorithm)) {
        const auto [output, h_n, c_n] = sequence_autograd(input, d.h0, d.states, d.weight_ih, d.weight_hh,
                                                          d.bias, batch_sizes, d.reverse, algorithm, {}, {});
        append(outputs, {output, h_n, c_n});
      }
      return outputs;
    }
    if (records) {
      if (both_add_units(Op{}, input, forward_direction, batch_sizes, algorithm)) {
        return run_both_with_added_units(Op{}, input, forward_direction, reverse_direction, batch_sizes,
                                         algorithm, [&](at::TensorList wide, at::TensorList wide_reverse) {
                                           return bidirectional_autograd(input, wide, wide_reverse,
                                                                         batch_sizes, algorithm);
                                         });
      }
      return BidirectionalFunction::apply(input, forward_direction, reverse_direction, batch_sizes,
                                          algorithm);
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_bidirectional(input, forward_direction, reverse_direction, batch_sizes, algorithm);
  }

  static variable_list bidirectional_autocast(const at::Tensor& input, at::TensorList forward_direction,
                                              at::TensorList reverse_direction,
                                              at::OptionalIntArrayRef batch_sizes,
                                              c10::string_view algorithm) {
    const AutocastInputs cast(input);
    const auto cast_all = [&](at::TensorList direction) {
      variable_list result;
      for (size_t i = 0; i < direction.size(); ++i) {
        result.push_back(i == 1 ? cast.cell(direction[i]) : cast(direction[i]));
      }
      return result;
    };
    return call_bidirectional(cast(input), cast_all(forward_direction), cast_all(reverse_direction),
                              batch_sizes, algorithm);
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence_autograd(
      const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
      const at::Tensor& weight_ih, const at::Tensor& weight_hh, const OptionalTensor& bias,
      at::OptionalIntArrayRef batch_sizes, bool reverse, c10::string_view algorithm,
      const OptionalTensor& reset, const OptionalTensor& bias_hh) {
    if (any_needs_grad(input, h0, c0, weight_ih, weight_hh, bias, bias_hh)) {
      const auto run = [&](const at::Tensor& x, const Direction& d) {
        return sequence_autograd(x, if_defined(d.h0), if_defined(d.states), d.weight_ih, d.weight_hh, d.bias,
                                 batch_sizes, reverse, algorithm, reset, std::nullopt);
      };
      const bool adds = adds_units(Op{}, input, weight_hh, batch_sizes, algorithm);
      if (!adds && !input.is_cpu()) {
        const variable_list outputs = SequenceFunction::apply(
            input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm, reset, bias_hh);
        return {outputs[0], outputs[1], outputs[2]};
      }
      Direction only = direction_of(Op{}, h0, c0, weight_ih, weight_hh, bias, reverse, reset, {});
      if (bias_hh) check_bias_hh(Op::name().c_str(), or_undefined(bias), *bias_hh);
      if constexpr (Op::has_cpu_layer()) {
        if (cpu_layer_takes<Op>(input, only, batch_sizes, algorithm)) {
          using Node = typename Op::CpuLayer::template Node<SequenceFunction>;
          const variable_list outputs =
              Node::apply(input, h0, c0, weight_ih, weight_hh, bias, bias_hh, reverse);
          return {outputs[0], outputs[1], outputs[2]};
        }
      }
      // As a difference, because the gradients of a sum share their memory.
      if (bias_hh) only.bias = at::sub(*bias, *bias_hh, -1);
      if (is_half_on_cpu(input)) return run_in_float32(Op{}, input, only, batch_sizes, algorithm, run);
      if (adds) {
        return run_with_added_units(Op{}, input, only, batch_sizes, algorithm,
                                    [&](const Direction& d) { return run(input, d); });
      }
      const variable_list outputs =
          SequenceFunction::apply(input, h0, c0, weight_ih, weight_hh, only.bias, batch_sizes, reverse,
                                  algorithm, reset, std::nullopt);
      return {outputs[0], outputs[1], outputs[2]};
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_sequence(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm, reset,
                         bias_hh);
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence_autocast(
      const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
      const at::Tensor& weight_ih, const at::Tensor& weight_hh, const OptionalTensor& bias,
      at::OptionalIntArrayRef batch_sizes, bool reverse, c10::string_view algorithm,
      const OptionalTensor& reset, const OptionalTensor& bias_hh) {
    const AutocastInputs cast(input);
    return call_sequence(cast(input), cast(h0), cast.cell(c0), cast(weight_ih), cast(weight_hh), cast(bias),
                         batch_sizes, reverse, algorithm, reset, cast(bias_hh));
  }

  // Under autocast: the algorithm for the tensors that it casts.
  static std::string algorithm_autocast(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                                        const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                        const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
                                        c10::string_view algorithm, bool backward) {
    const AutocastInputs cast(input);
    return algorithm_of(cast(input), cast(h0), cast.cell(c0), cast(weight_ih), cast(weight_hh), cast(bias),
                        batch_sizes, algorithm, backward);
  }

#endif

  // ---- registration

  static std::string qualified(const char* suffix) { return "lltm_ext::" + op_name(suffix); }

  static void define(torch::Library& m) {
    const std::string weights = "Tensor weight_ih, Tensor weight_hh, ",
                      inputs = "Tensor input, Tensor? h0, Tensor? c0, " + weights;
    const auto def = [&](const char* suffix, const std::string& signature) {
      m.def((op_name(suffix) + signature).c_str(), {at::Tag::pt2_compliant_tag});
    };
    def("", "(" + inputs +
                "Tensor? bias=None, int[]? batch_sizes=None, bool reverse=False, str algorithm='auto', "
                "Tensor? reset=None, Tensor? bias_hh=None) -> (Tensor, Tensor, Tensor)");
    def("_forward", "(" + inputs +
                        "Tensor? bias, int[]? batch_sizes, bool reverse, str algorithm, Tensor? reset=None, "
                        "Tensor? bias_hh=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
    def("_backward", "(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, " + inputs +
                         "Tensor output, Tensor gates, Tensor extra, int[]? batch_sizes, bool reverse, "
                         "str algorithm, bool input_needs_grad, bool bias_needs_grad, Tensor? reset=None) "
                         "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    def("_algorithm",
        "(Tensor input, Tensor h0, Tensor c0, " + weights +
            "Tensor? bias=None, int[]? batch_sizes=None, str algorithm='auto', bool backward=False) "
            "-> str");
    const std::string layer_inputs = "Tensor input, Tensor[] forward_direction, Tensor[] reverse_direction, ";
    def("_bidirectional", "(" + layer_inputs + "int[]? batch_sizes=None, str algorithm='auto') -> Tensor[]");
    def("_bidirectional_forward", "(" + layer_inputs + "int[]? batch_sizes, str algorithm) -> Tensor[]");
    def("_bidirectional_backward", "(Tensor?[] grad_outputs, " + layer_inputs +
                                       "Tensor[] saved, int[]? batch_sizes, str algorithm, "
                                       "bool input_needs_grad, bool bias_needs_grad) -> Tensor[]");
    implement<Forward::bidirectional>(m, op_name("_bidirectional").c_str());
    implement<Forward::bidirectional_forward>(m, op_name("_bidirectional_forward").c_str());
    implement<Backward::bidirectional_backward>(m, op_name("_bidirectional_backward").c_str());
    implement<Forward::sequence>(m, Op::name().c_str());
    implement<Forward::sequence_forward>(m, op_name("_forward").c_str());
    implement<Backward::sequence_backward>(m, op_name("_backward").c_str());
    implement<algorithm_of>(m, op_name("_algorithm").c_str());
#ifndef LLTM_EXT_STABLE_ABI
    implement_autograd(m, op_name("_bidirectional").c_str(), bidirectional_autograd);
    implement_autocast(m, op_name("_bidirectional").c_str(), bidirectional_autocast);
    implement_autograd(m, Op::name().c_str(), sequence_autograd);
    implement_autocast(m, Op::name().c_str(), sequence_autocast);
    implement_autocast(m, op_name("_algorithm").c_str(), algorithm_autocast);
#endif
  }
};

}  // namespace lltm_ext
