// relu: the forward and backward functors, for CPU and GPU.
#pragma once

#include "common/math.h"
#include "common/types.h"

namespace lltm_ext {

template <typename T>
struct Relu {
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const { return relu(input); }
};

template <typename T>
struct ReluBackward {
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> grad_output, acc_t<T> output) const {
    return relu_backward(grad_output, output);
  }
};

}  // namespace lltm_ext
