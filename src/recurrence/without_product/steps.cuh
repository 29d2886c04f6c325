// The loop over the steps of a cell without a product of h. None of its units depends on another one, so one
// launch runs all steps: a thread has one or two adjacent units of a row and keeps what they carry in
// registers. The kernels derive from IndependentUnits (forward.cuh, backward.cuh).
//
// A step computes little, so memory sets the speed, and few rows make few threads: 16 rows of 512 units are
// 4096 pairs, about a warp for each multiprocessor of an H200. No other warp hides the latency of memory
// then. So each thread copies what later steps read ahead to shared memory. Where even these threads are too
// few, others run later steps at the same time (tiles.cuh).
#pragma once

#include "common/fast_math.cuh"
#include "common/ptx.cuh"
#include "common/vec.cuh"
#include "recurrence/cell.h"
#include "recurrence/without_product/shape.h"

namespace lltm_ext {

__device__ inline int64_t independent_thread() {
  return int64_t{blockIdx.x} * kIndependentThreads + threadIdx.x;
}

// Values of kind kKind that a step reads or writes. None take no memory.
template <class V, int kCount, int kKind>
struct Several {
  V of[kCount];
};
template <class V, int kKind>
struct Several<V, 0, kKind> {
  static constexpr V* of = nullptr;
};

// kDense_: every step has all rows of the batch, and none is reset.
// kThreads_: those of a block, a warp or those of a tile.
template <class Cell_, typename T_, int kUnits_, bool kDense_, int kThreads_>
class IndependentUnits {
 public:
  using Cell = Cell_;
  using T = T_;
  using A = acc_t<T>;
  using Math = typename MathOf<T>::type;
  static constexpr CellShape kShape = kCellShape<Cell>;
  static constexpr int kGates = Cell::kGates, kSaved = Cell::kSaved;
  static constexpr int kStates = Cell::kStates, kParameters = Cell::kParameters,
                       kStepInputs = Cell::kStepInputs, kUnits = kUnits_;
  static constexpr bool kDense = kDense_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kCarried = 1 + kStates;              // values that steps hand on; the first is h
  static constexpr int kFirstLive = Cell::kReadsH ? 0 : 1;  // the first that steps read
  static constexpr int kLive = kCarried - kFirstLive;
  static_assert(!Cell::kRecurrent && !Cell::kSeparate, "units are independent if there is no product of h");

  using Values = Vec<T, kUnits>;  // one value of each unit
  using Projection = Vec<projection_t<Cell, T>, kUnits>;
  using Lost = Several<A, kDense ? 0 : 1, 2>;  // the share that the row loses before a step
  __device__ static A share_of(const Lost& lost) {
    if constexpr (kDense) {
      return 0;
    } else {
      return lost.of[0];
    }
  }
  using Saved = A[kUnits][at_least_one(kSaved)];

  // `thread`: of those that share the units of all rows. The gates' biases may follow the parameters.
  __device__ IndependentUnits(const StepOrder& order, int hidden, const T* parameters, bool has_bias,
                              int64_t thread)
      : order_(order), hidden_(hidden) {
    const int threads_of_row = hidden / kUnits;
    row_ = thread / threads_of_row;
    unit_ = static_cast<int>(thread % threads_of_row) * kUnits;
    if (!exists()) return;
#pragma unroll
    for (int p = 0; p < kParameters; ++p) {
      load(plane(parameters, 0, kParameters, p), [&](int u) -> A& { return in_[u].parameters[p]; });
    }
    if (!has_bias) return;
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      load(plane(parameters, 0, 0, kParameters + g), [&](int u) -> A& { return bias_[u][g]; });
    }
  }

  __device__ bool exists() const { return row_ < order_.batch; }

  // Of steps [begin, end), those that the thread has: a packed sequence's last time steps may lack its row.
  // The kernel computes them from the first one or, backward, from the last one.
  __device__ void take_steps(int begin, int end, bool backward) {
    int has = 0;  // the first time steps, which have the row
    if (is_packed()) {
      int lacks = order_.length;
      while (has < lacks) {
        const int t = (has + lacks) / 2;
        if (order_.first_rows[t + 1] - order_.first_rows[t] > row_) {
          has = t + 1;
        } else {
          lacks = t;
        }
      }
      if (order_.reverse) {
        begin = max(begin, order_.length - has);
      } else {
        end = min(end, has);
      }
    }
    count_ = end - begin;
    first_step_ = end - 1 - (is_packed() && order_.reverse ? order_.length - has : 0);
    const int first = backward ? end - 1 : begin;
    first_time_ = order_.reverse ? order_.length - 1 - first : first;
    time_step_ = order_.reverse == backward ? 1 : -1;
    stride_ = int64_t{time_step_} * order_.batch * hidden_;
  }
  __device__ int count() const { return count_; }

  template <class Units, class Sink>
  __device__ __forceinline__ static void run_step(Units& units, Sink& sink, int n,
                                                  const typename Units::Inputs& inputs) {
    typename Units::Results results;
    units.step(inputs, results);
    sink.next(n);
    sink.write(results);
  }

  // Runs all steps of a thread. What they read is a Source: source.next(n) goes to that of step n, and
  // source.read(n, inputs, f) calls f(value of inputs, where it is in memory), and f(value, x) for a value
  // that it computes. These are copied to a ring of stages of some steps. Each thread has its own places
  // there, so none waits for another. source.replace(first, count, place) may change what has arrived of so
  // many steps: place(n, inputs) is where that of step n is. A Sink writes the results of steps: sink.next(n)
  // goes to where step n writes, and sink.write(results) writes.
  template <class Units>
  __device__ __forceinline__ void for_steps(Units& units) const {
    using Inputs = typename Units::Inputs;
    constexpr int kAhead = kRingStages - 1;
    typename Units::Source source(units, 0);
    typename Units::Sink sink(units, 0);
    const auto copy_next = [&](int first, int stage) {
      copy_steps<Inputs>(source, first, min(stage_steps_, count_ - first), stage);
    };
#pragma unroll 1
    for (int stage = 0; stage < kAhead; ++stage) copy_next(stage * stage_steps_, stage);
    for (int first = 0, stage = 0; first < count_; first += stage_steps_, stage = (stage + 1) % kRingStages) {
      copy_next(first + kAhead * stage_steps_, (stage + kAhead) % kRingStages);
      cp_async_wait_group<kAhead>();
      const int count = min(stage_steps_, count_ - first);
      replace_steps<Inputs>(source, first, count, stage);
      run_steps_of_stage<Inputs>(source, first, count, stage,
                                 [&](int n, const Inputs& inputs) { run_step(units, sink, n, inputs); });
    }
  }

  template <class Inputs, class Source>
  __device__ __forceinline__ void copy_steps(Source&& source, int first, int count, int stage) const {
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      Inputs inputs;
      source.next(first + i);
      source.read(first + i, inputs, Ahead<Inputs>{{input_place<Inputs>(stage, i), inputs}});
    }
    cp_async_commit_group();
  }
  template <class Inputs, class Source>
  __device__ __forceinline__ void replace_steps(Source&& source, int first, int count, int stage) const {
    source.replace(first, count, [&](int n, Inputs& inputs) {
      return StepPlace<Inputs>{input_place<Inputs>(stage, n - first), inputs};
    });
  }
  template <class Inputs, class Source, class Step>
  __device__ __forceinline__ void run_steps_of_stage(const Source& source, int first, int count, int stage,
                                                     Step&& step) const {
    constexpr int kGroup = step_group(sizeof(Inputs));
    // A group of steps is read before its first one runs.
    const auto run_group = [&](int done, auto size) {
      Inputs group[size.value] = {};
#pragma unroll
      for (int i = 0; i < size.value; ++i) {
        source.read(first + done + i, group[i],
                    Arrived<Inputs>{{input_place<Inputs>(stage, done + i), group[i]}});
      }
#pragma unroll
      for (int i = 0; i < size.value; ++i) step(first + done + i, group[i]);
    };
    int done = 0;
    for (; done + kGroup <= count; done += kGroup) run_group(done, Size<kGroup>());
    for (; done < count; ++done) run_group(done, Size<1>());
  }

  // In a tile: copies all that the thread's steps read, and waits for it.
  template <class Inputs, class Source>
  __device__ __forceinline__ void load_all(int begin, int end, Source&& source) const {
    copy_steps<Inputs>(source, begin, end - begin, /*stage=*/0);
    cp_async_wait_group<0>();
    replace_steps<Inputs>(source, begin, end - begin, /*stage=*/0);
  }
  template <int kSize>
  struct Size {
    static constexpr int value = kSize;
  };

  // The rows of the thread's steps in an array [N, kPlanes, H], one after the other.
  template <typename X, int kPlanes>
  class Rows {
   public:
    // Before step `begin`.
    __device__ Rows(const IndependentUnits& units, X* array, int begin) : units_(units), array_(array) {
      if (kDense) row_ = units.plane(array, units.row_of(begin), kPlanes, 0) - units.stride_ * kPlanes;
    }
    __device__ void next(int n) {
      if (kDense) {
        row_ += units_.stride_ * kPlanes;
      } else {
        row_ = units_.plane(array_, units_.row_of(n), kPlanes, 0);
      }
    }
    __device__ X* plane(int p) const { return row_ + int64_t{p} * units_.hidden_; }

   private:
    const IndependentUnits& units_;
    X* const array_;
    X* row_;
  };

  // A step's values in shared memory: all threads have the first one, then all have the second one, and so
  // on.
  template <class Values_>
  struct StepPlace {
    char* memory;
    Values_& values;

    template <class V>
    __device__ V* place(const V& value) const {
      const auto offset = reinterpret_cast<const char*>(&value) - reinterpret_cast<const char*>(&values);
      return reinterpret_cast<V*>(memory + offset * kThreads + threadIdx.x * sizeof(V));
    }
  };
  template <class Inputs>
  struct Ahead : StepPlace<Inputs> {
    template <typename X>
    __device__ void operator()(Vec<X, kUnits>& value, const X* from) const {
      constexpr int kBytes = sizeof(value);
      if constexpr (kBytes == 2) {
        copy_to_shared<kBytes>(reinterpret_cast<uint16_t*>(this->place(value)),
                               reinterpret_cast<const uint16_t*>(from));
      } else {
        copy_to_shared<kBytes>(this->place(value), reinterpret_cast<const Vec<X, kUnits>*>(from));
      }
    }
    __device__ void operator()(A& value, A x) const { *this->place(value) = x; }
  };
  template <class Inputs>
  struct Arrived : StepPlace<Inputs> {
    template <typename X>
    __device__ void operator()(Vec<X, kUnits>& value, const X*) const {
      value = *this->place(value);
    }
    __device__ void operator()(A& value, A) const { value = *this->place(value); }
  };
  template <class Inputs>
  __device__ char* input_place(int stage, int step) const {
    return reinterpret_cast<char*>(dynamic_shared_floats()) +
           (stage * stage_steps_ + step) * kThreads * sizeof(Inputs);
  }

  // The row of the thread's step n.
  __device__ int64_t row_of(int n) const {
    const int time = first_time_ + n * time_step_;
    return (is_packed() ? order_.first_rows[time] : int64_t{time} * order_.batch) + row_;
  }
  __device__ bool is_packed() const { return !kDense && order_.first_rows; }

  // Where the thread's units are in [rows, planes, H], and in [S, B, H].
  template <typename X>
  __device__ X* plane(X* base, int64_t row, int planes, int plane) const {
    return base + (row * planes + plane) * hidden_ + unit_;
  }
  template <typename X>
  __device__ X* state(X* base, int state) const {
    return plane(base, int64_t{state} * order_.batch + row_, 1, 0);
  }
  template <typename X>
  __device__ static Vec<X, kUnits> read(const X* from) {
    return *reinterpret_cast<const Vec<X, kUnits>*>(from);
  }
  // to(u) = the value of each unit u.
  template <typename X, class F>
  __device__ static void load(const X* from, F&& to) {
    const auto values = *reinterpret_cast<const Vec<X, kUnits>*>(from);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) to(u) = widen(values.data[u]);
  }
  template <typename X, class F>
  __device__ static void store(X* to, F&& value_of) {
    Vec<X, kUnits> values;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) values.data[u] = narrow<X>(value_of(u));
    *reinterpret_cast<Vec<X, kUnits>*>(to) = values;
  }

  // value_of(u) of each unit u.
  template <class F>
  __device__ __forceinline__ static Values narrowed(F&& value_of) {
    Values values;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) values.data[u] = narrow<T>(value_of(u));
    return values;
  }
  __device__ __forceinline__ static void write(T* to, const Values& values) {
    *reinterpret_cast<Values*>(to) = values;
  }

  __device__ void set_step_inputs(const Values* values) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int k = 0; k < kStepInputs; ++k) in_[u].steps[k] = widen(values[k].data[u]);
    }
  }

  // What steps hand on of unit u: h, then the states; in the backward their gradients.
  __device__ A& carried(int u, int i) { return i == 0 ? h_[u] : states_[u][i - 1]; }

  const StepOrder& order_;
  const int hidden_;
  int64_t row_;  // in the batch
  int unit_;     // the thread's first
  int count_ = 0, first_time_, time_step_;
  int first_step_;       // backward, the one of the thread's steps that is the row's first in the sequence
  int64_t stride_;       // from one step's row to the next in [N, H], if all steps have the batch
  int stage_steps_ = 0;  // UnitTiles
  int segment_ = 0;      // in tiles: the thread's steps among those of its units
  CellInputs<Cell, A> in_[kUnits];
  A bias_[kUnits][at_least_one(kGates)] = {}, h_[kUnits] = {}, states_[kUnits][at_least_one(kStates)] = {};
};

}  // namespace lltm_ext
