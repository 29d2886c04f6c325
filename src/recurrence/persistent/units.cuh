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
  float of[2][kRowTile][kMost];
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

  __device__ P sum(P x) const {
    return combined(x, 0, [](float a, float b) { return a + b; });
  }
  __device__ P mean(P x) const { return sum(x) * P(1.f / static_cast<float>(hidden_)); }
  __device__ P max(P x) const {
    return combined(x, -infinity<float>(), [](float a, float b) { return maximum(a, b); });
  }
  // The sums of each unit and those before it, or after it.
  __device__ P cumsum(P x) const { return scanned<false>(x); }
  __device__ P cumsum_back(P x) const { return scanned<true>(x); }

 private:
  __device__ uint32_t bytes() const { return kRowTile * kWarps * blocks_ * sizeof(float); }

  template <class F>
  __device__ __forceinline__ P combined(const P& x, float neutral, F&& f) const {
    float found[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      found[i] = exists_ ? f(x.of[2 * i], x.of[2 * i + 1]) : neutral;
#pragma unroll
      for (int d = kLanes / 2; d > 0; d /= 2) found[i] = f(found[i], __shfl_xor_sync(~0u, found[i], d));
    }
    if constexpr (kHasParts) {
      const RowParts& all = exchanged(found);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float* const parts = of_row(all, i);
        found[i] = parts[0];
        for (int p = 1; p < kWarps * blocks_; ++p) found[i] = f(found[i], parts[p]);
      }
    }
    P result;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) result.of[i] = found[i / 2];
    return result;
  }

  template <bool kBack>
  __device__ __forceinline__ P scanned(const P& x) const {
    float before[kPairs], totals[kPairs];  // of the row's pairs before this one, or after it; of the warp's
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float sum = exists_ ? x.of[2 * i] + x.of[2 * i + 1] : 0.f;
      const int order = kBack ? kLanes - 1 - lane_ : lane_, lane = threadIdx.x % 32;
#pragma unroll
      for (int d = 1; d < kLanes; d *= 2) {
        const float other = __shfl_sync(~0u, sum, order < d ? lane : kBack ? lane + d : lane - d);
        if (order >= d) sum += other;
      }
      totals[i] = __shfl_sync(~0u, sum, lane - lane_ + (kBack ? 0 : kLanes - 1));
      const float previous = __shfl_sync(~0u, sum, order < 1 ? lane : kBack ? lane + 1 : lane - 1);
      before[i] = order < 1 ? 0.f : previous;
    }
    if constexpr (kHasParts) {
      const RowParts& all = exchanged(totals);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float* const parts = of_row(all, i);
        float sum = 0;
        for (int p = 0; p < kWarps * blocks_; ++p) {
          if (kBack ? p > part_ : p < part_) sum += parts[p];
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
  __device__ const float* of_row(const RowParts& all, int i) const {
    return all.of[turn_ ^ 1][row_of(row_, i)];
  }

  // Passes on what a warp of the row has found, and waits for the others.
  __device__ __forceinline__ const RowParts& exchanged(const float (&found)[kPairs]) const {
    float (&to)[kRowTile][RowParts::kMost] = parts_->of[turn_];
    if constexpr (kCluster) {
      uint64_t* const barrier = &parts_->barriers[turn_];
      if (lane_ < blocks_) {  // a lane for each block
        const uint32_t there = hopper::mapa(barrier, lane_);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          hopper::st_async(hopper::mapa(&to[row_of(row_, i)][part_], lane_), found[i], there);
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
        for (int i = 0; i < kPairs; ++i) to[row_of(row_, i)][part_] = found[i];
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
