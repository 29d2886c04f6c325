// From tensors to typed pointers: picks the C++ type behind a dtype and the backend behind a device.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "common/types.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace lltm_ext {

// Set while a kernel runs: the tensors' device is current, and the torch functions that it calls neither
// record gradients nor autocast, whoever called it.
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

template <typename T>
const T* pointer(const at::Tensor& x) {
  return x.defined() ? static_cast<const T*>(x.const_data_ptr()) : nullptr;
}
template <typename T>
T* mutable_pointer(const at::Tensor& x) {
  return x.defined() ? static_cast<T*>(x.mutable_data_ptr()) : nullptr;
}

#ifdef LLTM_EXT_WITH_CUDA
inline void check_launch(const char* kernel, cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();  // else the next launch of another would report it once more
  TORCH_CHECK(error == cudaSuccess, "lltm_ext: launch of ", kernel, " failed: ", cudaGetErrorString(error),
              " (", cudaGetErrorName(error), ")");
}
#endif

// Calls f(Type<T>{}, stream...) with the element type of `like`: on CUDA with the current stream, whose f
// returns a cudaError_t; on the CPU without. The dtype has been checked before.
template <bool kComplex = false, typename F>
void launch(const char* kernel, const at::Tensor& like, F&& f) {
  const at::ScalarType type = like.scalar_type();
#ifdef LLTM_EXT_WITH_CUDA
  if (like.is_cuda()) {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(like.get_device());
    switch (type) {
      case at::kFloat:
        return check_launch(kernel, f(Type<float>{}, stream));
      case at::kDouble:
        return check_launch(kernel, f(Type<double>{}, stream));
      case at::kHalf:
        return check_launch(kernel, f(Type<__half>{}, stream));
      case at::kBFloat16:
        return check_launch(kernel, f(Type<__nv_bfloat16>{}, stream));
      case at::kComplexFloat:
        if constexpr (kComplex) return check_launch(kernel, f(Type<Complex<float>>{}, stream));
        [[fallthrough]];
      case at::kComplexDouble:
        if constexpr (kComplex) return check_launch(kernel, f(Type<Complex<double>>{}, stream));
        [[fallthrough]];
      default:
        TORCH_INTERNAL_ASSERT(false, kernel, ": unchecked dtype ", type);
    }
  }
#endif
  TORCH_INTERNAL_ASSERT(like.is_cpu(), kernel, ": unchecked device ", like.device());
  switch (type) {
    case at::kFloat:
      return f(Type<float>{});
    case at::kDouble:
      return f(Type<double>{});
    case at::kHalf:
      return f(Type<at::Half>{});
    case at::kBFloat16:
      return f(Type<at::BFloat16>{});
    case at::kComplexFloat:
      if constexpr (kComplex) return f(Type<Complex<float>>{});
      [[fallthrough]];
    case at::kComplexDouble:
      if constexpr (kComplex) return f(Type<Complex<double>>{});
      [[fallthrough]];
    default:
      TORCH_INTERNAL_ASSERT(false, kernel, ": unchecked dtype ", type);
  }
}

}  // namespace lltm_ext
