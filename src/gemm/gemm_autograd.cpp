// gemm: its autograd and autocast.
#include <ATen/TensorOperators.h>
#include <ATen/ops/transpose.h>

#include <string>
#include <tuple>

#include "common/function.h"
#include "common/library.h"
#include "gemm/gemm_checks.h"

namespace lltm_ext {
namespace {

constexpr const char* kForward = "lltm_ext::gemm";
constexpr const char* kActivationBackward = "lltm_ext::gemm_activation_backward";
constexpr const char* kActivationBiasBackward = "lltm_ext::gemm_activation_bias_backward";

at::Tensor call_forward(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                        OptionalName activation, string_view precision) {
  return call_op<call_forward>(kForward, a, b, bias, activation, precision);
}

// ---- The backward of the activation

at::Tensor differentiable_activation_backward(const at::Tensor& grad_output, const at::Tensor& saved,
                                              string_view activation) {
  if (any_needs_grad(grad_output, saved)) {
    check_gradient("gemm_activation_backward", grad_output, saved);
    activation_of("gemm_activation_backward", activation);
    static const auto composed =
        find_composed<decltype(differentiable_activation_backward)>(kActivationBackward);
    return composed.call(grad_output, saved, activation);
  }
  return call_below_autograd<differentiable_activation_backward>(kActivationBackward, grad_output, saved,
                                                                 activation);
}

std::tuple<at::Tensor, at::Tensor> differentiable_activation_bias_backward(const at::Tensor& grad_output,
                                                                           const at::Tensor& saved,
                                                                           string_view activation) {
  if (any_needs_grad(grad_output, saved)) {
    check_rows(saved);
    const at::Tensor grad_input = differentiable_activation_backward(grad_output, saved, activation);
    return {grad_input, sum_of_rows(grad_input)};
  }
  return call_below_autograd<differentiable_activation_bias_backward>(kActivationBiasBackward, grad_output,
                                                                      saved, activation);
}

// ---- The product
//
// Backward calls differentiable ops only, so there is no second formula for the double backward. Transposes
// are strides.

at::Tensor with_dim(const at::Tensor& x, int64_t dim) {
  return x.dim() == dim ? x : dim == 2 ? x.squeeze(0) : x.unsqueeze(0);
}

// x @ y, the gradient of an operand of `dim` dimensions. of_batch: if one matrix served a whole batch, x and
// y are batches, and its gradient is the sum over them, computed as one product.
at::Tensor gradient_of(bool of_batch, int64_t dim, const at::Tensor& x, const at::Tensor& y,
                       string_view precision) {
  if (!of_batch) return with_dim(call_forward(x, y, {}, {}, precision), dim);
  const at::Tensor side_by_side = x.transpose(0, 1).flatten(1), stacked = y.flatten(0, 1);
  return with_dim(call_forward(side_by_side, stacked, {}, {}, precision), dim);
}

// {c}, or {c, a @ b + bias} for activations whose backward needs the latter. It is an output of the node, so
// that the double backward differentiates through it.
struct GemmNode : Function<GemmNode> {
  using variable_list = torch::autograd::variable_list;
  using Both = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                                  OptionalName, string_view);
  // activation, precision, whether there is a bias; of a and b whether each is a batch, and its dimensions
  using How = std::tuple<std::string, std::string, bool, bool, int64_t, bool, int64_t>;

  static at::Tensor kernel(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                           OptionalName activation, string_view precision) {
    if (any_needs_grad(a, b, bias)) return apply(a, b, bias, activation, precision)[0];
    return call_below_autograd<kernel>(kForward, a, b, bias, activation, precision);
  }

  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& a,
                               const at::Tensor& b, const OptionalTensor& bias, OptionalName activation,
                               string_view precision) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list outputs;
    if (saves_output(activation_of("gemm", activation))) {
      outputs = {call_forward(a, b, bias, activation, precision)};
    } else {
      static const auto op = find_op<Both>("lltm_ext::gemm_forward");
      auto [c, pre_activation] = op.call(a, b, bias, activation, precision);
      outputs = {c, pre_activation};
    }
    ctx->save_for_backward({b.requires_grad() ? a : at::Tensor(), a.requires_grad() ? b : at::Tensor(),
                            activation ? outputs.back() : at::Tensor()});
    ctx->saved_data["how"] = How(activation.value_or(""), precision, bias && bias->defined(), is_batch(a),
                                 a.dim(), is_batch(b), b.dim());
    ctx->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto [activation, precision, has_bias, a_is_batch, a_dim, b_is_batch, b_dim] =
        ctx->saved_data["how"].to<How>();
    const bool wants_bias = has_bias && ctx->needs_input_grad(2);
    const at::Tensor grad_pre_activation = grad_outputs.size() > 1 ? grad_outputs[1] : at::Tensor();
    at::Tensor grad = grad_outputs[0], grad_bias;
    if (grad.defined() && saved[2].defined()) {
      if (wants_bias && !grad_pre_activation.defined()) {
        std::tie(grad, grad_bias) = call_op<differentiable_activation_bias_backward>(
            kActivationBiasBackward, grad, saved[2], string_view(activation));
      } else {
        grad = call_op<differentiable_activation_backward>(kActivationBackward, grad, saved[2],
                                                           string_view(activation));
      }
    }
    if (grad_pre_activation.defined())
      grad = grad.defined() ? grad + grad_pre_activation : grad_pre_activation;
    variable_list gradients(5);
    if (!grad.defined()) return gradients;
    if (ctx->needs_input_grad(0)) {
      const bool of_batch = is_batch(grad) && !a_is_batch;
      gradients[0] = gradient_of(of_batch, a_dim, grad, saved[1].transpose(-2, -1), precision);
    }
    if (ctx->needs_input_grad(1)) {
      const bool of_batch = is_batch(grad) && !b_is_batch;
      gradients[1] = gradient_of(of_batch, b_dim, saved[0].transpose(-2, -1), grad, precision);
    }
    if (wants_bias) gradients[2] = grad_bias.defined() ? grad_bias : sum_of_rows(grad);
    return gradients;
  }
};

void forward_out_autograd(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                          OptionalName activation, string_view precision, at::Tensor out) {
  TORCH_CHECK(!any_needs_grad(a, b, bias, out),
              "gemm: with out= there is no gradient, but an argument requires it");
  call_below_autograd<forward_out_autograd>("lltm_ext::gemm_out", a, b, bias, activation, precision, out);
  // Tells autograd, which may have saved `out`, that it has changed.
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

// For tensors whose memory holds the negative or the conjugate.
void forward_out_lazy(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                      OptionalName activation, string_view precision, at::Tensor out) {
  const at::Tensor c = call_forward(a, b, bias, activation, precision);
  CHECK_SAME("gemm", out, c);
  check_result("gemm", "out", out, a, b);
  check_writable("gemm", "out", out);
  check_no_overlap("gemm", "out", out);
  out.copy_(c);
}

// As torch.mm: operands are cast to the autocast dtype.
at::Tensor forward_autocast(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                            OptionalName activation, string_view precision) {
  const AutocastInputs cast(a);
  return call_forward(cast(a), cast(b), cast(bias), activation, precision);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  implement_autograd(m, "gemm", GemmNode::kernel);
  implement_autograd(m, "gemm_out", forward_out_autograd);
  implement_lazy(m, "gemm_out", forward_out_lazy);
  implement_autograd(m, "gemm_activation_backward", differentiable_activation_backward);
  implement_autograd(m, "gemm_activation_bias_backward", differentiable_activation_bias_backward);
  implement_autocast(m, "gemm", forward_autocast);
}

}  // namespace lltm_ext
