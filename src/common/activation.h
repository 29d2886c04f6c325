// An elementwise op whose gradient follows from its output, made whole from what tells it from the others:
// dispatcher ops <name> and <name>_backward with autograd, raw bindings forward and backward. The op gives
//   kName, kBackwardName, kRawForward, kRawBackward: its names in the dispatcher and in error messages;
//   forward(args...), backward(args...): its launchers, as elementwise.h calls them;
//   gradient(grad_output, output): its gradient in torch's differentiable ops, for the double backward.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "common/checks.h"
#include "common/elementwise.h"
#include "common/library.h"

namespace lltm_ext {

template <typename Op>
struct ActivationOps {
  static at::Tensor forward(const at::Tensor& input) {
    check_device(Op::kName, "input", input);
    check_floating(Op::kName, "input", input);
    const KernelGuard guard(input);
    return elementwise(Op::kName, [](auto... args) { return Op::forward(args...); }, dense(input));
  }

  static at::Tensor backward(const at::Tensor& grad_output, const at::Tensor& output) {
    check_gradient(Op::kBackwardName, grad_output, output);
    const KernelGuard guard(output);
    const at::Tensor y = dense(output);
    return elementwise(
        Op::kBackwardName, [](auto... args) { return Op::backward(args...); },
        with_strides_of(y, grad_output), y);
  }

  static at::Tensor call_forward(const at::Tensor& input) {
    static const auto op = find_op<decltype(forward)>(("lltm_ext::" + std::string(Op::kName)).c_str());
    return op.call(input);
  }

  static at::Tensor call_backward(const at::Tensor& grad_output, const at::Tensor& output) {
    static const auto op =
        find_op<decltype(backward)>(("lltm_ext::" + std::string(Op::kBackwardName)).c_str());
    return op.call(grad_output, output);
  }

  struct Node : torch::autograd::Function<Node> {
    static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      at::Tensor output = call_forward(input);
      ctx->save_for_backward({output});
      return output;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                   const torch::autograd::variable_list& grad_outputs) {
      return {call_backward(grad_outputs[0], ctx->get_saved_variables()[0])};
    }
  };

  static at::Tensor forward_autograd(const at::Tensor& input) {
    if (any_needs_grad(input)) return Node::apply(input);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_forward(input);
  }

  static at::Tensor backward_autograd(const at::Tensor& grad_output, const at::Tensor& output) {
    if (any_needs_grad(grad_output, output)) {
      check_gradient(Op::kBackwardName, grad_output, output);
      return Op::gradient(grad_output, output);
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_backward(grad_output, output);
  }

  static void define(torch::Library& m) {
    const std::string name = Op::kName, backward_name = Op::kBackwardName;
    m.def((name + "(Tensor input) -> Tensor").c_str(), {at::Tag::pt2_compliant_tag});
    m.def((backward_name + "(Tensor grad_output, Tensor output) -> Tensor").c_str(),
          {at::Tag::pt2_compliant_tag});
    implement(m, Op::kName, forward);
    implement(m, Op::kBackwardName, backward);
    implement_autograd(m, Op::kName, forward_autograd);
    implement_autograd(m, Op::kBackwardName, backward_autograd);
  }

  static at::Tensor raw_forward(const at::Tensor& input) {
    CHECK_INPUT(Op::kRawForward, input);
    return forward(input);
  }

  static at::Tensor raw_backward(const at::Tensor& grad_output, const at::Tensor& output) {
    CHECK_INPUT(Op::kRawBackward, grad_output);
    CHECK_INPUT(Op::kRawBackward, output);
    return backward(grad_output, output);
  }

  static void bind(py::module_& m) {
    m.def("forward", torch::wrap_pybind_function_no_gil(raw_forward), py::arg("input"));
    m.def("backward", torch::wrap_pybind_function_no_gil(raw_backward), py::arg("grad_output"),
          py::arg("output"));
  }
};

}  // namespace lltm_ext
