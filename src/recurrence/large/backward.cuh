// Steps of a large layer backward, for half types on Hopper: a persistent kernel as forward's (forward.cuh),
// whose blocks exchange the gates' gradients through L2.
//
// The gradient of a step's h is that of the later step's gates times the weights. K is all gates of all
// units, which a cluster of eight blocks splits: each block multiplies its part for the cluster's 128 units,
// and sends 16 units' sums to each of the blocks, which computes the cell for these.
#pragma once

#include "recurrence/large/kernel.cuh"

namespace lltm_ext {
namespace hopper {

// What products read: the gradients of the gates of the step computed before. Tiles of K are the gates of 64
// units, then those of the next 64. Steps are numbered in the order in which backward computes them.
template <class Config>
class LargeGradGates {
 public:
  using Arguments = LargeBackwardArguments<typename Config::T>;

  __device__ static int steps(const Arguments& args) { return args.s.end - args.s.begin; }
  __device__ static int unit(int k_tile) { return k_tile / Config::kGates * kTileK; }
  __device__ static int gate(int k_tile) { return k_tile % Config::kGates; }
  __device__ static int stored_steps(int step) { return step + 1; }

  // Rows after the batch are of another step. Nothing reads the products of these.
  __device__ __forceinline__ LargeGradGates(const Arguments& args, int step, int row)
      : map_(&args.grad_gates),
        row_(static_cast<int>(args.s.steps.at(args.s.end - 1 - step).first - args.s.first_row) + row) {}
  __device__ __forceinline__ void load(unsigned char* to, int k_tile, uint64_t* full) const {
    tma_load(to, map_, unit(k_tile), row_, gate(k_tile), full);
  }

 private:
  const CUtensorMap* map_;
  int row_;
};

// Where a lane of a product's warp puts 16 bytes of each eight rows: two rows of two units. Neither these
// warps nor the cells' have bank conflicts.
__device__ __forceinline__ int grad_slot(int two_units, int quad) {
  return (4 * two_units + quad) ^ (two_units >> 1 & 1) << 2;
}
constexpr int kEightRowsOfBlock = kWarpSlots * kSlotBytes;

// A product's warpgroup. It has 64 of the cluster's units, each warp those of another block.
template <class Config>
class LargeBackwardProducts : LargeProduct<Config> {
  using Base = LargeProduct<Config>;
  using typename Base::T;
  using Source = LargeGradGates<Config>;
  using Base::kRows, Base::kTiles, Base::storage_, Base::place_, Base::warpgroup_, Base::warp_, Base::lane_;

 public:
  using Base::Base;

  __device__ __forceinline__ void run(const LargeBackwardArguments<T>& args) {
    Base::load_weights([&](int tile, int step) { return weights_at(args.s, tile, step); });
    const int block = 4 * warpgroup_ + warp_;
    const uint32_t slot =
        mapa(storage_.partials(place_.rank) + grad_slot(lane_ / 4, lane_ % 4) * kSlotBytes, block);
    const uint32_t full = mapa(storage_.partials_full(), block);
    PipelineState<Config::kStages> ring;
    uint32_t free_parity = 1;
    const int products = Source::steps(args) * Config::kRounds;
#pragma unroll 1
    for (int i = 0; i < products; ++i) {
      float d[kRows / 2];
      Base::multiply(d, ring);
      mbarrier_wait(storage_.partials_free(block), free_parity);
      free_parity ^= 1;
      Base::send(d, slot, kEightRowsOfBlock, full);
    }
  }

 private:
  // A lane's two rows are adjacent units.
  __device__ __forceinline__ uint4 weights_at(const SequenceBackwardArguments<T>& s, int tile,
                                              int step) const {
    const int k_tile = place_.rank * kTiles + tile;
    const int unit = place_.first_unit(4 * warpgroup_ + warp_) + 2 * (lane_ / 4);
    const int from = Source::unit(k_tile) + step * 16 + 2 * (lane_ % 4);
    const auto pair_at = [&](int more_units, int more) -> unsigned {
      if (unit >= s.hidden || from + more >= s.hidden) return 0;
      const int64_t row = int64_t{unit + more_units} * Config::kGates + Source::gate(k_tile);
      return *reinterpret_cast<const unsigned*>(s.weight_t + row * s.hidden + from + more);
    };
    return make_uint4(pair_at(0, 0), pair_at(1, 0), pair_at(0, 8), pair_at(1, 8));
  }
};

// A thread's sums of adjacent units.
template <int kUnits>
struct alignas(4 * kUnits) UnitSums {
  float of[kUnits];
};

// The warpgroup that computes the cell. In its last turn it only stores the gradient of h before the first
// step.
template <class Config>
class LargeBackwardCells : LargeUnits<Config, SequenceBackwardArguments<typename Config::T>> {
  using Arguments = SequenceBackwardArguments<typename Config::T>;
  using Base = LargeUnits<Config, Arguments>;
  using Base::args_, Base::storage_, Base::lane_, Base::partials_parity_, Base::parameters_;
  using Base::first_row, Base::row, Base::exists, Base::at, Base::state_at, Base::inputs_of, Base::copy,
      Base::keep;
  using Base::kShape, Base::kGates, Base::kStates, Base::kSaved, Base::kSavedInGates, Base::kExtra,
      Base::kLive, Base::kOutputs, Base::kStatesOrOne, Base::kSavedOrOne, Base::kRounds, Base::kAhead;
  using typename Base::T, typename Base::Cell, typename Base::Vector, typename Base::Live;
  static constexpr int kUnits = Base::kUnits, kSums = kShape.cell.sums(),
                       kPlanes = kSaved + kOutputs + Cell::kStepInputs;
  static constexpr bool kSeparate = Cell::kSeparate;
  static_assert(kAhead <= kRounds);

 public:
  __device__ LargeBackwardCells(const LargeBackwardArguments<T>& args, const LargeStorage<Config>& storage,
                                const LargePlace<Config>& place)
      : Base(args.s, storage), rank_(place.rank) {
    constexpr int kLanes = LargeShape::kUnits / kUnits;  // of a row
    const int quad = lane_ % 4, lane_of_row = lane_ / 4 % kLanes;
    const int eight_rows = static_cast<int>(threadIdx.x) % 128 / (4 * kLanes);
    Base::set_place(place.group * kRounds * Config::kRows + 8 * eight_rows + 2 * quad,
                    place.first_unit(rank_) + kUnits * lane_of_row);
    slots_ = shared_address(storage.partials(0)) + eight_rows * kEightRowsOfBlock +
             grad_slot(kUnits / 2 * lane_of_row, quad) * kSlotBytes;
  }

  __device__ __forceinline__ void run() {
    expect_partials();
    Base::load_parameters();
    load_carried();
    clear_sums();
    for (int i = 0; i < kAhead; ++i) load(0, i);
    const int steps = args_.end - args_.begin;
    for (int turn = 0; turn <= steps; ++turn) {
#pragma unroll 1
      for (int round = 0; round < kRounds; ++round) run_round(turn, round, turn == steps);
    }
    store_carried();
    store_sums();
  }

 private:
  using Gradients = float[2][kUnits];  // by rows

  // What a round writes.
  struct Results {
    Vector gates[2][kGates], projections[2][kSeparate ? kGates : 1];
    float sums[kSums][kUnits];
  };
  using Sums = UnitSums<kUnits>;

  __device__ __forceinline__ int step_of(int turn) const { return args_.end - 1 - turn; }

  // ---- what the cell reads

  __device__ __forceinline__ Vector& input(int round, int i, int plane) const {
    return of_thread<T, kUnits>(inputs_of(round), i * kPlanes + plane);
  }
  __device__ __forceinline__ void load(int turn, int round) const {
    const int64_t from = first_row(step_of(turn)) + row(round, 0);
    const T *const gates = at(args_.gates, from, kGates), *const extra = at(args_.extra, from, kExtra),
                   *const outputs = at(args_.grad_output, from, kOutputs),
                   *const steps = at(args_.step_inputs, from, Cell::kStepInputs);
    const bool has_outputs = args_.grad_output != nullptr;
    const int hidden = args_.hidden;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = exists(round, i);
#pragma unroll
      for (int v = 0; v < kSaved; ++v) {
        copy(input(round, i, v),
             v < kSavedInGates ? gates + (i * kGates + v) * hidden
                               : extra + (i * kExtra + v - kSavedInGates) * hidden,
             inside);
      }
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        copy(input(round, i, kSaved + o), outputs + (i * kOutputs + o) * hidden, inside && has_outputs);
      }
#pragma unroll
      for (int k = 0; k < Cell::kStepInputs; ++k) {
        copy(input(round, i, kSaved + kOutputs + k), steps + (i * Cell::kStepInputs + k) * hidden, inside);
      }
    }
    cp_async_commit_group();
  }
  // Those that take the place of what a round has read.
  __device__ __forceinline__ void load_next(int turn, int round) const {
    const bool same_turn = round + kAhead < kRounds;
    if (same_turn || turn + 1 < args_.end - args_.begin) {
      load(same_turn ? turn : turn + 1, same_turn ? round + kAhead : round + kAhead - kRounds);
    } else {
      cp_async_commit_group();  // waits count groups
    }
  }

  // ---- the gradient of h

  // One thread expects what the cluster's blocks send for the next round.
  __device__ __forceinline__ void expect_partials() const {
    if (threadIdx.x % 128 == 0) {
      mbarrier_arrive_expect_tx(storage_.partials_full(), Config::kClusterBlocks * Config::kPartialBytes);
    }
  }
  // Adds up all parts of K, in one order.
  __device__ __forceinline__ void receive(Gradients& grad_h) {
    mbarrier_wait_limited(storage_.partials_full(), partials_parity_);
    partials_parity_ ^= 1;
    expect_partials();
#pragma unroll
    for (int pair = 0; pair < kUnits / 2; ++pair) {
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int block = 0; block < Config::kClusterBlocks; ++block) {
        const float4 x = ld_shared_float4((slots_ ^ pair * (4 * kSlotBytes)) + block * Config::kPartialBytes);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      }
      grad_h[0][2 * pair] = sum.x, grad_h[1][2 * pair] = sum.y;
      grad_h[0][2 * pair + 1] = sum.z, grad_h[1][2 * pair + 1] = sum.w;
    }
    __syncwarp();
    if (lane_ < Config::kClusterBlocks) mbarrier_arrive_cluster(storage_.partials_free(rank_), lane_);
  }
  // A row gets of it what the step computed before had kept of h.
  __device__ __forceinline__ void receive(Gradients& grad_h, int turn, int round) {
    float lost[2];
    if constexpr (Config::kHasResets) Base::load_lost(lost, step_of(turn) + 1, round);
    receive(grad_h);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) grad_h[i][u] = keep(grad_h[i][u], lost[i]);
    }
  }
  // After the last step.
  __device__ __forceinline__ void load_grad_h(Gradients& grad_h, int round) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Vector x = {};
      if (!args_.from_zeros && exists(round, i)) {
        x = *reinterpret_cast<const Vector*>(args_.grad_h + state_at(0, round, i));
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) grad_h[i][u] = x[u];
    }
  }
  __device__ __forceinline__ void store_grad_h(const Gradients& grad_h, int round) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!exists(round, i)) continue;
      Vector x;
#pragma unroll
      for (int u = 0; u < kUnits; u += 2) x.pairs[u / 2] = Pair<T>::of(grad_h[i][u], grad_h[i][u + 1]);
      write(args_.grad_h + state_at(0, round, i), x);
    }
  }

  // ---- a round

  __device__ __forceinline__ void run_round(int turn, int round, bool is_last) {
    Gradients grad_h;
    cp_async_wait_group<kAhead - 1>();
    if (turn == 0) {
      load_grad_h(grad_h, round);
    } else {
      receive(grad_h, turn, round);
    }
    if (is_last) return store_grad_h(grad_h, round);
    Live live;
    Results results;
    float lost[2];
    if constexpr (Config::kHasResets) Base::load_lost(lost, step_of(turn), round);
    Base::take_live(live, round);
#pragma unroll
    for (int i = 0; i < 2; ++i) run_row(i, round, grad_h[i], lost[i], live, results);
    send(turn, round, results);
    // What no other block waits for comes after the release, which waits for the stores before it.
    store(turn, round, results);
    Base::keep_live(live, round);
    load_next(turn, round);
  }

  __device__ __forceinline__ void run_row(int i, int round, const float (&grad_h)[kUnits], float lost,
                                          Live& live, Results& results) const {
    Vector saved[kSavedOrOne], outputs[kOutputs], steps[at_least_one(Cell::kStepInputs)];
#pragma unroll
    for (int v = 0; v < kSaved; ++v) saved[v] = input(round, i, v);
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) outputs[o] = input(round, i, kSaved + o);
#pragma unroll
    for (int k = 0; k < Cell::kStepInputs; ++k) steps[k] = input(round, i, kSaved + kOutputs + k);
    const bool inside = exists(round, i);
#pragma unroll
    for (int pair = 0; pair < kUnits / 2; ++pair) {
      CellGradients<Cell, float> grads[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int u = 2 * pair + e, value = i * kUnits + u;
        CellInputs<Cell, float> in;
        float of_saved[kSavedOrOne], states[kStatesOrOne], of_h = grad_h[u];
#pragma unroll
        for (int v = 0; v < kSaved; ++v) of_saved[v] = saved[v][u];
#pragma unroll
        for (int p = 0; p < Cell::kParameters; ++p) in.parameters[p] = parameters_[p][u];
#pragma unroll
        for (int k = 0; k < Cell::kStepInputs; ++k) in.steps[k] = steps[k][u];
#pragma unroll
        for (int s = 0; s < kStates; ++s) states[s] = live[s][value];
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) gradient_of_output<Cell>(of_h, states, o) += outputs[o][u];
        if constexpr (Cell::kReadsH) of_h += live[kStates][value];
        Cell::template backward<typename Config::Math>(of_saved, in, of_h, states, grads[e]);
#pragma unroll
        for (int s = 0; s < kStates; ++s) live[s][value] = keep(states[s], lost);
        if constexpr (Cell::kReadsH) live[kStates][value] = keep(grads[e].h, lost);
        add_sums(results, grads[e], i, u, inside);
      }
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        results.gates[i][g].pairs[pair] = Pair<T>::of(grads[0].product(g), grads[1].product(g));
        if constexpr (kSeparate) {
          results.projections[i][g].pairs[pair] = Pair<T>::of(grads[0].x[g], grads[1].x[g]);
        }
      }
    }
  }
  // Rows that do not exist may have any values.
  __device__ __forceinline__ static void add_sums(Results& results, const CellGradients<Cell, float>& grads,
                                                  int i, int unit, bool inside) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      const float x =
          inside ? (s < kGates ? grads.x[s < kGates ? s : 0] : grads.parameters[s < kGates ? 0 : s - kGates])
                 : 0;
      results.sums[s][unit] = i == 0 ? x : results.sums[s][unit] + x;
    }
  }

  // ---- what the cell writes

  // All units at once. The copy of a vector would be a store of each pair.
  __device__ __forceinline__ static void write(T* to, const Vector& x) {
    using Word = typename Conditional<kUnits == 4, uint2, unsigned>::type;
    static_assert(sizeof(Word) == sizeof(Vector));
    *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(&x);
  }
  __device__ __forceinline__ int64_t chunk_row(int turn, int round) const {
    return first_row(step_of(turn)) - args_.first_row + row(round, 0);
  }
  __device__ __forceinline__ void store_gates(T* to, int round, const Vector (&gates)[2][kGates]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!exists(round, i)) continue;
#pragma unroll
      for (int g = 0; g < kGates; ++g) write(to + (i * kGates + g) * args_.hidden, gates[i][g]);
    }
  }
  __device__ __forceinline__ void send(int turn, int round, const Results& results) const {
    store_gates(at(args_.grad_gates, chunk_row(turn, round), kGates), round, results.gates);
    Base::tell(round);
  }
  __device__ __forceinline__ void store(int turn, int round, const Results& results) const {
    if constexpr (kSeparate) {
      store_gates(at(args_.grad_projections, chunk_row(turn, round), kGates), round, results.projections);
    }
    if (!args_.grad_sums) return;
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      Sums total = sums(s);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) total.of[u] += results.sums[s][u];
      sums(s) = total;
    }
  }

  // ---- the sums over all rows and steps

  __device__ __forceinline__ Sums& sums(int s) const {
    return reinterpret_cast<Sums*>(storage_.sums())[s * 128 + threadIdx.x % 128];
  }
  __device__ __forceinline__ void clear_sums() const {
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums(s) = {};
  }
  // Adds them to those of the thread's first row.
  __device__ __forceinline__ void store_sums() const {
    if (!args_.grad_sums || !exists(0, 0)) return;
    auto* const to = at(args_.grad_sums, row(0, 0), kSums);
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      Sums& of_row = *reinterpret_cast<Sums*>(to + s * args_.hidden);
      const Sums more = sums(s);
      Sums total = of_row;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) total.of[u] += more.of[u];
      of_row = total;
    }
  }

  // ---- what units carry: the gradients of the states and, if the cell reads it, of h

  __device__ __forceinline__ float2* carried(int value, int round, int i, int unit) const {
    float* const base = value == kStates ? args_.grad_own_h : args_.grad_states;
    return reinterpret_cast<float2*>(base + state_at(value == kStates ? 0 : value, round, i) + unit);
  }
  __device__ __forceinline__ void load_carried() const {
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      Live live;
#pragma unroll
      for (int v = 0; v < kLive * 2 * kUnits; v += 2) {
        const int value = v / (2 * kUnits), i = v / kUnits % 2, u = v % kUnits;
        float2 x = make_float2(0, 0);
        if (!args_.from_zeros && exists(round, i)) x = *carried(value, round, i, u);
        live[value][i * kUnits + u] = x.x, live[value][i * kUnits + u + 1] = x.y;
      }
      Base::keep_live(live, round);
    }
  }
  __device__ __forceinline__ void store_carried() const {
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      Live live;
      Base::take_live(live, round);
#pragma unroll
      for (int v = 0; v < kLive * 2 * kUnits; v += 2) {
        const int value = v / (2 * kUnits), i = v / kUnits % 2, u = v % kUnits;
        const float* const x = &live[value][i * kUnits + u];
        if (exists(round, i)) *carried(value, round, i, u) = make_float2(x[0], x[1]);
      }
    }
  }

  const int rank_;
  uint32_t slots_;  // of the sums that the thread reads
};

// The kernel's body.
template <class Config>
__device__ __forceinline__ void run_large_backward(const LargeBackwardArguments<typename Config::T>& args) {
  run_large<Config, LargeGradGates<Config>, LargeBackwardProducts<Config>, LargeBackwardCells<Config>>(args);
}

template <class Config>
__global__ void __launch_bounds__(LargeShape::kThreads, 1) recurrence_large_backward_kernel(
    const __grid_constant__ LargeBackwardArguments<typename Config::T> args) {
  LLTM_HOPPER(run_large_backward<Config>(args));
}

}  // namespace hopper
}  // namespace lltm_ext
