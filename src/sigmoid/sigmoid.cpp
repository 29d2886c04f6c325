// sigmoid: tensors in, tensors out. Dispatcher ops lltm_ext::sigmoid, sigmoid_, sigmoid_out and
// sigmoid_backward, raw bindings lltm_ext._C.sigmoid.forward and backward.
#include "sigmoid/sigmoid.h"

#include <ATen/TensorOperators.h>

#include "common/unary.h"

namespace lltm_ext {
namespace {

struct SigmoidOp : FromOutput<SigmoidOp> {
  static constexpr const char* kName = "sigmoid";
  static constexpr const char* kBackwardName = "sigmoid_backward";
  static constexpr const char* kRawForward = "sigmoid.forward";
  static constexpr const char* kRawBackward = "sigmoid.backward";
  static constexpr const char* kParameters = "";
  static constexpr Types kTypes = Types::kFloatingOrComplex;

  static void run(const at::Tensor& output, const at::Tensor& input) {
    elementwise<Sigmoid, 1, /*kComplex=*/true>(kName, output, {input});
  }
  static void run_backward(const at::Tensor& grad_input, const at::Tensor& grad_output,
                           const at::Tensor& output) {
    elementwise<SigmoidBackward, 2, /*kComplex=*/true>(kBackwardName, grad_input, {grad_output, output});
  }
#ifndef LLTM_EXT_STABLE_ABI
  static at::Tensor gradient(const at::Tensor& grad_output, const at::Tensor& output) {
    return grad_output * (output * (1 - output)).conj();
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { ActivationOps<SigmoidOp>::define(m); }

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { ActivationOps<SigmoidOp>::bind(m); }
#endif

}  // namespace lltm_ext
