// The mainloop of a Hopper kernel: a producer warp fills a ring of shared-memory stages by TMA, one tile of K
// after the other, and consumer warpgroups multiply each stage by wgmma and hand it back.
//
// Operand tiles of [rows, 64] have the 128-byte swizzle. K-major: a row of 128 bytes for each row. MN-major:
// a row of 128 bytes for each k, 64 rows of the operand wide, in blocks of 64 k.
#pragma once

#include "common/hopper/ptx.cuh"
#include "common/hopper/sizes.h"

namespace lltm_ext {
namespace hopper {

constexpr int kBlockBytes = 64 * kSwizzleBytes;
template <typename T>
constexpr int kTileKOf = kSwizzleBytes / sizeof(T);
constexpr int kTileK = kTileKOf<__half>;

// Tile shape, stages and operand layouts of a mainloop. kTileM: 64 rows for each consumer warpgroup.
// kClusterM: the blocks of a cluster have the same columns of c; each loads its part of a tile of b, columns
// if it is K-major, else slices of K, and multicasts it.
template <typename T_, int kTileM_, int kTileN_, int kStages_, bool kMnMajorA_, bool kMnMajorB_,
          int kClusterM_ = 1>
struct Mainloop {
  using T = T_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kStages = kStages_, kClusterM = kClusterM_;
  static constexpr bool kMnMajorA = kMnMajorA_, kMnMajorB = kMnMajorB_;
  static constexpr int kConsumers = kTileM / 64;  // warpgroups
  static constexpr int kBytesA = kTileM * kSwizzleBytes, kBytesB = kTileN * kSwizzleBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kTileK = kTileKOf<T>;
  static_assert(sizeof(T) == 2 || (!kMnMajorA && !kMnMajorB), "wgmma takes float operands K-major only");
  static_assert(!kMnMajorB || kTileN % 64 == 0, "MN-major operands are loaded in blocks of 64 columns");
  static_assert((kMnMajorB ? 64 : kTileN) % (8 * kClusterM) == 0, "swizzled rows are in groups of 8");
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
  static constexpr int kStages = Mainloop::kStages, kClusterM = Mainloop::kClusterM;

 public:
  struct Barriers {
    uint64_t full[kStages], empty[kStages];
  };

  __device__ Pipeline(unsigned char* stages, Barriers& barriers) : stages_(stages), barriers_(barriers) {}

  // By one thread.
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

  // The next stage, once all consumers have released it, with its barrier expecting a whole stage of bytes.
  // By one thread.
  __device__ __forceinline__ Stage producer_acquire() {
    const Stage found = stage(state_.stage);
    mbarrier_wait(&barriers_.empty[state_.stage], state_.phase ^ 1);
    mbarrier_arrive_expect_tx(found.full, Mainloop::kStageBytes);
    state_.advance();
    return found;
  }

  // Loads a tile of a and one of b into the next stage. By one thread.
  __device__ __forceinline__ void load(const CUtensorMap* a, const CUtensorMap* b, int row, int column, int k,
                                       int matrix_a, int matrix_b, uint32_t rank) {
    const Stage to = producer_acquire();
    if constexpr (Mainloop::kMnMajorA) {
#pragma unroll
      for (int i = 0; i < Mainloop::kTileM / 64; ++i) {
        tma_load(to.a + i * kBlockBytes, a, row + 64 * i, k, matrix_a, to.full);
      }
    } else {
      tma_load(to.a, a, k, row, matrix_a, to.full);
    }
    constexpr int kPart =
        (Mainloop::kMnMajorB ? 64 : Mainloop::kTileN) / kClusterM;  // of the rows of 128 bytes
    const int first = kClusterM == 1 ? 0 : kPart * static_cast<int>(rank);
    const auto load_b = [&](int offset, int x, int y) {
      if constexpr (kClusterM == 1) {
        tma_load(to.b + offset * kSwizzleBytes, b, x, y, matrix_b, to.full);
      } else {
        tma_load_multicast(to.b + offset * kSwizzleBytes, b, x, y, matrix_b, to.full, (1 << kClusterM) - 1);
      }
    };
    if constexpr (Mainloop::kMnMajorB) {
#pragma unroll
      for (int i = 0; i < Mainloop::kTileN; i += 64) load_b(i + first, column + i, k + first);
    } else {
      load_b(first, k, column + first);
    }
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
  // Each producer of the cluster multicasts to this block, so each must know.
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

}  // namespace hopper
}  // namespace lltm_ext
