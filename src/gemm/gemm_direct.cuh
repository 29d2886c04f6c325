// The kernel for short sums and small results, in all types: a thread computes its elements of c directly
// from global memory, whose caches serve what threads share. No shared memory and no barriers: such a
// product's time is that of one chain of loads.
#pragma once

#include "gemm/gemm_choice.h"
#include "gemm/gemm_tile.cuh"

namespace lltm_ext {

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

// SHAPE: a place in kDirectShapes. A thread has `columns` elements of a row of c; the sharers, neighbours or
// the whole block, split K. groups: of columns, in a row of c. vectors_b, vectors_c: whether a thread's
// columns are one aligned vector.
template <typename T, int SHAPE>
__global__ void __launch_bounds__(kDirectThreads)
    gemm_direct_kernel(const GemmArgs<T> args, uint32_t groups, bool vectors_b, bool vectors_c) {
  constexpr DirectShape kShape = kDirectShapes[SHAPE];
  constexpr int C = kShape.columns, kSharers = kShape.sharers;
  constexpr int kBatch = kShape.batch;  // so many k are loaded before the first is multiplied
  constexpr int kLanes = kSharers < 32 ? kSharers : 32;  // sharers in a warp
  using A = acc_t<T>;
  const int64_t thread = int64_t{blockIdx.x} * kDirectThreads + threadIdx.x;
  const uint32_t tile = static_cast<uint32_t>(thread / kSharers), sharer = threadIdx.x % kSharers;
  const uint32_t rows = static_cast<uint32_t>(args.m), row_of_matrices = tile / groups;
  const uint32_t matrix = row_of_matrices / rows;
  const int64_t row = row_of_matrices - matrix * rows, column = int64_t{tile - row_of_matrices * groups} * C;
  const bool inside = matrix < args.batch;
  const int valid = clamp_to_int(args.n - column, C);
  const T* a =
      args.a.data + matrix * args.a.batch_stride + row * args.a.row_stride + sharer * args.a.column_stride;
  const T* b =
      args.b.data + matrix * args.b.batch_stride + column * args.b.column_stride + sharer * args.b.row_stride;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  A sum[C] = {};
  if (inside) {
    const int64_t step_a = kSharers * args.a.column_stride, step_b = kSharers * args.b.row_stride;
    for (int64_t k = sharer; k < args.k; k += kBatch * kSharers) {
      A x[kBatch], y[kBatch][C];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool exists = k + i * kSharers < args.k;
        x[i] = exists ? widen(*a) : A(0);
        load_columns(y[i], b, args.b.column_stride, vectors_b && exists, exists ? valid : 0);
        a += step_a;
        b += step_b;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int j = 0; j < C; ++j) sum[j] += x[i] * y[i][j];
      }
    }
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int j = 0; j < C; ++j) sum[j] += __shfl_xor_sync(~0u, sum[j], distance);
  }
  if constexpr (kSharers > 32) {
    static_assert(kSharers == kDirectThreads && C == 1, "all warps of the block sum one element");
    __shared__ A sums[kDirectThreads / 32];
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum[0];
    __syncthreads();
    sum[0] = sums[0];
#pragma unroll
    for (int w = 1; w < kDirectThreads / 32; ++w) sum[0] += sums[w];
  }
  if (!inside || sharer > 0) return;
  finish_row(args, sum, column, (matrix * args.m + row) * args.n + column, valid, vectors_c,
             [&] { activate(args.activation, sum); });
}

template <int SHAPE, typename T>
cudaError_t launch_direct(const GemmArgs<T>& args, bool early, cudaStream_t stream) {
  constexpr DirectShape kShape = kDirectShapes[SHAPE];
  constexpr int kColumns = kShape.columns;
  constexpr uintptr_t kBytes = sizeof(Vec<T, kColumns>);
  const auto vectors = [](const void* data, int64_t line, int64_t matrix) {
    return reinterpret_cast<uintptr_t>(data) % kBytes == 0 && line % kColumns == 0 && matrix % kColumns == 0;
  };
  const bool whole = args.n % kColumns == 0;
  const bool vectors_b =
      whole && args.b.column_stride == 1 && vectors(args.b.data, args.b.row_stride, args.b.batch_stride);
  const bool vectors_c = whole && vectors(args.c, 0, 0) && vectors(args.pre_activation, 0, 0);
  const int64_t groups = ceil_div(args.n, kColumns), tiles = args.batch * args.m * groups;
  if (tiles > UINT32_MAX) return cudaErrorInvalidValue;
  return launch_kernel(gemm_direct_kernel<T, SHAPE>,
                       dim3(static_cast<unsigned>(ceil_div(tiles * kShape.sharers, kDirectThreads))),
                       dim3(kDirectThreads), 0, early, stream, args, static_cast<uint32_t>(groups), vectors_b,
                       vectors_c);
}

}  // namespace lltm_ext
