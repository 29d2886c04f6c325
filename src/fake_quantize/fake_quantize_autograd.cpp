// fake_quantize: its autograd.
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "common/library.h"

namespace lltm_ext {
namespace {

using at::Tensor;
using Axis = std::optional<int64_t>;
using torch::autograd::AutogradContext, torch::autograd::Function, torch::autograd::variable_list;

// The mask's backward is linear in grad_output, so it is also its own double backward.
struct MaskBackwardNode : Function<MaskBackwardNode> {
  static constexpr const char* kOp = "lltm_ext::fake_quantize_mask_backward";

  static Tensor kernel(const Tensor& grad_output, const Tensor& mask, c10::SymIntArrayRef strides) {
    if (any_needs_grad(grad_output) && mask.defined()) return apply(grad_output, mask, strides);
    return call_below_autograd<kernel>(kOp, grad_output, mask, strides);
  }

  static Tensor forward(AutogradContext* context, const Tensor& grad_output, const Tensor& mask,
                        c10::SymIntArrayRef strides) {
    save(context, mask, strides);
    return call_below_autograd<kernel>(kOp, grad_output, mask, strides);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    return {apply_saved(context, grad_outputs[0]), Tensor(), Tensor()};
  }

  static void save(AutogradContext* context, const Tensor& mask, c10::SymIntArrayRef strides) {
    context->save_for_backward({mask});
    context->saved_data["strides"] = strides;
  }
  static Tensor apply_saved(AutogradContext* context, const Tensor& grad_output) {
    const std::vector<c10::SymInt> strides = context->saved_data["strides"].toSymIntVector();
    return call_op<kernel>(kOp, grad_output, context->get_saved_variables()[0], c10::SymIntArrayRef(strides));
  }
};

// Runs if only the input requires a gradient. It saves one bit per element.
struct MaskNode : Function<MaskNode> {
  static constexpr const char* kOp = "lltm_ext::fake_quantize_with_mask";

  static std::tuple<Tensor, Tensor> kernel(const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                                           int64_t quant_min, int64_t quant_max, Axis axis) {
    if (!any_needs_grad(input) || !scale.defined() || !zero_point.defined()) {
      return call_below_autograd<kernel>(kOp, input, scale, zero_point, quant_min, quant_max, axis);
    }
    TORCH_CHECK(
        !any_needs_grad(scale, zero_point),
        "fake_quantize_with_mask: there is no gradient for scale and zero_point, but one requires it");
    const variable_list outputs = apply(input, scale, zero_point, quant_min, quant_max, axis);
    return {outputs[0], outputs[1]};
  }

  static variable_list forward(AutogradContext* context, const Tensor& input, const Tensor& scale,
                               const Tensor& zero_point, int64_t quant_min, int64_t quant_max, Axis axis) {
    auto [output, mask] =
        call_below_autograd<kernel>(kOp, input, scale, zero_point, quant_min, quant_max, axis);
    context->set_materialize_grads(false);
    context->mark_non_differentiable({mask});
    MaskBackwardNode::save(context, mask, output.sym_strides());
    return {output, mask};
  }
  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    variable_list gradients(6);
    if (grad_outputs[0].defined()) gradients[0] = MaskBackwardNode::apply_saved(context, grad_outputs[0]);
    return gradients;
  }
};

// Runs if a scale or zero point requires a gradient.
struct LearnableNode : Function<LearnableNode> {
  static constexpr const char *kOp = "lltm_ext::fake_quantize",
                              *kBackward = "lltm_ext::fake_quantize_backward";
  using Gradients = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                       const Tensor&, int64_t, int64_t, Axis, double);

  static Tensor kernel(const Tensor& input, const Tensor& scale, const Tensor& zero_point, int64_t quant_min,
                       int64_t quant_max, Axis axis, double grad_factor) {
    if (any_needs_grad(scale, zero_point) && input.defined()) {
      return apply(input, scale, zero_point, quant_min, quant_max, axis, grad_factor);
    }
    if (any_needs_grad(input) && scale.defined() && zero_point.defined()) {
      return std::get<0>(
          call_op<MaskNode::kernel>(MaskNode::kOp, input, scale, zero_point, quant_min, quant_max, axis));
    }
    return call_below_autograd<kernel>(kOp, input, scale, zero_point, quant_min, quant_max, axis,
                                       grad_factor);
  }

  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& scale,
                        const Tensor& zero_point, int64_t quant_min, int64_t quant_max, Axis axis,
                        double grad_factor) {
    context->save_for_backward({input, scale, zero_point});
    context->saved_data["how"] = std::tuple(quant_min, quant_max, axis, grad_factor);
    return call_below_autograd<kernel>(kOp, input, scale, zero_point, quant_min, quant_max, axis,
                                       grad_factor);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const variable_list saved = context->get_saved_variables();
    const auto [quant_min, quant_max, axis, grad_factor] =
        context->saved_data["how"].to<std::tuple<int64_t, int64_t, Axis, double>>();
    static const auto first = find_op<Gradients>(kBackward);
    const auto op = at::GradMode::is_enabled() ? find_composed<Gradients>(kBackward) : first;
    const auto [of_input, of_scale, of_zero_point] =
        op.call(grad_outputs[0], saved[0], saved[1], saved[2], quant_min, quant_max, axis, grad_factor);
    return {of_input, of_scale, of_zero_point, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  implement_autograd(m, "fake_quantize", LearnableNode::kernel);
  implement_autograd(m, "fake_quantize_with_mask", MaskNode::kernel);
  implement_autograd(m, "fake_quantize_mask_backward", MaskBackwardNode::kernel);
}

}  // namespace lltm_ext
