// The arguments of a fused step's kernel, which also takes the step's number. For host and device.
#pragma once

#include "common/hopper/tensor_map.h"
#include "recurrence/cell.h"

namespace lltm_ext {

template <typename T>
struct FusedForwardArguments {
  SequenceForwardArguments<T> s;
  CUtensorMap h0, output, weight;
};

template <typename T>
struct FusedBackwardArguments {
  SequenceBackwardArguments<T> s;
  CUtensorMap grad_gates, weight_t;
};

}  // namespace lltm_ext
