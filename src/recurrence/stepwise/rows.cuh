// One step of a cell whose units read values over all units of their row (step.h), on CUDA. A thread has a
// unit, and a block has a row, or a cluster of blocks does.
#pragma once

#include "common/fast_math.cuh"
#include "common/hopper/ptx.cuh"
#include "common/launch.cuh"
#include "recurrence/over_units.h"
#include "recurrence/stepwise/rows.h"
#include "recurrence/stepwise/step.h"

namespace lltm_ext {

constexpr bool has_clusters() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return false;
#else
  return true;
#endif
}

// What the threads of a row compute together. All of them call a function, since it waits for all. They get
// the same bits: each adds up what the row's warps have found, in the order of the units.
template <typename A>
class UnitsOfThreads {
 public:
  // Of a block. Calls take turns, so that a warp may go on to the next call before others have read.
  struct Memory {
    A parts[2][kMostRowBlocks * kMostRowThreads / 32];
  };

  UnitsOfThreads() = default;
  __device__ UnitsOfThreads(Memory& memory, const RowOfThreads& row, int block)
      : memory_(&memory),
        units_(row.blocks * row.threads),
        blocks_(row.blocks),
        lane_(threadIdx.x % 32),
        lanes_(min(32, row.threads - static_cast<int>(threadIdx.x) / 32 * 32)),
        parts_(row.blocks * row.warps()),
        part_(block * row.warps() + threadIdx.x / 32) {
    // No block writes to one that has not started.
    if constexpr (has_clusters()) {
      if (blocks_ > 1) hopper::cluster_sync();
    }
  }

  __device__ A sum(A x) const {
    return combined(x, [](A a, A b) { return a + b; });
  }
  __device__ A mean(A x) const { return sum(x) / static_cast<A>(units_); }
  __device__ A max(A x) const {
    return combined(x, [](A a, A b) { return maximum(a, b); });
  }

  // The sum of this unit and those before it.
  __device__ A cumsum(A x) const {
    for (int d = 1; d < 32; d *= 2) {
      const A before = __shfl_up_sync(mask(), x, d);
      if (lane_ >= d) x += before;
    }
    const A* const parts = exchanged(x, lanes_ - 1);
    A sum = 0;
    for (int p = 0; p < part_; ++p) sum += parts[p];
    return sum + x;
  }
  // The sum of this unit and those after it.
  __device__ A cumsum_back(A x) const {
    for (int d = 1; d < 32; d *= 2) {
      const A after = __shfl_down_sync(mask(), x, d);
      if (lane_ + d < lanes_) x += after;
    }
    const A* const parts = exchanged(x, 0);
    A sum = 0;
    for (int p = parts_ - 1; p > part_; --p) sum += parts[p];
    return sum + x;
  }

 private:
  __device__ unsigned mask() const { return ~0u >> (32 - lanes_); }

  template <class F>
  __device__ A combined(A x, F&& f) const {
    for (int d = 16; d > 0; d /= 2) {
      const A other = __shfl_down_sync(mask(), x, d);
      if (lane_ + d < lanes_) x = f(x, other);
    }
    const A* const parts = exchanged(x, 0);
    A all = parts[0];
    for (int p = 1; p < parts_; ++p) all = f(all, parts[p]);
    return all;
  }

  // What one lane of each of the row's warps has.
  __device__ const A* exchanged(A x, int lane) const {
    turn_ ^= 1;
    A* const parts = memory_->parts[turn_];
    if (blocks_ == 1) {
      if (lane_ == lane) parts[part_] = x;
      __syncthreads();
    } else if constexpr (has_clusters()) {
      for (int block = 0; block < blocks_ && lane_ == lane; ++block) {
        *const_cast<A*>(hopper::in_block(parts + part_, block)) = x;
      }
      hopper::cluster_sync();
    }
    return parts;
  }

  Memory* memory_;
  int units_, blocks_, lane_, lanes_, parts_, part_;
  mutable int turn_ = 0;
};

template <>
class RowOfUnits<float> : public UnitsOfThreads<float> {
 public:
  using UnitsOfThreads::UnitsOfThreads;
};
template <>
class RowOfUnits<double> : public UnitsOfThreads<double> {
 public:
  using UnitsOfThreads::UnitsOfThreads;
};

// Unit j of row b.
template <class Cell, class Math, typename T, typename C>
__device__ __forceinline__ void run_row(const StepForwardArguments<T, C>& step, int64_t b, int64_t j,
                                        const RowOfUnits<acc_t<T>>& units) {
  CellInputs<Cell, acc_t<T>> in;
  in.units = units;
  load_gates<Cell>(step, b, j, in);
  step_unit<Cell, Math>(step, b, j, in);
}
template <class Cell, class Math, typename T, typename C, typename Extra>
__device__ __forceinline__ void run_row(const StepBackwardArguments<T, C, Extra>& step, int64_t b, int64_t j,
                                        const RowOfUnits<acc_t<T>>& units) {
  CellInputs<Cell, acc_t<T>> in;
  in.units = units;
  CellGradients<Cell, acc_t<T>> grads;
  const acc_t<T> grad_h = step.grad_h ? widen(step.grad_h[b * step.hidden + j]) : acc_t<T>(0);
  step_unit<Cell, Math>(step, b, j, grad_h, grads, step.grad_old_states, in);
  store_gradients(step, b, j, grads);
}

// The step of the kernel's rows or, from kStage 0 on, a stage of it that ends in products with the cell's own
// weights. It may begin before the matrix product that it reads has ended.
template <class Cell, typename T, int kStage = -1, class Step>
__device__ __forceinline__ void run_rows(const Step& step, const RowOfThreads& row,
                                         typename RowOfUnits<acc_t<T>>::Memory& memory) {
  griddepcontrol_wait();
  const int block = static_cast<int>(blockIdx.x % row.blocks);
  const int64_t b = blockIdx.x / row.blocks, j = block * row.threads + threadIdx.x;
  const RowOfUnits<acc_t<T>> units(memory, row, block);
  using Math = typename MathOf<T>::type;
  if constexpr (kStage < 0) {
    run_row<Cell, Math>(step, b, j, units);
  } else {
    CellInputs<Cell, acc_t<T>> in;
    in.units = units;
    feed_unit<Cell, Math, kStage>(step, b, j, in);
  }
}

}  // namespace lltm_ext
