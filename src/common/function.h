// torch::autograd::Function for ops that save their outputs.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

namespace lltm_ext {

// A saved-tensor hook may throw: torch.utils.checkpoint ends a recomputation this way. torch then leaves what
// `forward` saved in the node. A saved output holds the node in turn, and neither is ever freed. (Python has
// the same problem: pytorch/pytorch#161186.) Here the node lets go of it.
template <typename Op>
struct Function {
  using Context = torch::autograd::AutogradContext;
  using Variables = torch::autograd::variable_list;

  template <typename... Args>
  static auto apply(Args&&... args) {
    at::Tensor output;  // keeps the node alive until it is empty
    try {
      return Recorded::apply(&output, std::forward<Args>(args)...);
    } catch (...) {
      using Node = torch::autograd::CppNode<Recorded>;
      const auto grad_fn = output.defined() ? output.grad_fn() : nullptr;
      if (auto* const node = dynamic_cast<Node*>(grad_fn.get())) node->ctx_.save_for_backward({});
      throw;
    }
  }

 private:
  struct Recorded : torch::autograd::Function<Recorded> {
    template <typename... Args>
    static auto forward(Context* context, at::Tensor* output, Args&&... args) {
      auto outputs = Op::forward(context, std::forward<Args>(args)...);
      *output = first(outputs);
      return outputs;
    }
    static Variables backward(Context* context, const Variables& grad_outputs) {
      Variables gradients = Op::backward(context, grad_outputs);
      gradients.insert(gradients.begin(), at::Tensor());  // `output` has none
      return gradients;
    }
  };

  static const at::Tensor& first(const at::Tensor& output) { return output; }
  static const at::Tensor& first(const Variables& outputs) { return outputs.at(0); }
};

}  // namespace lltm_ext
