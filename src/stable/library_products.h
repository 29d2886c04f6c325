// The stable ABI cannot call oneDNN's op, which takes a list of Scalars. The library does not use cuBLASLt
// either, because it must not link to that of one CUDA version. torch's ops multiply, or cuBLAS does where
// their TF32 setting differs from ours.
#pragma once

#include "stable/ops.h"

#ifdef LLTM_EXT_WITH_CUDA
#include "common/cublas.h"
#endif

namespace lltm_ext {

inline at::Tensor onednn_product(const at::Tensor&, const at::Tensor&,
                                 const std::optional<at::Tensor>& = std::nullopt) {
  return {};
}
inline at::Tensor mm_with_dtype(at::ScalarType type, const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b, type);
}

#ifdef LLTM_EXT_WITH_CUDA
namespace matmul_detail {

template <typename... Args>
bool cublas_lt(const Args&...) {
  return false;
}

inline bool torch_multiplies(cublasHandle_t handle, at::ScalarType type, bool tf32) {
  return type != at::kFloat || tf32 == (MathMode::of(handle) == MathMode::with(true));
}

}  // namespace matmul_detail
#endif

}  // namespace lltm_ext
