// gemm: tensors in, tensors out. The dispatcher ops lltm_ext::gemm* and the raw bindings lltm_ext._C.gemm.
#include "gemm/gemm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <string>
#include <utility>

#include "common/checks.h"
#include "common/elementwise.h"
#include "common/library.h"
#include "common/matmul.h"
#include "common/python.h"
#include "common/vec.cuh"
#include "gemm/gemm_checks.h"
#include "gemm/gemm_onednn.h"

namespace lltm_ext {
namespace {

// ---- Arguments

constexpr std::pair<string_view, Precision> kPrecisions[] = {
    {"ieee", Precision::kIeee},
    {"bf16x6", Precision::kBf16x6},
    {"bf16x9", Precision::kIeee},  // no kernel multiplies all nine parts
    {"tf32", Precision::kTf32},
};

Precision precision_of(const char* op, string_view name) {
  for (const auto& [known, precision] : kPrecisions) {
    if (name == known) return precision;
  }
  TORCH_CHECK_VALUE(false, op, ": expected precision 'ieee', 'bf16x6', 'bf16x9' or 'tf32', got '", name, "'");
}

struct Options {
  at::Tensor bias;  // or undefined
  Activation activation;
  Precision precision;
};

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

// Checks the arguments of all implementations.
Options check(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias, OptionalName activation,
              string_view precision) {
  check_operands("gemm", a, b);
  if (bias && bias->defined()) {
    check_same_device("gemm", "bias", *bias, a);
    check_same_dtype("gemm", "bias", *bias, a.scalar_type());
    check_shape("gemm", "bias", *bias, {b.sym_size(-1)}, "[N]");
  }
  return {bias.value_or(at::Tensor()), activation_of("gemm", activation), precision_of("gemm", precision)};
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

// The arguments of the kernels, for checked arguments and a contiguous c.
template <typename T>
GemmArgs<T> arguments(const at::Tensor& a, const at::Tensor& b, const Options& options, const at::Tensor& c,
                      const at::Tensor& pre_activation) {
  GemmArgs<T> args = {};
  args.a = matrices<T>(a);
  args.b = matrices<T>(b);
  args.bias = pointer<T>(options.bias);
  args.bias_stride = options.bias.defined() ? options.bias.stride(0) : 0;
  args.c = mutable_pointer<T>(c);
  args.pre_activation = mutable_pointer<T>(pre_activation);
  args.batch = is_batch(a) ? a.size(0) : is_batch(b) ? b.size(0) : 1;
  args.m = a.size(-2);
  args.n = b.size(-1);
  args.k = a.size(-1);
  args.activation = options.activation;
  args.precision = options.precision;
  // The stride between the rows of one row, or the columns of one column, is never used. As a multiple of any
  // vector it does not keep kernels from loading vectors along K.
  constexpr int64_t kAny = 64;
  if (args.m == 1) args.a.row_stride = ceil_div(args.k * args.a.column_stride + 1, kAny) * kAny;
  if (args.n == 1) args.b.column_stride = ceil_div(args.k * args.b.row_stride + 1, kAny) * kAny;
  return args;
}

#ifdef LLTM_EXT_WITH_CUDA
// By the library, and an elementwise pass for the activation: cuBLASLt's relu would make 0 of NaN, and it
// lacks most of the others.
void run_library(const at::Tensor& a, const at::Tensor& b, const Options& options, const at::Tensor& c,
                 const at::Tensor& pre_activation) {
  const at::Tensor sums = pre_activation.defined() ? pre_activation : c;
  const bool tf32 = options.precision == Precision::kTf32 && a.scalar_type() == at::kFloat;
  if (is_batch(a) || is_batch(b)) {
    library_product(sums, a, b, options.bias, tf32);
  } else {
    library_product(sums.view({a.size(-2), b.size(-1)}), a, as_one_matrix(b), options.bias, tf32);
  }
  if (pre_activation.defined() || options.activation != Activation::kNone) {
    elementwise<GemmActivation, 1>("gemm", c, {sums}, options.activation);
  }
}
#endif

// c = activation(a @ b + bias), for checked arguments and a contiguous c. pre_activation, if defined, gets a
// @ b + bias. Returns which kernel computes it; without a c this is all.
Kernel run(at::Tensor a, at::Tensor b, const Options& options, const at::Tensor& c,
           const at::Tensor& pre_activation = {}) {
  Choice choice = {Kernel::kCpu};
  if (a.is_meta() || (c.defined() && c.numel() == 0)) return choice.kernel;
  if (!is_batch(b)) a = as_one_matrix(a);
  launch("gemm", a, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    GemmArgs<T> args = arguments<T>(a, b, options, c, pre_activation);
#ifdef LLTM_EXT_WITH_CUDA
    if constexpr (sizeof...(stream) > 0) {
      const cudaError_t error = gemm_choice(args, choice);
      if (error != cudaSuccess || !c.defined() || choice.kernel == Kernel::kLibrary) return error;
      at::Tensor workspace;
      if (const int64_t bytes = gemm_workspace_bytes(args, choice); bytes > 0) {
        workspace = at::empty({bytes}, a.options().dtype(at::kByte));
        args.workspace = workspace.mutable_data_ptr();
      }
      return gemm(args, choice, stream...);
    }
#endif
    if constexpr (sizeof...(stream) == 0) {
      if (c.defined()) gemm(args);
    }
  });
#ifdef LLTM_EXT_WITH_CUDA
  if (c.defined() && choice.kernel == Kernel::kLibrary) run_library(a, b, options, c, pre_activation);
#endif
  return choice.kernel;
}

// ---- The implementations.

at::Tensor forward(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                   OptionalName activation, string_view precision) {
  const Options options = check(a, b, bias, activation, precision);
  const KernelGuard guard(a);
  if (at::Tensor c = onednn_gemm(a, b, bias, options.activation); c.defined()) return c;
  at::Tensor c = at::empty_symint(output_sizes(a, b), a.options());
  run(a, b, options, c);
  return c;
}

// (c, a @ b + bias), for the activations whose backward needs the latter.
std::tuple<at::Tensor, at::Tensor> forward_with_pre_activation(const at::Tensor& a, const at::Tensor& b,
                                                               const OptionalTensor& bias,
                                                               OptionalName activation,
                                                               string_view precision) {
  const Options options = check(a, b, bias, activation, precision);
  const KernelGuard guard(a);
  if (const at::Tensor sums = onednn_gemm(a, b, bias, Activation::kNone); sums.defined()) {
    if (const at::Tensor c = apply(options.activation, sums); c.defined()) return {c, sums};
  }
  at::Tensor c = at::empty_symint(output_sizes(a, b), a.options());
  at::Tensor pre_activation = at::empty_like(c);
  run(a, b, options, c, pre_activation);
  return {c, pre_activation};
}

void forward_out(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                 OptionalName activation, string_view precision, at::Tensor out) {
  const Options options = check(a, b, bias, activation, precision);
  CHECK_SAME("gemm", out, a);
  check_result("gemm", "out", out, a, b);
  check_writable("gemm", "out", out);
  check_no_overlap("gemm", "out", out);
  const KernelGuard guard(a);
  at::Tensor c = onednn_gemm(a, b, bias, options.activation);
  if (!c.defined()) {
    const bool overlaps =
        out.is_alias_of(a) || out.is_alias_of(b) || (options.bias.defined() && out.is_alias_of(options.bias));
    const bool in_place = out.is_contiguous() && !overlaps;
    c = in_place ? out : at::empty_symint(output_sizes(a, b), a.options());
    run(a, b, options, c);
    if (in_place) return;
  }
  out.copy_(c);
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

#ifdef LLTM_EXT_WITH_CUDA
// One pass over contiguous tensors.
at::Tensor run_bias_backward(const char* op, const at::Tensor& grad_output, const at::Tensor& saved,
                             Activation activation, const at::Tensor& grad_input) {
  const at::Tensor grad_bias = at::empty({saved.size(-1)}, saved.options());
  launch(op, saved, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof...(stream) > 0) {
      BiasBackwardArgs<T> args = {};
      args.grad_output = pointer<T>(grad_output), args.saved = pointer<T>(saved);
      args.grad_input = mutable_pointer<T>(grad_input), args.grad_bias = mutable_pointer<T>(grad_bias);
      args.rows = saved.numel() / saved.size(-1), args.columns = saved.size(-1);
      args.activation = activation;
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
    return {grad_input, run_bias_backward(op, grad_output, saved, f, grad_input)};
  }
#endif
  elementwise<GemmActivationBackward, 2>(op, grad_input, {grad_output, saved}, f);
  return {grad_input, sum_of_rows(grad_input)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  const auto define = [&](const std::string& op) { m.def(op.c_str(), {at::Tag::pt2_compliant_tag}); };
  // bias is not keyword-only here, because torch.library.register_vmap takes no keyword-only tensors.
  define(
      "gemm(Tensor a, Tensor b, Tensor? bias=None, *, str? activation=None, str precision=\"ieee\") -> "
      "Tensor");
  define("gemm_out(Tensor a, Tensor b, Tensor? bias, str? activation, str precision, Tensor(a!) out) -> ()");
  define(
      "gemm_forward(Tensor a, Tensor b, Tensor? bias, str? activation, str precision) -> (Tensor, Tensor)");
  const std::string of_activation = "(Tensor grad_output, Tensor saved, str activation) -> ";
  define("gemm_activation_backward" + of_activation + "Tensor");
  define("gemm_activation_backward_composed" + of_activation + "Tensor");
  define("gemm_activation_bias_backward" + of_activation + "(Tensor, Tensor)");
  implement<forward>(m, "gemm");
  implement<forward_out>(m, "gemm_out");
  implement<forward_with_pre_activation>(m, "gemm_forward");
  implement<activation_backward>(m, "gemm_activation_backward");
  implement<activation_bias_backward>(m, "gemm_activation_bias_backward");
}

#ifdef TORCH_EXTENSION_NAME
// Which kernel computes a product: for benchmarks and tests.
std::string kernel_of(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                      const std::optional<std::string>& activation, const std::string& precision) {
  const Options options = check(a, b, bias, activation ? OptionalName(*activation) : std::nullopt, precision);
  const KernelGuard guard(a);
  return kKernelNames[static_cast<int>(run(a, b, options, {}))];
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("kernel_of", torch::wrap_pybind_function_no_gil(kernel_of), py::arg("a"), py::arg("b"),
        py::arg("bias") = py::none(), py::arg("activation") = py::none(), py::arg("precision") = "ieee");
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
          run(a, b, {{}, Activation::kNone, Precision::kIeee}, c);
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
