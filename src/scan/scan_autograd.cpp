// scan: its autograd.
#include <ATen/ExpandUtils.h>

#include <tuple>

#include "common/function.h"
#include "common/library.h"
#include "common/optional_tensor.h"

namespace lltm_ext {
namespace {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char *kScan = "lltm_ext::scan", *kScanBackward = "lltm_ext::scan_backward";

Gradients scan_backward_autograd(const Tensor& grad, const Tensor& a, const OptionalTensor& initial,
                                 const OptionalTensor& reset, const OptionalTensor& h, bool reverse,
                                 bool of_initial) {
  if (any_needs_grad(grad, a, initial, h)) {
    static const auto composed = find_composed<decltype(scan_backward_autograd)>(kScanBackward);
    return composed.call(grad, a, initial, reset, h, reverse, of_initial);
  }
  return call_below_autograd<scan_backward_autograd>(kScanBackward, grad, a, initial, reset, h, reverse,
                                                     of_initial);
}

struct ScanNode : Function<ScanNode> {
  using Context = torch::autograd::AutogradContext;
  using Variables = torch::autograd::variable_list;

  static Tensor kernel(const Tensor& a, const Tensor& b, const OptionalTensor& initial,
                       const OptionalTensor& reset, bool reverse) {
    if (any_needs_grad(a, b, initial)) return apply(a, b, initial, reset, reverse);
    return call_below_autograd<kernel>(kScan, a, b, initial, reset, reverse);
  }

  static Tensor forward(Context* context, const Tensor& a, const Tensor& b, const OptionalTensor& initial,
                        const OptionalTensor& reset, bool reverse) {
    const Tensor h = call_below_autograd<kernel>(kScan, a, b, initial, reset, reverse);
    context->save_for_backward(
        {a, or_undefined(initial), or_undefined(reset), a.requires_grad() ? h : Tensor()});
    context->saved_data["reverse"] = reverse;
    context->saved_data["sizes_of_b"] = b.sym_sizes();
    context->set_materialize_grads(false);
    return h;
  }

  static Variables backward(Context* context, const Variables& grad_outputs) {
    Variables gradients(5);
    if (!grad_outputs[0].defined()) return gradients;
    const Variables saved = context->get_saved_variables();
    const Tensor &a = saved[0], &initial = saved[1], h = context->needs_input_grad(0) ? saved[3] : Tensor();
    const std::vector<c10::SymInt> sizes_of_b = context->saved_data["sizes_of_b"].toSymIntVector();
    const bool of_initial = initial.defined() && context->needs_input_grad(2);
    const auto [of_a, of_b, of_first] = call_op<scan_backward_autograd>(
        kScanBackward, grad_outputs[0], a, if_defined(initial), if_defined(saved[2]), if_defined(h),
        context->saved_data["reverse"].toBool(), of_initial);
    if (h.defined()) gradients[0] = at::sum_to(of_a, a.sym_sizes());
    if (context->needs_input_grad(1)) gradients[1] = at::sum_to(of_b, c10::SymIntArrayRef(sizes_of_b));
    if (of_initial) gradients[2] = at::sum_to(of_first, initial.sym_sizes());
    return gradients;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  implement_autograd(m, "scan", ScanNode::kernel);
  implement_autograd(m, "scan_backward", scan_backward_autograd);
}

}  // namespace lltm_ext
