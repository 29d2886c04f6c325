// In place of src/common/hopper/ptx.cuh: on the CPU, those of its functions that kernels call here.
#pragma once

#include "common/hopper/tensor_map.h"
#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "cuda_on_cpu.h"

namespace lltm_ext {
namespace hopper {

// What the 8 bytes of an mbarrier hold.
struct MBarrier {
  uint8_t count;    // arrivals in a phase
  uint8_t pending;  // of them
  bool odd_phase;
  int32_t bytes;  // expected and not yet written

  void end_phase_if_complete() {
    if (pending > 0 || bytes != 0) return;
    pending = count;
    odd_phase = !odd_phase;
    cuda_on_cpu::note_progress();
  }
};
static_assert(sizeof(MBarrier) == sizeof(uint64_t));

inline MBarrier& state_of(void* barrier) { return *static_cast<MBarrier*>(barrier); }

inline void mbarrier_init(uint64_t* barrier, int count) {
  state_of(barrier) = {static_cast<uint8_t>(count), static_cast<uint8_t>(count), false, 0};
}
inline void fence_mbarrier_init() {}

inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  MBarrier& state = state_of(barrier);
  state.bytes += static_cast<int32_t>(bytes);
  --state.pending;
  state.end_phase_if_complete();
}
inline void mbarrier_arrive(uint64_t* barrier) { mbarrier_arrive_expect_tx(barrier, 0); }

inline bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  const auto ended = [&] { return state_of(barrier).odd_phase != (parity != 0); };
  if (!ended()) cuda_on_cpu::poll();
  return ended();
}

inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

inline uint32_t cluster_rank() {
  return cuda_on_cpu::current_block().number % cuda_on_cpu::launch->grid.cluster_blocks;
}
inline int first_block_of_cluster() {
  const int blocks = cuda_on_cpu::launch->grid.cluster_blocks;
  return cuda_on_cpu::current_block().number / blocks * blocks;
}

inline void cluster_sync() {
  const cuda_on_cpu::Grid& grid = cuda_on_cpu::launch->grid;
  const int cluster = cuda_on_cpu::current_block().number / grid.cluster_blocks;
  cuda_on_cpu::launch->clusters[cluster].wait(grid.cluster_blocks * grid.block_threads);
}

// An address in the cluster: the block's rank above, the offset in its shared memory below.
constexpr int kOffsetBits = 24;

inline uint32_t mapa(const void* here, uint32_t rank) {
  const auto* const byte = static_cast<const unsigned char*>(here);
  return rank << kOffsetBits | static_cast<uint32_t>(byte - cuda_on_cpu::current_block().memory());
}
inline void* in_cluster(uint32_t address) {
  const int block = first_block_of_cluster() + static_cast<int>(address >> kOffsetBits);
  return cuda_on_cpu::launch->blocks[block].memory() + (address & ((1u << kOffsetBits) - 1));
}

template <typename T>
const T* in_block(const T* here, uint32_t rank) {
  return static_cast<const T*>(in_cluster(mapa(here, rank)));
}

inline void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t rank) {
  mbarrier_arrive(static_cast<uint64_t*>(in_cluster(mapa(barrier, rank))));
}

inline void st_async(uint32_t to, const uint4& x, uint32_t barrier) {
  *static_cast<uint4*>(in_cluster(to)) = x;
  MBarrier& state = state_of(in_cluster(barrier));
  state.bytes -= 16;
  state.end_phase_if_complete();
  cuda_on_cpu::note_progress();
}

// ---- TMA

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - cuda_on_cpu::current_block().memory());
}
// Where the 128-byte swizzle puts a byte.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// A load is done at once.
inline void tma_load(void* to, const CUtensorMap* map, int column, int row, int matrix, uint64_t* barrier) {
  constexpr int kColumns = 64;
  const uint32_t start = shared_address(to);
  if (start % 1024 != 0) cuda_on_cpu::fail("A swizzled tile does not start at a multiple of 1024 bytes");
  for (int i = 0; i < map->box_rows * kColumns; ++i) {
    const int64_t r = row + i / kColumns, c = column + i % kColumns;
    const bool inside = r < map->rows && c < map->columns && matrix < map->batch;
    const uint16_t x = inside ? map->data[matrix * map->batch_stride + r * map->row_stride + c] : 0;
    std::memcpy(in_shared(swizzled(start + 2 * i)), &x, sizeof(x));
  }
  MBarrier& state = state_of(barrier);
  state.bytes -= 2 * map->box_rows * kColumns;
  state.end_phase_if_complete();
  cuda_on_cpu::note_progress();
}
inline void tma_load_multicast(void*, const CUtensorMap*, int, int, int, uint64_t*, uint16_t) {
  cuda_on_cpu::fail("Multicast is not emulated");
}
inline void prefetch_tensor_map(const CUtensorMap*) {}
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}

// ---- warpgroups

inline int uniform_warp() { return static_cast<int>(threadIdx.x) / cuda_on_cpu::kWarpThreads; }
template <int>
void setmaxnreg_inc() {}
template <int>
void setmaxnreg_dec() {}
inline void warpgroup_sync(int warpgroup) { bar_sync<128>(warpgroup + 1); }

inline void red_release(unsigned* count, unsigned more) {
  *count += more;
  cuda_on_cpu::note_progress();
}
inline unsigned ld_acquire(const unsigned* count) {
  cuda_on_cpu::poll();
  return *count;
}

// ---- wgmma, at once, of K-major operands

inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
template <int>
void wgmma_wait_group() {}
template <int kCount>
void fence_accumulator(float (&)[kCount]) {}

inline uint64_t matrix_descriptor(uint32_t address, int) { return address; }

template <typename T>
float value_of(uint16_t bits) {
  T x;
  x.bits = bits;
  return static_cast<float>(x);
}
template <typename T>
float shared_value(uint64_t matrix, int row, int k) {
  uint16_t bits;
  std::memcpy(&bits, in_shared(swizzled(static_cast<uint32_t>(matrix) + row * 128 + k * 2)), sizeof(bits));
  return value_of<T>(bits);
}

// What a lane has of the sums, given its rows of a: lane / 4 and 8 more of its warp's 16.
template <typename T, int kN>
void multiply(float (&d)[kN / 2], const float (&a)[2][16], uint64_t b, bool keep) {
  for (int i = 0; i < kN / 2; ++i) {
    const int column = i / 4 * 8 + cuda_on_cpu::lane() % 4 * 2 + i % 2;
    float sum = keep ? d[i] : 0;
    for (int k = 0; k < 16; ++k) sum += a[i % 4 / 2][k] * shared_value<T>(b, column, k);
    d[i] = sum;
  }
}

template <typename T, int kN, bool kMnMajorA, bool kMnMajorB>
struct Wgmma {
  static_assert(!kMnMajorA && !kMnMajorB);
  static void run(float (&d)[kN / 2], uint64_t a, uint64_t b, bool keep) {
    const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + cuda_on_cpu::lane() / 4;
    float rows[2][16];
    for (int k = 0; k < 16; ++k) {
      rows[0][k] = shared_value<T>(a, row, k), rows[1][k] = shared_value<T>(a, row + 8, k);
    }
    multiply<T, kN>(d, rows, b, keep);
  }
};

template <typename T, int kN>
struct WgmmaOfRegisters {
  static void run(float (&d)[kN / 2], const uint4& a, uint64_t b, bool keep) {
    const cuda_on_cpu::WarpValues<uint4> warp(a);
    float rows[2][16];
    for (int quad = 0; quad < 4; ++quad) {
      const uint4 x = warp.of(cuda_on_cpu::lane() / 4 * 4 + quad);
      const unsigned registers[] = {x.x, x.y, x.z, x.w};
      for (int i = 0; i < 8; ++i) {
        const auto bits = static_cast<uint16_t>(registers[i / 2] >> 16 * (i % 2));
        rows[i / 2 % 2][i / 4 * 8 + 2 * quad + i % 2] = value_of<T>(bits);
      }
    }
    multiply<T, kN>(d, rows, b, keep);
  }
};

}  // namespace hopper
}  // namespace lltm_ext
