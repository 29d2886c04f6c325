// relu: tensors in, tensors out. Dispatcher ops lltm_ext::relu and relu_backward, raw bindings
// lltm_ext._C.relu.forward and backward.
#include "relu/relu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/masked_fill.h>

#include "common/activation.h"

namespace lltm_ext {
namespace {

struct ReluOp {
  static constexpr const char* kName = "relu";
  static constexpr const char* kBackwardName = "relu_backward";
  static constexpr const char* kRawForward = "relu.forward";
  static constexpr const char* kRawBackward = "relu.backward";

  template <typename... Args>
  static auto forward(Args... args) {
    return relu_forward(args...);
  }
  template <typename... Args>
  static auto backward(Args... args) {
    return relu_backward(args...);
  }
  static at::Tensor gradient(const at::Tensor& grad_output, const at::Tensor& output) {
    return grad_output.masked_fill(output <= 0, 0);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { ActivationOps<ReluOp>::define(m); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { ActivationOps<ReluOp>::bind(m); }

}  // namespace lltm_ext
