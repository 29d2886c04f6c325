// Matrix products for ops that need many small ones.
//
// On CUDA cuBLAS returns a product of half types in float32, which at::mm rounds: over thousands of steps
// that rounding is the larger part of the error. On the CPU at::mm multiplies float32 by MKL; for larger
// products oneDNN, called through torch.compile's op, is 1.4 to 2.3 times as fast, but not with few rows on
// AMD's processors (docs/design/archive.md).
//
// Float32 on CUDA may be TF32 where nn.LSTM may, by cuDNN's switch for RNNs. at::mm follows another switch,
// which other threads share.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "common/library_products.h"

namespace lltm_ext {

// Whether products of x may round float32 to TF32, which is nn.LSTM's own switch.
inline bool allows_tf32(const at::Tensor& x) {
  return x.is_cuda() && x.scalar_type() == at::kFloat &&
         at::globalContext().allowTF32CuDNN(at::Float32Op::RNN);
}

// a [M, K] @ b [K, N] (+ bias [N]), by torch's settings
inline at::Tensor affine(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  if (const at::Tensor product = onednn_product(a, b, bias); product.defined()) return product;
  return bias ? at::addmm(*bias, a, b) : at::mm(a, b);
}

// Matrix products on one device, on the stream that is current at construction. Those of float32 are TF32
// where allows_tf32 says so.
class Matmul {
 public:
  explicit Matmul(const at::Tensor& like) {
#ifdef LLTM_EXT_WITH_CUDA
    if (!like.is_cuda()) return;
    handle_ = at::cuda::getCurrentCUDABlasHandle();
    tf32_ = allows_tf32(like);
    by_torch_ = matmul_detail::torch_multiplies(handle_, like.scalar_type(), tf32_);
#endif
  }

  bool tf32() const { return tf32_; }

  // a [M, K] @ b [K, N] (+ bias [N]), in the type of a or in float32
  at::Tensor affine(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                    at::ScalarType type) const {
    const bool widens = type != a.scalar_type();
    if ((!a.is_cuda() || by_torch_) && !widens) return lltm_ext::affine(a, b, bias);
    const at::Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(type));
    const std::optional<at::Tensor> added =
        bias && widens ? bias->to(type) : bias;  // cuBLASLt wants the type of `out`
    if (cublas(out, a, b, /*accumulate=*/false, added)) return out;
    if (bias) out.copy_(*bias);
    (*this)(out, a, b, /*accumulate=*/bias.has_value());
    return out;
  }

  // to [M, N] += a [K, M]^T @ b [K, N], a weight gradient; an undefined `to` becomes the product. oneDNN
  // computes the transpose, because that copies b, the narrower operand.
  void add_weight_gradient(at::Tensor& to, const at::Tensor& a, const at::Tensor& b) const {
    const bool accumulate = to.defined();
    if (const at::Tensor product = onednn_product(b.t(), a); product.defined()) {
      if (accumulate) {
        to.add_(product.t());
      } else {
        to = product.t().contiguous();
      }
    } else {
      if (!accumulate) to = at::empty({a.size(1), b.size(1)}, a.options());
      (*this)(to, a.t(), b, accumulate);
    }
  }

  // out [M, N] = a [M, K] @ b [K, N], or += if `accumulate`. `out` has the dtype of a and b, or float32.
  void operator()(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  bool accumulate = false) const {
    if (out.numel() == 0 || cublas(out, a, b, accumulate)) return;
    at::Tensor to = out;
    if (const at::Tensor product = onednn_product(a, b); product.defined()) {
      accumulate ? to.add_(product) : to.copy_(product);
    } else if (out.scalar_type() != a.scalar_type()) {
      const at::Tensor wide = mm_with_dtype(out.scalar_type(), a, b);
      accumulate ? to.add_(wide) : to.copy_(wide);
    } else if (accumulate) {
      to.addmm_(a, b);
    } else {
      at::mm_out(to, a, b);
    }
  }

 private:
#ifdef LLTM_EXT_WITH_CUDA
  // Returns false if torch's ops can do it, or must. A bias is added only by cuBLASLt.
  bool cublas(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate,
              const std::optional<at::Tensor>& bias = std::nullopt) const {
    if (!a.is_cuda() || by_torch_ || out.numel() == 0 || a.size(1) == 0) return false;
    if (std::max({a.size(0), a.size(1), b.size(1)}) > std::numeric_limits<int>::max()) return false;
    const auto to = matmul_detail::cublas_matrix(out), left = matmul_detail::cublas_matrix(a),
               right = matmul_detail::cublas_matrix(b);
    if (!to || to->op != CUBLAS_OP_N || (bias && !bias->is_contiguous())) return false;
    if (!left || !right) return cublas(out, a.contiguous(), b.contiguous(), accumulate, bias);
    const void* added = bias ? bias->const_data_ptr() : nullptr;
    if (matmul_detail::cublas_lt(tf32_, *to, *left, *right, out, a, b, added, accumulate)) return true;
    if (bias) return false;
    matmul_detail::gemm_ex(handle_, tf32_, *to, *left, *right, out, a, b, accumulate);
    return true;
  }

  cublasHandle_t handle_ = nullptr;
#else
  static bool cublas(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool,
                     const std::optional<at::Tensor>& = std::nullopt) {
    return false;
  }
#endif
  bool tf32_ = false;
  bool by_torch_ = false;  // whether the portable library leaves all products to torch's ops
};

#ifdef LLTM_EXT_WITH_CUDA
// out [M, N] = a [M, K] @ b [K, N] (+ bias [N]) on CUDA, at the cost of torch's own products. Or a batch of
// such products: out [B, M, N], and a, b or both are batches. float32 is TF32 as asked, whatever torch's
// switches say. `out` is contiguous, and nothing is empty.
inline void library_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                            const at::Tensor& bias, bool tf32) {
  using namespace matmul_detail;
  const auto to = cublas_matrix(out), left = cublas_matrix(a), right = cublas_matrix(b);
  if (!left || !right) {
    return library_product(out, left ? a : a.contiguous(), right ? b : b.contiguous(), bias, tf32);
  }
  const bool is_batch = out.dim() == 3, has_bias = bias.defined();
  // cuBLAS itself cannot add a bias. cuBLASLt chooses badly for rows of half types between multiples of 16
  // bytes.
  const auto is_aligned = [](const CublasMatrix& x) { return x.ld % 8 == 0 && x.alignment() >= 16; };
  if (has_bias && !is_batch && bias.is_contiguous() &&
      (a.element_size() != 2 || (is_aligned(*to) && is_aligned(*left) && is_aligned(*right))) &&
      cublas_lt(tf32, *to, *left, *right, out, a, b, bias.const_data_ptr(), /*accumulate=*/false)) {
    return;
  }
  if (has_bias) out.copy_(bias);
  gemm_ex(at::cuda::getCurrentCUDABlasHandle(), tf32, *to, *left, *right, out, a, b, /*accumulate=*/has_bias,
          is_batch ? out.size(0) : 1);
}
#endif

}  // namespace lltm_ext
