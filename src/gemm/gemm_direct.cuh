// The kernel for short sums and small results, in all types: a thread computes its elements of c directly
// from global memory, whose caches serve what threads share. No shared memory and no barriers: such a
// product's time is that of one chain of loads.
#pragma once

#include "gemm/gemm_tile.cuh"

namespace lltm_ext {

// A thread has ROWS x COLUMNS elements of c; SHARERS threads, neighbours or the whole block, split K.
template <int ROWS, int COLUMNS, int SHARERS>
struct DirectTile {
  static constexpr int kRows = ROWS, kColumns = COLUMNS, kSharers = SHARERS;
};

constexpr int kDirectThreads = 128;

// COLUMNS elements along a row of b, or of c.
template <int COLUMNS, typename T>
__device__ __forceinline__ void load_columns(acc_t<T> (&x)[COLUMNS], const T* from, int64_t stride,
                                             bool vectors, int valid) {
  if (COLUMNS > 1 && vectors) {
    const Vec<T, COLUMNS> found = *reinterpret_cast<const Vec<T, COLUMNS>*>(from);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) x[j] = widen(found.data[j]);
    return;
  }
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) x[j] = j < valid ? widen(from[j * stride]) : acc_t<T>(0);
}

// groups: of COLUMNS, in a row of c. vectors_b, vectors_c: whether COLUMNS neighbours are one aligned vector.
// gridDim.y blocks split K, and leave partial sums [splits, batch, m, n] in the workspace.
template <typename T, class Tile>
__global__ void __launch_bounds__(kDirectThreads)
    gemm_direct_kernel(const GemmArgs<T> args, uint32_t groups, bool vectors_b, bool vectors_c) {
  constexpr int R = Tile::kRows, C = Tile::kColumns, kSharers = Tile::kSharers;
  // So many k are loaded before the first is multiplied.
  constexpr int kBatch = R * C > 1 ? 4 : 8;
  constexpr int kLanes = kSharers < 32 ? kSharers : 32;  // sharers in a warp
  using A = acc_t<T>;
  const int64_t thread = int64_t{blockIdx.x} * kDirectThreads + threadIdx.x;
  const uint32_t tile = static_cast<uint32_t>(thread / kSharers), sharer = threadIdx.x % kSharers;
  const uint32_t rows = static_cast<uint32_t>((args.m + R - 1) / R), row_of_tiles = tile / groups;
  const uint32_t matrix = row_of_tiles / rows;
  const int64_t row = int64_t{row_of_tiles - matrix * rows} * R,
                column = int64_t{tile - row_of_tiles * groups} * C;
  const bool inside = matrix < args.batch;
  const int valid = clamp_to_int(args.n - column, C), valid_rows = clamp_to_int(args.m - row, R);
  int64_t begin = 0, end = args.k;
  if (gridDim.y > 1) {
    begin = args.k * blockIdx.y / gridDim.y;
    end = args.k * (blockIdx.y + 1) / gridDim.y;
  }
  const T* a = args.a.data + matrix * args.a.batch_stride + row * args.a.row_stride +
               (begin + sharer) * args.a.column_stride;
  const T* b = args.b.data + matrix * args.b.batch_stride + column * args.b.column_stride +
               (begin + sharer) * args.b.row_stride;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  A sum[R][C] = {};
  if (inside) {
    const int64_t step_a = kSharers * args.a.column_stride, step_b = kSharers * args.b.row_stride;
    const int64_t row_stride = args.a.row_stride, column_stride = args.b.column_stride;
    for (int64_t k = begin + sharer; k < end; k += kBatch * kSharers) {
      A x[kBatch][R], y[kBatch][C];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool exists = k + i * kSharers < end;
#pragma unroll
        for (int r = 0; r < R; ++r) x[i][r] = exists && r < valid_rows ? widen(a[r * row_stride]) : A(0);
        load_columns(y[i], b, column_stride, vectors_b && exists, exists ? valid : 0);
        a += step_a;
        b += step_b;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int j = 0; j < C; ++j) sum[r][j] += x[i][r] * y[i][j];
        }
      }
    }
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int j = 0; j < C; ++j) sum[r][j] += __shfl_xor_sync(~0u, sum[r][j], distance);
    }
  }
  if constexpr (kSharers > 32) {
    static_assert(kSharers == kDirectThreads && R * C == 1, "all warps of the block sum one element");
    __shared__ A sums[kDirectThreads / 32];
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum[0][0];
    __syncthreads();
    sum[0][0] = sums[0];
#pragma unroll
    for (int w = 1; w < kDirectThreads / 32; ++w) sum[0][0] += sums[w];
  }
  if (!inside || sharer > 0) return;
#pragma unroll 1
  for (int r = 0; r < valid_rows; ++r) {
    A x[C];
#pragma unroll
    for (int j = 0; j < C; ++j) x[j] = sum[0][j];
    const int64_t to = (matrix * args.m + row + r) * args.n + column;
    // Shifting the sums, instead of indexing them, keeps the loop rolled.
#pragma unroll
    for (int i = 0; i < R - 1; ++i) {
#pragma unroll
      for (int j = 0; j < C; ++j) sum[i][j] = sum[i + 1][j];
    }
    if (gridDim.y > 1) {
      A* const partials = static_cast<A*>(args.workspace) + blockIdx.y * args.batch * args.m * args.n;
      write_vector(partials + to, x, valid, C > 1 && args.n % C == 0);
      continue;
    }
    if (args.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < C; ++j) {
        if (j < valid) x[j] += widen(args.bias[(column + j) * args.bias_stride]);
      }
    }
    if (args.pre_activation != nullptr) write_vector(args.pre_activation + to, x, valid, vectors_c);
    activate(args.activation, x);
    write_vector(args.c + to, x, valid, vectors_c);
  }
}

template <int ROWS, int COLUMNS, int SHARERS, typename T>
cudaError_t launch_direct(DirectTile<ROWS, COLUMNS, SHARERS> tile, const GemmArgs<T>& args, int splits,
                          bool programmatic, cudaStream_t stream) {
  constexpr uintptr_t kBytes = sizeof(Vec<T, COLUMNS>);
  const auto vectors = [](const void* data, int64_t line, int64_t matrix) {
    return reinterpret_cast<uintptr_t>(data) % kBytes == 0 && line % COLUMNS == 0 && matrix % COLUMNS == 0;
  };
  const bool whole = args.n % COLUMNS == 0;
  const bool vectors_b =
      whole && args.b.column_stride == 1 && vectors(args.b.data, args.b.row_stride, args.b.batch_stride);
  const bool vectors_c = whole && vectors(args.c, 0, 0) && vectors(args.pre_activation, 0, 0);
  const int64_t groups = ceil_div(args.n, COLUMNS), tiles = args.batch * ceil_div(args.m, ROWS) * groups;
  return launch_kernel(gemm_direct_kernel<T, DirectTile<ROWS, COLUMNS, SHARERS>>,
                       dim3(static_cast<unsigned>(ceil_div(tiles * SHARERS, kDirectThreads)), splits),
                       dim3(kDirectThreads), 0, programmatic, stream, args, static_cast<uint32_t>(groups),
                       vectors_b, vectors_c);
}

}  // namespace lltm_ext
