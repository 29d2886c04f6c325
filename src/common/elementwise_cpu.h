// The CPU elementwise engine: the same functors as elementwise.cuh, over torch's thread pool.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "common/types.h"

namespace lltm_ext {

// Below this many elements a second thread costs more than it saves.
constexpr int64_t kElementwiseGrain = 32768;

template <typename F, typename T, typename... In>
void run_elementwise(F f, int64_t n, T* output, const In*... inputs) {
  at::parallel_for(0, n, kElementwiseGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) output[i] = narrow<T>(f(widen(inputs[i])...));
  });
}

}  // namespace lltm_ext
