// The kernel for half types with an a of up to 32 rows and K-major weights b [N, K], on GPUs from 8.0 on.
// Reading the weights takes all the time. Ordinary loads, many in flight in each of many warps, read them
// faster than TMA fills stages, and put them where mma.sync needs them: in registers.
//
// A block has 16 columns of c. They are 16 rows of the weights, mma.sync's first operand; the rows of a are
// columns of the second, eight at a time. K may be in any order that both operands share: per slice of 32, a
// lane loads 8 adjacent elements of each of its rows, for two products of 16.
//
// The warps of a block split K into slices, and add their sums through shared memory in a fixed order.
#pragma once

#include "common/ptx.cuh"
#include "common/shared_memory.h"
#include "gemm/gemm_choice.h"
#include "gemm/gemm_tile.cuh"

namespace lltm_ext {

__device__ __forceinline__ uint4 load_or_zero(const void* from, bool inside) {
  return inside ? *static_cast<const uint4*>(from) : uint4{};
}

__device__ __forceinline__ void mma(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1, __half) {
  mma_m16n8k16_f16(d, a.x, a.y, a.z, a.w, b0, b1);
}
__device__ __forceinline__ void mma(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1, __nv_bfloat16) {
  mma_m16n8k16_bf16(d, a.x, a.y, a.z, a.w, b0, b1);
}

constexpr int kFewRowsColumns = 16;  // of c, per block

// c [m, n] = a [m, k] @ weights [n, k]^T for each matrix of a batch; strides in elements.
template <typename T>
struct FewRowsArguments {
  Rows<T> a, weights;
  int k, tiles;  // tiles: per matrix, along n
  Epilogue<T> epilogue;
};

// EIGHTS: groups of 8 rows of a. SLICES: how many a warp has in flight.
template <typename T, int EIGHTS, int SLICES>
struct FewRowsKernel {
  static constexpr int kRows = 8 * EIGHTS, kColumns = kFewRowsColumns, kSlice = 32, kSlices = SLICES;
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kBlocks = 2;  // per multiprocessor
  static constexpr int kStride = kColumns + 4;  // puts the rows that a warp stores at once in different banks

  struct Slice {
    uint4 upper, lower, x[EIGHTS];
  };

  __device__ static void run(const FewRowsArguments<T>& args) {
    __shared__ float sums[kWarps][kRows][kStride];
    const int matrix = blockIdx.x / args.tiles, column = blockIdx.x % args.tiles * kColumns;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column_of_thread = threadIdx.x % kColumns;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const float bias = args.epilogue.bias_at(column + column_of_thread);
    float d[EIGHTS][4] = {};
    multiply(d, args, matrix, column);
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[warp][8 * e + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = d[e][i];
      }
    }
    __syncthreads();
    const Epilogue<T>& epilogue = args.epilogue;
    if (column + column_of_thread >= epilogue.n) return;
    for (int row = threadIdx.x / kColumns; row < min(kRows, epilogue.m); row += kThreads / kColumns) {
      float x[1] = {bias};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) x[0] += sums[w][row][column_of_thread];
      const int64_t to = (int64_t{matrix} * epilogue.m + row) * epilogue.n + column + column_of_thread;
      if (epilogue.pre_activation) epilogue.pre_activation[to] = narrow<T>(x[0]);
      activate<ActivationMath<T>>(epilogue.activation, x);
      epilogue.c[to] = narrow<T>(x[0]);
    }
  }

 private:
  // d: this warp's partial sums in mma.sync's layout. Rows beyond the last repeat it; their results are not
  // stored.
  __device__ static __forceinline__ void multiply(float (&d)[EIGHTS][4], const FewRowsArguments<T>& args,
                                                  int matrix, int column) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, in_slice = lane % 4 * 8;
    const int slices = (args.k + kSlice - 1) / kSlice;
    int k = slices * warp / kWarps * kSlice;
    const int end = min(slices * (warp + 1) / kWarps * kSlice, args.k);
    const auto row_of = [&](const T* first, int64_t stride, int row, int rows) {
      return first + min(row + lane / 4, rows - 1) * stride + k + in_slice;
    };
    const T* const weights = args.weights.data + matrix * args.weights.batch_stride;
    const T* const a = args.a.data + matrix * args.a.batch_stride;
    const T* upper = row_of(weights, args.weights.row_stride, column, args.epilogue.n);
    const T* lower = row_of(weights, args.weights.row_stride, column + 8, args.epilogue.n);
    const T* row[EIGHTS];
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) row[e] = row_of(a, args.a.row_stride, 8 * e, args.epilogue.m);

    Slice loaded[kSlices];
    const auto load = [&](int i) {
      const bool inside = k + i * kSlice + in_slice < end;
      loaded[i].upper = ld_once_if(upper + i * kSlice, inside);
      loaded[i].lower = ld_once_if(lower + i * kSlice, inside);
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) loaded[i].x[e] = load_or_zero(row[e] + i * kSlice, inside);
    };
#pragma unroll
    for (int i = 0; i < kSlices; ++i) load(i);
    while (k < end) {
      constexpr int kRound = kSlices * kSlice;
      k += kRound, upper += kRound, lower += kRound;
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) row[e] += kRound;
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        const uint4 u = loaded[i].upper, l = loaded[i].lower;
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
          const uint4 x = loaded[i].x[e];
          mma(d[e], uint4{u.x, l.x, u.y, l.y}, x.x, x.y, T());
          mma(d[e], uint4{u.z, l.z, u.w, l.w}, x.z, x.w, T());
        }
        load(i);
        __syncwarp();  // keeps the compiler from moving the next loads behind the wait for all slices
      }
    }
  }
};

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    gemm_few_rows_kernel(const __grid_constant__ FewRowsArguments<T> args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  __trap();  // never launched
#else
  Kernel::run(args);
#endif
}

// early: whether blocks may start while the previous kernel still runs. shared_bytes: unused shared memory,
// to limit the blocks of a multiprocessor.
template <class Kernel, typename T>
cudaError_t launch_few_rows_kernel(const FewRowsArguments<T>& args, int64_t batch, int shared_bytes,
                                   bool early, cudaStream_t stream) {
  const auto kernel = gemm_few_rows_kernel<Kernel, T>;
  const cudaError_t error = shared_bytes > 0 ? set_max_dynamic_shared(kernel, shared_bytes) : cudaSuccess;
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, dim3(static_cast<unsigned>(args.tiles * batch)), dim3(Kernel::kThreads),
                       shared_bytes, early, stream, args);
}

// For operands that are both K-major, in lines that start at multiples of 16 bytes.
template <typename T>
cudaError_t launch_few_rows(const GemmArgs<T>& args, const DeviceInfo& device, bool early,
                            cudaStream_t stream) {
  const FewRowsArguments<T> few = {rows_of_a(args), rows_of_b(args), static_cast<int>(args.k),
                                   static_cast<int>(ceil_div(args.n, kFewRowsColumns)), Epilogue<T>(args)};
  const auto run = [&](auto kernel, int shared_bytes) {
    return launch_few_rows_kernel<decltype(kernel)>(few, args.batch, shared_bytes, early, stream);
  };
  if (args.m > 16) return run(FewRowsKernel<T, 4, 2>(), 0);
  if (args.m > 8) return run(FewRowsKernel<T, 2, 4>(), 0);
  const int64_t tiles = few.tiles * args.batch;
  if (tiles <= device.multiprocessors || tiles > device.multiprocessors * 2)
    return run(FewRowsKernel<T, 1, 8>(), 0);
  // A multiprocessor has room for three blocks and gets one or two; the next launch's blocks take the rest.
  // With more than 1.5 blocks a multiprocessor some would get three, so unused shared memory limits it to
  // two.
  const bool limit = device.compute_capability == kHopperCapability && tiles * 2 > device.multiprocessors * 3;
  return run(FewRowsKernel<T, 1, 4>(), limit ? 72 << 10 : 0);
}

}  // namespace lltm_ext
