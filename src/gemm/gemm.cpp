// gemm: tensors in, tensors out. Dispatcher ops lltm_ext::gemm and gemm_activation_backward, raw bindings
// lltm_ext._C.gemm.gemm, forward and backward.
#include "gemm/gemm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/transpose.h>
#include <ATen/ops/where.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <string>
#include <string_view>

#include "common/checks.h"
#include "common/elementwise.h"
#include "common/library.h"

namespace lltm_ext {
namespace {

using std::string_view;
using OptionalTensor = std::optional<at::Tensor>;
using OptionalName = std::optional<string_view>;

// ---- What is asked for, by name.

Activation activation_of(const char* op, OptionalName name) {
  if (!name) return Activation::kNone;
  if (*name == "relu") return Activation::kRelu;
  if (*name == "sigmoid") return Activation::kSigmoid;
  if (*name == "tanh") return Activation::kTanh;
  if (*name == "elu") return Activation::kElu;
  TORCH_CHECK_VALUE(false, op, ": expected activation None, 'relu', 'sigmoid', 'tanh' or 'elu', got '", *name,
                    "'");
}

void check_precision(const char* op, string_view name) {
  TORCH_CHECK_VALUE(name == "ieee", op, ": expected precision 'ieee', got '", name, "'");
}

// ---- Shapes. 3-D operands are batches of matrices.

void check_operands(const char* op, const at::Tensor& a, const at::Tensor& b) {
  check_device(op, "a", a);
  check_floating(op, "a", a);
  TORCH_CHECK(a.dim() == 2 || a.dim() == 3, op, ": expected a of shape [M, K] or [B, M, K], got ",
              a.sym_sizes());
  CHECK_SAME(op, b, a);
  if (a.dim() == 2) {
    const c10::SymInt k = a.sym_size(1);
    TORCH_CHECK(b.dim() == 2 && b.sym_size(0) == k, op, ": expected b of shape [K, N] = [", k, ", *], got ",
                b.sym_sizes());
  } else {
    const c10::SymInt batch = a.sym_size(0), k = a.sym_size(2);
    TORCH_CHECK(b.dim() == 3 && b.sym_size(0) == batch && b.sym_size(1) == k, op,
                ": expected b of shape [B, K, N] = [", batch, ", ", k, ", *], got ", b.sym_sizes());
  }
}

c10::SymDimVector output_sizes(const at::Tensor& a, const at::Tensor& b) {
  const auto sizes = a.sym_sizes();
  c10::SymDimVector result(sizes.begin(), sizes.end());
  result.back() = b.sym_size(-1);
  return result;
}

template <typename T>
Matrices<T> matrices(const at::Tensor& x) {
  return {pointer<T>(x), x.dim() == 3 ? x.stride(0) : 0, x.stride(-2), x.stride(-1)};
}

// c = activation(a @ b + bias), all checked; c is contiguous.
void run(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, Activation activation,
         const at::Tensor& c) {
  if (c.is_meta() || c.numel() == 0) return;
  launch("gemm", a, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    GemmArgs<T> args;
    args.a = matrices<T>(a);
    args.b = matrices<T>(b);
    args.bias = pointer<T>(bias);
    args.bias_stride = bias.defined() ? bias.stride(0) : 0;
    args.c = mutable_pointer<T>(c);
    args.batch = a.dim() == 3 ? a.size(0) : 1;
    args.m = a.size(-2);
    args.n = b.size(-1);
    args.k = a.size(-1);
    args.activation = activation;
    return gemm(args, stream...);
  });
}

// ---- The implementations.

at::Tensor forward(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                   OptionalName activation, string_view precision) {
  check_operands("gemm", a, b);
  const at::Tensor bias_or_none = bias.value_or(at::Tensor());
  if (bias_or_none.defined()) {
    check_same_device("gemm", "bias", bias_or_none, a);
    check_same_dtype("gemm", "bias", bias_or_none, a.scalar_type());
    check_shape("gemm", "bias", bias_or_none, {b.sym_size(-1)}, "[N]");
  }
  const Activation f = activation_of("gemm", activation);
  check_precision("gemm", precision);
  const KernelGuard guard(a);
  at::Tensor c = at::empty_symint(output_sizes(a, b), a.options());
  run(a, b, bias_or_none, f, c);
  return c;
}

at::Tensor activation_backward(const at::Tensor& grad_output, const at::Tensor& output,
                               string_view activation) {
  check_gradient("gemm_activation_backward", grad_output, output);
  const Activation f = activation_of("gemm_activation_backward", activation);
  const KernelGuard guard(output);
  const at::Tensor y = dense(output);
  return elementwise(
      "gemm_activation_backward", [f](auto... args) { return gemm_activation_backward(f, args...); },
      with_strides_of(y, grad_output), y);
}

at::Tensor call_forward(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                        OptionalName activation, string_view precision) {
  static const auto op = find_op<decltype(forward)>("lltm_ext::gemm");
  return op.call(a, b, bias, activation, precision);
}

at::Tensor call_activation_backward(const at::Tensor& grad_output, const at::Tensor& output,
                                    string_view activation) {
  static const auto op = find_op<decltype(activation_backward)>("lltm_ext::gemm_activation_backward");
  return op.call(grad_output, output, activation);
}

// ---- Autograd. All that backward calls is differentiable itself, so there is no second formula for the
// double backward. Transposes are strides.

struct GemmNode : torch::autograd::Function<GemmNode> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& a, const at::Tensor& b,
                            const OptionalTensor& bias, OptionalName activation, string_view precision) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor output = call_forward(a, b, bias, activation, precision);
    ctx->save_for_backward({b.requires_grad() ? a : at::Tensor(), a.requires_grad() ? b : at::Tensor(),
                            activation ? output : at::Tensor()});
    ctx->saved_data["activation"] = std::string(activation.value_or(""));
    ctx->saved_data["precision"] = std::string(precision);
    ctx->saved_data["bias"] = bias.has_value() && bias->defined();
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &a = saved[0], &b = saved[1], &output = saved[2];
    const std::string activation = ctx->saved_data["activation"].toStringRef();
    const std::string precision = ctx->saved_data["precision"].toStringRef();
    const at::Tensor grad =
        output.defined() ? call_activation_backward(grad_outputs[0], output, activation) : grad_outputs[0];
    at::Tensor grad_a, grad_b, grad_bias;
    if (ctx->needs_input_grad(0)) grad_a = call_forward(grad, b.transpose(-2, -1), {}, {}, precision);
    if (ctx->needs_input_grad(1)) grad_b = call_forward(a.transpose(-2, -1), grad, {}, {}, precision);
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)) {
      const std::array<int64_t, 2> rows = {0, 1};
      grad_bias = grad.sum(at::IntArrayRef(rows.data(), grad.dim() - 1));  // of half types in float32
    }
    return {grad_a, grad_b, grad_bias, at::Tensor(), at::Tensor()};
  }
};

at::Tensor forward_autograd(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                            OptionalName activation, string_view precision) {
  if (any_needs_grad(a, b, bias)) return GemmNode::apply(a, b, bias, activation, precision);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_forward(a, b, bias, activation, precision);
}

// The double backward: the same formulas, in torch's own differentiable ops.
at::Tensor activation_backward_autograd(const at::Tensor& grad_output, const at::Tensor& output,
                                        string_view activation) {
  if (any_needs_grad(grad_output, output)) {
    check_gradient("gemm_activation_backward", grad_output, output);
    switch (activation_of("gemm_activation_backward", activation)) {
      case Activation::kRelu:
        return at::where(output <= 0, 0, grad_output);
      case Activation::kSigmoid:
        return grad_output * (output * (1 - output));
      case Activation::kTanh:
        return grad_output * (1 - output * output);
      case Activation::kElu:
        return grad_output * at::where(output > 0, 1, output + 1);
      case Activation::kNone:
        return grad_output;
    }
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_activation_backward(grad_output, output, activation);
}

// As torch.mm's: the operands go to the autocast dtype.
at::Tensor forward_autocast(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                            OptionalName activation, string_view precision) {
  const AutocastInputs cast(a);
  return call_forward(cast(a), cast(b), cast(bias), activation, precision);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  // bias is not keyword-only here, because torch.library.register_vmap takes no keyword-only tensors.
  m.def(
      "gemm(Tensor a, Tensor b, Tensor? bias=None, *, str? activation=None, str precision=\"ieee\") -> "
      "Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("gemm_activation_backward(Tensor grad_output, Tensor output, str activation) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  implement(m, "gemm", forward);
  implement(m, "gemm_activation_backward", activation_backward);
  implement_autograd(m, "gemm", forward_autograd);
  implement_autograd(m, "gemm_activation_backward", activation_backward_autograd);
  implement_autocast(m, "gemm", forward_autocast);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("gemm",
        torch::wrap_pybind_function_no_gil([](const at::Tensor& c, const at::Tensor& a, const at::Tensor& b) {
          CHECK_INPUT("gemm.gemm", a);
          CHECK_INPUT("gemm.gemm", b);
          CHECK_INPUT("gemm.gemm", c);
          check_operands("gemm.gemm", a, b);
          CHECK_SAME("gemm.gemm", c, a);
          check_shape("gemm.gemm", "c", c, output_sizes(a, b), a.dim() == 3 ? "[B, M, N]" : "[M, N]");
          const KernelGuard guard(a);
          run(a, b, at::Tensor(), Activation::kNone, c);
          // Autograd, which may have saved c, learns that it has changed.
          if (!c.is_inference()) c.unsafeGetTensorImpl()->bump_version();
        }),
        py::arg("c"), py::arg("a"), py::arg("b"));
  m.def("forward", torch::wrap_pybind_function_no_gil([](const at::Tensor& a, const at::Tensor& b) {
          CHECK_INPUT("gemm.forward", a);
          CHECK_INPUT("gemm.forward", b);
          return forward(a, b, {}, {}, "ieee");
        }),
        py::arg("a"), py::arg("b"));
  m.def("backward",
        torch::wrap_pybind_function_no_gil(
            [](const at::Tensor& grad_c, const at::Tensor& a, const at::Tensor& b) {
              CHECK_INPUT("gemm.backward", grad_c);
              CHECK_INPUT("gemm.backward", a);
              CHECK_INPUT("gemm.backward", b);
              check_operands("gemm.backward", a, b);
              CHECK_SAME("gemm.backward", grad_c, a);
              check_shape("gemm.backward", "grad_c", grad_c, output_sizes(a, b),
                          a.dim() == 3 ? "[B, M, N]" : "[M, N]");
              const KernelGuard guard(a);
              return std::vector<at::Tensor>{forward(grad_c, b.transpose(-2, -1), {}, {}, "ieee"),
                                             forward(a.transpose(-2, -1), grad_c, {}, {}, "ieee")};
            }),
        py::arg("grad_c"), py::arg("a"), py::arg("b"));
}

}  // namespace lltm_ext
