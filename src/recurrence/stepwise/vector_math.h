// The functions of cells on the CPU, and conversions, in a form that the compiler vectorises. Of torch, only
// the half types.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/math.h"
#include "common/types.h"

namespace lltm_ext {
namespace step_cpu {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Takes values: GCC does not recognise a minimum of references, nor of a constant.
template <typename Int>
inline Int smaller(Int a, Int b) {
  return a < b ? a : b;
}

// The functions of cells in float32, without calls or branches, so that GCC vectorises them. GCC turns ?: on
// floats with a constant side into a branch, so selections work on the bits as integers. Signed integers
// order floats above 0; unsigned ones order floats below 0 in reverse.
struct VectorMath : PlainTanh {
  // e^x = 2^n * (1 + rest). For small x, `rest` is more exact than e^x - 1.
  struct Exp {
    float rest;
    uint32_t n;
    // 2^n if the bias is 127, half of it if 126.
    float power(uint32_t bias) const { return float_of((n + bias) << 23); }
  };

  // Requires -87 <= x <= 89.4.
  static Exp exp(float x) {
    constexpr float kLog2E = 1.44269504f;
    constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // n * kLn2High is exact
    constexpr float kRound = 12582912.f;  // 1.5 * 2^23: the low bits of a sum with it are the nearest integer
    const float rounded = x * kLog2E + kRound, n = rounded - kRound;
    const float r = (x - n * kLn2High) - n * kLn2Low;
    // (e^r - 1 - r) / r^2, fitted on |r| <= ln(2) / 2 for a relative error of e^r - 1 of 1.4e-8.
    float p = 1.39464648e-3f;
    p = p * r + 8.36659223e-3f;
    p = p * r + 4.16662805e-2f;
    p = p * r + 1.66665435e-1f;
    p = p * r + .5f;
    return {p * (r * r) + r, bits_of(rounded)};
  }

  // Requires -87 <= x <= 0.
  static float expm1(float x) {
    const Exp e = exp(x);
    return e.power(127) * e.rest + (e.power(127) - 1.f);
  }

  // The limits turn NaN into a number; this restores it.
  static float nan_of(float x, float y) { return float_of(bits_of(y) | -static_cast<uint32_t>(x != x)); }

  static float at_least(float low, float x) { return float_of(smaller(bits_of(x), bits_of(low))); }
  static float at_most(float high, float x) {
    return float_of(smaller(static_cast<int32_t>(bits_of(x)), static_cast<int32_t>(bits_of(high))));
  }

  // Uses e^-x / 2: e^-x overflows before sigmoid(x) reaches 0.
  static float sigmoid(float x) {
    const Exp e = exp(at_most(89.4f, at_least(-87.f, -x)));
    return nan_of(x, .5f / (e.power(126) * (1.f + e.rest) + .5f));
  }

  static float tanh(float x) {
    const float t = expm1(-2.f * at_most(10.f, std::fabs(x)));
    return nan_of(x, std::copysign(t / (t + 2.f), x));
  }

  // max(x, 0) + (e^min(x, 0) - 1)
  static float elu(float x) {
    const int32_t bits = bits_of(x), negative = bits >> 31;
    return nan_of(x, float_of(bits & ~negative) + expm1(at_least(-87.f, float_of(bits & negative))));
  }
};

// The functions in float64, which is for tests and gradcheck, are exact rather than fast.
struct StdMath : PlainTanh {
  static double sigmoid(double x) { return lltm_ext::sigmoid(x); }
  static double tanh(double x) { return std::tanh(x); }
  static double elu(double x) { return lltm_ext::elu(x); }
};

// The functions for half types, with FoldedTanh without branches.
struct HalfVectorMath : VectorMath {
  static float folded_tanh(float y) {
    const float size = std::fabs(y);
    return select(size > .5f, std::copysign(65537.f - size * 65536.f, y), y);
  }
  static float unfolded_tanh(float saved) {
    const float size = std::fabs(saved);
    return select(size < 1.f, saved, std::copysign((65537.f - size) / 65536.f, saved));
  }

 private:
  static float select(bool first, float a, float b) {
    const uint32_t mask = -static_cast<uint32_t>(first);
    return float_of((bits_of(a) & mask) | (bits_of(b) & ~mask));
  }
};

// A distinct type for float32, so that functions can be overloaded.
struct Lane {
  float value;
  Lane() = default;
  Lane(float x) : value(x) {}
  operator float() const { return value; }
  operator float&() { return value; }
};

// lltm_ext::elu_derivative without its branch.
inline Lane elu_derivative(Lane output) {
  const int32_t bits = bits_of(output);
  return VectorMath::nan_of(output, 1.f + float_of(bits & bits >> 31));
}

template <typename T>
using ValueOf = std::conditional_t<std::is_same_v<acc_t<T>, float>, Lane, double>;
template <typename T>
using MathOf = std::conditional_t<std::is_same_v<acc_t<T>, double>, StdMath,
                                  std::conditional_t<std::is_same_v<T, float>, VectorMath, HalfVectorMath>>;

// Convert to and from acc_t<T>. c10's conversion of float16 has branches, these do not.
template <typename T>
acc_t<T> load(const T& from) {
  return widen(from);
}

template <typename T>
void save(acc_t<T> value, T& to) {
  to = narrow<T>(value);
}

inline float load(const c10::Half& from) {
  const uint32_t magnitude = (from.x & 0x7FFFu) << 13;  // the exponent's bias changes by 127 - 15
  const uint32_t subnormal = -static_cast<uint32_t>(magnitude < (1u << 23));
  const uint32_t special = -static_cast<uint32_t>(magnitude >= (31u << 23));  // infinite or NaN: to 255
  const uint32_t exponent = ((127 - 15) << 23) + (subnormal & (1u << 23)) + (special & ((127 - 15) << 23));
  // A subnormal has no leading 1: 2^-14 is subtracted again.
  const float value = float_of(magnitude + exponent) - float_of(subnormal & bits_of(0x1p-14f));
  return float_of(bits_of(value) | (from.x & 0x8000u) << 16);
}

inline void save(float value, c10::Half& to) {
  const uint32_t bits = bits_of(value), exponent = bits & 0x7F800000u, smallest = 113u << 23;
  const uint32_t nan = -static_cast<uint32_t>(value != value);
  // The sum with 2^(e + 15) rounds the mantissa to ten bits. 65536 and more become infinite in the product,
  // 65520 and more in the rounding.
  const float large = std::fabs(value) * 0x1p112f * 0x1p-110f;
  const uint32_t sum = bits_of(large + float_of((exponent < smallest ? smallest : exponent) + (15u << 23)));
  const uint32_t magnitude = (sum >> 13 & 0x7C00u) + (sum & 0x0FFFu);
  to.x = static_cast<uint16_t>((bits >> 16 & 0x8000u) | (magnitude & ~nan) | (nan & 0x7E00u));
}

}  // namespace step_cpu
}  // namespace lltm_ext
