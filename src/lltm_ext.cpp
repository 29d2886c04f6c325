// The functions that the library for C++ programs exports: the dispatcher's ops with their types. No part of
// the Python modules.
#include "lltm_ext/lltm_ext.h"

#include "common/library.h"

namespace lltm_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

using Sequence = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                                const at::Tensor&, const at::Tensor&,
                                                                const at::Tensor&, const OptionalTensor&,
                                                                at::OptionalIntArrayRef, bool,
                                                                std::string_view);

std::tuple<at::Tensor, State> call(const c10::TypedOperatorHandle<Sequence>& op, const at::Tensor& input,
                                   const State& hx, const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                   const OptionalTensor& bias, std::string_view algorithm) {
  const auto& [h0, c0] = hx;
  auto [output, h_n, c_n] = op.call(input, h0, c0, weight_ih, weight_hh, bias, /*batch_sizes=*/std::nullopt,
                                    /*reverse=*/false, algorithm);
  return {output, {h_n, c_n}};
}

}  // namespace

at::Tensor sigmoid(const at::Tensor& input) {
  static const auto op = find_op<at::Tensor(const at::Tensor&)>("lltm_ext::sigmoid");
  return op.call(input);
}

at::Tensor relu(const at::Tensor& input) {
  static const auto op = find_op<at::Tensor(const at::Tensor&)>("lltm_ext::relu");
  return op.call(input);
}

at::Tensor round(const at::Tensor& input) {
  static const auto op = find_op<at::Tensor(const at::Tensor&)>("lltm_ext::round");
  return op.call(input);
}

at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                std::optional<std::string_view> activation, std::string_view precision) {
  static const auto op = find_op<decltype(gemm)>("lltm_ext::gemm");
  return op.call(a, b, bias, activation, precision);
}

State lltm_cell(const at::Tensor& input, const at::Tensor& weights, const OptionalTensor& bias,
                const at::Tensor& old_h, const at::Tensor& old_cell) {
  static const auto op = find_op<decltype(lltm_cell)>("lltm_ext::lltm_cell");
  return op.call(input, weights, bias, old_h, old_cell);
}

std::tuple<at::Tensor, State> lltm(const at::Tensor& input, const State& hx, const at::Tensor& weight_ih,
                                   const at::Tensor& weight_hh, const OptionalTensor& bias,
                                   std::string_view algorithm) {
  static const auto op = find_op<Sequence>("lltm_ext::lltm");
  return call(op, input, hx, weight_ih, weight_hh, bias, algorithm);
}

std::tuple<at::Tensor, State> lstm(const at::Tensor& input, const State& hx, const at::Tensor& weight_ih,
                                   const at::Tensor& weight_hh, const OptionalTensor& bias,
                                   std::string_view algorithm) {
  static const auto op = find_op<Sequence>("lltm_ext::lstm");
  return call(op, input, hx, weight_ih, weight_hh, bias, algorithm);
}

const char* version() { return LLTM_EXT_VERSION; }

}  // namespace lltm_ext
