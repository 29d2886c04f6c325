// The kernel for float16, bfloat16 and TF32: tensor cores, float32 accumulators.
//
// A block computes a BM x BN tile of c, each warp SIDE x SIDE of it. Slices of BK of K are copied to a ring
// of STAGES in shared memory (gemm_tensor_copy.cuh). A warp multiplies 32 bytes of K at a time, and loads the
// next fragments meanwhile, across slices too, so that the tensor core always finds its operands in
// registers. TF32 is float32 rounded to nearest, in registers: the tensor core would cut off the last bits.
#pragma once

#include "gemm/gemm_tensor_copy.cuh"

namespace lltm_ext {

// VECTORS_ONLY: there are no kernels for operands that are not whole 16-byte vectors.
template <typename T, int BM_, int BN_, int BK_, int SIDE_, int STAGES, int BLOCKS, bool VECTORS_ONLY = false>
struct TensorTile {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, SIDE = SIDE_;
  static constexpr int kStages = STAGES, kBlocksPerMultiprocessor = BLOCKS;
  static constexpr bool kVectorsOnly = VECTORS_ONLY;
  static constexpr bool kOlder = STAGES == 2;  // for GPUs before Ampere, with less shared memory
  static constexpr int kWarpsAcross = BN / SIDE;
  static constexpr int kThreads = BM / SIDE * kWarpsAcross * 32;
  static constexpr int kBytes = STAGES * (BM + BN) * BK * sizeof(T);
  static constexpr int kDepth = 32 / sizeof(T), kParts = BK / kDepth;  // of K: multiplied at once, in a slice
  // The ring stages the tile of sums, one row of warps at a time.
  static_assert(SIDE * BN * sizeof(float) <= kBytes);
  static_assert(STAGES >= 2 && kParts % 2 == 0 && SIDE % 32 == 0);
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kBeforeAmpere = true;
#else
constexpr bool kBeforeAmpere = false;
#endif

// 32 bytes of K of a warp's rows of a and columns of b.
template <typename T, class Tile, class SliceA, class SliceB>
struct TensorFragment {
  static constexpr int kBlocks = Tile::SIDE / 16;
  uint32_t x[kBlocks][4], y[kBlocks][4];

  __device__ __forceinline__ void load(uint32_t slice_a, uint32_t slice_b, int k) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) SliceA::load(x[i], slice_a, i, k);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) SliceB::load(y[i], slice_b, i, k);
  }

  __device__ __forceinline__ void multiply(float (&sum)[kBlocks][2 * kBlocks][4]) {
    if constexpr (sizeof(T) == 4) {
      round(x);
      round(y);
    }
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
#pragma unroll
      for (int s = 0; s < kBlocks; ++s) {
        mma(sum[r][2 * s], x[r], y[s][0], y[s][1], T{});
        mma(sum[r][2 * s + 1], x[r], y[s][2], y[s][3], T{});
      }
    }
  }

 private:
  static __device__ __forceinline__ void round(uint32_t (&x)[kBlocks][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) x[i / 4][i % 4] = cvt_rna_tf32(__uint_as_float(x[i / 4][i % 4]));
  }
};

template <typename T, class Tile, bool A_K_MAJOR, bool B_K_MAJOR, Copies COPIES>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    gemm_tensor_kernel(const GemmArgs<T> args, const Tiles tiles, TensorAccess<T> access_a,
                       TensorAccess<T> access_b) {
  if constexpr (Tile::kOlder != kBeforeAmpere) {
    __trap();  // never launched on these architectures
    return;
  }
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, SIDE = Tile::SIDE, kParts = Tile::kParts;
  // Only cp.async has several slices under way.
  constexpr int kStages = COPIES == Copies::kThroughRegisters ? 2 : Tile::kStages;
  using SliceA = Slice<T, Tile, true, A_K_MAJOR>;
  using SliceB = Slice<T, Tile, false, B_K_MAJOR>;
  constexpr int kStage = SliceA::kBytes + SliceB::kBytes;
  extern __shared__ __align__(128) unsigned char shared[];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / Tile::kWarpsAcross * SIDE, warp_column = warp % Tile::kWarpsAcross * SIDE;
  const TilePosition at = position(tiles, BM, BN);
  const KRange range = range_of_k(args.k, BK, tiles, at);
  SliceCopies<T, Tile, SliceA, COPIES> a(rows_of_a(args, at, BM, range.begin), args.a.data, access_a);
  SliceCopies<T, Tile, SliceB, COPIES> b(columns_of_b(args, at, BN, range.begin), args.b.data, access_b);

  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const uint32_t ring = shared_in_register(shared);
  const auto next = [](int stage) { return stage == (kStages - 1) * kStage ? 0 : stage + kStage; };
  int64_t left = range.size;  // to copy
  int filling = 0, stage = 0;
  const auto start_copies = [&](int part) {
    const int depth = clamp_to_int(left, BK);
    a.start(part, ring + filling, depth);
    b.start(part, ring + filling + SliceA::kBytes, depth);
    if (part == kParts - 1) cp_async_commit_group();  // even if empty: the wait counts groups
  };
  const auto finish_copies = [&](int part) {
    const int depth = clamp_to_int(left, BK);
    a.finish(part, ring + filling, depth);
    b.finish(part, ring + filling + SliceA::kBytes, depth);
    if (part < kParts - 1) return;
    left -= BK;
    filling = next(filling);
  };
  // Waits until the next slice is here for all threads, and all threads have loaded the one before it.
  const auto wait = [] {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();
  };
#pragma unroll 1
  for (int i = 0; i <= (kStages - 1) * kParts; ++i) {
    start_copies(i % kParts);
    finish_copies(i % kParts);
  }
  wait();

  TensorFragment<T, Tile, SliceA, SliceB> fragment[2];  // one is multiplied while the other is loaded
  uint32_t first_a = ring + SliceA::fragment_at(warp_row),
           first_b = ring + SliceA::kBytes + SliceB::fragment_at(warp_column);
  keep_in_register(first_a);
  keep_in_register(first_b);
  fragment[0].load(first_a, first_b, 0);
  float sum[SIDE / 16][SIDE / 8][4] = {};
#pragma unroll 1
  for (int64_t k = 0; k < range.size; k += BK) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      // The branch keeps the compiler from moving the last products before the barrier: the tensor core
      // executes them while the next slice's first fragments are loaded.
      if (part == kParts - 1 && k + BK < range.size) {
        wait();
        stage = next(stage);
      }
      const int next_part = (part + 1) % kParts;
      fragment[next_part % 2].load(first_a + stage, first_b + stage, next_part * Tile::kDepth);
      start_copies(next_part);  // from the first part on, they overwrite the slice before
      fragment[part % 2].multiply(sum);
      finish_copies(next_part);
    }
  }

  // The tile is staged in shared memory as float32, one row of warps at a time.
  float* const staged = reinterpret_cast<float*>(shared);
#pragma unroll 1
  for (int part = 0; part < BM / SIDE; ++part) {
    __syncthreads();
    if (warp / Tile::kWarpsAcross == part) {
#pragma unroll
      for (int r = 0; r < SIDE / 16; ++r) {
#pragma unroll
        for (int s = 0; s < SIDE / 8; ++s) {
          const int row = r * 16 + lane / 4, column = warp_column + s * 8 + lane % 4 * 2;
          const auto stage_pair = [&](int row, float left, float right) {
            *reinterpret_cast<Vec<float, 2>*>(staged + staged_at<T, BN>(row, column)) = {{left, right}};
          };
          stage_pair(row, sum[r][s][0], sum[r][s][1]);
          stage_pair(row + 8, sum[r][s][2], sum[r][s][3]);
        }
      }
    }
    __syncthreads();
    write_staged<SIDE, BN, Tile::kThreads>(args, tiles, at, part * SIDE, staged);
  }
}

template <typename E, int BM, int BN, int BK, int SIDE, int STAGES, int BLOCKS, bool VECTORS_ONLY, typename T>
cudaError_t launch_tile(TensorTile<E, BM, BN, BK, SIDE, STAGES, BLOCKS, VECTORS_ONLY> tile,
                        const GemmArgs<T>& args, const Schedule& schedule, bool, cudaStream_t stream) {
  return with_layouts(args, [&](auto a_k_major, auto b_k_major) {
    const TensorAccess<T> a = access_of(args.a, a_k_major, args.batch, args.m, args.k),
                          b = access_of(args.b, !b_k_major, args.batch, args.k, args.n);
    using Tile = decltype(tile);
    const auto run = [&](auto copies) {
      return launch_tiles<Tile>(gemm_tensor_kernel<T, Tile, a_k_major, b_k_major, copies>, Tile::kBytes, args,
                                schedule, stream, a, b);
    };
    constexpr bool kVectorsOnly = Tile::kVectorsOnly, kOlder = Tile::kOlder;
    const int width = std::min(a.width, b.width);
    if constexpr (!kOlder) {
      if (kVectorsOnly || width == kVecWidth<T>) {
        return run(std::integral_constant<Copies, Copies::kVectors>());
      }
    }
    if constexpr (!kOlder && !kVectorsOnly) {
      if (sizeof(T) == 4 || width >= 2) return run(std::integral_constant<Copies, Copies::kAsync>());
    }
    if constexpr (!kVectorsOnly && sizeof(T) == 2) {
      return run(std::integral_constant<Copies, Copies::kThroughRegisters>());
    }
    return cudaErrorInvalidValue;  // not reached
  });
}

}  // namespace lltm_ext
