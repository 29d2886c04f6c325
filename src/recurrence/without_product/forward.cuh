// All steps of independent units forward (steps.cuh).
#pragma once

#include "recurrence/without_product/steps.cuh"

namespace lltm_ext {

template <class Cell, typename T, int kUnits>
class IndependentForward : IndependentUnits<Cell, T, kUnits> {
  using Base = IndependentUnits<Cell, T, kUnits>;
  using Base::in_, Base::kGates, Base::kStates, Base::kStepInputs, Base::plane, Base::row_, Base::state;
  using typename Base::A, typename Base::Math, typename Base::Saved, typename Base::Values;

 public:
  __device__ explicit IndependentForward(const SequenceForwardArguments<T>& arguments)
      : Base(arguments.steps, arguments.hidden, arguments.parameters), args_(arguments) {}

  __device__ void run() {
    if (!Base::exists()) return;
    load_initial();
    const typename Base::Range range = Base::steps_of_row(0, args_.steps.length);
    Base::template for_steps<Inputs>(
        range.end - range.begin, [&](int n, Inputs& inputs) { load_inputs(range.begin + n, inputs); },
        [&](int n, const Inputs& inputs) { step(range.begin + n, inputs); });
    Base::store(plane(args_.h_n, row_, 1, 0), [&](int u) { return h_[u]; });
    args_.narrow_states ? store_states(static_cast<T*>(args_.states_n))
                        : store_states(static_cast<A*>(args_.states_n));
  }

 private:
  __device__ void load_initial() {
    if (args_.h0) Base::load(plane(args_.h0, row_, 1, 0), [&](int u) -> A& { return h_[u]; });
    if (!args_.states0) return;
    args_.narrow_states ? load_states(static_cast<const T*>(args_.states0))
                        : load_states(static_cast<const A*>(args_.states0));
  }
  template <typename X>
  __device__ void load_states(const X* states) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      Base::load(state(states, s), [&](int u) -> A& { return states_[u][s]; });
    }
  }
  template <typename X>
  __device__ void store_states(X* states) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) Base::store(state(states, s), [&](int u) { return states_[u][s]; });
  }

  struct Inputs {
    Vec<projection_t<Cell, T>, kUnits> projections[kGates];
    Values steps[at_least_one(kStepInputs)];
    A keep;
  };

  __device__ void load_inputs(int step, Inputs& inputs) const {
    const int64_t row = Base::row_at(step);
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      inputs.projections[g] = Base::read(plane(args_.template projections<Cell>(), row, kGates, g));
    }
#pragma unroll
    for (int k = 0; k < kStepInputs; ++k) {
      inputs.steps[k] = Base::read(plane(args_.step_inputs, row, kStepInputs, k));
    }
    inputs.keep = args_.resets().mask(row);
  }

  __device__ void step(int step, const Inputs& inputs) {
    Saved saved;
    Base::set_step_inputs(inputs.steps);
    if (inputs.keep != 1) keep(inputs.keep);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int g = 0; g < kGates; ++g) in_[u].x[g] = widen(inputs.projections[g].data[u]);
      in_[u].h = h_[u];
      // Rounded to T, as the next step would read it from memory.
      h_[u] = widen(narrow<T>(Cell::template forward<Math>(in_[u], states_[u], saved[u])));
    }
    const int64_t row = Base::row_at(step);
    Base::store(plane(args_.output, row, 1, 0), [&](int u) { return h_[u]; });
    if constexpr (Cell::kOutputState >= 0) {
      Base::store(plane(args_.state_output, row, 1, 0),
                  [&](int u) { return states_[u][Cell::kOutputState]; });
    }
    if (!args_.save) return;
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      Base::store(Base::saved_plane(args_.gates, args_.extra, row, v), [&](int u) { return saved[u][v]; });
    }
  }

  __device__ void keep(A share) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      h_[u] = scale_by_mask(share, h_[u]);
#pragma unroll
      for (int s = 0; s < kStates; ++s) states_[u][s] = scale_by_mask(share, states_[u][s]);
    }
  }

  const SequenceForwardArguments<T>& args_;
  A h_[kUnits] = {}, states_[kUnits][at_least_one(kStates)] = {};
};

}  // namespace lltm_ext
