// What headers use that a host compiler, nvcc and NVRTC compile: integer types, function qualifiers, and the
// few templates that they would take from the standard library. NVRTC has no host headers.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#else
#include <cstdint>
#endif

#ifdef __CUDACC__
#define LLTM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LLTM_HOST_DEVICE inline
#endif

// Some kernels have variants that are compiled only for Hopper, where their gain was measured. For all
// architectures each would add up to a megabyte of code.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool kForHopper = true;
#else
constexpr bool kForHopper = false;
#endif

namespace lltm_ext {

template <bool kCondition, class Then, class Else>
struct Conditional {
  using type = Then;
};
template <class Then, class Else>
struct Conditional<false, Then, Else> {
  using type = Else;
};

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;
template <typename T>
LLTM_HOST_DEVICE constexpr T larger(T a, T b) {
  return a < b ? b : a;
}
LLTM_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
template <typename T>
LLTM_HOST_DEVICE constexpr T clamped(T x, T least, T most) {
  return x < least ? least : most < x ? most : x;
}

}  // namespace lltm_ext
