// Backward of gemm's activation and bias in one pass. A thread computes the gradients of some columns of some
// rows, and keeps their sums. Each block writes its sums, and a second kernel adds those of all blocks in a
// fixed order.
#pragma once

#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "gemm/gemm.h"

namespace lltm_ext {

constexpr int kWarpLanes = 32;
// Minimum rows per block, so that a block writes far fewer sums than it reads values.
constexpr int64_t kBiasRows = 64;

// blockDim.x threads along a row, blockDim.y rows at a time.
struct BiasGrid {
  dim3 blocks, threads;
  int64_t rows;  // per block

  BiasGrid(int64_t all_rows, int64_t columns, int width) {
    threads = dim3(1, kThreads);
    while (threads.x < kWarpLanes && threads.x * width < columns)
      threads = dim3(threads.x * 2, threads.y / 2);
    const int64_t across = ceil_div(columns, threads.x * width);
    const int64_t down = std::clamp<int64_t>(2048 / across, 1, ceil_div(all_rows, kBiasRows));
    rows = ceil_div(all_rows, down);
    blocks = dim3(across, ceil_div(all_rows, rows));
  }
};

// Calls f with the functor of an activation known at compile time; except on Hopper, with one functor for
// all.
template <typename T, class F>
__device__ __forceinline__ void with_activation(Activation activation, F&& f) {
  if constexpr (!kForHopper) return f(GemmActivationBackward<T>{activation});
  switch (activation) {
    case Activation::kNone:
      return f(GemmActivationBackward<T>{Activation::kNone});
#define LLTM_CASE(ID, ...) \
  case Activation::k##ID:  \
    return f(GemmActivationBackward<T>{Activation::k##ID});
      LLTM_ACTIVATIONS(LLTM_CASE)
#undef LLTM_CASE
  }
}

// Per multiprocessor: some wait for memory while others store.
constexpr int kBiasBlocksPerMultiprocessor = 4;

// V columns per thread. sums [gridDim.y, columns]: the blocks' sums.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads, kBiasBlocksPerMultiprocessor)
    gemm_bias_backward_kernel(const T* grad_output, const T* saved, T* grad_input, acc_t<T>* sums,
                              const Activation activation, int64_t all_rows, int64_t columns, int64_t rows) {
  using Pack = Vec<T, V>;
  constexpr int kRows = kForHopper ? 2 : 1;  // of a thread at a time, to overlap their loads
  const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * V;
  const int64_t begin = blockIdx.y * rows, end = begin + rows < all_rows ? begin + rows : all_rows;
  const int64_t step = blockDim.y;
  acc_t<T> sum[V] = {};
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (column < columns) {
    with_activation<T>(activation, [&](const auto& backward) {
      for (int64_t row = begin + threadIdx.y; row < end; row += kRows * step) {
        Pack grad[kRows], saved_values[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (row + i * step >= end) continue;
          const int64_t at = (row + i * step) * columns + column;
          grad[i] = *reinterpret_cast<const Pack*>(grad_output + at);
          saved_values[i] = *reinterpret_cast<const Pack*>(saved + at);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (row + i * step >= end) continue;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            const acc_t<T> x = backward(widen(grad[i].data[v]), widen(saved_values[i].data[v]));
            sum[v] += x;
            grad[i].data[v] = narrow<T>(x);
          }
          *reinterpret_cast<Pack*>(grad_input + (row + i * step) * columns + column) = grad[i];
        }
      }
    });
  }
  __shared__ acc_t<T> thread_sums[kThreads * V];
  const int width = blockDim.x * V, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int v = 0; v < V; ++v) thread_sums[thread * V + v] = sum[v];
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * width;
  for (int i = thread; i < width && first + i < columns; i += kThreads) {
    acc_t<T> total = thread_sums[i];
    for (int y = 1; y < static_cast<int>(blockDim.y); ++y) total += thread_sums[y * width + i];
    sums[blockIdx.y * columns + first + i] = total;
  }
}

// grad_bias [columns] = the sum over `parts` of sums [parts, columns]. The warps of a block split the parts.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    gemm_bias_sum_kernel(const acc_t<T>* sums, T* grad_bias, int parts, int64_t columns) {
  constexpr int kWarps = kThreads / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  const int64_t column = int64_t{blockIdx.x} * kWarpLanes + lane;
  acc_t<T> sum = 0;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (column < columns) {
#pragma unroll 8
    for (int part = warp; part < parts; part += kWarps) sum += sums[part * columns + column];
  }
  __shared__ acc_t<T> warp_sums[kWarps][kWarpLanes];
  warp_sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) sum += warp_sums[other][lane];
  grad_bias[column] = narrow<T>(sum);
}

template <typename T>
int width_of(const BiasBackwardArgs<T>& args) {
  const bool aligned = args.columns % kVecWidth<T> == 0 && is_vec_aligned(args.grad_output) &&
                       is_vec_aligned(args.saved) && is_vec_aligned(args.grad_input);
  return aligned ? kVecWidth<T> : 1;
}

// programmatic: for both kernels, to hide their launch latency.
template <int V, typename T>
cudaError_t launch_bias_backward(const BiasBackwardArgs<T>& args, bool programmatic, cudaStream_t stream) {
  const BiasGrid grid(args.rows, args.columns, V);
  acc_t<T>* const sums = static_cast<acc_t<T>*>(args.workspace);
  const cudaError_t error =
      launch_kernel(gemm_bias_backward_kernel<V, T>, grid.blocks, grid.threads,
                    /*shared_bytes=*/0, programmatic, stream, args.grad_output, args.saved, args.grad_input,
                    sums, args.activation, args.rows, args.columns, grid.rows);
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(ceil_div(args.columns, kWarpLanes));
  return launch_kernel(gemm_bias_sum_kernel<T>, dim3(blocks), dim3(kThreads), /*shared_bytes=*/0,
                       programmatic, stream, static_cast<const acc_t<T>*>(sums), args.grad_bias,
                       static_cast<int>(grid.blocks.y), args.columns);
}

}  // namespace lltm_ext
