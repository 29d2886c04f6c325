// gemm in half types on Hopper for an a of up to 32 rows and weights b of [N, K], K side by side: all that
// takes time is reading the weights. Ordinary loads, many on their way in each of many warps, read faster
// than the copy engine fills stages; and what they read is in registers already, where mma.sync multiplies
// it.
//
// A block has 16 columns of c, which are 16 rows of the weights and of mma.sync's first operand; a's rows are
// columns of the second, eight by eight. Which element stands where in K does not matter, so long as both
// operands agree: of each slice of 32 a lane reads 8 neighbours of each of its rows at once, for two products
// of 16.
//
// The warps of a block share out K in slices, and sum what they have in shared memory, in one order.
#pragma once

#include "common/hopper/launch.cuh"
#include "common/types.h"
#include "gemm/gemm_ptx.cuh"
#include "gemm/hopper_epilogue.cuh"

namespace lltm_ext {
namespace hopper {

// 16 bytes that nobody reads again, so that they take no place in L1 from a's rows; 0 unless `inside`. Four
// lanes read half a line: the other half comes from memory with it, as the next load will want it.
__device__ __forceinline__ uint4 read_once(const void* from, bool inside) {
  uint4 x;
  asm volatile(
      "{\n"
      " .reg .pred inside;\n"
      " setp.ne.b32 inside, %5, 0;\n"
      " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
      " @inside ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "r"(static_cast<int>(inside))
      : "memory");
  return x;
}
__device__ __forceinline__ uint4 read(const void* from, bool inside) {
  return inside ? *static_cast<const uint4*>(from) : uint4{};
}

constexpr int kRowsColumns = 16;  // of c, a block's

// c [m, n] = a [m, k] @ weights [n, k]^T, for each matrix of a batch; strides in elements.
template <typename T>
struct FewRows {
  const T *a, *weights;
  int64_t a_stride, weights_stride, a_batch_stride, weights_batch_stride;
  int k, tiles;  // tiles of columns of a matrix
  Epilogue<T> epilogue;
};

// EIGHTS: of a's rows. SLICES: of a warp, on their way at a time.
template <typename T, int EIGHTS, int SLICES>
struct RowsKernel {
  static constexpr int kRows = 8 * EIGHTS, kColumns = kRowsColumns, kSlice = 32, kSlices = SLICES;
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kBlocks = 2;  // of a multiprocessor
  static constexpr int kStride = kColumns + 4;  // so that the rows of a warp's stores lie in different banks

  struct Slice {
    uint4 upper, lower, x[EIGHTS];
  };

  __device__ static void run(const FewRows<T>& problem) {
    __shared__ float sums[kWarps][kRows][kStride];
    const int matrix = blockIdx.x / problem.tiles, column = blockIdx.x % problem.tiles * kColumns;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column_of_thread = threadIdx.x % kColumns;
    wait_for_launch_before();
    let_next_launch_begin();
    const float bias = problem.epilogue.bias_at(column + column_of_thread);
    float d[EIGHTS][4] = {};
    multiply(d, problem, matrix, column);
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[warp][8 * e + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = d[e][i];
      }
    }
    __syncthreads();
    for (int row = threadIdx.x / kColumns; row < kRows; row += kThreads / kColumns) {
      float x[1] = {bias};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) x[0] += sums[w][row][column_of_thread];
      leave(x, problem.epilogue, matrix, row, column + column_of_thread);
    }
  }

 private:
  // d: this warp's part, as mma.sync leaves it. Rows beyond the last are the last once more: nobody stores
  // what they give.
  __device__ static __forceinline__ void multiply(float (&d)[EIGHTS][4], const FewRows<T>& problem,
                                                  int matrix, int column) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, in_slice = lane % 4 * 8;
    const int slices = (problem.k + kSlice - 1) / kSlice;
    int k = slices * warp / kWarps * kSlice;
    const int end = min(slices * (warp + 1) / kWarps * kSlice, problem.k);
    const auto row_of = [&](const T* first, int64_t stride, int row, int rows) {
      return first + min(row + lane / 4, rows - 1) * stride + k + in_slice;
    };
    const T* const weights = problem.weights + matrix * problem.weights_batch_stride;
    const T* const a = problem.a + matrix * problem.a_batch_stride;
    const T* upper = row_of(weights, problem.weights_stride, column, problem.epilogue.n);
    const T* lower = row_of(weights, problem.weights_stride, column + 8, problem.epilogue.n);
    const T* row[EIGHTS];
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) row[e] = row_of(a, problem.a_stride, 8 * e, problem.epilogue.m);

    Slice coming[kSlices];
    const auto fetch = [&](int i) {
      const bool inside = k + i * kSlice + in_slice < end;
      coming[i].upper = read_once(upper + i * kSlice, inside);
      coming[i].lower = read_once(lower + i * kSlice, inside);
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) coming[i].x[e] = read(row[e] + i * kSlice, inside);
    };
#pragma unroll
    for (int i = 0; i < kSlices; ++i) fetch(i);
    while (k < end) {
      constexpr int kRound = kSlices * kSlice;
      k += kRound, upper += kRound, lower += kRound;
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) row[e] += kRound;
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        const uint4 u = coming[i].upper, l = coming[i].lower;
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
          const uint4 x = coming[i].x[e];
          multiply_add(d[e], {u.x, l.x, u.y, l.y}, x.x, x.y, T());
          multiply_add(d[e], {u.z, l.z, u.w, l.w}, x.z, x.w, T());
        }
        fetch(i);
        __syncwarp();  // else the compiler would wait for all slices before it asks for the first of the next
      }
    }
  }

  __device__ static __forceinline__ void leave(float (&x)[1], const Epilogue<T>& epilogue, int matrix,
                                               int row, int column) {
    if (epilogue.before) epilogue.write(epilogue.before, matrix, row, column, x[0]);
    activate<ActivationMath<T>>(epilogue.activation, x);
    epilogue.write(epilogue.c, matrix, row, column, x[0]);
  }
};

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    gemm_rows_kernel(const __grid_constant__ FewRows<T> problem) {
  LLTM_HOPPER(Kernel::run(problem));
}

// shared_bytes: what nobody uses, but leaves fewer blocks a place.
template <class Kernel, typename T>
cudaError_t launch_rows(const FewRows<T>& problem, int batch, int shared_bytes, cudaStream_t stream) {
  const auto kernel = gemm_rows_kernel<Kernel, T>;
  const cudaError_t error = shared_bytes > 0 ? allow_shared(kernel, shared_bytes) : cudaSuccess;
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, dim3(problem.tiles * batch), dim3(Kernel::kThreads), shared_bytes,
                       /*early=*/true, stream, problem);
}

}  // namespace hopper
}  // namespace lltm_ext
