// The arguments of a large layer's kernels. For host and device; for the alignment see fused_arguments.h.
#pragma once

#include "common/hopper/tensor_map.h"
#include "recurrence/cell.h"

namespace lltm_ext {

template <typename T>
struct LargeForwardArguments {
  SequenceForwardArguments<T> s;
  alignas(128) CUtensorMap h0,
      h;                         // `h`: s.output or `exchanged`; h0: a copy of it if there is no such product
  unsigned* arrivals;            // zeros, LargeShape::arrival_bytes()
  int group_pairs, first_group;  // the first group of this launch
  // Of float32:
  void* exchanged;          // [2, B, H] of float16, in which blocks exchange h (LargeExchange)
  const T* first_products;  // [B, G, H] of h0, or null for zeros
};

template <typename T>
struct LargeBackwardArguments {
  SequenceBackwardArguments<T> s;
  alignas(128) CUtensorMap grad_gates;  // [G, rows, H]: a matrix for each gate
  unsigned* arrivals;                   // as forward's
  int group_pairs, first_group;
};

}  // namespace lltm_ext
