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
template <typename A>
__device__ __forceinline__ A without_underflow_of(A x, A y) {
  constexpr A kLeast = sizeof(A) == 8 ? A(5e-324) : A(1.4e-45);
  const A product = x * y;
  return product == 0 && x != 0 && y != 0 ? kLeast : product;
}

// A function of what a thread's units hand on: values -> a values + b. A unit that is reset has b, whatever
// its values were: its coefficients are -0, which no others are. kMostExponent: of two, from which on
// coefficients may have lost digits of the result.
template <int kUnits, int kLive, int kMostExponent>
struct UnitMap {
  static constexpr int kSize = at_least_one(kLive);
  struct State {
    double of[kUnits][kSize];
  };
  State b;
  double a[kUnits][kSize][kSize];  // [new value][old value]

  __device__ __forceinline__ static UnitMap identity() {
    UnitMap f = {};
    for_all([&](int u, int i) { f.a[u][i][i] = 1; });
    return f;
  }
  __device__ __forceinline__ static UnitMap constant(const State& state) {
    UnitMap f = {};
    f.b = state;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) f.forget(u);
    return f;
  }
  __device__ __forceinline__ bool forgets(int u) const {
    return a[u][0][0] == 0 && __double2hiint(a[u][0][0]) < 0;
  }
  __device__ __forceinline__ void forget(int u) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) a[u][i][j] = -0.;
    }
  }
  // The same function; NaNs are the usual ones, so no number of it has all bits set.
  __device__ __forceinline__ UnitMap with_plain_nans() const {
    UnitMap f = *this;
    for_all([&](int u, int i) {
      f.b.of[u][i] = plain_nan(f.b.of[u][i]);
#pragma unroll
      for (int j = 0; j < kSize; ++j) f.a[u][i][j] = plain_nan(f.a[u][i][j]);
    });
    return f;
  }

  template <class F>
  __device__ __forceinline__ static void for_all(F&& f) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) f(u, i);
    }
  }
};

template <int kUnits, int kLive, int kMost>
__device__ __forceinline__ typename UnitMap<kUnits, kLive, kMost>::State apply(
    const UnitMap<kUnits, kLive, kMost>& f, const typename UnitMap<kUnits, kLive, kMost>::State& state) {
  auto after = f.b;
  f.for_all([&](int u, int i) {
    double sum = 0;  // without the rest, so that terms which cancel round nothing of it
#pragma unroll
    for (int j = 0; j < f.kSize; ++j) sum += f.a[u][i][j] * state.of[u][j];
    if (!f.forgets(u)) after.of[u][i] += sum;
  });
  return after;
}

// f, then g.
template <int kUnits, int kLive, int kMost>
__device__ __forceinline__ UnitMap<kUnits, kLive, kMost> then(const UnitMap<kUnits, kLive, kMost>& f,
                                                              const UnitMap<kUnits, kLive, kMost>& g) {
  UnitMap<kUnits, kLive, kMost> both;
  both.b = apply(g, f.b);
  f.for_all([&](int u, int i) {
#pragma unroll
    for (int j = 0; j < f.kSize; ++j) {
      double sum = 0;
#pragma unroll
      for (int k = 0; k < f.kSize; ++k) sum += without_underflow_of(g.a[u][i][k], f.a[u][k][j]);
      both.a[u][i][j] = sum;
    }
  });
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (f.forgets(u) || g.forgets(u)) both.forget(u);
  }
  return both;
}

// Whether the function finds what the steps find.
template <int kUnits, int kLive, int kMost>
__device__ __forceinline__ bool is_reliable(const UnitMap<kUnits, kLive, kMost>& f) {
  bool reliable = true;
  f.for_all([&](int u, int i) {
    reliable &= is_below<1024>(f.b.of[u][i]);
#pragma unroll
    for (int j = 0; j < f.kSize; ++j) reliable &= is_below<kMost>(f.a[u][i][j]);
  });
  return reliable;
}

template <int kUnits, int kLive, int kMost>
__device__ __forceinline__ UnitMap<kUnits, kLive, kMost> shuffle_up(const UnitMap<kUnits, kLive, kMost>& f,
                                                                    int lanes) {
  UnitMap<kUnits, kLive, kMost> from;
  f.for_all([&](int u, int i) {
    from.b.of[u][i] = shuffle_up(f.b.of[u][i], lanes);
#pragma unroll
    for (int j = 0; j < f.kSize; ++j) from.a[u][i][j] = shuffle_up(f.a[u][i][j], lanes);
  });
  return from;
}

// The coefficients of some steps of a unit, [new value][old value].
template <class Units>
struct Coefficients {
  using A = typename Units::A;
  static constexpr int kLive = Units::kLive;
  A of[at_least_one(kLive)][at_least_one(kLive)];
  bool forget = false;  // a reset of all

  __device__ Coefficients() {
#pragma unroll
    for (int i = 0; i < kLive; ++i) {
#pragma unroll
      for (int j = 0; j < kLive; ++j) of[i][j] = i == j;
    }
  }
  // What `later` makes of these.
  __device__ void then(const Coefficients& later) {
    const Coefficients before = *this;
#pragma unroll
    for (int i = 0; i < kLive; ++i) {
#pragma unroll
      for (int j = 0; j < kLive; ++j) {
        of[i][j] = 0;
#pragma unroll
        for (int k = 0; k < kLive; ++k) of[i][j] += without_underflow_of(later.of[i][k], before.of[k][j]);
      }
    }
  }
  __device__ void keep(A lost) {
    if (lost == 0) return;
    forget |= mask_of(lost) == 0;
#pragma unroll
    for (int i = 0; i < kLive; ++i) {
#pragma unroll
      for (int j = 0; j < kLive; ++j) of[i][j] = scale_by_mask(mask_of(lost), of[i][j]);
    }
  }
};

// Cell::backward of gradients of what a step handed on: they become those of what it read.
template <class Units, class Saved>
__device__ void pull_back(Units& units, int u, const Saved& saved,
                          typename Units::A (&live)[at_least_one(Units::kLive)]) {
  using Cell = typename Units::Cell;
  using A = typename Units::A;
  constexpr int kFirst = Units::kFirstLive;
  A grad_states[at_least_one(Cell::kStates)] = {};
  CellGradients<Cell, A> grads;
#pragma unroll
  for (int i = kFirst; i < Units::kCarried; ++i) {
    if (i > 0) grad_states[i - 1] = live[i - kFirst];
  }
  const A grad_h = kFirst == 0 ? live[0] : A(0);
  Cell::template backward<typename Units::Math>(saved[u], units.in_[u], grad_h, grad_states, grads);
#pragma unroll
  for (int i = kFirst; i < Units::kCarried; ++i) live[i - kFirst] = i == 0 ? grads.h : grad_states[i - 1];
}

// Reduces steps forward. A gradient of a new value with respect to an old one is a coefficient of the step.
template <class Cell, typename T, int kUnits, bool kDense, int kTileThreads>
class ForwardMap : public IndependentForward<Cell, T, kUnits, kDense, kTileThreads> {
 protected:
  using Units = IndependentForward<Cell, T, kUnits, kDense, kTileThreads>;
  using Units::Units;

  __device__ __forceinline__ void reduce(int begin, int end, Coefficients<Units> (&maps)[kUnits]) {
    Units::for_inputs(begin, end, [&](int, const typename Units::Inputs& inputs) {
      typename Units::Saved saved;
      Units::step(inputs, saved);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        Coefficients<Units> of_step;
#pragma unroll
        for (int i = 0; i < Units::kLive; ++i) pull_back(*this, u, saved, of_step.of[i]);
        maps[u].keep(Units::share_of(inputs));
        maps[u].then(of_step);
      }
    });
  }
};

// Reduces steps backward. A step pulls the columns of the coefficients back.
template <class Cell, typename T, int kUnits, bool kDense, int kTileThreads>
class BackwardMap : public IndependentBackward<Cell, T, kUnits, kDense, kTileThreads> {
 protected:
  using Units = IndependentBackward<Cell, T, kUnits, kDense, kTileThreads>;
  using Units::Units;

  __device__ __forceinline__ void reduce(int begin, int end, Coefficients<Units> (&maps)[kUnits]) {
    constexpr int kLive = Units::kLive;
    Units::for_inputs(begin, end, [&](int, const typename Units::Inputs& inputs) {
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
  using F = UnitMap<kUnits, Map::kLive, /*kMostExponent=*/3>;
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
      Map::load_steps(begin, end);
      Map::load_carried();
      initial = state();
      if (begin == 0) copy_h(h, Map::h_);
    }
    set({});
    Coefficients<Units> maps[kUnits];
    Map::reduce(begin, end, maps);
    Map::segment_ = static_cast<int>(at_.tile * at_.rows + at_.row);
    const auto run_from = [&](const State& before) {
      if (begin < end) {
        set(before);
        if (kFirst > 0) copy_h(Map::h_, h);
        Map::run_steps(begin, end);
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
  __device__ __forceinline__ static void copy_h(A (&to)[kUnits], const A (&from)[kUnits]) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) to[u] = from[u];
  }
  // What is handed on to the next step; h also where no step reads it.
  __device__ __forceinline__ void set(const State& values) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kCarried; ++i) {
        Map::carried(u, i) = i < kFirst ? A(0) : static_cast<A>(values.of[u][i < kFirst ? 0 : i - kFirst]);
      }
    }
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
  __device__ __forceinline__ F function(const Coefficients<Units> (&maps)[kUnits]) {
    F f = F::identity();
    f.b = state();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < Map::kLive; ++i) {
#pragma unroll
        for (int j = 0; j < Map::kLive; ++j) f.a[u][i][j] = maps[u].of[i][j] + 0.;  // not -0
      }
      if (maps[u].forget) f.forget(u);
    }
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
