// Products by libraries that the portable library cannot call: oneDNN and cuBLASLt. It has
// src/stable/library_products.h in place of this file.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/mm.h>

#include <array>
#include <map>
#include <optional>

#include "common/onednn.h"
#ifdef LLTM_EXT_WITH_CUDA
#include <cublasLt.h>

#include "common/cublas.h"
#endif

namespace lltm_ext {

// ---- oneDNN

inline bool is_amd() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool found = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return found;
#else
  return false;
#endif
}

inline bool onednn_is_faster(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cpu() || a.scalar_type() != at::kFloat || !at::globalContext().userEnabledMkldnn()) return false;
  if (is_amd() && a.size(0) < 128) return false;  // MKL's kernels for AMD are up to 1.7 x as fast
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

// The product of operands that neither oneDNN nor cuBLAS supports.
inline at::Tensor mm_with_dtype(at::ScalarType, const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b);
}

// ---- cuBLASLt

#ifdef LLTM_EXT_WITH_CUDA
namespace matmul_detail {

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
  constexpr size_t kMost = 1024;  // sequences of ever new lengths would else fill the memory
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

// Whether torch's ops do as well as cuBLAS.
inline bool torch_multiplies(cublasHandle_t, at::ScalarType, bool) { return false; }

}  // namespace matmul_detail
#endif

}  // namespace lltm_ext
