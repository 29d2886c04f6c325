// Matrix products for ops that need many small ones.
//
// On CUDA cuBLAS returns a product of half types in float32, which at::mm rounds: over thousands of steps
// that rounding is the larger part of the error. On the CPU at::mm multiplies float32 by MKL; for larger
// products oneDNN, called through torch.compile's op, is 1.4 to 2.3 times as fast (docs/design/archive.md).
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <optional>

#ifdef LLTM_EXT_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/Exceptions.h>
#include <cublasLt.h>
#endif

namespace lltm_ext {

// ---- oneDNN

#ifdef LLTM_EXT_STABLE_ABI
// The stable ABI cannot call the op, which takes a list of Scalars.
inline at::Tensor onednn_product(const at::Tensor&, const at::Tensor&,
                                 const std::optional<at::Tensor>& = std::nullopt) {
  return {};
}
inline at::Tensor mm_with_dtype(at::ScalarType type, const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b, type);
}
#else
using OneDnnLinear = at::Tensor(const at::Tensor& x, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, c10::string_view activation,
                                c10::List<std::optional<at::Scalar>> scalars,
                                std::optional<c10::string_view> algorithm);

inline std::optional<c10::TypedOperatorHandle<OneDnnLinear>> find_onednn_linear() {
  const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  if (!op) return std::nullopt;
  return op->typed<OneDnnLinear>();
}

inline bool onednn_is_faster(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && a.scalar_type() == at::kFloat && a.size(0) >= 8 &&
         a.numel() * b.size(1) >= (int64_t{1} << 21) && (b.is_contiguous() || b.t().is_contiguous()) &&
         at::globalContext().userEnabledMkldnn();
}

// a [M, K] @ b [K, N] (+ bias [N]) by oneDNN if that is faster; else undefined. Copies an a that is not
// contiguous.
inline at::Tensor onednn_product(const at::Tensor& a, const at::Tensor& b,
                                 const std::optional<at::Tensor>& bias = std::nullopt) {
  static const auto linear = find_onednn_linear();
  if (!linear || !onednn_is_faster(a, b)) return {};
  return linear->call(a, b.t(), bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// For what neither oneDNN nor cuBLAS supports.
inline at::Tensor mm_with_dtype(at::ScalarType, const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b);
}
#endif

// ---- cuBLAS

// Not in a portable build, which must not link to the cuBLAS of one CUDA version.
#if defined(LLTM_EXT_WITH_CUDA) && !defined(LLTM_EXT_STABLE_ABI)
#define LLTM_EXT_WITH_CUBLAS
namespace matmul_detail {

// cuBLAS is column-major, so it sees the transposes of our matrices.
struct CublasMatrix {
  const void* data;
  cublasOperation_t op;
  int ld;
};

inline std::optional<CublasMatrix> cublas_matrix(const at::Tensor& x) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const auto is_dense = [](int64_t inner, int64_t inner_size, int64_t outer, int64_t outer_size) {
    return (inner == 1 || inner_size == 1) && (outer >= inner_size || outer_size == 1) &&
           std::max(outer, inner_size) <= std::numeric_limits<int>::max();
  };
  const auto ld = [](int64_t inner_size, int64_t outer, int64_t outer_size) {
    return static_cast<int>(outer_size == 1 ? inner_size : outer);
  };
  const void* data = x.const_data_ptr();
  if (is_dense(x.stride(1), columns, x.stride(0), rows)) {
    return CublasMatrix{data, CUBLAS_OP_N, ld(columns, x.stride(0), rows)};
  }
  if (is_dense(x.stride(0), rows, x.stride(1), columns)) {
    return CublasMatrix{data, CUBLAS_OP_T, ld(rows, x.stride(1), columns)};
  }
  return std::nullopt;
}

inline cudaDataType_t cuda_type(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return CUDA_R_16F;
    case at::kBFloat16:
      return CUDA_R_16BF;
    case at::kDouble:
      return CUDA_R_64F;
    default:
      return CUDA_R_32F;
  }
}

// A product of half types with its cuBLASLt algorithm, for one set of sizes and layouts. Keeping it saves the
// host a fifth of each call's time.
class CublasLtPlan {
 public:
  CublasLtPlan(const CublasMatrix& to, const CublasMatrix& a, const CublasMatrix& b, const at::Tensor& out,
               const at::Tensor& left, const at::Tensor& right)
      : key_(key(to, a, b, out, left, right)) {
    const uint64_t m = right.size(1), n = left.size(0), k = left.size(1);
    const cudaDataType_t type = cuda_type(left.scalar_type());
    check(cublasLtMatmulDescCreate(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    check(cublasLtMatmulDescSetAttribute(description_, CUBLASLT_MATMUL_DESC_TRANSA, &b.op, sizeof(b.op)));
    check(cublasLtMatmulDescSetAttribute(description_, CUBLASLT_MATMUL_DESC_TRANSB, &a.op, sizeof(a.op)));
    const bool trans_b = b.op == CUBLAS_OP_T, trans_a = a.op == CUBLAS_OP_T;
    check(cublasLtMatrixLayoutCreate(&b_, type, trans_b ? k : m, trans_b ? m : k, b.ld));
    check(cublasLtMatrixLayoutCreate(&a_, type, trans_a ? n : k, trans_a ? k : n, a.ld));
    check(cublasLtMatrixLayoutCreate(&to_, cuda_type(out.scalar_type()), m, n, to.ld));
    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference));
    const uint32_t alignment = kAlignment;  // the default is 256 bytes
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &alignment, sizeof(alignment)));
    }
    const size_t workspace_bytes = at::cuda::getCUDABlasLtWorkspaceSize();
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &workspace_bytes, sizeof(workspace_bytes)));
    int found = 0;
    cublasLtMatmulHeuristicResult_t result = {};
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(at::cuda::getCurrentCUDABlasLtHandle(), description_, b_, a_, to_, to_,
                                       preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    usable_ = status == CUBLAS_STATUS_SUCCESS && found == 1;
    algorithm_ = result.algo;
  }
  CublasLtPlan(const CublasLtPlan&) = delete;
  CublasLtPlan& operator=(const CublasLtPlan&) = delete;
  ~CublasLtPlan() {
    cublasLtMatrixLayoutDestroy(to_);
    cublasLtMatrixLayoutDestroy(a_);
    cublasLtMatrixLayoutDestroy(b_);
    cublasLtMatmulDescDestroy(description_);
  }

  using Key = std::array<int64_t, 10>;
  static Key key(const CublasMatrix& to, const CublasMatrix& a, const CublasMatrix& b, const at::Tensor& out,
                 const at::Tensor& left, const at::Tensor& right) {
    return {left.size(0),
            left.size(1),
            right.size(1),
            to.ld,
            a.ld,
            b.ld,
            a.op,
            b.op,
            static_cast<int64_t>(out.scalar_type()),
            static_cast<int64_t>(left.scalar_type())};
  }
  bool supports(const Key& key) const { return usable_ && key == key_; }
  static constexpr uint32_t kAlignment = 16;  // bytes
  static bool is_aligned(const CublasMatrix& x) {
    return reinterpret_cast<uintptr_t>(x.data) % kAlignment == 0;
  }

  void run(const CublasMatrix& a, const CublasMatrix& b, void* to, bool accumulate,
           cudaStream_t stream) const {
    const float alpha = 1, beta = accumulate;
    check(cublasLtMatmul(at::cuda::getCurrentCUDABlasLtHandle(), description_, &alpha, b.data, b_, a.data, a_,
                         &beta, to, to_, to, to_, &algorithm_, at::cuda::getCUDABlasLtWorkspace(),
                         at::cuda::getCUDABlasLtWorkspaceSize(), stream));
  }

 private:
  static void check(cublasStatus_t status) { TORCH_CUDABLAS_CHECK(status); }

  Key key_;
  bool usable_ = false;
  cublasLtMatmulDesc_t description_ = nullptr;
  cublasLtMatrixLayout_t to_ = nullptr, a_ = nullptr, b_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_;
};

// Returns false if cuBLAS does not support the layouts. `plan` is made when a product of half types comes a
// second time.
inline bool cublas(cublasHandle_t handle, const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                   bool accumulate, CublasLtPlan::Key& last, std::unique_ptr<CublasLtPlan>& plan) {
  const auto to = cublas_matrix(out), left = cublas_matrix(a), right = cublas_matrix(b);
  if (!to || to->op != CUBLAS_OP_N || !left || !right) return false;
  if (std::max({a.size(0), a.size(1), b.size(1)}) > std::numeric_limits<int>::max()) return false;
  if (a.element_size() == 2 && CublasLtPlan::is_aligned(*to) && CublasLtPlan::is_aligned(*left) &&
      CublasLtPlan::is_aligned(*right)) {
    const CublasLtPlan::Key key = CublasLtPlan::key(*to, *left, *right, out, a, b);
    if (key == last && !(plan && plan->supports(key))) {
      plan = std::make_unique<CublasLtPlan>(*to, *left, *right, out, a, b);
    }
    last = key;
    if (plan && plan->supports(key)) {
      plan->run(*left, *right, out.mutable_data_ptr(), accumulate, at::cuda::getCurrentCUDAStream());
      return true;
    }
  }
  const bool is_double = a.scalar_type() == at::kDouble;
  const float alpha = 1, beta = accumulate;
  const double alpha_double = 1, beta_double = accumulate;
  const auto scalar = [&](const float& x, const double& y) -> const void* {
    return is_double ? static_cast<const void*>(&y) : &x;
  };
  const cudaDataType_t type = cuda_type(a.scalar_type());
  TORCH_CUDABLAS_CHECK(cublasGemmEx(
      handle, right->op, left->op, static_cast<int>(b.size(1)), static_cast<int>(a.size(0)),
      static_cast<int>(a.size(1)), scalar(alpha, alpha_double), right->data, type, right->ld, left->data,
      type, left->ld, scalar(beta, beta_double), out.mutable_data_ptr(), cuda_type(out.scalar_type()), to->ld,
      is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  return true;
}

}  // namespace matmul_detail
#endif

// Whether torch's settings allow TF32 for products of x.
inline bool allows_tf32(const at::Tensor& x) {
#ifdef LLTM_EXT_WITH_CUDA
  if (x.is_cuda() && x.scalar_type() == at::kFloat) {
    const c10::DeviceGuard guard(x.device());
    cublasMath_t mode = CUBLAS_DEFAULT_MATH;
    TORCH_CUDABLAS_CHECK(cublasGetMathMode(at::cuda::getCurrentCUDABlasHandle(), &mode));
    return mode == CUBLAS_TF32_TENSOR_OP_MATH;
  }
#endif
  return false;
}

// ---- the products

// a [M, K] @ b [K, N] (+ bias [N])
inline at::Tensor affine(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  if (const at::Tensor product = onednn_product(a, b, bias); product.defined()) return product;
  return bias ? at::addmm(*bias, a, b) : at::mm(a, b);
}

// to [M, N] += a [K, M]^T @ b [K, N], a weight gradient; an undefined `to` becomes the product. oneDNN
// computes the transpose, because that copies b, the narrower operand.
inline void add_weight_gradient(at::Tensor& to, const at::Tensor& a, const at::Tensor& b) {
  if (const at::Tensor product = onednn_product(b.t(), a); product.defined()) {
    if (to.defined()) {
      to.add_(product.t());
    } else {
      to = product.t().contiguous();
    }
  } else if (to.defined()) {
    to.addmm_(a.t(), b);
  } else {
    to = at::mm(a.t(), b);
  }
}

// Matrix products on one device, on the stream that is current at construction.
class Matmul {
 public:
  explicit Matmul(const at::Tensor& like) {
#ifdef LLTM_EXT_WITH_CUBLAS
    if (like.is_cuda()) handle_ = at::cuda::getCurrentCUDABlasHandle();
#endif
  }

  // out [M, N] = a [M, K] @ b [K, N], or += if `accumulate`. `out` has the dtype of a and b, or float32.
  void operator()(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  bool accumulate = false) const {
    if (out.numel() == 0) return;
#ifdef LLTM_EXT_WITH_CUBLAS
    if (a.is_cuda() && a.size(1) > 0 && matmul_detail::cublas(handle_, out, a, b, accumulate, last_, plan_)) {
      return;
    }
#endif
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
#ifdef LLTM_EXT_WITH_CUBLAS
  cublasHandle_t handle_ = nullptr;
  mutable matmul_detail::CublasLtPlan::Key last_ = {};
  mutable std::unique_ptr<matmul_detail::CublasLtPlan> plan_;
#endif
};

}  // namespace lltm_ext
