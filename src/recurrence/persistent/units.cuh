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

// Values of a thread's pairs: 2 * i and 2 * i + 1 are those of its i-th one. `kRowThreads` threads of a block
// have the pairs of a row.
template <int kPairs_, int kRowThreads_, ExchangeThrough kThrough_>
struct Pack {
  static constexpr int kPairs = kPairs_, kRowThreads = kRowThreads_, kValues = 2 * kPairs;
  static constexpr ExchangeThrough kThrough = kThrough_;
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

#define LLTM_PACK template <int kPairs, int kRow, ExchangeThrough kThrough>
#define LLTM_PACK_TYPE Pack<kPairs, kRow, kThrough>
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

// What a warp has found of a row.
struct alignas(16) RowPart {
  float slots[kRowSlots];
  __device__ const uint4* vectors() const { return reinterpret_cast<const uint4*>(slots); }
};
// What all warps of a row have found, in a block's memory: [2, kRowTile, most parts of a row], behind a
// barrier for each of two calls that alternate. A block that has the values of a call has those of all
// others, which have read the call before. Through L2 only the lanes of a row use it, so calls need not take
// turns.
class RowParts {
 public:
  __device__ RowParts(char* memory, int most) : barriers_(reinterpret_cast<uint64_t*>(memory)), most_(most) {}
  __device__ RowPart* of_row(int turn, int row) const {
    return reinterpret_cast<RowPart*>(barriers_ + 2) + (turn * kRowTile + row) * most_;
  }
  __device__ uint64_t* barrier(int turn) const { return barriers_ + turn; }

 private:
  uint64_t* barriers_;
  int most_;
};
// A part of a row in memory through which the blocks of a grid exchange: a number and the call that it is of.
struct NumberedPart {
  Uint64Pair words[kRowSlots / 2];
};
static_assert(sizeof(NumberedPart) == kNumberedPartBytes);

// The units of a thread's rows. All warps that have pairs call a function together, since it waits for all.
// Each adds up the same parts in the same order.
template <int kPairs, int kRow, ExchangeThrough kThrough>
class RowOfUnits<LLTM_PACK_TYPE> {
  using P = LLTM_PACK_TYPE;
  static constexpr int kLanes = kRow < 32 ? kRow : 32, kWarps = kRow / kLanes;  // of a row
  static constexpr bool kCluster = kThrough == ExchangeThrough::kCluster,
                        kL2 = kThrough == ExchangeThrough::kL2, kHasParts = kCluster || kL2 || kWarps > 1;
  static_assert(!kL2 || kWarps == 1, "the lanes of a row pass on what they have read to each other");

 public:
  __device__ RowOfUnits() : parts_(nullptr, 0) {}
  // `through_l2`: memory for the group's blocks, of zeros. `row`: that of the first pair; `exists`: whether
  // the thread's units do.
  __device__ RowOfUnits(const RowParts& parts, void* through_l2, int hidden, int blocks, int block, int row,
                        bool exists)
      : parts_(parts),
        numbered_(static_cast<NumberedPart*>(through_l2)),
        hidden_(hidden),
        blocks_(blocks),
        row_(row),
        lane_(threadIdx.x % kLanes),
        part_(block * kWarps + threadIdx.x / kLanes % kWarps),
        exists_(exists) {
    if (!kCluster || threadIdx.x > 0) return;
    for (int turn = 0; turn < 2; ++turn) hopper::mbarrier_init(parts.barrier(turn), 1);
    hopper::fence_mbarrier_init();
  }

  // These replace values by their sums over all units, or by their variances.
  template <int kSums>
  __device__ void sums(P (&sums)[kSums]) const {
    add_up<0, kSums>(nullptr, nullptr, sums);
  }
  template <int kVariances>
  __device__ void moments(P (&variances)[kVariances], P (&means)[kVariances]) const {
    add_up<kVariances, 0>(variances, means, nullptr);
  }
  template <int kVariances, int kSums>
  __device__ void moments(P (&variances)[kVariances], P (&means)[kVariances], P (&sums)[kSums]) const {
    add_up<kVariances, kSums>(variances, means, sums);
  }
  __device__ P per_unit(P sum) const { return sum * P(share()); }
  __device__ P max(P x) const {
    const auto larger_of = [](float a, float b) { return maximum(a, b); };
    Found found;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      found[i].slots[0] =
          of_lanes(exists_ ? maximum(x.of[2 * i], x.of[2 * i + 1]) : -infinity<float>(), larger_of);
    }
    if constexpr (kHasParts) {
      exchanged<1>(found);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        found[i].slots[0] = of_parts(i, found[i].slots[0], [](int) { return true; }, larger_of);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) x.of[i] = found[i / 2].slots[0];
    return x;
  }
  // The sums of each unit and those before it, or after it.
  __device__ P cumsum(P x) const { return scanned<false>(x); }
  __device__ P cumsum_back(P x) const { return scanned<true>(x); }

 private:
  using Found = RowPart[kPairs];  // of the rows

  __device__ float share() const { return 1.f / static_cast<float>(hidden_); }  // of a unit in a mean
  __device__ int parts() const { return kWarps * blocks_; }
  __device__ int units_of(int part) const { return clamped(hidden_ - part * 2 * kLanes, 0, 2 * kLanes); }

  template <class F>
  __device__ __forceinline__ static float of_lanes(float x, F&& f) {
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) x = f(x, __shfl_xor_sync(~0u, x, d));
    return x;
  }
  __device__ __forceinline__ static float sum_of_lanes(float x) {
    return of_lanes(x, [](float a, float b) { return a + b; });
  }
  __device__ __forceinline__ float sum_of_units(float x) const { return sum_of_lanes(exists_ ? x : 0.f); }
  // f of slot 0 of the row's parts that are chosen(p).
  template <class Chosen, class F>
  __device__ __forceinline__ float of_parts(int i, float x, Chosen&& chosen, F&& f) const {
    for (int p = lane_; p < parts(); p += kLanes) {
      if (chosen(p)) x = f(x, of_row(i)[p].slots[0]);
    }
    return of_lanes(x, f);
  }

  template <int kVariances, int kSums>
  __device__ __forceinline__ void add_up(P* variances, P* means, P* sums) const {
    float found[kPairs][2 * kVariances + kSums];
    const bool has_units = units_of(part_) > 0;
    const float of_part = has_units ? 1.f / static_cast<float>(units_of(part_)) : 0.f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int v = 0; v < kVariances; ++v) {
        const float a = variances[v].of[2 * i], b = variances[v].of[2 * i + 1],
                    first = __shfl_sync(~0u, a, threadIdx.x % 32 - lane_);
        Distances<float> distances;
        distances.add(a - first);
        distances.add(b - first);
        distances.sum = sum_of_units(distances.sum);
        distances.squares = sum_of_units(distances.squares);
        found[i][2 * v] = has_units ? first + distances.sum * of_part : 0.f;
        found[i][2 * v + 1] = distances.from_mean(of_part);
      }
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
        found[i][2 * kVariances + s] = sum_of_units(sums[s].of[2 * i] + sums[s].of[2 * i + 1]);
      }
    }
    if constexpr (kHasParts) {
      for_slots<kVariances, kSums>([&](auto slots) { add_up_parts<decltype(slots)>(found); });
    }
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
#pragma unroll
      for (int v = 0; v < kVariances; ++v) {
        means[v].of[i] = found[i / 2][2 * v];
        variances[v].of[i] = found[i / 2][2 * v + 1] * share();
      }
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums[s].of[i] = found[i / 2][2 * kVariances + s];
    }
  }
  template <class Slots, int kFound>
  __device__ __forceinline__ void add_up_parts(float (&found)[kPairs][kFound]) const {
    Found sent = {};
#pragma unroll
    for (int i = 0; i < kPairs * Slots::kCount; ++i) {
      sent[i / Slots::kCount].slots[i % Slots::kCount] =
          found[i / Slots::kCount][Slots::kFirst + i % Slots::kCount];
    }
    exchanged<Slots::kCount>(sent);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const RowPart* const row = of_row(i);
      float totals[kRowSlots];
      add_parts<Slots>(
          lane_, kLanes, parts(), share(), [&](int p, int slot) { return row[p].slots[slot]; },
          [&](int p) { return units_of(p); }, [](float x) { return sum_of_lanes(x); }, totals);
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
      totals[i].slots[0] = __shfl_sync(~0u, sum, lane - lane_ + (kBack ? 0 : kLanes - 1));
      const float previous = __shfl_sync(~0u, sum, order < 1 ? lane : kBack ? lane + 1 : lane - 1);
      before[i] = order < 1 ? 0.f : previous;
    }
    if constexpr (kHasParts) {
      exchanged<1>(totals);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        before[i] += of_parts(
            i, 0, [&](int p) { return kBack ? p > part_ : p < part_; },
            [](float a, float b) { return a + b; });
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
  // The parts of the last call.
  __device__ const RowPart* of_row(int i) const {
    return parts_.of_row(kL2 ? 0 : calls_ & 1, row_of(row_, i));
  }

  // Passes on kCount numbers of what a warp of the row has found, and waits for the others.
  template <int kCount>
  __device__ __forceinline__ void exchanged(const Found& found) const {
    const int turn = ++calls_ & 1;
    if constexpr (kL2) {
      send_through_l2<kCount>(turn, found);
      receive_through_l2<kCount>(turn);
    } else if constexpr (kCluster) {
      send_to_cluster<kCount>(turn, found);
      for (int polls = 0; !hopper::mbarrier_try_wait(parts_.barrier(turn), (calls_ - 1) >> 1 & 1); ++polls) {
        if (polls == kMaxPolls) trap_on_timeout();
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (lane_ == 0) parts_.of_row(turn, row_of(row_, i))[part_] = found[i];
      }
      bar_sync<kRow>(1 + row_);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void send_to_cluster(int turn, const Found& found) const {
    constexpr int kVectors = (kCount + 3) / 4;
    uint64_t* const barrier = parts_.barrier(turn);
    if (threadIdx.x == 0) {
      hopper::mbarrier_arrive_expect_tx(barrier, kRowTile * parts() * kVectors * sizeof(uint4));
    }
    if (lane_ >= blocks_) return;  // a lane for each block
    const uint32_t there = hopper::mapa(barrier, lane_);
#pragma unroll
    for (int i = 0; i < kPairs * kVectors; ++i) {
      const RowPart* const to = parts_.of_row(turn, row_of(row_, i / kVectors)) + part_;
      hopper::st_async(hopper::mapa(to->vectors() + i % kVectors, lane_),
                       found[i / kVectors].vectors()[i % kVectors], there);
    }
  }

  // Each number is its own flag, since it comes with that of the call.
  __device__ NumberedPart* numbered(int turn, int i) const {
    return numbered_ + (turn * kRowTile + row_of(row_, i)) * blocks_;
  }
  template <int kCount>
  __device__ __forceinline__ void send_through_l2(int turn, const Found& found) const {
    const auto with_number = [&](float x) { return uint64_t{calls_} << 32 | __float_as_uint(x); };
    if (lane_ > 0) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int w = 0; 2 * w < kCount; ++w) {
        const Uint64Pair word = {with_number(found[i].slots[2 * w]), with_number(found[i].slots[2 * w + 1])};
        st_relaxed_gpu(&numbered(turn, i)[part_].words[w], word);
      }
    }
  }
  template <int kCount>
  __device__ __forceinline__ void receive_through_l2(int turn) const {
    constexpr int kWords = (kCount + 1) / 2, kAtOnce = kWords > 1 ? 2 : 4;  // parts whose loads are in flight
    __syncwarp();  // the lanes have read those of the last call
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      for (int first = lane_; first < blocks_; first += kAtOnce * kLanes) {
        Uint64Pair words[kAtOnce][kWords];
        for (int polls = 0;; ++polls) {
          bool complete = true;
#pragma unroll
          for (int n = 0; n < kAtOnce * kWords; ++n) {
            const int p = first + n / kWords * kLanes, w = n % kWords;
            if (p < blocks_) words[n / kWords][w] = ld_relaxed_gpu_u64_pair(&numbered(turn, i)[p].words[w]);
          }
#pragma unroll
          for (int n = 0; n < kAtOnce * kWords; ++n) {
            const Uint64Pair word = words[n / kWords][n % kWords];
            if (first + n / kWords * kLanes < blocks_)
              complete &= word.x >> 32 == calls_ && word.y >> 32 == calls_;
          }
          if (complete) break;
          if (polls == kMaxPolls) trap_on_timeout();
        }
#pragma unroll
        for (int n = 0; n < kAtOnce * kWords; ++n) {
          const int p = first + n / kWords * kLanes, w = n % kWords;
          if (p >= blocks_) continue;
          float* const to = parts_.of_row(0, row_of(row_, i))[p].slots + 2 * w;
          to[0] = __uint_as_float(static_cast<unsigned>(words[n / kWords][w].x));
          to[1] = __uint_as_float(static_cast<unsigned>(words[n / kWords][w].y));
        }
      }
    }
    __syncwarp();
  }

  RowParts parts_;
  NumberedPart* numbered_;
  int hidden_, blocks_, row_, lane_, part_;
  bool exists_;
  mutable unsigned calls_ = 0;
};
#undef LLTM_PACK
#undef LLTM_PACK_TYPE
#undef LLTM_EACH_VALUE

}  // namespace lltm_ext
