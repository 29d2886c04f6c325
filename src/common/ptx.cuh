// PTX instructions by name, of compute capability 8.0 and later: relaxed accesses, cp.async, a named barrier,
// mma.sync. common/hopper/ptx.cuh has Hopper's.
#pragma once

#include "common/portable.h"

namespace lltm_ext {

// ---- memory

// Accesses that other blocks of the GPU see, but in no particular order.
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

// Of two numbers; each is read or written as a whole.
struct Uint64Pair {
  uint64_t x, y;
};
__device__ __forceinline__ Uint64Pair ld_relaxed_gpu_u64_pair(const void* address) {
  Uint64Pair pair;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair.x), "=l"(pair.y)
               : "l"(address)
               : "memory");
  return pair;
}
__device__ __forceinline__ void st_relaxed_gpu(void* address, Uint64Pair pair) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};"
               :
               : "l"(address), "l"(pair.x), "l"(pair.y)
               : "memory");
}

// Orders this thread's accesses before it and those after it, for all threads of the GPU.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" : : : "memory"); }

// to += x, without waiting for the old value.
__device__ __forceinline__ void red_add_gpu(float* to, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" : : "l"(to), "f"(x) : "memory");
}

__device__ __forceinline__ void prefetch_global_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
}

// Loads 16 bytes that no other thread of the multiprocessor reads, so L1 does not keep them.
__device__ __forceinline__ float4 ld_once(const float* address) {
  float4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(address));
  return x;
}

// 16 bytes that are read once, so they bypass L1 and leave it to a's rows; 0 unless `inside`. Four lanes read
// half a cache line. The other half is prefetched with it, for the next load.
__device__ __forceinline__ uint4 ld_once_if(const void* from, bool inside) {
  uint4 x;
  asm volatile(
      "{\n"
      " .reg .pred inside;\n"
      " setp.ne.b32 inside, %5, 0;\n"
      " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
      " @inside ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "r"(static_cast<int>(inside))
      : "memory");
  return x;
}

// Keeps the compiler from computing x again at every use.
template <typename T>
__device__ __forceinline__ void keep_in_register(T& x) {
  static_assert(sizeof(T) == 4);
  asm volatile("" : "+r"(x));
}

// An address in shared memory, in a register. Without this the compiler computes where shared memory starts
// again at every use, from the block's rank in its cluster, and waits for that.
__device__ __forceinline__ uint32_t shared_in_register(const void* shared) {
  auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  keep_in_register(address);
  return address;
}
__device__ __forceinline__ float* in_register(float* shared) {
  return static_cast<float*>(__cvta_shared_to_generic(shared_in_register(shared)));
}

// ---- cp.async

// Copies the first `valid` of BYTES bytes and clears the others; with `valid` 0 it reads nothing. Both
// addresses are multiples of BYTES, which is 4, 8 or 16. Before sm_80 it is synchronous.
template <int BYTES>
__device__ __forceinline__ void cp_async(uint32_t shared, const void* global, int valid) {
#if __CUDA_ARCH__ >= 800
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES),
                 "r"(valid)
                 : "memory");
  }
#else
  struct alignas(BYTES) Bytes {
    uint16_t pair[BYTES / 2];
  };
  Bytes bytes = {};
  if (valid == BYTES) {
    bytes = *static_cast<const Bytes*>(global);
  } else {
#pragma unroll
    for (int i = 0; i < BYTES / 2; ++i) {
      if (i < valid / 2) bytes.pair[i] = static_cast<const uint16_t*>(global)[i];
    }
  }
  *static_cast<Bytes*>(__cvta_shared_to_generic(shared)) = bytes;
#endif
}
template <int BYTES>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int valid) {
  cp_async<BYTES>(static_cast<uint32_t>(__cvta_generic_to_shared(shared)), global, valid);
}

// Like cp_async if `when`, by predicate instead of a branch; else `shared` keeps its value.
template <int BYTES>
__device__ __forceinline__ void cp_async_if(bool when, void* shared, const void* global, int valid) {
#if __CUDA_ARCH__ >= 800
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16) {
    asm volatile(
        "{\n .reg .pred when;\n setp.ne.b32 when, %3, 0;\n"
        " @when cp.async.cg.shared.global [%0], [%1], 16, %2;\n}" ::"r"(to),
        "l"(global), "r"(valid), "r"(static_cast<int>(when))
        : "memory");
  } else {
    asm volatile(
        "{\n .reg .pred when;\n setp.ne.b32 when, %4, 0;\n"
        " @when cp.async.ca.shared.global [%0], [%1], %2, %3;\n}" ::"r"(to),
        "l"(global), "n"(BYTES), "r"(valid), "r"(static_cast<int>(when))
        : "memory");
  }
#else
  if (when) cp_async<BYTES>(shared, global, valid);
#endif
}

// Copies kBytes, now or by cp.async.
template <int kBytes, typename E>
__device__ __forceinline__ void copy_to_shared(E* to, const E* from) {
  if constexpr (kBytes >= 4) {
    cp_async<kBytes>(to, from, kBytes);
  } else {
    *to = __ldg(from);
  }
}

__device__ __forceinline__ void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}

// Waits until at most GROUPS of this thread's groups are pending.
template <int GROUPS>
__device__ __forceinline__ void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}

// ---- shared memory

// A block's dynamic shared memory.
__device__ __forceinline__ float* dynamic_shared_floats() {
  extern __shared__ __align__(16) float shared_floats[];
  return shared_floats;
}

__device__ __forceinline__ uint32_t ld_shared(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ float4 ld_shared_float4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ void st_shared(uint32_t address, const float4& x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
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

// x rounded to TF32, ties away from zero.
__device__ __forceinline__ unsigned cvt_rna_tf32(float x) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

}  // namespace lltm_ext
