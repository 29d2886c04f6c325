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
    A parts[2][kMostRowBlocks * kMostRowThreads / 32][kRowSlots];
  };

  UnitsOfThreads() = default;
  __device__ UnitsOfThreads(Memory& memory, const RowOfThreads& row, int block)
      : memory_(&memory),
        units_(row.blocks * row.threads),
        block_threads_(row.threads),
        block_warps_(row.warps()),
        blocks_(row.blocks),
        lane_(threadIdx.x % 32),
        lanes_(min(32, row.threads - static_cast<int>(threadIdx.x) / 32 * 32)),
        parts_(row.blocks * block_warps_),
        part_(block * block_warps_ + threadIdx.x / 32) {
    // No block writes to one that has not started.
    if constexpr (has_clusters()) {
      if (blocks_ > 1) hopper::cluster_sync();
    }
  }

  // These replace values by their sums over all units, or by their variances.
  template <int kSums>
  __device__ void sums(A (&sums)[kSums]) const {
    add_up<0, kSums>(nullptr, nullptr, sums);
  }
  template <int kVariances>
  __device__ void moments(A (&variances)[kVariances], A (&means)[kVariances]) const {
    add_up<kVariances, 0>(variances, means, nullptr);
  }
  template <int kVariances, int kSums>
  __device__ void moments(A (&variances)[kVariances], A (&means)[kVariances], A (&sums)[kSums]) const {
    add_up<kVariances, kSums>(variances, means, sums);
  }
  __device__ A per_unit(A sum) const { return sum / static_cast<A>(units_); }
  __device__ A max(A x) const {
    const A found[] = {of_warp(x, [](A a, A b) { return maximum(a, b); })};
    const auto parts = exchanged(found, 0);
    A largest = parts[0][0];
    for (int p = 1; p < parts_; ++p) largest = maximum(largest, parts[p][0]);
    return largest;
  }

  // The sum of this unit and those before it.
  __device__ A cumsum(A x) const {
    for (int d = 1; d < 32; d *= 2) {
      const A before = __shfl_up_sync(mask(), x, d);
      if (lane_ >= d) x += before;
    }
    const A found[] = {x};
    const auto parts = exchanged(found, lanes_ - 1);
    A sum = 0;
    for (int p = 0; p < part_; ++p) sum += parts[p][0];
    return sum + x;
  }
  // The sum of this unit and those after it.
  __device__ A cumsum_back(A x) const {
    for (int d = 1; d < 32; d *= 2) {
      const A after = __shfl_down_sync(mask(), x, d);
      if (lane_ + d < lanes_) x += after;
    }
    const A found[] = {x};
    const auto parts = exchanged(found, 0);
    A sum = 0;
    for (int p = parts_ - 1; p > part_; --p) sum += parts[p][0];
    return sum + x;
  }

 private:
  __device__ unsigned mask() const { return ~0u >> (32 - lanes_); }

  template <int kVariances, int kSums>
  __device__ void add_up(A* variances, A* means, A* sums) const {
    const auto add = [](A a, A b) { return a + b; };
    A found[2 * kVariances + kSums];
#pragma unroll
    for (int v = 0; v < kVariances; ++v) {
      const A first = __shfl_sync(mask(), variances[v], 0), share = A(1) / static_cast<A>(lanes_);
      Distances<A> distances;
      distances.add(variances[v] - first);
      distances.sum = of_warp(distances.sum, add);
      distances.squares = of_warp(distances.squares, add);
      found[2 * v] = first + distances.sum * share;
      found[2 * v + 1] = distances.from_mean(share);
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) found[2 * kVariances + s] = of_warp(sums[s], add);
    for_slots<kVariances, kSums>([&](auto slots) {
      using Now = decltype(slots);
      A sent[Now::kCount], totals[kRowSlots];
      for (int i = 0; i < Now::kCount; ++i) sent[i] = found[Now::kFirst + i];
      const auto parts = exchanged(sent, 0);
      add_parts<Now>(
          lane_, lanes_, parts_, A(1) / static_cast<A>(units_), [&](int p, int i) { return parts[p][i]; },
          [&](int p) { return min(32, block_threads_ - p % block_warps_ * 32); },
          [&](A x) { return __shfl_sync(mask(), of_warp(x, add), 0); }, totals);
      for (int i = 0; i < Now::kCount; ++i) found[Now::kFirst + i] = totals[i];
    });
#pragma unroll
    for (int v = 0; v < kVariances; ++v) {
      means[v] = found[2 * v];
      variances[v] = per_unit(found[2 * v + 1]);
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = found[2 * kVariances + s];
  }

  // The first lane has that of all lanes.
  template <class F>
  __device__ A of_warp(A x, F&& f) const {
    for (int d = 16; d > 0; d /= 2) {
      const A other = __shfl_down_sync(mask(), x, d);
      if (lane_ + d < lanes_) x = f(x, other);
    }
    return x;
  }

  // What one lane of each of the row's warps has.
  template <int kCount>
  __device__ const A (*exchanged(const A (&x)[kCount], int lane) const)[kRowSlots] {
    turn_ ^= 1;
    A(*const parts)[kRowSlots] = memory_->parts[turn_];
    if (blocks_ == 1) {
      for (int i = 0; i < kCount && lane_ == lane; ++i) parts[part_][i] = x[i];
      __syncthreads();
    } else if constexpr (has_clusters()) {
      for (int block = 0; block < blocks_ && lane_ == lane; ++block) {
        for (int i = 0; i < kCount; ++i) *const_cast<A*>(hopper::in_block(parts[part_] + i, block)) = x[i];
      }
      hopper::cluster_sync();
    }
    return parts;
  }

  Memory* memory_;
  int units_, block_threads_, block_warps_, blocks_, lane_, lanes_, parts_, part_;
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
