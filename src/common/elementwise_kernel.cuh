// The elementwise kernels: outputs[i] = f(inputs[i]...), where f is a functor on the accumulate type.
// nvcc compiles them for the package's ops (elementwise.cuh), and NVRTC for users' formulas
// (src/elementwise), so this file must not include host headers.
#pragma once

#include "common/elementwise_call.h"
#include "common/types.h"
#include "common/vec.cuh"

#ifdef __CUDACC__

namespace lltm_ext {

template <typename T, int N>
struct Pointers {
  T* data[N];
};

// The result of a functor with several outputs.
template <typename A, int M>
struct Values {
  A data[M];
};
template <typename A>
__device__ __forceinline__ Values<A, 1> as_values(A x) {
  return {{x}};
}
template <typename A, int M>
__device__ __forceinline__ Values<A, M> as_values(Values<A, M> x) {
  return x;
}

template <int... k>
struct Indices {};
template <int N, int... k>
struct MakeIndices : MakeIndices<N - 1, N - 1, k...> {};
template <int... k>
struct MakeIndices<0, k...> {
  using type = Indices<k...>;
};

template <class F, typename In, int V, int K, int... k>
__device__ __forceinline__ auto apply(const F& f, const Vec<In, V> (&x)[K], int j, Indices<k...>) {
  return as_values(f(widen(x[k].data[j])...));
}

// Uses inline PTX, because the compiler turns an assignment into one store per element.
template <typename T, int N>
__device__ __forceinline__ void store(T* pointer, const Vec<T, N>& x) {
  if constexpr (N > 1 && sizeof(x) == 16) {
    const uint4 bits = *reinterpret_cast<const uint4*>(&x);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(pointer)),
                 "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
                 : "memory");
  } else {
    *reinterpret_cast<Vec<T, N>*>(pointer) = x;
  }
}

// Computes V elements, which begin at in_offsets[k] in input k and at out_offsets[m] in output m. All loads
// are issued before the first store.
template <int V, class F, typename In, typename Out, int K, int M>
__device__ __forceinline__ void compute(const F& f, const Pointers<const In, K>& in,
                                        const Pointers<Out, M>& out, const int64_t (&in_offsets)[K],
                                        const int64_t (&out_offsets)[M]) {
  Vec<In, V> x[K];
#pragma unroll
  for (int k = 0; k < K; ++k) x[k] = *reinterpret_cast<const Vec<In, V>*>(in.data[k] + in_offsets[k]);
  Vec<Out, V> y[M];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const auto values = apply(f, x, j, typename MakeIndices<K>::type());
#pragma unroll
    for (int m = 0; m < M; ++m) y[m].data[j] = narrow<Out>(values.data[m]);
  }
#pragma unroll
  for (int m = 0; m < M; ++m) store(out.data[m] + out_offsets[m], y[m]);
}

template <int V, class F, typename In, typename Out, int K, int M>
__device__ __forceinline__ void compute_flat(const F& f, const Pointers<const In, K>& in,
                                             const Pointers<Out, M>& out, int64_t i) {
  int64_t in_offsets[K], out_offsets[M];
#pragma unroll
  for (int k = 0; k < K; ++k) in_offsets[k] = i;
#pragma unroll
  for (int m = 0; m < M; ++m) out_offsets[m] = i;
  compute<V>(f, in, out, in_offsets, out_offsets);
}

// Computes n elements in memory order. Vectors of V elements begin at `head`, where all pointers are aligned.
// The elements before the first and after the last vector are computed one by one.
template <int V, class F, typename In, typename Out, int K, int M>
__device__ __forceinline__ void elementwise_flat(const F& f, const Pointers<const In, K>& in,
                                                 const Pointers<Out, M>& out, int head, int64_t n) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kElementwiseThreads + threadIdx.x;
  const int64_t i = head + thread * V;
  if (i + V <= n) {
    compute_flat<V>(f, in, out, i);
  } else {
    for (int64_t j = i; j < n; ++j) compute_flat<1>(f, in, out, j);
  }
  if (V > 1 && thread < head && thread < n) compute_flat<1>(f, in, out, thread);
}

// Computes one element per thread, at any strides. Index is an unsigned type that can hold n.
template <typename Index, class F, typename In, typename Out, int K, int M>
__device__ __forceinline__ void elementwise_strided(const F& f, const Pointers<const In, K>& in,
                                                    const Pointers<Out, M>& out,
                                                    const Strides<K + M>& strides, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kElementwiseThreads + threadIdx.x;
  if (i >= n) return;
  Index rest = static_cast<Index>(i);
  int64_t in_offsets[K] = {}, out_offsets[M] = {};
  for (int d = 0; d < strides.dims; ++d) {
    const Index size = static_cast<Index>(strides.sizes[d]), quotient = rest / size;
    const int64_t coordinate = rest - quotient * size;
    rest = quotient;
#pragma unroll
    for (int m = 0; m < M; ++m) out_offsets[m] += coordinate * strides.of[m][d];
#pragma unroll
    for (int k = 0; k < K; ++k) in_offsets[k] += coordinate * strides.of[M + k][d];
  }
  compute<1>(f, in, out, in_offsets, out_offsets);
}

}  // namespace lltm_ext

#endif
