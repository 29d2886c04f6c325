// The persistent kernel backward: steps of a sequence in one launch (steps.cuh). It computes the gates'
// gradients; matrix products after it compute those of the input and the weights. Blocks exchange the gates'
// gradients, because each unit's gradient of h needs all of them.
#pragma once

#include "recurrence/persistent/steps.cuh"

namespace lltm_ext {

template <class Config>
constexpr int kBackwardPlanes =
    Config::kGates + Config::kExtra + 1 + (Config::kThrough == ExchangeThrough::kL2 ? Config::kGates : 0);

template <class Config>
class PersistentBackward
    : public PersistentSteps<PersistentBackward<Config>, Config, kBackwardPlanes<Config>> {
  using Base = PersistentSteps<PersistentBackward, Config, kBackwardPlanes<Config>>;
  friend Base;
  using Base::hidden_, Base::map_, Base::row, Base::unit, Base::cell, Base::has_pair, Base::kExtra,
      Base::kGates, Base::kPairs;
  using typename Base::Cell, typename Base::Exchange, typename Base::T;

 public:
  using Arguments = SequenceBackwardArguments<T>;

  __device__ PersistentBackward(const Arguments& arguments, const GroupGrid& grid,
                                const typename Base::Storage& storage)
      : Base(grid, arguments.steps.batch, arguments.hidden, storage), args_(arguments) {
    load_weights<Config>(Base::weights_, map_, hidden_, static_cast<size_t>(8) * kGates * hidden_,
                         [&](int gate, int unit) {
                           return args_.weight_t + (static_cast<int64_t>(unit) * kGates + gate) * hidden_;
                         });
    typename Base::Prefetcher::Arrays arrays(Base::prefetcher_, map_, hidden_);
    arrays.add(args_.gates, kGates);
    arrays.add(args_.extra, kExtra);
    arrays.add(args_.grad_output, 1);
    if (Exchange::kThroughL2) arrays.add(args_.grad_gates - args_.first_row * kGates * hidden_, kGates);
  }

 private:
  static constexpr bool kSendsLastStep = true;  // the gradient of h before the first step needs it

  __device__ __forceinline__ int steps() const { return args_.end - args_.begin; }
  // The last turn only computes the gradient of h before the first step.
  __device__ __forceinline__ int turns() const { return steps() + 1; }
  __device__ __forceinline__ StepRows rows_of(int n) const {
    return n < steps() ? args_.steps.at(args_.end - 1 - n) : StepRows{0, 0};
  }
  __device__ __forceinline__ T* grad_gates(int64_t row) const {
    return args_.grad_gates + (row - args_.first_row) * kGates * hidden_;
  }

  // What backward needs for one pair in a step, and where it is.
  struct Inputs {
    Pair<T> saved[Cell::kSaved], grad_output;
  };
  struct InputAddresses {
    const T *gates, *extra, *grad_output;
    __device__ __forceinline__ void move(int64_t elements) {
      gates += elements * kGates;
      extra += elements * kExtra;
      grad_output += elements;
    }
  };
  __device__ __forceinline__ InputAddresses inputs_at(int64_t row, int j) const {
    return {args_.gates + row * kGates * hidden_ + j, args_.extra + row * kExtra * hidden_ + j,
            args_.grad_output + row * hidden_ + j};
  }
  __device__ __forceinline__ void load(Inputs& inputs, const InputAddresses& at) const {
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      inputs.saved[v] = read_pair(v < kGates ? at.gates + v * hidden_ : at.extra + (v - kGates) * hidden_);
    }
    inputs.grad_output = args_.grad_output ? read_pair(at.grad_output) : Pair<T>::of(0, 0);
  }

  // ---- one row tile

  struct OneTilePair {
    bool exists;
    int64_t at;  // in [B, H]
    T* grad_gates;
    InputAddresses inputs;
    float2 grad_c, grad_h;  // grad_h: of the state after the last step, then 0
    float grads[2][kGates];
  };

  __device__ __forceinline__ RowSource<T> begin_one_tile() {
    const int64_t first = args_.steps.at(args_.end - 1).first;
    to_next_ = args_.steps.reverse ? args_.steps.batch : -args_.steps.batch;
    gradients_ = grad_gates(first + map_.first_row + map_.g) + map_.element;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      OneTilePair& p = pairs_[i];
      const int b = row(i, 0), j = unit(i);
      p.exists = has_pair(i, b);
      p.at = static_cast<int64_t>(b) * hidden_ + j;
      p.inputs = inputs_at(first + b, j);
      p.grad_gates = grad_gates(first + b) + j;
      p.grad_c = p.grad_h = make_float2(0, 0);
      if (!p.exists) continue;
      p.grad_c = read_pair(args_.grad_c + p.at).widen();
      p.grad_h = read_pair(args_.grad_h + p.at).widen();
      load(inputs_[i], p.inputs);
    }
    return {nullptr, 0, false, map_.element, map_.g};
  }

  __device__ __forceinline__ RowSource<T> next_source(const RowSource<T>&) {
    const T* const row = gradients_;
    gradients_ += to_next_ * kGates * hidden_;
    const bool has_row = map_.first_row + map_.g < map_.end_row;
    return {row, has_row ? map_.vectors : 0, true, map_.element, map_.g};
  }

  __device__ __forceinline__ void step_pair(int i, const float* sums) {
    OneTilePair& p = pairs_[i];
    const float2 sum = Base::total(sums, 0, i);
    run_cell(i, make_float2(sum.x + p.grad_h.x, sum.y + p.grad_h.y), p.grad_c, p.grads);
    exchange_gates(p.grad_gates, p.grads, p.exists, i);
  }

  // Moves on to step n.
  __device__ __forceinline__ void prepare_pair(int i, int n) {
    OneTilePair& p = pairs_[i];
    p.grad_h = make_float2(0, 0);
    add_grad_bias(i, p.grads);
    p.grad_gates += to_next_ * kGates * hidden_;
    p.inputs.move(to_next_ * hidden_);
    if (p.exists && n < steps()) load(inputs_[i], p.inputs);
  }

  // The gradients of the states before the first step.
  __device__ __forceinline__ void end_one_tile(const RowSource<T>& source) {
    const float* const sums = Base::multiply_tile(steps() & 1, source);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const OneTilePair& p = pairs_[i];
      if (!p.exists) continue;
      const float2 sum = Base::total(sums, 0, i);
      write_pair(args_.grad_h + p.at, sum.x, sum.y);
      write_pair(args_.grad_c + p.at, p.grad_c.x, p.grad_c.y);
    }
    store_grad_bias();
  }

  // ---- any number of rows

  __device__ __forceinline__ float* grad_c(int i, int b) const {
    return args_.grad_c + static_cast<int64_t>(b) * hidden_ + unit(i);
  }
  __device__ __forceinline__ void load_cells() {
    Base::for_all_cells([&](int i, int b) { *cell(i, b) = read_pair(grad_c(i, b)).widen(); });
  }
  __device__ __forceinline__ void store_cells() {
    Base::for_all_cells([&](int i, int b) { write_pair(grad_c(i, b), cell(i, b)->x, cell(i, b)->y); });
    store_grad_bias();
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
      T* const stored = args_.grad_h + static_cast<int64_t>(b) * hidden_ + j;
      const float2 grad_h = b < previous.count ? Base::total(sums, 0, i) : read_pair(stored).widen();
      if (b >= current.count) {
        if (b < previous.count) write_pair(stored, grad_h.x, grad_h.y);
        continue;
      }
      float grads[2][kGates];
      float2 c = *cell(i, b);
      run_cell(i, grad_h, c, grads);
      *cell(i, b) = c;
      exchange_gates(grad_gates(current.first + b) + j, grads, true, i);
      add_grad_bias(i, grads);
    }
  }

  // ---- a pair

  // Updates grad_c and computes the gradients of the gates.
  __device__ __forceinline__ void run_cell(int i, float2 grad_h, float2& grad_c, float (&grads)[2][kGates]) {
    float saved[2][Cell::kSaved];
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      const float2 value = inputs_[i].saved[v].widen();
      saved[0][v] = value.x;
      saved[1][v] = value.y;
    }
    using Math = typename Config::Math;
    const float2 grad_output = inputs_[i].grad_output.widen();
    Cell::template backward<Math>(saved[0], grad_h.x + grad_output.x, grad_c.x, grads[0]);
    Cell::template backward<Math>(saved[1], grad_h.y + grad_output.y, grad_c.y, grads[1]);
  }

  __device__ __forceinline__ void exchange_gates(T* address, const float (&grads)[2][kGates], bool exists,
                                                 int i) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      Base::exchange(address + gate * hidden_, grads[0][gate], grads[1][gate], exists, i, gate);
    }
  }

  __device__ __forceinline__ void add_grad_bias(int i, const float (&grads)[2][kGates]) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      grad_bias_[i][gate].x += grads[0][gate];
      grad_bias_[i][gate].y += grads[1][gate];
    }
  }

  __device__ void store_grad_bias() const {
    if (!args_.grad_bias) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, 0);
      if (!has_pair(i, b)) continue;
      float* const sums = args_.grad_bias + static_cast<int64_t>(b) * kGates * hidden_ + unit(i);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        float2* sum = reinterpret_cast<float2*>(sums + gate * hidden_);
        sum->x += grad_bias_[i][gate].x;
        sum->y += grad_bias_[i][gate].y;
      }
    }
  }

  const Arguments& args_;
  int64_t to_next_;     // rows to the next step's
  const T* gradients_;  // the lane's row of the exchanged gradients
  OneTilePair pairs_[kPairs];
  Inputs inputs_[kPairs];  // of the tile to come
  float2 grad_bias_[kPairs][kGates] = {};
};

template <class Config>
__global__ void __launch_bounds__(kBlockThreads, 1) recurrence_persistent_backward_kernel(
    const __grid_constant__ PerDirection<SequenceBackwardArguments<typename Config::T>> sequences,
    const GroupGrid grid) {
  run_persistent<PersistentBackward<Config>>(sequences, grid);
}

}  // namespace lltm_ext
