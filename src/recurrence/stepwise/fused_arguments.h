// The arguments of a fused step's kernel, which also takes the step's number. For host and device. Tensor
// maps are aligned here: their type is aligned to 64 bytes in CUDA 12 and to 128 in CUDA 13, and host and
// NVRTC must agree.
#pragma once

#include "common/hopper/tensor_map.h"
#include "recurrence/cell.h"

namespace lltm_ext {

template <typename T>
struct FusedForwardArguments {
  SequenceForwardArguments<T> s;
  alignas(128) CUtensorMap h0, output, weight;
};

template <typename T>
struct FusedBackwardArguments {
  SequenceBackwardArguments<T> s;
  alignas(128) CUtensorMap grad_gates, weight_t;
};

}  // namespace lltm_ext
