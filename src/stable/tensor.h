// ATen's Tensor on torch's stable C ABI, with only the members that the bindings use. A Tensor holds a handle
// of torch's tensor, or nothing.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Layout.h>
#include <torch/headeronly/core/MemoryFormat.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "stable/array_ref.h"
#include "stable/call.h"
#include "stable/error.h"

namespace stable_torch {

using ::c10::BFloat16;
using ::c10::Half;
using std::string_view;
using ::torch::headeronly::MemoryFormat;
using ::torch::stable::Device;

constexpr ScalarType kByte = ScalarType::Byte, kInt = ScalarType::Int, kLong = ScalarType::Long,
                     kFloat = ScalarType::Float, kDouble = ScalarType::Double, kHalf = ScalarType::Half,
                     kBFloat16 = ScalarType::BFloat16, kBool = ScalarType::Bool,
                     kComplexFloat = ScalarType::ComplexFloat, kComplexDouble = ScalarType::ComplexDouble;
constexpr Layout kStrided = Layout::Strided;

// The stable ABI has no symbolic sizes. Python computes the shapes of traced graphs
// (lltm_ext/_portable_rules.py).
using IntArrayRef = ArrayRef<int64_t>;
using SymIntArrayRef = IntArrayRef;
using OptionalIntArrayRef = std::optional<IntArrayRef>;
using SymInt = int64_t;
using DimVector = std::vector<int64_t>;
using SymDimVector = DimVector;
using DeviceIndex = int;

struct TensorOptions {
  ScalarType scalar_type;
  Device device;
  bool pinned;

  TensorOptions(ScalarType type, Device device_ = Device(DeviceType::CPU), bool pinned_ = false)
      : scalar_type(type), device(device_), pinned(pinned_) {}
  TensorOptions dtype(ScalarType type) const { return {type, device, pinned}; }
  TensorOptions pinned_memory(bool pin) const { return {scalar_type, device, pin}; }
};

inline DimVector contiguous_strides(IntArrayRef sizes) {
  DimVector strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return strides;
}

class Tensor;

template <>
struct Converter<Tensor> {
  using Stable = ::torch::stable::Tensor;
  using Owned = Tensor;
  static Stable send(const Tensor& x);
  static Tensor receive(Stable x);
};

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(::torch::stable::Tensor handle) : handle_(std::move(handle)) {}

  // Wraps the result of a C function of torch, which writes a new handle to its last argument.
  template <typename... Parameters, typename... Args>
  static Tensor made_by(AOTITorchError (*function)(Parameters...), Args... args) {
    AtenTensorHandle made = nullptr;
    TORCH_ERROR_CODE_CHECK(function(args..., &made));
    return Tensor(::torch::stable::Tensor(made));
  }

  AtenTensorHandle get() const { return handle_->get(); }
  // torch's tensor, undefined if there is none.
  ::torch::stable::Tensor handle() const { return handle_ ? *handle_ : ::torch::stable::Tensor(); }

  bool defined() const { return handle_ && handle_->defined(); }
  int64_t dim() const { return handle_->dim(); }
  int64_t numel() const { return handle_->numel(); }
  int64_t size(int64_t d) const { return handle_->size(d); }
  int64_t stride(int64_t d) const { return handle_->stride(d); }
  int64_t sym_size(int64_t d) const { return size(d); }
  int64_t sym_numel() const { return numel(); }
  IntArrayRef sizes() const { return handle_->sizes(); }
  IntArrayRef strides() const { return handle_->strides(); }
  IntArrayRef sym_sizes() const { return sizes(); }
  IntArrayRef sym_strides() const { return strides(); }
  ScalarType scalar_type() const { return handle_->scalar_type(); }
  size_t element_size() const { return handle_->element_size(); }
  Device device() const { return handle_->device(); }
  int get_device() const { return handle_->get_device_index(); }
  Layout layout() const { return handle_->layout(); }
  TensorOptions options() const { return {scalar_type(), device()}; }
  bool is_cpu() const { return handle_->is_cpu(); }
  bool is_cuda() const { return handle_->is_cuda(); }
  bool is_meta() const { return device().type() == DeviceType::Meta; }
  bool is_contiguous() const { return handle_->is_contiguous(); }
  // The ABI does not tell. For a tensor that is written, Python asks (_portable_rules.py); the dispatcher
  // resolves negative and conjugate bits.
  bool is_nested() const { return false; }
  bool is_inference() const { return false; }
  bool is_neg() const { return false; }
  Tensor resolve_neg() const { return call("aten::resolve_neg", ""); }
  bool is_conj() const { return false; }
  bool is_non_overlapping_and_dense() const;
  bool is_alias_of(const Tensor& other) const;

  const void* const_data_ptr() const { return handle_->const_data_ptr(); }
  void* mutable_data_ptr() const { return handle_->mutable_data_ptr(); }
  template <typename T>
  const T* const_data_ptr() const {
    return static_cast<const T*>(const_data_ptr());
  }
  template <typename T>
  T* mutable_data_ptr() const {
    return static_cast<T*>(mutable_data_ptr());
  }

  // Views. `alias` makes them without the dispatcher, which takes a microsecond. Autograd does not see them,
  // but it is off in the package's ops.
  Tensor t() const { return transpose(0, 1); }
  Tensor mT() const { return transpose(-2, -1); }
  Tensor transpose(int64_t a, int64_t b) const {
    DimVector sizes = this->sizes().vec(), strides = this->strides().vec();
    std::swap(sizes[at(a)], sizes[at(b)]);
    std::swap(strides[at(a)], strides[at(b)]);
    return alias(sizes, strides);
  }
  Tensor narrow(int64_t d, int64_t start, int64_t length) const {
    DimVector sizes = this->sizes().vec();
    sizes[at(d)] = length;
    return alias(sizes, strides(), start * stride(d));
  }
  Tensor slice(int64_t d, int64_t start, int64_t end) const { return narrow(d, start, end - start); }
  Tensor slice(int64_t d, int64_t start) const { return slice(d, start, size(d)); }
  Tensor operator[](int64_t i) const { return call("aten::select", "int", int64_t{0}, i); }
  Tensor unsqueeze(int64_t d) const { return call("aten::unsqueeze", "", d); }
  Tensor squeeze(int64_t d) const { return call("aten::squeeze", "dim", d); }
  Tensor as_strided(IntArrayRef sizes, IntArrayRef strides) const { return alias(sizes, strides); }
  // All sizes must be known: -1 is not supported.
  Tensor view(IntArrayRef sizes) const {
    return is_contiguous() ? alias(sizes, contiguous_strides(sizes)) : call("aten::view", "", sizes);
  }
  Tensor view_symint(IntArrayRef sizes) const { return view(sizes); }
  Tensor reshape(IntArrayRef sizes) const {
    return is_contiguous() ? view(sizes) : call("aten::reshape", "", sizes);
  }

  Tensor contiguous() const {
    return is_contiguous() ? *this : call("aten::contiguous", "", MemoryFormat::Contiguous);
  }
  Tensor clone() const { return made_by(aoti_torch_clone, get()); }
  Tensor clone(MemoryFormat format) const { return call("aten::clone", "", std::optional(format)); }
  Tensor to(ScalarType type) const {
    if (type == scalar_type()) return *this;
    return call("aten::to", "dtype", type, /*non_blocking=*/false, /*copy=*/false,
                std::optional<MemoryFormat>());
  }
  Tensor to(Device device, ScalarType type, bool non_blocking = false) const {
    return call("aten::to", "device", device, type, non_blocking, /*copy=*/false,
                std::optional<MemoryFormat>());
  }
  Tensor to(Device device, bool non_blocking) const { return to(device, scalar_type(), non_blocking); }
  // The tensor must be on the CPU and have one element.
  template <typename T>
  T item() const {
    return *to(::c10::CppTypeToScalarType<T>::value).template const_data_ptr<T>();
  }
  Tensor sum() const { return call("aten::sum", "", std::optional<ScalarType>()); }
  Tensor sum(IntArrayRef dims, bool keepdim = false) const {
    return call("aten::sum", "dim_IntList", std::optional(dims), keepdim, std::optional<ScalarType>());
  }

  Tensor copy_(const Tensor& from) const {
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(get(), from.get(), /*non_blocking=*/false));
    return *this;
  }
  Tensor zero_() const {
    TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(get()));
    return *this;
  }
  Tensor add_(const Tensor& x) const;
  Tensor addmm_(const Tensor& a, const Tensor& b) const;

 private:
  size_t at(int64_t d) const { return static_cast<size_t>(d < 0 ? d + dim() : d); }

  // The same memory from `offset` elements on, with other sizes and strides.
  Tensor alias(IntArrayRef sizes, IntArrayRef strides, int64_t offset = 0) const {
    return made_by(aoti_torch__reinterpret_tensor, get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                   strides.data(), offset);
  }

  template <typename... Args>
  Tensor call(const char* op, const char* overload, const Args&... args) const {
    return call_op<Tensor>(op, overload, *this, args...);
  }

  std::optional<::torch::stable::Tensor> handle_;
};

using TensorList = ArrayRef<Tensor>;

inline ::torch::stable::Tensor Converter<Tensor>::send(const Tensor& x) { return x.handle(); }
inline Tensor Converter<Tensor>::receive(::torch::stable::Tensor x) { return Tensor(std::move(x)); }

// c10's List, which a kernel receives for a list of optional tensors.
template <typename T>
class List {
 public:
  List(std::initializer_list<T> items) : items_(items) {}
  explicit List(std::vector<T> items) : items_(std::move(items)) {}
  size_t size() const { return items_.size(); }
  const T& get(size_t i) const { return items_[i]; }

 private:
  std::vector<T> items_;
};

template <typename T>
struct Converter<List<T>> {
  using Stable = typename Converter<std::vector<T>>::Stable;
  using Owned = List<T>;
  static Owned receive(Stable x) { return Owned(Converter<std::vector<T>>::receive(std::move(x))); }
};

inline bool Tensor::is_non_overlapping_and_dense() const {
  if (is_contiguous()) return true;
  const IntArrayRef sizes = this->sizes(), strides = this->strides();
  std::vector<size_t> dims;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1) dims.push_back(d);
  }
  std::sort(dims.begin(), dims.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t expected = 1;
  for (const size_t d : dims) {
    if (strides[d] != expected) return numel() < 2;
    expected *= sizes[d];
  }
  return true;
}

// The beginning of the tensor's storage.
inline const char* storage_of(const Tensor& x) {
  return static_cast<const char*>(x.const_data_ptr()) -
         x.handle().storage_offset() * static_cast<int64_t>(x.element_size());
}

inline bool Tensor::is_alias_of(const Tensor& other) const { return storage_of(*this) == storage_of(other); }

struct InferenceMode {
  static bool is_enabled() { return false; }
};

// For checks (src/common/tensor.h). Without raw bindings no wrapper reaches a kernel.
inline bool is_wrapper(const Tensor&) { return false; }
inline bool has_memory(const Tensor& x) {
  return x.is_meta() || x.numel() == 0 || x.const_data_ptr() != nullptr;
}

}  // namespace stable_torch
