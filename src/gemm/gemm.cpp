// gemm: tensors in, tensors out. The dispatcher ops lltm_ext::gemm* and the raw bindings lltm_ext._C.gemm.
#include "gemm/gemm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/erf.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/transpose.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "common/checks.h"
#include "common/elementwise.h"
#include "common/function.h"
#include "common/library.h"
#ifndef LLTM_EXT_STABLE_ABI
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/silu.h>

#include "common/onednn.h"
#endif
#include "common/python.h"
#include "common/vec.cuh"

#ifdef LLTM_EXT_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

namespace lltm_ext {
namespace {

using std::string_view;
using OptionalTensor = std::optional<at::Tensor>;
using OptionalName = std::optional<string_view>;

// ---- Options by name.

Activation activation_of(const char* op, OptionalName name) {
  if (!name) return Activation::kNone;
  for (const auto& [known, activation] : kActivations) {
    if (*name == known) return activation;
  }
  TORCH_CHECK_VALUE(false, op, ": expected activation None or one of ", kActivationNames, "got '", *name,
                    "'");
}

constexpr std::pair<string_view, Precision> kPrecisions[] = {
    {"ieee", Precision::kIeee},
    {"bf16x6", Precision::kBf16x6},
    {"bf16x9", Precision::kBf16x9},
    {"tf32", Precision::kTf32},
};

Precision precision_of(const char* op, string_view name) {
  for (const auto& [known, precision] : kPrecisions) {
    if (name == known) return precision;
  }
  TORCH_CHECK_VALUE(false, op, ": expected precision 'ieee', 'bf16x6', 'bf16x9' or 'tf32', got '", name, "'");
}

struct Options {
  Activation activation;
  Precision precision;
};

// ---- Shapes. 3-D operands are batches of matrices. A single matrix, or a batch of one, is multiplied by
// each matrix of the other's batch.

bool is_batch(const at::Tensor& x) { return x.dim() == 3 && x.sym_size(0) != 1; }

void check_operands(const char* op, const at::Tensor& a, const at::Tensor& b) {
  check_device(op, "a", a);
  check_floating(op, "a", a);
  TORCH_CHECK(a.dim() == 2 || a.dim() == 3, op, ": expected a of shape [M, K] or [B, M, K], got ",
              a.sym_sizes());
  CHECK_SAME(op, b, a);
  const c10::SymInt k = a.sym_size(-1);
  TORCH_CHECK((b.dim() == 2 || b.dim() == 3) && b.sym_size(-2) == k, op,
              ": expected b of shape [K, N] or [B, K, N] with K = ", k, ", got ", b.sym_sizes());
  if (is_batch(a) && is_batch(b)) {
    TORCH_CHECK(b.sym_size(0) == a.sym_size(0), op, ": expected b of shape [B, K, N] = [", a.sym_size(0),
                ", ", k, ", *], got ", b.sym_sizes());
  }
}

c10::SymDimVector output_sizes(const at::Tensor& a, const at::Tensor& b) {
  c10::SymDimVector sizes = {a.sym_size(-2), b.sym_size(-1)};
  if (a.dim() == 3 || b.dim() == 3) {
    sizes.insert(sizes.begin(), is_batch(a) ? a.sym_size(0) : is_batch(b) ? b.sym_size(0) : c10::SymInt(1));
  }
  return sizes;
}

// c: a tensor of the shape of a @ b.
void check_result(const char* op, const char* name, const at::Tensor& c, const at::Tensor& a,
                  const at::Tensor& b) {
  const c10::SymDimVector sizes = output_sizes(a, b);
  check_shape(op, name, c, sizes, sizes.size() == 3 ? "[B, M, N]" : "[M, N]");
}

void check_bias(const char* op, const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b) {
  if (!bias.defined()) return;
  check_same_device(op, "bias", bias, a);
  check_same_dtype(op, "bias", bias, a.scalar_type());
  check_shape(op, "bias", bias, {b.sym_size(-1)}, "[N]");
}

template <typename T>
Matrices<T> matrices(const at::Tensor& x) {
  return {pointer<T>(x), is_batch(x) ? x.stride(0) : 0, x.stride(-2), x.stride(-1)};
}

// The rows of a batch as those of one matrix, if the strides allow it.
at::Tensor as_one_matrix(const at::Tensor& x) {
  const bool mergeable = x.dim() == 3 && (x.size(0) == 1 || x.stride(0) == x.size(1) * x.stride(1));
  return mergeable ? x.as_strided({x.size(0) * x.size(1), x.size(2)}, {x.stride(1), x.stride(2)}) : x;
}

// c = activation(a @ b + bias), for checked arguments and a contiguous c. pre_activation, if defined, gets a
// @ b + bias.
void run(at::Tensor a, at::Tensor b, const at::Tensor& bias, const Options& options, const at::Tensor& c,
         const at::Tensor& pre_activation = {}) {
  if (c.is_meta() || c.numel() == 0) return;
  if (!is_batch(b)) a = as_one_matrix(a);
  launch("gemm", a, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    GemmArgs<T> args;
    args.a = matrices<T>(a);
    args.b = matrices<T>(b);
    args.bias = pointer<T>(bias);
    args.bias_stride = bias.defined() ? bias.stride(0) : 0;
    args.c = mutable_pointer<T>(c);
    args.pre_activation = mutable_pointer<T>(pre_activation);
    args.batch = is_batch(a) ? a.size(0) : is_batch(b) ? b.size(0) : 1;
    args.m = a.size(-2);
    args.n = b.size(-1);
    args.k = a.size(-1);
    args.activation = options.activation;
    args.precision = options.precision;
    args.workspace = nullptr;
    at::Tensor workspace;
#ifdef LLTM_EXT_WITH_CUDA
    if constexpr (sizeof...(stream) > 0) {
      if (const int64_t bytes = gemm_workspace_bytes(args); bytes > 0) {
        workspace = at::empty({bytes}, a.options().dtype(at::kByte));
        args.workspace = workspace.mutable_data_ptr();
      }
    }
#endif
    return gemm(args, stream...);
  });
}

#ifndef LLTM_EXT_STABLE_ABI
// ---- Half types on the CPU by oneDNN, where it has instructions for them: several times the rate of
// gemm_cpu.cpp, which computes in float32. A bias and an activation are fused for weights stored as [N, K]
// only: for others oneDNN takes a reference implementation in float16, 1,000 times as slow on CPUs with AMX.

constexpr int64_t kLeastProducts = 1 << 20;  // multiply-adds; below, a call of torch takes longer

struct OneDnnActivation {
  Activation activation;
  const char *name, *algorithm;
};
constexpr OneDnnActivation kOneDnnActivations[] = {
    {Activation::kNone, "none", ""},         {Activation::kRelu, "none", ""},  // its relu makes 0 of NaN
    {Activation::kTanh, "tanh", ""},         {Activation::kSigmoid, "sigmoid", ""},
    {Activation::kSilu, "swish", ""},        {Activation::kGelu, "gelu", "none"},
    {Activation::kGeluTanh, "gelu", "tanh"},
};

bool is_finite(const at::Tensor& x) { return std::isfinite(x.sum(at::kFloat).item<float>()); }

// oneDNN's sigmoid in float16 makes a number of NaN on CPUs with AMX.
bool onednn_may_lose_nan(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                         Activation activation) {
  return activation == Activation::kSigmoid && a.scalar_type() == at::kHalf &&
         !(is_finite(a) && is_finite(b) && (!bias || is_finite(*bias)));
}

// Whether some value is NaN, or some are infinities of both signs. One pass.
bool may_have_nan(const at::Tensor& x) { return std::isnan(x.sum().item<double>()); }

// Of a @ b + bias, rounded. torch's gelu makes NaN of infinity, as oneDNN's does.
at::Tensor gelu_of(const at::Tensor& x) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor y = at::gelu(x, "none");
  return may_have_nan(y) ? y.masked_fill(x == kInfinity, kInfinity) : y;
}

// activation(a @ b + bias) if oneDNN takes it, else undefined.
at::Tensor onednn_gemm(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                       Activation activation) {
  if (!a.is_cpu() || b.dim() != 2 || !onednn_multiplies(a.scalar_type())) return {};
  if (!at::globalContext().userEnabledMkldnn() || a.numel() * b.size(1) < kLeastProducts) return {};
  if (onednn_may_lose_nan(a, b, bias, activation)) return {};
  if (!bias && activation == Activation::kNone) return at::matmul(a, b);
  if (!bias && activation == Activation::kRelu) return at::matmul(a, b).relu_();
  const at::Tensor stored_along_k = b.t().contiguous().t();
  for (const OneDnnActivation& known : kOneDnnActivations) {
    if (activation != known.activation) continue;
    const at::Tensor c = onednn_linear(a, stored_along_k, bias, known.name, known.algorithm);
    if (activation == Activation::kRelu) return c.relu_();
    return activation == Activation::kGelu && may_have_nan(c)
               ? gelu_of(onednn_linear(a, stored_along_k, bias))
               : c;
  }
  return {};
}

// In torch's ops, of the rounded a @ b + bias. Undefined for the activations whose backward reads the output.
at::Tensor apply(Activation activation, const at::Tensor& pre_activation) {
  if (activation == Activation::kGelu) return gelu_of(pre_activation);
  if (activation == Activation::kGeluTanh) return at::gelu(pre_activation, "tanh");
  return activation == Activation::kSilu ? at::silu(pre_activation) : at::Tensor();
}
#endif

// ---- The implementations.

// Checks the arguments of all implementations.
Options check(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, OptionalName activation,
              string_view precision) {
  check_operands("gemm", a, b);
  check_bias("gemm", bias, a, b);
  return {activation_of("gemm", activation), precision_of("gemm", precision)};
}

at::Tensor forward(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& optional_bias,
                   OptionalName activation, string_view precision) {
  const at::Tensor bias = optional_bias.value_or(at::Tensor());
  const Options options = check(a, b, bias, activation, precision);
  const KernelGuard guard(a);
#ifndef LLTM_EXT_STABLE_ABI
  if (at::Tensor c = onednn_gemm(a, b, optional_bias, options.activation); c.defined()) return c;
#endif
  at::Tensor c = at::empty_symint(output_sizes(a, b), a.options());
  run(a, b, bias, options, c);
  return c;
}

// (c, a @ b + bias), for the activations whose backward needs the latter.
std::tuple<at::Tensor, at::Tensor> forward_with_pre_activation(const at::Tensor& a, const at::Tensor& b,
                                                               const OptionalTensor& optional_bias,
                                                               OptionalName activation,
                                                               string_view precision) {
  const at::Tensor bias = optional_bias.value_or(at::Tensor());
  const Options options = check(a, b, bias, activation, precision);
  const KernelGuard guard(a);
#ifndef LLTM_EXT_STABLE_ABI
  if (const at::Tensor sums = onednn_gemm(a, b, optional_bias, Activation::kNone); sums.defined()) {
    if (const at::Tensor c = apply(options.activation, sums); c.defined()) return {c, sums};
  }
#endif
  at::Tensor c = at::empty_symint(output_sizes(a, b), a.options());
  at::Tensor pre_activation = at::empty_like(c);
  run(a, b, bias, options, c, pre_activation);
  return {c, pre_activation};
}

void forward_out(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& optional_bias,
                 OptionalName activation, string_view precision, at::Tensor out) {
  const at::Tensor bias = optional_bias.value_or(at::Tensor());
  const Options options = check(a, b, bias, activation, precision);
  CHECK_SAME("gemm", out, a);
  check_result("gemm", "out", out, a, b);
  check_writable("gemm", "out", out);
  check_no_overlap("gemm", "out", out);
  const KernelGuard guard(a);
#ifndef LLTM_EXT_STABLE_ABI
  if (const at::Tensor c = onednn_gemm(a, b, optional_bias, options.activation); c.defined()) {
    out.copy_(c);
    return;
  }
#endif
  const bool overlaps = out.is_alias_of(a) || out.is_alias_of(b) || (bias.defined() && out.is_alias_of(bias));
  if (out.is_contiguous() && !overlaps) {
    run(a, b, bias, options, out);
  } else {
    const at::Tensor c = at::empty_symint(output_sizes(a, b), a.options());
    run(a, b, bias, options, c);
    out.copy_(c);
  }
}

at::Tensor activation_backward(const at::Tensor& grad_output, const at::Tensor& saved,
                               string_view activation) {
  check_gradient("gemm_activation_backward", grad_output, saved);
  const Activation f = activation_of("gemm_activation_backward", activation);
  const KernelGuard guard(saved);
  at::Tensor grad_input = at::empty_like(saved);
  elementwise<GemmActivationBackward, 2>("gemm_activation_backward", grad_input, {grad_output, saved}, f);
  return grad_input;
}

at::Tensor sum_of_rows(const at::Tensor& x) {  // half types are summed in float32
  at::DimVector rows(x.dim() - 1);
  std::iota(rows.begin(), rows.end(), 0);
  return x.sum(rows);
}

void check_rows(const at::Tensor& saved) {
  TORCH_CHECK(saved.dim() >= 2, "gemm_activation_bias_backward: expected saved of shape [..., M, N], got ",
              saved.sym_sizes());
}

#ifdef LLTM_EXT_WITH_CUDA
// One pass over contiguous tensors.
at::Tensor run_bias_backward(const at::Tensor& grad_output, const at::Tensor& saved, Activation activation,
                             const at::Tensor& grad_input) {
  const at::Tensor grad_bias = at::empty({saved.size(-1)}, saved.options());
  launch("gemm_activation_bias_backward", saved, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof...(stream) > 0) {
      BiasBackwardArgs<T> args = {pointer<T>(grad_output),
                                  pointer<T>(saved),
                                  mutable_pointer<T>(grad_input),
                                  mutable_pointer<T>(grad_bias),
                                  saved.numel() / saved.size(-1),
                                  saved.size(-1),
                                  activation,
                                  nullptr};
      const at::Tensor workspace =
          at::empty({gemm_bias_backward_workspace_bytes(args)}, saved.options().dtype(at::kByte));
      args.workspace = workspace.mutable_data_ptr();
      return gemm_bias_backward(args, stream...);
    }
  });
  return grad_bias;
}
#endif

// (the result of activation_backward, the sum of its rows)
std::tuple<at::Tensor, at::Tensor> activation_bias_backward(const at::Tensor& grad_output,
                                                            const at::Tensor& saved, string_view activation) {
  const char* const op = "gemm_activation_bias_backward";
  check_gradient(op, grad_output, saved);
  check_rows(saved);
  const Activation f = activation_of(op, activation);
  const KernelGuard guard(saved);
  at::Tensor grad_input = at::empty_like(saved);
  if (saved.is_meta()) return {grad_input, at::empty_symint({saved.sym_size(-1)}, saved.options())};
#ifdef LLTM_EXT_WITH_CUDA
  if (saved.is_cuda() && saved.numel() > 0 && saved.is_contiguous() && grad_output.is_contiguous()) {
    return {grad_input, run_bias_backward(grad_output, saved, f, grad_input)};
  }
#endif
  elementwise<GemmActivationBackward, 2>(op, grad_input, {grad_output, saved}, f);
  return {grad_input, sum_of_rows(grad_input)};
}

#ifndef LLTM_EXT_STABLE_ABI
at::Tensor call_forward(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                        OptionalName activation, string_view precision) {
  static const auto op = find_op<decltype(forward)>("lltm_ext::gemm");
  return op.call(a, b, bias, activation, precision);
}

std::tuple<at::Tensor, at::Tensor> call_forward_with_pre_activation(const at::Tensor& a, const at::Tensor& b,
                                                                    const OptionalTensor& bias,
                                                                    OptionalName activation,
                                                                    string_view precision) {
  static const auto op = find_op<decltype(forward_with_pre_activation)>("lltm_ext::gemm_forward");
  return op.call(a, b, bias, activation, precision);
}

at::Tensor call_activation_backward(const at::Tensor& grad_output, const at::Tensor& saved,
                                    string_view activation) {
  static const auto op = find_op<decltype(activation_backward)>("lltm_ext::gemm_activation_backward");
  return op.call(grad_output, saved, activation);
}

std::tuple<at::Tensor, at::Tensor> call_activation_bias_backward(const at::Tensor& grad_output,
                                                                 const at::Tensor& saved,
                                                                 string_view activation) {
  static const auto op =
      find_op<decltype(activation_bias_backward)>("lltm_ext::gemm_activation_bias_backward");
  return op.call(grad_output, saved, activation);
}

// An activation's derivative in torch's differentiable ops, from `saved` (see saves_output). Not relu's: see
// activation_backward_autograd.
at::Tensor composed_derivative(Activation activation, const at::Tensor& saved) {
  switch (activation) {
    case Activation::kSigmoid:
      return saved * (1 - saved);
    case Activation::kTanh:
      return 1 - saved * saved;
    case Activation::kElu:
      return at::where(saved > 0, at::ones_like(saved), saved + 1);
    case Activation::kGelu: {
      const at::Tensor density = at::exp(-0.5 * saved * saved) * (0.5 * M_2_SQRTPI * M_SQRT1_2);
      return 0.5 * (1 + at::erf(saved * M_SQRT1_2)) + saved * density;
    }
    case Activation::kGeluTanh: {
      constexpr double kScale = M_2_SQRTPI * M_SQRT1_2;  // sqrt(2 / pi)
      const at::Tensor t = at::tanh(kScale * (saved + 0.044715 * saved * saved * saved));
      return 0.5 * (1 + t + saved * (1 - t * t) * kScale * (1 + 3 * 0.044715 * saved * saved));
    }
    case Activation::kSilu: {
      const at::Tensor y = at::sigmoid(saved);
      return y * (1 + saved * (1 - y));
    }
    case Activation::kRelu:
    case Activation::kNone:
      break;
  }
  return at::ones_like(saved);
}

// ---- Autograd. Backward calls differentiable ops only, so there is no second formula for the double
// backward. Transposes are strides.

// What backward needs to know of an operand that it does not save.
struct OperandShape {
  bool is_batch;
  int64_t dim;
};

at::Tensor with_dim(const at::Tensor& x, int64_t dim) {
  return x.dim() == dim ? x : dim == 2 ? x.squeeze(0) : x.unsqueeze(0);
}

// grad @ b^T. If one a served a whole batch, its gradient is the sum over the batch, computed as one product.
at::Tensor gradient_of_a(const OperandShape& a, const at::Tensor& b, const at::Tensor& grad,
                         string_view precision) {
  if (a.is_batch || !is_batch(grad)) {
    return with_dim(call_forward(grad, b.transpose(-2, -1), {}, {}, precision), a.dim);
  }
  const at::Tensor side_by_side = grad.transpose(0, 1).flatten(1);  // [M, B * N]
  const at::Tensor stacked = b.transpose(-2, -1).flatten(0, 1);     // [B * N, K]
  return with_dim(call_forward(side_by_side, stacked, {}, {}, precision), a.dim);
}

// a^T @ grad, in the same way.
at::Tensor gradient_of_b(const at::Tensor& a, const OperandShape& b, const at::Tensor& grad,
                         string_view precision) {
  if (b.is_batch || !is_batch(grad)) {
    return with_dim(call_forward(a.transpose(-2, -1), grad, {}, {}, precision), b.dim);
  }
  const at::Tensor stacked = grad.flatten(0, 1);  // [B * M, N]
  // Here b is one matrix and grad a batch, so a is a batch.
  return with_dim(call_forward(a.flatten(0, 1).t(), stacked, {}, {}, precision), b.dim);
}

// {c}, or {c, a @ b + bias} for activations whose backward needs the latter. It is an output of the node, so
// that the double backward differentiates through it.
struct GemmNode : Function<GemmNode> {
  using variable_list = torch::autograd::variable_list;

  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& a,
                               const at::Tensor& b, const OptionalTensor& bias, OptionalName activation,
                               string_view precision) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list outputs;
    if (saves_output(activation_of("gemm", activation))) {
      outputs = {call_forward(a, b, bias, activation, precision)};
    } else {
      auto [c, pre_activation] = call_forward_with_pre_activation(a, b, bias, activation, precision);
      outputs = {c, pre_activation};
    }
    ctx->save_for_backward({b.requires_grad() ? a : at::Tensor(), a.requires_grad() ? b : at::Tensor(),
                            activation ? outputs.back() : at::Tensor()});
    ctx->saved_data["activation"] = std::string(activation.value_or(""));
    ctx->saved_data["precision"] = std::string(precision);
    ctx->saved_data["bias"] = bias.has_value() && bias->defined();
    ctx->saved_data["a"] = std::vector<int64_t>{is_batch(a), a.dim()};
    ctx->saved_data["b"] = std::vector<int64_t>{is_batch(b), b.dim()};
    ctx->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto shape = [&](const char* name) {
      const auto found = ctx->saved_data[name].toIntVector();
      return OperandShape{found[0] != 0, found[1]};
    };
    const std::string activation = ctx->saved_data["activation"].toStringRef();
    const std::string precision = ctx->saved_data["precision"].toStringRef();
    const bool wants_bias = ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2);
    const at::Tensor grad_pre_activation = grad_outputs.size() > 1 ? grad_outputs[1] : at::Tensor();
    at::Tensor grad = grad_outputs[0], grad_bias;
    if (grad.defined() && saved[2].defined()) {
      if (wants_bias && !grad_pre_activation.defined()) {
        std::tie(grad, grad_bias) = call_activation_bias_backward(grad, saved[2], activation);
      } else {
        grad = call_activation_backward(grad, saved[2], activation);
      }
    }
    if (grad_pre_activation.defined())
      grad = grad.defined() ? grad + grad_pre_activation : grad_pre_activation;
    variable_list gradients(5);
    if (!grad.defined()) return gradients;
    if (ctx->needs_input_grad(0)) gradients[0] = gradient_of_a(shape("a"), saved[1], grad, precision);
    if (ctx->needs_input_grad(1)) gradients[1] = gradient_of_b(saved[0], shape("b"), grad, precision);
    if (wants_bias) gradients[2] = grad_bias.defined() ? grad_bias : sum_of_rows(grad);
    return gradients;
  }
};

at::Tensor forward_autograd(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                            OptionalName activation, string_view precision) {
  if (any_needs_grad(a, b, bias)) return GemmNode::apply(a, b, bias, activation, precision)[0];
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_forward(a, b, bias, activation, precision);
}

void forward_out_autograd(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                          OptionalName activation, string_view precision, at::Tensor out) {
  TORCH_CHECK(!any_needs_grad(a, b, bias, out),
              "gemm: with out= there is no gradient, but an argument requires it");
  static const auto op = find_op<decltype(forward_out)>("lltm_ext::gemm_out");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.call(a, b, bias, activation, precision, out);
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

// The double backward: the same formulas, in torch's own differentiable ops.
at::Tensor activation_backward_autograd(const at::Tensor& grad_output, const at::Tensor& saved,
                                        string_view activation) {
  if (any_needs_grad(grad_output, saved)) {
    check_gradient("gemm_activation_backward", grad_output, saved);
    const Activation f = activation_of("gemm_activation_backward", activation);
    if (f == Activation::kRelu)
      return grad_output.masked_fill(saved <= 0, 0);  // even of an infinite gradient
    return grad_output * composed_derivative(f, saved);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_activation_backward(grad_output, saved, activation);
}

std::tuple<at::Tensor, at::Tensor> activation_bias_backward_autograd(const at::Tensor& grad_output,
                                                                     const at::Tensor& saved,
                                                                     string_view activation) {
  if (any_needs_grad(grad_output, saved)) {
    check_rows(saved);
    const at::Tensor grad_input = activation_backward_autograd(grad_output, saved, activation);
    return {grad_input, sum_of_rows(grad_input)};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_activation_bias_backward(grad_output, saved, activation);
}

// As torch.mm: operands are cast to the autocast dtype.
at::Tensor forward_autocast(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                            OptionalName activation, string_view precision) {
  const AutocastInputs cast(a);
  return call_forward(cast(a), cast(b), cast(bias), activation, precision);
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  // bias is not keyword-only here, because torch.library.register_vmap takes no keyword-only tensors.
  m.def(
      "gemm(Tensor a, Tensor b, Tensor? bias=None, *, str? activation=None, str precision=\"ieee\") -> "
      "Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("gemm_out(Tensor a, Tensor b, Tensor? bias, str? activation, str precision, Tensor(a!) out) -> ()",
        {at::Tag::pt2_compliant_tag});
  m.def("gemm_forward(Tensor a, Tensor b, Tensor? bias, str? activation, str precision) -> (Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
  m.def("gemm_activation_backward(Tensor grad_output, Tensor saved, str activation) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("gemm_activation_bias_backward(Tensor grad_output, Tensor saved, str activation) -> (Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
  implement<forward>(m, "gemm");
  implement<forward_out>(m, "gemm_out");
  implement<forward_with_pre_activation>(m, "gemm_forward");
  implement<activation_backward>(m, "gemm_activation_backward");
  implement<activation_bias_backward>(m, "gemm_activation_bias_backward");
#ifndef LLTM_EXT_STABLE_ABI
  implement_autograd(m, "gemm", forward_autograd);
  implement_autograd(m, "gemm_out", forward_out_autograd);
  implement_lazy(m, "gemm_out", forward_out_lazy);
  implement_autograd(m, "gemm_activation_backward", activation_backward_autograd);
  implement_autograd(m, "gemm_activation_bias_backward", activation_bias_backward_autograd);
  implement_autocast(m, "gemm", forward_autocast);
#endif
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("gemm",
        torch::wrap_pybind_function_no_gil([](const at::Tensor& c, const at::Tensor& a, const at::Tensor& b) {
          CHECK_INPUT("gemm.gemm", a);
          CHECK_INPUT("gemm.gemm", b);
          CHECK_INPUT("gemm.gemm", c);
          check_operands("gemm.gemm", a, b);
          CHECK_SAME("gemm.gemm", c, a);
          check_result("gemm.gemm", "c", c, a, b);
          check_writable("gemm.gemm", "c", c);
          TORCH_CHECK(!c.is_alias_of(a) && !c.is_alias_of(b),
                      "gemm.gemm: expected c to share no memory with a or b");
          const KernelGuard guard(a);
          run(a, b, at::Tensor(), {Activation::kNone, Precision::kIeee}, c);
          // Tells autograd, which may have saved c, that it has changed.
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
              TORCH_CHECK(a.dim() == b.dim(), "gemm.backward: expected a and b of as many dimensions, got ",
                          a.dim(), " and ", b.dim());
              CHECK_SAME("gemm.backward", grad_c, a);
              check_result("gemm.backward", "grad_c", grad_c, a, b);
              const KernelGuard guard(a);
              return std::vector<at::Tensor>{forward(grad_c, b.transpose(-2, -1), {}, {}, "ieee"),
                                             forward(a.transpose(-2, -1), grad_c, {}, {}, "ieee")};
            }),
        py::arg("grad_c"), py::arg("a"), py::arg("b"));
}
#endif

}  // namespace lltm_ext
