// What the kernels for all architectures share: how c is cut into tiles, how a tile's operands are addressed,
// and the epilogue.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/activations.h"
#include "common/hopper/launch.h"
#include "common/hopper/ptx.cuh"
#include "common/launch.cuh"
#include "common/shared_memory.h"
#include "common/types.h"
#include "common/vec.cuh"
#include "gemm/gemm.h"
#include "gemm/gemm_ptx.cuh"
#include "gemm/gemm_schedule.h"
#include "gemm/gemm_tile_order.h"

namespace lltm_ext {

// ---- Tiles of c. One block computes one tile, or one of several parts of its K (split-K). Blocks are
// counted over the whole batch in 64 bits, so neither the batch nor a side of a matrix meets the limits of a
// grid's dimensions.

struct Tiles {
  template <typename T>
  Tiles(const GemmArgs<T>& args, int tile_rows, int tile_columns, int splits_ = 1)
      : order(ceil_div(args.m, tile_rows), ceil_div(args.n, tile_columns), args.batch),
        by_splits(splits_),
        splits(splits_) {}

  TileOrder order;
  Divisor by_splits;
  int splits;         // of K
  int64_t first = 0;  // the number of block 0
};

struct TilePosition {
  int64_t matrix, row, column;  // the tile's first element in c
  int split;
};

__device__ __forceinline__ TilePosition position(const Tiles& tiles, int tile_rows, int tile_columns) {
  const TileOrder::Tile tile = tiles.order.at(tiles.first + blockIdx.x);
  return {tile.matrix, tile.row * tile_rows, tile.column * tile_columns, static_cast<int>(blockIdx.y)};
}

// The part of K that a block multiplies, in whole slices of `depth`, but for K's end.
struct KRange {
  int64_t begin, size;
};
__device__ __forceinline__ KRange range_of_k(int64_t k, int depth, const Tiles& tiles,
                                             const TilePosition& at) {
  if (tiles.splits == 1) return {0, k};
  const int64_t slices = ceil_div(k, depth);
  const int64_t begin = tiles.by_splits.quotient(slices * at.split) * depth,
                end = min(tiles.by_splits.quotient(slices * (at.split + 1)) * depth, k);
  return {begin, end - begin};
}

// One launch, or several if a grid cannot have that many blocks. access_a and access_b: how the kernel loads
// the operands.
template <class Tile, class F, typename T, typename Access>
cudaError_t launch_tiles(F* kernel, int shared_bytes, const GemmArgs<T>& args, const Schedule& schedule,
                         cudaStream_t stream, Access access_a, Access access_b) {
  constexpr int kDefaultLimit = (48 << 10) - 64;
  Tiles tiles(args, Tile::BM, Tile::BN, schedule.splits);
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kDefaultLimit) error = set_max_dynamic_shared(kernel, shared_bytes);
  for (; tiles.first < tiles.order.total && error == cudaSuccess; tiles.first += INT32_MAX) {
    const dim3 blocks(static_cast<unsigned>(std::min<int64_t>(tiles.order.total - tiles.first, INT32_MAX)),
                      tiles.splits);
    error = schedule.in_cluster
                ? hopper::launch_clusters(kernel, blocks, dim3(1, tiles.splits), Tile::kThreads, shared_bytes,
                                          schedule.programmatic, stream, args, tiles, access_a, access_b)
                : launch_kernel(kernel, blocks, dim3(Tile::kThreads), shared_bytes, schedule.programmatic,
                                stream, args, tiles, access_a, access_b);
  }
  return error;
}

// ---- Operands. Both look alike: a line of `extent` elements (rows of a, columns of b) for every k.

template <typename T>
struct OperandTile {
  const T* data;
  int64_t stride;  // along the rows of a, the columns of b
  int64_t k_stride;
  int extent;  // how many rows or columns the tile has
};

__device__ __forceinline__ int clamp_to_int(int64_t x, int limit) {
  return static_cast<int>(min(max(x, int64_t{0}), static_cast<int64_t>(limit)));
}

template <typename T>
__device__ __forceinline__ OperandTile<T> rows_of_a(const GemmArgs<T>& args, const TilePosition& at, int rows,
                                                    int64_t k) {
  const Matrices<T>& a = args.a;
  return {a.data + at.matrix * a.batch_stride + at.row * a.row_stride + k * a.column_stride, a.row_stride,
          a.column_stride, clamp_to_int(args.m - at.row, rows)};
}

template <typename T>
__device__ __forceinline__ OperandTile<T> columns_of_b(const GemmArgs<T>& args, const TilePosition& at,
                                                       int columns, int64_t k) {
  const Matrices<T>& b = args.b;
  return {b.data + at.matrix * b.batch_stride + at.column * b.column_stride + k * b.row_stride,
          b.column_stride, b.row_stride, clamp_to_int(args.n - at.column, columns)};
}

// Whether an operand's lines are whole 16-byte vectors: `stride` is 1, the others are multiples of a vector.
template <typename T>
bool has_vectors(const T* data, int64_t stride, int64_t line_stride, int64_t batch_stride) {
  constexpr int V = kVecWidth<T>;
  return stride == 1 && is_vec_aligned(data) && line_stride % V == 0 && batch_stride % V == 0;
}

template <typename T>
bool has_vectors(const Matrices<T>& x, bool row_lines) {
  return row_lines ? has_vectors(x.data, x.column_stride, x.row_stride, x.batch_stride)
                   : has_vectors(x.data, x.row_stride, x.column_stride, x.batch_stride);
}

// Calls launch(a_k_major, b_k_major) with constants: whether k runs along an operand's lines. Lines are along
// the smaller stride.
template <typename T, class F>
cudaError_t with_layouts(const GemmArgs<T>& args, F&& launch) {
  const std::true_type yes;
  const std::false_type no;
  const bool b_k_major = args.b.row_stride < args.b.column_stride;
  if (args.a.column_stride <= args.a.row_stride) return b_k_major ? launch(yes, yes) : launch(yes, no);
  return b_k_major ? launch(no, yes) : launch(no, no);
}

// ---- The epilogue. Sums are staged in shared memory, so that the code of bias and activation exists once
// and c is written in 16-byte stores.

// Where the sum of (row, column) is staged. The row's number permutes the vectors of a row, which spreads the
// rows that a warp writes at once over the banks.
template <typename T, int COLUMNS>
__device__ __forceinline__ int staged_at(int row, int column) {
  constexpr int V = kVecWidth<T>, kVectors = COLUMNS / V < 8 ? COLUMNS / V : 8;
  static_assert(COLUMNS % (kVectors * V) == 0);
  return row * COLUMNS + (column / V ^ (row & (kVectors - 1))) * V + column % V;
}

// Writes the first `valid` of V values, or all of them in one store if `vector`.
template <typename T, int V, typename A>
__device__ __forceinline__ void write_vector(T* to, const A (&x)[V], int valid, bool vector) {
  Vec<T, V> y;
#pragma unroll
  for (int j = 0; j < V; ++j) y.data[j] = narrow<T>(x[j]);
  if (vector) {
    *reinterpret_cast<Vec<T, V>*>(to) = y;
    return;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (j < valid) to[j] = y.data[j];
  }
}

// Writes x to a row from `to` on: as one vector, or to V places `step` apart, but for those beyond the row.
template <typename T, int V, typename A>
__device__ __forceinline__ void write_apart(T* to, const A (&x)[V], int step, int64_t left, bool vector) {
  if (vector || step == 1) return write_vector(to, x, clamp_to_int(left, V), vector);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (j * step < left) to[j * step] = narrow<T>(x[j]);
  }
}

// Not inlined: all activations together are as much code as a kernel without them.
template <typename A, int N>
__device__ __noinline__ Vec<A, N> activated(Activation activation, Vec<A, N> values) {
  activate(activation, values.data);
  return values;
}

template <int N, typename A>
__device__ __forceinline__ void activate_sums(Activation activation, A (&sums)[N]) {
  if (activation == Activation::kNone) return;
  if (activation == Activation::kRelu) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = relu(sums[i]);
    return;
  }
  constexpr int kAtOnce = std::min(N, kVecWidth<A>);  // are passed in registers
  static_assert(N % kAtOnce == 0);
#pragma unroll
  for (int i = 0; i < N; i += kAtOnce) {
    Vec<A, kAtOnce> values;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) values.data[j] = sums[i + j];
    values = activated(activation, values);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) sums[i + j] = values.data[j];
  }
}

// Waits for all threads of the block, or of the cluster that adds its blocks' sums.
template <bool CLUSTER>
__device__ __forceinline__ void sync_sharers() {
  if constexpr (CLUSTER) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
}

// Staged sums from `place` on, of this block, or of all `splits` blocks of the cluster in their order.
// SWIZZLE: element j was staged at j ^ SWIZZLE.
template <bool CLUSTER, int SWIZZLE, int V, typename A>
__device__ __forceinline__ void load_staged(A (&x)[V], const A* staged, int place, int splits) {
  // float64 is read faster one by one.
  constexpr int W = sizeof(A) == 8 || V < kVecWidth<A> ? 1 : kVecWidth<A>;
#pragma unroll
  for (int j = 0; j < V; ++j) x[j] = 0;
#pragma unroll 4
  for (int rank = 0; rank < (CLUSTER ? splits : 1); ++rank) {
    const A* const from = CLUSTER ? hopper::in_block(staged, rank) : staged;
#pragma unroll
    for (int i = 0; i < V; i += W) {
      const Vec<A, W> found = *reinterpret_cast<const Vec<A, W>*>(from + place + i);
#pragma unroll
      for (int j = 0; j < W; ++j) x[(i + j) ^ SWIZZLE] += found.data[j];
    }
  }
}

// Writes ROWS x COLUMNS staged sums to c, from row first_row of the tile on; with split-K to the workspace,
// [splits, batch, m, n]. Called by all THREADS. SWIZZLE: element j of a vector was staged at j ^ SWIZZLE.
// CLUSTER: the blocks that split K are a cluster, and each writes its share of the sums of all.
//
// A thread has V columns of a row. They are neighbours, unless it has many and rows are not whole vectors:
// then neighbouring threads write neighbours.
template <int ROWS, int COLUMNS, int THREADS, int SWIZZLE = 0, bool CLUSTER = false, typename T>
__device__ __forceinline__ void write_staged(const GemmArgs<T>& args, const Tiles& tiles,
                                             const TilePosition& at, int first_row, const acc_t<T>* staged) {
  constexpr int V = kVecWidth<T>, kAcross = COLUMNS / V;
  constexpr int kApart = V < 8 ? 1 : kAcross < 32 ? kAcross : 32;
  const bool aligned = reinterpret_cast<uintptr_t>(args.c) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(args.pre_activation) % 16 == 0;
  const bool leave_sums = !CLUSTER && tiles.splits > 1, vectors = args.n % V == 0 && (aligned || leave_sums);
  const int step = vectors ? 1 : kApart;
  const int first = (CLUSTER ? at.split * THREADS : 0) + threadIdx.x,
            threads = THREADS * (CLUSTER ? tiles.splits : 1);
#pragma unroll 1
  for (int i = first; i < ROWS * kAcross; i += threads) {
    const int tile_row = i / kAcross, place = i % kAcross;
    const int tile_column = vectors ? place * V : place / kApart * (kApart * V) + place % kApart;
    const int64_t row = at.row + first_row + tile_row, column = at.column + tile_column;
    if (row >= args.m || column >= args.n) continue;
    const int64_t left = args.n - column;
    acc_t<T> x[V];
    if (vectors || kApart == 1) {
      load_staged<CLUSTER, SWIZZLE>(x, staged, staged_at<T, COLUMNS>(tile_row, tile_column), tiles.splits);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        acc_t<T> one[1];
        load_staged<CLUSTER, 0>(one, staged, staged_at<T, COLUMNS>(tile_row, tile_column + j * kApart),
                                tiles.splits);
        x[j] = one[0];
      }
    }
    const int64_t to = (at.matrix * args.m + row) * args.n + column;
    if (leave_sums) {
      acc_t<T>* const part =
          static_cast<acc_t<T>*>(args.workspace) + at.split * args.batch * args.m * args.n + to;
      write_apart(part, x, step, left, vectors);
      continue;
    }
    if (args.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (j * step < left) x[j] += widen(args.bias[(column + j * step) * args.bias_stride]);
      }
    }
    if (args.pre_activation != nullptr) write_apart(args.pre_activation + to, x, step, left, vectors);
    activate_sums(args.activation, x);
    write_apart(args.c + to, x, step, left, vectors);
  }
}

}  // namespace lltm_ext
