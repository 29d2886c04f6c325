// The kernel for float16 and bfloat16: tensor cores, float32 accumulators.
//
// A block of 4 warps computes a SIDE x SIDE tile of c, a quarter per warp. cp.async copies slices of kDepth
// of K to a ring of kStages in shared memory, in the operands' own layout (K_MAJOR: k is contiguous);
// ldmatrix transposes where needed. Lines are of 16-byte chunks, permuted so that the eight lines of a
// fragment are in different banks.
#pragma once

#include "gemm/gemm_tile.cuh"

namespace lltm_ext {

constexpr int kDepth = 32;
constexpr int kStages = 3;
constexpr int kTensorThreads = 128;

template <int SIDE>
struct TensorTile {
  static constexpr int BM = SIDE, BN = SIDE, BK = kDepth;
  static constexpr int kBlocksPerMultiprocessor = SIDE == 128 ? 2 : 3;
};

template <bool K_MAJOR, int SIDE>
struct Slice {
  static constexpr int kLines = K_MAJOR ? SIDE : kDepth;
  static constexpr int kChunks = (K_MAJOR ? kDepth : SIDE) / 8;  // per line
  static constexpr int kElements = SIDE * kDepth;

  static __device__ __forceinline__ int at(int line, int chunk) {
    // Two lines of 64 bytes share a row of banks, so the permutation changes with every other line.
    const int permutation = kChunks == 4 ? line / 2 % 4 : line % 8;
    return (line * kChunks + (chunk ^ permutation)) * 8;
  }

  // Copies the slice at x.data, in 16-byte chunks if `vectors`, else in elements.
  template <typename T>
  static __device__ __forceinline__ void copy(T* shared, const OperandTile<T>& x, bool vectors,
                                              int64_t k_left) {
    constexpr int kStep = kTensorThreads / kChunks;
    static_assert(kTensorThreads % kChunks == 0 && kLines % kStep == 0);
    const int depth = clamp_to_int(k_left, kDepth);
    const int lines = K_MAJOR ? x.extent : depth;
    const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
    const int valid = min(max((K_MAJOR ? depth : x.extent) - chunk * 8, 0), 8);
    const int64_t stride = K_MAJOR ? x.k_stride : x.stride, line_stride = K_MAJOR ? x.stride : x.k_stride;
    if (vectors) {
      const T* from = x.data + first * line_stride + chunk * 8;
#pragma unroll
      for (int i = 0; i < kLines / kStep; ++i, from += kStep * line_stride) {
        const int line = first + i * kStep;
        cp_async<16>(shared + at(line, chunk), from, line < lines ? valid * 2 : 0);
      }
      return;
    }
    const T* from = x.data + first * line_stride + chunk * 8 * stride;
#pragma unroll 2
    for (int i = 0; i < kLines / kStep; ++i, from += kStep * line_stride) {
      const int line = first + i * kStep;
      Vec<T, 8> values;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values.data[j] = line < lines && j < valid ? from[j * stride] : narrow<T>(0.0f);
      }
      *reinterpret_cast<Vec<T, 8>*>(shared + at(line, chunk)) = values;
    }
  }

  // Loads the 16 x 16 fragment at line `first` and k: its four 8 x 8 matrices are lines 0-7 and 8-15 at the
  // lower 8 k, then both at the upper.
  template <typename T>
  static __device__ __forceinline__ void load(uint32_t (&fragment)[4], const T* shared, int first, int k) {
    const int lane = threadIdx.x % 32;
    if constexpr (K_MAJOR) {
      ldmatrix<false>(fragment, shared + at(first + lane % 16, k / 8 + lane / 16));
    } else {
      ldmatrix<true>(fragment, shared + at(k + lane / 16 * 8 + lane % 8, first / 8 + lane / 8 % 2));
    }
  }
};

template <typename T, int SIDE, bool A_K_MAJOR, bool B_K_MAJOR>
__global__ void __launch_bounds__(kTensorThreads, TensorTile<SIDE>::kBlocksPerMultiprocessor)
    gemm_tensor_kernel(const GemmArgs<T> args, const Tiles tiles, bool vectors_a, bool vectors_b) {
  using SliceA = Slice<A_K_MAJOR, SIDE>;
  using SliceB = Slice<B_K_MAJOR, SIDE>;
  constexpr int kWarpSide = SIDE / 2;
  constexpr int kRowBlocks = kWarpSide / 16, kColumnBlocks = kWarpSide / 16;
  constexpr int kStage = SliceA::kElements + SliceB::kElements;
  static_assert(kStages * kStage * sizeof(T) >= kWarpSide * SIDE * sizeof(float));
  __shared__ __align__(128) T shared[kStages * kStage];

  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / 2 * kWarpSide, warp_column = warp % 2 * kWarpSide;

  const TilePosition at = position(tiles, SIDE, SIDE);
  const KRange range = range_of_k(args.k, kDepth, tiles, at);
  OperandTile<T> a = rows_of_a(args, at, SIDE, range.begin), b = columns_of_b(args, at, SIDE, range.begin);
  float sum[kRowBlocks][2 * kColumnBlocks][4] = {};
  int filling = 0, stage = 0;
  // Multiplies the slice at k and copies the one kPrefetch further. The first rounds, at negative k, only
  // copy.
  constexpr int kPrefetch = (kStages - 1) * kDepth;
  for (int64_t k = -kPrefetch; k < range.size; k += kDepth) {
    if (k >= 0) {
      cp_async_wait_group<kStages - 2>();
      __syncthreads();  // the slice at k is here, and no thread reads the one that the next copy overwrites
    }
    if (k + kPrefetch < range.size) {
      SliceA::copy(shared + filling * kStage, a, vectors_a, range.size - (k + kPrefetch));
      SliceB::copy(shared + filling * kStage + SliceA::kElements, b, vectors_b, range.size - (k + kPrefetch));
      a.data += kDepth * a.k_stride;
      b.data += kDepth * b.k_stride;
    }
    cp_async_commit_group();  // even if empty: the wait counts groups
    filling = filling + 1 == kStages ? 0 : filling + 1;
    if (k >= 0) {
      const T* slice_a = shared + stage * kStage;
      const T* slice_b = slice_a + SliceA::kElements;
#pragma unroll
      for (int i = 0; i < kDepth; i += 16) {
        uint32_t x[kRowBlocks][4], y[kColumnBlocks][4];
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) SliceA::load(x[r], slice_a, warp_row + r * 16, i);
#pragma unroll
        for (int s = 0; s < kColumnBlocks; ++s) SliceB::load(y[s], slice_b, warp_column + s * 16, i);
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
          for (int s = 0; s < kColumnBlocks; ++s) {
            mma(sum[r][2 * s], x[r], y[s][0], y[s][2], T{});
            mma(sum[r][2 * s + 1], x[r], y[s][1], y[s][3], T{});
          }
        }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }

  // The upper half of the tile, then the lower, is staged in shared memory as float32.
  float* staged = reinterpret_cast<float*>(shared);
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    __syncthreads();
    if (warp / 2 == part) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int s = 0; s < 2 * kColumnBlocks; ++s) {
          const int row = r * 16 + lane / 4, column = warp_column + s * 8 + lane % 4 * 2;
          const auto stage_pair = [&](int row, float left, float right) {
            *reinterpret_cast<Vec<float, 2>*>(staged + staged_at<T, SIDE>(row, column)) = {{left, right}};
          };
          stage_pair(row, sum[r][s][0], sum[r][s][1]);
          stage_pair(row + 8, sum[r][s][2], sum[r][s][3]);
        }
      }
    }
    __syncthreads();
    write_staged<kWarpSide, SIDE, kTensorThreads>(args, tiles, at, part * kWarpSide, staged);
  }
}

template <int SIDE, typename T>
cudaError_t launch_tile(TensorTile<SIDE>, const GemmArgs<T>& args, int splits, bool programmatic, bool,
                        cudaStream_t stream) {
  return with_layouts(args, [&](auto a_k_major, auto b_k_major) {
    return launch_tiles(gemm_tensor_kernel<T, SIDE, a_k_major, b_k_major>, tiles_of(args, SIDE, SIDE, splits),
                        kTensorThreads, /*shared_bytes=*/0, programmatic, stream, args,
                        has_vectors(args.a, a_k_major), has_vectors(args.b, !b_k_major));
  });
}

}  // namespace lltm_ext
