// Cells whose units read values over all units of their row, in a persistent kernel. The cell waits for other
// threads in the middle of its function, so a thread runs it once, for all of its pairs, on packs of values.
#pragma once

#include "common/hopper/ptx.cuh"
#include "common/math.h"
#include "common/ptx.cuh"
#include "recurrence/cell.h"
#include "recurrence/over_units.h"
#include "recurrence/persistent/exchange.cuh"
#include "recurrence/persistent/shape.h"

namespace lltm_ext {

// Values of a thread's pairs: 2 * i and 2 * i + 1 are those of its i-th one. `kRowThreads` threads of the
// block have the pairs of a row, and `kCluster` blocks share the rows.
template <int kPairs_, int kRowThreads_, bool kCluster_>
struct Pack {
  static constexpr int kPairs = kPairs_, kRowThreads = kRowThreads_, kValues = 2 * kPairs;
  static constexpr bool kCluster = kCluster_;
  float of[kValues];

  Pack() = default;
  template <typename X>
  __device__ Pack(X x) {
#pragma unroll
    for (float& value : of) value = static_cast<float>(x);
  }
};
template <int kValues>
struct Mask {
  bool of[kValues];
};

#define LLTM_PACK template <int kPairs, int kRow, bool kCluster>
#define LLTM_PACK_TYPE Pack<kPairs, kRow, kCluster>
#define LLTM_EACH_VALUE _Pragma("unroll") for (int i = 0; i < 2 * kPairs; ++i)

#define LLTM_PACK_BINARY(name, Result, value)                                            \
  LLTM_PACK __device__ __forceinline__ Result name(LLTM_PACK_TYPE x, LLTM_PACK_TYPE y) { \
    Result found;                                                                        \
    LLTM_EACH_VALUE {                                                                    \
      const float a = x.of[i], b = y.of[i];                                              \
      found.of[i] = value;                                                               \
    }                                                                                    \
    return found;                                                                        \
  }
LLTM_PACK_BINARY(operator+, LLTM_PACK_TYPE, a + b)
LLTM_PACK_BINARY(operator-, LLTM_PACK_TYPE, a - b)
LLTM_PACK_BINARY(operator*, LLTM_PACK_TYPE, a* b)
LLTM_PACK_BINARY(operator/, LLTM_PACK_TYPE, a / b)
LLTM_PACK_BINARY(maximum, LLTM_PACK_TYPE, maximum(a, b))
LLTM_PACK_BINARY(minimum, LLTM_PACK_TYPE, minimum(a, b))
LLTM_PACK_BINARY(operator<, Mask<2 * kPairs>, a < b)
LLTM_PACK_BINARY(operator<=, Mask<2 * kPairs>, a <= b)
LLTM_PACK_BINARY(operator>, Mask<2 * kPairs>, a > b)
LLTM_PACK_BINARY(operator>=, Mask<2 * kPairs>, a >= b)
LLTM_PACK_BINARY(operator==, Mask<2 * kPairs>, a == b)
LLTM_PACK_BINARY(operator!=, Mask<2 * kPairs>, a != b)
#undef LLTM_PACK_BINARY

#define LLTM_PACK_UNARY(name, value)                                           \
  LLTM_PACK __device__ __forceinline__ LLTM_PACK_TYPE name(LLTM_PACK_TYPE x) { \
    LLTM_EACH_VALUE {                                                          \
      const float a = x.of[i];                                                 \
      x.of[i] = value;                                                         \
    }                                                                          \
    return x;                                                                  \
  }
LLTM_PACK_UNARY(operator-, -a)
LLTM_PACK_UNARY(relu, relu(a))
LLTM_PACK_UNARY(folded, folded(a))
LLTM_PACK_UNARY(unfolded, unfolded(a))
#undef LLTM_PACK_UNARY

#define LLTM_MASK_BINARY(name, value)                                               \
  template <int kValues>                                                            \
  __device__ __forceinline__ Mask<kValues> name(Mask<kValues> x, Mask<kValues> y) { \
    Mask<kValues> found;                                                            \
    _Pragma("unroll") for (int i = 0; i < kValues; ++i) {                           \
      const bool a = x.of[i], b = y.of[i];                                          \
      found.of[i] = value;                                                          \
    }                                                                               \
    return found;                                                                   \
  }
LLTM_MASK_BINARY(operator&&, a&& b)
LLTM_MASK_BINARY(operator||, a || b)
LLTM_MASK_BINARY(operator==, a == b)
LLTM_MASK_BINARY(operator!=, a != b)
#undef LLTM_MASK_BINARY
template <int kValues>
__device__ __forceinline__ Mask<kValues> operator!(Mask<kValues> x) {
#pragma unroll
  for (bool& value : x.of) value = !value;
  return x;
}

LLTM_PACK __device__ __forceinline__ LLTM_PACK_TYPE choose(Mask<2 * kPairs> condition, LLTM_PACK_TYPE a,
                                                           LLTM_PACK_TYPE b) {
  LLTM_EACH_VALUE a.of[i] = condition.of[i] ? a.of[i] : b.of[i];
  return a;
}
template <int kValues>
__device__ __forceinline__ Mask<kValues> choose(Mask<kValues> condition, Mask<kValues> a, Mask<kValues> b) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) a.of[i] = condition.of[i] ? a.of[i] : b.of[i];
  return a;
}
template <int kValues>
__device__ __forceinline__ Mask<kValues> choose(Mask<kValues> condition, bool a, Mask<kValues> b) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) b.of[i] = condition.of[i] ? a : b.of[i];
  return b;
}
template <int kValues>
__device__ __forceinline__ Mask<kValues> choose(Mask<kValues> condition, Mask<kValues> a, bool b) {
  return choose(!condition, b, a);
}
LLTM_PACK __device__ __forceinline__ Mask<2 * kPairs> has_bit(LLTM_PACK_TYPE saved, int bit) {
  Mask<2 * kPairs> found;
  LLTM_EACH_VALUE found.of[i] = has_bit(saved.of[i], bit);
  return found;
}

// The functions of a cell, on each value of a pack.
template <class Math>
struct PackMath {
#define LLTM_PACK_FUNCTION(name)                                                      \
  LLTM_PACK __device__ __forceinline__ static LLTM_PACK_TYPE name(LLTM_PACK_TYPE x) { \
    LLTM_EACH_VALUE x.of[i] = Math::name(x.of[i]);                                    \
    return x;                                                                         \
  }
  LLTM_PACK_FUNCTION(sigmoid)
  LLTM_PACK_FUNCTION(tanh)
  LLTM_PACK_FUNCTION(elu)
  LLTM_PACK_FUNCTION(gelu)
  LLTM_PACK_FUNCTION(gelu_derivative)
  LLTM_PACK_FUNCTION(gelu_tanh)
  LLTM_PACK_FUNCTION(silu)
  LLTM_PACK_FUNCTION(softplus)
  LLTM_PACK_FUNCTION(exp)
  LLTM_PACK_FUNCTION(expm1)
  LLTM_PACK_FUNCTION(log)
  LLTM_PACK_FUNCTION(log1p)
  LLTM_PACK_FUNCTION(sqrt)
  LLTM_PACK_FUNCTION(rsqrt)
  LLTM_PACK_FUNCTION(sin)
  LLTM_PACK_FUNCTION(cos)
  LLTM_PACK_FUNCTION(sinh)
  LLTM_PACK_FUNCTION(cosh)
  LLTM_PACK_FUNCTION(atan)
  LLTM_PACK_FUNCTION(erf)
  LLTM_PACK_FUNCTION(floor)
  LLTM_PACK_FUNCTION(round)
  LLTM_PACK_FUNCTION(abs)
  LLTM_PACK_FUNCTION(folded_tanh)
  LLTM_PACK_FUNCTION(unfolded_tanh)
  LLTM_PACK_FUNCTION(high_part)
  LLTM_PACK_FUNCTION(low_part)
#undef LLTM_PACK_FUNCTION
#define LLTM_PACK_FUNCTION(name)                                                                        \
  LLTM_PACK __device__ __forceinline__ static LLTM_PACK_TYPE name(LLTM_PACK_TYPE x, LLTM_PACK_TYPE y) { \
    LLTM_EACH_VALUE x.of[i] = Math::name(x.of[i], y.of[i]);                                             \
    return x;                                                                                           \
  }
  LLTM_PACK_FUNCTION(fmod)
  LLTM_PACK_FUNCTION(logaddexp)
  LLTM_PACK_FUNCTION(pow)
  LLTM_PACK_FUNCTION(divide)
  LLTM_PACK_FUNCTION(of_parts)
#undef LLTM_PACK_FUNCTION
};

// What the warps of a row have found, of two calls that alternate: a block that has the values of a call has
// those of all others, which have read the call before.
struct RowParts {
  static constexpr int kMost = 2 * kMostRowBlocks;  // of a row: two warps of each block
  union Part {
    float slots[kRowSlots];
    uint4 all;
  };
  Part of[2][kRowTile][kMost];
  uint64_t barriers[2];
};
static_assert(sizeof(RowParts) <= 4 * kRowPartsFloats);

// The units of a thread's rows. All warps that have pairs call a function together, since it waits for all.
// Each adds up the same parts in the same order.
template <int kPairs, int kRow, bool kCluster>
class RowOfUnits<LLTM_PACK_TYPE> {
  using P = LLTM_PACK_TYPE;
  static constexpr int kLanes = kRow < 32 ? kRow : 32, kWarps = kRow / kLanes;  // of a row
  static constexpr bool kHasParts = kCluster || kWarps > 1;

 public:
  RowOfUnits() = default;
  // `row`: that of the first pair; `exists`: whether the thread's units do.
  __device__ RowOfUnits(RowParts& parts, int hidden, int blocks, int block, int row, bool exists)
      : parts_(&parts),
        hidden_(hidden),
        blocks_(blocks),
        row_(row),
        lane_(threadIdx.x % kLanes),
        part_(block * kWarps + threadIdx.x / kLanes % kWarps),
        exists_(exists) {
    if (!kCluster || threadIdx.x > 0) return;
    for (uint64_t& barrier : parts.barriers) {
      hopper::mbarrier_init(&barrier, 1);
      hopper::mbarrier_arrive_expect_tx(&barrier, bytes());
    }
    hopper::fence_mbarrier_init();
  }

  // These replace values by what all units have of them.
  template <int kSums>
  __device__ void sums(P (&sums)[kSums]) const {
    add_up<0, kSums>(nullptr, sums);
  }
  template <int kVariances>
  __device__ void moments(P (&variances)[kVariances]) const {
    add_up<kVariances, 0>(variances, nullptr);
  }
  template <int kVariances, int kSums>
  __device__ void moments(P (&variances)[kVariances], P (&sums)[kSums]) const {
    add_up<kVariances, kSums>(variances, sums);
  }
  __device__ P per_unit(P sum) const { return sum * P(1.f / static_cast<float>(hidden_)); }
  __device__ P max(P x) const {
    Found found;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      found[i][0] = of_warp(maximum(x.of[2 * i], x.of[2 * i + 1]), -infinity<float>(),
                            [](float a, float b) { return maximum(a, b); });
    }
    if constexpr (kHasParts) {
      const RowParts& all = exchanged(found);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        for (int p = 0; p < parts(); ++p) found[i][0] = maximum(found[i][0], of_row(all, i)[p].slots[0]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) x.of[i] = found[i / 2][0];
    return x;
  }
  // The sums of each unit and those before it, or after it.
  __device__ P cumsum(P x) const { return scanned<false>(x); }
  __device__ P cumsum_back(P x) const { return scanned<true>(x); }

 private:
  using Found = float[kPairs][kRowSlots];  // of the rows

  __device__ int parts() const { return kWarps * blocks_; }
  __device__ uint32_t bytes() const { return kRowTile * parts() * sizeof(RowParts::Part); }
  __device__ int units_of(int part) const { return min(2 * kLanes, hidden_ - part * 2 * kLanes); }

  template <class F>
  __device__ __forceinline__ float of_warp(float x, float neutral, F&& f) const {
    if (!exists_) x = neutral;
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) x = f(x, __shfl_xor_sync(~0u, x, d));
    return x;
  }
  __device__ __forceinline__ float sum_of_warp(float x) const {
    return of_warp(x, 0, [](float a, float b) { return a + b; });
  }

  template <int kVariances, int kSums>
  __device__ __forceinline__ void add_up(P* variances, P* sums) const {
    float found[kPairs][2 * kVariances + kSums];
    const float own = 1.f / static_cast<float>(larger(units_of(part_), 1)),
                all = 1.f / static_cast<float>(hidden_);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int v = 0; v < kVariances; ++v) {
        const float a = variances[v].of[2 * i], b = variances[v].of[2 * i + 1], sum = sum_of_warp(a + b),
                    mean = sum * own;
        found[i][2 * v] = sum;
        found[i][2 * v + 1] = sum_of_warp((a - mean) * (a - mean) + (b - mean) * (b - mean));
      }
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
        found[i][2 * kVariances + s] = sum_of_warp(sums[s].of[2 * i] + sums[s].of[2 * i + 1]);
      }
    }
    if constexpr (kHasParts) {
      for_slots<kVariances, kSums>([&](auto slots) { add_up_parts<decltype(slots)>(found); });
    }
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
#pragma unroll
      for (int v = 0; v < kVariances; ++v) variances[v].of[i] = found[i / 2][2 * v + 1] * all;
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums[s].of[i] = found[i / 2][2 * kVariances + s];
    }
  }
  template <class Slots, int kFound>
  __device__ __forceinline__ void add_up_parts(float (&found)[kPairs][kFound]) const {
    Found sent = {};
#pragma unroll
    for (int i = 0; i < kPairs * Slots::kCount; ++i) {
      sent[i / Slots::kCount][i % Slots::kCount] =
          found[i / Slots::kCount][Slots::kFirst + i % Slots::kCount];
    }
    const RowParts& all = exchanged(sent);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const RowParts::Part* const row = of_row(all, i);
      float totals[kRowSlots];
      add_parts<Slots>(
          parts(), hidden_, [&](int p, int slot) { return row[p].slots[slot]; },
          [&](int p) { return units_of(p); }, totals);
#pragma unroll
      for (int slot = 0; slot < Slots::kCount; ++slot) found[i][Slots::kFirst + slot] = totals[slot];
    }
  }

  template <bool kBack>
  __device__ __forceinline__ P scanned(const P& x) const {
    float before[kPairs];  // of the row's pairs before this one, or after it
    Found totals;          // of the warp's
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float sum = exists_ ? x.of[2 * i] + x.of[2 * i + 1] : 0.f;
      const int order = kBack ? kLanes - 1 - lane_ : lane_, lane = threadIdx.x % 32;
#pragma unroll
      for (int d = 1; d < kLanes; d *= 2) {
        const float other = __shfl_sync(~0u, sum, order < d ? lane : kBack ? lane + d : lane - d);
        if (order >= d) sum += other;
      }
      totals[i][0] = __shfl_sync(~0u, sum, lane - lane_ + (kBack ? 0 : kLanes - 1));
      const float previous = __shfl_sync(~0u, sum, order < 1 ? lane : kBack ? lane + 1 : lane - 1);
      before[i] = order < 1 ? 0.f : previous;
    }
    if constexpr (kHasParts) {
      const RowParts& all = exchanged(totals);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float sum = 0;
        for (int p = 0; p < parts(); ++p) {
          if (kBack ? p > part_ : p < part_) sum += of_row(all, i)[p].slots[0];
        }
        before[i] += sum;
      }
    }
    P result;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float first = x.of[2 * i + kBack], second = x.of[2 * i + !kBack];
      result.of[2 * i + kBack] = before[i] + first;
      result.of[2 * i + !kBack] = before[i] + first + second;
    }
    return result;
  }

  __device__ static int row_of(int row, int i) { return row + i * (kBlockThreads / kRow); }
  __device__ const RowParts::Part* of_row(const RowParts& all, int i) const {
    return all.of[turn_ ^ 1][row_of(row_, i)];
  }

  // Passes on what a warp of the row has found, and waits for the others.
  __device__ __forceinline__ const RowParts& exchanged(const Found& found) const {
    RowParts::Part(&to)[kRowTile][RowParts::kMost] = parts_->of[turn_];
    RowParts::Part sent[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs * kRowSlots; ++i) {
      sent[i / kRowSlots].slots[i % kRowSlots] = found[i / kRowSlots][i % kRowSlots];
    }
    if constexpr (kCluster) {
      uint64_t* const barrier = &parts_->barriers[turn_];
      if (lane_ < blocks_) {  // a lane for each block
        const uint32_t there = hopper::mapa(barrier, lane_);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          hopper::st_async(hopper::mapa(&to[row_of(row_, i)][part_], lane_), sent[i].all, there);
        }
      }
      for (int polls = 0; !hopper::mbarrier_try_wait(barrier, phase_); ++polls) {
        if (polls == kMaxPolls) trap_on_timeout();
      }
      if (threadIdx.x == 0) hopper::mbarrier_arrive_expect_tx(barrier, bytes());
      phase_ ^= turn_;
    } else {
      if (lane_ == 0) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) to[row_of(row_, i)][part_] = sent[i];
      }
      bar_sync<kRow>(1 + row_);
    }
    turn_ ^= 1;
    return *parts_;
  }

  RowParts* parts_;
  int hidden_, blocks_, row_, lane_, part_;
  bool exists_;
  mutable int turn_ = 0;
  mutable uint32_t phase_ = 0;
};
#undef LLTM_PACK
#undef LLTM_PACK_TYPE
#undef LLTM_EACH_VALUE

}  // namespace lltm_ext
