// The whole sequence of a large layer forward, for half types and TF32 on Hopper: a persistent kernel whose
// blocks keep all of the recurrent weight on the chip and exchange h through L2. docs/design/recurrence.md
// has the counts.
//
// From the product of a tile of rows to its next step it is a long way: the halves of the sums meet in the
// block that computes the cell, h is stored, the blocks of the group are told, and load it by TMA. Meanwhile
// the tensor cores multiply the group's other tiles.
#pragma once

#include "recurrence/large/kernel.cuh"

namespace lltm_ext {
namespace hopper {

// float32 where TF32 is allowed: float16 has as many significant bits as TF32, in half of the bytes, so the
// products are as exact if exponents fit. h is at most 1 in size (kIsBounded) but in the first
// step, whose product the host computes. It is multiplied by 2^14 and keeps its bits down to 2^-28; below,
// the error is at most 2^-39. Each row of a block's part of the weights is multiplied by a power of two
// (LargeRowScale), which the sums are divided by. Sums are below 2^30 times their length.
//
// Of float32, blocks exchange h apart from the output. Two planes suffice, one for even steps and one for odd
// ones. A block stores h of step s + 2, of a round, after its sums of that step, whose loads have waited for
// h of step s + 1 of every block of the group. Each of these stored it after its own sums of step s + 1, for
// which its cluster had read all of h of step s. So no block will read what is overwritten. This holds for
// each round apart: rounds share no rows, and blocks that are ahead in one round overwrite nothing of
// another. The counters order the accesses: a block has read (full barriers), sends sums, stores, releases;
// the other one acquires, loads, multiplies, stores.
struct LargeExchange {
  static constexpr float kScale = 0x1p14f;
  __device__ static int plane(int step) { return step % 2; }
};

// The power of two that brings the largest entry of a row of weights into [2^14, 2^15), as that entry's
// exponent. Beside an infinity or NaN, which stay what they are, a row's other entries do not count, so they
// may become zeros. Rows of entries below 2^-98 are treated as larger ones, so that all factors are normal
// numbers.
class LargeRowScale {
  static constexpr unsigned kLeast = 29, kMantissa = 23;

 public:
  // The bits of sizes are in their order.
  __device__ __forceinline__ static unsigned larger(unsigned largest, float x) {
    return max(largest, __float_as_uint(x) & 0x7fffffffu);
  }
  __device__ __forceinline__ explicit LargeRowScale(unsigned largest)
      : exponent_(max(largest >> kMantissa, kLeast)) {}
  __device__ __forceinline__ float of_weights() const {
    return __uint_as_float((127 + 127 + 14 - exponent_) << kMantissa);
  }
  // The bits of what turns sums into those of h and the weights. The lower half is zeros.
  __device__ __forceinline__ unsigned of_sums() const { return (exponent_ - 14 - 14) << kMantissa; }

 private:
  const unsigned exponent_;  // with its bias of 127
};

// What products read: the h of the step before.
template <class Config>
class LargeH {
 public:
  using Arguments = LargeForwardArguments<typename Config::T>;

  __device__ static int steps(const Arguments& args) { return args.s.steps.length; }
  __device__ static int unit(int k_tile) { return k_tile * kTileK; }
  __device__ static int stored_steps(int step) { return step; }

  // Rows after the batch are zeros, and so is h before a step that has none.
  __device__ __forceinline__ LargeH(const Arguments& args, int step, int row)
      : map_(step == 0 ? &args.h0 : &args.h),
        row_(step == 0 && (Config::kIsScaled || !args.s.h0) ? args.s.steps.batch : row),
        plane_(step == 0              ? 0
               : Config::kIsScaled    ? LargeExchange::plane(step - 1)
               : args.s.steps.reverse ? args.s.steps.length - step
                                      : step - 1) {}
  __device__ __forceinline__ void load(unsigned char* to, int k_tile, uint64_t* full) const {
    tma_load(to, map_, k_tile * kTileK, row_, plane_, full);
  }

 private:
  const CUtensorMap* map_;
  int row_, plane_;
};

// A product's warpgroup. It has the gates of 16 units, those of the pair's block `warpgroup`.
template <class Config>
class LargeProducts : LargeProduct<Config> {
  using Base = LargeProduct<Config>;
  using Base::kRows, Base::kTiles, Base::storage_, Base::place_, Base::warpgroup_, Base::warp_, Base::lane_;
  using typename Base::T, typename Base::Operand;

 public:
  using Base::Base;

  __device__ __forceinline__ void run(const LargeForwardArguments<T>& args) {
    load_weights(args.s);
    const Partials partials = where_partials_go();
    PipelineState<Config::kStages> ring;
    uint32_t free_parity = 1;
    const int products = args.s.steps.length * Config::kRounds;
#pragma unroll 1
    for (int i = 0; i < products; ++i) {
      float d[kRows / 2];
      Base::multiply(d, ring);
      if constexpr (Config::kIsScaled) scale(d);
      mbarrier_wait(storage_.partials_free(warpgroup_), free_parity);
      free_parity ^= 1;
      send(d, partials);
    }
  }

 private:
  struct Partials {
    uint32_t slot, full;  // of the block whose cells take them
    bool in_other_block;
  };

  // Rows of a warp: four units of the first gate, then those of the next one. A missing gate has zeros. A
  // lane has two rows, whose addresses are computed once: for each load they would take most of the kernel's
  // code.
  __device__ __forceinline__ void load_weights(const SequenceForwardArguments<T>& s) {
    const int unit = place_.first_unit(warpgroup_) + 4 * warp_ + lane_ / 4 % 4, gate = lane_ / 16;
    const int first_k = place_.rank * kTiles * kTileK + 2 * (lane_ % 4);
    const T* const weights = s.weight + (int64_t{gate} * s.hidden + unit) * s.hidden + first_k;
    const T* const of_gate_after_next = weights + int64_t{2} * s.hidden * s.hidden;
    const auto k_of = [&](int gate) {
      return unit < s.hidden && gate < Config::kGates ? s.hidden - first_k : 0;
    };
    const int end = k_of(gate), end_after_next = k_of(gate + 2);
    float x = 1, y = 1;
    if constexpr (Config::kIsScaled) {
      const LargeRowScale row(largest(weights, end)),
          row_after_next(largest(of_gate_after_next, end_after_next));
      scale_of_sums_ = row.of_sums() >> 16 | row_after_next.of_sums();
      x = row.of_weights(), y = row_after_next.of_weights();
    }
    Base::load_weights([&](int tile, int step) {
      const int k = tile * kTileK + 16 * step;
      return make_uint4(pair_at(weights, k, end, x), pair_at(of_gate_after_next, k, end_after_next, y),
                        pair_at(weights, k + 8, end, x),
                        pair_at(of_gate_after_next, k + 8, end_after_next, y));
    });
  }
  // The bits of the largest size in a row's part of K, which the four lanes of a quad have.
  __device__ __forceinline__ static unsigned largest(const T* weights, int end) {
    const int k_end = end < kTiles * kTileK ? end : kTiles * kTileK;
    unsigned bits = 0;
#pragma unroll 8
    for (int k = 0; k < k_end; k += 8) {
      const float2 x = read_pair(weights + k).widen();
      bits = LargeRowScale::larger(LargeRowScale::larger(bits, x.x), x.y);
    }
    bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
    return max(bits, __shfl_xor_sync(~0u, bits, 2));
  }
  __device__ __forceinline__ static unsigned pair_at(const T* weights, int k, int end, float scale) {
    if (k >= end) return 0;
    if constexpr (!Config::kIsScaled) return *reinterpret_cast<const unsigned*>(weights + k);
    const float2 x = read_pair(weights + k).widen();
    const Pair<Operand> pair = Pair<Operand>::of(x.x * scale, x.y * scale);
    return reinterpret_cast<const unsigned&>(pair);
  }
  // A lane's sums are of two rows of the weights in turn.
  __device__ __forceinline__ void scale(float (&d)[kRows / 2]) const {
    const float x = __uint_as_float(scale_of_sums_ << 16), y = __uint_as_float(scale_of_sums_ & 0xffff0000u);
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 4) d[i] *= x, d[i + 1] *= x, d[i + 2] *= y, d[i + 3] *= y;
  }

  __device__ __forceinline__ Partials where_partials_go() const {
    const uint32_t slot = warp_ * kWarpSlots + partial_slot(warp_, lane_ / 4, lane_ % 4);
    const unsigned char* const partials = storage_.partials(place_.rank) + slot * kSlotBytes;
    if (warpgroup_ == place_.rank) {
      return {shared_address(partials), shared_address(storage_.partials_full()), false};
    }
    return {mapa(partials, warpgroup_), mapa(storage_.partials_full(), warpgroup_), true};
  }
  __device__ __forceinline__ void send(const float (&d)[kRows / 2], const Partials& to) const {
    if (to.in_other_block) return Base::send(d, to.slot, kEightRowsBytes, to.full);
    if (threadIdx.x % 128 == 0) mbarrier_arrive_expect_tx(storage_.partials_full(), Config::kPartialBytes);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      st_shared(to.slot + j * kEightRowsBytes,
                make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]));
    }
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(storage_.partials_full());
  }

  unsigned scale_of_sums_;  // two powers of two, whose lower halves are zeros, in one register
};

// The warpgroup that computes the cell.
template <class Config>
class LargeCells : LargeUnits<Config, SequenceForwardArguments<typename Config::T>> {
  using Arguments = SequenceForwardArguments<typename Config::T>;
  using Base = LargeUnits<Config, Arguments>;
  using Base::args_, Base::storage_, Base::lane_, Base::row_, Base::unit_, Base::partials_parity_,
      Base::parameters_;
  using Base::first_row, Base::row, Base::exists, Base::at, Base::state_at, Base::inputs_of, Base::copy,
      Base::keep, Base::write;
  using Base::kShape, Base::kGates, Base::kStates, Base::kSaved, Base::kSavedInGates, Base::kExtra,
      Base::kLive, Base::kOutputs, Base::kStatesOrOne, Base::kSavedOrOne, Base::kRounds, Base::kAhead,
      Base::kUnits, Base::kValues, Base::kInRegisters;
  using typename Base::T, typename Base::Cell, typename Base::Vector, typename Base::Live;
  using Projection = projection_t<Cell, T>;
  static constexpr bool kOutputApart = kShape.cell.has_output_apart();

 public:
  __device__ LargeCells(const LargeForwardArguments<T>& args, const LargeStorage<Config>& storage,
                        const LargePlace<Config>& place)
      : Base(args.s, storage), large_args_(args), rank_(place.rank) {
    const int warp = uniform_warp() % 4;
    const bool wide = kUnits == 4;
    product_warp_ = wide ? lane_ % 4 : lane_ / 2 % 4;
    quad_ = wide ? lane_ / 4 % 4 : lane_ / 8;
    eight_rows_ = wide ? 2 * warp + lane_ / 16 : warp;
    first_of_four_ = wide ? 0 : lane_ % 2 * 2;
    Base::set_place(place.group * kRounds * Config::kRows + 8 * eight_rows_ + 2 * quad_,
                    place.first_unit(rank_) + 4 * product_warp_ + first_of_four_);
    slots_ = shared_address(storage.partials(0)) + eight_rows_ * kEightRowsBytes +
             (product_warp_ * kWarpSlots + partial_slot(product_warp_, 0, quad_)) * kSlotBytes;
  }

  __device__ __forceinline__ void run() {
    Base::load_parameters();
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
  using Projections = UnitVector<Projection, kUnits>;

  // What a round reads besides the sums.
  struct Inputs {
    Projections projections[2][kGates];  // those of float32 take too many registers, and are read later
    Vector steps[2][at_least_one(Cell::kStepInputs)];
    float lost[2];
  };
  struct Results {
    Vector h[2], saved[2][kSavedOrOne], outputs[2][kOutputs];
  };

  // ---- what the cell reads

  __device__ __forceinline__ Projections& projections(int round, int i, int gate) const {
    return of_thread<Projection, kUnits>(inputs_of(round), i * kGates + gate);
  }
  __device__ __forceinline__ Vector& step_inputs(int round, int i, int k) const {
    unsigned char* const base = inputs_of(round) + kShape.projection_bytes();
    return of_thread<T, kUnits>(base, i * Cell::kStepInputs + k);
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
      for (int g = 0; g < kGates && !Config::kIsScaled; ++g) to.projections[i][g] = projections(round, i, g);
#pragma unroll
      for (int k = 0; k < Cell::kStepInputs; ++k) to.steps[i][k] = step_inputs(round, i, k);
    }
  }

  // ---- what units carry

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
      Base::keep_live(live, round);
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
    if constexpr (Config::kHasResets) Base::load_lost(inputs.lost, step, round);
    Base::take_live(live, round);
    read(inputs, round);
    mbarrier_wait_limited(storage_.partials_full(), partials_parity_);
    partials_parity_ ^= 1;
#pragma unroll
    for (int pair = 0; pair < kUnits / 2; ++pair) {
      float sums[2][2][kGates];
      read_sums(sums, pair);
      if constexpr (Config::kIsScaled) {
        if (step == 0 && large_args_.first_products) take_first_products(sums, round, pair);
      }
      if (pair == kUnits / 2 - 1) free_partials();
#pragma unroll
      for (int i = 0; i < 2; ++i) run_pair(sums[i], pair, round, i, inputs, live, results);
    }
    send(step, round, results);
    // What no other block waits for comes after the release, which waits for the stores before it.
    store(step, round, results, live);
    Base::keep_live(live, round);
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
  // In place of sums of zeros, which infinite weights make NaN.
  __device__ __forceinline__ void take_first_products(float (&sums)[2][2][kGates], int round,
                                                      int pair) const {
    const T* const products = at(large_args_.first_products, row(round, 0), kGates) + 2 * pair;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!exists(round, i)) continue;
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        const float2 x = read_pair(products + (i * kGates + g) * args_.hidden).widen();
        sums[i][0][g] = x.x, sums[i][1][g] = x.y;
      }
    }
  }
  // Both blocks' warpgroups that have multiplied this block's units may send again.
  __device__ __forceinline__ void free_partials() const {
    __syncwarp();
    if (lane_ < 2) mbarrier_arrive_cluster(storage_.partials_free(rank_), lane_);
  }

  // The cell of two units of row i.
  __device__ __forceinline__ void run_pair(const float (&sums)[2][kGates], int pair, int round, int i,
                                           const Inputs& inputs, Live& live, Results& results) const {
    float h[2], saved[2][kSavedOrOne], states[2][kStatesOrOne];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      CellInputs<Cell, float> in;
      fill(in, sums[e], 2 * pair + e, round, i, inputs, live);
      const int value = i * kUnits + 2 * pair + e;
#pragma unroll
      for (int s = 0; s < kStates; ++s) states[e][s] = keep(live[s][value], inputs.lost[i]);
      h[e] = Cell::template forward<typename Config::Math>(in, states[e], saved[e]);
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
                                       int round, int i, const Inputs& inputs, const Live& live) const {
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      const float product = keep(sums[g], inputs.lost[i]);  // it is linear in h, so it loses what h does
      in.x[g] = Config::kIsScaled ? projections(round, i, g)[unit] : inputs.projections[i][g][unit];
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
  // ---- what the cell writes

  __device__ __forceinline__ void send(int step, int round, const Results& results) const {
    if constexpr (Config::kIsScaled) {
      exchange(step, round, results);
    } else {
      store_output(step, round, results);
    }
    Base::tell(round);
  }
  __device__ __forceinline__ void store_output(int step, int round, const Results& results) const {
    T* const output = at(args_.output, first_row(step) + row(round, 0));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (exists(round, i)) write(output + i * args_.hidden, results.h[i]);
    }
  }
  __device__ __forceinline__ void exchange(int step, int round, const Results& results) const {
    using Operand = typename Config::Operand;
    Operand* const to = at(static_cast<Operand*>(large_args_.exchanged),
                           int64_t{LargeExchange::plane(step)} * args_.steps.batch + row(round, 0));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      UnitVector<Operand, kUnits> h;
#pragma unroll
      for (int pair = 0; pair < kUnits / 2; ++pair) {
        const float2 x = results.h[i].pairs[pair].widen();
        h.pairs[pair] = Pair<Operand>::of(x.x * LargeExchange::kScale, x.y * LargeExchange::kScale);
      }
      if (exists(round, i)) *reinterpret_cast<UnitVector<Operand, kUnits>*>(to + i * args_.hidden) = h;
    }
  }
  __device__ __forceinline__ void store(int step, int round, const Results& results, const Live& live) const {
    if constexpr (Config::kIsScaled) store_output(step, round, results);
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
  const LargeForwardArguments<T>& large_args_;
  const int rank_;
  int product_warp_, quad_, eight_rows_, first_of_four_;  // whose sums the thread reads
  uint32_t slots_;
  Live live_[kInRegisters ? kRounds : 1];
};

// The kernel's body.
template <class Config>
__device__ __forceinline__ void run_large_forward(const LargeForwardArguments<typename Config::T>& args) {
  run_large<Config, LargeH<Config>, LargeProducts<Config>, LargeCells<Config>>(args);
}

template <class Config>
__global__ void __launch_bounds__(LargeShape::kThreads, 1)
    recurrence_large_forward_kernel(const __grid_constant__ LargeForwardArguments<typename Config::T> args) {
  LLTM_HOPPER(run_large_forward<Config>(args));
}

}  // namespace hopper
}  // namespace lltm_ext
