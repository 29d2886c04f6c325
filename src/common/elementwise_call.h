// An elementwise call as the engines see it: pointers and sizes, no tensors.
#pragma once

#include "common/portable.h"

namespace lltm_ext {

constexpr int kMaxDims = 16;

// Where N operands, outputs first, have their elements: strides in elements, the fastest dimension first.
template <int N>
struct Strides {
  int dims;
  int64_t sizes[kMaxDims];
  int64_t of[N][kMaxDims];
};

// n elements of K inputs and M outputs. Without `strides` all of them lie side by side, in the same order.
template <int K, int M>
struct ElementwiseCall {
  int64_t n;
  const void* inputs[K];
  void* outputs[M];
  const Strides<K + M>* strides;
};

}  // namespace lltm_ext
