// A sequence of the LSTM on the CPU by oneDNN's layer, which torch.nn.LSTM takes there too: forward, and a
// Function with its backward. For few small steps those of forward.cpp are faster. The cell state is float32
// also in bfloat16, on a CPU that multiplies it: rounded at each step, a long memory would be lost.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/mkldnn_rnn_layer_backward.h>
#include <ATen/ops/zeros_like.h>

#include <tuple>

#include "common/differentiable.h"
#include "common/function.h"
#include "common/library.h"
#include "common/onednn.h"
#include "custom_cell/custom_cell.h"

namespace lltm_ext {

struct OneDnnLstm {
  static constexpr int64_t kModeOfLstm = 2;  // the number that torch's RNN ops have for it

  // Whether the layer runs the directions of this call, which has been checked, one after the other.
  static bool takes(const CellOp& op, const CellCall& call) {
    const at::Tensor& input = call.input;
    if (!input.is_cpu()) return false;
    const Direction& d = call.directions[0];
    if (!op.is_compiled("lstm") || (call.algorithm != "auto" && call.algorithm != "stepwise")) return false;
    const bool is_traced = input.key_set().has(c10::DispatchKey::Python);  // a graph keeps our own op
    const at::ScalarType type = input.scalar_type();
    const bool has_type = type == at::kFloat || (type == at::kBFloat16 && onednn_multiplies(type));
    if (is_traced || !has_type || input.numel() == 0 || !d.weight_ih.defined()) return false;
    if (call.batch_sizes || d.reset.defined() || !at::globalContext().userEnabledMkldnn()) return false;
    const int64_t batch = input.size(1), hidden = d.weight_hh.size(1);
    return batch * hidden * hidden >= kLargeStep || input.size(0) * batch * hidden >= kLongSequence;
  }

  // A call of the layer takes the host some 30 us more, and each step less: on one core and on two, our own
  // steps take 0.5 to 1.1 of the layer's time below these limits, and 0.8 to 1.8 above.
  static constexpr int64_t kLargeStep = 1 << 14;     // batch * H^2
  static constexpr int64_t kLongSequence = 1 << 11;  // T * batch * H

  struct Inputs {
    at::Tensor input, h0, c0, weight_ih, weight_hh, bias, second_bias;

    Inputs(const at::Tensor& input, const Direction& d)
        : input(input.contiguous()),
          h0(or_zeros(d.h0, input, d, input.scalar_type())),
          c0(or_zeros(d.states.defined() && d.states.dim() == 3 ? d.states[0] : d.states, input, d,
                      at::kFloat)),
          weight_ih(d.weight_ih.contiguous()),
          weight_hh(d.weight_hh.contiguous()),
          bias(d.bias.defined() ? d.bias.contiguous() : at::zeros({weight_ih.size(0)}, weight_ih.options())),
          second_bias(d.bias_hh.defined() ? d.bias_hh.contiguous()
                      : d.bias.defined()  ? at::zeros_like(bias)
                                          : bias) {}
    int64_t hidden() const { return h0.size(1); }

   private:
    static at::Tensor or_zeros(const at::Tensor& x, const at::Tensor& input, const Direction& d,
                               at::ScalarType type) {
      if (x.defined()) return x.to(type).contiguous();
      return at::zeros({input.size(1), d.weight_hh.size(1)}, input.options().dtype(type));
    }
  };

  // Returns (output, h_n, c_n in float32, workspace).
  static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(const Inputs& x, bool reverse,
                                                                            bool train) {
    const at::AutoGradMode grad_mode(train);  // decides whether the op returns a workspace
    return at::mkldnn_rnn_layer(x.input, x.weight_ih, x.weight_hh, x.bias, x.second_bias, x.h0, x.c0, reverse,
                                /*batch_sizes=*/{}, kModeOfLstm, x.hidden(), /*num_layers=*/1,
                                /*has_biases=*/true, /*bidirectional=*/false, /*batch_first=*/false, train);
  }

  // Returns the gradients of input, h0, c0, weight_ih, weight_hh and both biases, all in float32.
  static variable_list backward(const Inputs& x, const variable_list& outputs, const at::Tensor& workspace,
                                const variable_list& grad_outputs, bool reverse) {
    const auto contiguous = [](const at::Tensor& g) { return if_defined(contiguous_or_none(g)); };
    const auto [input, weight_ih, weight_hh, bias, second_bias, h0, c0] = at::mkldnn_rnn_layer_backward(
        x.input, x.weight_ih, x.weight_hh, x.bias, x.second_bias, x.h0, x.c0, outputs[0], outputs[1],
        outputs[2], contiguous(grad_outputs[0]), contiguous(grad_outputs[1]),
        contiguous(in_float32(grad_outputs[2])), reverse, kModeOfLstm, x.hidden(), /*num_layers=*/1,
        /*has_biases=*/true, /*train=*/true,
        /*bidirectional=*/false, /*batch_sizes=*/{}, /*batch_first=*/false, workspace);
    return {input, h0, c0, weight_ih, weight_hh, bias, second_bias};
  }

  // Returns {output, h_n, states_n}, as custom_cell does.
  static variable_list run(const CellCall& call) {
    const Direction& d = call.directions[0];
    const auto [output, h_n, c_n, workspace] = forward({call.input, d}, d.reverse, /*train=*/false);
    return {output, h_n, as_states(c_n, call.input, d)};
  }

  // Like run(), with gradients.
  static variable_list record(const CellCall& call) {
    const Direction& d = call.directions[0];
    return Node::apply(call.input, if_defined(d.h0), if_defined(d.states), d.weight_ih, d.weight_hh,
                       if_defined(d.bias), if_defined(d.bias_hh), d.reverse);
  }

 private:
  // A copy of c_n in the dtype and the sizes of the initial states.
  static at::Tensor as_states(const at::Tensor& c_n, const at::Tensor& input, const Direction& d) {
    const at::Tensor copy = c_n.to(states_type(input, d), /*non_blocking=*/false, /*copy=*/true);
    return d.states.defined() ? copy.view(d.states.sizes()) : copy.unsqueeze(0);
  }

  struct Node : Function<Node> {
    static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                                 const OptionalTensor& h0, const OptionalTensor& c0,
                                 const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                 const OptionalTensor& bias, const OptionalTensor& bias_hh, bool reverse) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      variable_list saved = {input,     or_undefined(h0),   or_undefined(c0),     weight_ih,
                             weight_hh, or_undefined(bias), or_undefined(bias_hh)};
      const Direction d = direction(saved, reverse);
      auto [output, h_n, c_n, workspace] = OneDnnLstm::forward({input, d}, reverse, /*train=*/true);
      append(saved, {output, h_n, c_n, workspace});
      ctx->save_for_backward(std::move(saved));
      ctx->set_materialize_grads(false);
      ctx->saved_data["reverse"] = reverse;
      return {output, h_n.clone(),
              as_states(c_n, input, d)};  // a caller's change must not reach what is saved
    }

    static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
      variable_list gradients(8);
      if (!any_defined(grad_outputs)) return gradients;
      const variable_list saved = ctx->get_saved_variables(), inputs(saved.begin(), saved.begin() + 7);
      const bool reverse = ctx->saved_data["reverse"].toBool();
      if (at::GradMode::is_enabled()) {
        gradients = differentiable_gradients(
            [&](const variable_list& x) {
              return call_by_loop({x[0], {direction(x, reverse)}, std::nullopt, "auto", "lstm"});
            },
            inputs, grad_outputs);
      } else {
        const Direction d = direction(saved, reverse);
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        const at::Tensor& of_states = grad_outputs[2];
        gradients = OneDnnLstm::backward({saved[0], d}, {saved[7], saved[8], saved[9]}, saved[10],
                                         {grad_outputs[0], grad_outputs[1],
                                          of_states.defined() ? of_states.view(saved[9].sizes()) : of_states},
                                         reverse);
        if (inputs[6].defined()) gradients[6] = gradients[5].clone();  // oneDNN returns one tensor for both
        for (size_t i = 0; i < inputs.size(); ++i) {
          const bool needed = inputs[i].defined() && inputs[i].requires_grad();
          gradients[i] =
              needed ? gradients[i].view(inputs[i].sizes()).to(inputs[i].scalar_type()) : at::Tensor();
        }
      }
      gradients.resize(8);
      return gradients;
    }

    // x is {input, h0, c0, weight_ih, weight_hh, bias, bias_hh, ...}.
    static Direction direction(at::TensorList x, bool reverse) {
      return {.h0 = x[1],
              .states = x[2],
              .weight_ih = x[3],
              .weight_hh = x[4],
              .bias = x[5],
              .bias_hh = x[6],
              .reverse = reverse};
    }
  };
};

}  // namespace lltm_ext
