// Double backward: autograd's gradients of the op composed of torch's ops.
#pragma once

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

namespace lltm_ext {

// Returns gradients that can be differentiated again: runs `composed` on the inputs under autograd.
template <typename F>
torch::autograd::variable_list differentiable_gradients(F&& composed,
                                                        const torch::autograd::variable_list& inputs,
                                                        const torch::autograd::variable_list& grad_outputs) {
  // Aliases, because a gradient with respect to an input must not include paths through other inputs.
  torch::autograd::variable_list aliases, wanted, outputs, grads;
  for (const at::Tensor& x : inputs) {
    aliases.push_back(x.defined() ? x.view_as(x) : x);
    if (x.defined() && x.requires_grad()) wanted.push_back(aliases.back());
  }
  const torch::autograd::variable_list all_outputs = composed(aliases);
  for (size_t i = 0; i < all_outputs.size(); ++i) {
    if (!grad_outputs[i].defined() || !all_outputs[i].requires_grad()) continue;
    outputs.push_back(all_outputs[i]);
    grads.push_back(grad_outputs[i]);
  }
  const auto found =
      torch::autograd::grad(outputs, wanted, grads, /*retain_graph=*/true, /*create_graph=*/true,
                            /*allow_unused=*/true);
  torch::autograd::variable_list gradients(inputs.size());
  for (size_t i = 0, next = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    gradients[i] = found[next].defined() ? found[next] : at::zeros_like(inputs[i]);
    ++next;
  }
  return gradients;
}

inline bool any_defined(const torch::autograd::variable_list& tensors) {
  for (const at::Tensor& x : tensors) {
    if (x.defined()) return true;
  }
  return false;
}

}  // namespace lltm_ext
