// torch's functions that the bindings call, on the stable C ABI. Ops with a Scalar in their schema cannot be
// called by name, so sums and products use the C functions of compiled models (AOTInductor).
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <utility>

#include "stable/tensor.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cublas_v2.h>
#include <cuda_runtime.h>
#endif

extern "C" {
AOTITorchError aoti_torch_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b);
AOTITorchError aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle a,
                                        AtenTensorHandle b, double beta, double alpha);
#ifdef LLTM_EXT_WITH_CUDA
// Weak, so that the library also loads with a torch without CUDA and does not link cuBLAS itself.
__attribute__((weak)) AOTITorchError aoti_torch_cuda_mm_out(AtenTensorHandle out, AtenTensorHandle a,
                                                            AtenTensorHandle b);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_addmm_out(AtenTensorHandle out, AtenTensorHandle x,
                                                               AtenTensorHandle a, AtenTensorHandle b,
                                                               double beta, double alpha);
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
__attribute__((weak)) AOTITorchError torch_get_current_cuda_blas_handle(void** handle);
__attribute__((weak)) cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode);
__attribute__((weak)) cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
__attribute__((weak)) cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a,
                                                  cublasOperation_t op_b, int m, int n, int k,
                                                  const void* alpha, const void* a, cudaDataType a_type,
                                                  int a_ld, const void* b, cudaDataType b_type, int b_ld,
                                                  const void* beta, void* c, cudaDataType c_type, int c_ld,
                                                  cublasComputeType_t compute, cublasGemmAlgo_t algorithm);
__attribute__((weak)) cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
    const void* alpha, const void* a, cudaDataType a_type, int a_ld, long long a_stride, const void* b,
    cudaDataType b_type, int b_ld, long long b_stride, const void* beta, void* c, cudaDataType c_type,
    int c_ld, long long c_stride, int batch, cublasComputeType_t compute, cublasGemmAlgo_t algorithm);
__attribute__((weak)) cublasStatus_t cublasGemmStridedBatchedEx_64(
    cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m, int64_t n, int64_t k,
    const void* alpha, const void* a, cudaDataType a_type, int64_t a_ld, long long a_stride, const void* b,
    cudaDataType b_type, int64_t b_ld, long long b_stride, const void* beta, void* c, cudaDataType c_type,
    int64_t c_ld, long long c_stride, int64_t batch, cublasComputeType_t compute, cublasGemmAlgo_t algorithm);
#endif
}

namespace stable_torch {

// ---- Creation

inline Tensor empty_strided_symint(IntArrayRef sizes, IntArrayRef strides, const TensorOptions& options) {
  using ::torch::stable::detail::from, ::torch::stable::detail::to;
  return Tensor::made_by(options.pinned ? aoti_torch_empty_strided_pinned : aoti_torch_empty_strided,
                         static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                         to<int32_t>(from(options.scalar_type)), to<int32_t>(from(options.device.type())),
                         options.device.index());
}
inline Tensor empty(IntArrayRef sizes, const TensorOptions& options) {
  return empty_strided_symint(sizes, contiguous_strides(sizes), options);
}
inline Tensor empty_symint(IntArrayRef sizes, const TensorOptions& options) { return empty(sizes, options); }

inline Tensor zeros(IntArrayRef sizes, const TensorOptions& options) { return empty(sizes, options).zero_(); }

inline Tensor empty_like(const Tensor& x, std::optional<MemoryFormat> format = std::nullopt) {
  if (format == MemoryFormat::Contiguous) return empty(x.sizes(), x.options());
  if (!format && x.is_non_overlapping_and_dense())
    return empty_strided_symint(x.sizes(), x.strides(), x.options());
  return call_op<Tensor>("aten::empty_like", "", x, std::optional<ScalarType>(), std::optional<Layout>(),
                         std::optional<Device>(), std::optional<bool>(), format);
}

inline Tensor cat(const std::vector<Tensor>& tensors, int64_t dim = 0) {
  return call_op<Tensor>("aten::cat", "", tensors, dim);
}
inline Tensor stack(const std::vector<Tensor>& tensors) {
  return call_op<Tensor>("aten::stack", "", tensors, int64_t{0});
}

// ---- Sums and products

// a - alpha * b
inline Tensor sub(const Tensor& a, const Tensor& b, double alpha) {
  return Tensor::made_by(aoti_torch_aten_subtract_Tensor, a.get(), b.get(), alpha);
}
inline Tensor operator+(const Tensor& a, const Tensor& b) { return sub(a, b, -1); }
inline Tensor Tensor::add_(const Tensor& x) const { return copy_(*this + x); }

#ifdef LLTM_EXT_WITH_CUDA
#define LLTM_EXT_AOTI(op, x) ((x).is_cuda() ? aoti_torch_cuda_##op : aoti_torch_cpu_##op)
#else
#define LLTM_EXT_AOTI(op, x) aoti_torch_cpu_##op
#endif

inline void mm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(LLTM_EXT_AOTI(mm_out, a)(out.get(), a.get(), b.get()));
}

// out = x + a @ b
inline void addmm_out(const Tensor& out, const Tensor& x, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(LLTM_EXT_AOTI(addmm_out, a)(out.get(), x.get(), a.get(), b.get(), 1., 1.));
}
inline Tensor Tensor::addmm_(const Tensor& a, const Tensor& b) const {
  addmm_out(*this, *this, a, b);
  return *this;
}

inline Tensor mm(const Tensor& a, const Tensor& b) {
  const Tensor product = empty({a.size(0), b.size(1)}, a.options());
  mm_out(product, a, b);
  return product;
}
// Multiplies half types into float32, on CUDA without an intermediate rounding.
inline Tensor mm(const Tensor& a, const Tensor& b, ScalarType type) {
  if (a.is_cuda()) return call_op<Tensor>("aten::mm", "dtype", a, b, type);
  return mm(a, b).to(type);
}
inline Tensor addmm(const Tensor& x, const Tensor& a, const Tensor& b) {
  const Tensor sum = empty({a.size(0), b.size(1)}, a.options());
  addmm_out(sum, x, a, b);
  return sum;
}

inline void sum_out(const Tensor& out, const Tensor& x, int64_t dim) { out.copy_(x.sum(dim)); }

inline ScalarType toOpMathType(ScalarType type) { return type == kHalf || type == kBFloat16 ? kFloat : type; }

// The ABI does not have torch's settings: _portable_rules.py asks for them.
enum class Float32Op { RNN };
struct Context {
  bool allowTF32CuDNN(Float32Op) const { return call_op<bool>("lltm_ext::rnn_allows_tf32", ""); }
};
inline Context globalContext() { return {}; }

// ---- Threads, devices

template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  ::torch::stable::parallel_for(begin, end, grain, f);
}

#ifdef LLTM_EXT_WITH_CUDA
namespace cuda {

inline cudaStream_t getCurrentCUDAStream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline cublasHandle_t getCurrentCUDABlasHandle() {
  void* handle = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
  return static_cast<cublasHandle_t>(handle);
}
inline int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

#define C10_CUDA_CHECK(call)                                                                      \
  do {                                                                                            \
    const cudaError_t error = call;                                                               \
    TORCH_CHECK(error == cudaSuccess, "lltm_ext: " #call " failed: ", cudaGetErrorString(error)); \
  } while (false)
#define TORCH_CUDABLAS_CHECK(call) TORCH_CHECK((call) == CUBLAS_STATUS_SUCCESS, #call " failed")

inline const cudaDeviceProp* getDeviceProperties(int device) {
  static const std::vector<cudaDeviceProp> all = [] {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    TORCH_CHECK(error == cudaSuccess, "lltm_ext: no CUDA device is usable: ", cudaGetErrorString(error));
    std::vector<cudaDeviceProp> properties(count);
    for (int i = 0; i < count; ++i) cudaGetDeviceProperties(&properties[i], i);
    return properties;
  }();
  return &all.at(device);
}

enum class CaptureStatus { None, Active };

inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  int device = 0;
  cudaGetDevice(&device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(getCurrentCUDAStream(device), &status);
  return status == cudaStreamCaptureStatusNone ? CaptureStatus::None : CaptureStatus::Active;
}

}  // namespace cuda
#endif

// It does nothing for the CPU.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Device& device) {
    if (device.is_cuda()) guard_.emplace(device.index());
  }

 private:
  std::optional<::torch::stable::accelerator::DeviceGuard> guard_;
};

// Disables gradients only, which is all that the ABI offers. lltm_ext/_portable_rules.py disables autocast.
struct AutoDispatchBelowADInplaceOrView {
  AutoDispatchBelowADInplaceOrView() : enabled(aoti_torch_grad_mode_is_enabled()) {
    aoti_torch_grad_mode_set_enabled(false);
  }
  ~AutoDispatchBelowADInplaceOrView() { aoti_torch_grad_mode_set_enabled(enabled); }
  AutoDispatchBelowADInplaceOrView(const AutoDispatchBelowADInplaceOrView&) = delete;
  const bool enabled;
};
constexpr struct {
} autocast_dispatch_keyset;
namespace impl {
struct ExcludeDispatchKeyGuard {
  template <typename Keys>
  ExcludeDispatchKeyGuard(const Keys&) {}
};
}  // namespace impl

// ---- Memory overlap

// The byte range [first, last) that the elements span.
inline std::pair<const char*, const char*> extent_of(const Tensor& x) {
  int64_t last = 0;
  for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
  const char* first = static_cast<const char*>(x.const_data_ptr());
  return {first, first + (last + 1) * static_cast<int64_t>(x.element_size())};
}

enum class MemOverlap { No, Yes };

inline MemOverlap has_internal_overlap(const Tensor& x) {
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1 && x.stride(d) == 0) return MemOverlap::Yes;
  }
  return MemOverlap::No;
}

enum class MemOverlapStatus { Full, Partial, No, TooHard };

inline MemOverlapStatus get_overlap_status(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return MemOverlapStatus::No;
  if (!a.is_non_overlapping_and_dense() || !b.is_non_overlapping_and_dense())
    return MemOverlapStatus::TooHard;
  const auto [a_first, a_last] = extent_of(a);
  const auto [b_first, b_last] = extent_of(b);
  if (a_first == b_first && a_last == b_last && a.strides() == b.strides()) return MemOverlapStatus::Full;
  return a_last <= b_first || b_last <= a_first ? MemOverlapStatus::No : MemOverlapStatus::Partial;
}

// Returns the sizes to which both can be broadcast.
inline DimVector infer_size_symdimvector(IntArrayRef a, IntArrayRef b) {
  if (a.size() < b.size()) std::swap(a, b);
  DimVector sizes(a.begin(), a.end());
  const size_t more = a.size() - b.size();
  for (size_t d = 0; d < b.size(); ++d) {
    int64_t& size = sizes[more + d];
    TORCH_CHECK(size == b[d] || size == 1 || b[d] == 1, "sizes ", a, " and ", b, " differ");
    if (size == 1) size = b[d];
  }
  return sizes;
}

namespace native {
// The common type of floating-point tensors. Those with dimensions decide, if there are any.
inline ScalarType result_type(TensorList tensors) {
  std::optional<ScalarType> type;
  for (const bool with_dims : {true, false}) {
    if (type) break;
    for (const Tensor& x : tensors) {
      if ((x.dim() > 0) != with_dims || type == x.scalar_type()) continue;
      const bool is_double = x.scalar_type() == kDouble || type == kDouble;
      type = !type ? x.scalar_type() : is_double ? kDouble : kFloat;
    }
  }
  return *type;
}

inline void resize_output_symint(const Tensor& x, IntArrayRef sizes) {
  if (x.sizes() == sizes) return;
  call_op<Tensor>("aten::resize_", "", x, sizes, std::optional<MemoryFormat>());
}
}  // namespace native

// Broadcasts the operands of an elementwise op to the first one, the output, and merges dimensions where all
// strides allow it. The output's fastest dimension comes first.
class TensorIterator {
 public:
  explicit TensorIterator(const std::vector<Tensor>& operands) : operands_(operands) {
    const Tensor& output = operands_[0];
    std::vector<int64_t> order;
    for (int64_t d = output.dim(); d-- > 0;) {
      if (output.size(d) != 1) order.push_back(d);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return output.stride(a) < output.stride(b); });
    strides_.resize(operands_.size());
    for (const int64_t d : order) add_dimension(d);
  }

  int ndim() const { return static_cast<int>(shape_.size()); }
  int ntensors() const { return static_cast<int>(operands_.size()); }
  const DimVector& shape() const { return shape_; }
  const DimVector& strides(int operand) const { return strides_[operand]; }  // in bytes
  int64_t element_size(int operand) const { return static_cast<int64_t>(operands_[operand].element_size()); }
  void* data_ptr(int operand) const { return const_cast<void*>(operands_[operand].const_data_ptr()); }

 private:
  int64_t stride_in(int operand, int64_t d) const {
    const Tensor& x = operands_[operand];
    const int64_t own_d = d - operands_[0].dim() + x.dim();
    if (own_d < 0) return 0;
    TORCH_CHECK(x.size(own_d) == 1 || x.size(own_d) == operands_[0].size(d), "output with shape ",
                operands_[0].sizes(), " doesn't match the broadcast shape ", x.sizes());
    return x.size(own_d) == 1 ? 0 : x.stride(own_d) * element_size(operand);
  }

  // Merges dimension d into the last one if it continues that one in every operand.
  void add_dimension(int64_t d) {
    bool merges = !shape_.empty();
    for (size_t p = 0; p < operands_.size() && merges; ++p) {
      merges = stride_in(p, d) == strides_[p].back() * shape_.back();
    }
    if (merges) {
      shape_.back() *= operands_[0].size(d);
      return;
    }
    shape_.push_back(operands_[0].size(d));
    for (size_t p = 0; p < operands_.size(); ++p) strides_[p].push_back(stride_in(p, d));
  }

  std::vector<Tensor> operands_;
  DimVector shape_;
  std::vector<DimVector> strides_;
};

class TensorIteratorConfig {
 public:
  TensorIteratorConfig& resize_outputs(bool) { return *this; }
  TensorIteratorConfig& check_all_same_dtype(bool) { return *this; }
  TensorIteratorConfig& add_output(const Tensor& x) { return add(x); }
  TensorIteratorConfig& add_const_input(const Tensor& x) { return add(x); }
  TensorIterator build() const { return TensorIterator(operands_); }

 private:
  TensorIteratorConfig& add(const Tensor& x) {
    operands_.push_back(x);
    return *this;
  }
  std::vector<Tensor> operands_;
};

}  // namespace stable_torch
