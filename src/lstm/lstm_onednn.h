// A sequence of the LSTM on the CPU by oneDNN's layer, which torch.nn.LSTM takes there too: forward, and a
// Function with its backward. For few small steps those of tensors/forward.h are faster. In bfloat16, on a
// CPU that multiplies it, the cell state is float32: rounded at each step, a long memory would be lost.
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
#include "recurrence/tensors/inputs.h"

namespace lltm_ext {

struct OneDnnLstm {
  static constexpr int64_t kModeOfLstm = 2;  // of torch's RNN ops

  static bool takes(const at::Tensor& input, const Direction& d, at::OptionalIntArrayRef batch_sizes) {
    const bool is_traced = input.key_set().has(c10::DispatchKey::Python);  // a graph keeps our own op
    const at::ScalarType type = input.scalar_type();
    const bool has_type = type == at::kFloat || (type == at::kBFloat16 && onednn_multiplies(type));
    if (is_traced || !has_type || input.numel() == 0) return false;
    if (batch_sizes || d.reset.defined() || !at::globalContext().userEnabledMkldnn()) return false;
    const int64_t batch = input.size(1), hidden = d.weight_hh.size(1);
    return batch * hidden * hidden >= kLargeStep || input.size(0) * batch * hidden >= kLongSequence;
  }

  // A call of the layer takes some 30 us more of the host, a step of it less: on one core and on two the
  // steps take 0.5 to 1.1 of the layer's time below these limits, and 0.8 to 1.8 above.
  static constexpr int64_t kLargeStep = 1 << 14;     // batch * H^2
  static constexpr int64_t kLongSequence = 1 << 11;  // T * batch * H

  struct Inputs {
    at::Tensor input, h0, c0, weight_ih, weight_hh, bias, second_bias;

    Inputs(const at::Tensor& input, const Direction& d, const OptionalTensor& bias_hh)
        : input(input.contiguous()),
          h0(or_zeros(d.h0, input, d, input.scalar_type())),
          c0(or_zeros(d.states, input, d, at::kFloat)),
          weight_ih(d.weight_ih.contiguous()),
          weight_hh(d.weight_hh.contiguous()),
          bias(d.bias ? d.bias->contiguous() : at::zeros({weight_ih.size(0)}, weight_ih.options())),
          second_bias(bias_hh  ? bias_hh->contiguous()
                      : d.bias ? at::zeros_like(bias)
                               : bias) {}
    int64_t hidden() const { return h0.size(1); }

   private:
    static at::Tensor or_zeros(const at::Tensor& x, const at::Tensor& input, const Direction& d,
                               at::ScalarType type) {
      if (x.defined()) return x.to(type).contiguous();
      return at::zeros({input.size(1), d.weight_hh.size(1)}, input.options().dtype(type));
    }
  };

  // (output, h_n, c_n in float32, workspace)
  static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(const Inputs& x, bool reverse,
                                                                            bool train) {
    const at::AutoGradMode grad_mode(train);  // by which the op decides whether to return a workspace
    return at::mkldnn_rnn_layer(x.input, x.weight_ih, x.weight_hh, x.bias, x.second_bias, x.h0, x.c0, reverse,
                                /*batch_sizes=*/{}, kModeOfLstm, x.hidden(), /*num_layers=*/1,
                                /*has_biases=*/true, /*bidirectional=*/false, /*batch_first=*/false, train);
  }

  // Of input, h0, c0, weight_ih, weight_hh and both biases, all in float32.
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

  // Second derivatives are those of Composed::composed (SequenceOps::SequenceFunction).
  template <class Composed>
  struct Node : Function<Node<Composed>> {
    static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                                 const OptionalTensor& h0, const OptionalTensor& c0,
                                 const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                 const OptionalTensor& bias, const OptionalTensor& bias_hh, bool reverse) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const Direction d = {or_undefined(h0), or_undefined(c0), weight_ih, weight_hh, bias, reverse};
      auto [output, h_n, c_n, workspace] = OneDnnLstm::forward({input, d, bias_hh}, reverse, /*train=*/true);
      ctx->save_for_backward({input, d.h0, d.states, weight_ih, weight_hh, or_undefined(bias),
                              or_undefined(bias_hh), output, h_n, c_n, workspace});
      ctx->set_materialize_grads(false);
      ctx->saved_data["reverse"] = reverse;
      // What is saved must not change when a caller's does.
      return {output, h_n.clone(), c_n.to(states_type(input, d), /*non_blocking=*/false, /*copy=*/true)};
    }

    static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
      variable_list gradients(8);
      if (!any_defined(grad_outputs)) return gradients;
      const variable_list saved = ctx->get_saved_variables(), inputs(saved.begin(), saved.begin() + 7);
      const bool reverse = ctx->saved_data["reverse"].toBool();
      if (at::GradMode::is_enabled()) {
        gradients = differentiable_gradients(
            [&](variable_list x) -> variable_list {
              for (at::Tensor& each : x) each = in_float32(each);
              const variable_list y = Composed::composed(x, std::nullopt, reverse, at::Tensor());
              const at::ScalarType of_c = (saved[2].defined() ? saved[2] : saved[0]).scalar_type();
              return {y[0].to(saved[0].scalar_type()), y[1].to(saved[0].scalar_type()), y[2].to(of_c)};
            },
            inputs, grad_outputs);
      } else {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        const Direction d = {saved[1], saved[2], saved[3], saved[4], if_defined(saved[5]), reverse};
        gradients = OneDnnLstm::backward({saved[0], d, if_defined(saved[6])}, {saved[7], saved[8], saved[9]},
                                         saved[10], grad_outputs, reverse);
        if (inputs[6].defined()) gradients[6] = gradients[5].clone();  // oneDNN's are one tensor
        for (size_t i = 0; i < inputs.size(); ++i) {
          const bool needed = inputs[i].defined() && inputs[i].requires_grad();
          gradients[i] = needed ? gradients[i].to(inputs[i].scalar_type()) : at::Tensor();
        }
      }
      gradients.resize(8);
      return gradients;
    }
  };
};

}  // namespace lltm_ext
