// The element types of the ops: what each computes in, and how it converts. No torch, no kernels.
//
// A half type only stores: values are widened to float32 on load and rounded once on store. The
// conversions are named functions because torch's build flags switch CUDA's implicit ones off.
#pragma once

#include "common/math.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace lltm_ext {

// The type that arithmetic on T runs in.
template <typename T>
struct accumulate {
  using type = float;
};
template <>
struct accumulate<double> {
  using type = double;
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

#ifdef __CUDACC__
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
