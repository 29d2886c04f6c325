// Launchers of the elementwise kernels in elementwise_kernel.cuh. An op instantiates them for each of its
// functors, LLTM_ELEMENTWISE(Functor, number of inputs), and its binding calls them through elementwise.h.
#pragma once

#include <cuda_runtime.h>

#include "common/elementwise_kernel.cuh"
#include "common/launch.cuh"

namespace lltm_ext {

template <int V, class F, typename T, int K>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_flat_kernel(const F f, const Pointers<const T, K> in, const Pointers<T, 1> out, int head,
                            int64_t n) {
  elementwise_flat<V>(f, in, out, head, n);
}

template <class F, typename T, int K>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_strided_kernel(const F f, const Pointers<const T, K> in, const Pointers<T, 1> out,
                               const __grid_constant__ Strides<K + 1> strides, int64_t n) {
  elementwise_strided<uint32_t>(f, in, out, strides, n);
}

template <class F, typename T, int K>
cudaError_t launch_strided(const F& f, Pointers<const T, K> in, Pointers<T, 1> out,
                           const Strides<K + 1>& strides, int64_t n, cudaStream_t stream) {
  if (n <= UINT32_MAX) {
    elementwise_strided_kernel<<<elementwise_blocks(n), kElementwiseThreads, 0, stream>>>(f, in, out, strides,
                                                                                          n);
    return cudaGetLastError();
  }
  // The kernel divides in 32 bits, so larger calls are split in two along their largest dimension.
  const int d =
      static_cast<int>(std::max_element(strides.sizes, strides.sizes + strides.dims) - strides.sizes);
  const int64_t size = strides.sizes[d];
  Strides<K + 1> half = strides;
  for (const int64_t half_size : {size / 2, size - size / 2}) {
    half.sizes[d] = half_size;
    const cudaError_t error = launch_strided(f, in, out, half, n / size * half_size, stream);
    if (error != cudaSuccess) return error;
    out.data[0] += half_size * strides.of[0][d];
    for (int k = 0; k < K; ++k) in.data[k] += half_size * strides.of[k + 1][d];
  }
  return cudaSuccess;
}

template <template <typename> class F, typename T, int K>
cudaError_t launch_elementwise(const F<T>& f, const ElementwiseCall<K, 1>& call, cudaStream_t stream) {
  Pointers<const T, K> in;
  for (int k = 0; k < K; ++k) in.data[k] = static_cast<const T*>(call.inputs[k]);
  const Pointers<T, 1> out = {{static_cast<T*>(call.outputs[0])}};
  if (call.strides) return launch_strided(f, in, out, *call.strides, call.n, stream);
  constexpr int V = kVecWidth<T>;
  const void* pointers[K + 1] = {out.data[0]};
  for (int k = 0; k < K; ++k) pointers[k + 1] = in.data[k];
  if (const int head = elementwise_head(pointers, K + 1, sizeof(T)); head < V) {
    elementwise_flat_kernel<V><<<elementwise_blocks(ceil_div(call.n, V)), kElementwiseThreads, 0, stream>>>(
        f, in, out, head, call.n);
  } else {
    elementwise_flat_kernel<1>
        <<<elementwise_blocks(call.n), kElementwiseThreads, 0, stream>>>(f, in, out, 0, call.n);
  }
  return cudaGetLastError();
}

}  // namespace lltm_ext

#define LLTM_ELEMENTWISE_OF(F, K, T) \
  template cudaError_t launch_elementwise(const F<T>&, const ElementwiseCall<K, 1>&, cudaStream_t);
#define LLTM_ELEMENTWISE(F, K)      \
  LLTM_ELEMENTWISE_OF(F, K, float)  \
  LLTM_ELEMENTWISE_OF(F, K, double) \
  LLTM_ELEMENTWISE_OF(F, K, __half) \
  LLTM_ELEMENTWISE_OF(F, K, __nv_bfloat16)
#define LLTM_ELEMENTWISE_COMPLEX(F, K)      \
  LLTM_ELEMENTWISE_OF(F, K, Complex<float>) \
  LLTM_ELEMENTWISE_OF(F, K, Complex<double>)
