// The functions that the library for C++ programs exports: typed calls of the dispatcher ops. Not part of the
// Python modules.
#include "lltm_ext/lltm_ext.h"

#include "common/library.h"
#include "common/optional_tensor.h"

namespace lltm_ext {
namespace {

// The signature of the dispatcher ops lltm and lstm.
using Sequence = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const OptionalTensor&,
                                                                const OptionalTensor&, const at::Tensor&,
                                                                const at::Tensor&, const OptionalTensor&,
                                                                at::OptionalIntArrayRef, bool,
                                                                std::string_view, const OptionalTensor&,
                                                                const OptionalTensor&);

std::tuple<at::Tensor, State> call_sequence(const c10::TypedOperatorHandle<Sequence>& op,
                                            const at::Tensor& input, const State& hx,
                                            const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                            const OptionalTensor& bias, std::string_view algorithm) {
  const auto& [h0, c0] = hx;
  auto [output, h_n, c_n] = op.call(input, h0, c0, weight_ih, weight_hh, bias, /*batch_sizes=*/std::nullopt,
                                    /*reverse=*/false, algorithm, /*reset=*/std::nullopt,
                                    /*bias_hh=*/std::nullopt);
  return {output, {h_n, c_n}};
}

}  // namespace

at::Tensor sigmoid(const at::Tensor& input) { return call_op<sigmoid>("lltm_ext::sigmoid", input); }
at::Tensor relu(const at::Tensor& input) { return call_op<relu>("lltm_ext::relu", input); }
at::Tensor round(const at::Tensor& input) { return call_op<round>("lltm_ext::round", input); }

at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                std::optional<std::string_view> activation, std::string_view precision) {
  return call_op<gemm>("lltm_ext::gemm", a, b, bias, activation, precision);
}

State lltm_cell(const at::Tensor& input, const at::Tensor& weights, const OptionalTensor& bias,
                const at::Tensor& old_h, const at::Tensor& old_cell) {
  return call_op<lltm_cell>("lltm_ext::lltm_cell", input, weights, bias, old_h, old_cell);
}

std::tuple<at::Tensor, State> lltm(const at::Tensor& input, const State& hx, const at::Tensor& weight_ih,
                                   const at::Tensor& weight_hh, const OptionalTensor& bias,
                                   std::string_view algorithm) {
  static const auto op = find_op<Sequence>("lltm_ext::lltm");
  return call_sequence(op, input, hx, weight_ih, weight_hh, bias, algorithm);
}

std::tuple<at::Tensor, State> lstm(const at::Tensor& input, const State& hx, const at::Tensor& weight_ih,
                                   const at::Tensor& weight_hh, const OptionalTensor& bias,
                                   std::string_view algorithm) {
  static const auto op = find_op<Sequence>("lltm_ext::lstm");
  return call_sequence(op, input, hx, weight_ih, weight_hh, bias, algorithm);
}

const char* version() { return LLTM_EXT_VERSION; }

}  // namespace lltm_ext
