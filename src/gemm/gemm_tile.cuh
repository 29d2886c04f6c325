// What the CUDA kernels share: the order in which blocks compute the tiles of c, the epilogue of single
// elements, and the kernel that adds the partial sums of split-K.
#pragma once

#include <algorithm>

#include "common/divisor.h"
#include "common/fast_math.cuh"
#include "common/launch.cuh"
#include "common/types.h"
#include "common/vec.cuh"
#include "gemm/gemm.h"

namespace lltm_ext {

// ---- Tiles

// Tiles of a batch of matrices, `rows` x `columns` each. Bands of kBand tile rows are walked column by
// column, so that blocks that run at the same time share rows of a and columns of b in L2.
struct TileOrder {
  static constexpr int kBand = 8;

  TileOrder(int64_t rows_, int64_t columns, int64_t batch)
      : rows(rows_),
        total(rows_ * columns * batch),
        by_matrix(std::max<int64_t>(rows_ * columns, 1)),
        by_band(std::max<int64_t>(kBand * columns, 1)),
        by_last_rows(rows_ % kBand == 0 ? kBand : rows_ % kBand) {}

  struct Tile {
    int64_t matrix, row, column;
  };
  __device__ __forceinline__ Tile at(int64_t i) const {
    const int64_t matrix = by_matrix.quotient(i), in_matrix = i - matrix * by_matrix.divisor;
    const int64_t band = by_band.quotient(in_matrix), in_band = in_matrix - band * by_band.divisor;
    const bool whole = (band + 1) * kBand <= rows;
    const int64_t column = whole ? in_band / kBand : by_last_rows.quotient(in_band);
    return {matrix, band * kBand + in_band - column * (whole ? kBand : by_last_rows.divisor), column};
  }

  int64_t rows, total;
  Divisor by_matrix, by_band, by_last_rows;  // tiles of a matrix, tiles of a band, rows of the last band
};

namespace hopper {

struct TileIndex {
  int row, column, matrix;
};

// The first row and column of c that the block of this rank computes of a cluster's tiles, which are below
// each other.
template <class Mainloop>
__device__ __forceinline__ TileIndex first_element(const TileOrder& order, int64_t i, uint32_t rank) {
  const TileOrder::Tile tile = order.at(i);
  return {(static_cast<int>(tile.row) * Mainloop::kClusterM + static_cast<int>(rank)) * Mainloop::kTileM,
          static_cast<int>(tile.column) * Mainloop::kTileN, static_cast<int>(tile.matrix)};
}

// Stores a warpgroup's accumulators from (row, column) of a matrix on, [.., m, n]. wgmma gives a thread two
// neighbours in a row and the same two 8 rows below.
template <int kCount>
__device__ __forceinline__ void store_accumulators(const float (&d)[kCount], float* to, int m, int n, int row,
                                                   int column, int matrix) {
  const int thread = threadIdx.x % 128;
  const bool pairs = n % 2 == 0 && reinterpret_cast<uintptr_t>(to) % sizeof(float2) == 0;
  row += thread / 32 * 16 + thread % 32 / 4;
  column += thread % 4 * 2;
  to += (int64_t{matrix} * m + row) * n + column;
#pragma unroll
  for (int half = 0; half < 2; ++half, to += int64_t{8} * n) {
    if (row + 8 * half >= m) return;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float left = d[4 * i + 2 * half], right = d[4 * i + 2 * half + 1];
      const int rest = n - column - 8 * i;
      if (pairs) {
        if (rest > 0) *reinterpret_cast<float2*>(to + 8 * i) = make_float2(left, right);
      } else {
        if (rest > 0) to[8 * i] = left;
        if (rest > 1) to[8 * i + 1] = right;
      }
    }
  }
}

// Copies of both operands in one launch: f(x, block) for each block of each. A pointer to the arguments of
// either would put them in local memory.
template <class X, class F>
__device__ __forceinline__ void for_operands(const X& a, const X& b, const F& f) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (blockIdx.x < a.blocks) {
    f(a, blockIdx.x);
  } else {
    f(b, blockIdx.x - a.blocks);
  }
}

}  // namespace hopper

// ---- Epilogue

__device__ __forceinline__ int clamp_to_int(int64_t x, int limit) {
  return static_cast<int>(min(max(x, int64_t{0}), static_cast<int64_t>(limit)));
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

// Finishes the first `valid` of V neighbouring sums in a row of c, from `column` on, and stores them at `to`.
template <typename T, int V, class Activate>
__device__ __forceinline__ void finish_row(const GemmArgs<T>& args, acc_t<T> (&x)[V], int64_t column,
                                           int64_t to, int valid, bool vector, const Activate& activate_all) {
  if (args.bias != nullptr) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (j < valid) x[j] += widen(args.bias[(column + j) * args.bias_stride]);
    }
  }
  if (args.pre_activation != nullptr) write_vector(args.pre_activation + to, x, valid, vector);
  activate_all();
  write_vector(args.c + to, x, valid, vector);
}

// c = activation(a @ b + bias), and where it goes.
template <typename T>
struct Epilogue {
  const T* bias;  // [n], or null
  int64_t bias_stride;
  T* c;               // [batch, m, n], contiguous
  T* pre_activation;  // as c, or null
  int m, n;
  Activation activation;

  explicit Epilogue(const GemmArgs<T>& args)
      : bias(args.bias),
        bias_stride(args.bias_stride),
        c(args.c),
        pre_activation(args.pre_activation),
        m(static_cast<int>(args.m)),
        n(static_cast<int>(args.n)),
        activation(args.activation) {}
  __device__ __forceinline__ float bias_at(int column) const {
    return bias && column < n ? widen(bias[column * bias_stride]) : 0.f;
  }
};

// ---- Split-K: blocks that have a part of K leave partial sums in the workspace, and a second kernel adds
// them in a fixed order.

constexpr int kReduceThreads = 256;

// partials [splits, elements of c]. SHARERS warps share the splits of 32 elements.
template <typename T, int SHARERS>
__global__ void __launch_bounds__(kReduceThreads) gemm_reduce_kernel(const GemmArgs<T> args, int splits) {
  using A = acc_t<T>;
  constexpr int kElements = kReduceThreads / SHARERS, kBatch = 8;
  __shared__ A sums[SHARERS][kElements];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t elements = args.batch * args.m * args.n;
  const int in_block = threadIdx.x % kElements, sharer = threadIdx.x / kElements;
  const int64_t element = int64_t{blockIdx.x} * kElements + in_block;
  const A* const partials = static_cast<const A*>(args.workspace) + element;
  A sum = 0;
  for (int first = sharer; first < splits; first += kBatch * SHARERS) {
    A found[kBatch] = {};  // loaded together, to overlap their latencies
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int split = first + i * SHARERS;
      if (split < splits && element < elements) found[i] = partials[split * elements];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += found[i];
  }
  if constexpr (SHARERS > 1) {
    sums[sharer][in_block] = sum;
    __syncthreads();
    if (sharer > 0) return;
#pragma unroll
    for (int i = 1; i < SHARERS; ++i) sum += sums[i][in_block];
  }
  if (element >= elements) return;
  A x[1] = {sum};
  finish_row(args, x, element % args.n, element, 1, false, [&] { activate(args.activation, x); });
}

template <typename T>
int64_t partial_sum_bytes(const GemmArgs<T>& args, int splits) {
  return splits > 1 ? args.batch * args.m * args.n * splits * int64_t{sizeof(acc_t<T>)} : 0;
}

template <typename T>
cudaError_t launch_reduce(const GemmArgs<T>& args, int splits, bool programmatic, cudaStream_t stream) {
  const auto run = [&](auto sharers) {
    constexpr int kSharers = decltype(sharers)::value;
    const int64_t blocks = ceil_div(args.batch * args.m * args.n, kReduceThreads / kSharers);
    return launch_kernel(gemm_reduce_kernel<T, kSharers>, dim3(static_cast<unsigned>(blocks)),
                         dim3(kReduceThreads), 0, programmatic, stream, args, splits);
  };
  return splits > 8 ? run(std::integral_constant<int, 8>()) : run(std::integral_constant<int, 1>());
}

}  // namespace lltm_ext
