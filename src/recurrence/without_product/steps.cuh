// The loop over the steps of a cell without a product of h. None of its units depends on another one, so one
// launch runs all steps and no thread waits for another: a thread has one or two adjacent units of a row and
// keeps what they carry in registers. The kernels derive from IndependentUnits (forward.cuh, backward.cuh).
//
// A step computes little, so memory sets the speed. Few rows make few threads: 16 rows of 512 units are 4096
// pairs, about a warp for each multiprocessor of an H200. No other warp hides the latency of memory then, so
// each thread has the loads of several steps in flight.
#pragma once

#include "common/fast_math.cuh"
#include "common/vec.cuh"
#include "recurrence/cell.h"
#include "recurrence/without_product/shape.h"

namespace lltm_ext {

template <class Cell_, typename T_, int kUnits_>
class IndependentUnits {
 protected:
  using Cell = Cell_;
  using T = T_;
  using A = acc_t<T>;
  using Math = typename MathOf<T>::type;
  static constexpr CellShape kShape = kCellShape<Cell>;
  static constexpr int kGates = Cell::kGates, kSavedInGates = kShape.saved_in_gates(),
                       kExtra = kShape.extra();
  static constexpr int kStates = Cell::kStates, kParameters = Cell::kParameters,
                       kStepInputs = Cell::kStepInputs, kUnits = kUnits_;
  static_assert(!Cell::kRecurrent && !Cell::kSeparate, "units are independent if there is no product of h");

  using Values = Vec<T, kUnits>;  // one value of each unit
  using Saved = A[kUnits][at_least_one(Cell::kSaved)];

  __device__ IndependentUnits(const StepOrder& order, int hidden, const T* parameters)
      : order_(order), hidden_(hidden) {
    const int threads_of_row = hidden / kUnits;
    const int64_t thread = int64_t{blockIdx.x} * kIndependentThreads + threadIdx.x;
    row_ = thread / threads_of_row;
    unit_ = static_cast<int>(thread % threads_of_row) * kUnits;
    if (!exists()) return;
#pragma unroll
    for (int p = 0; p < kParameters; ++p) {
      load(plane(parameters, 0, kParameters, p), [&](int u) -> A& { return in_[u].parameters[p]; });
    }
  }

  __device__ bool exists() const { return row_ < order_.batch; }

  // Which of steps [begin, end) have the thread's row: a packed sequence's last time steps may lack it.
  struct Range {
    int begin, end;
  };
  __device__ Range steps_of_row(int begin, int end) const {
    if (!order_.first_rows) return {begin, end};
    int has = 0, lacks = order_.length;  // the first `has` time steps have the row
    while (has < lacks) {
      const int t = (has + lacks) / 2;
      if (order_.first_rows[t + 1] - order_.first_rows[t] > row_) {
        has = t + 1;
      } else {
        lacks = t;
      }
    }
    if (order_.reverse) return {max(begin, order_.length - has), end};
    return {begin, min(end, has)};
  }

  // Calls step(n, inputs) for n = 0, ..., count - 1. A group of steps is computed while load(n, inputs) of
  // the next group is in flight. Both groups are in registers, so more values a step make smaller groups.
  template <class Inputs, class Load, class Step>
  __device__ __forceinline__ static void for_steps(int count, Load&& load, Step&& step) {
    constexpr int kGroup = sizeof(Inputs) <= 24 ? 8 : sizeof(Inputs) <= 48 ? 4 : 2;
    if (count <= 0) return;
    Inputs next[kGroup];
    const auto load_next = [&](int first) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) load(min(first + i, count - 1), next[i]);
    };
    load_next(0);
    for (int first = 0; first < count; first += kGroup) {
      Inputs current[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) current[i] = next[i];
      load_next(first + kGroup);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (first + i < count) step(first + i, current[i]);
      }
    }
  }

  __device__ int64_t row_at(int step) const { return order_.at(step).first + row_; }

  // Where the thread's units are in [rows, planes, H], and in [S, B, H].
  template <typename X>
  __device__ X* plane(X* base, int64_t row, int planes, int plane) const {
    return base + (row * planes + plane) * hidden_ + unit_;
  }
  template <typename X>
  __device__ X* state(X* base, int state) const {
    return plane(base, int64_t{state} * order_.batch + row_, 1, 0);
  }
  // Where saved value v of a row is.
  template <typename X>
  __device__ X* saved_plane(X* gates, X* extra, int64_t row, int v) const {
    return v < kSavedInGates ? plane(gates, row, kGates, v) : plane(extra, row, kExtra, v - kSavedInGates);
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

  __device__ void set_step_inputs(const Values (&values)[at_least_one(kStepInputs)]) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int k = 0; k < kStepInputs; ++k) in_[u].steps[k] = widen(values[k].data[u]);
    }
  }

  const StepOrder& order_;
  const int hidden_;
  int64_t row_;
  int unit_;  // the thread's first
  CellInputs<Cell, A> in_[kUnits];
};

}  // namespace lltm_ext
