// The mainloop of a Hopper kernel: a producer warp fills a ring of shared-memory stages by TMA, one tile of K
// after the other, and consumer warpgroups multiply each stage by wgmma and hand it back.
//
// Operand tiles of [rows, kTileK] have the 128-byte swizzle. K-major: a row of 128 bytes for each row.
// MN-major: a row of 128 bytes for each k, kTileK rows of the operand wide, in blocks of kTileK k.
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
// A cluster computes kClusterM tiles of c below each other, one a block. They share a tile of b: each block
// loads a part of it and multicasts it.
template <typename T_, int kTileM_, int kTileN_, int kStages_, bool kMnMajorA_, bool kMnMajorB_,
          int kClusterM_ = 1>
struct Mainloop {
  using T = T_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kStages = kStages_;
  static constexpr int kClusterM = kClusterM_;
  static constexpr bool kMnMajorA = kMnMajorA_, kMnMajorB = kMnMajorB_;
  static constexpr int kConsumers = kTileM / 64;  // consumer warpgroups
  static constexpr int kBytesA = kTileM * kSwizzleBytes, kBytesB = kTileN * kSwizzleBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kTileK = kTileKOf<T>;
  static_assert(!kMnMajorB || kTileN % 64 == 0, "MN-major operands are loaded in blocks of 64 columns");
  // How many of a shared tile's rows of 128 bytes a block loads: they are columns of c if b is K-major, else
  // slices of K.
  static constexpr int kPartB = (kMnMajorB ? kTileK : kTileN) / kClusterM;
  static_assert(kPartB % 8 == 0, "swizzled rows are in groups of 8");
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
  static constexpr int kClusterM = Mainloop::kClusterM;

 public:
  struct Barriers {
    uint64_t full[kStages], empty[kStages];
  };

  __device__ Pipeline(unsigned char* stages, Barriers& barriers) : stages_(stages), barriers_(barriers) {}

  // One thread calls this.
  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&barriers_.full[i], 1);
      mbarrier_init(&barriers_.empty[i], Mainloop::kConsumers * kClusterM);
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
    load_part<Mainloop::kMnMajorA, Mainloop::kTileM, 1>(to.a, a, row, k, matrix_a, to.full, 0);
    load_part<Mainloop::kMnMajorB, Mainloop::kTileN, kClusterM>(to.b, b, column, k, matrix_b, to.full, rank);
  }

  // d [64, kTileN] = this warpgroup's 64 rows of a times b, over one or more tiles of K.
  template <int kCount>
  __device__ __forceinline__ void mma(float (&d)[kCount], int tiles, int warpgroup) {
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

 private:
  // Loads part `part` of a tile [kRows, kTileK] of an operand, which kSharers blocks of the cluster share.
  template <bool kMnMajor, int kRows, int kSharers>
  __device__ static __forceinline__ void load_part(unsigned char* to, const CUtensorMap* map, int row, int k,
                                                   int matrix, uint64_t* full, uint32_t part) {
    constexpr int kTileK = Mainloop::kTileK;
    const int first = (kMnMajor ? kTileK : kRows) / kSharers * static_cast<int>(part);
    const auto load = [&](int offset, int x, int y) {
      if constexpr (kSharers == 1) {
        tma_load(to + offset * kSwizzleBytes, map, x, y, matrix, full);
      } else {
        constexpr uint16_t kAll = (1 << kSharers) - 1;
        tma_load_multicast(to + offset * kSwizzleBytes, map, x, y, matrix, full, kAll);
      }
    };
    if constexpr (kMnMajor) {
#pragma unroll
      for (int i = 0; i < kRows; i += kTileK) load(i + first, row + i, k + first);
    } else {
      load(first, k, row + first);
    }
  }

  // The producers of all blocks multicast to this one, so it tells each of them.
  __device__ __forceinline__ void consumer_release(int stage) {
    const uint32_t thread = threadIdx.x % 128;
    if constexpr (kClusterM == 1) {
      if (thread == 0) mbarrier_arrive(&barriers_.empty[stage]);
    } else {
      if (thread < kClusterM) mbarrier_arrive_cluster(&barriers_.empty[stage], thread);
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
  if constexpr (Mainloop::kClusterM > 1) cluster_sync();
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
  if constexpr (Mainloop::kClusterM > 1) cluster_sync();
}

template <class Mainloop>
__device__ __forceinline__ Pipeline<Mainloop> pipeline_of(unsigned char* stages, unsigned char* barriers) {
  return {stages, *reinterpret_cast<typename Pipeline<Mainloop>::Barriers*>(barriers)};
}

}  // namespace hopper
}  // namespace lltm_ext
