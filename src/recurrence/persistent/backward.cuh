// The persistent kernel backward: steps of a sequence in one launch (steps.cuh). It computes the gates'
// gradients; matrix products after it compute those of the input and the weights. Blocks exchange the gates'
// gradients, because each unit's gradient of h needs all of them.
#pragma once

#include "recurrence/persistent/row_per_block.cuh"
#include "recurrence/persistent/steps.cuh"

namespace lltm_ext {

template <class Config>
constexpr int kBackwardPlanes =
    Config::Cell::kSaved + Config::Cell::kStepInputs + kOutputsOf<typename Config::Cell> +
    (Config::kThrough == ExchangeThrough::kL2 ? Config::kGates + kProductsOf<typename Config::Cell> : 0);

template <class Config>
class PersistentBackward
    : public PersistentSteps<PersistentBackward<Config>, Config, kBackwardPlanes<Config>> {
  using Base = PersistentSteps<PersistentBackward, Config, kBackwardPlanes<Config>>;
  friend Base;
  using Base::hidden_, Base::width, Base::map_, Base::row, Base::unit, Base::live_states, Base::has_pair,
      Base::kSavedInGates, Base::kExtra, Base::kGates, Base::kKept, Base::kPairs, Base::kStates,
      Base::kStepInputs;
  using typename Base::Cell, typename Base::Exchange, typename Base::Reset, typename Base::T;

 public:
  using Arguments = SequenceBackwardArguments<T>;

  __device__ PersistentBackward(const Arguments& arguments, const GroupGrid& grid,
                                const typename Base::Storage& storage)
      : Base(grid, arguments.steps.batch, arguments.hidden / Config::kHeads, storage), args_(arguments) {
    constexpr int kBlocks = Config::kShape.cell.rows_of_weight_hh();
    Base::load_all_weights(static_cast<size_t>(8) * kBlocks * width(), [&](int block, int unit) {
      return args_.weight_t + (static_cast<int64_t>(unit) * kBlocks + block) * width();
    });
    Base::load_parameters(args_.parameters);
    typename Base::Prefetcher::Arrays arrays(Base::prefetcher_, map_, hidden_);
    arrays.add(args_.gates, kGates, kSavedInGates);
    if constexpr (kExtra > 0) arrays.add(args_.extra, kExtra);
    if constexpr (Cell::kStepInputs > 0) arrays.add(args_.step_inputs, Cell::kStepInputs);
    arrays.add(args_.grad_output, kStepOutputs);
    if (Exchange::kThroughL2) arrays.add(args_.grad_gates - args_.first_row * kGates * width(), kGates);
    if constexpr (Base::kCalls > 0) {
      Base::given_ = args_.grad_products - args_.first_row * kProductsOf<Cell> * width();
      if (Exchange::kThroughL2) arrays.add(Base::given_, kProductsOf<Cell>);
    }
  }

 private:
  static constexpr int kStepOutputs = kOutputsOf<Cell>;
  static constexpr bool kSendsLastStep = true;  // the gradient of h before the first step needs it

  __device__ __forceinline__ int steps() const { return args_.end - args_.begin; }
  // The last turn only computes the gradient of h before the first step.
  __device__ __forceinline__ int turns() const { return steps() + 1; }
  __device__ __forceinline__ StepRows rows_of(int n) const {
    return n < steps() ? args_.steps.at(args_.end - 1 - n) : StepRows{0, 0};
  }
  __device__ __forceinline__ T* grad_gates(int64_t row) const {
    return args_.grad_gates + (row - args_.first_row) * kGates * width();
  }

  __device__ __forceinline__ const Reset* resets() const { return static_cast<const Reset*>(args_.reset); }

  // What backward needs for one pair in a step, and where it is.
  struct Inputs {
    Pair<T> saved[at_least_one(Cell::kSaved)], steps[kStepInputs], grad_output[kStepOutputs];
    Reset reset;
  };
  struct InputAddresses {
    const T *gates, *extra, *steps, *grad_output;
    const Reset* reset;
    __device__ __forceinline__ void move(int64_t rows, int width) {
      gates += rows * width * kGates;
      extra += rows * width * kExtra;
      steps += rows * width * Cell::kStepInputs;
      grad_output += rows * width * kStepOutputs;
      reset += rows;
    }
  };
  struct Addresses {
    InputAddresses inputs;
    T* grad_gates;
    __device__ __forceinline__ void move(int64_t rows, int width) {
      inputs.move(rows, width);
      grad_gates += rows * width * kGates;
    }
  };
  __device__ __forceinline__ InputAddresses inputs_at(int64_t row, int j) const {
    return {args_.gates + row * kGates * width() + j, args_.extra + row * kExtra * width() + j,
            args_.step_inputs + row * Cell::kStepInputs * width() + j,
            args_.grad_output + row * kStepOutputs * width() + j, resets() + row};
  }
  __device__ __forceinline__ void load(Inputs& inputs, const InputAddresses& at) const {
    if constexpr (Config::kHasResets) inputs.reset = *at.reset;
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      inputs.saved[v] =
          read_pair(v < kSavedInGates ? at.gates + v * width() : at.extra + (v - kSavedInGates) * width());
    }
    Base::load_step_inputs(inputs.steps, at.steps);
    const T* gradient = at.grad_output;
#pragma unroll
    for (int o = 0; o < kStepOutputs; ++o, gradient += width()) {
      inputs.grad_output[o] = has_grad_output_ ? read_pair(gradient) : Pair<T>::of(0, 0);
    }
  }

  using Gradients = CellGradients<Cell, float>[2];  // one for each unit of a pair
  using States = float2[at_least_one(kStates)];

  // ---- one row tile

  struct OneTilePair {
    bool exists;
    int64_t at;  // offset in [B, H]
    States grad_states;
    float2 grad_h;  // the gradient of h not through weights; at first, that after the last step
    Reset reset;    // that of the step computed last
    Gradients grads;
  };

  __device__ __forceinline__ const T* first_h() const { return nullptr; }  // the first step has no product
  __device__ __forceinline__ const Reset* first_reset() const { return nullptr; }
  __device__ __forceinline__ RowSource<T> begin_one_tile() {
    const int64_t first = args_.steps.at(args_.end - 1).first;
    to_next_ = args_.steps.reverse ? args_.steps.batch : -args_.steps.batch;
    gradients_ = grad_gates(first + map_.first_row + map_.g) + map_.element;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      OneTilePair& p = pairs_[i];
      const int b = row(i, 0), j = unit(i);
      p.exists = has_pair(i, b);
      p.at = static_cast<int64_t>(b) * width() + j;
      if (i < kKept) kept_[i] = {inputs_at(first + b, j), grad_gates(first + b) + j};
      p.grad_h = make_float2(0, 0);
      p.reset = 0;
#pragma unroll
      for (int s = 0; s < kStates; ++s) p.grad_states[s] = make_float2(0, 0);
      if (!p.exists) continue;
      load(inputs_[i], Base::addresses_of(i, kept_).inputs);
      if (args_.from_zeros) continue;
      load_grad_states(p.grad_states, p.at);
      p.grad_h = read_pair(args_.grad_h + p.at).widen();
      if (Cell::kReadsH) p.grad_h = add(p.grad_h, read_pair(args_.grad_own_h + p.at).widen());
    }
    return {nullptr, 0, false, map_.element, map_.g};
  }

  __device__ __forceinline__ RowSource<T> next_source(const RowSource<T>&) {
    const T* const row = gradients_;
    gradients_ += to_next_ * kGates * width();
    const bool has_row = map_.first_row + map_.g < map_.end_row;
    return {row, has_row ? map_.vectors : 0, true, map_.element, map_.g};
  }

  __device__ __forceinline__ void step_pair(int i, const float* sums) {
    OneTilePair& p = pairs_[i];
    run_cell(i, gradient_of_h(i, sums), p.grad_states, p.grads);
    exchange_gates(Base::addresses_of(i, kept_).grad_gates, p.grads, p.exists, i);
  }
  // All pairs at once.
  __device__ __forceinline__ void step_pairs(const float* sums) {
    using A = typename Base::UnitsPack;
    CellInputs<Cell, A> in;
    A saved[at_least_one(Cell::kSaved)], grad_states[at_least_one(kStates)], grad_h;
    CellGradients<Cell, A> grads;
    in.units = Base::row_units_;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      CellInputs<Cell, float> of_pair[2];
      float of_saved[2][at_least_one(Cell::kSaved)], of_unit[2][at_least_one(kStates)];
      const float2 of_h =
          load_pair(of_pair, of_saved, of_unit, i, gradient_of_h(i, sums), pairs_[i].grad_states);
      grad_h.of[2 * i] = of_h.x, grad_h.of[2 * i + 1] = of_h.y;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Base::put(in, 2 * i + e, of_pair[e]);
        Base::put(saved, 2 * i + e, of_saved[e]);
        Base::put(grad_states, 2 * i + e, of_unit[e]);
      }
    }
    run_cell(saved, in, grad_h, grad_states, grads);
    Base::row_units_ = in.units;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      OneTilePair& p = pairs_[i];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Base::take(p.grads[e].x, grads.x, 2 * i + e);
        Base::take(p.grads[e].r, grads.r, 2 * i + e);
        Base::take(p.grads[e].parameters, grads.parameters, 2 * i + e);
        if constexpr (Base::kCalls > 0) Base::take(p.grads[e].fed, grads.fed, 2 * i + e);
        p.grads[e].h = grads.h.of[2 * i + e];
      }
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        p.grad_states[s] = make_float2(grad_states[s].of[2 * i], grad_states[s].of[2 * i + 1]);
      }
      exchange_gates(Base::addresses_of(i, kept_).grad_gates, p.grads, p.exists, i);
    }
  }
  template <typename A, int kOfSaved, int kOfStates>
  __device__ __forceinline__ void run_cell(const A (&saved)[kOfSaved], const CellInputs<Cell, A>& in,
                                           const A& grad_h, A (&grad_states)[kOfStates],
                                           CellGradients<Cell, A>& grads) {
    using Math = PackMath<typename Config::Math>;
    if constexpr (Base::kCalls > 0) {
      const typename Base::OwnProducts products = {*this};
      Cell::template backward<Math>(saved, in, grad_h, grad_states, grads, products);
    } else {
      Cell::template backward<Math>(saved, in, grad_h, grad_states, grads);
    }
  }
  __device__ __forceinline__ float2 gradient_of_h(int i, const float* sums) {
    OneTilePair& p = pairs_[i];
    float2 through_weights = Base::total(sums, 0, i);
    if constexpr (Config::kHasResets) {
      if (p.exists) collect_initial(p.reset, 0, p.at, through_weights);
      through_weights = Base::masked(p.reset, through_weights);
      p.reset = inputs_[i].reset;
    }
    return add(through_weights, p.grad_h);
  }

  // Stores the step's values and loads those of the next step, if any are left.
  __device__ __forceinline__ void prepare_pair(int i, int left) {
    OneTilePair& p = pairs_[i];
    const bool masks = !kResetsToInitial<Cell> || p.exists;
    if (Config::kHasResets && masks) mask_gradients(p.reset, p.at, p.grad_states, p.grads);
    p.grad_h = make_float2(p.grads[0].h, p.grads[1].h);
    add_sums(i, p.grads);
    auto&& at = Base::addresses_of(i, kept_);
    if (p.exists) store_projections(at.grad_gates - args_.grad_gates, p.grads);
    if constexpr (Base::kCalls > 0) {
      if (p.exists) store_fed(Base::step_row_ - args_.first_row + row(i, 0), unit(i), p.grads);
    }
    at.move(to_next_, width());
    if (p.exists && left > 0) load(inputs_[i], at.inputs);
  }

  // Stores what the products with the cell's own weights took, for their gradients.
  __device__ __forceinline__ void store_fed(int64_t row, int j, const Gradients& grads) const {
#pragma unroll
    for (int f = 0; f < kFedOf<Cell>; ++f) {
      write_pair(args_.fed + (row * kFedOf<Cell> + f) * width() + j, grads[0].fed[f], grads[1].fed[f]);
    }
  }

  // Computes and stores the gradients of the states before the first step.
  __device__ __forceinline__ void end_one_tile(const RowSource<T>& source) {
    const float* const sums = Base::multiply_tile(Base::product_of(steps(), 0) & 1, source);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const OneTilePair& p = pairs_[i];
      if (!p.exists) continue;
      float2 sum = Base::total(sums, 0, i);
      if constexpr (Config::kHasResets) {
        collect_initial(p.reset, 0, p.at, sum);
        sum = Base::masked(p.reset, sum);
      }
      write_pair(args_.grad_h + p.at, sum.x, sum.y);
      if (Cell::kReadsH) write_pair(args_.grad_own_h + p.at, p.grad_h.x, p.grad_h.y);
      store_grad_states(p.grad_states, p.at);
    }
    store_sums();
  }

  // ---- any number of rows

  __device__ __forceinline__ void load_carried() {
    Base::for_all_pairs([&](int i, int b) {
      const int64_t at = static_cast<int64_t>(b) * width() + unit(i);
      States grad_states = {};
      if (!args_.from_zeros) load_grad_states(grad_states, at);
#pragma unroll
      for (int s = 0; s < kStates; ++s) live_states(i, b, s) = grad_states[s];
      if constexpr (Cell::kReadsH) {
        live_states(i, b, kStates) =
            args_.from_zeros ? make_float2(0, 0) : read_pair(args_.grad_own_h + at).widen();
      }
    });
  }
  __device__ __forceinline__ void store_carried() {
    Base::for_all_pairs([&](int i, int b) {
      const int64_t at = static_cast<int64_t>(b) * width() + unit(i);
      States grad_states;
#pragma unroll
      for (int s = 0; s < kStates; ++s) grad_states[s] = live_states(i, b, s);
      store_grad_states(grad_states, at);
      if constexpr (Cell::kReadsH) {
        const float2 grad_h = live_states(i, b, kStates);
        write_pair(args_.grad_own_h + at, grad_h.x, grad_h.y);
      }
    });
    store_sums();
  }

  __device__ __forceinline__ void load_inputs(const StepRows& rows, int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, tile);
      if (map_.has_pair(i, hidden_) && b < min(map_.end_row, rows.count)) {
        load(inputs_[i], inputs_at(rows.first + b, unit(i)));
      }
    }
  }

  __device__ __forceinline__ RowSource<T> source_of(const StepRows& previous, const StepRows&,
                                                    int tile) const {
    const int b = map_.first_row + tile * kRowTile + map_.g;
    const bool exchanged = b < min(map_.end_row, previous.count);
    return {grad_gates(previous.first + b) + map_.element, exchanged ? map_.vectors : 0, exchanged,
            map_.element, b - map_.first_row};
  }

  // A row that `previous` lacks takes its gradient of h from memory, and leaves it there if `current` lacks
  // it.
  __device__ __forceinline__ void step_rows(const float* sums, const StepRows& previous,
                                            const StepRows& current, const StepRows&, int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, tile), j = unit(i);
      if (!has_pair(i, b)) continue;
      const int64_t at = static_cast<int64_t>(b) * width() + j;
      T* const stored = args_.grad_h + at;
      float2 grad_h = make_float2(0, 0);
      if (b < previous.count) {
        grad_h = Base::total(sums, 0, i);
      } else if (!args_.from_zeros) {
        grad_h = read_pair(stored).widen();
      }
      if constexpr (Config::kHasResets) {
        if (b < previous.count) {
          const Reset reset = resets()[previous.first + b];
          collect_initial(reset, 0, at, grad_h);
          grad_h = Base::masked(reset, grad_h);
        }
      }
      if (b >= current.count) {
        if (b < previous.count) write_pair(stored, grad_h.x, grad_h.y);
        continue;
      }
      Gradients grads;
      States grad_states;
#pragma unroll
      for (int s = 0; s < kStates; ++s) grad_states[s] = live_states(i, b, s);
      if (Cell::kReadsH) grad_h = add(grad_h, live_states(i, b, kStates));
      run_cell(i, grad_h, grad_states, grads);
      if constexpr (Config::kHasResets) mask_gradients(inputs_[i].reset, at, grad_states, grads);
#pragma unroll
      for (int s = 0; s < kStates; ++s) live_states(i, b, s) = grad_states[s];
      if (Cell::kReadsH) live_states(i, b, kStates) = make_float2(grads[0].h, grads[1].h);
      T* const to = grad_gates(current.first + b) + j;
      exchange_gates(to, grads, true, i);
      store_projections(to - args_.grad_gates, grads);
      add_sums(i, grads);
    }
  }

  // ---- a pair

  __device__ __forceinline__ static float2 add(float2 a, float2 b) {
    return make_float2(a.x + b.x, a.y + b.y);
  }

  __device__ __forceinline__ void load_grad_states(States& states, int64_t at) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      states[s] = read_pair(args_.grad_states + Base::state_at(s, at, args_.steps.batch)).widen();
    }
  }
  __device__ __forceinline__ void store_grad_states(const States& states, int64_t at) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      write_pair(args_.grad_states + Base::state_at(s, at, args_.steps.batch), states[s].x, states[s].y);
    }
  }

  // What a step of both units reads. Returns the gradient of h with that of the output, if it is one.
  __device__ __forceinline__ float2 load_pair(CellInputs<Cell, float> (&in)[2],
                                              float (&saved)[2][at_least_one(Cell::kSaved)],
                                              float (&of_unit)[2][at_least_one(kStates)], int i,
                                              float2 grad_h, States& grad_states) const {
    Base::widen_inputs(in, i, inputs_[i].steps);
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      const float2 value = inputs_[i].saved[v].widen();
      saved[0][v] = value.x;
      saved[1][v] = value.y;
    }
#pragma unroll
    for (int o = 0; o < kStepOutputs; ++o) {
      float2& of_output = gradient_of_output<Cell>(grad_h, grad_states, o);
      of_output = add(of_output, inputs_[i].grad_output[o].widen());
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) of_unit[0][s] = grad_states[s].x, of_unit[1][s] = grad_states[s].y;
    return grad_h;
  }

  // Updates the gradients of the states and computes those of what the cell reads.
  __device__ __forceinline__ void run_cell(int i, float2 grad_h, States& grad_states, Gradients& grads) {
    CellInputs<Cell, float> in[2];
    float saved[2][at_least_one(Cell::kSaved)], of_unit[2][at_least_one(kStates)];
    grad_h = load_pair(in, saved, of_unit, i, grad_h, grad_states);
    using Math = typename Config::Math;
    Cell::template backward<Math>(saved[0], in[0], grad_h.x, of_unit[0], grads[0]);
    Cell::template backward<Math>(saved[1], in[1], grad_h.y, of_unit[1], grads[1]);
#pragma unroll
    for (int s = 0; s < kStates; ++s) grad_states[s] = make_float2(of_unit[0][s], of_unit[1][s]);
  }

  // Scales what reaches the previous states by what the row kept of them.
  __device__ __forceinline__ void mask_gradients(Reset reset, int64_t at, States& grad_states,
                                                 Gradients& grads) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) collect_initial(reset, 1 + s, at, grad_states[s]);
    Base::keep(reset, grad_states);
    if constexpr (Cell::kReadsH) {
      collect_initial(reset, 0, at, make_float2(grads[0].h, grads[1].h));
#pragma unroll
      for (int e = 0; e < 2; ++e) grads[e].h = scale_by_mask(mask_of(reset), grads[e].h);
    }
  }
  // Adds what a gradient of h (plane 0) or of a state (planes from 1 on) has of the initial ones. Resets are
  // rare, so this is a branch to memory, not another value that every step carries.
  __device__ __forceinline__ void collect_initial(Reset reset, int plane, int64_t at, float2 gradient) const {
    if (!kResetsToInitial<Cell> || reset == 0) return;
    float2* const to =
        reinterpret_cast<float2*>(args_.grad_initial + Base::state_at(plane, at, args_.steps.batch));
    *to = add(*to, make_float2(scale_by_mask(reset, gradient.x), scale_by_mask(reset, gradient.y)));
  }

  __device__ __forceinline__ void exchange_gates(T* address, const Gradients& grads, bool exists, int i) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const float2 x = make_float2(grads[0].product(gate), grads[1].product(gate));
      Base::exchange(address + gate * width(), x, x, exists, i, gate);
    }
  }
  // Stores the gradients of the projections if they are not those of the products.
  __device__ __forceinline__ void store_projections(int64_t at, const Gradients& grads) const {
    if constexpr (Cell::kSeparate) {
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        write_pair(args_.grad_projections + at + gate * width(), grads[0].x[gate], grads[1].x[gate]);
      }
    }
  }

  __device__ __forceinline__ void add_sums(int i, const Gradients& grads) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      float2& sum = sums_of_rows_[i % kKept][gate];
      sum = add(sum, make_float2(grads[0].x[gate], grads[1].x[gate]));
    }
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p) {
      float2& sum = sums_of_rows_[i % kKept][kGates + p];
      sum = add(sum, make_float2(grads[0].parameters[p], grads[1].parameters[p]));
    }
  }

  __device__ void store_sums() const {
    if (!args_.grad_sums) return;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int b = row(i, 0);
      if (!has_pair(i, b)) continue;
      float* const sums = args_.grad_sums + static_cast<int64_t>(b) * kSums * width() + unit(i);
#pragma unroll
      for (int sum = 0; sum < kSums; ++sum) {
        float2* const to = reinterpret_cast<float2*>(sums + sum * width());
        *to = add(*to, sums_of_rows_[i][sum]);
      }
    }
  }

  static constexpr int kSums = Config::kShape.cell.sums();
  const Arguments& args_;
  const bool has_grad_output_ = args_.grad_output != nullptr;
  int64_t to_next_;     // rows from a step to the next one computed
  const T* gradients_;  // the lane's row of the exchanged gradients
  OneTilePair pairs_[kPairs];
  Addresses kept_[kKept];
  Inputs inputs_[kPairs];  // what the next tile reads
  float2 sums_of_rows_[kKept][kSums] = {};
};

template <class Config>
using BackwardSteps = typename Conditional<Config::kVariant.row_per_block, RowPerBlockBackward<Config>,
                                           PersistentBackward<Config>>::type;

template <class Config>
__global__ void __launch_bounds__(Config::kShape.threads(), Config::kShape.blocks())
    recurrence_persistent_backward_kernel(
        const __grid_constant__ PerDirection<SequenceBackwardArguments<typename Config::T>> sequences,
        const GroupGrid grid) {
  run_persistent<Config, BackwardSteps<Config>>(sequences, grid);
}

}  // namespace lltm_ext
