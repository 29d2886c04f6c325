// The element types of the ops: their accumulate types and conversions. No torch, no kernels.
//
// Half types are storage types: values are widened to float32 on load and rounded once on store. The
// conversions are named functions because torch's build flags disable CUDA's implicit ones.
#pragma once

#include "common/portable.h"

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace lltm_ext {

// Has the memory layout of torch's complex numbers.
template <typename T>
struct Complex {
  T real, imaginary;
};

// acc_t<T>: the type in which arithmetic on T is computed.
template <typename T>
struct accumulate {
  using type = float;
};
template <>
struct accumulate<double> {
  using type = double;
};
template <typename T>
struct accumulate<Complex<T>> {
  using type = Complex<T>;
};
template <typename T>
using acc_t = typename accumulate<T>::type;

template <typename T>
LLTM_HOST_DEVICE acc_t<T> widen(T x) {
  return static_cast<acc_t<T>>(x);
}

template <typename T>
LLTM_HOST_DEVICE T narrow(acc_t<T> x) {
  return static_cast<T>(x);
}

#ifdef __CUDACC_RTC__
// NVRTC has no CUDA headers either, so the half types hold raw bits and PTX converts them.
struct __half {
  unsigned short bits;
};
struct __nv_bfloat16 {
  unsigned short bits;
};
template <>
LLTM_HOST_DEVICE float widen<__half>(__half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
template <>
LLTM_HOST_DEVICE float widen<__nv_bfloat16>(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
template <>
LLTM_HOST_DEVICE __half narrow<__half>(float x) {
  __half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
LLTM_HOST_DEVICE __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  __nv_bfloat16 y;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const uint32_t bits = __float_as_uint(x);
  y.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
  return y;
}
#elif defined(__CUDACC__)
template <>
LLTM_HOST_DEVICE float widen<__half>(__half x) {
  return __half2float(x);
}
template <>
LLTM_HOST_DEVICE float widen<__nv_bfloat16>(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <>
LLTM_HOST_DEVICE __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
LLTM_HOST_DEVICE __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
#endif

}  // namespace lltm_ext
