// In place of src/common/ptx.cuh: the same functions on the CPU.
#pragma once

#include "cuda_on_cpu.h"

namespace lltm_ext {

// Kernels read so in loops that wait for another block.
inline uint4 ld_relaxed_gpu(const void* address) {
  cuda_on_cpu::poll();
  return *static_cast<const uint4*>(address);
}
inline void fence_gpu() {}

inline void st_relaxed_gpu(void* address, unsigned x) {
  *static_cast<unsigned*>(address) = x;
  cuda_on_cpu::note_progress();
}
inline void st_relaxed_gpu(void* address, uint2 x) {
  *static_cast<uint2*>(address) = x;
  cuda_on_cpu::note_progress();
}

struct alignas(16) Uint64Pair {
  uint64_t x, y;
};
inline Uint64Pair ld_relaxed_gpu_u64_pair(const void* address) {
  cuda_on_cpu::poll();
  return *static_cast<const Uint64Pair*>(address);
}
inline void st_relaxed_gpu(void* address, Uint64Pair pair) {
  *static_cast<Uint64Pair*>(address) = pair;
  cuda_on_cpu::note_progress();
}

inline void red_add_gpu(float* to, float x) { *to += x; }

inline std::vector<const void*> prefetched;  // addresses
inline void prefetch_global_l2(const void* address) { prefetched.push_back(address); }

inline float4 ld_once(const float* address) { return *reinterpret_cast<const float4*>(address); }

inline uint4 ld_once_if(const void* address, bool inside) {
  return inside ? *static_cast<const uint4*>(address) : uint4{};
}

template <typename T>
void keep_in_register(T&) {}

// Addresses in shared memory are offsets.
inline unsigned char* in_shared(uint32_t address) { return cuda_on_cpu::current_block().memory() + address; }
inline float4 ld_shared_float4(uint32_t address) {
  float4 x;
  std::memcpy(&x, in_shared(address), sizeof(x));
  return x;
}
inline void st_shared(uint32_t address, const float4& x) { std::memcpy(in_shared(address), &x, sizeof(x)); }

// Here a copy is done at once.
template <int kBytes>
void cp_async(void* shared, const void* global, int valid) {
  std::memset(shared, 0, kBytes);
  if (valid > 0) std::memcpy(shared, global, valid);
}
template <int kBytes>
void cp_async_if(bool when, void* shared, const void* global, int valid) {
  if (when) cp_async<kBytes>(shared, global, valid);
}
template <int kBytes, typename E>
void copy_to_shared(E* to, const E* from) {
  cp_async<kBytes>(to, from, kBytes);
}
inline void cp_async_commit_group() {}
template <int kGroups>
void cp_async_wait_group() {}

inline float* in_register(float* shared) { return shared; }

template <int kThreads>
void bar_sync(int barrier) {
  cuda_on_cpu::current_block().barriers[barrier].wait(kThreads);
}

// ---- mma.sync

// A lane's registers of a [16, k] and b [k, 8].
struct MmaOperands {
  unsigned a[4], b[2];
};

// The values in a register.
struct Tf32Register {
  static constexpr int kValues = 1;
  // The tensor cores ignore the last 13 bits.
  static float value(unsigned x, int) { return __uint_as_float(x & ~0x1fffu); }
};
template <typename T>
struct HalfRegister {
  static constexpr int kValues = 2;
  static float value(unsigned x, int i) {
    T half;
    half.bits = static_cast<uint16_t>(x >> 16 * i);
    return static_cast<float>(half);
  }
};

// Lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8 of a, column g of b, and of the sums rows g and
// g + 8 of columns 2t and 2t + 1. Of K, it holds the t-th of four parts of each half.
template <class Register>
float dot_product(const cuda_on_cpu::WarpValues<MmaOperands>& warp, int row, int column) {
  constexpr int kValues = Register::kValues;
  double sum = 0;
  for (int t = 0; t < 4; ++t) {
    const MmaOperands of_row = warp.of(row % 8 * 4 + t), of_column = warp.of(column * 4 + t);
    for (int half = 0; half < 2; ++half) {
      const unsigned a = of_row.a[row / 8 + 2 * half], b = of_column.b[half];
      for (int i = 0; i < kValues; ++i) {
        sum += static_cast<double>(Register::value(a, i)) * Register::value(b, i);
      }
    }
  }
  return static_cast<float>(sum);
}

template <class Register>
void mma(float (&sum)[4], const MmaOperands& operands) {
  const cuda_on_cpu::WarpValues<MmaOperands> warp(operands);
  const int g = cuda_on_cpu::lane() / 4, t = cuda_on_cpu::lane() % 4;
  for (int i = 0; i < 4; ++i) sum[i] += dot_product<Register>(warp, g + i / 2 * 8, 2 * t + i % 2);
}

inline void mma_m16n8k16_bf16(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                              unsigned b0, unsigned b1) {
  mma<HalfRegister<__nv_bfloat16>>(sum, {{a0, a1, a2, a3}, {b0, b1}});
}
inline void mma_m16n8k16_f16(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                             unsigned b1) {
  mma<HalfRegister<__half>>(sum, {{a0, a1, a2, a3}, {b0, b1}});
}
inline void mma_m16n8k8_tf32(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                             unsigned b1) {
  mma<Tf32Register>(sum, {{a0, a1, a2, a3}, {b0, b1}});
}

// Finite numbers only.
inline unsigned cvt_rna_tf32(float x) { return (__float_as_uint(x) + 0x1000) & ~0x1fffu; }

inline float* dynamic_shared_floats() {
  return reinterpret_cast<float*>(cuda_on_cpu::current_block().memory());
}

}  // namespace lltm_ext
