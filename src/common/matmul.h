// Matrix products for ops that need many small ones.
//
// On CUDA cuBLAS returns a product of half types in float32, which at::mm rounds: over thousands of steps
// that rounding is the larger part of the error. On the CPU at::mm multiplies float32 by MKL; for larger
// products oneDNN, called through torch.compile's op, is 1.4 to 2.3 times as fast (docs/design/archive.md).
//
// Float32 on CUDA may be TF32 where nn.LSTM may, by cuDNN's switch for RNNs. at::mm follows another switch,
// which other threads share.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <optional>

#ifndef LLTM_EXT_STABLE_ABI
#include "common/onednn.h"
#endif
#ifdef LLTM_EXT_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/Exceptions.h>
#include <cublasLt.h>
#include <cublas_v2.h>
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
inline bool onednn_is_faster(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cpu() || a.scalar_type() != at::kFloat || !at::globalContext().userEnabledMkldnn()) return false;
  // MKL reads large weights slowly for few rows.
  const int64_t multiplications = a.numel() * b.size(1);
  const bool is_large =
      b.numel() >= (1 << 18) ? multiplications >= (1 << 20) : a.size(0) >= 8 && multiplications >= (1 << 21);
  return is_large && (b.is_contiguous() || b.t().is_contiguous());
}

// a [M, K] @ b [K, N] (+ bias [N]) by oneDNN if that is faster; else undefined. Copies an a that is not
// contiguous.
inline at::Tensor onednn_product(const at::Tensor& a, const at::Tensor& b,
                                 const std::optional<at::Tensor>& bias = std::nullopt) {
  return onednn_is_faster(a, b) ? onednn_linear(a, b, bias) : at::Tensor();
}

// For what neither oneDNN nor cuBLAS supports.
inline at::Tensor mm_with_dtype(at::ScalarType, const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b);
}
#endif

// ---- cuBLAS

// Whether products of x may round float32 to TF32, which is nn.LSTM's own switch.
inline bool allows_tf32(const at::Tensor& x) {
  return x.is_cuda() && x.scalar_type() == at::kFloat &&
         at::globalContext().allowTF32CuDNN(at::Float32Op::RNN);
}

#ifdef LLTM_EXT_WITH_CUDA
namespace matmul_detail {

// Sets the math mode of this thread's handle, until the destructor restores torch's.
class MathMode {
 public:
  MathMode(cublasHandle_t handle, cublasMath_t mode) : handle_(handle), before_(of(handle)) {
    if (mode != before_) TORCH_CUDABLAS_CHECK(cublasSetMathMode(handle, mode));
  }
  MathMode(const MathMode&) = delete;
  MathMode& operator=(const MathMode&) = delete;
  ~MathMode() { cublasSetMathMode(handle_, before_); }

  static cublasMath_t of(cublasHandle_t handle) {
    cublasMath_t mode = CUBLAS_DEFAULT_MATH;
    TORCH_CUDABLAS_CHECK(cublasGetMathMode(handle, &mode));
    return mode;
  }
  static cublasMath_t with(bool tf32) { return tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH; }

 private:
  cublasHandle_t handle_;
  cublasMath_t before_;
};

// cuBLAS is column-major, so it sees the transposes of our matrices.
struct CublasMatrix {
  const void* data;
  cublasOperation_t op;
  int ld;

  // In bytes, at most 256: more makes no difference to cuBLAS.
  int64_t alignment() const { return 1 << std::min(8, __builtin_ctzll(reinterpret_cast<uintptr_t>(data))); }
};

inline std::optional<CublasMatrix> cublas_matrix(const at::Tensor& x) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const auto is_dense = [](int64_t inner, int64_t inner_size, int64_t outer, int64_t outer_size) {
    constexpr int64_t kMax = std::numeric_limits<int>::max();
    return (inner == 1 || inner_size == 1) && inner_size <= kMax &&
           ((outer >= inner_size && outer <= kMax) || outer_size == 1);
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

// A portable build must not link to the cuBLAS of one CUDA version: of cuBLASLt it calls nothing, and of
// cuBLAS what src/stable/ops.h declares.
#ifndef LLTM_EXT_STABLE_ABI
// out = a @ b by cuBLASLt, with the algorithm that it recommends for these sizes and layouts. To ask for it
// takes the host about as long as a launch, so plans are kept (kept_plan).
class CublasLtPlan {
 public:
  // Everything that the recommendation depends on.
  struct Problem {
    CublasMatrix to, a, b;
    int64_t rows, inner, columns;
    at::ScalarType type, out_type;
    bool tf32, has_bias;

    auto key() const {
      std::array<int64_t, 16> key = {rows,
                                     inner,
                                     columns,
                                     static_cast<int64_t>(type),
                                     static_cast<int64_t>(out_type),
                                     tf32,
                                     has_bias,
                                     at::cuda::current_device()};
      size_t i = 8;
      for (const CublasMatrix& x : {to, a, b}) {
        key[i++] = x.ld;
        key[i++] = 2 * x.alignment() + (x.op == CUBLAS_OP_T);
      }
      return key;
    }
  };

  explicit CublasLtPlan(const Problem& p) {
    const uint64_t m = p.columns, n = p.rows, k = p.inner;
    const cudaDataType_t type = cuda_type(p.type);
    check(cublasLtMatmulDescCreate(&description_, p.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                   CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.op);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.op);
    if (p.has_bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    const bool trans_b = p.b.op == CUBLAS_OP_T, trans_a = p.a.op == CUBLAS_OP_T;
    check(cublasLtMatrixLayoutCreate(&b_, type, trans_b ? k : m, trans_b ? m : k, p.b.ld));
    check(cublasLtMatrixLayoutCreate(&a_, type, trans_a ? n : k, trans_a ? k : n, p.a.ld));
    check(cublasLtMatrixLayoutCreate(&to_, cuda_type(p.out_type), m, n, p.to.ld));
    choose_algorithm(p);
  }
  CublasLtPlan(const CublasLtPlan&) = delete;
  CublasLtPlan& operator=(const CublasLtPlan&) = delete;
  ~CublasLtPlan() {
    cublasLtMatrixLayoutDestroy(to_);
    cublasLtMatrixLayoutDestroy(a_);
    cublasLtMatrixLayoutDestroy(b_);
    cublasLtMatmulDescDestroy(description_);
  }

  bool is_usable() const { return usable_; }

  // A bias [columns] is added to every row.
  void run(const Problem& p, void* out, const void* bias, bool accumulate) {
    if (bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    const float alpha = 1, beta = accumulate;
    check(cublasLtMatmul(at::cuda::getCurrentCUDABlasLtHandle(), description_, &alpha, p.b.data, b_, p.a.data,
                         a_, &beta, out, to_, out, to_, &algorithm_, at::cuda::getCUDABlasLtWorkspace(),
                         at::cuda::getCUDABlasLtWorkspaceSize(), at::cuda::getCurrentCUDAStream()));
  }

 private:
  static void check(cublasStatus_t status) { TORCH_CUDABLAS_CHECK(status); }
  template <typename X>
  void set(cublasLtMatmulDescAttributes_t attribute, const X& value) {
    check(cublasLtMatmulDescSetAttribute(description_, attribute, &value, sizeof(value)));
  }

  void choose_algorithm(const Problem& p) {
    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    // cuBLAS's a is our b.
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(p.b.alignment()));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(p.a.alignment()));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(p.to.alignment()));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(p.to.alignment()));
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, at::cuda::getCUDABlasLtWorkspaceSize());
    if (p.type != at::kFloat) {  // parts of a split K are summed in float32, whatever torch's settings allow
      prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    }
    int found = 0;
    cublasLtMatmulHeuristicResult_t result = {};
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(at::cuda::getCurrentCUDABlasLtHandle(), description_, b_, a_, to_, to_,
                                       preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    usable_ = status == CUBLAS_STATUS_SUCCESS && found == 1;
    algorithm_ = result.algo;
  }

  bool usable_ = false;
  cublasLtMatmulDesc_t description_ = nullptr;
  cublasLtMatrixLayout_t to_ = nullptr, a_ = nullptr, b_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_;
};

// This thread's plan of a problem.
inline CublasLtPlan& kept_plan(const CublasLtPlan::Problem& problem) {
  thread_local std::map<decltype(problem.key()), CublasLtPlan> plans;
  constexpr size_t kMost = 1024;  // else sequences of ever new lengths would fill the memory
  if (plans.size() >= kMost) plans.clear();
  return plans.try_emplace(problem.key(), problem).first->second;
}

// out = a @ b, or += if `accumulate`, plus bias [N] if there is one. Returns false if cuBLASLt can't.
inline bool cublas_lt(bool tf32, const CublasMatrix& to, const CublasMatrix& left, const CublasMatrix& right,
                      const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const void* bias,
                      bool accumulate) {
  if (a.scalar_type() == at::kDouble || reinterpret_cast<uintptr_t>(bias) % 16 != 0) return false;
  // For larger products of float32 cuBLAS itself chooses better algorithms, up to 1.26 times as fast.
  const bool is_large = a.numel() * b.size(1) >= int64_t{1} << 27;
  if (a.scalar_type() == at::kFloat && !bias && is_large) return false;
  // For rows of half types that are not at multiples of 16 bytes, it recommends a kernel that does not split
  // a long sum: a weight's gradient took 1.4 ms for cuBLAS's 22 us.
  const auto is_aligned = [&](const CublasMatrix& x, const at::Tensor& of) {
    return of.element_size() != 2 || x.ld % 8 == 0;
  };
  if (!bias && !(is_aligned(to, out) && is_aligned(left, a) && is_aligned(right, b))) return false;
  const CublasLtPlan::Problem problem = {to,        left,           right,           a.size(0),
                                         a.size(1), b.size(1),      a.scalar_type(), out.scalar_type(),
                                         tf32,      bias != nullptr};
  CublasLtPlan& plan = kept_plan(problem);
  if (plan.is_usable()) plan.run(problem, out.mutable_data_ptr(), bias, accumulate);
  return plan.is_usable();
}
#endif

inline void gemm_ex(cublasHandle_t handle, bool tf32, const CublasMatrix& to, const CublasMatrix& left,
                    const CublasMatrix& right, const at::Tensor& out, const at::Tensor& a,
                    const at::Tensor& b, bool accumulate) {
  const bool is_double = a.scalar_type() == at::kDouble;
  const float alpha = 1, beta = accumulate;
  const double alpha_double = 1, beta_double = accumulate;
  const auto scalar = [&](const float& x, const double& y) -> const void* {
    return is_double ? static_cast<const void*>(&y) : &x;
  };
  const cudaDataType_t type = cuda_type(a.scalar_type());
  // Parts of a split K are summed in float32, as by cuBLASLt.
  const int exact_sums = a.element_size() == 2 ? CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION : 0;
  const MathMode mode(handle, static_cast<cublasMath_t>(MathMode::with(tf32) | exact_sums));
  TORCH_CUDABLAS_CHECK(cublasGemmEx(
      handle, right.op, left.op, static_cast<int>(b.size(1)), static_cast<int>(a.size(0)),
      static_cast<int>(a.size(1)), scalar(alpha, alpha_double), right.data, type, right.ld, left.data, type,
      left.ld, scalar(beta, beta_double), out.mutable_data_ptr(), cuda_type(out.scalar_type()), to.ld,
      is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

}  // namespace matmul_detail
#endif

// ---- the products

// a [M, K] @ b [K, N] (+ bias [N]), as torch's settings say
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
#ifdef LLTM_EXT_STABLE_ABI
    const bool torch_does = matmul_detail::MathMode::of(handle_) == matmul_detail::MathMode::with(true);
    by_torch_ = like.scalar_type() != at::kFloat || tf32_ == torch_does;
#endif
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
        bias && widens ? bias->to(type) : bias;  // cuBLASLt wants that of `out`
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
  // Returns false if torch's ops can do it, or must. A bias only where cuBLASLt adds it.
  bool cublas(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate,
              const std::optional<at::Tensor>& bias = std::nullopt) const {
    if (!a.is_cuda() || by_torch_ || out.numel() == 0 || a.size(1) == 0) return false;
    if (std::max({a.size(0), a.size(1), b.size(1)}) > std::numeric_limits<int>::max()) return false;
    const auto to = matmul_detail::cublas_matrix(out), left = matmul_detail::cublas_matrix(a),
               right = matmul_detail::cublas_matrix(b);
    if (!to || to->op != CUBLAS_OP_N || (bias && !bias->is_contiguous())) return false;
    if (!left || !right) return cublas(out, a.contiguous(), b.contiguous(), accumulate, bias);
#ifndef LLTM_EXT_STABLE_ABI
    const void* added = bias ? bias->const_data_ptr() : nullptr;
    if (matmul_detail::cublas_lt(tf32_, *to, *left, *right, out, a, b, added, accumulate)) return true;
#endif
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

}  // namespace lltm_ext
