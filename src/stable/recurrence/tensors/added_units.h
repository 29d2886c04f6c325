// No units are added to hidden sizes: their autograd is in C++ (docs/design/portable.md).
#pragma once

#include "recurrence/tensors/launch.h"

namespace lltm_ext {

template <typename... Args>
bool adds_units(const Args&...) {
  return false;
}

template <class Op, typename... Args>
int64_t hidden_of_kernels(const Op&, const at::Tensor&, int64_t hidden, const Args&...) {
  return hidden;
}

template <typename F>
variable_list run_with_added_units(Directions, F&&) {
  return {};
}

}  // namespace lltm_ext
