// All steps of independent units backward (steps.cuh), or some of them. No gradient goes through weights.
// Each row and tile has its own sums of gradients, so their order is fixed.
//
// A step reads the projections and the previous h, which are in memory anyhow, and computes again what
// forward made of them. That is faster than to write it and read it.
#pragma once

#include "recurrence/without_product/steps.cuh"

namespace lltm_ext {

template <class Cell>
constexpr int count_backward_gates() {
  int count = 0;
  for (int g = 0; g < Cell::kGates; ++g) count += Cell::backward_reads(g);
  return count;
}

template <class Cell, typename T, int kUnits, bool kDense, int kBlockThreads>
class IndependentBackward : public IndependentUnits<Cell, T, kUnits, kDense, kBlockThreads> {
 public:
  using Base = IndependentUnits<Cell, T, kUnits, kDense, kBlockThreads>;
  using Base::bias_, Base::h_, Base::in_, Base::kCarried, Base::kGates, Base::kParameters, Base::kSaved,
      Base::kStates, Base::kStepInputs, Base::plane, Base::row_, Base::state, Base::states_;
  using typename Base::A, typename Base::Math, typename Base::Saved, typename Base::Values;
  template <typename X, int kPlanes>
  using Rows = typename Base::template Rows<X, kPlanes>;
  static constexpr int kSums = Base::kShape.sums();
  static constexpr int kReadGates = count_backward_gates<Cell>();
  // The values that a step reads besides projections: the previous h, if the cell reads it; then these.
  static constexpr int kGradOutput = Cell::kBackwardReadsH, kFirstSaved = kGradOutput + kOutputsOf<Cell>,
                       kFirstStep = kFirstSaved + kSaved, kRead = kFirstStep + kStepInputs;

  using Arguments = SequenceBackwardArguments<T>;

  __device__ IndependentBackward(const Arguments& arguments, int64_t thread)
      : Base(arguments.steps, arguments.hidden, arguments.parameters, arguments.has_bias, thread),
        args_(arguments) {
    if (Base::exists()) Base::take_steps(args_.begin, args_.end, /*backward=*/true);
  }

  __device__ void run(const UnitTiles& tiles) {
    Base::stage_steps_ = tiles.stage_steps;
    if (!Base::exists() || Base::count() <= 0) return;  // the row's gradients stay what they are
    load_carried();
    Base::for_steps(*this);
    store_carried();
    if (args_.grad_sums) add_sums(row_);
  }

  __device__ void load_carried() {
    if (args_.from_zeros) return;
    Base::load(plane(args_.grad_h, row_, 1, 0), [&](int u) -> A& { return h_[u]; });
    if constexpr (Cell::kReadsH) {
      A own[kUnits];
      Base::load(plane(args_.grad_own_h, row_, 1, 0), [&](int u) -> A& { return own[u]; });
#pragma unroll
      for (int u = 0; u < kUnits; ++u) h_[u] += own[u];
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      Base::load(state(args_.grad_states, s), [&](int u) -> A& { return states_[u][s]; });
    }
  }

  __device__ void store_carried() const {
    Base::store(plane(args_.grad_h, row_, 1, 0), [](int) { return A(0); });
    if constexpr (Cell::kReadsH) {
      Base::store(plane(args_.grad_own_h, row_, 1, 0), [&](int u) { return h_[u]; });
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      Base::store(state(args_.grad_states, s), [&](int u) { return states_[u][s]; });
    }
  }

  using Projections = Several<typename Base::Projection, kReadGates, 0>;
  using Others = Several<Values, kRead, 1>;
  using typename Base::Lost;
  struct Inputs : Projections, Others, Lost {};

  // Calls f(g, i) for the gates g that the cell reads, where i counts them.
  template <class F>
  __device__ __forceinline__ static void for_gates(F&& f) {
    int i = 0;
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      if (Cell::backward_reads(g)) f(g, i++);
    }
  }

  // What steps read (IndependentUnits::for_steps). h is the output of the step before. The sequence's first
  // step has none: it reads some other row of the output, which h0 replaces.
  struct Source {
    const IndependentBackward& units;
    Rows<const projection_t<Cell, T>, kGates> projections;
    Rows<const T, 1> previous;
    Rows<const T, kOutputsOf<Cell>> grad_output;
    Rows<const T, kSaved> saved;
    Rows<const T, kStepInputs> steps;

    __device__ Source(const IndependentBackward& units, int begin)
        : units(units),
          projections(units, reinterpret_cast<const projection_t<Cell, T>*>(units.args_.gates), begin),
          previous(units, units.args_.output, begin + (begin < units.first_step_)),
          grad_output(units, units.args_.grad_output, begin),
          saved(units, units.args_.extra, begin),
          steps(units, units.args_.step_inputs, begin) {
      if (kDense && begin >= units.first_step_) previous.next(begin);
    }

    __device__ void next(int n) {
      projections.next(n);
      if (!kDense || n < units.first_step_) previous.next(min(n + 1, units.first_step_));
      grad_output.next(n);
      saved.next(n);
      steps.next(n);
    }
    template <class F>
    __device__ void read(int n, Inputs& inputs, const F& f) const {
      for_gates([&](int g, int i) { f(inputs.Projections::of[i], projections.plane(g)); });
      if constexpr (Cell::kBackwardReadsH) f(inputs.Others::of[0], previous.plane(0));
      // Outside the loop: within it, the compiler would order the loads of a single output otherwise.
      if (units.args_.grad_output) f(inputs.Others::of[kGradOutput], grad_output.plane(0));
#pragma unroll
      for (int o = 1; o < kOutputsOf<Cell>; ++o) {
        if (units.args_.grad_output) f(inputs.Others::of[kGradOutput + o], grad_output.plane(o));
      }
#pragma unroll
      for (int v = 0; v < kSaved; ++v) f(inputs.Others::of[kFirstSaved + v], saved.plane(v));
#pragma unroll
      for (int k = 0; k < kStepInputs; ++k) f(inputs.Others::of[kFirstStep + k], steps.plane(k));
      if constexpr (!kDense) {
        if (units.args_.reset) f(inputs.Lost::of[0], units.args_.resets().share(units.row_of(n)));
      }
    }
    template <class F>
    __device__ void replace(int first, int count, F&& place) const {
      const int n = units.first_step_;
      if (!Cell::kBackwardReadsH || n < first || n >= first + count) return;
      Inputs inputs;
      Values& h = inputs.Others::of[0];
      const T* const h0 = units.args_.h0;
      *place(n, inputs).place(h) = h0 ? Base::read(units.plane(h0, units.row_, 1, 0)) : Values{};
    }
  };

  // What a step writes: the gradients of the gates.
  using Results = Several<Values, kGates, 3>;
  struct Sink {
    Rows<T, kGates> gradients;

    __device__ Sink(const IndependentBackward& units, int begin)
        : gradients(units, units.args_.grad_gates - units.args_.first_row * kGates * units.args_.hidden,
                    begin) {}
    __device__ void next(int n) { gradients.next(n); }
    __device__ void write(const Results& results) const {
#pragma unroll
      for (int g = 0; g < kGates; ++g) Base::write(gradients.plane(g), results.of[g]);
    }
  };

  // Adds up the sums of the rows of a tile, in the memory of what steps read.
  template <class TileThread>
  __device__ void finish_tile(const TileThread& at) {
    if (!args_.grad_sums) return;
    auto* const all = reinterpret_cast<A*>(dynamic_shared_floats());
    const auto place = [&](int thread, int u, int sum) -> A& {
      return all[(u * kSums + sum) * Base::kThreads + thread];
    };
    __syncthreads();
    for_sums([&](int u, int sum) { place(threadIdx.x, u, sum) = sums_[u][sum]; });
    __syncthreads();
    if (at.row > 0 || !Base::exists()) return;
    for (int row = 1; row < at.rows; ++row) {
      for_sums([&](int u, int sum) { sums_[u][sum] += place(row * at.width + at.column, u, sum); });
    }
    add_sums(at.tile * args_.steps.batch + row_);
  }

  __device__ void widen_inputs(const Inputs& inputs, Saved& saved) {
    const Values* const values = inputs.Others::of;
    Base::set_step_inputs(values + kFirstStep);
    const A lost = Base::share_of(inputs);
    A h0[kUnits] = {};
    if (kResetsToInitial<Cell> && Cell::kBackwardReadsH && lost != 0 && args_.h0) {
      Base::load(plane(args_.h0, row_, 1, 0), [&](int u) -> A& { return h0[u]; });
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      for_gates([&](int g, int i) { in_[u].x[g] = widen(inputs.Projections::of[i].data[u]) + bias_[u][g]; });
      if constexpr (Cell::kBackwardReadsH) {
        in_[u].h = widen(values[0].data[u]);
        if (lost != 0) in_[u].h = reset_to(lost, in_[u].h, h0[u]);
      }
#pragma unroll
      for (int v = 0; v < kSaved; ++v) saved[u][v] = widen(values[kFirstSaved + v].data[u]);
    }
  }

  // A step, whose gradients of gates and parameters are added to the sums.
  __device__ void step(const Inputs& inputs, Results& results) {
    CellGradients<Cell, A> grads[kUnits];
    Saved saved;
    widen_inputs(inputs, saved);
    step</*kStores=*/true>(inputs, saved, grads);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int g = 0; g < kGates; ++g) sums_[u][g] += grads[u].x[g];
#pragma unroll
      for (int p = 0; p < kParameters; ++p) sums_[u][kGates + p] += grads[u].parameters[p];
    }
#pragma unroll
    for (int g = 0; g < kGates; ++g) results.of[g] = Base::narrowed([&](int u) { return grads[u].x[g]; });
  }

  template <bool kStores>
  __device__ void step(const Inputs& inputs, const Saved& saved, CellGradients<Cell, A> (&grads)[kUnits]) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int o = 0; o < kOutputsOf<Cell>; ++o) {
        gradient_of_output<Cell>(h_[u], states_[u], o) += widen(inputs.Others::of[kGradOutput + o].data[u]);
      }
      Cell::template backward<Math>(saved[u], in_[u], h_[u], states_[u], grads[u]);
      h_[u] = grads[u].h;
    }
    divide_at_reset<kStores>(Base::share_of(inputs));
  }

 private:
  // Divides the gradients among what the row kept and, with resets to them, the initial h and states.
  template <bool kStores>
  __device__ void divide_at_reset(A lost) {
    if (lost == 0) return;
#pragma unroll
    for (int i = 0; i < kCarried; ++i) {
      if constexpr (kStores && kResetsToInitial<Cell>) add_initial(lost, i);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        Base::carried(u, i) = scale_by_mask(mask_of(lost), Base::carried(u, i));
      }
    }
  }

  __device__ void add_initial(A share, int i) {
    A before[kUnits];
    A* const to = state(args_.grad_initial, Base::segment_ * kCarried + i);
    Base::load(to, [&](int u) -> A& { return before[u]; });
    Base::store(to, [&](int u) { return before[u] + scale_by_mask(share, Base::carried(u, i)); });
  }

  template <class F>
  __device__ __forceinline__ static void for_sums(F&& f) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int sum = 0; sum < kSums; ++sum) f(u, sum);
    }
  }
  __device__ void add_sums(int64_t row) const {
#pragma unroll
    for (int sum = 0; sum < kSums; ++sum) {
      A* const to = plane(args_.grad_sums, row, kSums, sum);
      A before[kUnits];
      Base::load(to, [&](int u) -> A& { return before[u]; });
      Base::store(to, [&](int u) { return before[u] + sums_[u][sum]; });
    }
  }

  const Arguments& args_;
  A sums_[kUnits][at_least_one(kSums)] = {};
};

}  // namespace lltm_ext
