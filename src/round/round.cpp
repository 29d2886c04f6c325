// The straight-through ops round, floor, ceil, trunc and binarize: their dispatcher ops, and the raw bindings
// lltm_ext._C.round.forward, backward and binarize.
#include "round/round.h"

#include "common/unary.h"

namespace lltm_ext {
namespace {

// ---- round, floor, ceil, trunc

template <class Op, template <typename> class F>
struct RoundingOp {
  static constexpr const char* kParameters = "";
  static constexpr Types kTypes = Types::kFloating;
  static constexpr Saved kSaved = Saved::kNothing;
  static void check(const char*) {}
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

struct BinarizeOp {
  static constexpr const char *kName = "binarize", *kBackwardName = "binarize_backward";
  static constexpr const char* kParameters =
      ", float threshold=0.5, float low=0.0, float high=1.0, str grad='identity'";
  static constexpr Types kTypes = Types::kFloating;
  static constexpr Saved kSaved = Saved::kInput;

  static void check(const char* op, double, double low, double high, string_view grad) {
    TORCH_CHECK_VALUE(low < high, op, ": expected low below high, got low = ", low, ", high = ", high);
    through_of(op, grad);
  }
  static void run(const at::Tensor& output, const at::Tensor& input, double threshold, double low,
                  double high, string_view) {
    elementwise<Binarize, 1>(kName, output, {input}, threshold, low, high);
  }
  static bool is_straight_through(double, double, double, string_view grad) { return grad == "identity"; }
  static void run_backward(const at::Tensor& grad_input, const at::Tensor& grad_output,
                           const at::Tensor& input, double threshold, double low, double high,
                           string_view grad) {
    const double half = (high - low) / 2;
    switch (through_of(kBackwardName, grad)) {
      case Through::kIdentity:
        grad_input.copy_(grad_output);
        break;
      case Through::kClipped:
        elementwise<BinarizeClippedBackward, 2>(kBackwardName, grad_input, {grad_output, input}, threshold,
                                                half);
        break;
      case Through::kTanh:
        elementwise<BinarizeTanhBackward, 2>(kBackwardName, grad_input, {grad_output, input}, threshold,
                                             half);
        break;
    }
  }
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
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  RoundOps::bind_call(m);
  UnaryOps<FloorOp>::bind_call(m);
  UnaryOps<CeilOp>::bind_call(m);
  UnaryOps<TruncOp>::bind_call(m);
  m.def("forward", torch::wrap_pybind_function_no_gil(RoundOps::raw_forward), py::arg("input"));
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
