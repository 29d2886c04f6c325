// round, floor, ceil, trunc and binarize: the functors, for CPU and GPU. A backward that passes the gradient
// on unchanged has none.
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
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const {
    const acc_t<T> y = round_half_to_even(input);
    return std::copysign(y - acc_t<T>(y > input), input);
  }
};
template <typename T>
struct Ceil {
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const {
    const acc_t<T> y = round_half_to_even(input);
    return std::copysign(y + acc_t<T>(y < input), input);
  }
};
template <typename T>
struct Trunc {
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const {
    const acc_t<T> size = std::abs(input), y = round_half_to_even(size);
    return std::copysign(y - acc_t<T>(y > size), input);
  }
};

// NaN is not above the threshold, so it becomes low.
template <typename T>
struct Binarize {
  acc_t<T> threshold, low, high;
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const { return input > threshold ? high : low; }
};

// The gradient of a step of height 2 * `half` at `threshold`, taken as that of a ramp of slope 1 and the same
// height.
template <typename T>
struct BinarizeClippedBackward {
  acc_t<T> threshold, half;
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> grad_output, acc_t<T> input) const {
    return std::abs(input - threshold) <= half ? grad_output : acc_t<T>(0);
  }
};

// The square of 1 / cosh, which is the derivative of tanh.
template <typename A>
LLTM_HOST_DEVICE A tanh_slope(A x) {
  return tanh_derivative(std::tanh(x));
}
#ifdef __CUDACC__
// This is for the half types, whose rounding error is larger than that of the approximate instructions:
// 4 e / (1 + e)^2 with e = e^-2|x|.
__device__ __forceinline__ float fast_tanh_slope(float x) {
  float e, inverse;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(fabsf(x) * -2.88539008f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + e));
  return 4.f * e * inverse * inverse;
}
#endif

// The same gradient, taken from half * tanh((input - threshold) / half), of slope 1 at the threshold too.
template <typename T>
struct BinarizeTanhBackward {
  acc_t<T> threshold, half;
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> grad_output, acc_t<T> input) const {
    const acc_t<T> x = (input - threshold) / half;
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(T) == 2) return grad_output * fast_tanh_slope(x);
#endif
    return grad_output * tanh_slope(x);
  }
};

}  // namespace lltm_ext
