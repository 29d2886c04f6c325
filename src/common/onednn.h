// oneDNN's product of two matrices on the CPU, through torch's op. If undefined, the caller multiplies.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace lltm_ext {

using OneDnnLinear = at::Tensor(const at::Tensor& x, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, c10::string_view activation,
                                c10::List<std::optional<at::Scalar>> scalars,
                                std::optional<c10::string_view> algorithm);

// Finds an op that torch registers if it was built with oneDNN.
template <typename Signature>
std::optional<c10::TypedOperatorHandle<Signature>> find_onednn(const char* op) {
  const auto found = c10::Dispatcher::singleton().findSchema({op, ""});
  if (!found) return std::nullopt;
  return found->typed<Signature>();
}

// activation(x [..., K] @ b [K, N] (+ bias [N])), rounded once; undefined without oneDNN. The op reads a bias
// as if it were contiguous.
inline at::Tensor onednn_linear(const at::Tensor& x, const at::Tensor& b,
                                const std::optional<at::Tensor>& bias = std::nullopt,
                                c10::string_view activation = "none", c10::string_view algorithm = "") {
  static const auto linear = find_onednn<OneDnnLinear>("mkldnn::_linear_pointwise");
  if (!linear) return {};
  const std::optional<at::Tensor> read = bias ? std::optional(bias->contiguous()) : std::nullopt;
  return linear->call(x, b.t(), read, activation, c10::List<std::optional<at::Scalar>>(), algorithm);
}

// Whether the CPU has instructions for products of a half type.
inline bool onednn_multiplies(at::ScalarType type) {
  const auto ask = [](const char* op) {
    const auto supported = find_onednn<bool()>(op);
    return supported && supported->call();
  };
  static const bool bfloat16 = ask("mkldnn::_is_mkldnn_bf16_supported"),
                    float16 = ask("mkldnn::_is_mkldnn_fp16_supported");
  return (type == at::kBFloat16 && bfloat16) || (type == at::kHalf && float16);
}

}  // namespace lltm_ext
