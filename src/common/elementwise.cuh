// The CUDA elementwise engine: output[i] = f(inputs[i]...) over n elements in flat memory order.
// An op is a functor on the accumulate type; loads, rounding, vectors and tails are handled here.
#pragma once

#include <utility>

#include "common/launch.cuh"
#include "common/types.h"
#include "common/vec.cuh"

namespace lltm_ext {

template <typename T, int K>
struct Inputs {
  const T* pointers[K];
};

// f on element j of each of K vectors.
template <typename T, int V, int K, typename F, size_t... k>
__device__ __forceinline__ T apply_at(F f, const Vec<T, V> (&x)[K], int j, std::index_sequence<k...>) {
  return narrow<T>(f(widen(x[k].data[j])...));
}

// V elements an access (1 where a pointer is misaligned). All loads of a thread are issued before its
// first store, which keeps enough bytes in flight to fill the memory system.
template <typename T, int V, int K, typename F>
__global__ void __launch_bounds__(kThreads)
    elementwise_kernel(F f, Inputs<T, K> inputs, T* output, int64_t n) {
  constexpr auto each_input = std::make_index_sequence<K>{};
  const int64_t vectors = n / V;
  CUDA_KERNEL_LOOP(i, vectors) {
    Vec<T, V> x[K];
#pragma unroll
    for (int k = 0; k < K; ++k) x[k] = reinterpret_cast<const Vec<T, V>*>(inputs.pointers[k])[i];
    Vec<T, V> y;
#pragma unroll
    for (int j = 0; j < V; ++j) y.data[j] = apply_at(f, x, j, each_input);
    reinterpret_cast<Vec<T, V>*>(output)[i] = y;
  }
  // The last n % V elements, one a thread.
  const int64_t tail = vectors * V + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (tail < n) {
    Vec<T, 1> x[K];
#pragma unroll
    for (int k = 0; k < K; ++k) x[k].data[0] = inputs.pointers[k][tail];
    output[tail] = apply_at(f, x, 0, each_input);
  }
}

template <typename F, typename T, typename... In>
cudaError_t launch_elementwise(F f, int64_t n, cudaStream_t stream, T* output, const In*... inputs) {
  constexpr int K = sizeof...(In);
  const Inputs<T, K> pointers = {{inputs...}};
  if (is_vec_aligned(output) && (is_vec_aligned(inputs) && ...)) {
    constexpr int V = kVecWidth<T>;
    elementwise_kernel<T, V><<<blocks_for(ceil_div(n, V)), kThreads, 0, stream>>>(f, pointers, output, n);
  } else {
    elementwise_kernel<T, 1><<<blocks_for(n), kThreads, 0, stream>>>(f, pointers, output, n);
  }
  return cudaGetLastError();
}

}  // namespace lltm_ext
