// Hopper's PTX instructions by name: mbarrier, clusters, TMA, setmaxnreg, wgmma. For sm_90a only.
#pragma once

#include "common/hopper/tensor_map.h"
#include "common/launch.cuh"
#include "common/types.h"

// Wraps a kernel's body. Other architectures compile the kernel too, but never launch it.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define LLTM_HOPPER(...) __VA_ARGS__
#else
#define LLTM_HOPPER(...) asm volatile("trap;")
#endif

namespace lltm_ext {
namespace hopper {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier. A phase ends when `count` threads have arrived and all expected bytes are written.

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(barrier)), "r"(count));
}

// Makes initialised barriers visible to TMA and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      " .reg .b32 there;\n"
      " mapa.shared::cluster.u32 there, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}"
      :
      : "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      " .reg .pred done;\n"
      "again:\n"
      " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra ended;\n"
      " bra again;\n"
      "ended:\n"
      "}"
      :
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

// Returns whether the phase of this parity has ended, for which it waits a limited time.
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      " .reg .pred done;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      " selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done;
}

// ---- clusters

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The shared::cluster address of the same place in another block.
__device__ __forceinline__ uint32_t mapa(const void* here, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
  return there;
}

// The address of the same place in the shared memory of another block of the cluster.
template <typename T>
__device__ __forceinline__ const T* in_block(const T* here, uint32_t rank) {
  const T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
  return there;
}

// Stores to another block's shared memory and completes 16 bytes of its mbarrier. mapa gives both addresses.
__device__ __forceinline__ void st_async(uint32_t to, const uint4& x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%4], {%0, %1, %2, %3}, [%5];"
      :
      : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(to), "r"(barrier)
      : "memory");
}

// Loads from the same address in the shared memory of another block of the cluster.
__device__ __forceinline__ float4 load_shared_cluster(const float4* here, uint32_t rank) {
  float4 x;
  asm volatile(
      "{\n"
      " .reg .b32 there;\n"
      " mapa.shared::cluster.u32 there, %4, %5;\n"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n"
      "}"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(shared_address(here)), "r"(rank)
      : "memory");
  return x;
}

// ---- TMA. Coordinates: column, row, matrix.

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, int column, int row, int matrix,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];"
      :
      : "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

// Loads to the same address, and completes the same barrier, in each block of the mask.
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap* map, int column, int row,
                                                   int matrix, uint64_t* barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      :
      : "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(matrix),
        "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, int column, int row, int matrix,
                                          const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];\n"
      "cp.async.bulk.commit_group;"
      :
      : "l"(map), "r"(shared_address(from)), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

// Waits until all but the last kPending stores have read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kPending) : "memory");
}

// Orders ordinary accesses to global memory and those of TMA.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" : : : "memory");
}
// Orders ordinary stores to shared memory before TMA's reads.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// ---- warpgroups

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// A barrier for the 128 threads of a warpgroup. Barrier 0 is __syncthreads'.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
  asm volatile("bar.sync %0, 128;" : : "r"(warpgroup + 1) : "memory");
}

// The warp's number in its block, of which the compiler knows that all lanes have the same.
__device__ __forceinline__ int uniform_warp() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
}

// Flags in global memory: what a thread has written before a release, and its block before a barrier that it
// passed, is visible after an acquire that sees the flag.
__device__ __forceinline__ void st_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" : : "l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ void red_release(unsigned* count, unsigned more) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" : : "l"(count), "r"(more) : "memory");
}
__device__ __forceinline__ unsigned ld_acquire(const unsigned* count) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t ld_acquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// ---- wgmma. Accumulator registers must not be touched from wgmma_fence to wgmma_wait_group.

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to the accumulator across this point.
template <int kCount>
__device__ __forceinline__ void fence_accumulator(float (&accumulator)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulator[i]) : : "memory");
}

#define LLTM_R4 "%0, %1, %2, %3"
#define LLTM_R8 LLTM_R4 ", %4, %5, %6, %7"
#define LLTM_R16 LLTM_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LLTM_R32 LLTM_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LLTM_R64                                                                                           \
  LLTM_R32                                                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LLTM_R48 LLTM_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LLTM_R44 LLTM_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43"
#define LLTM_R72 LLTM_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LLTM_R80 LLTM_R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define LLTM_R96 LLTM_R80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LLTM_R112 \
  LLTM_R96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define LLTM_R128                                                                                     \
  LLTM_R64                                                                                            \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
  "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, " \
  "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "  \
  "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LLTM_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LLTM_F8(i) LLTM_F4(i), LLTM_F4(i + 4)
#define LLTM_F16(i) LLTM_F8(i), LLTM_F8(i + 8)
#define LLTM_F32(i) LLTM_F16(i), LLTM_F16(i + 16)
#define LLTM_F64(i) LLTM_F32(i), LLTM_F32(i + 32)
#define LLTM_F44(i) LLTM_F32(i), LLTM_F8(i + 32), LLTM_F4(i + 40)
#define LLTM_F48(i) LLTM_F32(i), LLTM_F16(i + 32)
#define LLTM_F72(i) LLTM_F64(i), LLTM_F8(i + 64)
#define LLTM_F80(i) LLTM_F64(i), LLTM_F16(i + 64)
#define LLTM_F96(i) LLTM_F64(i), LLTM_F32(i + 64)
#define LLTM_F112(i) LLTM_F96(i), LLTM_F16(i + 96)
#define LLTM_F128(i) LLTM_F64(i), LLTM_F64(i + 64)

// d [64, kN] (+)= a [64, 16] @ b [16, kN], given descriptors of operands in shared memory. Operands are
// K-major, or MN-major if kMnMajor.
template <typename T, int kN, bool kMnMajorA, bool kMnMajorB>
struct Wgmma;

#define LLTM_WGMMA(TYPE, NAME, N, COUNT, A, B, KEEP, TRANS_A, TRANS_B)                                       \
  template <bool kMnMajorA, bool kMnMajorB>                                                                  \
  struct Wgmma<TYPE, N, kMnMajorA, kMnMajorB> {                                                              \
    __device__ static __forceinline__ void run(float (&d)[COUNT], uint64_t a, uint64_t b, bool keep) {       \
      asm volatile("{\n .reg .pred keep;\n setp.ne.b32 keep, %" KEEP                                         \
                   ", 0;\n"                                                                                  \
                   " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LLTM_R##COUNT       \
                   "}, %" A ", %" B ", keep, 1, 1, %" TRANS_A ", %" TRANS_B ";\n}"                           \
                   : LLTM_F##COUNT(0)                                                                        \
                   : "l"(a), "l"(b), "r"(static_cast<int>(keep)), "n"(int(kMnMajorA)), "n"(int(kMnMajorB))); \
    }                                                                                                        \
  };
#define LLTM_WGMMAS(TYPE, NAME)                                       \
  LLTM_WGMMA(TYPE, NAME, 8, 4, "4", "5", "6", "7", "8")               \
  LLTM_WGMMA(TYPE, NAME, 16, 8, "8", "9", "10", "11", "12")           \
  LLTM_WGMMA(TYPE, NAME, 32, 16, "16", "17", "18", "19", "20")        \
  LLTM_WGMMA(TYPE, NAME, 64, 32, "32", "33", "34", "35", "36")        \
  LLTM_WGMMA(TYPE, NAME, 88, 44, "44", "45", "46", "47", "48")        \
  LLTM_WGMMA(TYPE, NAME, 96, 48, "48", "49", "50", "51", "52")        \
  LLTM_WGMMA(TYPE, NAME, 128, 64, "64", "65", "66", "67", "68")       \
  LLTM_WGMMA(TYPE, NAME, 144, 72, "72", "73", "74", "75", "76")       \
  LLTM_WGMMA(TYPE, NAME, 160, 80, "80", "81", "82", "83", "84")       \
  LLTM_WGMMA(TYPE, NAME, 192, 96, "96", "97", "98", "99", "100")      \
  LLTM_WGMMA(TYPE, NAME, 224, 112, "112", "113", "114", "115", "116") \
  LLTM_WGMMA(TYPE, NAME, 256, 128, "128", "129", "130", "131", "132")
LLTM_WGMMAS(__half, "f16")
LLTM_WGMMAS(__nv_bfloat16, "bf16")

// The same with a in registers and b K-major. A lane has rows lane / 4 and 8 more of its warp's 16, and
// columns 2 * (lane % 4), the next one, and those 8 further: in x and y the two rows, in z and w those again.
template <typename T, int kN>
struct WgmmaOfRegisters;

#define LLTM_WGMMA_OF_REGISTERS(TYPE, NAME, N, COUNT, A, B, KEEP)                                          \
  template <>                                                                                              \
  struct WgmmaOfRegisters<TYPE, N> {                                                                       \
    __device__ static __forceinline__ void run(float (&d)[COUNT], const uint4& a, uint64_t b, bool keep) { \
      asm volatile("{\n .reg .pred keep;\n setp.ne.b32 keep, %" KEEP                                       \
                   ", 0;\n"                                                                                \
                   " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LLTM_R##COUNT     \
                   "}, {" A "}, %" B ", keep, 1, 1, 0;\n}"                                                 \
                   : LLTM_F##COUNT(0)                                                                      \
                   : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(keep)));         \
    }                                                                                                      \
  };
#define LLTM_WGMMAS_OF_REGISTERS(TYPE, NAME)                                    \
  LLTM_WGMMA_OF_REGISTERS(TYPE, NAME, 32, 16, "%16, %17, %18, %19", "20", "21") \
  LLTM_WGMMA_OF_REGISTERS(TYPE, NAME, 64, 32, "%32, %33, %34, %35", "36", "37")
LLTM_WGMMAS_OF_REGISTERS(__half, "f16")
LLTM_WGMMAS_OF_REGISTERS(__nv_bfloat16, "bf16")

// wgmma's matrix descriptor of an operand with the 128-byte swizzle: `block` is the distance in bytes from 64
// rows or columns of an MN-major operand to the next 64.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, int block) {
  constexpr uint64_t kEightRows = 8 * 128, kSwizzle128 = 1;
  return (address & 0x3FFFF) >> 4 | static_cast<uint64_t>(block >> 4) << 16 | (kEightRows >> 4) << 32 |
         kSwizzle128 << 62;
}

// Stores a warp's four 8 x 8 matrices of 2-byte values. Lane l holds the address of row l % 8 of matrix
// l / 8.
__device__ __forceinline__ void stmatrix(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2,
                                         uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace hopper
}  // namespace lltm_ext
