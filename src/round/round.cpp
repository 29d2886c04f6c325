// round and binarize: tensors in, tensors out. Dispatcher ops lltm_ext::round and lltm_ext::binarize, raw
// bindings lltm_ext._C.round.forward, backward and binarize.
#include "round/round.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "common/checks.h"
#include "common/elementwise.h"
#include "common/library.h"

namespace lltm_ext {
namespace {

at::Tensor forward(const at::Tensor& input) {
  check_device("round", "input", input);
  check_floating("round", "input", input);
  const KernelGuard guard(input);
  return elementwise("round_forward", [](auto... args) { return round_forward(args...); }, dense(input));
}

at::Tensor binarize(const at::Tensor& input, double threshold) {
  check_device("binarize", "input", input);
  check_floating("binarize", "input", input);
  const KernelGuard guard(input);
  return elementwise(
      "binarize_forward", [&](auto... args) { return binarize_forward(threshold, args...); }, dense(input));
}

at::Tensor call_forward(const at::Tensor& input) {
  static const auto op = find_op<decltype(forward)>("lltm_ext::round");
  return op.call(input);
}

at::Tensor call_binarize(const at::Tensor& input, double threshold) {
  static const auto op = find_op<decltype(binarize)>("lltm_ext::binarize");
  return op.call(input, threshold);
}

// Straight-through: saves nothing, launches nothing, hands the gradient on as it came.
struct RoundNode : torch::autograd::Function<RoundNode> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_forward(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grad_outputs) {
    return {grad_outputs[0]};
  }
};

struct BinarizeNode : torch::autograd::Function<BinarizeNode> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input, double threshold) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_binarize(input, threshold);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grad_outputs) {
    return {grad_outputs[0], at::Tensor()};
  }
};

at::Tensor forward_autograd(const at::Tensor& input) {
  if (any_needs_grad(input)) return RoundNode::apply(input);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_forward(input);
}

at::Tensor binarize_autograd(const at::Tensor& input, double threshold) {
  if (any_needs_grad(input)) return BinarizeNode::apply(input, threshold);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_binarize(input, threshold);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  m.def("round(Tensor input) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("binarize(Tensor input, float threshold=0.5) -> Tensor", {at::Tag::pt2_compliant_tag});
  implement(m, "round", forward);
  implement(m, "binarize", binarize);
  implement_autograd(m, "round", forward_autograd);
  implement_autograd(m, "binarize", binarize_autograd);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", torch::wrap_pybind_function_no_gil([](const at::Tensor& input) {
          CHECK_INPUT("round.forward", input);
          return forward(input);
        }),
        py::arg("input"));
  m.def("backward", torch::wrap_pybind_function_no_gil([](const at::Tensor& grad_output) {
          CHECK_INPUT("round.backward", grad_output);
          return grad_output;
        }),
        py::arg("grad_output"));
  m.def("binarize", torch::wrap_pybind_function_no_gil([](const at::Tensor& input, double threshold) {
          CHECK_INPUT("round.binarize", input);
          return binarize(input, threshold);
        }),
        py::arg("input"), py::arg("threshold") = 0.5);
}

}  // namespace lltm_ext
