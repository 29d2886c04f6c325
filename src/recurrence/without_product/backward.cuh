// Steps of independent units backward (steps.cuh). No gradient goes through weights. Each row has its own
// sums of gradients, so their order is fixed.
#pragma once

#include "recurrence/without_product/steps.cuh"

namespace lltm_ext {

template <class Cell, typename T, int kUnits>
class IndependentBackward : IndependentUnits<Cell, T, kUnits> {
  using Base = IndependentUnits<Cell, T, kUnits>;
  using Base::in_, Base::kGates, Base::kParameters, Base::kStates, Base::kStepInputs, Base::plane, Base::row_,
      Base::state;
  using typename Base::A, typename Base::Math, typename Base::Saved, typename Base::Values;
  static constexpr int kSums = Base::kShape.sums();

 public:
  __device__ explicit IndependentBackward(const SequenceBackwardArguments<T>& arguments)
      : Base(arguments.steps, arguments.hidden, arguments.parameters), args_(arguments) {}

  __device__ void run() {
    if (!Base::exists()) return;
    const typename Base::Range range = Base::steps_of_row(args_.begin, args_.end);
    if (range.begin >= range.end) return;  // the row's gradients stay what they are
    if (!args_.from_zeros) load_carried();
    Base::template for_steps<Inputs>(
        range.end - range.begin, [&](int n, Inputs& inputs) { load_inputs(range.end - 1 - n, inputs); },
        [&](int n, const Inputs& inputs) { step(range.end - 1 - n, inputs); });
    store_carried();
    if (args_.grad_sums) add_sums();
  }

 private:
  struct Inputs {
    Values saved[at_least_one(Cell::kSaved)], steps[at_least_one(kStepInputs)], grad_output;
    A lost;  // the share that the row lost before the step
  };

  __device__ void load_inputs(int step, Inputs& inputs) const {
    const int64_t row = Base::row_at(step);
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      inputs.saved[v] = Base::read(Base::saved_plane(args_.gates, args_.extra, row, v));
    }
#pragma unroll
    for (int k = 0; k < kStepInputs; ++k) {
      inputs.steps[k] = Base::read(plane(args_.step_inputs, row, kStepInputs, k));
    }
    inputs.grad_output = args_.grad_output ? Base::read(plane(args_.grad_output, row, 1, 0)) : Values{};
    inputs.lost = args_.resets().share(row);
  }

  __device__ void step(int step, const Inputs& inputs) {
    CellGradients<Cell, A> grads[kUnits];
    Base::set_step_inputs(inputs.steps);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      A saved[at_least_one(Cell::kSaved)];
#pragma unroll
      for (int v = 0; v < Cell::kSaved; ++v) saved[v] = widen(inputs.saved[v].data[u]);
      gradient_of_output<Cell>(grad_h_[u], grad_states_[u]) += widen(inputs.grad_output.data[u]);
      Cell::template backward<Math>(saved, in_[u], grad_h_[u], grad_states_[u], grads[u]);
      grad_h_[u] = grads[u].h;
#pragma unroll
      for (int g = 0; g < kGates; ++g) sums_[u][g] += grads[u].x[g];
#pragma unroll
      for (int p = 0; p < kParameters; ++p) sums_[u][kGates + p] += grads[u].parameters[p];
    }
    if (inputs.lost != 0) reset(inputs.lost);
    const int64_t row = Base::row_at(step) - args_.first_row;
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      Base::store(plane(args_.grad_gates, row, kGates, g), [&](int u) { return grads[u].x[g]; });
    }
  }

  // Divides the gradients among what the row kept and, with resets to them, the initial h and states.
  __device__ void reset(A share) {
#pragma unroll
    for (int plane = 0; plane < 1 + kStates; ++plane) {
      const auto gradient = [&](int u) -> A& { return plane == 0 ? grad_h_[u] : grad_states_[u][plane - 1]; };
      if constexpr (kResetsToInitial<Cell>) {
        A before[kUnits];
        A* const to = state(args_.grad_initial, plane);
        Base::load(to, [&](int u) -> A& { return before[u]; });
        Base::store(to, [&](int u) { return before[u] + scale_by_mask(share, gradient(u)); });
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) gradient(u) = scale_by_mask(mask_of(share), gradient(u));
    }
  }

  __device__ void load_carried() {
    Base::load(plane(args_.grad_h, row_, 1, 0), [&](int u) -> A& { return grad_h_[u]; });
    if constexpr (Cell::kReadsH) {
      A own[kUnits];
      Base::load(plane(args_.grad_own_h, row_, 1, 0), [&](int u) -> A& { return own[u]; });
#pragma unroll
      for (int u = 0; u < kUnits; ++u) grad_h_[u] += own[u];
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      Base::load(state(args_.grad_states, s), [&](int u) -> A& { return grad_states_[u][s]; });
    }
  }

  __device__ void store_carried() const {
    Base::store(plane(args_.grad_h, row_, 1, 0), [](int) { return A(0); });
    if constexpr (Cell::kReadsH) {
      Base::store(plane(args_.grad_own_h, row_, 1, 0), [&](int u) { return grad_h_[u]; });
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      Base::store(state(args_.grad_states, s), [&](int u) { return grad_states_[u][s]; });
    }
  }

  __device__ void add_sums() const {
#pragma unroll
    for (int sum = 0; sum < kSums; ++sum) {
      A* const to = plane(args_.grad_sums, row_, kSums, sum);
      A before[kUnits];
      Base::load(to, [&](int u) -> A& { return before[u]; });
      Base::store(to, [&](int u) { return before[u] + sums_[u][sum]; });
    }
  }

  const SequenceBackwardArguments<T>& args_;
  A grad_h_[kUnits] = {}, grad_states_[kUnits][at_least_one(kStates)] = {};  // after the next step
  A sums_[kUnits][at_least_one(kSums)] = {};
};

}  // namespace lltm_ext
