// The units of a step on the CPU: distributed over threads, and computed in loops that the compiler
// vectorises for the CPU that runs them.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#include "recurrence/stepwise/vector_math.h"

namespace lltm_ext {
namespace step_cpu {

// Precedes a loop whose pointers are equal or point to different tensors.
#ifdef __clang__
#define LLTM_STEP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define LLTM_STEP_INDEPENDENT _Pragma("GCC ivdep")
#endif

// Units of one row that are computed together, in buffers on the stack if T is not its accumulator type.
constexpr int kBlock = 256;

// A pointer to n values for a loop to read: `from` itself, or the buffer with the widened values.
template <typename T, typename A>
const A* source(const T* from, A* buffer, int n) {
  if constexpr (std::is_same_v<T, A>) return from;
  for (int i = 0; i < n; ++i) buffer[i] = load(from[i]);
  return buffer;
}

// Like source(), for values `stride` apart.
template <typename T, typename A>
const A* strided_source(const T* from, int64_t stride, A* buffer, int n) {
  if (stride == 1) return source(from, buffer, n);
  for (int i = 0; i < n; ++i) buffer[i] = load(from[i * stride]);
  return buffer;
}

// A pointer for a loop to write to: `to` itself, or the buffer, which store() then copies to it.
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

// Calls block(row, unit, n) for units [begin, end) of all B * H, n of one row at a time, at most `most`.
template <class Block>
__attribute__((flatten)) void run_units(const Block& block, int64_t hidden, int64_t begin, int64_t end,
                                        int64_t most) {
  for (int64_t i = begin; i < end;) {
    const int64_t row = i / hidden, unit = i % hidden;
    const int n = static_cast<int>(std::min({end - i, hidden - unit, most}));
    block(row, unit, n);
    i += n;
  }
}

// Versions of run_units for several instruction sets, chosen at run time. target_clones needs ifunc and does
// not clone called functions, so `flatten` inlines them.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LLTM_STEP_TARGET(isa) __attribute__((flatten, target(isa)))

template <class Block>
LLTM_STEP_TARGET("avx2,fma")
void run_units_avx2(const Block& block, int64_t hidden, int64_t begin, int64_t end, int64_t most) {
  run_units(block, hidden, begin, end, most);
}

template <class Block>
LLTM_STEP_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
void run_units_avx512(const Block& block, int64_t hidden, int64_t begin, int64_t end, int64_t most) {
  run_units(block, hidden, begin, end, most);
}

template <class Block>
auto run_units_of_this_cpu() {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? run_units_avx512<Block> : avx2 ? run_units_avx2<Block> : run_units<Block>;
}
#else
template <class Block>
auto run_units_of_this_cpu() {
  return run_units<Block>;
}
#endif

template <typename T>
constexpr int64_t kGrain = std::is_same_v<T, double> ? 512 : 2048;  // units, about 10 us

// Calls block(row, unit, n) for all B * H units of a step of type T.
template <typename T, class Block>
void for_each_block(int64_t batch, int64_t hidden, const Block& block) {
  static const auto units = run_units_of_this_cpu<Block>();
  at::parallel_for(0, batch * hidden, kGrain<T>,
                   [&](int64_t begin, int64_t end) { units(block, hidden, begin, end, kBlock); });
}
// Likewise, for whole rows.
template <typename T, class Block>
void for_each_row(int64_t batch, int64_t hidden, const Block& block) {
  static const auto units = run_units_of_this_cpu<Block>();
  if (hidden == 0) return;
  at::parallel_for(0, batch, std::max<int64_t>(kGrain<T> / hidden, 1), [&](int64_t begin, int64_t end) {
    units(block, hidden, begin * hidden, end * hidden, hidden);
  });
}

}  // namespace step_cpu
}  // namespace lltm_ext
