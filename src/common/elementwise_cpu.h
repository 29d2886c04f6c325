// Elementwise ops on the CPU: the functors of elementwise.cuh on torch's thread pool.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <utility>

#include "common/elementwise_call.h"
#include "common/types.h"

namespace lltm_ext {

// With fewer elements, a second thread costs more time than it saves.
constexpr int64_t kElementwiseGrain = 32768;

template <class F, typename T, size_t... k>
void run_strided(const F& f, const ElementwiseCall<sizeof...(k), 1>& call, int64_t begin, int64_t end,
                 std::index_sequence<k...>) {
  constexpr int N = sizeof...(k) + 1;
  const Strides<N>& strides = *call.strides;
  for (int64_t i = begin; i < end; ++i) {
    int64_t offsets[N] = {}, rest = i;
    for (int d = 0; d < strides.dims; ++d) {
      const int64_t coordinate = rest % strides.sizes[d];
      rest /= strides.sizes[d];
      for (int p = 0; p < N; ++p) offsets[p] += coordinate * strides.of[p][d];
    }
    static_cast<T*>(call.outputs[0])[offsets[0]] =
        narrow<T>(f(widen(static_cast<const T*>(call.inputs[k])[offsets[k + 1]])...));
  }
}

template <class F, typename T, size_t... k>
void run_flat(const F& f, const ElementwiseCall<sizeof...(k), 1>& call, int64_t begin, int64_t end,
              std::index_sequence<k...>) {
  T* const output = static_cast<T*>(call.outputs[0]);
  for (int64_t i = begin; i < end; ++i) {
    output[i] = narrow<T>(f(widen(static_cast<const T*>(call.inputs[k])[i])...));
  }
}

template <template <typename> class F, typename T, int K>
void run_elementwise(const F<T>& f, const ElementwiseCall<K, 1>& call) {
  at::parallel_for(0, call.n, kElementwiseGrain, [&](int64_t begin, int64_t end) {
    constexpr auto inputs = std::make_index_sequence<K>();
    if (call.strides) {
      run_strided<F<T>, T>(f, call, begin, end, inputs);
    } else {
      run_flat<F<T>, T>(f, call, begin, end, inputs);
    }
  });
}

}  // namespace lltm_ext

#define LLTM_ELEMENTWISE_OF(F, K, T) template void run_elementwise(const F<T>&, const ElementwiseCall<K, 1>&);
#define LLTM_ELEMENTWISE(F, K)        \
  LLTM_ELEMENTWISE_OF(F, K, float)    \
  LLTM_ELEMENTWISE_OF(F, K, double)   \
  LLTM_ELEMENTWISE_OF(F, K, at::Half) \
  LLTM_ELEMENTWISE_OF(F, K, at::BFloat16)
#define LLTM_ELEMENTWISE_COMPLEX(F, K)      \
  LLTM_ELEMENTWISE_OF(F, K, Complex<float>) \
  LLTM_ELEMENTWISE_OF(F, K, Complex<double>)
