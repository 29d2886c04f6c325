// The arguments of an elementwise kernel: pointers and sizes, no tensors.
#pragma once

#include "common/portable.h"
#include "common/vec.cuh"

namespace lltm_ext {

// Small blocks spread short tensors over more multiprocessors. Each thread loads one vector per input: on an
// H200, more vectors per thread do not copy faster.
constexpr int kElementwiseThreads = 128;

LLTM_HOST_DEVICE unsigned elementwise_blocks(int64_t threads) {
  return static_cast<unsigned>((threads + kElementwiseThreads - 1) / kElementwiseThreads);
}

// The first element at which all tensors are aligned to 16-byte vectors, or the vector's length if there is
// none.
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

// The strides of N operands, outputs first, in elements. The fastest dimension comes first.
template <int N>
struct Strides {
  int dims;
  int64_t sizes[kMaxDims];
  int64_t of[N][kMaxDims];
};

// n elements of K inputs and M outputs. Without `strides`, all operands are dense in the same memory order.
template <int K, int M>
struct ElementwiseCall {
  int64_t n;
  const void* inputs[K];
  void* outputs[M];
  const Strides<K + M>* strides;
};

}  // namespace lltm_ext
