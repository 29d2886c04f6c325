// An elementwise call as the engines see it: pointers and sizes, no tensors.
#pragma once

#include "common/portable.h"
#include "common/vec.cuh"

namespace lltm_ext {

// Small blocks spread a short call over more multiprocessors. One vector an input and thread is enough on
// its way: an H200 copies no faster with more.
constexpr int kElementwiseThreads = 128;

LLTM_HOST_DEVICE unsigned elementwise_blocks(int64_t threads) {
  return static_cast<unsigned>((threads + kElementwiseThreads - 1) / kElementwiseThreads);
}

// The first element from which `count` tensors are all aligned to 16-byte vectors: the length of a vector if
// there is none.
LLTM_HOST_DEVICE int elementwise_head(const void* const* pointers, int count, int element_size) {
  const int vector = 16 / element_size;
  for (int head = 0; head < vector; ++head) {
    bool aligned = true;
    for (int k = 0; k < count; ++k) {
      aligned = aligned && is_vec_aligned(static_cast<const char*>(pointers[k]) + head * element_size);
    }
    if (aligned) return head;
  }
  return vector;
}

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
