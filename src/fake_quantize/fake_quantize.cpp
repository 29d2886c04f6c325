// fake_quantize: tensors in, tensors out. Dispatcher ops lltm_ext::fake_quantize, fake_quantize_with_mask,
// fake_quantize_mask_backward and fake_quantize_backward; raw bindings lltm_ext._C.fake_quantize.forward,
// backward and backward_learnable.
#include "fake_quantize/fake_quantize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "common/checks.h"
#include "common/differentiable.h"
#include "common/dispatch.h"
#include "common/library.h"
#include "common/python.h"

namespace lltm_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Axis = std::optional<int64_t>;

// ---- Checks

// One that a call with CUDA tensors may take: its value is known to the host, without waiting.
bool is_number(const at::Tensor& x) { return x.is_cpu() && x.dim() == 0; }

void check_parameter(const char* op, const char* name, const at::Tensor& x, const at::Tensor& input) {
  check_strided(op, name, x);
  if (!is_number(x)) check_same_device(op, name, x, input);
}

void check_scale(const char* op, const at::Tensor& scale, const at::Tensor& input) {
  check_parameter(op, "scale", scale, input);
  if (scale.scalar_type() != at::kFloat) check_same_dtype(op, "scale", scale, input.scalar_type());
}

void check_zero_point(const char* op, const at::Tensor& zero_point, const at::Tensor& input) {
  check_parameter(op, "zero_point", zero_point, input);
  const at::ScalarType type = zero_point.scalar_type();
  if (type != at::kInt && type != at::kLong) {
    TORCH_CHECK_TYPE(at::isFloatingType(type) && c10::elementSize(type) > 1, op,
                     ": expected zero_point of dtype int32, int64 or floating, got ",
                     c10::getDtypeNames(type).first);
  }
}

// Which dimension of the input the channels are; none if one scale and zero point serve all of it.
Axis check_channels(const char* op, const at::Tensor& input, const at::Tensor& scale,
                    const at::Tensor& zero_point, Axis axis) {
  const int64_t dim = input.dim();
  if (axis) {
    TORCH_CHECK_VALUE(-dim <= *axis && *axis < dim, op, ": expected axis from ", -dim, " to ", dim - 1,
                      " for input of ", dim, " dimensions, got ", *axis);
  }
  Axis found;
  for (const at::Tensor& x : {scale, zero_point}) {
    if (x.sym_numel() == 1) continue;
    const char* const name = x.is_same(scale) ? "scale" : "zero_point";
    TORCH_CHECK(dim > 0, op, ": expected ", name, " of one element for input without dimensions, got shape ",
                x.sym_sizes());
    found = axis.value_or(0) < 0 ? *axis + dim : axis.value_or(0);
    check_shape(op, name, x, {input.sym_size(*found)}, "[input.shape[axis]]");
  }
  return found;
}

Axis check(const char* op, const at::Tensor& input, const at::Tensor& scale, const at::Tensor& zero_point,
           int64_t quant_min, int64_t quant_max, Axis axis) {
  check_device(op, "input", input);
  check_floating(op, "input", input);
  check_scale(op, scale, input);
  check_zero_point(op, zero_point, input);
  TORCH_CHECK_VALUE(quant_min <= quant_max, op,
                    ": expected quant_min not above quant_max, got quant_min = ", quant_min,
                    ", quant_max = ", quant_max);
  // Unsigned: the difference of the greatest and the least overflows.
  const uint64_t steps = static_cast<uint64_t>(quant_max) - static_cast<uint64_t>(quant_min);
  TORCH_CHECK_VALUE(steps < uint64_t{1} << 22, op,
                    ": expected fewer than 2^22 integers from quant_min to quant_max, got quant_min = ",
                    quant_min, ", quant_max = ", quant_max);
  return check_channels(op, input, scale, zero_point, axis);
}

// ---- From tensors to the kernels' arguments

Parameter parameter_of(at::Tensor& x, const at::Tensor& input) {
  if (x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16) x = x.to(at::kFloat);
  const ParameterType type = x.scalar_type() == at::kFloat    ? ParameterType::kFloat
                             : x.scalar_type() == at::kDouble ? ParameterType::kDouble
                             : x.scalar_type() == at::kInt    ? ParameterType::kInt
                                                              : ParameterType::kLong;
  if (x.is_cpu() && !input.is_cpu()) return {nullptr, 0, type, x.item<double>()};
  return {x.const_data_ptr(), x.numel() == 1 ? 0 : x.stride(0), type, 0};
}

// The scheme, and the tensors whose memory it points to.
struct SchemeOf {
  SchemeOf(const at::Tensor& input, at::Tensor scale_, at::Tensor zero_point_, int64_t quant_min,
           int64_t quant_max)
      : scale(std::move(scale_)),
        zero_point(std::move(zero_point_)),
        scheme{parameter_of(scale, input), parameter_of(zero_point, input), static_cast<double>(quant_min),
               static_cast<double>(quant_max)} {}
  at::Tensor scale, zero_point;
  QuantizationScheme scheme;
};

ChannelLayout layout_of(const at::Tensor& dense, Axis axis) {
  if (!axis || dense.size(*axis) == 1) return {1, 1, dense.numel()};
  const int64_t channels = dense.size(*axis), inner = dense.stride(*axis);
  return {dense.numel() / (channels * inner), channels, inner};
}

// x with its elements in the memory order of `dense`, of the same sizes.
at::Tensor in_order_of(const at::Tensor& dense, const at::Tensor& x) {
  return x.strides() == dense.strides() ? x : at::empty_like(dense).copy_(x);
}

bool has_nothing_to_compute(const at::Tensor& x) { return x.is_meta() || x.numel() == 0; }

at::ScalarType compute_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// ---- Forward

void run_forward(const char* op, const at::Tensor& input, const at::Tensor& output, const at::Tensor& mask,
                 const at::Tensor& scale, const at::Tensor& zero_point, int64_t quant_min, int64_t quant_max,
                 Axis axis) {
  if (has_nothing_to_compute(output)) return;
  const at::Tensor x = in_order_of(output, input);
  const SchemeOf of(x, scale, zero_point, quant_min, quant_max);
  const ChannelLayout layout = layout_of(output, axis);
  launch(op, output, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    return fake_quantize_forward(pointer<T>(x), mutable_pointer<T>(output),
                                 mutable_pointer<unsigned char>(mask), layout, of.scheme, stream...);
  });
}

at::Tensor forward(const at::Tensor& input, const at::Tensor& scale, const at::Tensor& zero_point,
                   int64_t quant_min, int64_t quant_max, Axis axis, double) {
  constexpr const char* kOp = "fake_quantize";
  axis = check(kOp, input, scale, zero_point, quant_min, quant_max, axis);
  const KernelGuard guard(input);
  at::Tensor output = at::empty_like(input);
  run_forward(kOp, input, output, at::Tensor(), scale, zero_point, quant_min, quant_max, axis);
  return output;
}

// Also the bits of what lies within the grid, in the output's memory order.
std::tuple<at::Tensor, at::Tensor> forward_with_mask(const at::Tensor& input, const at::Tensor& scale,
                                                     const at::Tensor& zero_point, int64_t quant_min,
                                                     int64_t quant_max, Axis axis) {
  constexpr const char* kOp = "fake_quantize";
  axis = check(kOp, input, scale, zero_point, quant_min, quant_max, axis);
  const KernelGuard guard(input);
  at::Tensor output = at::empty_like(input);
  at::Tensor mask = at::empty_symint({(input.sym_numel() + 7) / 8}, input.options().dtype(at::kByte));
  run_forward(kOp, input, output, mask, scale, zero_point, quant_min, quant_max, axis);
  return {output, mask};
}

// ---- Backward

// grad_output where the mask's bit is set, else 0; of the strides that the forward's output had.
at::Tensor mask_backward(const at::Tensor& grad_output, const at::Tensor& mask, c10::SymIntArrayRef strides) {
  constexpr const char* kOp = "fake_quantize_mask_backward";
  check_device(kOp, "grad_output", grad_output);
  check_floating(kOp, "grad_output", grad_output);
  check_same_device(kOp, "mask", mask, grad_output);
  check_same_dtype(kOp, "mask", mask, at::kByte);
  check_contiguous(kOp, "mask", mask);
  check_shape(kOp, "mask", mask, {(grad_output.sym_numel() + 7) / 8}, "[ceil(grad_output.numel() / 8)]");
  TORCH_CHECK(static_cast<int64_t>(strides.size()) == grad_output.dim(), kOp,
              ": expected a stride for each dimension of grad_output, got ", strides);
  const KernelGuard guard(grad_output);
  at::Tensor grad_input = at::empty_strided_symint(grad_output.sym_sizes(), strides, grad_output.options());
  if (has_nothing_to_compute(grad_input)) return grad_input;
  TORCH_CHECK(grad_input.is_non_overlapping_and_dense(), kOp, ": expected strides of a dense tensor, got ",
              strides);
  const at::Tensor gradient = in_order_of(grad_input, grad_output);
  launch(kOp, grad_input, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    return fake_quantize_mask_backward(pointer<T>(gradient), pointer<unsigned char>(mask),
                                       mutable_pointer<T>(grad_input), grad_input.numel(), stream...);
  });
  return grad_input;
}

PartialSums plan_for(const at::Tensor& x, const ChannelLayout& layout) {
#ifdef LLTM_EXT_WITH_CUDA
  if (x.is_cuda()) return plan_partial_sums_cuda(layout);
#endif
  return plan_partial_sums(layout);
}

// A gradient a channel, in the parameter's shape and type. An integer has a gradient in the computing type.
at::Tensor gradient_for(const at::Tensor& parameter, const at::Tensor& of_channels) {
  const at::ScalarType type =
      at::isFloatingType(parameter.scalar_type()) ? parameter.scalar_type() : of_channels.scalar_type();
  if (of_channels.is_meta()) return at::empty_symint(parameter.sym_sizes(), parameter.options().dtype(type));
  const bool shared = parameter.numel() == 1 && of_channels.numel() > 1;
  return (shared ? of_channels.sum() : of_channels).to(parameter.device(), type).view(parameter.sizes());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_output,
                                                        const at::Tensor& input, const at::Tensor& scale,
                                                        const at::Tensor& zero_point, int64_t quant_min,
                                                        int64_t quant_max, Axis axis, double grad_factor) {
  constexpr const char* kOp = "fake_quantize_backward";
  axis = check(kOp, input, scale, zero_point, quant_min, quant_max, axis);
  check_same_device(kOp, "grad_output", grad_output, input);
  check_same_dtype(kOp, "grad_output", grad_output, input.scalar_type());
  check_shape(kOp, "grad_output", grad_output, input.sym_sizes(), "of input");
  const KernelGuard guard(input);
  at::Tensor grad_input = at::empty_like(input);
  const auto options = input.options().dtype(compute_type(input));
  const c10::SymInt channels = axis ? input.sym_size(*axis) : c10::SymInt(1);
  const auto of_channels = [&] {  // a kernel writes them all, if there is anything to compute
    return has_nothing_to_compute(grad_input) ? at::zeros_symint({channels}, options)
                                              : at::empty_symint({channels}, options);
  };
  at::Tensor grad_scale = of_channels(), grad_zero_point = of_channels();
  if (!has_nothing_to_compute(grad_input)) {
    const at::Tensor x = in_order_of(grad_input, input), gradient = in_order_of(grad_input, grad_output);
    const SchemeOf of(x, scale, zero_point, quant_min, quant_max);
    const ChannelLayout layout = layout_of(grad_input, axis);
    const PartialSums plan = plan_for(x, layout);
    const at::Tensor partial_sums = at::empty({plan.outer * layout.channels * plan.inner, 2}, options);
    launch(kOp, grad_input, [&](auto type, auto... stream) {
      using T = typename decltype(type)::type;
      using A = acc_t<T>;
      return fake_quantize_backward(pointer<T>(gradient), pointer<T>(x), mutable_pointer<T>(grad_input),
                                    mutable_pointer<ScaleAndZeroPoint<A>>(partial_sums),
                                    mutable_pointer<A>(grad_scale), mutable_pointer<A>(grad_zero_point),
                                    layout, plan, of.scheme, grad_factor, stream...);
    });
  }
  return {grad_input, gradient_for(scale, grad_scale), gradient_for(zero_point, grad_zero_point)};
}

// ---- The same from the top of the dispatcher

at::Tensor call(const at::Tensor& input, const at::Tensor& scale, const at::Tensor& zero_point,
                int64_t quant_min, int64_t quant_max, Axis axis, double grad_factor) {
  static const auto op = find_op<decltype(forward)>("lltm_ext::fake_quantize");
  return op.call(input, scale, zero_point, quant_min, quant_max, axis, grad_factor);
}

std::tuple<at::Tensor, at::Tensor> call_with_mask(const at::Tensor& input, const at::Tensor& scale,
                                                  const at::Tensor& zero_point, int64_t quant_min,
                                                  int64_t quant_max, Axis axis) {
  static const auto op = find_op<decltype(forward_with_mask)>("lltm_ext::fake_quantize_with_mask");
  return op.call(input, scale, zero_point, quant_min, quant_max, axis);
}

at::Tensor call_mask_backward(const at::Tensor& grad_output, const at::Tensor& mask,
                              c10::SymIntArrayRef strides) {
  static const auto op = find_op<decltype(mask_backward)>("lltm_ext::fake_quantize_mask_backward");
  return op.call(grad_output, mask, strides);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_backward(const at::Tensor& grad_output,
                                                             const at::Tensor& input, const at::Tensor& scale,
                                                             const at::Tensor& zero_point, int64_t quant_min,
                                                             int64_t quant_max, Axis axis,
                                                             double grad_factor) {
  static const auto op = find_op<decltype(backward)>("lltm_ext::fake_quantize_backward");
  return op.call(grad_output, input, scale, zero_point, quant_min, quant_max, axis, grad_factor);
}

// ---- Autograd

// In torch's differentiable ops, for the double backward: the value is that of the straight line which the
// gradient pretends, input + scale * (steps - input / scale) with the difference held fixed.
at::Tensor composed(const variable_list& inputs, int64_t quant_min, int64_t quant_max, Axis axis,
                    double grad_factor) {
  const at::Tensor x = inputs[0].to(compute_type(inputs[0]));
  const auto prepared = [&](const at::Tensor& parameter) {
    at::Tensor p = parameter.to(x.scalar_type());
    if (grad_factor != 1) p = p.detach() + (p * grad_factor - (p * grad_factor).detach());
    if (p.sym_numel() == 1) return p.reshape({});
    std::vector<c10::SymInt> shape(x.dim(), 1);
    shape[*axis] = -1;
    return p.view_symint(shape);
  };
  const at::Tensor scale = prepared(inputs[1]), zero_point = prepared(inputs[2]);
  const double lowest = static_cast<double>(quant_min), highest = static_cast<double>(quant_max);
  const at::Tensor z = zero_point + (zero_point.round().clamp(lowest, highest) - zero_point).detach();
  const at::Tensor quotient = (x / scale).detach();
  const at::Tensor steps = quotient.round(), shifted = steps + z.detach();
  const at::Tensor inside = (shifted >= lowest).logical_and(shifted <= highest);
  const at::Tensor error = at::where(inside, steps - quotient, 0);
  const at::Tensor bound = at::where(shifted > highest, highest, at::where(inside, 0., lowest));
  return at::where(inside, x + scale * error, (bound - z) * scale).to(inputs[0].scalar_type());
}

// The scale or the zero point is learnt.
struct LearnableNode : torch::autograd::Function<LearnableNode> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& scale,
                            const at::Tensor& zero_point, int64_t quant_min, int64_t quant_max, Axis axis,
                            double grad_factor) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    context->save_for_backward({input, scale, zero_point});
    context->saved_data["range"] = std::vector<int64_t>{quant_min, quant_max};
    context->saved_data["axis"] = axis;
    context->saved_data["grad_factor"] = grad_factor;
    return call(input, scale, zero_point, quant_min, quant_max, axis, grad_factor);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const variable_list saved = context->get_saved_variables();
    const auto range = context->saved_data["range"].toIntVector();
    const Axis axis = context->saved_data["axis"].toOptional<int64_t>();
    const double grad_factor = context->saved_data["grad_factor"].toDouble();
    variable_list gradients(7);
    if (at::GradMode::is_enabled()) {
      const Axis channels = check_channels("fake_quantize", saved[0], saved[1], saved[2], axis);
      const auto of_inputs = [&](const variable_list& inputs) -> variable_list {
        return {composed(inputs, range[0], range[1], channels, grad_factor)};
      };
      const auto found = differentiable_gradients(of_inputs, saved, grad_outputs);
      std::copy(found.begin(), found.end(), gradients.begin());
      return gradients;
    }
    auto [grad_input, grad_scale, grad_zero_point] =
        call_backward(grad_outputs[0], saved[0], saved[1], saved[2], range[0], range[1], axis, grad_factor);
    if (saved[0].requires_grad()) gradients[0] = grad_input;
    if (saved[1].requires_grad()) gradients[1] = grad_scale;
    if (saved[2].requires_grad()) gradients[2] = grad_zero_point;
    return gradients;
  }
};

// A backward that is linear in grad_output, and so its own double backward.
struct MaskBackwardNode : torch::autograd::Function<MaskBackwardNode> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& grad_output, const at::Tensor& mask,
                            c10::SymIntArrayRef strides) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    keep(context, mask, strides);
    return call_mask_backward(grad_output, mask, strides);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    return {pull(context, grad_outputs[0]), at::Tensor(), at::Tensor()};
  }

  static void keep(AutogradContext* context, const at::Tensor& mask, c10::SymIntArrayRef strides) {
    context->save_for_backward({mask});
    context->saved_data["strides"] = strides;
  }
  static at::Tensor pull(AutogradContext* context, const at::Tensor& grad_output) {
    const std::vector<c10::SymInt> strides = context->saved_data["strides"].toSymIntVector();
    return call_mask_backward(grad_output, context->get_saved_variables()[0], strides);
  }
};

// Only the input needs a gradient: a bit an element is saved for it.
struct MaskNode : torch::autograd::Function<MaskNode> {
  static variable_list forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& scale,
                               const at::Tensor& zero_point, int64_t quant_min, int64_t quant_max,
                               Axis axis) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [output, mask] = call_with_mask(input, scale, zero_point, quant_min, quant_max, axis);
    context->set_materialize_grads(false);
    context->mark_non_differentiable({mask});
    MaskBackwardNode::keep(context, mask, output.sym_strides());
    return {output, mask};
  }
  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    variable_list gradients(6);
    if (grad_outputs[0].defined()) gradients[0] = MaskBackwardNode::pull(context, grad_outputs[0]);
    return gradients;
  }
};

at::Tensor forward_autograd(const at::Tensor& input, const at::Tensor& scale, const at::Tensor& zero_point,
                            int64_t quant_min, int64_t quant_max, Axis axis, double grad_factor) {
  if (any_needs_grad(scale, zero_point) && input.defined()) {
    return LearnableNode::apply(input, scale, zero_point, quant_min, quant_max, axis, grad_factor);
  }
  if (any_needs_grad(input) && scale.defined() && zero_point.defined()) {
    return std::get<0>(call_with_mask(input, scale, zero_point, quant_min, quant_max, axis));
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call(input, scale, zero_point, quant_min, quant_max, axis, grad_factor);
}

std::tuple<at::Tensor, at::Tensor> forward_with_mask_autograd(const at::Tensor& input,
                                                              const at::Tensor& scale,
                                                              const at::Tensor& zero_point, int64_t quant_min,
                                                              int64_t quant_max, Axis axis) {
  if (any_needs_grad(input) && scale.defined() && zero_point.defined()) {
    TORCH_CHECK(
        !any_needs_grad(scale, zero_point),
        "fake_quantize_with_mask: there is no gradient for scale and zero_point, but one requires it");
    const variable_list found = MaskNode::apply(input, scale, zero_point, quant_min, quant_max, axis);
    return {found[0], found[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_with_mask(input, scale, zero_point, quant_min, quant_max, axis);
}

at::Tensor mask_backward_autograd(const at::Tensor& grad_output, const at::Tensor& mask,
                                  c10::SymIntArrayRef strides) {
  if (any_needs_grad(grad_output) && mask.defined()) {
    return MaskBackwardNode::apply(grad_output, mask, strides);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_mask_backward(grad_output, mask, strides);
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
  implement<forward>(m, "fake_quantize");
  implement<forward_with_mask>(m, "fake_quantize_with_mask");
  implement<mask_backward>(m, "fake_quantize_mask_backward");
  implement<backward>(m, "fake_quantize_backward");
  implement_autograd(m, "fake_quantize", forward_autograd);
  implement_autograd(m, "fake_quantize_with_mask", forward_with_mask_autograd);
  implement_autograd(m, "fake_quantize_mask_backward", mask_backward_autograd);
}

#ifdef TORCH_EXTENSION_NAME
namespace {

std::tuple<at::Tensor, at::Tensor> raw_forward(const at::Tensor& input, const at::Tensor& scale,
                                               const at::Tensor& zero_point, int64_t quant_min,
                                               int64_t quant_max, Axis axis) {
  CHECK_INPUT("fake_quantize.forward", input);
  return forward_with_mask(input, scale, zero_point, quant_min, quant_max, axis);
}

at::Tensor raw_backward(const at::Tensor& grad_output, const at::Tensor& mask) {
  CHECK_INPUT("fake_quantize.backward", grad_output);
  return mask_backward(grad_output, mask, grad_output.sym_strides());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> raw_backward_learnable(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& scale,
    const at::Tensor& zero_point, int64_t quant_min, int64_t quant_max, Axis axis, double grad_factor) {
  CHECK_INPUT("fake_quantize.backward_learnable", grad_output);
  CHECK_INPUT("fake_quantize.backward_learnable", input);
  return backward(grad_output, input, scale, zero_point, quant_min, quant_max, axis, grad_factor);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", torch::wrap_pybind_function_no_gil(raw_forward), py::arg("input"), py::arg("scale"),
        py::arg("zero_point"), py::arg("quant_min"), py::arg("quant_max"), py::arg("axis") = py::none());
  m.def("backward", torch::wrap_pybind_function_no_gil(raw_backward), py::arg("grad_output"),
        py::arg("mask"));
  m.def("backward_learnable", torch::wrap_pybind_function_no_gil(raw_backward_learnable),
        py::arg("grad_output"), py::arg("input"), py::arg("scale"), py::arg("zero_point"),
        py::arg("quant_min"), py::arg("quant_max"), py::arg("axis") = py::none(),
        py::arg("grad_factor") = 1.0);
}
#endif

}  // namespace lltm_ext
