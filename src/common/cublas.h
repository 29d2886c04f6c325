// Products by cuBLAS, with its math mode and its view of a matrix.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/Exceptions.h>
#include <cublas_v2.h>

#include <algorithm>
#include <limits>
#include <optional>

namespace lltm_ext {
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
  int64_t ld, batch_stride;

  // The alignment in bytes, at most 256: more makes no difference to cuBLAS.
  int64_t alignment() const { return 1 << std::min(8, __builtin_ctzll(reinterpret_cast<uintptr_t>(data))); }
};

// Of a matrix, or a batch of them; none if neither its rows nor its columns are dense.
inline std::optional<CublasMatrix> cublas_matrix(const at::Tensor& x) {
  const int64_t rows = x.size(-2), columns = x.size(-1);
  const auto is_dense = [](int64_t inner, int64_t inner_size, int64_t outer, int64_t outer_size) {
    return (inner == 1 || inner_size == 1) && (outer >= inner_size || outer_size == 1);
  };
  const auto ld = [](int64_t inner_size, int64_t outer, int64_t outer_size) {
    return outer_size == 1 ? inner_size : outer;
  };
  const void* data = x.const_data_ptr();
  const int64_t batch_stride = x.dim() == 3 && x.size(0) > 1 ? x.stride(0) : 0;
  if (is_dense(x.stride(-1), columns, x.stride(-2), rows)) {
    return CublasMatrix{data, CUBLAS_OP_N, ld(columns, x.stride(-2), rows), batch_stride};
  }
  if (is_dense(x.stride(-2), rows, x.stride(-1), columns)) {
    return CublasMatrix{data, CUBLAS_OP_T, ld(rows, x.stride(-1), columns), batch_stride};
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

// out = a @ b, or += if `accumulate`, by cuBLAS: `batch` products, of matrices of out's, a's and b's last two
// dimensions.
inline void gemm_ex(cublasHandle_t handle, bool tf32, const CublasMatrix& to, const CublasMatrix& left,
                    const CublasMatrix& right, const at::Tensor& out, const at::Tensor& a,
                    const at::Tensor& b, bool accumulate, int64_t batch = 1) {
  const bool is_double = a.scalar_type() == at::kDouble;
  const float alpha = 1, beta = accumulate;
  const double alpha_double = 1, beta_double = accumulate;
  const auto scalar = [&](const float& x, const double& y) -> const void* {
    return is_double ? static_cast<const void*>(&y) : &x;
  };
  const cudaDataType_t type = cuda_type(a.scalar_type()), out_type = cuda_type(out.scalar_type());
  const cublasComputeType_t compute = is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;
  // Parts of a split K are summed in float32, as by cuBLASLt.
  const int exact_sums = a.element_size() == 2 ? CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION : 0;
  const MathMode mode(handle, static_cast<cublasMath_t>(MathMode::with(tf32) | exact_sums));
  const int64_t m = b.size(-1), n = a.size(-2), k = a.size(-1);
  void* const data = out.mutable_data_ptr();
  if (std::max({m, n, k, to.ld, left.ld, right.ld}) > std::numeric_limits<int>::max()) {
    TORCH_CUDABLAS_CHECK(cublasGemmStridedBatchedEx_64(
        handle, right.op, left.op, m, n, k, scalar(alpha, alpha_double), right.data, type, right.ld,
        right.batch_stride, left.data, type, left.ld, left.batch_stride, scalar(beta, beta_double), data,
        out_type, to.ld, to.batch_stride, batch, compute, CUBLAS_GEMM_DEFAULT));
    return;
  }
  const auto narrow = [](int64_t x) { return static_cast<int>(x); };
  if (batch > 1) {
    TORCH_CUDABLAS_CHECK(cublasGemmStridedBatchedEx(
        handle, right.op, left.op, narrow(m), narrow(n), narrow(k), scalar(alpha, alpha_double), right.data,
        type, narrow(right.ld), right.batch_stride, left.data, type, narrow(left.ld), left.batch_stride,
        scalar(beta, beta_double), data, out_type, narrow(to.ld), to.batch_stride, narrow(batch), compute,
        CUBLAS_GEMM_DEFAULT));
    return;
  }
  TORCH_CUDABLAS_CHECK(cublasGemmEx(handle, right.op, left.op, narrow(m), narrow(n), narrow(k),
                                    scalar(alpha, alpha_double), right.data, type, narrow(right.ld),
                                    left.data, type, narrow(left.ld), scalar(beta, beta_double), data,
                                    out_type, narrow(to.ld), compute, CUBLAS_GEMM_DEFAULT));
}

}  // namespace matmul_detail
}  // namespace lltm_ext
