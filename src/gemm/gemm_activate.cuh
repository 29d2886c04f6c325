// The epilogue's activation, for the kernels that compute it exactly.
#pragma once

#include <algorithm>

#include "common/activations.h"
#include "common/vec.cuh"

namespace lltm_ext {

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

}  // namespace lltm_ext
