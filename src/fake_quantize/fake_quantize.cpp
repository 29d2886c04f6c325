// fake_quantize: the binding. Dispatcher ops lltm_ext::fake_quantize, fake_quantize_with_mask,
// fake_quantize_mask_backward and fake_quantize_backward; raw bindings lltm_ext._C.fake_quantize.forward,
// backward and backward_learnable.
#include "fake_quantize/fake_quantize.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <tuple>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/library.h"
#include "common/python.h"

namespace lltm_ext {
namespace {

using at::Tensor;
using Axis = std::optional<int64_t>;
using OutputAndMask = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// ---- Checks

void check_parameter(const char* op, const char* name, const Tensor& x, const Tensor& input) {
  check_strided(op, name, x);
  // The host reads a number without synchronization, so it may be on the CPU in a call on CUDA tensors.
  const bool is_number = x.is_cpu() && x.dim() == 0;
  if (!is_number) check_same_device(op, name, x, input);
}

bool is_floating(at::ScalarType type) {  // `type` is one that a parameter may have
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

// Returns the input's channel dimension, or none if scale and zero point have one element.
Axis check_channels(const char* op, const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                    Axis axis) {
  const int64_t dim = input.dim();
  if (axis) {
    TORCH_CHECK_VALUE(-dim <= *axis && *axis < dim, op, ": expected axis from ", -dim, " to ", dim - 1,
                      " for input of ", dim, " dimensions, got ", *axis);
  }
  Axis channel_dim;
  for (const auto& [name, x] : {std::pair("scale", scale), std::pair("zero_point", zero_point)}) {
    if (x.sym_numel() == 1) continue;
    TORCH_CHECK(dim > 0, op, ": expected ", name, " of one element for input without dimensions, got shape ",
                x.sym_sizes());
    channel_dim = axis.value_or(0) < 0 ? *axis + dim : axis.value_or(0);
    check_shape(op, name, x, {input.sym_size(*channel_dim)}, "[input.shape[axis]]");
  }
  return channel_dim;
}

Axis check(const char* op, const Tensor& input, const Tensor& scale, const Tensor& zero_point,
           int64_t quant_min, int64_t quant_max, Axis axis) {
  check_device(op, "input", input);
  check_floating(op, "input", input);
  check_parameter(op, "scale", scale, input);
  if (scale.scalar_type() != at::kFloat) check_same_dtype(op, "scale", scale, input.scalar_type());
  check_parameter(op, "zero_point", zero_point, input);
  const at::ScalarType type = zero_point.scalar_type();
  TORCH_CHECK_TYPE(type == at::kInt || type == at::kLong || is_floating(type), op,
                   ": expected zero_point of dtype int32, int64 or floating, got ",
                   c10::getDtypeNames(type).first);
  TORCH_CHECK_VALUE(quant_min <= quant_max, op,
                    ": expected quant_min not above quant_max, got quant_min = ", quant_min,
                    ", quant_max = ", quant_max);
  // Computed as unsigned, because the signed difference may overflow.
  const uint64_t range = static_cast<uint64_t>(quant_max) - static_cast<uint64_t>(quant_min);
  TORCH_CHECK_VALUE(range < uint64_t{1} << 22, op,
                    ": expected fewer than 2^22 integers from quant_min to quant_max, got quant_min = ",
                    quant_min, ", quant_max = ", quant_max);
  return check_channels(op, input, scale, zero_point, axis);
}

// ---- From tensors to the kernels' arguments

Parameter make_parameter(Tensor& x, const Tensor& input) {
  if (x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16) x = x.to(at::kFloat);
  const ParameterType type = x.scalar_type() == at::kFloat    ? ParameterType::kFloat
                             : x.scalar_type() == at::kDouble ? ParameterType::kDouble
                             : x.scalar_type() == at::kInt    ? ParameterType::kInt
                                                              : ParameterType::kLong;
  if (x.is_cpu() && !input.is_cpu()) return {nullptr, 0, type, x.item<double>()};
  return {x.const_data_ptr(), x.numel() == 1 ? 0 : x.stride(0), type, 0};
}

// A scheme, and the tensors that own the memory it points to.
struct Scheme {
  Scheme(const Tensor& input, Tensor scale_, Tensor zero_point_, int64_t quant_min, int64_t quant_max)
      : scale(std::move(scale_)),
        zero_point(std::move(zero_point_)),
        arguments{make_parameter(scale, input), make_parameter(zero_point, input),
                  static_cast<double>(quant_min), static_cast<double>(quant_max)} {}
  Tensor scale, zero_point;
  QuantizationScheme arguments;
};

ChannelLayout layout_of(const Tensor& dense, Axis axis) {
  if (!axis || dense.size(*axis) == 1) return {1, 1, dense.numel()};
  const int64_t channels = dense.size(*axis), inner = dense.stride(*axis);
  return {dense.numel() / (channels * inner), channels, inner};
}

// Returns x in the memory order of `dense`, which has the same sizes.
Tensor in_order_of(const Tensor& dense, const Tensor& x) {
  return x.strides() == dense.strides() ? x : at::empty_like(dense).copy_(x);
}

bool has_nothing_to_compute(const Tensor& x) { return x.is_meta() || x.numel() == 0; }

at::ScalarType compute_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// ---- Forward

Tensor run_forward(const Tensor& input, const Tensor& scale, const Tensor& zero_point, int64_t quant_min,
                   int64_t quant_max, Axis axis, Tensor* mask) {
  constexpr const char* kOp = "fake_quantize";
  axis = check(kOp, input, scale, zero_point, quant_min, quant_max, axis);
  const KernelGuard guard(input);
  const Tensor output = at::empty_like(input);
  if (mask) *mask = at::empty_symint({(input.sym_numel() + 7) / 8}, input.options().dtype(at::kByte));
  if (has_nothing_to_compute(output)) return output;
  const Tensor x = in_order_of(output, input);
  const Scheme scheme(x, scale, zero_point, quant_min, quant_max);
  launch(kOp, output, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    const FakeQuantizeForwardArguments<T> args = {pointer<T>(x), mutable_pointer<T>(output),
                                                  mask ? mutable_pointer<unsigned char>(*mask) : nullptr,
                                                  layout_of(output, axis), scheme.arguments};
    return fake_quantize_forward(args, stream...);
  });
  return output;
}

Tensor forward(const Tensor& input, const Tensor& scale, const Tensor& zero_point, int64_t quant_min,
               int64_t quant_max, Axis axis, double) {
  return run_forward(input, scale, zero_point, quant_min, quant_max, axis, nullptr);
}

OutputAndMask forward_with_mask(const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                                int64_t quant_min, int64_t quant_max, Axis axis) {
  Tensor mask;
  const Tensor output = run_forward(input, scale, zero_point, quant_min, quant_max, axis, &mask);
  return {output, mask};
}

// ---- Backward

// Returns grad_output where the mask's bit is set, else 0. `strides` are those of the forward's output.
Tensor mask_backward(const Tensor& grad_output, const Tensor& mask, c10::SymIntArrayRef strides) {
  constexpr const char* kOp = "fake_quantize_mask_backward";
  check_device(kOp, "grad_output", grad_output);
  check_floating(kOp, "grad_output", grad_output);
  check_same_device(kOp, "mask", mask, grad_output);
  check_same_dtype(kOp, "mask", mask, at::kByte);
  check_strided(kOp, "mask", mask);  // not check_contiguous, which refuses fake tensors
  TORCH_CHECK(mask.is_contiguous(), kOp, ": expected mask to be contiguous, got strides ",
              mask.sym_strides());
  check_shape(kOp, "mask", mask, {(grad_output.sym_numel() + 7) / 8}, "[ceil(grad_output.numel() / 8)]");
  TORCH_CHECK(static_cast<int64_t>(strides.size()) == grad_output.dim(), kOp,
              ": expected a stride for each dimension of grad_output, got ", strides);
  const KernelGuard guard(grad_output);
  const Tensor grad_input = at::empty_strided_symint(grad_output.sym_sizes(), strides, grad_output.options());
  if (has_nothing_to_compute(grad_input)) return grad_input;
  TORCH_CHECK(grad_input.is_non_overlapping_and_dense(), kOp, ": expected strides of a dense tensor, got ",
              strides);
  const Tensor gradient = in_order_of(grad_input, grad_output);
  launch(kOp, grad_input, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    const FakeQuantizeMaskBackwardArguments<T> args = {pointer<T>(gradient), pointer<unsigned char>(mask),
                                                       mutable_pointer<T>(grad_input), grad_input.numel()};
    return fake_quantize_mask_backward(args, stream...);
  });
  return grad_input;
}

ReductionPlan plan_for(const Tensor& x, const ChannelLayout& layout) {
#ifdef LLTM_EXT_WITH_CUDA
  if (x.is_cuda()) return plan_reduction_cuda(layout);
#endif
  return plan_reduction(layout);
}

// Returns the channels' gradients in the parameter's shape, and in its dtype if that is floating.
Tensor gradient_for(const Tensor& parameter, const Tensor& per_channel) {
  const at::ScalarType type =
      is_floating(parameter.scalar_type()) ? parameter.scalar_type() : per_channel.scalar_type();
  if (per_channel.is_meta()) return at::empty_symint(parameter.sym_sizes(), parameter.options().dtype(type));
  const bool shared = parameter.numel() == 1 && per_channel.numel() != 1;  // true for no channels too
  return (shared ? per_channel.sum() : per_channel).to(parameter.device(), type).view(parameter.sizes());
}

Gradients backward(const Tensor& grad_output, const Tensor& input, const Tensor& scale,
                   const Tensor& zero_point, int64_t quant_min, int64_t quant_max, Axis axis,
                   double grad_factor) {
  constexpr const char* kOp = "fake_quantize_backward";
  axis = check(kOp, input, scale, zero_point, quant_min, quant_max, axis);
  check_same_device(kOp, "grad_output", grad_output, input);
  check_same_dtype(kOp, "grad_output", grad_output, input.scalar_type());
  check_shape(kOp, "grad_output", grad_output, input.sym_sizes(), "of input");
  const KernelGuard guard(input);
  const Tensor grad_input = at::empty_like(input);
  const auto options = input.options().dtype(compute_type(input));
  const c10::SymInt channels = axis ? input.sym_size(*axis) : c10::SymInt(1);
  const Tensor grad_scale = at::empty_symint({channels}, options),
               grad_zero_point = at::empty_like(grad_scale);
  if (has_nothing_to_compute(grad_input)) {
    grad_scale.zero_();
    grad_zero_point.zero_();
  } else {
    const Tensor x = in_order_of(grad_input, input), gradient = in_order_of(grad_input, grad_output);
    const Scheme scheme(x, scale, zero_point, quant_min, quant_max);
    const ChannelLayout layout = layout_of(grad_input, axis);
    const ReductionPlan plan = plan_for(x, layout);
    const Tensor partial_sums = at::empty({plan.outer * layout.channels * plan.inner, 2}, options);
    launch(kOp, grad_input, [&](auto type, auto... stream) {
      using T = typename decltype(type)::type;
      using A = acc_t<T>;
      const FakeQuantizeBackwardArguments<T> args = {pointer<T>(gradient),
                                                     pointer<T>(x),
                                                     mutable_pointer<T>(grad_input),
                                                     mutable_pointer<ParameterGradients<A>>(partial_sums),
                                                     mutable_pointer<A>(grad_scale),
                                                     mutable_pointer<A>(grad_zero_point),
                                                     layout,
                                                     plan,
                                                     scheme.arguments,
                                                     grad_factor};
      return fake_quantize_backward(args, stream...);
    });
  }
  return {grad_input, gradient_for(scale, grad_scale), gradient_for(zero_point, grad_zero_point)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "fake_quantize(Tensor input, Tensor scale, Tensor zero_point, int quant_min, int quant_max, "
      "int? axis=None, float grad_factor=1.0) -> Tensor",
      tags);
  m.def(
      "fake_quantize_with_mask(Tensor input, Tensor scale, Tensor zero_point, int quant_min, int quant_max, "
      "int? axis=None) -> (Tensor, Tensor)",
      tags);
  m.def("fake_quantize_mask_backward(Tensor grad_output, Tensor mask, SymInt[] strides) -> Tensor", tags);
  m.def(
      "fake_quantize_backward(Tensor grad_output, Tensor input, Tensor scale, Tensor zero_point, "
      "int quant_min, int quant_max, int? axis=None, float grad_factor=1.0) -> (Tensor, Tensor, Tensor)",
      tags);
  // It has no defaults: calls from Python would leave out arguments that are equal to them.
  m.def(
      "fake_quantize_backward_composed(Tensor grad_output, Tensor input, Tensor scale, Tensor zero_point, "
      "int quant_min, int quant_max, int? axis, float grad_factor) -> (Tensor, Tensor, Tensor)",
      tags);
  implement<forward>(m, "fake_quantize");
  implement<forward_with_mask>(m, "fake_quantize_with_mask");
  implement<mask_backward>(m, "fake_quantize_mask_backward");
  implement<backward>(m, "fake_quantize_backward");
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto axis = py::arg("axis") = py::none();
  m.def("forward",
        torch::wrap_pybind_function_no_gil([](const Tensor& input, const Tensor& scale,
                                              const Tensor& zero_point, int64_t quant_min, int64_t quant_max,
                                              Axis axis) {
          CHECK_INPUT("fake_quantize.forward", input);
          CHECK_PLAIN("fake_quantize.forward", scale);
          CHECK_PLAIN("fake_quantize.forward", zero_point);
          return forward_with_mask(input, scale, zero_point, quant_min, quant_max, axis);
        }),
        py::arg("input"), py::arg("scale"), py::arg("zero_point"), py::arg("quant_min"), py::arg("quant_max"),
        axis);
  m.def("backward", torch::wrap_pybind_function_no_gil([](const Tensor& grad_output, const Tensor& mask) {
          CHECK_INPUT("fake_quantize.backward", grad_output);
          CHECK_PLAIN("fake_quantize.backward", mask);
          return mask_backward(grad_output, mask, grad_output.sym_strides());
        }),
        py::arg("grad_output"), py::arg("mask"));
  m.def("backward_learnable",
        torch::wrap_pybind_function_no_gil(
            [](const Tensor& grad_output, const Tensor& input, const Tensor& scale, const Tensor& zero_point,
               int64_t quant_min, int64_t quant_max, Axis axis, double grad_factor) {
              CHECK_INPUT("fake_quantize.backward_learnable", grad_output);
              CHECK_INPUT("fake_quantize.backward_learnable", input);
              CHECK_PLAIN("fake_quantize.backward_learnable", scale);
              CHECK_PLAIN("fake_quantize.backward_learnable", zero_point);
              return backward(grad_output, input, scale, zero_point, quant_min, quant_max, axis, grad_factor);
            }),
        py::arg("grad_output"), py::arg("input"), py::arg("scale"), py::arg("zero_point"),
        py::arg("quant_min"), py::arg("quant_max"), axis, py::arg("grad_factor") = 1.0);
}
#endif

}  // namespace lltm_ext
