// The persistent kernels of small layers: a block has all units and one row of the batch. Nothing is
// exchanged between blocks, no row of a tile is empty, and a step has one barrier. They take any number of
// units.
//
// Eight lanes share the products of two units. Each multiplies an eighth of K by both units' weights, which
// it holds in registers. Lanes of a single unit would read shared memory twice as often, and wait for it. The
// lanes add up their sums so that four of them get those of a unit, and all four compute the cell. Half types
// are multiplied in float32.
#pragma once

#include "recurrence/persistent/block.cuh"

namespace lltm_ext {

// What both directions share. kInputs values of every unit are multiplied in a step.
template <class Config>
class RowPerBlock {
 public:
  using Storage = float*;  // [2][kInputs][kUnits]

 protected:
  using T = typename Config::T;
  using Cell = typename Config::Cell;
  using Reset = typename Config::Reset;
  using Projection = typename Config::Projection;
  using Math = typename Config::Math;
  static constexpr int kGates = Config::kGates, kStates = Cell::kStates;
  static constexpr int kSavedInGates = Config::kSavedInGates, kExtra = Config::kExtra;
  static constexpr int kInputs = Config::kInputs, kOutputs = Config::kOutputs;
  static constexpr int kUnits = Config::kShape.units();
  static constexpr int kLanes = 2 * kLanesOfUnit;         // of a product
  static constexpr int kVectors = kUnits / (4 * kLanes);  // a lane's vectors of four values
  static constexpr int kStepInputs = at_least_one(Cell::kStepInputs);

  __device__ RowPerBlock(const StepOrder& order, int hidden, Storage values)
      : hidden_(hidden),
        lane_(threadIdx.x % kLanes),
        unit_(threadIdx.x / kLanesOfUnit),
        row_(static_cast<int>(blockIdx.x)),
        batch_(order.batch),
        values_(values) {
    for (int i = threadIdx.x; i < 2 * kInputs * kUnits; i += Config::kShape.threads()) values_[i] = 0;
  }

  __device__ bool exists() const { return unit_ < hidden_; }
  // Whether this lane stores what all four have computed.
  __device__ bool stores() const { return exists() && lane_ % kLanesOfUnit == 0; }

  // Where the unit is in [rows, planes, H], and in [S, B, H].
  template <typename X>
  __device__ X* plane(X* base, int64_t row, int planes, int plane) const {
    return base + (row * planes + plane) * hidden_ + unit_;
  }
  template <typename X>
  __device__ X* state(X* base, int state) const {
    return plane(base, int64_t{state} * batch_ + row_, 1, 0);
  }

  // row(gate, unit) points to a unit's weights of a gate, which need not be aligned. A lane's first unit is
  // its own, the second that of the other four lanes.
  template <class Row>
  __device__ __forceinline__ void load_weights(Row&& row) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int other = 0; other < 2; ++other) {
        const int unit = unit_ ^ other;
        const T* const from = row(gate, unit);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int first = 4 * (v * kLanes + lane_);
          const auto value = [&](int k) { return unit < hidden_ && k < hidden_ ? widen(from[k]) : 0; };
          weights_[gate][other][v] = {value(first), value(first + 1), value(first + 2), value(first + 3)};
        }
      }
    }
  }
  __device__ __forceinline__ void load_constants(const T* parameters) {
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p) {
      in_.parameters[p] = exists() ? widen(*plane(parameters, 0, Cell::kParameters, p)) : 0;
    }
  }
  // What a step reads is widened where it is used: a conversion where it is loaded would wait for it there.
  __device__ __forceinline__ void load_step_inputs(T (&to)[kStepInputs], const T* at) const {
#pragma unroll
    for (int k = 0; k < Cell::kStepInputs; ++k) to[k] = at[k * hidden_];
  }
  __device__ __forceinline__ void set_step_inputs(const T (&from)[kStepInputs]) {
#pragma unroll
    for (int k = 0; k < Cell::kStepInputs; ++k) in_.steps[k] = widen(from[k]);
  }

  // Two buffers of values, of which a step reads one and writes the other. An address that changes from step
  // to step stays in a register.
  struct Buffers {
    const float* from;  // the lane's first value
    float* to;          // the unit's first value
    int to_next = kInputs * kUnits;
    __device__ __forceinline__ void swap() {
      from += to_next;
      to -= to_next;
      to_next = -to_next;
    }
  };
  __device__ Buffers buffers() const { return {values_ + 4 * lane_, values_ + kInputs * kUnits + unit_}; }

  // sums[i] = the unit's weights of output i times the values, added up over all inputs.
  __device__ __forceinline__ void multiply(float (&sums)[kOutputs], const float* lane_values) const {
    float parts[kGates][2] = {};  // of the lane's two units
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float4 x;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        if (gate < kInputs) {
          x = *reinterpret_cast<const float4*>(lane_values + gate * kUnits + v * 4 * kLanes);
        }
#pragma unroll
        for (int other = 0; other < 2; ++other) {
          const float4 w = weights_[gate][other][v];
          float& part = parts[gate][other];
          part = fmaf(w.w, x.w, fmaf(w.z, x.z, fmaf(w.y, x.y, fmaf(w.x, x.x, part))));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
#pragma unroll
      for (int gate = i + kOutputs; gate < kGates; gate += kOutputs) {
        parts[i][0] += parts[gate][0];
        parts[i][1] += parts[gate][1];
      }
      sums[i] = parts[i][0] + __shfl_xor_sync(~0u, parts[i][1], kLanesOfUnit);
#pragma unroll
      for (int other = 1; other < kLanesOfUnit; other *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], other);
    }
  }

  // Prefetches into L2 what a warp reads kStepsAhead steps later. A lane fetches one plane, where the warp's
  // units share a sector of 32 bytes.
  class Prefetcher {
   public:
    __device__ explicit Prefetcher(const RowPerBlock& steps)
        : steps_(steps), plane_(steps.exists() ? static_cast<int>(threadIdx.x % 32) : 32) {}
    // Adds the first `used` planes of an array [rows, planes, H], or none of a null array.
    template <typename X>
    __device__ void add(const X* base, int64_t first_row, int planes, int used) {
      if (base && plane_ >= 0 && plane_ < used) {
        next_ = reinterpret_cast<const char*>(base +
                                              ((first_row + steps_.row_) * planes + plane_) * steps_.hidden_ +
                                              threadIdx.x / 32 * (32 / kLanesOfUnit));
        width_ = planes * steps_.hidden_ * static_cast<int>(sizeof(X));
      }
      plane_ -= used;
    }
    __device__ __forceinline__ void fetch_next(int64_t rows) {
      if (width_ == 0) return;
      prefetch_global_l2(next_);
      next_ += rows * width_;
    }

   private:
    const RowPerBlock& steps_;
    int plane_, width_ = 0;  // width_: bytes of a row
    const char* next_ = nullptr;
  };

  // Returns the flag in a register: the compiler would else load it again in every step.
  __device__ static bool in_register(bool flag) {
    int value = flag;
    asm volatile("" : "+r"(value));
    return value != 0;
  }

  const int hidden_, lane_, unit_, row_, batch_;
  float* const values_;
  float4 weights_[kGates][2][kVectors];
  CellInputs<Cell, float> in_;
};

template <class Config>
class RowPerBlockForward : RowPerBlock<Config> {
  using Base = RowPerBlock<Config>;
  using Base::exists, Base::hidden_, Base::in_, Base::plane, Base::row_, Base::state, Base::stores,
      Base::unit_, Base::kExtra, Base::kGates, Base::kSavedInGates, Base::kStates, Base::kStepInputs;
  using typename Base::Cell, typename Base::Math, typename Base::Projection, typename Base::Reset,
      typename Base::T;

 public:
  using typename Base::Storage;
  using Arguments = SequenceForwardArguments<T>;

  __device__ RowPerBlockForward(const Arguments& arguments, const GroupGrid&, Storage values)
      : Base(arguments.steps, arguments.hidden, values), args_(arguments) {
    Base::load_weights([&](int gate, int unit) {
      return args_.weight + (static_cast<int64_t>(gate) * hidden_ + unit) * hidden_;
    });
    Base::load_constants(args_.parameters);
  }

  __device__ __forceinline__ void run() {
    const int steps = args_.steps.length, to_next = args_.steps.reverse ? -Base::batch_ : Base::batch_;
    if (steps == 0) return;
    typename Base::Prefetcher prefetcher(*this);
    const int64_t ahead = args_.steps.at(kStepsAhead).first;
    prefetcher.add(args_.template projections<Cell>(), ahead, kGates, kGates);
    prefetcher.add(args_.step_inputs, ahead, Cell::kStepInputs, Cell::kStepInputs);
    Addresses at = addresses(args_.steps.at(0).first + row_);
    float h = 0, states[at_least_one(kStates)] = {};
    Inputs next;
    if (exists()) {
      if (args_.h0) h = widen(*state(args_.h0, 0));
#pragma unroll
      for (int s = 0; s < kStates; ++s) states[s] = args_.states0 ? first_state(s) : 0;
      if constexpr (kToInitial) {
        initial_.h = h;
#pragma unroll
        for (int s = 0; s < kStates; ++s) initial_.states[s] = states[s];
      }
      if constexpr (Config::kHasResets) {
        apply_reset(*at.reset, h, states);
        if (steps > 1) at.reset += to_next;
      }
      load(next, at);
    }
    auto buffers = Base::buffers();
    __syncthreads();  // the buffers are zeros
    if (stores()) buffers.to[-Base::kUnits] = h;
    __syncthreads();
    for (int n = 0; n < steps; ++n) {
      float products[kGates], saved[at_least_one(Cell::kSaved)];
      Base::multiply(products, buffers.from);
      const Inputs current = next;
      const Addresses here = at;
      at.move(to_next, hidden_);
      if (Config::kHasResets && n + 2 == steps) at.reset -= to_next;  // no step follows the next one
      if (exists() && n + 1 < steps) load(next, at);
      h = widen(narrow<T>(run_cell(current, products, h, states, saved)));
      const bool resets = Config::kHasResets && n + 1 < steps;
      const float next_h = resets ? after_reset(current.reset, h, initial_.h) : h;
      if (stores()) *buffers.to = next_h;
      buffers.swap();
      __syncthreads();
      if (stores()) store(here, h, next_h, states, saved);
      if (resets) apply_reset(current.reset, h, states);
      if (n + kStepsAhead < steps) prefetcher.fetch_next(to_next);
    }
    if (!stores()) return;
    *state(args_.h_n, 0) = narrow<T>(h);
#pragma unroll
    for (int s = 0; s < kStates; ++s) store_last_state(s, states[s]);
  }

 private:
  static constexpr bool kToInitial = Config::kHasResets && kResetsToInitial<Cell>;

  // What a step reads, and where it is.
  struct Inputs {
    Projection projections[kGates];
    T steps[kStepInputs];
    Reset reset;  // the reset before the next step
  };
  struct Addresses {
    Projection* gates;
    T *extra, *output, *output_apart;
    const T* steps;
    const Reset* reset;
    __device__ __forceinline__ void move(int rows, int hidden) {
      const int64_t of_plane = int64_t{rows} * hidden;
      gates += of_plane * kGates;
      extra += of_plane * kExtra;
      output += of_plane;
      output_apart += of_plane * kOutputsOf<Cell>;
      steps += of_plane * Cell::kStepInputs;
      reset += rows;
    }
  };
  __device__ __forceinline__ Addresses addresses(int64_t row) const {
    return {plane(args_.template projections<Cell>(), row, kGates, 0),
            plane(args_.extra, row, kExtra, 0),
            plane(args_.output, row, 1, 0),
            plane(args_.output_apart, row, kOutputsOf<Cell>, 0),
            plane(args_.step_inputs, row, Cell::kStepInputs, 0),
            static_cast<const Reset*>(args_.reset) + row};
  }
  __device__ __forceinline__ void load(Inputs& inputs, const Addresses& at) const {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) inputs.projections[gate] = at.gates[gate * hidden_];
    Base::load_step_inputs(inputs.steps, at.steps);
    if constexpr (Config::kHasResets) inputs.reset = *at.reset;
  }

  // The states that a caller gives and gets.
  __device__ __forceinline__ float first_state(int s) const {
    if (args_.narrow_states) return widen(*state(static_cast<const T*>(args_.states0), s));
    return *state(static_cast<const float*>(args_.states0), s);
  }
  __device__ __forceinline__ void store_last_state(int s, float x) const {
    if (args_.narrow_states) {
      *state(static_cast<T*>(args_.states_n), s) = narrow<T>(x);
    } else {
      *state(static_cast<float*>(args_.states_n), s) = x;
    }
  }

  // Applies the reset before the next step.
  __device__ __forceinline__ static float after_reset(Reset reset, float x, float initial) {
    return kToInitial ? reset_to(reset, x, initial) : scale_by_mask(mask_of(reset), x);
  }
  __device__ __forceinline__ void apply_reset(Reset reset, float& h,
                                              float (&states)[at_least_one(kStates)]) const {
    h = after_reset(reset, h, initial_.h);
#pragma unroll
    for (int s = 0; s < kStates; ++s) states[s] = after_reset(reset, states[s], initial_.states[s]);
  }

  __device__ __forceinline__ float run_cell(const Inputs& inputs, const float (&products)[kGates],
                                            float old_h, float (&states)[at_least_one(kStates)],
                                            float (&saved)[at_least_one(Cell::kSaved)]) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const float projection = widen(inputs.projections[gate]);
      if constexpr (Cell::kSeparate) {
        in_.x[gate] = projection, in_.r[gate] = products[gate];
      } else {
        in_.x[gate] = products[gate] + projection;
      }
    }
    if constexpr (Cell::kReadsH) in_.h = old_h;
    Base::set_step_inputs(inputs.steps);
    return Cell::template forward<Math>(in_, states, saved);
  }

  __device__ __forceinline__ void store(const Addresses& at, float h, float next_h,
                                        const float (&states)[at_least_one(kStates)],
                                        const float (&saved)[at_least_one(Cell::kSaved)]) const {
    *at.output = narrow<T>(kToInitial ? next_h : h);
    if constexpr (Config::kShape.cell.has_output_apart()) {
#pragma unroll
      for (int o = 0; o < kOutputsOf<Cell>; ++o) {
        at.output_apart[o * hidden_] = narrow<T>(output_of<Cell>(h, states, o));
      }
    }
    if (!saves_) return;
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      T* const to = v < kSavedInGates ? reinterpret_cast<T*>(at.gates + v * hidden_)
                                      : at.extra + (v - kSavedInGates) * hidden_;
      *to = narrow<T>(saved[v]);
    }
  }

  const Arguments& args_;
  const bool saves_ = Base::in_register(args_.save);
  struct {
    float h = 0, states[at_least_one(kStates)] = {};
  } initial_;  // if kToInitial
};

template <class Config>
class RowPerBlockBackward : RowPerBlock<Config> {
  using Base = RowPerBlock<Config>;
  using Base::exists, Base::hidden_, Base::in_, Base::plane, Base::row_, Base::state, Base::stores,
      Base::unit_, Base::kExtra, Base::kGates, Base::kSavedInGates, Base::kStates, Base::kStepInputs,
      Base::kUnits;
  using typename Base::Cell, typename Base::Math, typename Base::Reset, typename Base::T;

 public:
  using typename Base::Storage;
  using Arguments = SequenceBackwardArguments<T>;

  __device__ RowPerBlockBackward(const Arguments& arguments, const GroupGrid&, Storage values)
      : Base(arguments.steps, arguments.hidden, values), args_(arguments) {
    Base::load_weights([&](int gate, int unit) {
      return args_.weight_t + (static_cast<int64_t>(unit) * kGates + gate) * hidden_;
    });
    Base::load_constants(args_.parameters);
  }

  __device__ __forceinline__ void run() {
    const int steps = args_.end - args_.begin, to_next = args_.steps.reverse ? Base::batch_ : -Base::batch_;
    typename Base::Prefetcher prefetcher(*this);
    const int64_t ahead = args_.steps.at(args_.end - 1 - kStepsAhead).first;
    prefetcher.add(args_.gates, ahead, kGates, kSavedInGates);
    prefetcher.add(args_.extra, ahead, kExtra, kExtra);
    prefetcher.add(args_.step_inputs, ahead, Cell::kStepInputs, Cell::kStepInputs);
    prefetcher.add(args_.grad_output, ahead, kOutputsOf<Cell>, kOutputsOf<Cell>);
    Addresses at = addresses(args_.steps.at(args_.end - 1).first + row_);
    Inputs next;
    if (exists()) {
      if (!args_.from_zeros) load_carried();
      load(next, at);
    }
    auto buffers = Base::buffers();
    __syncthreads();  // the buffers are zeros
    for (int n = 0; n < steps; ++n) {
      const float through_weights = multiply(buffers.from);
      const Inputs current = next;
      const Addresses here = at;
      at.move(to_next, hidden_);
      if (exists() && n + 1 < steps) load(next, at);
      CellGradients<Cell, float> grads;
      run_cell(current, through_weights + own_, grads);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        if (stores()) buffers.to[gate * kUnits] = grads.product(gate);
      }
      buffers.swap();
      __syncthreads();
      if (stores()) store(here, grads);
      own_ = Cell::kReadsH ? grads.h : 0;
      add_sums(grads);
      if (n + kStepsAhead < steps) prefetcher.fetch_next(to_next);
    }
    end(multiply(buffers.from));
  }

 private:
  __device__ __forceinline__ void load_carried() {
    own_ = widen(*state(args_.grad_h, 0));
    if constexpr (Cell::kReadsH) own_ += *state(args_.grad_own_h, 0);
#pragma unroll
    for (int s = 0; s < kStates; ++s) grad_states_[s] = *state(args_.grad_states, s);
  }

  // What a step reads, and where it is.
  struct Inputs {
    T saved[at_least_one(Cell::kSaved)], steps[kStepInputs], grad_output[kOutputsOf<Cell>];
    Reset reset;
  };
  struct Addresses {
    const T *gates, *extra, *steps, *grad_output;
    const Reset* reset;
    T *grad_gates, *grad_projections;
    __device__ __forceinline__ void move(int rows, int hidden) {
      const int64_t of_plane = int64_t{rows} * hidden;
      gates += of_plane * kGates;
      extra += of_plane * kExtra;
      steps += of_plane * Cell::kStepInputs;
      grad_output += of_plane * kOutputsOf<Cell>;
      reset += rows;
      grad_gates += of_plane * kGates;
      grad_projections += of_plane * kGates;
    }
  };
  __device__ __forceinline__ Addresses addresses(int64_t row) const {
    const int64_t written = row - args_.first_row;
    return {plane(args_.gates, row, kGates, 0),
            plane(args_.extra, row, kExtra, 0),
            plane(args_.step_inputs, row, Cell::kStepInputs, 0),
            plane(args_.grad_output, row, kOutputsOf<Cell>, 0),
            static_cast<const Reset*>(args_.reset) + row,
            plane(args_.grad_gates, written, kGates, 0),
            plane(args_.grad_projections, written, kGates, 0)};
  }
  __device__ __forceinline__ void load(Inputs& inputs, const Addresses& at) const {
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      inputs.saved[v] = v < kSavedInGates ? at.gates[v * hidden_] : at.extra[(v - kSavedInGates) * hidden_];
    }
    Base::load_step_inputs(inputs.steps, at.steps);
    const T* gradient = at.grad_output;
#pragma unroll
    for (int o = 0; o < kOutputsOf<Cell>; ++o, gradient += hidden_) {
      inputs.grad_output[o] = has_grad_output_ ? *gradient : T();
    }
    if constexpr (Config::kHasResets) inputs.reset = *at.reset;
  }

  // The gradient of h through the weights of the step computed before this one.
  __device__ __forceinline__ float multiply(const float* lane_values) const {
    float sums[1];
    Base::multiply(sums, lane_values);
    if constexpr (!Config::kHasResets) return sums[0];
    collect_initial(0, sums[0]);
    return scale_by_mask(mask_of(reset_), sums[0]);
  }
  // Adds what a gradient of h (plane 0) or of a state (planes from 1 on) has of the initial ones.
  __device__ __forceinline__ void collect_initial(int plane, float gradient) const {
    if (!kResetsToInitial<Cell> || reset_ == 0 || !stores()) return;
    *state(args_.grad_initial, plane) += scale_by_mask(reset_, gradient);
  }

  __device__ __forceinline__ void run_cell(const Inputs& inputs, float grad_h,
                                           CellGradients<Cell, float>& grads) {
    Base::set_step_inputs(inputs.steps);
#pragma unroll
    for (int o = 0; o < kOutputsOf<Cell>; ++o) {
      gradient_of_output<Cell>(grad_h, grad_states_, o) += widen(inputs.grad_output[o]);
    }
    float saved[at_least_one(Cell::kSaved)];
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) saved[v] = widen(inputs.saved[v]);
    Cell::template backward<Math>(saved, in_, grad_h, grad_states_, grads);
    if constexpr (Config::kHasResets) {
      reset_ = inputs.reset;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        collect_initial(1 + s, grad_states_[s]);
        grad_states_[s] = scale_by_mask(mask_of(reset_), grad_states_[s]);
      }
      if constexpr (Cell::kReadsH) {
        collect_initial(0, grads.h);
        grads.h = scale_by_mask(mask_of(reset_), grads.h);
      }
    }
  }

  __device__ __forceinline__ void store(const Addresses& at, const CellGradients<Cell, float>& grads) const {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      at.grad_gates[gate * hidden_] = narrow<T>(grads.product(gate));
      if constexpr (Cell::kSeparate) at.grad_projections[gate * hidden_] = narrow<T>(grads.x[gate]);
    }
  }

  __device__ __forceinline__ void add_sums(const CellGradients<Cell, float>& grads) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) sums_of_row_[gate] += grads.x[gate];
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p) sums_of_row_[kGates + p] += grads.parameters[p];
  }

  // Stores the gradients of the states before the first step, and the sums.
  __device__ __forceinline__ void end(float grad_h) const {
    if (!stores()) return;
    *state(args_.grad_h, 0) = narrow<T>(grad_h);
    if constexpr (Cell::kReadsH) *state(args_.grad_own_h, 0) = own_;
#pragma unroll
    for (int s = 0; s < kStates; ++s) *state(args_.grad_states, s) = grad_states_[s];
    if (!args_.grad_sums) return;
#pragma unroll
    for (int sum = 0; sum < kSums; ++sum) *plane(args_.grad_sums, row_, kSums, sum) += sums_of_row_[sum];
  }

  static constexpr int kSums = Config::kShape.cell.sums();
  const Arguments& args_;
  const bool has_grad_output_ = Base::in_register(args_.grad_output != nullptr);
  float own_ = 0;    // the gradient of h not through weights; at first, that after the last step
  Reset reset_ = 0;  // that of the step computed last
  float grad_states_[at_least_one(kStates)] = {};
  float sums_of_row_[kSums] = {};
};

}  // namespace lltm_ext
