// The CPU's way of one step: units in blocks on the stack, in loops that the compiler turns into vector code
// for the machine it runs on. Included by <op>_step_cpu.cpp alone, which instantiates it for its cell.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common/math.h"
#include "common/recurrence/step.h"

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

// By value: a reference would hide the minimum from the compiler, and so does a constant argument.
template <typename Int>
inline Int smaller(Int a, Int b) {
  return a < b ? a : b;
}

// The functions of cells in float32, without a call or a branch: GCC vectorises nothing else, and makes a
// branch of a ?: on floats as soon as one side is constant. So what has to choose does it on the bits, as
// integers. These sort like the floats above 0 if signed, and in reverse below 0 if unsigned.
struct VectorMath {
  // e^x = 2^n * (1 + rest), and rest loses nothing to the 1 when x is small.
  struct Exp {
    float rest;
    uint32_t n;
    // 2^n with a bias of 127, half of it with 126.
    float power(uint32_t bias) const { return float_of((n + bias) << 23); }
  };

  // For -87 <= x <= 89.4.
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

  // For -87 <= x <= 0.
  static float expm1(float x) {
    const Exp e = exp(x);
    return e.power(127) * e.rest + (e.power(127) - 1.f);
  }

  // The limits take NaN for a number; this brings it back.
  static float nan_of(float x, float y) { return float_of(bits_of(y) | -static_cast<uint32_t>(x != x)); }

  static float at_least(float low, float x) { return float_of(smaller(bits_of(x), bits_of(low))); }
  static float at_most(float high, float x) {
    return float_of(smaller(static_cast<int32_t>(bits_of(x)), static_cast<int32_t>(bits_of(high))));
  }

  // Half of e^-x, because e^-x itself would be infinite, and sigmoid 0, a little too early.
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

// In float64, which the tests and gradcheck use: exactness matters, speed does not.
struct StdMath {
  static double sigmoid(double x) { return lltm_ext::sigmoid(x); }
  static double tanh(double x) { return std::tanh(x); }
  static double elu(double x) { return lltm_ext::elu(x); }
};

// float32 under a name of its own, which gives it formulas of its own.
struct Lane {
  float value;
  Lane() = default;
  Lane(float x) : value(x) {}
  operator float() const { return value; }
  operator float&() { return value; }
};

// As lltm_ext::elu_derivative, but without its branch.
inline Lane elu_derivative(Lane output) {
  const int32_t bits = bits_of(output);
  return VectorMath::nan_of(output, 1.f + float_of(bits & bits >> 31));
}

template <typename T>
using ValueOf = std::conditional_t<std::is_same_v<acc_t<T>, float>, Lane, double>;
template <typename T>
using MathOf = std::conditional_t<std::is_same_v<acc_t<T>, float>, VectorMath, StdMath>;

// To and from the type that is computed in. c10's conversion of float16 is correct but branches, this does
// not.
template <typename T>
acc_t<T> load(const T& from) {
  return widen(from);
}

template <typename T>
void save(acc_t<T> value, T& to) {
  to = narrow<T>(value);
}

inline float load(const c10::Half& from) {
  const uint32_t magnitude = (from.x & 0x7FFFu) << 13;  // the exponent has to move by 127 - 15
  const uint32_t subnormal = -static_cast<uint32_t>(magnitude < (1u << 23));
  const uint32_t special = -static_cast<uint32_t>(magnitude >= (31u << 23));  // infinite or NaN: to 255
  const uint32_t exponent = ((127 - 15) << 23) + (subnormal & (1u << 23)) + (special & ((127 - 15) << 23));
  // A subnormal got a leading 1 that it does not have: 2^-14 is taken off again.
  const float value = float_of(magnitude + exponent) - float_of(subnormal & bits_of(0x1p-14f));
  return float_of(bits_of(value) | (from.x & 0x8000u) << 16);
}

inline void save(float value, c10::Half& to) {
  const uint32_t bits = bits_of(value), exponent = bits & 0x7F800000u, smallest = 113u << 23;
  const uint32_t nan = -static_cast<uint32_t>(value != value);
  // The sum with 2^(e + 15) leaves ten bits of the mantissa, rounded. To infinity and back: so does 65520.
  const float large = std::fabs(value) * 0x1p112f * 0x1p-110f;
  const uint32_t sum = bits_of(large + float_of((exponent < smallest ? smallest : exponent) + (15u << 23)));
  const uint32_t magnitude = (sum >> 13 & 0x7C00u) + (sum & 0x0FFFu);
  to.x = static_cast<uint16_t>((bits >> 16 & 0x8000u) | (magnitude & ~nan) | (nan & 0x7E00u));
}

// Before a loop whose pointers are to different tensors, or to the same place.
#ifdef __clang__
#define LLTM_STEP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define LLTM_STEP_INDEPENDENT _Pragma("GCC ivdep")
#endif

// Units of one row that are computed together, in buffers on the stack where T is not its accumulator type.
constexpr int kBlock = 256;

// Where a loop reads n values: in place, or widened into the buffer.
template <typename T, typename A>
const A* source(const T* from, A* buffer, int n) {
  if constexpr (std::is_same_v<T, A>) return from;
  for (int i = 0; i < n; ++i) buffer[i] = load(from[i]);
  return buffer;
}

// Where a loop writes values for `to`; store() then takes them there.
template <typename T, typename A>
A* target(T* to, A* buffer) {
  if constexpr (std::is_same_v<T, A>) return to;
  return buffer;
}

template <typename T, typename A>
void store(const A* values, T* to, int n) {
  if constexpr (std::is_same_v<T, A>) return;
  for (int i = 0; i < n; ++i) save(values[i], to[i]);
}

// Saved value v of a unit: the gates first, the extra ones after them.
template <class Cell, typename T>
T* saved_at(T* gates, T* extra, int v, int64_t hidden, int64_t row, int64_t unit) {
  constexpr int kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;
  return v < kGates ? gates + (row * kGates + v) * hidden + unit
                    : extra + (row * kExtra + v - kGates) * hidden + unit;
}

template <class Cell, typename T>
void step_block(const StepForward<T>& s, int64_t row, int64_t unit, int n) {
  constexpr int kGates = Cell::kGates, kSaved = Cell::kSaved;
  using A = acc_t<T>;
  const auto place = [&](int v) { return saved_at<Cell>(s.gates, s.extra, v, s.hidden, row, unit); };
  const int64_t at = row * s.hidden + unit;
  alignas(64) A buffers[kSaved + 1][kBlock];
  const A *gates[kGates], *products[kGates];
  A* saved[kSaved];
  for (int g = 0; g < kGates; ++g) {
    gates[g] = source(place(g), buffers[g], n);
    products[g] = s.product + (row * kGates + g) * s.hidden + unit;
  }
  for (int v = 0; v < kSaved; ++v) saved[v] = s.extra ? target(place(v), buffers[v]) : buffers[v];
  A *c = s.c + at, *h = target(s.h + at, buffers[kSaved]);
  LLTM_STEP_INDEPENDENT
  for (int i = 0; i < n; ++i) {
    ValueOf<T> x[kGates], y[kSaved], unit_c = c[i];
    for (int g = 0; g < kGates; ++g) x[g] = gates[g][i] + products[g][i];
    h[i] = Cell::template forward<MathOf<T>>(x, unit_c, y);
    c[i] = unit_c;
    for (int v = 0; v < kSaved; ++v) saved[v][i] = y[v];
  }
  store(h, s.h + at, n);
  std::copy_n(s.h + at, n, s.output + at);
  if (!s.extra) return;
  for (int v = 0; v < kSaved; ++v) store(saved[v], place(v), n);
}

// grad_output of n units, or zeros.
template <typename T, typename A>
const A* output_gradient(const StepBackward<T>& s, int64_t row, int64_t unit, A* buffer, int n) {
  if (!s.grad_output) {
    std::fill_n(buffer, n, A(0));
    return buffer;
  }
  const T* from = s.grad_output + row * s.output_row + unit * s.output_unit;
  if (s.output_unit == 1) return source(from, buffer, n);
  for (int i = 0; i < n; ++i) buffer[i] = load(from[i * s.output_unit]);
  return buffer;
}

template <class Cell, typename T>
void step_block(const StepBackward<T>& s, int64_t row, int64_t unit, int n) {
  constexpr int kGates = Cell::kGates, kSaved = Cell::kSaved;
  using A = acc_t<T>;
  const int64_t at = row * s.hidden + unit;
  const auto gate_at = [&](int g) { return (row * kGates + g) * s.hidden + unit; };
  alignas(64) A buffers[kSaved + kGates + 2][kBlock];
  const A* saved[kSaved];
  A* grad_gates[kGates];
  for (int v = 0; v < kSaved; ++v) {
    saved[v] = source(saved_at<Cell>(s.gates, s.extra, v, s.hidden, row, unit), buffers[v], n);
  }
  for (int g = 0; g < kGates; ++g) grad_gates[g] = target(s.grad_gates + gate_at(g), buffers[kSaved + g]);
  const A* grad_h = source(s.grad_h + at, buffers[kSaved + kGates], n);
  const A* grad_output = output_gradient(s, row, unit, buffers[kSaved + kGates + 1], n);
  A* grad_c = s.grad_c + at;
  LLTM_STEP_INDEPENDENT
  for (int i = 0; i < n; ++i) {
    ValueOf<T> y[kSaved], dx[kGates], dc = grad_c[i];
    const ValueOf<T> dh = grad_h[i] + grad_output[i];
    for (int v = 0; v < kSaved; ++v) y[v] = saved[v][i];
    Cell::template backward<MathOf<T>>(y, dh, dc, dx);
    grad_c[i] = dc;
    for (int g = 0; g < kGates; ++g) grad_gates[g][i] = dx[g];
  }
  for (int g = 0; g < kGates; ++g) {
    store(grad_gates[g], s.grad_gates + gate_at(g), n);
    if (!s.grad_bias) continue;
    A* grad_bias = s.grad_bias + gate_at(g);
    for (int i = 0; i < n; ++i) grad_bias[i] += grad_gates[g][i];
  }
}

// Units [begin, end) of all B * H.
template <class Cell, class Step>
__attribute__((flatten)) void step_units(const Step& step, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end;) {
    const int64_t row = i / step.hidden, unit = i % step.hidden;
    const int n = static_cast<int>(std::min({end - i, step.hidden - unit, int64_t{kBlock}}));
    step_block<Cell>(step, row, unit, n);
    i += n;
  }
}

// The same code, compiled for what a CPU can do and chosen at run time. Not by target_clones, which needs
// ifunc and stops at the first call that is not inlined: `flatten` inlines them all.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LLTM_STEP_TARGET(isa) __attribute__((flatten, target(isa)))

template <class Cell, class Step>
LLTM_STEP_TARGET("avx2,fma")
void step_units_avx2(const Step& step, int64_t begin, int64_t end) {
  step_units<Cell>(step, begin, end);
}

template <class Cell, class Step>
LLTM_STEP_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
void step_units_avx512(const Step& step, int64_t begin, int64_t end) {
  step_units<Cell>(step, begin, end);
}

template <class Cell, class Step>
auto step_units_of_this_cpu() {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? step_units_avx512<Cell, Step> : avx2 ? step_units_avx2<Cell, Step> : step_units<Cell, Step>;
}
#else
template <class Cell, class Step>
auto step_units_of_this_cpu() {
  return step_units<Cell, Step>;
}
#endif

template <class Cell, typename T, class Step>
void run_step(const Step& step) {
  static const auto units = step_units_of_this_cpu<Cell, Step>();
  constexpr int64_t kGrain = std::is_same_v<T, double> ? 512 : 2048;  // some 10 us of work
  at::parallel_for(0, step.batch * step.hidden, kGrain,
                   [&](int64_t begin, int64_t end) { units(step, begin, end); });
}

}  // namespace step_cpu

template <class Cell, typename T>
void recurrence_step(const StepForward<T>& step) {
  step_cpu::run_step<Cell, T>(step);
}

template <class Cell, typename T>
void recurrence_step(const StepBackward<T>& step) {
  step_cpu::run_step<Cell, T>(step);
}

}  // namespace lltm_ext

#define INSTANTIATE_RECURRENCE_STEP_CPU_FOR(Cell, T)                                           \
  template void lltm_ext::recurrence_step<lltm_ext::Cell, T>(const lltm_ext::StepForward<T>&); \
  template void lltm_ext::recurrence_step<lltm_ext::Cell, T>(const lltm_ext::StepBackward<T>&);
#define INSTANTIATE_RECURRENCE_STEP_CPU(Cell)          \
  INSTANTIATE_RECURRENCE_STEP_CPU_FOR(Cell, float)     \
  INSTANTIATE_RECURRENCE_STEP_CPU_FOR(Cell, double)    \
  INSTANTIATE_RECURRENCE_STEP_CPU_FOR(Cell, c10::Half) \
  INSTANTIATE_RECURRENCE_STEP_CPU_FOR(Cell, c10::BFloat16)
