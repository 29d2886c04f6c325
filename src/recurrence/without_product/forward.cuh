// All steps of independent units forward (steps.cuh), or some of them.
#pragma once

#include "recurrence/without_product/steps.cuh"

namespace lltm_ext {

template <class Cell, typename T, int kUnits, bool kDense, int kBlockThreads>
class IndependentForward : public IndependentUnits<Cell, T, kUnits, kDense, kBlockThreads> {
 public:
  using Base = IndependentUnits<Cell, T, kUnits, kDense, kBlockThreads>;
  using Base::bias_, Base::h_, Base::in_, Base::kGates, Base::kSaved, Base::kStates, Base::kStepInputs,
      Base::plane, Base::row_, Base::state, Base::states_;
  using typename Base::A, typename Base::Math, typename Base::Saved, typename Base::Values;
  template <typename X, int kPlanes>
  using Rows = typename Base::template Rows<X, kPlanes>;

  using Arguments = SequenceForwardArguments<T>;

  __device__ IndependentForward(const Arguments& arguments, int64_t thread)
      : Base(arguments.steps, arguments.hidden, arguments.parameters, arguments.has_bias, thread),
        args_(arguments),
        projections_(arguments.template projections_without_product<Cell>()) {
    if (Base::exists()) Base::take_steps(0, args_.steps.length, /*backward=*/false);
  }

  __device__ void run(const UnitTiles& tiles) {
    Base::stage_steps_ = tiles.stage_steps;
    if (!Base::exists()) return;
    load_carried();
    Base::for_steps(*this);
    store_carried();
  }

  __device__ void load_carried() { load_initial(h_, states_); }
  __device__ void store_carried() const {
    Base::store(plane(args_.h_n, row_, 1, 0), [&](int u) { return h_[u]; });
    args_.narrow_states ? store_states(static_cast<T*>(args_.states_n))
                        : store_states(static_cast<A*>(args_.states_n));
  }

  using Projections = Several<typename Base::Projection, kGates, 0>;
  using StepInputs = Several<Values, kStepInputs, 1>;
  using typename Base::Lost;
  struct Inputs : Projections, StepInputs, Lost {};

  // What steps read (IndependentUnits::for_steps).
  struct Source {
    const IndependentForward& units;
    Rows<const projection_t<Cell, T>, kGates> projections;
    Rows<const T, kStepInputs> steps;

    __device__ Source(const IndependentForward& units, int begin)
        : units(units),
          projections(units, units.projections_, begin),
          steps(units, units.args_.step_inputs, begin) {}
    __device__ void next(int n) {
      projections.next(n);
      steps.next(n);
    }
    template <class F>
    __device__ void read(int n, Inputs& inputs, const F& f) const {
#pragma unroll
      for (int g = 0; g < kGates; ++g) f(inputs.Projections::of[g], projections.plane(g));
#pragma unroll
      for (int k = 0; k < kStepInputs; ++k) f(inputs.StepInputs::of[k], steps.plane(k));
      if constexpr (!kDense) {
        if (units.args_.reset) f(inputs.Lost::of[0], units.args_.resets().share(units.row_of(n)));
      }
    }
    template <class F>
    __device__ void replace(int, int, F&&) const {}
  };

  // What a step writes: h, the outputs if they are apart, what is saved.
  static constexpr int kOutputsApart = Base::kShape.has_output_apart() ? kOutputsOf<Cell> : 0,
                       kFirstSaved = 1 + kOutputsApart;
  using Results = Several<Values, kFirstSaved + kSaved, 3>;
  struct Sink {
    const bool saves;
    Rows<T, 1> output;
    Rows<T, kOutputsOf<Cell>> output_apart;
    Rows<T, kSaved> extra;

    __device__ Sink(const IndependentForward& units, int begin)
        : saves(units.args_.save),
          output(units, units.args_.output, begin),
          output_apart(units, units.args_.output_apart, begin),
          extra(units, units.args_.extra, begin) {}
    __device__ void next(int n) {
      output.next(n);
      output_apart.next(n);
      extra.next(n);
    }
    __device__ void write(const Results& results) const {
      Base::write(output.plane(0), results.of[0]);
      // Outside the loop: within it, the compiler would order the stores of a single output otherwise.
      if constexpr (kOutputsApart > 0) Base::write(output_apart.plane(0), results.of[1]);
#pragma unroll
      for (int o = 1; o < kOutputsApart; ++o) Base::write(output_apart.plane(o), results.of[1 + o]);
      if (!saves) return;
#pragma unroll
      for (int v = 0; v < kSaved; ++v) Base::write(extra.plane(v), results.of[kFirstSaved + v]);
    }
  };

  template <class TileThread>
  __device__ void finish_tile(const TileThread&) const {}

  __device__ void step(const Inputs& inputs, Results& results) {
    Saved saved;
    step(inputs, saved);
    set_outputs(results);
#pragma unroll
    for (int v = 0; v < kSaved; ++v) {
      results.of[kFirstSaved + v] = Base::narrowed([&](int u) { return saved[u][v]; });
    }
  }
  __device__ void set_outputs(Results& results) const {
    results.of[0] = Base::narrowed([&](int u) { return h_[u]; });
#pragma unroll
    for (int o = 0; o < kOutputsApart; ++o) {
      results.of[1 + o] = Base::narrowed([&](int u) { return output_of<Cell>(h_[u], states_[u], o); });
    }
  }
  __device__ void step(const Inputs& inputs, Saved& saved) {
    Base::set_step_inputs(inputs.StepInputs::of);
    if (const A lost = Base::share_of(inputs); lost != 0) reset(lost);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int g = 0; g < kGates; ++g) in_[u].x[g] = widen(inputs.Projections::of[g].data[u]) + bias_[u][g];
      in_[u].h = h_[u];
      const A h = Cell::template forward<Math>(in_[u], states_[u], saved[u]);
      // Rounded to T, as the next step would read it from memory, unless the cell is affine.
      h_[u] = kIsAffine<Cell> ? h : widen(narrow<T>(h));
    }
  }

 private:
  using States = A[kUnits][at_least_one(kStates)];

  __device__ void load_initial(A (&h)[kUnits], States& states) const {
    if (args_.h0) Base::load(plane(args_.h0, row_, 1, 0), [&](int u) -> A& { return h[u]; });
    if (!args_.states0) return;
    args_.narrow_states ? load_states(static_cast<const T*>(args_.states0), states)
                        : load_states(static_cast<const A*>(args_.states0), states);
  }
  template <typename X>
  __device__ void load_states(const X* from, States& to) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      Base::load(state(from, s), [&](int u) -> A& { return to[u][s]; });
    }
  }
  template <typename X>
  __device__ void store_states(X* states) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) Base::store(state(states, s), [&](int u) { return states_[u][s]; });
  }

  __device__ void reset(A share) {
    A h0[kUnits] = {};
    States states0 = {};
    if constexpr (kResetsToInitial<Cell>) load_initial(h0, states0);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      h_[u] = reset_to(share, h_[u], h0[u]);
#pragma unroll
      for (int s = 0; s < kStates; ++s) states_[u][s] = reset_to(share, states_[u][s], states0[u][s]);
    }
  }

  const Arguments& args_;
  const projection_t<Cell, T>* const projections_;
};

}  // namespace lltm_ext
