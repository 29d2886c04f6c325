// What the cells' warpgroup of a large layer's kernel has in both directions: where a thread's rows and units
// are, the copies of what it reads, and what it carries from step to step.
#pragma once

#include "recurrence/large/block.cuh"

namespace lltm_ext {
namespace hopper {

// Adjacent units of a row, which a thread loads and stores at once.
template <typename T, int kUnits>
struct alignas(kUnits * sizeof(T)) UnitVector {
  Pair<T> pairs[kUnits / 2];
  __device__ __forceinline__ float operator[](int unit) const {
    const float2 x = pairs[unit / 2].widen();
    return unit % 2 == 0 ? x.x : x.y;
  }
};

// Adjacent units of a row in shared memory, of a thread.
template <typename T, int kUnits>
__device__ __forceinline__ UnitVector<T, kUnits>& of_thread(unsigned char* base, int vector) {
  return reinterpret_cast<UnitVector<T, kUnits>*>(base)[vector * 128 + threadIdx.x % 128];
}

// A thread has two adjacent rows of some adjacent units, in every round.
template <class Config, class Arguments>
class LargeUnits {
 protected:
  using T = typename Config::T;
  using Cell = typename Config::Cell;
  static constexpr LargeShape kShape = Config::kShape;
  static constexpr int kGates = Config::kGates, kStates = Cell::kStates, kSaved = Cell::kSaved,
                       kSavedInGates = kShape.cell.saved_in_gates(), kExtra = kShape.cell.extra(),
                       kLive = kShape.cell.live_states(), kOutputs = kOutputsOf<Cell>;
  static constexpr int kStatesOrOne = at_least_one(kStates), kSavedOrOne = at_least_one(kSaved);
  static constexpr int kRounds = Config::kRounds, kAhead = Config::kTile.rounds_ahead,
                       kUnits = kShape.units_of_thread(), kValues = kShape.values_of_thread();
  static constexpr bool kInRegisters = kShape.live_in_registers();
  using Vector = UnitVector<T, kUnits>;
  using Live = float[at_least_one(kLive)][kValues];  // of the states and, if the cell reads it, h; by rows

  __device__ LargeUnits(const Arguments& args, const LargeStorage<Config>& storage)
      : args_(args), storage_(storage), lane_(threadIdx.x % 32) {}
  // The thread's first row, of the batch, and unit.
  __device__ __forceinline__ void set_place(int row, int unit) {
    row_ = row, unit_ = unit, has_units_ = unit < args_.hidden;
  }

  // In [N, ...]. Every step has the whole batch.
  __device__ __forceinline__ int64_t first_row(int step) const {
    const StepOrder& steps = args_.steps;
    return static_cast<int64_t>(steps.reverse ? steps.length - 1 - step : step) * steps.batch;
  }
  __device__ __forceinline__ int row(int round, int i) const { return row_ + round * Config::kRows + i; }
  __device__ __forceinline__ bool exists(int round, int i) const {
    return has_units_ && row(round, i) < args_.steps.batch;
  }
  // The thread's units in the first plane of a row of [rows, planes, H]. Other planes and the row after it
  // are a few times H from there: a 64-bit product for each would be most of a round's instructions.
  template <typename E>
  __device__ __forceinline__ E* at(E* base, int64_t row, int planes = 1) const {
    return base + row * (planes * args_.hidden) + unit_;
  }
  __device__ __forceinline__ int64_t state_at(int state, int round, int i) const {
    return (int64_t{state} * args_.steps.batch + row(round, i)) * args_.hidden + unit_;
  }

  // ---- what the cell reads

  __device__ __forceinline__ void load_parameters() {
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p)
      if (has_units_) parameters_[p] = *reinterpret_cast<const Vector*>(at(args_.parameters, p));
  }
  // Each thread copies its own inputs to shared memory, some rounds ahead. Registers would not do: a wait for
  // one round's loads is a wait for all.
  __device__ __forceinline__ unsigned char* inputs_of(int round) const {
    return storage_.inputs() + round % kAhead * kShape.input_bytes();
  }
  template <typename V, typename E>
  __device__ __forceinline__ static void copy(V& to, const E* from, bool inside) {
    cp_async<sizeof(V)>(&to, from, inside ? sizeof(V) : 0);
  }
  __device__ __forceinline__ void load_lost(float (&lost)[2], int step, int round) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      lost[i] = exists(round, i) ? args_.resets().share(first_row(step) + row(round, i)) : 0;
    }
  }

  // ---- what units carry

  __device__ __forceinline__ float4* live_at(int round) const {
    constexpr int kOfRound = kLive * kValues / 4;
    return reinterpret_cast<float4*>(storage_.live()) + round * kOfRound * 128 + threadIdx.x % 128;
  }
  __device__ __forceinline__ void take_live(Live& live, int round) const {
#pragma unroll
    for (int i = 0; i < kLive * kValues && !kInRegisters; i += 4) {
      const float4 x = live_at(round)[i / 4 * 128];
      float* const to = &live[i / kValues][i % kValues];
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
  }
  __device__ __forceinline__ void keep_live(const Live& live, int round) const {
#pragma unroll
    for (int i = 0; i < kLive * kValues && !kInRegisters; i += 4) {
      const float* const x = &live[i / kValues][i % kValues];
      live_at(round)[i / 4 * 128] = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
  // What is left of x, which a row loses a share of.
  __device__ __forceinline__ static float keep(float x, float lost) {
    if constexpr (Config::kHasResets) return scale_by_mask(mask_of(lost), x);
    return x;
  }

  // ---- what the cell writes

  __device__ __forceinline__ static void write(T* to, const Vector& x) { *reinterpret_cast<Vector*>(to) = x; }
  // Once a round's results for other blocks are stored, which read them by TMA. Another warp
  // releases them.
  __device__ __forceinline__ void tell(int round) const {
    fence_proxy_async_global();
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(storage_.stored(round));
  }

  const Arguments& args_;
  const LargeStorage<Config>& storage_;
  const int lane_;
  int row_, unit_;
  bool has_units_;
  uint32_t partials_parity_ = 0;
  Vector parameters_[at_least_one(Cell::kParameters)] = {};
};

}  // namespace hopper
}  // namespace lltm_ext
