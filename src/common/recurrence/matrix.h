// The matrix products around and between the steps, by whichever library is faster there.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <c10/core/Scalar.h>

#include <optional>

namespace lltm_ext {

// On the CPU at::mm multiplies float32 by MKL. From some size on oneDNN, to which torch.compile goes through
// this op, is up to 1.4 times as fast (benchmarks/NOTES.md has the figures); below, its calls cost more.
using OneDnnLinear = at::Tensor(const at::Tensor& x, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, c10::string_view activation,
                                c10::List<std::optional<at::Scalar>> scalars,
                                std::optional<c10::string_view> algorithm);

inline std::optional<c10::TypedOperatorHandle<OneDnnLinear>> find_onednn_linear() {
  const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  if (!op) return std::nullopt;
  return op->typed<OneDnnLinear>();
}

inline bool onednn_pays(const at::Tensor& x, const at::Tensor& w) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && x.size(0) >= 8 &&
         x.numel() * w.size(1) >= (int64_t{1} << 21) && x.is_contiguous() &&
         (w.is_contiguous() || w.t().is_contiguous()) && at::globalContext().userEnabledMkldnn();
}

// x [M, K] @ w [K, N] (+ bias [N]) by oneDNN where that pays; else undefined.
inline at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& w,
                                 const std::optional<at::Tensor>& bias = std::nullopt) {
  static const auto linear = find_onednn_linear();
  if (!linear || !onednn_pays(x, w)) return {};
  return linear->call(x, w.t(), bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// x [M, K] @ w [K, N] (+ bias [N])
inline at::Tensor product(const at::Tensor& x, const at::Tensor& w,
                          const std::optional<at::Tensor>& bias = std::nullopt) {
  if (const at::Tensor found = onednn_product(x, w, bias); found.defined()) return found;
  return bias ? at::addmm(*bias, x, w) : at::mm(x, w);
}

// The same, written to `out` [M, N].
inline void product_out(at::Tensor& out, const at::Tensor& x, const at::Tensor& w) {
  if (const at::Tensor found = onednn_product(x, w); found.defined()) {
    out.copy_(found);
  } else {
    at::mm_out(out, x, w);
  }
}

}  // namespace lltm_ext
