// relu: tensors in, tensors out. Dispatcher ops lltm_ext::relu, relu_, relu_out and relu_backward, raw
// bindings lltm_ext._C.relu.forward and backward.
#include "relu/relu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/masked_fill.h>

#include "common/unary.h"

namespace lltm_ext {
namespace {

struct ReluOp : FromOutput<ReluOp> {
  static constexpr const char* kName = "relu";
  static constexpr const char* kBackwardName = "relu_backward";
  static constexpr const char* kRawForward = "relu.forward";
  static constexpr const char* kRawBackward = "relu.backward";
  static constexpr const char* kParameters = "";
  static constexpr Types kTypes = Types::kFloating;

  static void run(const at::Tensor& output, const at::Tensor& input) {
    elementwise<Relu, 1>(kName, output, {input});
  }
  static void run_backward(const at::Tensor& grad_input, const at::Tensor& grad_output,
                           const at::Tensor& output) {
    elementwise<ReluBackward, 2>(kBackwardName, grad_input, {grad_output, output});
  }
#ifndef LLTM_EXT_STABLE_ABI
  static at::Tensor gradient(const at::Tensor& grad_output, const at::Tensor& output) {
    return grad_output.masked_fill(output <= 0, 0);
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { ActivationOps<ReluOp>::define(m); }

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { ActivationOps<ReluOp>::bind(m); }
#endif

}  // namespace lltm_ext
