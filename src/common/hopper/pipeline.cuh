// The mainloop of a Hopper kernel: a producer warp fills a ring of shared-memory stages by TMA, one tile of K
// after the other, and consumer warpgroups multiply each stage by wgmma and hand it back.
//
// Operand tiles of [rows, kTileK] have the 128-byte swizzle. K-major: a row of 128 bytes for each row.
// MN-major: a row of 128 bytes for each k, kTileK rows of the operand wide, in blocks of kTileK k. wgmma
// reads float32 in K-major tiles only: MN-major ones of a go through registers.
#pragma once

#include "common/hopper/ptx.cuh"
#include "common/hopper/sizes.h"
#include "common/launch.cuh"
#include "common/ptx.cuh"

namespace lltm_ext {
namespace hopper {

constexpr int kBlockBytes = 64 * kSwizzleBytes;
template <typename T>
constexpr int kTileKOf = kSwizzleBytes / sizeof(T);
constexpr int kTileK = kTileKOf<__half>;

// Tile shape, stages and operand layouts of a mainloop. kTileM: 64 rows for each consumer warpgroup.
// A cluster computes kClusterM x kClusterN tiles of c, one a block. Blocks in the same row of the cluster
// share a tile of a, blocks in the same column a tile of b. Each block loads a part of a shared tile and
// multicasts it.
template <typename T_, int kTileM_, int kTileN_, int kStages_, bool kMnMajorA_, bool kMnMajorB_,
          int kClusterM_ = 1, int kClusterN_ = 1>
struct Mainloop {
  using T = T_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kStages = kStages_;
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_;
  static constexpr int kClusterBlocks = kClusterM * kClusterN;
  static constexpr bool kMnMajorA = kMnMajorA_, kMnMajorB = kMnMajorB_;
  static constexpr int kConsumers = kTileM / 64;  // consumer warpgroups
  static constexpr int kBytesA = kTileM * kSwizzleBytes, kBytesB = kTileN * kSwizzleBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kTileK = kTileKOf<T>;
  static_assert(sizeof(T) == 2 || !kMnMajorB, "wgmma takes float operands K-major only");
  static_assert(!kMnMajorB || kTileN % 64 == 0, "MN-major operands are loaded in blocks of 64 columns");
  static constexpr bool kFromRegisters = sizeof(T) == 4 && kMnMajorA;
  // How many of a shared tile's rows of 128 bytes a block loads: they are rows or columns of c if the operand
  // is K-major, else slices of K.
  static constexpr int kPartA = (kMnMajorA ? kTileK : kTileM) / kClusterN;
  static constexpr int kPartB = (kMnMajorB ? kTileK : kTileN) / kClusterM;
  static_assert(kPartA % 8 == 0 && kPartB % 8 == 0, "swizzled rows are in groups of 8");
  static_assert(kStageBytes % 1024 == 0, "swizzled tiles start at multiples of 1,024 bytes");
};

// The stage whose turn it is, and the parity of its barriers' phase.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class Mainloop>
class Pipeline {
  using T = typename Mainloop::T;
  static constexpr int kStages = Mainloop::kStages;
  static constexpr int kClusterM = Mainloop::kClusterM, kClusterN = Mainloop::kClusterN;

 public:
  struct Barriers {
    uint64_t full[kStages], empty[kStages];
  };

  __device__ Pipeline(unsigned char* stages, Barriers& barriers) : stages_(stages), barriers_(barriers) {}

  // One thread calls this.
  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&barriers_.full[i], 1);
      mbarrier_init(&barriers_.empty[i], Mainloop::kConsumers * (kClusterM + kClusterN - 1));
    }
    fence_mbarrier_init();
  }

  struct Stage {
    unsigned char *a, *b;
    uint64_t* full;
  };
  __device__ __forceinline__ Stage stage(int i) {
    unsigned char* const to = stages_ + i * Mainloop::kStageBytes;
    return {to, to + Mainloop::kBytesA, &barriers_.full[i]};
  }

  // Returns the next stage, once all consumers have released it, with its barrier expecting a whole stage of
  // bytes. One thread calls this.
  __device__ __forceinline__ Stage producer_acquire() {
    const Stage found = stage(state_.stage);
    mbarrier_wait(&barriers_.empty[state_.stage], state_.phase ^ 1);
    mbarrier_arrive_expect_tx(found.full, Mainloop::kStageBytes);
    state_.advance();
    return found;
  }

  // Loads a tile of a and one of b into the next stage. One thread calls this.
  __device__ __forceinline__ void load(const CUtensorMap* a, const CUtensorMap* b, int row, int column, int k,
                                       int matrix_a, int matrix_b, uint32_t rank) {
    const Stage to = producer_acquire();
    const int m = rank % kClusterM, n = rank / kClusterM;
    constexpr int kRowOfBlocks = ((1 << Mainloop::kClusterBlocks) - 1) / ((1 << kClusterM) - 1);
    constexpr int kColumnOfBlocks = (1 << kClusterM) - 1;
    load_part<Mainloop::kMnMajorA, Mainloop::kTileM, kClusterN>(to.a, a, row, k, matrix_a, to.full, n,
                                                                kRowOfBlocks << m);
    load_part<Mainloop::kMnMajorB, Mainloop::kTileN, kClusterM>(to.b, b, column, k, matrix_b, to.full, m,
                                                                kColumnOfBlocks << n * kClusterM);
  }

  // After mma a thread has two rows of this warpgroup's 64 of c: this one, and the one kRowStep below it.
  static constexpr int kRowStep = Mainloop::kFromRegisters ? 16 : 8;
  static __device__ __forceinline__ int first_row() {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    return Mainloop::kFromRegisters ? warp / 2 * 32 + warp % 2 * 8 + g : warp * 16 + g;
  }

  // d [64, kTileN] = this warpgroup's 64 rows of a times b, over one or more tiles of K.
  template <int kCount>
  __device__ __forceinline__ void mma(float (&d)[kCount], int tiles, int warpgroup) {
    if constexpr (Mainloop::kFromRegisters) {
      mma_from_registers(d, tiles, warpgroup);
    } else {
      mma_from_shared(d, tiles, warpgroup);
    }
  }

 private:
  template <int kCount>
  __device__ __forceinline__ void mma_from_shared(float (&d)[kCount], int tiles, int warpgroup) {
    int last = 0;
    for (int i = 0; i < tiles; ++i) {
      mbarrier_wait(&barriers_.full[state_.stage], state_.phase);
      const uint32_t a =
          shared_address(stages_ + state_.stage * Mainloop::kStageBytes) + warpgroup * kBlockBytes;
      const uint32_t b = shared_address(stages_ + state_.stage * Mainloop::kStageBytes + Mainloop::kBytesA);
      fence_accumulator(d);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSwizzleBytes / 32; ++k) {
        constexpr int kStepA = Mainloop::kMnMajorA ? 16 * kSwizzleBytes : 32;
        constexpr int kStepB = Mainloop::kMnMajorB ? 16 * kSwizzleBytes : 32;
        Wgmma<T, Mainloop::kTileN, Mainloop::kMnMajorA, Mainloop::kMnMajorB>::run(
            d, matrix_descriptor(a + k * kStepA, kBlockBytes), matrix_descriptor(b + k * kStepB, kBlockBytes),
            i + k > 0);
      }
      wgmma_commit_group();
      fence_accumulator(d);
      wgmma_wait_group<1>();  // the products of the stage before are done
      if (i > 0) consumer_release(last);
      last = state_.stage;
      state_.advance();
    }
    wgmma_wait_group<0>();
    fence_accumulator(d);
    consumer_release(last);
  }

  // A block of a has 32 rows for each k, of which a warp takes every other 8, from row 8 (warp % 2) on. With
  // g = lane / 4 a lane multiplies rows g % 4 + 16 (g / 4) of those and 4 below, so that a warp reads 32
  // different banks. Then lanes swap sums, and have rows g and g + 16. While one warpgroup loads, the other
  // multiplies.
  template <int kCount>
  __device__ __forceinline__ void mma_from_registers(float (&d)[kCount], int tiles, int warpgroup) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t first = shared_address(stages_) + (warpgroup * 2 + warp / 2) * 32 * kSwizzleBytes +
                           t * kSwizzleBytes + ((warp % 2 * 2 + g / 4 * 4) ^ t) * 16 + g % 4 * 4;
    constexpr int kSteps = kSwizzleBytes / 32;
    for (int i = 0; i < tiles; ++i) {
      mbarrier_wait(&barriers_.full[state_.stage], state_.phase);
      const uint32_t a = first + state_.stage * Mainloop::kStageBytes;
      const uint32_t b = shared_address(stages_ + state_.stage * Mainloop::kStageBytes + Mainloop::kBytesA);
      uint32_t x[kSteps][4];
#pragma unroll
      for (int j = 0; j < 4 * kSteps; ++j) {
        const int k = j / 4, below = j % 2, further = j / 2 % 2;  // 4 rows below, 4 of K further
        x[k][j % 4] = ld_shared((a ^ (below * 16 + further * 64)) + (8 * k + further * 4) * kSwizzleBytes);
      }
      fence_accumulator(d);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        WgmmaTf32Registers<Mainloop::kTileN>::run(d, x[k], matrix_descriptor(b + k * 32, kBlockBytes),
                                                  i + k > 0);
      }
      wgmma_commit_group();
      wgmma_wait_group<0>();
      fence_accumulator(d);
      consumer_release(state_.stage);
      state_.advance();
    }
    const bool upper = g >= 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i % 4 >= 2) continue;
      float &first_row = d[i], &second_row = d[i + 2];
      const float found = __shfl_xor_sync(0xffffffffu, upper ? first_row : second_row, 16);
      (upper ? first_row : second_row) = found;
    }
  }

  // Loads part `part` of a tile [kRows, kTileK] of an operand, which kSharers blocks of the cluster share.
  template <bool kMnMajor, int kRows, int kSharers>
  __device__ static __forceinline__ void load_part(unsigned char* to, const CUtensorMap* map, int row, int k,
                                                   int matrix, uint64_t* full, int part, uint32_t sharers) {
    constexpr int kTileK = Mainloop::kTileK;
    const int first = (kMnMajor ? kTileK : kRows) / kSharers * part;
    const auto load = [&](int offset, int x, int y) {
      if constexpr (kSharers == 1) {
        tma_load(to + offset * kSwizzleBytes, map, x, y, matrix, full);
      } else {
        tma_load_multicast(to + offset * kSwizzleBytes, map, x, y, matrix, full,
                           static_cast<uint16_t>(sharers));
      }
    };
    if constexpr (kMnMajor) {
#pragma unroll
      for (int i = 0; i < kRows; i += kTileK) load(i + first, row + i, k + first);
    } else {
      load(first, k, row + first);
    }
  }

  // The producers in this block's row and column of the cluster multicast to it, so it tells each of them.
  __device__ __forceinline__ void consumer_release(int stage) {
    const uint32_t thread = threadIdx.x % 128;
    if constexpr (Mainloop::kClusterBlocks == 1) {
      if (thread == 0) mbarrier_arrive(&barriers_.empty[stage]);
    } else if constexpr (kClusterN == 1) {
      if (thread < kClusterM) mbarrier_arrive_cluster(&barriers_.empty[stage], thread);
    } else if (thread < kClusterM + kClusterN - 1) {
      const uint32_t rank = cluster_rank(), m = rank % kClusterM, n = rank / kClusterM;
      const uint32_t other = thread - kClusterM;  // counts the columns of blocks, without this block's own
      const uint32_t producer =
          thread < kClusterM ? n * kClusterM + thread : (other + (other >= n)) * kClusterM + m;
      mbarrier_arrive_cluster(&barriers_.empty[stage], producer);
    }
  }

  unsigned char* const stages_;
  Barriers& barriers_;
  PipelineState<kStages> state_;
};

constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of a thread; two consumers fit

// By all threads of a cluster, before any of them uses the pipeline.
template <class Mainloop>
__device__ __forceinline__ void start_pipeline(Pipeline<Mainloop>& pipeline, const CUtensorMap* a,
                                               const CUtensorMap* b) {
  if (threadIdx.x == 0) {
    pipeline.init();
    prefetch_tensor_map(a);
    prefetch_tensor_map(b);
  }
  if constexpr (Mainloop::kClusterBlocks > 1) cluster_sync();
  __syncthreads();
}

// Once the previous kernel has ended: calls `produce` in one thread, and `consume`, with their number, in the
// consumer warpgroups.
template <class Mainloop, class Produce, class Consume>
__device__ __forceinline__ void run_warpgroups(const Produce& produce, const Consume& consume) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == Mainloop::kConsumers) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x % 128 == 0) produce();
    __syncwarp();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(warpgroup);
  }
  // Other blocks of the cluster may still write to this block's shared memory.
  if constexpr (Mainloop::kClusterBlocks > 1) cluster_sync();
}

template <class Mainloop>
__device__ __forceinline__ Pipeline<Mainloop> pipeline_of(unsigned char* stages, unsigned char* barriers) {
  return {stages, *reinterpret_cast<typename Pipeline<Mainloop>::Barriers*>(barriers)};
}

}  // namespace hopper
}  // namespace lltm_ext
