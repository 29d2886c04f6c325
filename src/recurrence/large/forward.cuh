// The whole sequence of a large layer forward, for half types on Hopper: a persistent kernel whose blocks
// keep all of the recurrent weight on the chip and exchange h through L2. docs/design/recurrence.md has the
// counts.
//
// From the product of a tile of rows to its next step it is a long way: the halves of the sums meet in the
// block that computes the cell, h is stored, the blocks of the group are told, and load it by TMA. Meanwhile
// the tensor cores multiply the group's other tiles.
#pragma once

#include "recurrence/large/loads.cuh"
#include "recurrence/large/products.cuh"

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

// The warpgroup that computes the cell. A thread has two adjacent rows of some adjacent units, in every
// round, and keeps what these carry from step to step.
template <class Config>
class LargeCells {
  using T = typename Config::T;
  using Cell = typename Config::Cell;
  using Projection = projection_t<Cell, T>;
  using Arguments = SequenceForwardArguments<T>;
  static constexpr LargeShape kShape = Config::kShape;
  static constexpr int kGates = Config::kGates, kStates = Cell::kStates, kSaved = Cell::kSaved,
                       kSavedInGates = kShape.cell.saved_in_gates(), kExtra = kShape.cell.extra(),
                       kLive = kShape.cell.live_states(), kOutputs = kOutputsOf<Cell>;
  static constexpr int kStatesOrOne = at_least_one(kStates), kSavedOrOne = at_least_one(kSaved);
  static constexpr int kRounds = Config::kRounds, kAhead = Config::kTile.rounds_ahead,
                       kUnits = kShape.units_of_thread(), kValues = kShape.values_of_thread();
  static constexpr bool kInRegisters = kShape.live_in_registers(),
                        kOutputApart = kShape.cell.has_output_apart();
  using Vector = UnitVector<T, kUnits>;

 public:
  __device__ LargeCells(const Arguments& args, const LargeStorage<Config>& storage, const LargePlace& place,
                        const LargeArrivals<Config>& arrivals)
      : args_(args), storage_(storage), rank_(place.rank), lane_(threadIdx.x % 32) {
    const int warp = uniform_warp() % 4;
    const bool wide = kUnits == 4;
    product_warp_ = wide ? lane_ % 4 : lane_ / 2 % 4;
    quad_ = wide ? lane_ / 4 % 4 : lane_ / 8;
    eight_rows_ = wide ? 2 * warp + lane_ / 16 : warp;
    first_of_four_ = wide ? 0 : lane_ % 2 * 2;
    row_ = place.group * kRounds * Config::kRows + 8 * eight_rows_ + 2 * quad_;
    unit_ = place.first_unit(rank_) + 4 * product_warp_ + first_of_four_;
    has_units_ = unit_ < args.hidden;
    slots_ = shared_address(storage.partials(0)) + eight_rows_ * kEightRowsBytes +
             (product_warp_ * kWarpSlots + partial_slot(product_warp_, 0, quad_)) * kSlotBytes;
    arrive_at_ = arrivals.of(0, unit_);
    to_next_round_ = static_cast<int>(arrivals.of(1, unit_) - arrive_at_);
  }

  __device__ __forceinline__ void run() {
    load_parameters();
    load_initial();
    for (int i = 0; i < kAhead; ++i) load(0, i);
    constexpr int kUnrolled = kInRegisters ? kRounds : 1;  // registers have no variable numbers
    for (int step = 0; step < args_.steps.length; ++step) {
#pragma unroll kUnrolled
      for (int round = 0; round < kRounds; ++round) {
        run_round(step, round, live_[kInRegisters ? round : 0]);
        load_next(step, round);
      }
    }
  }

 private:
  using Live = float[at_least_one(kLive)][kValues];  // the states and, if the cell reads it, h; by rows

  using Projections = UnitVector<Projection, kUnits>;

  // What a round reads besides the sums.
  struct Inputs {
    Projections projections[2][kGates];
    Vector steps[2][at_least_one(Cell::kStepInputs)];
    float lost[2];
  };
  struct Results {
    Vector h[2], saved[2][kSavedOrOne], outputs[2][kOutputs];
  };

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

  // ---- what the cell reads

  __device__ __forceinline__ void load_parameters() {
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p)
      if (has_units_) parameters_[p] = *reinterpret_cast<const Vector*>(at(args_.parameters, p));
  }
  // Each thread copies its own inputs to shared memory, some rounds ahead. Registers would not do: a wait for
  // one round's loads is a wait for all.
  __device__ __forceinline__ Projections& projections(int round, int i, int gate) const {
    return of_thread<Projection, kUnits>(inputs_of(round), i * kGates + gate);
  }
  __device__ __forceinline__ Vector& step_inputs(int round, int i, int k) const {
    unsigned char* const base = inputs_of(round) + kShape.projection_bytes();
    return of_thread<T, kUnits>(base, i * Cell::kStepInputs + k);
  }
  __device__ __forceinline__ unsigned char* inputs_of(int round) const {
    return storage_.inputs() + round % kAhead * kShape.input_bytes();
  }
  __device__ __forceinline__ void load(int step, int round) const {
    const int64_t from = first_row(step) + row(round, 0);
    const auto* const x = at(args_.template projections<Cell>(), from, kGates);
    const T* const inputs = at(args_.step_inputs, from, Cell::kStepInputs);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = exists(round, i);
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        copy(projections(round, i, g), x + (i * kGates + g) * args_.hidden, inside);
      }
#pragma unroll
      for (int k = 0; k < Cell::kStepInputs; ++k) {
        copy(step_inputs(round, i, k), inputs + (i * Cell::kStepInputs + k) * args_.hidden, inside);
      }
    }
    cp_async_commit_group();
  }
  template <typename V, typename E>
  __device__ __forceinline__ static void copy(V& to, const E* from, bool inside) {
    cp_async<sizeof(V)>(&to, from, inside ? sizeof(V) : 0);
  }
  // Those that take the place of what a round has read.
  __device__ __forceinline__ void load_next(int step, int round) const {
    const bool same_step = round + kAhead < kRounds;
    if (same_step || step + 1 < args_.steps.length) {
      load(same_step ? step : step + 1, same_step ? round + kAhead : round + kAhead - kRounds);
    } else {
      cp_async_commit_group();  // waits count groups
    }
  }
  __device__ __forceinline__ void read(Inputs& to, int round) const {
    cp_async_wait_group<kAhead - 1>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int g = 0; g < kGates; ++g) to.projections[i][g] = projections(round, i, g);
#pragma unroll
      for (int k = 0; k < Cell::kStepInputs; ++k) to.steps[i][k] = step_inputs(round, i, k);
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
  __device__ __forceinline__ void load_lost(float (&lost)[2], int step, int round) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      lost[i] = exists(round, i) ? args_.resets().share(first_row(step) + row(round, i)) : 0;
    }
  }
  __device__ __forceinline__ int64_t state_at(int state, int round, int i) const {
    return (int64_t{state} * args_.steps.batch + row(round, i)) * args_.hidden + unit_;
  }
  __device__ __forceinline__ void load_initial() {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      Live& live = live_[kInRegisters ? round : 0];
#pragma unroll
      for (int v = 0; v < kLive * kValues; v += 2) {
        const int value = v / kValues, i = v % kValues / kUnits, u = v % kUnits;
        float2 x = make_float2(0, 0);
        if (exists(round, i)) x = initial(value, state_at(value < kStates ? value : 0, round, i) + u);
        live[value][v % kValues] = x.x, live[value][v % kValues + 1] = x.y;
      }
      keep_live(live, round);
    }
  }
  __device__ __forceinline__ float2 initial(int value, int64_t from) const {
    if (value == kStates) return args_.h0 ? read_pair(args_.h0 + from).widen() : make_float2(0, 0);
    return args_.states0 ? read_state_pair<T>(args_.states0, from, args_.narrow_states) : make_float2(0, 0);
  }

  // ---- a round

  __device__ __forceinline__ void run_round(int step, int round, Live& live) {
    Inputs inputs;
    Results results;
    if constexpr (Config::kHasResets) load_lost(inputs.lost, step, round);
    take_live(live, round);
    read(inputs, round);
    mbarrier_wait_limited(storage_.partials_full(), partials_parity_);
    partials_parity_ ^= 1;
#pragma unroll
    for (int pair = 0; pair < kUnits / 2; ++pair) {
      float sums[2][2][kGates];
      read_sums(sums, pair);
      if (pair == kUnits / 2 - 1) free_partials();
#pragma unroll
      for (int i = 0; i < 2; ++i) run_pair(sums[i], pair, i, inputs, live, results);
    }
    send(step, round, results);
    // What no other block waits for comes after the release, which waits for the stores before it.
    store(step, round, results, live);
    keep_live(live, round);
  }

  // [row][unit of the pair][gate]: both halves of K. A slot has both rows of a gate, and of the one after the
  // next.
  __device__ __forceinline__ void read_sums(float (&sums)[2][2][kGates], int pair) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int g = 0; g < 2 && g < kGates; ++g) {
        // partial_slot(product_warp_, eighth, quad_), where eighth is 4 * g + first_of_four_ + 2 * pair + u
        const int odd = first_of_four_ / 2 + pair;
        const uint32_t slot = (slots_ ^ (4 * u ^ odd) * kSlotBytes) + (8 * odd + 16 * g) * kSlotBytes;
        const float4 a = ld_shared_float4(slot), b = ld_shared_float4(slot + Config::kPartialBytes);
        sums[0][u][g] = a.x + b.x, sums[1][u][g] = a.y + b.y;
        if (g + 2 < kGates) sums[0][u][g + 2] = a.z + b.z, sums[1][u][g + 2] = a.w + b.w;
      }
    }
  }
  // Both blocks' warpgroups that have multiplied this block's units may send again.
  __device__ __forceinline__ void free_partials() const {
    __syncwarp();
    if (lane_ < 2) mbarrier_arrive_cluster(storage_.partials_free(rank_), lane_);
  }

  // The cell of two units of row i.
  __device__ __forceinline__ void run_pair(const float (&sums)[2][kGates], int pair, int i,
                                           const Inputs& inputs, Live& live, Results& results) const {
    float h[2], saved[2][kSavedOrOne], states[2][kStatesOrOne];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      CellInputs<Cell, float> in;
      fill(in, sums[e], 2 * pair + e, i, inputs, live);
      const int value = i * kUnits + 2 * pair + e;
#pragma unroll
      for (int s = 0; s < kStates; ++s) states[e][s] = keep(live[s][value], inputs.lost[i]);
      h[e] = Cell::template forward<typename MathOf<T>::type>(in, states[e], saved[e]);
#pragma unroll
      for (int s = 0; s < kStates; ++s) live[s][value] = states[e][s];
    }
    results.h[i].pairs[pair] = Pair<T>::of(h[0], h[1]);
#pragma unroll
    for (int v = 0; v < kSaved; ++v) results.saved[i][v].pairs[pair] = Pair<T>::of(saved[0][v], saved[1][v]);
#pragma unroll
    for (int o = 0; o < kOutputs && kOutputApart; ++o) {
      results.outputs[i][o].pairs[pair] =
          Pair<T>::of(output_of<Cell>(h[0], states[0], o), output_of<Cell>(h[1], states[1], o));
    }
    if constexpr (Cell::kReadsH) {
      const float2 rounded = results.h[i].pairs[pair].widen();
      live[kStates][i * kUnits + 2 * pair] = rounded.x, live[kStates][i * kUnits + 2 * pair + 1] = rounded.y;
    }
  }
  __device__ __forceinline__ void fill(CellInputs<Cell, float>& in, const float (&sums)[kGates], int unit,
                                       int i, const Inputs& inputs, const Live& live) const {
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      const float product = keep(sums[g], inputs.lost[i]);
      in.x[g] = inputs.projections[i][g][unit];
      if constexpr (Cell::kSeparate) {
        in.r[g] = product;
      } else {
        in.x[g] += product;
      }
    }
    if constexpr (Cell::kReadsH) in.h = keep(live[kStates][i * kUnits + unit], inputs.lost[i]);
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p) in.parameters[p] = parameters_[p][unit];
#pragma unroll
    for (int k = 0; k < Cell::kStepInputs; ++k) in.steps[k] = inputs.steps[i][k][unit];
  }
  // A product is linear in h, so it loses what h does.
  __device__ __forceinline__ static float keep(float x, float lost) {
    if constexpr (Config::kHasResets) return scale_by_mask(mask_of(lost), x);
    return x;
  }

  // ---- what the cell writes

  __device__ __forceinline__ void send(int step, int round, const Results& results) const {
    T* const output = at(args_.output, first_row(step) + row(round, 0));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (exists(round, i)) write(output + i * args_.hidden, results.h[i]);
    }
    fence_proxy_async_global();  // other blocks read it by TMA
    __syncwarp();
    if (lane_ != 0) return;
    if constexpr (Config::kTile.releasing_warps > 0) {
      mbarrier_arrive(storage_.stored(round));
    } else {
      red_release(arrive_at_ + round * to_next_round_, 1);
    }
  }
  __device__ __forceinline__ void store(int step, int round, const Results& results, const Live& live) const {
    const int64_t first = first_row(step) + row(round, 0);
    T *const outputs = at(args_.output_apart, first, kOutputs), *const gates = at(args_.gates, first, kGates),
             *const extra = at(args_.extra, first, kExtra);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!exists(round, i)) continue;
#pragma unroll
      for (int o = 0; o < kOutputs && kOutputApart; ++o) {
        write(outputs + (i * kOutputs + o) * args_.hidden, results.outputs[i][o]);
      }
      if (args_.save) {
#pragma unroll
        for (int v = 0; v < kSaved; ++v) {
          write(v < kSavedInGates ? gates + (i * kGates + v) * args_.hidden
                                  : extra + (i * kExtra + v - kSavedInGates) * args_.hidden,
                results.saved[i][v]);
        }
      }
      if (step + 1 == args_.steps.length) store_last(round, i, results.h[i], live);
    }
  }
  __device__ __forceinline__ void store_last(int round, int i, const Vector& h, const Live& live) const {
    write(args_.h_n + state_at(0, round, i), h);
#pragma unroll
    for (int v = 0; v < kStates * kUnits; v += 2) {
      const int state = v / kUnits, u = v % kUnits;
      const float* const x = &live[state][i * kUnits + u];
      write_state_pair<T>(args_.states_n, state_at(state, round, i) + u, args_.narrow_states,
                          make_float2(x[0], x[1]));
    }
  }
  __device__ __forceinline__ static void write(T* to, const Vector& x) { *reinterpret_cast<Vector*>(to) = x; }

  const Arguments& args_;
  const LargeStorage<Config>& storage_;
  const int rank_, lane_;
  int product_warp_, quad_, eight_rows_, first_of_four_;  // whose sums the thread reads
  int row_, unit_;                                        // its first, of the batch and of the layer
  bool has_units_;
  uint32_t slots_;
  unsigned* arrive_at_;
  int to_next_round_;
  uint32_t partials_parity_ = 0;
  Vector parameters_[at_least_one(Cell::kParameters)] = {};
  Live live_[kInRegisters ? kRounds : 1];
};

// The kernel's body.
template <class Config>
__device__ __forceinline__ void run_large_forward(const LargeForwardArguments<typename Config::T>& args) {
  const LargeStorage<Config> storage(dynamic_shared());
  const LargePlace place(args.first_group, args.group_pairs);
  const LargeArrivals<Config> arrivals(args.arrivals, place, args.group_pairs);
  if (threadIdx.x == 0) storage.init_barriers();
  __syncthreads();
  cluster_sync();
  const int warpgroup = uniform_warp() / 4;
  if (warpgroup == Config::kLoaderWarpgroup) {
    setmaxnreg_dec<Config::kTile.loader_registers>();
    LargeLoads<Config>(storage, place, arrivals).run(args);
  } else if (warpgroup == Config::kCellWarpgroup) {
    setmaxnreg_dec<Config::kTile.cell_registers>();
    LargeCells<Config>(args.s, storage, place, arrivals).run();
  } else {
    setmaxnreg_inc<Config::kTile.product_registers>();
    LargeProducts<Config>(storage, place, warpgroup).run(args);
  }
  // The other block may still write to this one's shared memory, and arrive at its barriers.
  __syncwarp();
  cluster_sync();
}

template <class Config>
__global__ void __launch_bounds__(LargeShape::kThreads, 1)
    recurrence_large_forward_kernel(const __grid_constant__ LargeForwardArguments<typename Config::T> args) {
  LLTM_HOPPER(run_large_forward<Config>(args));
}

}  // namespace hopper
}  // namespace lltm_ext
