// The persistent kernel forward: all steps of a sequence in one launch (steps.cuh). Blocks exchange the
// states.
#pragma once

#include "recurrence/persistent/row_per_block.cuh"
#include "recurrence/persistent/steps.cuh"

namespace lltm_ext {

template <class Config>
constexpr int kForwardPlanes =
    Config::kGates * static_cast<int>(sizeof(typename Config::Projection) / sizeof(typename Config::T)) +
    Config::Cell::kStepInputs +
    (Config::kThrough == ExchangeThrough::kL2 ? 1 + own_calls<typename Config::Cell, false>() : 0);

template <class Config>
class PersistentForward : public PersistentSteps<PersistentForward<Config>, Config, kForwardPlanes<Config>> {
  using Base = PersistentSteps<PersistentForward, Config, kForwardPlanes<Config>>;
  friend Base;
  using Base::hidden_, Base::width, Base::map_, Base::row, Base::unit, Base::live_states, Base::has_pair,
      Base::kExtra, Base::kGates, Base::kKept, Base::kPairs, Base::kSavedInGates, Base::kStates,
      Base::kStepInputs;
  using typename Base::Cell, typename Base::Exchange, typename Base::Projection, typename Base::Reset,
      typename Base::T;

 public:
  using Arguments = SequenceForwardArguments<T>;

  __device__ PersistentForward(const Arguments& arguments, const GroupGrid& grid,
                               const typename Base::Storage& storage)
      : Base(grid, arguments.steps.batch, arguments.hidden / Config::kHeads, storage), args_(arguments) {
    Base::load_all_weights(static_cast<size_t>(8) * hidden_, [&](int block, int unit) {
      return args_.weight + (static_cast<int64_t>(block) * width() + unit) * hidden_;
    });
    Base::load_parameters(args_.parameters);
    typename Base::Prefetcher::Arrays arrays(Base::prefetcher_, map_, hidden_);
    arrays.add(args_.template projections<Cell>(), kGates);
    if constexpr (Cell::kStepInputs > 0) arrays.add(args_.step_inputs, Cell::kStepInputs);
    if (Exchange::kThroughL2) arrays.add(args_.output, 1);
    if constexpr (Base::kCalls > 0 && Exchange::kThroughL2) {
      Base::given_ = static_cast<T*>(static_cast<const GroupGridOfRows&>(grid).given) +
                     int64_t{blockIdx.y} * args_.steps.length * args_.steps.batch * Base::kCalls * width();
      arrays.add(Base::given_, Base::kCalls);
    }
  }

 private:
  static constexpr bool kSendsLastStep = false;
  static constexpr bool kToInitial = Config::kHasResets && kResetsToInitial<Cell>;
  // Whether blocks apply the next step's reset to the h that they send and the states that they keep. The
  // cell then has nothing to scale before it can begin. Through L2 they send what they store, which resets
  // to zeros leave as it is.
  static constexpr bool kResetsAhead =
      Config::kHasResets && (kToInitial || (!Config::kAnyRows && !Exchange::kThroughL2));

  __device__ __forceinline__ int steps() const { return args_.steps.length; }
  __device__ __forceinline__ int turns() const { return args_.steps.length; }
  __device__ __forceinline__ StepRows rows_of(int n) const { return args_.steps.at(n); }

  __device__ __forceinline__ const Reset* resets() const { return static_cast<const Reset*>(args_.reset); }

  using Saved = float[2][at_least_one(Cell::kSaved)];
  using States = float2[at_least_one(kStates)];

  // What a pair reads in a step, and where it is.
  struct Inputs {
    Pair<Projection> projections[kGates];
    Pair<T> steps[kStepInputs];
    Reset reset;  // the reset before this step or, if kResetsAhead, before the next one
  };
  struct Addresses {
    Projection* gates;
    T *extra, *output;
    const T* steps;
    const Reset* reset;
    __device__ __forceinline__ void move(int64_t rows, int width) {
      gates += rows * width * kGates;
      extra += rows * width * kExtra;
      output += rows * width;
      steps += rows * width * Cell::kStepInputs;
      reset += rows;
    }
  };
  __device__ __forceinline__ Addresses addresses(int64_t row, int j) const {
    return {args_.template projections<Cell>() + row * kGates * width() + j,
            args_.extra + row * kExtra * width() + j, args_.output + row * width() + j,
            args_.step_inputs + row * Cell::kStepInputs * width() + j, resets() + row};
  }
  __device__ __forceinline__ void load(Inputs& inputs, const Addresses& at) const {
    if constexpr (Config::kHasResets) inputs.reset = *at.reset;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) inputs.projections[gate] = read_pair(at.gates + gate * width());
    Base::load_step_inputs(inputs.steps, at.steps);
  }

  // ---- one row tile

  struct OneTilePair {
    bool exists;
    int64_t at;  // offset in [B, H]
    States states, states0;
    float2 h, h0;
    Saved saved;
  };

  __device__ __forceinline__ const T* first_h() const {
    return args_.h0 ? args_.h0 + map_.first_row * width() : nullptr;
  }
  __device__ __forceinline__ const Reset* first_reset() const {
    if (!kResetsAhead || kToInitial || steps() == 0) return nullptr;
    return resets() + args_.steps.at(0).first + map_.first_row;
  }
  __device__ __forceinline__ float2 first_h(int64_t at) const {
    return args_.h0 ? read_pair(args_.h0 + at).widen() : make_float2(0, 0);
  }
  __device__ __forceinline__ RowSource<T> begin_one_tile() {
    const int64_t first = args_.steps.at(0).first;
    to_next_ = args_.steps.reverse ? -args_.steps.batch : args_.steps.batch;
    const int lane_row = map_.first_row + map_.g;
    states_ = args_.output + (first + lane_row) * width() + map_.element;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      OneTilePair& p = pairs_[i];
      const int b = row(i, 0), j = unit(i);
      p.exists = has_pair(i, b);
      p.at = static_cast<int64_t>(b) * width() + j;
      if (i < kKept) kept_[i] = addresses(first + b, j);
      load_states(p.states, p.at, p.exists);
      if (Cell::kReadsH || kToInitial) p.h0 = p.h = p.exists ? first_h(p.at) : make_float2(0, 0);
#pragma unroll
      for (int s = 0; s < kStates && kToInitial; ++s) p.states0[s] = p.states[s];
      if (!p.exists || steps() == 0) continue;
      const Addresses& from = Base::addresses_of(i, kept_);
      if constexpr (kResetsAhead) reset_pair(p, *from.reset);
      load(i, from, steps());
      if (kToInitial && steps() == 1) inputs_[i].reset = 0;
    }
    vectors_ = lane_row < map_.end_row ? map_.vectors : 0;
    return {args_.h0 + static_cast<int64_t>(lane_row) * width() + map_.element, args_.h0 ? vectors_ : 0,
            false, map_.element, map_.g};
  }

  __device__ __forceinline__ RowSource<T> next_source(RowSource<T> source) {
    source.row = states_;
    source.vectors = vectors_;
    source.exchanged = true;
    states_ += to_next_ * width();
    return source;
  }

  __device__ __forceinline__ void step_pair(int i, const float* sums) {
    OneTilePair& p = pairs_[i];
    p.h = run_cell(sums, i, p.states, p.h, p.saved);
    pass_on(i);
  }
  // All pairs at once.
  __device__ __forceinline__ void step_pairs(const float* sums) {
    using A = typename Base::UnitsPack;
    CellInputs<Cell, A> in;
    A states[at_least_one(kStates)], saved[at_least_one(Cell::kSaved)];
    in.units = Base::row_units_;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      CellInputs<Cell, float> of_pair[2];
      float of_unit[2][at_least_one(kStates)];
      load_pair(of_pair, of_unit, sums, i, pairs_[i].states, pairs_[i].h);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Base::put(in, 2 * i + e, of_pair[e]);
        Base::put(states, 2 * i + e, of_unit[e]);
      }
    }
    const A h = run_cell(in, states, saved);
    Base::row_units_ = in.units;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      OneTilePair& p = pairs_[i];
#pragma unroll
      for (int e = 0; e < 2; ++e) Base::take(p.saved[e], saved, 2 * i + e);
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        p.states[s] = make_float2(states[s].of[2 * i], states[s].of[2 * i + 1]);
      }
      p.h = new_h(h.of[2 * i], h.of[2 * i + 1]);
      pass_on(i);
    }
  }
  template <typename A, int kOfStates, int kOfSaved>
  __device__ __forceinline__ A run_cell(const CellInputs<Cell, A>& in, A (&states)[kOfStates],
                                        A (&saved)[kOfSaved]) {
    using Math = PackMath<typename Config::Math>;
    if constexpr (Base::kCalls > 0) {
      const typename Base::OwnProducts products = {*this};
      return Cell::template forward<Math>(in, states, saved, products);
    } else {
      return Cell::template forward<Math>(in, states, saved);
    }
  }
  __device__ __forceinline__ void pass_on(int i) {
    const OneTilePair& p = pairs_[i];
    const float2 sent = kResetsAhead ? h_after_reset(p, inputs_[i].reset) : p.h;
    Base::exchange(Base::addresses_of(i, kept_).output, kToInitial ? sent : p.h, sent, p.exists, i, 0);
  }

  // Saves the step's values and loads those of the next step, if any are left.
  __device__ __forceinline__ void prepare_pair(int i, int left) {
    OneTilePair& p = pairs_[i];
    auto&& to = Base::addresses_of(i, kept_);
    if (p.exists) store_output_apart(to, unit(i), p.h, p.states);
    if (saves_ && p.exists) save(to, p.saved);
    to.move(to_next_, width());
    if (kResetsAhead && left > 0) reset_pair(p, inputs_[i].reset);
    if (p.exists && left > 0) load(i, to, left);
    if (kToInitial && left == 1) inputs_[i].reset = 0;  // the last step hands on what it has computed
  }
  // Loads the inputs of the first of the steps that are left.
  __device__ __forceinline__ void load(int i, Addresses from, int left) {
    if (kResetsAhead && left > 1) from.reset += to_next_;
    load(inputs_[i], from);
  }
  __device__ __forceinline__ static float2 h_after_reset(const OneTilePair& p, Reset reset) {
    return kToInitial ? Base::after_reset(reset, p.h, p.h0) : Base::masked(reset, p.h);
  }
  __device__ __forceinline__ static void reset_pair(OneTilePair& p, Reset reset) {
    p.h = h_after_reset(p, reset);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      p.states[s] =
          kToInitial ? Base::after_reset(reset, p.states[s], p.states0[s]) : Base::masked(reset, p.states[s]);
    }
  }

  __device__ __forceinline__ void end_one_tile(const RowSource<T>&) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const OneTilePair& p = pairs_[i];
      if (!p.exists || steps() == 0) continue;
      store_last(p.at, p.h, p.states);
    }
  }

  // ---- any number of rows

  __device__ __forceinline__ void load_carried() {
    Base::for_all_pairs([&](int i, int b) {
      const int64_t at = static_cast<int64_t>(b) * width() + unit(i);
      States states;
      load_states(states, at, true);
#pragma unroll
      for (int s = 0; s < kStates; ++s) live_states(i, b, s) = states[s];
      if (Cell::kReadsH) live_states(i, b, kStates) = first_h(at);
    });
  }
  __device__ __forceinline__ void store_carried() {}  // step_rows has stored each row's last states

  __device__ __forceinline__ void load_inputs(const StepRows& rows, int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, tile);
      if (map_.has_pair(i, hidden_) && b < min(map_.end_row, rows.count)) {
        load(inputs_[i], addresses(rows.first + b, unit(i)));
      }
    }
  }

  __device__ __forceinline__ RowSource<T> source_of(const StepRows& previous, const StepRows& current,
                                                    int tile) const {
    const int b = map_.first_row + tile * kRowTile + map_.g;
    const bool exchanged = b < min(map_.end_row, previous.count);
    const T* row = exchanged ? args_.output + (previous.first + b) * width()
                             : args_.h0 + static_cast<int64_t>(b) * width();
    const bool has_row = b < min(map_.end_row, current.count) && (exchanged || args_.h0);
    return {row + map_.element, has_row ? map_.vectors : 0, exchanged, map_.element, b - map_.first_row};
  }

  __device__ __forceinline__ void step_rows(const float* sums, const StepRows&, const StepRows& current,
                                            const StepRows& next, int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, tile), j = unit(i);
      if (!map_.has_pair(i, hidden_) || b >= min(map_.end_row, current.count)) continue;
      const int64_t at = static_cast<int64_t>(b) * width() + j;
      const bool goes_on = b < next.count;
      Reset reset = 0;  // the reset before the next step
      if (kToInitial && goes_on) reset = resets()[next.first + b];
      Saved saved;
      States states;
#pragma unroll
      for (int s = 0; s < kStates; ++s) states[s] = live_states(i, b, s);
      const float2 old_h = Cell::kReadsH ? live_states(i, b, kStates) : make_float2(0, 0);
      const float2 h = run_cell(sums, i, states, old_h, saved);
      const bool resets = kToInitial && reset != 0;
      const float2 next_h = resets ? Base::after_reset(reset, h, first_h(at)) : h;
      const Addresses to = addresses(current.first + b, j);
      Base::exchange(to.output, next_h, next_h, true, i, 0);
      store_output_apart(to, j, h, states);
      if (saves_) save(to, saved);
      if (!goes_on) store_last(at, h, states);
      if (resets) reset_states(reset, at, states);
#pragma unroll
      for (int s = 0; s < kStates; ++s) live_states(i, b, s) = states[s];
      if (Cell::kReadsH) live_states(i, b, kStates) = next_h;
    }
  }
  __device__ __forceinline__ void reset_states(Reset reset, int64_t at, States& states) const {
    States states0;
    load_states(states0, at, true);
#pragma unroll
    for (int s = 0; s < kStates; ++s) states[s] = Base::after_reset(reset, states[s], states0[s]);
  }

  // ---- a pair

  __device__ __forceinline__ void load_states(States& states, int64_t at, bool exists) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      states[s] = make_float2(0, 0);
      if (!exists || !args_.states0) continue;
      states[s] =
          read_state_pair<T>(args_.states0, Base::state_at(s, at, args_.steps.batch), args_.narrow_states);
    }
  }
  __device__ __forceinline__ void store_last(int64_t at, float2 h, const States& states) const {
    write_pair(args_.h_n + at, h.x, h.y);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      write_state_pair<T>(args_.states_n, Base::state_at(s, at, args_.steps.batch), args_.narrow_states,
                          states[s]);
    }
  }

  __device__ __forceinline__ void store_output_apart(const Addresses& to, int j, float2 h,
                                                     const States& states) const {
    if constexpr (Config::kShape.cell.has_output_apart()) {
      constexpr int kCount = kOutputsOf<Cell>;
      T* const at = args_.output_apart + (to.output - args_.output) * kCount - (kCount - 1) * j;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float2 y = output_of<Cell>(h, states, i);
        write_pair(at + i * width(), y.x, y.y);
      }
    }
  }

  // What a step of both units reads.
  __device__ __forceinline__ void load_pair(CellInputs<Cell, float> (&in)[2],
                                            float (&of_unit)[2][at_least_one(kStates)], const float* sums,
                                            int i, States& states, float2 old_h) const {
    Base::widen_inputs(in, i, inputs_[i].steps);
    float2 products[Config::kOutputs];
#pragma unroll
    for (int out = 0; out < Config::kOutputs; ++out) products[out] = Base::total(sums, out, i);
    if constexpr (Config::kHasResets && !kResetsAhead) {
      Base::keep(inputs_[i].reset, products);
      Base::keep(inputs_[i].reset, states);
      old_h = Base::masked(inputs_[i].reset, old_h);
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const float2 sum = products[gate], projection = inputs_[i].projections[gate].widen();
      if constexpr (Cell::kSeparate) {
        in[0].x[gate] = projection.x, in[1].x[gate] = projection.y;
        in[0].r[gate] = sum.x, in[1].r[gate] = sum.y;
      } else {
        in[0].x[gate] = sum.x + projection.x;
        in[1].x[gate] = sum.y + projection.y;
      }
    }
#pragma unroll
    for (int p = 0; p < Config::kOutputs - kGates; ++p) {
      in[0].products[p] = products[kGates + p].x, in[1].products[p] = products[kGates + p].y;
    }
    if constexpr (Cell::kReadsH) in[0].h = old_h.x, in[1].h = old_h.y;
#pragma unroll
    for (int s = 0; s < kStates; ++s) of_unit[0][s] = states[s].x, of_unit[1][s] = states[s].y;
  }

  // Updates the states and returns h.
  __device__ __forceinline__ float2 run_cell(const float* sums, int i, States& states, float2 old_h,
                                             Saved& saved) const {
    CellInputs<Cell, float> in[2];
    float of_unit[2][at_least_one(kStates)], h[2];
    load_pair(in, of_unit, sums, i, states, old_h);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      h[e] = Cell::template forward<typename Config::Math>(in[e], of_unit[e], saved[e]);
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) states[s] = make_float2(of_unit[0][s], of_unit[1][s]);
    return new_h(h[0], h[1]);
  }
  // Rounded to T if the cell reads it in the next step.
  __device__ __forceinline__ static float2 new_h(float first, float second) {
    return Cell::kReadsH ? Pair<T>::of(first, second).widen() : make_float2(first, second);
  }

  __device__ __forceinline__ void save(const Addresses& to, const Saved& saved) const {
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      T* const plane = v < kSavedInGates ? reinterpret_cast<T*>(to.gates + v * width())
                                         : to.extra + (v - kSavedInGates) * width();
      write_pair(plane, saved[0][v], saved[1][v]);
    }
  }

  const Arguments& args_;
  const bool saves_ = args_.save;
  int64_t to_next_;  // rows from a step to the next one
  const T* states_;  // the lane's row of the exchanged states, and its vectors there
  int vectors_;
  OneTilePair pairs_[kPairs];
  Addresses kept_[kKept];
  Inputs inputs_[kPairs];  // what the next tile reads
};

template <class Config>
using ForwardSteps = typename Conditional<Config::kVariant.row_per_block, RowPerBlockForward<Config>,
                                          PersistentForward<Config>>::type;

template <class Config>
__global__ void __launch_bounds__(Config::kShape.threads(), Config::kShape.blocks())
    recurrence_persistent_forward_kernel(
        const __grid_constant__ PerDirection<SequenceForwardArguments<typename Config::T>> sequences,
        const GroupGrid grid) {
  run_persistent<Config, ForwardSteps<Config>>(sequences, grid);
}

}  // namespace lltm_ext
