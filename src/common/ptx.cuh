// PTX instructions by name, of compute capability 8.0 and later: relaxed accesses, a named barrier, mma.sync.
// common/hopper/ptx.cuh has Hopper's.
#pragma once

#include "common/portable.h"

namespace lltm_ext {

// ---- memory

// Accesses that other blocks of the GPU see, in no particular order.
__device__ __forceinline__ uint4 ld_relaxed_gpu(const void* address) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void st_relaxed_gpu(void* address, unsigned x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void st_relaxed_gpu(void* address, uint2 x) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};"
               :
               : "l"(address), "r"(x.x), "r"(x.y)
               : "memory");
}

__device__ __forceinline__ void prefetch_global_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
}

// The same address of shared memory, in a register. Without this the compiler computes where shared memory
// starts again at every use, from the block's rank in its cluster, and waits for that.
__device__ __forceinline__ float* in_register(float* shared) {
  auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("" : "+r"(address));
  return static_cast<float*>(__cvta_shared_to_generic(address));
}

// ---- barriers

// A barrier for kThreads threads of the block. Barrier 0 is __syncthreads'.
template <int kThreads>
__device__ __forceinline__ void bar_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "n"(kThreads) : "memory");
}

// ---- mma.sync: sum [16, 8] += a [16, k] @ b [k, 8], by a warp. Half types have two values in each operand.

#define LLTM_MMA(NAME, SHAPE, TYPE)                                                                         \
  __device__ __forceinline__ void NAME(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, \
                                       unsigned b0, unsigned b1) {                                          \
    asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE                                             \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                              \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                            \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                            \
  }
LLTM_MMA(mma_m16n8k16_bf16, "m16n8k16", "bf16")
LLTM_MMA(mma_m16n8k16_f16, "m16n8k16", "f16")
LLTM_MMA(mma_m16n8k8_tf32, "m16n8k8", "tf32")
#undef LLTM_MMA

// Rounded to TF32, ties away from zero.
__device__ __forceinline__ unsigned cvt_rna_tf32(float x) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

}  // namespace lltm_ext
