// The straight-through ops round, floor, ceil, trunc and binarize: their dispatcher ops, and the raw bindings
// lltm_ext._C.round.forward, backward and binarize.
#include "round/round.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>

#include "common/unary.h"

namespace lltm_ext {
namespace {

// ---- round, floor, ceil, trunc

template <class Op, template <typename> class F>
struct RoundingOp : StraightThrough {
  static constexpr const char* kParameters = "";
  static constexpr Types kTypes = Types::kFloating;
  static void check() {}
  static void run(const at::Tensor& output, const at::Tensor& input) {
    elementwise<F, 1>(Op::kName, output, {input});
  }
};

struct RoundOp : RoundingOp<RoundOp, Round> {
  static constexpr const char* kName = "round";
};
struct FloorOp : RoundingOp<FloorOp, Floor> {
  static constexpr const char* kName = "floor";
};
struct CeilOp : RoundingOp<CeilOp, Ceil> {
  static constexpr const char* kName = "ceil";
};
struct TruncOp : RoundingOp<TruncOp, Trunc> {
  static constexpr const char* kName = "trunc";
};

// ---- binarize

using c10::string_view;
enum class Through { kIdentity, kClipped, kTanh };

Through through_of(const char* op, string_view grad) {
  if (grad == "identity") return Through::kIdentity;
  if (grad == "clipped") return Through::kClipped;
  TORCH_CHECK_VALUE(grad == "tanh", op, ": expected grad 'identity', 'clipped' or 'tanh', got '", grad, "'");
  return Through::kTanh;
}

void check_range(const char* op, double low, double high) {
  TORCH_CHECK_VALUE(low < high, op, ": expected low below high, got low = ", low, ", high = ", high);
}

// Called for the gradients other than the identity, which autograd passes on without an op.
at::Tensor binarize_backward(const at::Tensor& grad_output, const at::Tensor& input, double threshold,
                             double low, double high, string_view grad) {
  constexpr const char* kOp = "binarize_backward";
  check_gradient(kOp, grad_output, input);
  check_range(kOp, low, high);
  const Through through = through_of(kOp, grad);
  const KernelGuard guard(input);
  at::Tensor grad_input = at::empty_like(input);
  const double half = (high - low) / 2;
  switch (through) {
    case Through::kIdentity:
      grad_input.copy_(grad_output);
      break;
    case Through::kClipped:
      elementwise<BinarizeClippedBackward, 2>(kOp, grad_input, {grad_output, input}, threshold, half);
      break;
    case Through::kTanh:
      elementwise<BinarizeTanhBackward, 2>(kOp, grad_input, {grad_output, input}, threshold, half);
      break;
  }
  return grad_input;
}

#ifndef LLTM_EXT_STABLE_ABI
at::Tensor call_binarize_backward(const at::Tensor& grad_output, const at::Tensor& input, double threshold,
                                  double low, double high, string_view grad) {
  static const auto op = find_op<decltype(binarize_backward)>("lltm_ext::binarize_backward");
  return op.call(grad_output, input, threshold, low, high, grad);
}

at::Tensor binarize_backward_autograd(const at::Tensor& grad_output, const at::Tensor& input,
                                      double threshold, double low, double high, string_view grad) {
  if (any_needs_grad(grad_output, input)) {
    check_gradient("binarize_backward", grad_output, input);
    const double half = (high - low) / 2;
    switch (through_of("binarize_backward", grad)) {
      case Through::kIdentity:
        return grad_output.alias();
      case Through::kClipped:
        return grad_output.masked_fill(((input - threshold).abs() <= half).logical_not(), 0);
      case Through::kTanh:
        return grad_output * (1 - at::tanh((input - threshold) / half).square());
    }
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_binarize_backward(grad_output, input, threshold, low, high, grad);
}
#endif

struct BinarizeOp {
  static constexpr const char* kName = "binarize";
  static constexpr const char* kParameters =
      ", float threshold=0.5, float low=0.0, float high=1.0, str grad='identity'";
  static constexpr Types kTypes = Types::kFloating;

  static void check(double, double low, double high, string_view grad) {
    check_range(kName, low, high);
    through_of(kName, grad);
  }
  static void run(const at::Tensor& output, const at::Tensor& input, double threshold, double low,
                  double high, string_view) {
    elementwise<Binarize, 1>(kName, output, {input}, threshold, low, high);
  }
#ifndef LLTM_EXT_STABLE_ABI
  using Context = torch::autograd::AutogradContext;

  static void keep(Context* context, bool in_place, const at::Tensor& input, double threshold, double low,
                   double high, string_view grad) {
    context->saved_data["grad"] = std::string(grad);
    if (grad == "identity") return;
    context->save_for_backward({in_place ? input.clone() : input});
    context->saved_data["range"] = std::vector<double>{threshold, low, high};
  }
  static void kept(Context*, const at::Tensor&) {}
  static at::Tensor pull(Context* context, const at::Tensor& grad_output) {
    const std::string grad = context->saved_data["grad"].toStringRef();
    if (grad == "identity") return grad_output;
    const std::vector<double> range = context->saved_data["range"].toDoubleVector();
    return call_binarize_backward(grad_output, context->get_saved_variables()[0], range[0], range[1],
                                  range[2], grad);
  }
#endif
};

using RoundOps = UnaryOps<RoundOp>;
using BinarizeOps = UnaryOps<BinarizeOp, double, double, double, string_view>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  RoundOps::define(m);
  UnaryOps<FloorOp>::define(m);
  UnaryOps<CeilOp>::define(m);
  UnaryOps<TruncOp>::define(m);
  BinarizeOps::define(m);
  m.def(
      "binarize_backward(Tensor grad_output, Tensor input, float threshold, float low, float high, "
      "str grad) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  implement<binarize_backward>(m, "binarize_backward");
#ifndef LLTM_EXT_STABLE_ABI
  implement_autograd(m, "binarize_backward", binarize_backward_autograd);
#endif
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  RoundOps::bind_call(m);
  UnaryOps<FloorOp>::bind_call(m);
  UnaryOps<CeilOp>::bind_call(m);
  UnaryOps<TruncOp>::bind_call(m);
  m.def("forward", torch::wrap_pybind_function_no_gil([](const at::Tensor& input) {
          CHECK_INPUT("round.forward", input);
          return RoundOps::forward(input);
        }),
        py::arg("input"));
  m.def("backward", torch::wrap_pybind_function_no_gil([](const at::Tensor& grad_output) {
          CHECK_INPUT("round.backward", grad_output);
          return grad_output;
        }),
        py::arg("grad_output"));
  m.def("binarize", torch::wrap_pybind_function_no_gil([](const at::Tensor& input, double threshold) {
          CHECK_INPUT("round.binarize", input);
          return BinarizeOps::forward(input, threshold, 0., 1., "identity");
        }),
        py::arg("input"), py::arg("threshold") = 0.5);
}
#endif

}  // namespace lltm_ext
