// lltm, one step: its autograd and autocast.
#include <optional>
#include <tuple>

#include "common/differentiable.h"
#include "common/function.h"
#include "common/library.h"
#include "common/optional_tensor.h"

namespace lltm_ext {
namespace {

using torch::autograd::variable_list;

constexpr const char* kCell = "lltm_ext::lltm_cell";

// Returns (new_h, new_cell).
std::tuple<at::Tensor, at::Tensor> call_cell(const at::Tensor& input, const at::Tensor& weights,
                                             const OptionalTensor& bias, const at::Tensor& old_h,
                                             const at::Tensor& old_cell) {
  return call_op<call_cell>(kCell, input, weights, bias, old_h, old_cell);
}

struct CellFunction : Function<CellFunction> {
  // The signatures of lltm_cell_forward and lltm_cell_backward.
  using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                                 const OptionalTensor&, const at::Tensor&,
                                                                 const at::Tensor&);
  using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
      const OptionalTensor&, const OptionalTensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
      const at::Tensor&, const at::Tensor&, bool, bool, bool);

  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                               const at::Tensor& weights, const OptionalTensor& bias, const at::Tensor& old_h,
                               const at::Tensor& old_cell) {
    static const auto op = find_op<Forward>("lltm_ext::lltm_cell_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [new_h, new_cell, gates] = op.call(input, weights, bias, old_h, old_cell);
    ctx->save_for_backward({input, weights, bias.value_or(at::Tensor()), old_h, old_cell, new_cell, gates});
    ctx->set_materialize_grads(false);
    return {new_h, new_cell};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
    if (!any_defined(grad_outputs)) return variable_list(5);
    const variable_list saved = ctx->get_saved_variables();
    if (at::GradMode::is_enabled()) {
      return differentiable_gradients(composed, variable_list(saved.begin(), saved.begin() + 5),
                                      grad_outputs);
    }
    static const auto op = find_op<Backward>("lltm_ext::lltm_cell_backward");
    const at::Tensor &input = saved[0], &weights = saved[1], &bias = saved[2], &old_h = saved[3];
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell] =
        op.call(if_defined(grad_outputs[0]), if_defined(grad_outputs[1]), /*new_cell=*/saved[5],
                /*gates=*/saved[6], input, weights, old_h, input.requires_grad(), old_h.requires_grad(),
                /*old_cell=*/saved[4].requires_grad());
    if (!bias.defined()) grad_bias.reset();
    if (bias.defined() && bias.dim() == 2) grad_bias = grad_bias.unsqueeze(0);
    return {grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell};
  }

  // Runs the cell in torch's ops, which Python implements.
  static variable_list composed(const variable_list& inputs) {
    static const auto op = find_composed<decltype(call_cell)>(kCell);
    const auto [new_h, new_cell] = op.call(inputs[0], inputs[1], if_defined(inputs[2]), inputs[3], inputs[4]);
    return {new_h, new_cell};
  }
};

std::tuple<at::Tensor, at::Tensor> cell_autograd(const at::Tensor& input, const at::Tensor& weights,
                                                 const OptionalTensor& bias, const at::Tensor& old_h,
                                                 const at::Tensor& old_cell) {
  if (any_needs_grad(input, weights, bias, old_h, old_cell)) {
    const variable_list outputs = CellFunction::apply(input, weights, bias, old_h, old_cell);
    return {outputs[0], outputs[1]};
  }
  return call_below_autograd<call_cell>(kCell, input, weights, bias, old_h, old_cell);
}

std::tuple<at::Tensor, at::Tensor> cell_autocast(const at::Tensor& input, const at::Tensor& weights,
                                                 const OptionalTensor& bias, const at::Tensor& old_h,
                                                 const at::Tensor& old_cell) {
  const AutocastInputs cast(input);
  return call_cell(cast(input), cast(weights), cast(bias), cast(old_h), cast.cell(old_cell));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  implement_autograd(m, "lltm_cell", cell_autograd);
  implement_autocast(m, "lltm_cell", cell_autocast);
}

}  // namespace lltm_ext
