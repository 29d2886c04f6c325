// Segments of a sequence in parallel, for cells whose steps map what they hand on by an affine function:
// affine cells forward, and gradients of all cells backward. Three kernels run:
//
//   1. A thread reduces each segment to its map: coefficients, and rests, which are the result from zeros.
//   2. A warp for each unit combines the maps to the values that each segment starts from.
//   3. The kernel of all steps runs the segments, each from these values (IndependentUnits::run_segment).
//
// The order of all operations depends on sizes only, and so do the bits of the result. Growing coefficients
// can overflow or cancel where the values do not. Then the steps of a segment run one after the other in 2.
#pragma once

#include "recurrence/without_product/backward.cuh"
#include "recurrence/without_product/forward.cuh"

namespace lltm_ext {

// The coefficients of a unit's map, [new value][old value].
template <class Units>
struct Coefficients {
  using A = typename Units::A;
  static constexpr int kLive = Units::kLive;
  A of[at_least_one(kLive)][at_least_one(kLive)];

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
        for (int k = 0; k < kLive; ++k) of[i][j] += later.of[i][k] * before.of[k][j];
      }
    }
  }
  __device__ void keep(A lost) {
    if (lost == 0) return;
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

// 1 forward. A gradient of a new value with respect to an old one is a coefficient of the step.
template <class Cell, typename T, int kUnits, bool kDense>
class ForwardMap : public IndependentForward<Cell, T, kUnits, kDense> {
 protected:
  using Units = IndependentForward<Cell, T, kUnits, kDense>;
  using Units::Units;

  __device__ void reduce(int begin, int end, Coefficients<Units> (&maps)[kUnits]) {
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

// 1 backward. A step pulls the columns of the coefficients back.
template <class Cell, typename T, int kUnits, bool kDense>
class BackwardMap : public IndependentBackward<Cell, T, kUnits, kDense> {
 protected:
  using Units = IndependentBackward<Cell, T, kUnits, kDense>;
  using Units::Units;

  __device__ void reduce(int begin, int end, Coefficients<Units> (&maps)[kUnits]) {
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
class ReduceSegments : public Map {
  using typename Map::Units;
  using A = typename Map::A;

 public:
  using Map::Map;

  __device__ void run(const Segments<A>& segments) {
    if (!Map::begins(segments)) return;
    const int segment = blockIdx.y, begin = segment * segments.steps, end = begin + segments.steps;
    if (end >= Map::count()) return;  // no segment follows
    // The first one starts from what the row does, so its result is all rest.
    const bool is_first = segment == 0;
    if (is_first) Map::load_carried();
    Coefficients<Units> maps[Map::kUnits];
    Map::reduce(begin, end, maps);
    const auto store = [&](int plane, auto&& value_of) {
      Map::store(Map::map_plane(segments, segment, plane), value_of);
    };
#pragma unroll
    for (int i = 0; i < Map::kCarried; ++i) store(i, [&](int u) { return Map::carried(u, i); });
#pragma unroll
    for (int i = 0; i < Map::kLive; ++i) {
#pragma unroll
      for (int j = 0; j < Map::kLive; ++j) {
        store(Map::kCarried + i * Map::kLive + j, [&](int u) { return is_first ? A(0) : maps[u].of[i][j]; });
      }
    }
  }
};

// 2. A lane has some successive segments of the block's unit (Units has one a thread: more would spill).
template <class Units>
class CombineSegments : public Units {
  using A = typename Units::A;
  static constexpr int kLanes = kIndependentThreads, kCarried = Units::kCarried, kLive = Units::kLive,
                       kFirst = Units::kFirstLive, kUnits = Units::kUnits;

 public:
  using Units::Units;

  __device__ void run(const Segments<A>& segments) {
    if (!Units::begins(segments) || Units::count() <= 0) return;
    const int lane = threadIdx.x, count = (Units::count() + segments.steps - 1) / segments.steps,
              each = (count + kLanes - 1) / kLanes, lanes = (count + each - 1) / each,
              begin = min(lane * each, count), end = min(begin + each, count);
    Map all = {};
    compose(segments, begin, min(end, count - 1), all);
    Units::load_carried();
    // The lanes pass on what is carried, one after the other. Then each one walks through its segments.
    A before[kUnits][kCarried] = {};
    for (int turn = 0; turn <= lanes; ++turn) {
      const bool all_walk = turn == lanes;
      if (lane == turn) for_carried([&](int u, int i) { before[u][i] = Units::carried(u, i); });
      if (all_walk) for_carried([&](int u, int i) { Units::carried(u, i) = before[u][i]; });
      if (all_walk || (lane == turn && turn + 1 < lanes && !apply(all))) {
        walk(segments, begin, end, count, /*stores=*/all_walk);
      }
      if (all_walk) break;
      for_carried(
          [&](int u, int i) { Units::carried(u, i) = __shfl_sync(0xffffffff, Units::carried(u, i), turn); });
    }
  }

 private:
  struct Map {
    Coefficients<Units> coefficients[kUnits];
    A rests[kUnits][kCarried];
  };
  struct Planes {
    Vec<A, kUnits> of[Units::kMapPlanes];
  };

  template <class F>
  __device__ static void for_carried(F&& f) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kCarried; ++i) f(u, i);
    }
  }

  // Calls f(segment, its map) for segments [begin, end).
  template <class F>
  __device__ __forceinline__ void for_maps(const Segments<A>& segments, int begin, int end, F&& f) const {
    const auto load = [&](int segment, Planes& planes) {
#pragma unroll
      for (int i = 0; i < Units::kMapPlanes; ++i) {
        planes.of[i] = Units::read(Units::map_plane(segments, segment, i));
      }
    };
    Units::template for_loaded<Planes>(begin, end, load, [&](int segment, const Planes& planes) {
      Map map;
      for_carried([&](int u, int i) {
        map.rests[u][i] = planes.of[i].data[u];
        if (i < kFirst) return;
#pragma unroll
        for (int j = 0; j < kLive; ++j) {
          map.coefficients[u].of[i - kFirst][j] = planes.of[kCarried + (i - kFirst) * kLive + j].data[u];
        }
      });
      f(segment, map);
    });
  }

  // Coefficient of new value i and old value j: 0 of values that no step reads.
  __device__ static A coefficient(const Map& map, int u, int i, int j) {
    return i < kFirst || j < kFirst ? A(0) : map.coefficients[u].of[i - kFirst][j - kFirst];
  }

  __device__ void compose(const Segments<A>& segments, int begin, int end, Map& all) const {
    for_carried([&](int u, int i) { all.rests[u][i] = 0; });
    for_maps(segments, begin, end, [&](int, Map& map) {
      for_carried([&](int u, int i) {
        A sum = 0;  // without the rest, so that terms which cancel round nothing of it
#pragma unroll
        for (int j = kFirst; j < kCarried; ++j) sum += coefficient(map, u, i, j) * all.rests[u][j];
        map.rests[u][i] += sum;
      });
      for_carried([&](int u, int i) { all.rests[u][i] = map.rests[u][i]; });
#pragma unroll
      for (int u = 0; u < kUnits; ++u) all.coefficients[u].then(map.coefficients[u]);
    });
  }

  // Replaces what is carried by what a map makes of it. If that would round more than the steps do, because
  // coefficients have grown and terms cancel, or overflow, it returns false and changes nothing.
  __device__ bool apply(const Map& map) {
    constexpr A kMost = 8;
    const auto magnitude = [](A x) { return x < 0 ? -x : x; };
    A after[kUnits][kCarried];
    bool exact = true;
    for_carried([&](int u, int i) {
      A sum = 0, terms = 0, largest = 0;
#pragma unroll
      for (int j = kFirst; j < kCarried; ++j) {
        const A factor = coefficient(map, u, i, j), term = factor * Units::carried(u, j);
        sum += term, terms += magnitude(term), largest = max(largest, magnitude(factor));
      }
      after[u][i] = map.rests[u][i] + sum;
      const A size = max(magnitude(Units::carried(u, i)), magnitude(after[u][i]));
      exact &= after[u][i] - after[u][i] == 0 && (largest <= kMost || terms <= kMost * size);
    });
    if (exact) for_carried([&](int u, int i) { Units::carried(u, i) = after[u][i]; });
    return exact;
  }

  // From what is carried before segments [begin, end) to what is carried after them, of a row with `count`.
  __device__ void walk(const Segments<A>& segments, int begin, int end, int count, bool stores) {
    while (begin < end) {
      int inexact = end;  // the first segment whose map is
      for_maps(segments, begin, end, [&](int segment, const Map& map) {
        if (segment > inexact) return;
#pragma unroll
        for (int i = 0; i < kCarried; ++i) {
          if (!stores) continue;
          Units::store(Units::map_plane(segments, segment, i), [&](int u) { return Units::carried(u, i); });
        }
        // The row's last segment has no map.
        if (segment < count - 1 && !apply(map)) inexact = segment;
      });
      begin = inexact + 1;
      if (inexact == end) continue;
      Units::template run_steps</*kStores=*/false>(inexact * segments.steps, begin * segments.steps);
    }
  }
};

}  // namespace lltm_ext
