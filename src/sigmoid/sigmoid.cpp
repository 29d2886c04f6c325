// sigmoid: tensors in, tensors out. Dispatcher ops lltm_ext::sigmoid and sigmoid_backward, raw bindings
// lltm_ext._C.sigmoid.forward and backward.
#include "sigmoid/sigmoid.h"

#include <ATen/TensorOperators.h>

#include "common/activation.h"

namespace lltm_ext {
namespace {

struct SigmoidOp {
  static constexpr const char* kName = "sigmoid";
  static constexpr const char* kBackwardName = "sigmoid_backward";
  static constexpr const char* kRawForward = "sigmoid.forward";
  static constexpr const char* kRawBackward = "sigmoid.backward";

  template <typename... Args>
  static auto forward(Args... args) {
    return sigmoid_forward(args...);
  }
  template <typename... Args>
  static auto backward(Args... args) {
    return sigmoid_backward(args...);
  }
  static at::Tensor gradient(const at::Tensor& grad_output, const at::Tensor& output) {
    return grad_output * (output * (1 - output));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { ActivationOps<SigmoidOp>::define(m); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { ActivationOps<SigmoidOp>::bind(m); }

}  // namespace lltm_ext
