// From tensors to typed pointers: selects the C++ type of a dtype and the backend of a device.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "common/checks.h"
#include "common/types.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace lltm_ext {

// While an op's kernel runs, makes the tensor's device current, and disables autograd and autocast for the
// torch functions that the kernel calls.
struct KernelGuard {
  explicit KernelGuard(const at::Tensor& x) : device(x.device()) {}
  c10::DeviceGuard device;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

template <typename T>
struct Type {
  using type = T;
};

// Returns null if x is undefined. Arguments have been checked before; results may lack memory where a mode of
// Python or a transform of torch.func replaces what a raw binding allocates.
template <typename T>
const T* pointer(const at::Tensor& x) {
  if (!x.defined()) return nullptr;
  check_memory("lltm_ext", "a kernel's input", x);
  return static_cast<const T*>(x.const_data_ptr());
}
template <typename T>
T* mutable_pointer(const at::Tensor& x) {
  if (!x.defined()) return nullptr;
  check_memory("lltm_ext", "a kernel's output", x);
  return static_cast<T*>(x.mutable_data_ptr());
}

#ifdef LLTM_EXT_WITH_CUDA
inline void check_launch(const char* kernel, cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();  // clears it: the next launch would report it again
  TORCH_CHECK(error == cudaSuccess, "lltm_ext: launch of ", kernel, " failed: ", cudaGetErrorString(error),
              " (", cudaGetErrorName(error), ")");
}
#endif

// Calls f(Type<T>{}) with the C++ type of a dtype that has been checked before.
template <typename Half, typename BFloat16, bool kComplex, typename F>
void with_element_type(const char* kernel, at::ScalarType type, F&& f) {
  switch (type) {
    case at::kFloat:
      return f(Type<float>{});
    case at::kDouble:
      return f(Type<double>{});
    case at::kHalf:
      return f(Type<Half>{});
    case at::kBFloat16:
      return f(Type<BFloat16>{});
    case at::kComplexFloat:
      if constexpr (kComplex) return f(Type<Complex<float>>{});
      break;
    case at::kComplexDouble:
      if constexpr (kComplex) return f(Type<Complex<double>>{});
      break;
    default:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, kernel, ": unchecked dtype ", type);
}

// Calls f with the element type of `like`: on CUDA f(Type<T>{}, current stream), which returns a cudaError_t;
// on the CPU f(Type<T>{}).
template <bool kComplex = false, typename F>
void launch(const char* kernel, const at::Tensor& like, F&& f) {
#ifdef LLTM_EXT_WITH_CUDA
  if (like.is_cuda()) {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(like.get_device());
    return with_element_type<__half, __nv_bfloat16, kComplex>(
        kernel, like.scalar_type(), [&](auto type) { check_launch(kernel, f(type, stream)); });
  }
#endif
  TORCH_INTERNAL_ASSERT(like.is_cpu(), kernel, ": unchecked device ", like.device());
  with_element_type<at::Half, at::BFloat16, kComplex>(kernel, like.scalar_type(), f);
}

}  // namespace lltm_ext
