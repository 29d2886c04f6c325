// The scalar formulas of all ops, for CPU and GPU.
#pragma once

#include "common/portable.h"

#ifdef __CUDACC_RTC__
namespace std {  // NVRTC declares these functions, but not in std
using ::abs, ::atan, ::copysign, ::cos, ::cosh, ::erf, ::exp, ::expm1, ::floor, ::fmod, ::log, ::log1p, ::pow,
    ::rint, ::sin, ::sinh, ::sqrt, ::tanh;
}  // namespace std
#else
#include <cmath>
#endif

namespace lltm_ext {

// 1 / (1 + e^-x). It needs no branch: where e^-x overflows to infinity, its reciprocal 0 is correct.
template <typename T>
LLTM_HOST_DEVICE T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

// Takes the output, as the derivatives of all functions whose output determines them do.
template <typename T>
LLTM_HOST_DEVICE T sigmoid_derivative(T output) {
  return output * (T(1) - output);
}

// A value y >= 0 as it is saved in a half type: y - 1 if y is above 1/2 and at most 1, with 1 as -0, else y.
// So a gate near 1 keeps its distance from 1, which counts where little is forgotten over many steps.
template <typename T>
LLTM_HOST_DEVICE T folded(T y) {
  const T below = -(T(1) - y);
  return (y > T(.5)) & (y <= T(1)) ? below : y;
}
template <typename T>
LLTM_HOST_DEVICE T unfolded(T saved) {
  return saved + (T(.5) - std::copysign(T(.5), saved));
}

// max(x, 0). It passes NaN on, and on the CPU it treats -0 as torch does.
template <typename T>
LLTM_HOST_DEVICE T relu(T x) {
#ifdef __CUDA_ARCH__
  return x <= T(0) ? T(0) : x;
#else
  return x < T(0) ? T(0) : x;
#endif
}

// The gradient through relu, from its output: 0 where the output is 0.
template <typename T>
LLTM_HOST_DEVICE T relu_backward(T grad_output, T output) {
  return output <= T(0) ? T(0) : grad_output;
}

// Divides by zero, because NVRTC has no header with the constants.
template <typename T>
LLTM_HOST_DEVICE T infinity() {
  return T(1) / T(0);
}
template <typename T>
LLTM_HOST_DEVICE T nan() {
  return T(0) * infinity<T>();
}

// The larger and the smaller value, or NaN if either is NaN.
template <typename T>
LLTM_HOST_DEVICE T maximum(T a, T b) {
  return a > b || a != a ? a : b;
}
template <typename T>
LLTM_HOST_DEVICE T minimum(T a, T b) {
  return a < b || a != a ? a : b;
}

// -1, 0 or 1. As in torch.sign, NaN gives 0.
template <typename T>
LLTM_HOST_DEVICE T sign(T x) {
  return T(x > T(0)) - T(x < T(0));
}

// log(1 + e^x). It does not overflow, and has a small relative error even where it is nearly 0.
template <typename T>
LLTM_HOST_DEVICE T softplus(T x) {
  return relu(x) + std::log1p(std::exp(-std::abs(x)));
}

// log(e^a + e^b). The difference of equal infinities would be NaN.
template <typename T>
LLTM_HOST_DEVICE T logaddexp(T a, T b) {
  const T size = a == b ? T(0) : std::abs(a - b);
  return maximum(a, b) + std::log1p(std::exp(-size));
}

// The nearest integer, ties to even. From 2^23 on (2^52 in float64) all values are integers, so adding that
// rounds. On a GPU it takes a fraction of the time of the rounding instruction.
template <typename T>
LLTM_HOST_DEVICE T round_half_to_even(T x) {
  constexpr T kWhole = sizeof(T) == 4 ? T(8388608) : T(4503599627370496);
  const T size = std::abs(x), rounded = (size + kWhole) - kWhole;
  return size < kWhole ? std::copysign(rounded, x) : x;
}

// a * b, rounded separately: the compiler may not fuse it with an addition into an FMA, which rounds once.
template <typename T>
LLTM_HOST_DEVICE T product(T a, T b) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) {
    return __fmul_rn(a, b);
  } else {
    return __dmul_rn(a, b);
  }
#else
  const volatile T rounded = a * b;
  return rounded;
#endif
}

template <typename T>
LLTM_HOST_DEVICE T tanh_derivative(T output) {
  return T(1) - output * output;
}

// x if x > 0, else e^x - 1.
template <typename T>
LLTM_HOST_DEVICE T elu(T x) {
  return x > T(0) ? x : std::expm1(x);
}

// For x < 0 the output is e^x - 1 and the derivative e^x.
template <typename T>
LLTM_HOST_DEVICE T elu_derivative(T output) {
  return output > T(0) ? T(1) : output + T(1);
}

// x * Phi(x), where Phi is the normal distribution's.
template <typename T>
LLTM_HOST_DEVICE T gelu(T x) {
  return x * T(0.5) * (T(1) + std::erf(x * T(0.70710678118654752)));
}

// Takes the input: Phi(x) + x * phi(x).
template <typename T>
LLTM_HOST_DEVICE T gelu_derivative(T x) {
  const T phi = std::exp(T(-0.5) * x * x) * T(0.39894228040143268);
  return T(0.5) * (T(1) + std::erf(x * T(0.70710678118654752))) + x * phi;
}

// gelu's approximation x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3).
template <typename T>
LLTM_HOST_DEVICE T gelu_tanh(T x) {
  return T(0.5) * x * (T(1) + std::tanh(T(0.79788456080286536) * (x + T(0.044715) * x * x * x)));
}

// A tanh as it is saved for the backward: unchanged, or for half types folded. Above 1/2, the folded value is
// 1 plus 2^16 times the distance from 1, which the derivative depends on.
struct PlainTanh {
  template <typename T>
  LLTM_HOST_DEVICE static T folded_tanh(T y) {
    return y;
  }
  template <typename T>
  LLTM_HOST_DEVICE static T unfolded_tanh(T saved) {
    return saved;
  }
};
struct FoldedTanh {
  template <typename T>
  LLTM_HOST_DEVICE static T folded_tanh(T y) {
    return std::abs(y) > T(.5) ? std::copysign(T(65537) - std::abs(y) * T(65536), y) : y;
  }
  template <typename T>
  LLTM_HOST_DEVICE static T unfolded_tanh(T saved) {
    return std::abs(saved) < T(1) ? saved : std::copysign((T(65537) - std::abs(saved)) / T(65536), saved);
  }
};

// The functions of cells and activations, exact to a few units in the last place. fast_math.cuh has faster
// ones.
struct ExactMath : PlainTanh {
  template <typename T>
  LLTM_HOST_DEVICE static T sigmoid(T x) {
    return lltm_ext::sigmoid(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T tanh(T x) {
    return std::tanh(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T elu(T x) {
    return lltm_ext::elu(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T gelu(T x) {
    return lltm_ext::gelu(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T gelu_derivative(T x) {
    return lltm_ext::gelu_derivative(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T gelu_tanh(T x) {
    return lltm_ext::gelu_tanh(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T silu(T x) {
    return x * lltm_ext::sigmoid(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T softplus(T x) {
    return lltm_ext::softplus(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T exp(T x) {
    return std::exp(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T expm1(T x) {
    return std::expm1(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T log(T x) {
    return std::log(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T log1p(T x) {
    return std::log1p(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T sqrt(T x) {
    return std::sqrt(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T rsqrt(T x) {
    return T(1) / std::sqrt(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T sin(T x) {
    return std::sin(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T cos(T x) {
    return std::cos(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T sinh(T x) {
    return std::sinh(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T cosh(T x) {
    return std::cosh(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T atan(T x) {
    return std::atan(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T erf(T x) {
    return std::erf(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T floor(T x) {
    return std::floor(x);
  }
  // Ties to even.
  template <typename T>
  LLTM_HOST_DEVICE static T round(T x) {
    return std::rint(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T fmod(T a, T b) {
    return std::fmod(a, b);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T abs(T x) {
    return std::abs(x);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T logaddexp(T a, T b) {
    return lltm_ext::logaddexp(a, b);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T pow(T a, T b) {
    return std::pow(a, b);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T divide(T a, T b) {
    return a / b;
  }

  // y as two values of a half type: its first 8 bits and the others.
  template <typename T>
  LLTM_HOST_DEVICE static T high_part(T y) {
    const T scaled = y * T(65537);
    return scaled - (scaled - y);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T low_part(T y) {
    return y - high_part(y);
  }
  template <typename T>
  LLTM_HOST_DEVICE static T of_parts(T high, T low) {
    return high + low;
  }
};

// Takes the input.
template <class Math, typename T>
LLTM_HOST_DEVICE T gelu_tanh_derivative(T x) {
  const T t = Math::tanh(T(0.79788456080286536) * (x + T(0.044715) * x * x * x));
  const T slope = T(0.79788456080286536) * (T(1) + T(3 * 0.044715) * x * x);
  return T(0.5) * (T(1) + t + x * tanh_derivative(t) * slope);
}

// Takes the input.
template <class Math, typename T>
LLTM_HOST_DEVICE T silu_derivative(T x) {
  const T y = Math::sigmoid(x);
  return y * (T(1) + x * (T(1) - y));
}

}  // namespace lltm_ext
