// Cells whose steps map what they hand on by an affine function: affine cells forward, and gradients of all
// cells backward. Where units are few, time is divided too, as for a scan (scan/tiles.cuh): a thread has some
// successive steps of its units, and a block a tile of such threads.
//
// A thread copies what its steps read to shared memory and reduces them to their function: coefficients, and
// rests, which are the result from zeros. From the functions of all threads the block finds what each one
// starts from (scan/tile_states.cuh). Then the thread runs its steps, from shared memory again.
//
// The order of all operations depends on sizes only, and so do the bits of the result.
#pragma once

#include "recurrence/without_product/backward.cuh"
#include "recurrence/without_product/forward.cuh"
#include "scan/doubles.cuh"
#include "scan/tile_states.cuh"

namespace lltm_ext {

// A product of factors of which none is 0 is not 0 either, so that an infinity or NaN stays what it is.
template <typename X>
__device__ __forceinline__ X without_underflow_of(X x, X y) {
  constexpr X kLeast = sizeof(X) == 8 ? X(5e-324) : X(1.4e-45);
  const X product = x * y;
  return product == 0 && x != 0 && y != 0 ? kLeast : product;
}

// What some steps of a unit multiply the values by that they start from, [new value][old value].
template <typename X, int kLive>
struct Coefficients {
  static constexpr int kSize = at_least_one(kLive);
  X of[kSize][kSize];

  // f(i, j) is that of new value i and old value j.
  template <class F>
  __device__ __forceinline__ static Coefficients from(F&& f) {
    Coefficients made;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) made.of[i][j] = f(i, j);
    }
    return made;
  }
  __device__ __forceinline__ static Coefficients identity() {
    return from([](int i, int j) { return X(i == j); });
  }
  // These, then those of later steps.
  __device__ __forceinline__ Coefficients then(const Coefficients& later) const {
    return from([&](int i, int j) {
      X sum = 0;
#pragma unroll
      for (int k = 0; k < kSize; ++k) sum += without_underflow_of(later.of[i][k], of[k][j]);
      return sum;
    });
  }
};

// Those of the steps of a thread. A reset forgets what was before, be it infinite.
template <typename A, int kLive>
struct StepCoefficients : Coefficients<A, kLive> {
  bool forget = false;
  __device__ __forceinline__ StepCoefficients()
      : Coefficients<A, kLive>(Coefficients<A, kLive>::identity()) {}
  __device__ __forceinline__ void set(const Coefficients<A, kLive>& to) {
    static_cast<Coefficients<A, kLive>&>(*this) = to;
  }
  __device__ __forceinline__ void keep(A lost) {
    if (lost == 0) return;
    forget |= mask_of(lost) == 0;
    set(this->from([&](int i, int j) { return scale_by_mask(mask_of(lost), this->of[i][j]); }));
  }
};

// A function of what a thread's units hand on: values -> a values + b, in double. A unit that is reset has b,
// whatever its values were: its coefficients are -0, which no others are.
template <int kUnits, int kLive>
struct UnitMap {
  using A = Coefficients<double, kLive>;
  static constexpr int kSize = A::kSize;
  struct State {
    double of[kUnits][kSize];
  };
  State b;
  A a[kUnits];

  __device__ __forceinline__ static UnitMap identity() {
    UnitMap f = {};
    for_units([&](int u) { f.a[u] = A::identity(); });
    return f;
  }
  __device__ __forceinline__ static UnitMap constant(const State& state) {
    UnitMap f;
    f.b = state;
    for_units([&](int u) { f.forget(u); });
    return f;
  }
  // The same function; NaNs are the usual ones, so no number of it has all bits set.
  __device__ __forceinline__ UnitMap with_plain_nans() const {
    UnitMap f;
    for_units([&](int u) {
      for_values([&](int i) { f.b.of[u][i] = plain_nan(b.of[u][i]); });
      f.a[u] = A::from([&](int i, int j) { return plain_nan(a[u].of[i][j]); });
    });
    return f;
  }
  __device__ __forceinline__ bool forgets(int u) const {
    return a[u].of[0][0] == 0 && __double2hiint(a[u].of[0][0]) < 0;
  }
  __device__ __forceinline__ void forget(int u) {
    a[u] = A::from([](int, int) { return -0.; });
  }

  template <class F>
  __device__ __forceinline__ static void for_units(F&& f) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) f(u);
  }
  template <class F>
  __device__ __forceinline__ static void for_values(F&& f) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) f(i);
  }
};

template <int kUnits, int kLive>
__device__ __forceinline__ typename UnitMap<kUnits, kLive>::State apply(
    const UnitMap<kUnits, kLive>& f, const typename UnitMap<kUnits, kLive>::State& state) {
  auto after = f.b;
  f.for_units([&](int u) {
    if (f.forgets(u)) return;
    f.for_values([&](int i) {
      double sum = 0;  // without the rest, so that terms which cancel round nothing of it
      f.for_values([&](int j) { sum += f.a[u].of[i][j] * state.of[u][j]; });
      after.of[u][i] += sum;
    });
  });
  return after;
}

// f, then g.
template <int kUnits, int kLive>
__device__ __forceinline__ UnitMap<kUnits, kLive> then(const UnitMap<kUnits, kLive>& f,
                                                       const UnitMap<kUnits, kLive>& g) {
  UnitMap<kUnits, kLive> both;
  both.b = apply(g, f.b);
  f.for_units([&](int u) {
    both.a[u] = f.a[u].then(g.a[u]);
    if (f.forgets(u) || g.forgets(u)) both.forget(u);
  });
  return both;
}

// Whether the function finds what the steps find. Larger coefficients may have lost digits of the result.
template <int kUnits, int kLive>
__device__ __forceinline__ bool is_reliable(const UnitMap<kUnits, kLive>& f) {
  bool reliable = true;
  f.for_units([&](int u) {
    f.for_values([&](int i) {
      reliable &= is_below<1024>(f.b.of[u][i]);
      f.for_values([&](int j) { reliable &= is_below<3>(f.a[u].of[i][j]); });
    });
  });
  return reliable;
}

template <int kUnits, int kLive>
__device__ __forceinline__ UnitMap<kUnits, kLive> shuffle_up(const UnitMap<kUnits, kLive>& f, int lanes) {
  UnitMap<kUnits, kLive> from;
  f.for_units([&](int u) {
    f.for_values([&](int i) { from.b.of[u][i] = shuffle_up(f.b.of[u][i], lanes); });
    from.a[u] = f.a[u].from([&](int i, int j) { return shuffle_up(f.a[u].of[i][j], lanes); });
  });
  return from;
}

// Cell::backward of gradients of what a step handed on: they become those of what it read. `of_h`: that of h,
// if no step reads it.
template <class Units, class Saved>
__device__ void pull_back(Units& units, int u, const Saved& saved,
                          typename Units::A (&live)[at_least_one(Units::kLive)], typename Units::A of_h = 0) {
  using Cell = typename Units::Cell;
  using A = typename Units::A;
  constexpr int kFirst = Units::kFirstLive;
  A grad_states[at_least_one(Cell::kStates)] = {};
  CellGradients<Cell, A> grads;
#pragma unroll
  for (int i = kFirst; i < Units::kCarried; ++i) {
    if (i > 0) grad_states[i - 1] = live[i - kFirst];
  }
  const A grad_h = kFirst == 0 ? live[0] : of_h;
  Cell::template backward<typename Units::Math>(saved[u], units.in_[u], grad_h, grad_states, grads);
#pragma unroll
  for (int i = kFirst; i < Units::kCarried; ++i) live[i - kFirst] = i == 0 ? grads.h : grad_states[i - 1];
}

// Calls step(n, inputs) for steps [begin, end), whose inputs have arrived.
template <class Units, class Step>
__device__ __forceinline__ void for_arrived(const Units& units, int begin, int end, Step&& step) {
  using Inputs = typename Units::Inputs;
  const typename Units::Source source(units, begin);
  units.template run_steps_of_stage<Inputs>(source, begin, end - begin, /*stage=*/0, step);
}

// Reduces steps forward. A gradient of a new value with respect to an old one is a coefficient of the step.
// Where there is room, the coefficients and the rest of a step take the place of what it read, so that the
// cell's functions run once.
template <class Cell, typename T, int kUnits, bool kDense, int kBlockThreads>
class ForwardMap : public IndependentForward<Cell, T, kUnits, kDense, kBlockThreads> {
 public:
  using Units = IndependentForward<Cell, T, kUnits, kDense, kBlockThreads>;
  using typename Units::A, typename Units::Inputs;
  using Units::Units;
  using Maps = StepCoefficients<A, Units::kLive>[kUnits];
  static constexpr int kLive = Units::kLive, kCarried = Units::kCarried, kFirst = Units::kFirstLive;
  // Of a step, for each value that it hands on: its coefficients, and the rest.
  struct Kept {
    Vec<A, kUnits> of[kCarried][kLive + 1];
  };
  static constexpr bool kKeeps = kDense && kSavesStatesOnly<Cell> && kLive > 0 &&
                                 sizeof(Kept) <= sizeof(Inputs);

  __device__ __forceinline__ void reduce(int begin, int end, Maps& maps) {
    if constexpr (kKeeps) {
      reduce_and_keep(begin, end, maps);
    } else {
      reduce_only(begin, end, maps);
    }
  }

  // Runs steps from what reduce has kept, and from the old states, which are all that a step saves.
  template <class Sink>
  __device__ __forceinline__ void run_kept(int begin, int end, Sink& sink) {
#pragma unroll 4
    for (int n = begin; n < end; ++n) {
      Kept kept;
      for_kept(n - begin, kept, [](auto& value, auto* place) { value = *place; });
      typename Units::Results results;
#pragma unroll
      for (int v = 0; v < Units::kSaved; ++v) {
        results.of[Units::kFirstSaved + v] =
            Units::narrowed([&](int u) { return Units::states_[u][Cell::saved_state(v)]; });
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        A old[kLive];
        for (int j = 0; j < kLive; ++j) old[j] = Units::carried(u, kFirst + j);
        for (int i = 0; i < kCarried; ++i) Units::carried(u, i) = after(kept, u, i, old);
      }
      Units::set_outputs(results);
      sink.next(n);
      sink.write(results);
    }
  }

 private:
  // f(value, where it is in shared memory) of all values of a step of the tile.
  template <class F>
  __device__ __forceinline__ void for_kept(int step, Kept& kept, F&& f) const {
    const typename Units::template StepPlace<Kept> place = {Units::template input_place<Inputs>(0, step),
                                                            kept};
#pragma unroll
    for (auto& row : kept.of) {
#pragma unroll
      for (auto& value : row) f(value, place.place(value));
    }
  }
  __device__ __forceinline__ static A after(const Kept& kept, int u, int i, const A (&old)[kLive]) {
    A value = kept.of[i][kLive].data[u];
#pragma unroll
    for (int j = 0; j < kLive; ++j) value += kept.of[i][j].data[u] * old[j];
    return value;
  }

  __device__ __forceinline__ void reduce_and_keep(int begin, int end, Maps& maps) {
    A all[kUnits][kLive] = {};  // the values after the steps so far, from zeros
    for_arrived<Units>(*this, begin, end, [&](int n, const Inputs& inputs) {
      typename Units::Saved saved;
      for (int u = 0; u < kUnits; ++u) {
        for (int i = 0; i < kCarried; ++i) Units::carried(u, i) = 0;
      }
      Units::step(inputs, saved);
      Kept kept;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        auto of_step = maps[u].identity();
#pragma unroll
        for (int i = 0; i < kCarried; ++i) {
          A row[kLive] = {};
          if (i >= kFirst) row[i - kFirst] = 1;
          pull_back(*this, u, saved, row, A(i < kFirst));
#pragma unroll
          for (int j = 0; j < kLive; ++j) {
            kept.of[i][j].data[u] = row[j];
            if (i >= kFirst) of_step.of[i - kFirst][j] = row[j];
          }
          kept.of[i][kLive].data[u] = Units::carried(u, i);
        }
        A next[kLive];
        for (int i = 0; i < kLive; ++i) next[i] = after(kept, u, kFirst + i, all[u]);
        for (int i = 0; i < kLive; ++i) all[u][i] = next[i];
        maps[u].set(maps[u].then(of_step));
      }
      for_kept(n - begin, kept, [](const auto& value, auto* place) { *place = value; });
    });
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      for (int i = 0; i < kLive; ++i) Units::carried(u, kFirst + i) = all[u][i];
    }
  }
  __device__ __forceinline__ void reduce_only(int begin, int end, Maps& maps) {
    for_arrived<Units>(*this, begin, end, [&](int, const typename Units::Inputs& inputs) {
      typename Units::Saved saved;
      Units::step(inputs, saved);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        auto of_step = maps[u].identity();
#pragma unroll
        for (int i = 0; i < Units::kLive; ++i) pull_back(*this, u, saved, of_step.of[i]);
        maps[u].keep(Units::share_of(inputs));
        maps[u].set(maps[u].then(of_step));
      }
    });
  }
};

// Reduces steps backward. A step pulls the columns of the coefficients back.
template <class Cell, typename T, int kUnits, bool kDense, int kBlockThreads>
class BackwardMap : public IndependentBackward<Cell, T, kUnits, kDense, kBlockThreads> {
 protected:
  static constexpr bool kKeeps = false;
  using Units = IndependentBackward<Cell, T, kUnits, kDense, kBlockThreads>;
  using Units::Units;
  using Maps = StepCoefficients<typename Units::A, Units::kLive>[kUnits];

  __device__ __forceinline__ void reduce(int begin, int end, Maps& maps) {
    constexpr int kLive = Units::kLive;
    for_arrived<Units>(*this, begin, end, [&](int, const typename Units::Inputs& inputs) {
      typename Units::Saved saved;
      CellGradients<Cell, typename Units::A> grads[kUnits];
      Units::widen_inputs(inputs, saved);
      Units::template step</*kStores=*/false>(inputs, saved, grads);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int j = 0; j < kLive; ++j) {
          typename Units::A column[at_least_one(kLive)];
#pragma unroll
          for (int i = 0; i < kLive; ++i) column[i] = maps[u].of[i][j];
          pull_back(*this, u, saved, column);
#pragma unroll
          for (int i = 0; i < kLive; ++i) maps[u].of[i][j] = column[i];
        }
        maps[u].keep(Units::share_of(inputs));
      }
    });
  }
};

template <class Map>
class TiledUnits : public Map {
  using typename Map::Units;
  using A = typename Map::A;
  static constexpr int kUnits = Map::kUnits, kCarried = Map::kCarried, kFirst = Map::kFirstLive;

 public:
  using F = UnitMap<kUnits, Map::kLive>;
  using State = typename F::State;

  template <class Arguments>
  __device__ __forceinline__ TiledUnits(const Arguments& arguments, const TileThread& at)
      : Map(arguments, (at.group << at.width_bits) + at.column), at_(at) {}

  __device__ __forceinline__ void run(const UnitTiles& tiles, const TileLinks<F>& links,
                                      const TileStatesShared<F>& shared) {
    const int count = Map::exists() ? max(Map::count(), 0) : 0;
    const int64_t first = (at_.tile * at_.rows + at_.row) * tiles.thread_steps;
    const int begin = static_cast<int>(min(first, int64_t{count})),
              end = min(begin + tiles.thread_steps, count);
    A h[kUnits] = {};
    State initial = {};
    if (count > 0) {
      Map::template load_all<typename Map::Inputs>(begin, end, typename Map::Source(*this, begin));
      Map::load_carried();
      initial = state();
      if (begin == 0) copy_h(h, Map::h_);
    }
    start_from({}, h);
    typename Map::Maps maps;
    Map::reduce(begin, end, maps);
    Map::segment_ = static_cast<int>(at_.tile * at_.rows + at_.row);
    const auto run_from = [&](const State& before) {
      if (begin < end) {
        start_from(before, h);
        run_steps(begin, end);
        if (end == count) Map::store_carried();
        return state();
      }
      return before;
    };
    run_tile_from_states(links, shared, at_, begin < end ? function(maps) : F::identity(), initial, run_from,
                         [] {});
    Map::finish_tile(at_);
  }

 private:
  __device__ __forceinline__ void run_steps(int begin, int end) {
    typename Map::Sink sink(*this, begin);
    if constexpr (Map::kKeeps) {
      Map::run_kept(begin, end, sink);
    } else {
      for_arrived<Units>(*this, begin, end, [&](int n, const typename Map::Inputs& inputs) {
        Map::run_step(static_cast<Units&>(*this), sink, n, inputs);
      });
    }
  }
  __device__ __forceinline__ static void copy_h(A (&to)[kUnits], const A (&from)[kUnits]) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) to[u] = from[u];
  }
  // Sets what is handed on to the next step, and h where no step reads it: backward, its gradient after the
  // last step goes on to the states.
  __device__ __forceinline__ void start_from(const State& values, const A (&h)[kUnits]) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = kFirst; i < kCarried; ++i) {
        Map::carried(u, i) = static_cast<A>(values.of[u][i - kFirst]);
      }
    }
    if (kFirst > 0) copy_h(Map::h_, h);
  }
  __device__ __forceinline__ State state() {
    State values = {};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = kFirst; i < kCarried; ++i) values.of[u][i - kFirst] = Map::carried(u, i);
    }
    return values;
  }
  // After `reduce` from zeros.
  __device__ __forceinline__ F function(const typename Map::Maps& maps) {
    F f;
    f.b = state();
    f.for_units([&](int u) {
      f.a[u] = F::A::from([&](int i, int j) { return maps[u].of[i][j] + 0.; });  // not -0
      if (maps[u].forget) f.forget(u);
    });
    return f;
  }

  const TileThread& at_;
};

// A block takes the next tile: those of the first steps come first.
template <class Map, class Arguments>
__device__ __forceinline__ void run_tile_of_units(const Arguments& sequence, const UnitTiles& tiles) {
  using Tiled = TiledUnits<Map>;
  using F = typename Tiled::F;
  constexpr int kThreads = Map::kThreads;
  const auto links = TileLinks<F>::in(tiles.links, tiles.groups, tiles.tiles, 1 << tiles.width_bits);
  auto* const taken = reinterpret_cast<unsigned*>(dynamic_shared_floats());
  if (threadIdx.x == 0) *taken = links.started ? atomicAdd(links.started, 1u) + 1 : blockIdx.x;
  __syncthreads();
  const unsigned number = *taken;
  __syncthreads();  // before the threads copy what their steps read
  const int thread = static_cast<int>(threadIdx.x), width = 1 << tiles.width_bits,
            rows = kThreads >> tiles.width_bits;
  const TileThread at = {
      number % tiles.groups,      number / tiles.groups, tiles.tiles,           width, tiles.width_bits, rows,
      thread >> tiles.width_bits, thread & (width - 1),  min(tiles.depth, rows)};
  const TileStatesShared<F> shared(reinterpret_cast<char*>(dynamic_shared_floats()) + tiles.input_bytes,
                                   kThreads);
  Tiled(sequence, at).run(tiles, links, shared);
}

}  // namespace lltm_ext
