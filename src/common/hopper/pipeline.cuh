// The way of operands into a block on Hopper: the copy engine fills stages of shared memory, tile of K after
// tile of K; warpgroups multiply what lies there and hand the stage back.
//
// An operand's tile of [rows, 64] lies in lines of 128 bytes: with its K side by side a line a row, else 64
// rows side by side a line, in blocks of 64 such lines.
#pragma once

#include "common/hopper/ptx.cuh"

namespace lltm_ext {
namespace hopper {

constexpr int kLineBytes = 128, kBlockBytes = 64 * kLineBytes;
template <typename T>
constexpr int kTileKOf = kLineBytes / sizeof(T);
constexpr int kTileK = kTileKOf<__half>;

// kTileM: 64 rows for each warpgroup that multiplies. kSwapA, kSwapB: the operand lies with M or N side by
// side. kShare: so many blocks of a cluster have the same columns of c, and each fetches its part of b for
// all.
template <typename T_, int kTileM_, int kTileN_, int kStages_, bool kSwapA_, bool kSwapB_, int kShare_ = 1>
struct Operands {
  using T = T_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kStages = kStages_, kShare = kShare_;
  static constexpr bool kSwapA = kSwapA_, kSwapB = kSwapB_;
  static constexpr int kConsumers = kTileM / 64;  // warpgroups
  static constexpr int kBytesA = kTileM * kLineBytes, kBytesB = kTileN * kLineBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kTileK = kTileKOf<T>;
  static_assert(sizeof(T) == 2 || (!kSwapA && !kSwapB), "float operands lie with K side by side");
  static_assert(!kSwapB || kTileN % (64 * kShare) == 0, "a swapped operand is fetched in blocks of 64");
  static_assert(kStageBytes % 1024 == 0, "what the copy engine exchanges starts at multiples of 1,024 bytes");
};

// Where a pipeline is: the next stage, and the parity of its phase.
template <int kStages>
struct Position {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class Operands>
class Pipeline {
  using T = typename Operands::T;
  static constexpr int kStages = Operands::kStages, kShare = Operands::kShare;

 public:
  struct Barriers {
    uint64_t full[kStages], empty[kStages];
  };

  __device__ Pipeline(unsigned char* stages, Barriers& barriers) : stages_(stages), barriers_(barriers) {}

  // By one thread.
  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&barriers_.full[i], 1);
      barrier_init(&barriers_.empty[i], Operands::kConsumers * kShare);
    }
    barrier_init_fence();
  }

  // A stage to be filled.
  struct Stage {
    unsigned char *a, *b;
    uint64_t* full;
  };
  __device__ __forceinline__ Stage stage(int i) {
    unsigned char* const to = stages_ + i * Operands::kStageBytes;
    return {to, to + Operands::kBytesA, &barriers_.full[i]};
  }

  // The next stage, once nobody multiplies from it any more: all of its bytes are to come. By one thread.
  __device__ __forceinline__ Stage next() {
    const Stage found = stage(at_.stage);
    barrier_wait(&barriers_.empty[at_.stage], at_.parity ^ 1);
    barrier_arrive_expecting(found.full, Operands::kStageBytes);
    at_.advance();
    return found;
  }

  // Fetches a tile of a and of b from these positions, by one thread.
  __device__ __forceinline__ void fetch(const CUtensorMap* a, const CUtensorMap* b, int row, int column,
                                        int k, int matrix_a, int matrix_b, uint32_t rank) {
    const Stage to = next();
    if constexpr (Operands::kSwapA) {
#pragma unroll
      for (int i = 0; i < Operands::kTileM / 64; ++i) {
        copy_in(to.a + i * kBlockBytes, a, row + 64 * i, k, matrix_a, to.full);
      }
    } else {
      copy_in(to.a, a, k, row, matrix_a, to.full);
    }
    constexpr int kPart = Operands::kTileN / kShare;
    const int first = kShare == 1 ? 0 : kPart * static_cast<int>(rank);
    const auto fetch_b = [&](int offset, int x, int y) {
      if constexpr (kShare == 1) {
        copy_in(to.b + offset * kLineBytes, b, x, y, matrix_b, to.full);
      } else {
        copy_in_to_blocks(to.b + offset * kLineBytes, b, x, y, matrix_b, to.full, (1 << kShare) - 1);
      }
    };
    if constexpr (Operands::kSwapB) {
#pragma unroll
      for (int i = 0; i < kPart / 64; ++i) fetch_b(first + 64 * i, column + first + 64 * i, k);
    } else {
      fetch_b(first, k, column + first);
    }
  }

  // d [64, kTileN] = a's 64 rows of this warpgroup times b, over `tiles` tiles of K, one at least.
  template <int kCount>
  __device__ __forceinline__ void multiply(float (&d)[kCount], int tiles, int warpgroup) {
    int last = 0;
    for (int i = 0; i < tiles; ++i) {
      barrier_wait(&barriers_.full[at_.stage], at_.parity);
      const uint32_t a =
          shared_address(stages_ + at_.stage * Operands::kStageBytes) + warpgroup * kBlockBytes;
      const uint32_t b = shared_address(stages_ + at_.stage * Operands::kStageBytes + Operands::kBytesA);
      products_fence(d);
      products_begin();
#pragma unroll
      for (int k = 0; k < kLineBytes / 32; ++k) {
        constexpr int kStepA = Operands::kSwapA ? 16 * kLineBytes : 32;
        constexpr int kStepB = Operands::kSwapB ? 16 * kLineBytes : 32;
        Product<T, Operands::kTileN, Operands::kSwapA, Operands::kSwapB>::run(
            d, descriptor(a + k * kStepA, kBlockBytes), descriptor(b + k * kStepB, kBlockBytes), i + k > 0);
      }
      products_commit();
      // Those of the stage before are done as soon as only these are under way.
      products_fence(d);
      products_done<1>();
      if (i > 0) release(last);
      last = at_.stage;
      at_.advance();
    }
    products_done<0>();
    products_fence(d);
    release(last);
  }

 private:
  __device__ __forceinline__ void release(int stage) {
    const uint32_t thread = threadIdx.x % 128;
    if constexpr (kShare == 1) {
      if (thread == 0) barrier_arrive(&barriers_.empty[stage]);
    } else {
      if (thread < kShare) barrier_arrive_at(&barriers_.empty[stage], thread);
    }
  }

  unsigned char* const stages_;
  Barriers& barriers_;
  Position<kStages> at_;
};

}  // namespace hopper
}  // namespace lltm_ext
