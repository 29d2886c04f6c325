// gemm in float32 by Hopper's matrix units, for who asks for it by name.
//
// bf16x6, bf16x9: a value is the sum of three bfloat16, each what those before it leave out, rounded. Of the
// nine products of two such sums the six largest give float32's accuracy, all nine a little more. One kernel
// takes operands apart, another multiplies the parts, the least products first. The matrix units sum with
// fewer bits than float32 has: every 128 of K their sum is added to one in registers. Of all nine products,
// that of the first parts is nearly all of a sum: it is added every 64 of K, and what its additions round off
// goes to the sum of the other eight, which joins it last.
//
// tf32: the matrix units read float32 and leave out its last 13 bits.
#pragma once

#include "common/hopper/pipeline.cuh"
#include "common/hopper/split.cuh"
#include "common/vec.cuh"
#include "gemm/gemm.h"
#include "gemm/hopper_schedule.cuh"

namespace lltm_ext {
namespace hopper {

// ---- operands: [rows, k] of any strides become [parts, batch, rows, padded k]

constexpr int kPartRows = 32, kPartColumns = 64, kPartThreads = 256;

struct Apart {
  const float* from;
  int64_t batch_stride, row_stride, k_stride;
  int64_t rows, k, padded;  // padded: the distance of rows in the copies
  int64_t part;             // the distance of parts
};

__device__ __forceinline__ void put_apart(__nv_bfloat16* to, int64_t part, float x, float y) {
  constexpr float kMost = 0x1.fep127f;  // that bfloat16 has: beyond it rounding would make infinities
  float rest[2] = {x, y};
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    Vec<__nv_bfloat16, 2> rounded;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      rounded.data[e] = __float2bfloat16_rn(p == 0 ? fminf(fmaxf(rest[e], -kMost), kMost) : rest[e]);
      rest[e] -= __bfloat162float(rounded.data[e]);
    }
    *reinterpret_cast<Vec<__nv_bfloat16, 2>*>(to + p * part) = rounded;
  }
}
__device__ __forceinline__ void put_apart(float* to, int64_t, float x, float y) {
  *reinterpret_cast<Vec<float, 2>*>(to) = {x, y};
}

// Through shared memory, so that neighbours in memory are neighbours in a warp on both sides.
template <typename T>
__global__ void __launch_bounds__(kPartThreads) take_apart_kernel(const Apart x, T* to) {
  __shared__ float tile[kPartRows][kPartColumns + 1];
  const int64_t row = int64_t{blockIdx.x} * kPartRows, column = int64_t{blockIdx.y} * kPartColumns;
  const float* from = x.from + blockIdx.z * x.batch_stride;
  const bool along_k = x.k_stride == 1;
  constexpr int kOfThread = kPartRows * kPartColumns / kPartThreads;
  const auto place = [&](int i) {
    i = i * kPartThreads + threadIdx.x;
    return along_k ? int2{i / kPartColumns, i % kPartColumns} : int2{i % kPartRows, i / kPartRows};
  };
  // All of a thread's reads are on their way before the first of them is waited for.
  float value[kOfThread];
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int2 at = place(i);
    const bool inside = row + at.x < x.rows && column + at.y < x.k;
    value[i] = inside ? from[(row + at.x) * x.row_stride + (column + at.y) * x.k_stride] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) tile[place(i).x][place(i).y] = value[i];
  __syncthreads();
  to += blockIdx.z * x.rows * x.padded;
  for (int i = threadIdx.x; i < kPartRows * kPartColumns / 2; i += kPartThreads) {
    const int r = i / (kPartColumns / 2), n = i % (kPartColumns / 2) * 2;
    if (row + r >= x.rows || column + n >= x.padded) continue;
    put_apart(to + (row + r) * x.padded + column + n, x.part, tile[r][n], tile[r][n + 1]);
  }
}

// ---- products

// Which parts of a and b the terms multiply, the least first.
template <int kTerms>
struct Terms;
template <>
struct Terms<1> {
  __device__ static int2 at(int) { return {0, 0}; }
};
template <>
struct Terms<9> {
  // 2 x 2, 2 x 1, 1 x 2, 2 x 0, 0 x 2, 1 x 1, 1 x 0, 0 x 1, 0 x 0: two bits each.
  __device__ static int2 at(int term) {
    constexpr unsigned a = 2 | 2 << 2 | 1 << 4 | 2 << 6 | 0 << 8 | 1 << 10 | 1 << 12 | 0 << 14 | 0 << 16;
    constexpr unsigned b = 2 | 1 << 2 | 2 << 4 | 0 << 6 | 2 << 8 | 1 << 10 | 0 << 12 | 1 << 14 | 0 << 16;
    return {static_cast<int>(a >> 2 * term & 3), static_cast<int>(b >> 2 * term & 3)};
  }
};
template <>
struct Terms<6> {
  __device__ static int2 at(int term) { return Terms<9>::at(term + 3); }
};

struct FloatProblem {
  const float* bias;  // [N], or null
  int64_t bias_stride;
  float *c, *before;  // [batch, M, N], contiguous; before the activation, or null
  int m, n, tiles_of_k;
  int parts_a, parts_b;       // the distance of parts, in matrices
  bool batched_a, batched_b;  // else the one matrix serves all of the batch
  bool pairs;                 // whether two neighbours can be written at a time
  Activation activation;
};

template <class Operands, int kTerms>
struct FloatPersistent {
  static constexpr int kTileM = Operands::kTileM, kN = Operands::kTileN, kConsumers = Operands::kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kShared = Operands::kBytes + kBarrierBytes;

  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const FloatProblem& problem,
                             const Schedule& schedule) {
    unsigned char* shared = aligned_shared();
    Pipeline<Operands> pipeline(
        shared, *reinterpret_cast<typename Pipeline<Operands>::Barriers*>(shared + Operands::kBytes));
    const uint32_t rank = Operands::kShare > 1 ? cluster_rank() : 0;
    const int warpgroup = threadIdx.x / 128;
    const int64_t first = blockIdx.x / Operands::kShare, step = gridDim.x / Operands::kShare;
    if (threadIdx.x == 0) {
      pipeline.init();
      prefetch_map(a);
      prefetch_map(b);
    }
    if constexpr (Operands::kShare > 1) cluster_sync();
    __syncthreads();

    const auto place = [&](int64_t i) {
      Tile tile = schedule.at(i);
      tile.row = (tile.row * Operands::kShare + rank) * kTileM;
      tile.column *= kN;
      return tile;
    };
    wait_for_launch_before();
    let_next_launch_begin();
    if (warpgroup == kConsumers) {
      give_registers<40>();
      if (threadIdx.x % 128 == 0) {
        for (int64_t i = first; i < schedule.total(); i += step) {
          const Tile tile = place(i);
          for (int term = 0; term < kTerms; ++term) {
            const int2 part = Terms<kTerms>::at(term);
            const int matrix_a = part.x * problem.parts_a + (problem.batched_a ? tile.matrix : 0),
                      matrix_b = part.y * problem.parts_b + (problem.batched_b ? tile.matrix : 0);
            for (int k = 0; k < problem.tiles_of_k; ++k) {
              pipeline.fetch(a, b, tile.row, tile.column, k * Operands::kTileK, matrix_a, matrix_b, rank);
            }
          }
        }
      }
      __syncwarp();
    } else {
      take_registers<232>();
      for (int64_t i = first; i < schedule.total(); i += step) {
        const Tile tile = place(i);
        float sum[kN / 2];
        if constexpr (kTerms == 1) {
          pipeline.multiply(sum, problem.tiles_of_k, warpgroup);
        } else {
          promoted(sum, pipeline, problem.tiles_of_k, warpgroup);
        }
        leave(sum, problem, tile.row + 64 * warpgroup, tile.column, tile.matrix);
      }
    }
    // Others of the cluster may still send to this block's shared memory.
    if constexpr (Operands::kShare > 1) cluster_sync();
  }

 private:
  __device__ static __forceinline__ void promoted(float (&sum)[kN / 2], Pipeline<Operands>& pipeline,
                                                  int tiles_of_k, int warpgroup) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sum[i] = 0.f;
    if constexpr (kTerms < 9) {
      promote<2>(pipeline, tiles_of_k * kTerms, warpgroup, [&](int i, float x) { sum[i] += x; });
    } else {
      float rest[kN / 2] = {};
      promote<2>(pipeline, tiles_of_k * (kTerms - 1), warpgroup, [&](int i, float x) { rest[i] += x; });
      promote<1>(pipeline, tiles_of_k, warpgroup, [&](int i, float x) {
        const float both = sum[i] + x;
        rest[i] += x - (both - sum[i]);  // what `both` leaves out
        sum[i] = both;
      });
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        if (isfinite(sum[i])) sum[i] += rest[i];  // of an overflow the rest is NaN
      }
    }
  }

  // add(i, x): of this many tiles of K at once, the thread's i-th product.
  template <int kAtOnce, class Add>
  __device__ static __forceinline__ void promote(Pipeline<Operands>& pipeline, int tiles, int warpgroup,
                                                 const Add& add) {
    for (int k = 0; k < tiles; k += kAtOnce) {
      float d[kN / 2];
      pipeline.multiply(d, tiles - k < kAtOnce ? tiles - k : kAtOnce, warpgroup);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) add(i, d[i]);
    }
  }

  // Of each 8 columns a thread has two neighbours in row lane / 4, then the same two in the row 8 below. They
  // leave in chunks of 64 columns, and the accumulators move up: the code of all activations is there once.
  __device__ static __forceinline__ void leave(float (&d)[kN / 2], const FloatProblem& problem, int row,
                                               int column, int matrix) {
    const int thread = threadIdx.x % 128;
    row += thread / 32 * 16 + thread % 32 / 4;
    column += thread % 4 * 2;
#pragma unroll 1
    for (int chunk = 0; chunk < kN / 64; ++chunk, column += 64) {
      float x[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = d[i];
#pragma unroll
      for (int i = 0; i < kN / 2 - 32; ++i) d[i] = d[i + 32];
      if (problem.bias) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int n = column + i / 4 * 8 + i % 2;
          if (n < problem.n) x[i] += problem.bias[n * problem.bias_stride];
        }
      }
      if (problem.before) put(x, problem, problem.before, row, column, matrix);
      activate(problem.activation, x);
      put(x, problem, problem.c, row, column, matrix);
    }
  }

  __device__ static __forceinline__ void put(const float (&x)[32], const FloatProblem& problem, float* to,
                                             int row, int column, int matrix) {
    to += (static_cast<int64_t>(matrix) * problem.m + row) * problem.n + column;
#pragma unroll
    for (int half = 0; half < 2; ++half, to += int64_t{8} * problem.n) {
      if (row + 8 * half >= problem.m) return;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float first = x[4 * i + 2 * half], second = x[4 * i + 2 * half + 1];
        const int left = problem.n - column - 8 * i;
        if (problem.pairs) {
          if (left > 0) *reinterpret_cast<Vec<float, 2>*>(to + 8 * i) = {first, second};
        } else {
          if (left > 0) to[8 * i] = first;
          if (left > 1) to[8 * i + 1] = second;
        }
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_float_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                      const __grid_constant__ FloatProblem problem, const Schedule schedule) {
  LLTM_HOPPER(Kernel::run(&a, &b, problem, schedule));
}

}  // namespace hopper
}  // namespace lltm_ext
