// PTX instructions by name: accesses of shared memory, mma.sync.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx.cuh"

namespace lltm_ext {

__device__ __forceinline__ void st_shared(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements; lane 8 i + r holds the address of row r of matrix i, in
// shared memory. Each lane receives, of every matrix, elements 2 (lane % 4) and the next of row lane / 4, or
// of column lane / 4 if TRANSPOSE.
template <bool TRANSPOSE>
__device__ __forceinline__ void ldmatrix(uint32_t (&x)[4], uint32_t line) {
  if constexpr (TRANSPOSE) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(line)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(line)
                 : "memory");
  }
}

// c [16, 8] += a [16, 16] b [16, 8], accumulated in float32. With g = lane / 4 and t = 2 (lane % 4): a holds
// rows g, g + 8 at k = t, t + 1, then the same at k + 8; b holds column g at k = t, t + 1, then at k + 8; c
// holds row g at columns t, t + 1, then row g + 8.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// c [16, 8] += a [16, 8] b [8, 8] in TF32. With g = lane / 4 and t = lane % 4: a holds rows g, g + 8 at k =
// t, then at k = t + 4; b holds column g at k = t, then at t + 4; c as above.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float) {
#if __CUDA_ARCH__ >= 800
  mma_m16n8k8_tf32(c, a[0], a[1], a[2], a[3], b0, b1);
#endif
}

#if __CUDA_ARCH__ < 800
// sum + the products of two pairs of bfloat16, a pair in each register.
__device__ __forceinline__ float dot_pairs(uint32_t x, uint32_t y, float sum) {
  sum = fmaf(__uint_as_float(x << 16), __uint_as_float(y << 16), sum);
  return fmaf(__uint_as_float(x & 0xffff0000u), __uint_as_float(y & 0xffff0000u), sum);
}

// Turing's tensor cores lack bfloat16: each lane gathers by shuffles the rows and columns that its sums need.
// Correct, not fast, and not inlined: 64 copies would be most of the code for this architecture.
inline __device__ __noinline__ float4 mma_bfloat16(float4 c, uint4 a, uint2 b) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int q = 0; q < 4; ++q) {  // the lane of the four that holds k = 2 q, 2 q + 1
    const int holder = lane / 4 * 4 + q;
    const uint32_t row0[2] = {__shfl_sync(kAll, a.x, holder), __shfl_sync(kAll, a.z, holder)};
    const uint32_t row8[2] = {__shfl_sync(kAll, a.y, holder), __shfl_sync(kAll, a.w, holder)};
    const int left = lane % 4 * 8 + q, right = left + 4;
    const uint32_t column0[2] = {__shfl_sync(kAll, b.x, left), __shfl_sync(kAll, b.y, left)};
    const uint32_t column1[2] = {__shfl_sync(kAll, b.x, right), __shfl_sync(kAll, b.y, right)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      c.x = dot_pairs(row0[half], column0[half], c.x);
      c.y = dot_pairs(row0[half], column1[half], c.y);
      c.z = dot_pairs(row8[half], column0[half], c.z);
      c.w = dot_pairs(row8[half], column1[half], c.w);
    }
  }
  return c;
}
#endif

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __nv_bfloat16) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const float4 sum = mma_bfloat16({c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1});
  c[0] = sum.x;
  c[1] = sum.y;
  c[2] = sum.z;
  c[3] = sum.w;
#endif
}

}  // namespace lltm_ext
