// Two adjacent values of a row, which a thread loads, computes and stores together.
#pragma once

#include "common/types.h"

namespace lltm_ext {

template <typename T>
struct Pair;

template <>
struct Pair<float> {
  using Word = uint2;
  float2 bits;
  __device__ float2 widen() const { return bits; }
  __device__ static Pair of(float a, float b) { return {make_float2(a, b)}; }
};

#ifdef __CUDACC_RTC__
// NVRTC has no CUDA headers, so PTX converts the raw bits.
template <>
struct Pair<__half> {
  using Word = unsigned;
  unsigned bits;
  __device__ float2 widen() const {
    float2 x;
    asm("{\n"
        " .reg .b16 low, high;\n"
        " mov.b32 {low, high}, %2;\n"
        " cvt.f32.f16 %0, low;\n"
        " cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(bits));
    return x;
  }
  __device__ static Pair of(float a, float b) {
    Pair pair;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair.bits) : "f"(a), "f"(b));
    return pair;
  }
};

template <>
struct Pair<__nv_bfloat16> {
  using Word = unsigned;
  unsigned bits;
  __device__ float2 widen() const {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000));
  }
  __device__ static Pair of(float a, float b) {
    Pair pair;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair.bits) : "f"(a), "f"(b));
    return pair;
  }
};
#else
template <>
struct Pair<__half> {
  using Word = unsigned;
  __half2 bits;
  __device__ float2 widen() const { return __half22float2(bits); }
  __device__ static Pair of(float a, float b) { return {__floats2half2_rn(a, b)}; }
};

template <>
struct Pair<__nv_bfloat16> {
  using Word = unsigned;
  __nv_bfloat162 bits;
  __device__ float2 widen() const { return __bfloat1622float2(bits); }
  __device__ static Pair of(float a, float b) { return {__floats2bfloat162_rn(a, b)}; }
};
#endif

template <typename T>
__device__ __forceinline__ Pair<T> read_pair(const T* address) {
  return *reinterpret_cast<const Pair<T>*>(address);
}

template <typename T>
__device__ __forceinline__ void write_pair(T* address, float a, float b) {
  *reinterpret_cast<Pair<T>*>(address) = Pair<T>::of(a, b);
}

// Access a pair of the states that a caller gives or gets: of T if `narrow`, else of float.
template <typename T>
__device__ __forceinline__ float2 read_state_pair(const void* states, int64_t at, bool narrow) {
  if (narrow) return read_pair(static_cast<const T*>(states) + at).widen();
  return read_pair(static_cast<const float*>(states) + at).widen();
}
template <typename T>
__device__ __forceinline__ void write_state_pair(void* states, int64_t at, bool narrow, float2 x) {
  if (narrow) return write_pair(static_cast<T*>(states) + at, x.x, x.y);
  write_pair(static_cast<float*>(states) + at, x.x, x.y);
}

}  // namespace lltm_ext
