// Products of matrices for ops that need many small ones.
//
// On CUDA cuBLAS itself gives the product of half types in float32, which at::mm rounds: over thousands of
// steps that is the larger part of the error. On the CPU at::mm multiplies float32 by MKL; from some size on
// oneDNN, to which torch.compile goes through the op below, is 1.4 to 2.3 times as fast.
// (docs/design/archive.md has the figures.)
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
// Out of the stable ABI's reach: the op takes a list of Scalars.
inline at::Tensor onednn_product(const at::Tensor&, const at::Tensor&,
                                 const std::optional<at::Tensor>& = std::nullopt) {
  return {};
}
inline at::Tensor product_in(at::ScalarType type, const at::Tensor& a, const at::Tensor& b) {
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

inline bool onednn_pays(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && a.scalar_type() == at::kFloat && a.size(0) >= 8 &&
         a.numel() * b.size(1) >= (int64_t{1} << 21) && (b.is_contiguous() || b.t().is_contiguous()) &&
         at::globalContext().userEnabledMkldnn();
}

// a [M, K] @ b [K, N] (+ bias [N]) by oneDNN where that pays; else undefined. It copies an a that is not
// contiguous.
inline at::Tensor onednn_product(const at::Tensor& a, const at::Tensor& b,
                                 const std::optional<at::Tensor>& bias = std::nullopt) {
  static const auto linear = find_onednn_linear();
  if (!linear || !onednn_pays(a, b)) return {};
  return linear->call(a, b.t(), bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// For what neither oneDNN nor cuBLAS takes.
inline at::Tensor product_in(at::ScalarType, const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b);
}
#endif

// ---- cuBLAS

// Not in a portable build: linked to one cuBLAS, the library would not be for every CUDA.
#if defined(LLTM_EXT_WITH_CUDA) && !defined(LLTM_EXT_STABLE_ABI)
#define LLTM_EXT_WITH_CUBLAS
namespace matmul_detail {

// A matrix as cuBLAS sees it, whose matrices lie column by column: ours are their transposes.
struct Operand {
  const void* data;
  cublasOperation_t op;
  int ld;
};

inline std::optional<Operand> operand(const at::Tensor& x) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const auto lies = [](int64_t inner, int64_t inner_size, int64_t outer, int64_t outer_size) {
    return (inner == 1 || inner_size == 1) && (outer >= inner_size || outer_size == 1) &&
           std::max(outer, inner_size) <= std::numeric_limits<int>::max();
  };
  const auto ld = [](int64_t inner_size, int64_t outer, int64_t outer_size) {
    return static_cast<int>(outer_size == 1 ? inner_size : outer);
  };
  const void* data = x.const_data_ptr();
  if (lies(x.stride(1), columns, x.stride(0), rows)) {
    return Operand{data, CUBLAS_OP_N, ld(columns, x.stride(0), rows)};
  }
  if (lies(x.stride(0), rows, x.stride(1), columns)) {
    return Operand{data, CUBLAS_OP_T, ld(rows, x.stride(1), columns)};
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

// A product of half types of certain sizes and layouts, as cuBLASLt runs it: what is chosen for it is chosen
// once, which spares the host a fifth of each call's time.
class Chosen {
 public:
  Chosen(const Operand& to, const Operand& a, const Operand& b, const at::Tensor& out, const at::Tensor& left,
         const at::Tensor& right)
      : key_(key(to, a, b, out, left, right)) {
    const uint64_t m = right.size(1), n = left.size(0), k = left.size(1);
    const cudaDataType_t type = cuda_type(left.scalar_type());
    check(cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    check(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSA, &b.op, sizeof(b.op)));
    check(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSB, &a.op, sizeof(a.op)));
    const bool swap_b = b.op == CUBLAS_OP_T, swap_a = a.op == CUBLAS_OP_T;
    check(cublasLtMatrixLayoutCreate(&b_, type, swap_b ? k : m, swap_b ? m : k, b.ld));
    check(cublasLtMatrixLayoutCreate(&a_, type, swap_a ? n : k, swap_a ? k : n, a.ld));
    check(cublasLtMatrixLayoutCreate(&to_, cuda_type(out.scalar_type()), m, n, to.ld));
    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference));
    const uint32_t alignment = kAlignment;  // 256 bytes if it is not said
    for (const auto operand :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      check(cublasLtMatmulPreferenceSetAttribute(preference, operand, &alignment, sizeof(alignment)));
    }
    const size_t room = at::cuda::getCUDABlasLtWorkspaceSize();
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room,
                                               sizeof(room)));
    int found = 0;
    cublasLtMatmulHeuristicResult_t result = {};
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        at::cuda::getCurrentCUDABlasLtHandle(), product_, b_, a_, to_, to_, preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    usable_ = status == CUBLAS_STATUS_SUCCESS && found == 1;
    algorithm_ = result.algo;
  }
  Chosen(const Chosen&) = delete;
  Chosen& operator=(const Chosen&) = delete;
  ~Chosen() {
    cublasLtMatrixLayoutDestroy(to_);
    cublasLtMatrixLayoutDestroy(a_);
    cublasLtMatrixLayoutDestroy(b_);
    cublasLtMatmulDescDestroy(product_);
  }

  using Key = std::array<int64_t, 10>;
  static Key key(const Operand& to, const Operand& a, const Operand& b, const at::Tensor& out,
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
  bool is_for(const Key& key) const { return usable_ && key == key_; }
  static constexpr uint32_t kAlignment = 16;  // bytes, of the operands that it takes
  static bool is_aligned(const Operand& x) { return reinterpret_cast<uintptr_t>(x.data) % kAlignment == 0; }

  void run(const Operand& a, const Operand& b, void* to, bool accumulate, cudaStream_t stream) const {
    const float one = 1, some = accumulate;
    check(cublasLtMatmul(at::cuda::getCurrentCUDABlasLtHandle(), product_, &one, b.data, b_, a.data, a_,
                         &some, to, to_, to, to_, &algorithm_, at::cuda::getCUDABlasLtWorkspace(),
                         at::cuda::getCUDABlasLtWorkspaceSize(), stream));
  }

 private:
  static void check(cublasStatus_t status) { TORCH_CUDABLAS_CHECK(status); }

  Key key_;
  bool usable_ = false;
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t to_ = nullptr, a_ = nullptr, b_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_;
};

// False for what cuBLAS can't take as it lies. `chosen` is filled when a product of half types comes a second
// time.
inline bool cublas(cublasHandle_t handle, const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                   bool accumulate, Chosen::Key& last, std::unique_ptr<Chosen>& chosen) {
  const auto to = operand(out), left = operand(a), right = operand(b);
  if (!to || to->op != CUBLAS_OP_N || !left || !right) return false;
  if (std::max({a.size(0), a.size(1), b.size(1)}) > std::numeric_limits<int>::max()) return false;
  if (a.element_size() == 2 && Chosen::is_aligned(*to) && Chosen::is_aligned(*left) &&
      Chosen::is_aligned(*right)) {
    const Chosen::Key key = Chosen::key(*to, *left, *right, out, a, b);
    if (key == last && !(chosen && chosen->is_for(key))) {
      chosen = std::make_unique<Chosen>(*to, *left, *right, out, a, b);
    }
    last = key;
    if (chosen && chosen->is_for(key)) {
      chosen->run(*left, *right, out.mutable_data_ptr(), accumulate, at::cuda::getCurrentCUDAStream());
      return true;
    }
  }
  const bool is_double = a.scalar_type() == at::kDouble;
  const float one = 1, some = accumulate;
  const double one_double = 1, some_double = accumulate;
  const auto scalar = [&](const float& x, const double& y) -> const void* {
    return is_double ? static_cast<const void*>(&y) : &x;
  };
  const cudaDataType_t type = cuda_type(a.scalar_type());
  TORCH_CUDABLAS_CHECK(cublasGemmEx(
      handle, right->op, left->op, static_cast<int>(b.size(1)), static_cast<int>(a.size(0)),
      static_cast<int>(a.size(1)), scalar(one, one_double), right->data, type, right->ld, left->data, type,
      left->ld, scalar(some, some_double), out.mutable_data_ptr(), cuda_type(out.scalar_type()), to->ld,
      is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  return true;
}

}  // namespace matmul_detail
#endif

// Whether torch's settings let products of x be rounded to TF32.
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

// to [M, N] += a [K, M]^T @ b [K, N], as weights get their gradient; if it is undefined yet, that product.
// oneDNN gives the transposed product, for which it copies b: that is narrower.
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

// Multiplies matrices on one device, on the stream that is current when this is made.
class Matmul {
 public:
  explicit Matmul(const at::Tensor& like) {
#ifdef LLTM_EXT_WITH_CUBLAS
    if (like.is_cuda()) handle_ = at::cuda::getCurrentCUDABlasHandle();
#endif
  }

  // out [M, N] = a [M, K] @ b [K, N], or that added to it. `out` has the type of a and b, or float32.
  void operator()(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  bool accumulate = false) const {
    if (out.numel() == 0) return;
#ifdef LLTM_EXT_WITH_CUBLAS
    if (a.is_cuda() && a.size(1) > 0 &&
        matmul_detail::cublas(handle_, out, a, b, accumulate, last_, chosen_)) {
      return;
    }
#endif
    at::Tensor to = out;
    if (const at::Tensor product = onednn_product(a, b); product.defined()) {
      accumulate ? to.add_(product) : to.copy_(product);
    } else if (out.scalar_type() != a.scalar_type()) {
      const at::Tensor wide = product_in(out.scalar_type(), a, b);
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
  mutable matmul_detail::Chosen::Key last_ = {};
  mutable std::unique_ptr<matmul_detail::Chosen> chosen_;
#endif
};

}  // namespace lltm_ext
