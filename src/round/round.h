// round, floor, ceil, trunc and binarize: the functors, for CPU and GPU alike. The backward that hands the
// gradient on has none.
#pragma once

#include "common/math.h"
#include "common/types.h"

namespace lltm_ext {

template <typename T>
struct Round {
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const { return round_half_to_even(input); }
};
template <typename T>
struct Floor {
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const { return std::floor(input); }
};
template <typename T>
struct Ceil {
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const { return std::ceil(input); }
};
template <typename T>
struct Trunc {
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const { return std::trunc(input); }
};

// NaN is not above the threshold: low.
template <typename T>
struct Binarize {
  acc_t<T> threshold, low, high;
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const { return input > threshold ? high : low; }
};

// The gradient through a step of height 2 * `half` at `threshold`, as if it were a ramp of slope 1 that ends
// where the step's values are reached.
template <typename T>
struct BinarizeClippedBackward {
  acc_t<T> threshold, half;
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> grad_output, acc_t<T> input) const {
    return std::abs(input - threshold) <= half ? grad_output : acc_t<T>(0);
  }
};

// As if it were half * tanh((input - threshold) / half), whose slope there is 1 too.
template <typename T>
struct BinarizeTanhBackward {
  acc_t<T> threshold, half;
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> grad_output, acc_t<T> input) const {
    return grad_output * tanh_derivative(std::tanh((input - threshold) / half));
  }
};

}  // namespace lltm_ext
