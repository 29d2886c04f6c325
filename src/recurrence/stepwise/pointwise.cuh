// One step of a cell on CUDA (step.h). A thread has a unit of one row, or of many to sum the bias gradient.
#pragma once

#include "common/fast_math.cuh"
#include "common/launch.cuh"
#include "recurrence/stepwise/step.h"

namespace lltm_ext {

// How the steps of a cell are computed: with which functions, and whether they may sum the bias's gradient.
template <class Cell, typename T>
struct StepTraits {
  using Math = typename MathOf<T>::type;
  static constexpr bool kSumsBias = false;
};

// Both kernels may begin before the matrix product that they read has ended.
template <class Cell, typename T, typename C>
__device__ __forceinline__ void run_pointwise(const StepForwardArguments<T, C>& step) {
  griddepcontrol_wait();
  const unsigned columns = pointwise_columns(step.hidden);
  const int64_t j = int64_t{blockIdx.x % columns} * kPointwiseUnits + threadIdx.x % kPointwiseUnits,
                b = int64_t{blockIdx.x / columns} * kPointwiseRows + threadIdx.x / kPointwiseUnits;
  if (b < step.batch && j < step.hidden) step_unit<Cell, typename StepTraits<Cell, T>::Math>(step, b, j);
}

template <class Cell, typename T, typename C, typename Extra>
__device__ __forceinline__ void run_pointwise(const StepBackwardArguments<T, C, Extra>& step) {
  using Traits = StepTraits<Cell, T>;
  using A = acc_t<T>;
  constexpr int kGates = Cell::kGates, kUnits = kPointwiseUnits, kRows = kPointwiseRows;
  griddepcontrol_wait();
  const unsigned columns = pointwise_columns(step.hidden);
  const int unit = threadIdx.x % kUnits, row = threadIdx.x / kUnits;
  const int64_t j = int64_t{blockIdx.x % columns} * kUnits + unit;
  const bool sums = Traits::kSumsBias && step.grad_bias;
  A sum[at_least_one(kGates)] = {};
  for (int64_t b = int64_t{blockIdx.x / columns} * kRows + row; b < step.batch && j < step.hidden;
       b += kRows) {
    CellGradients<Cell, A> grads;
    step_unit<Cell, typename Traits::Math>(step, b, j, grads, step.grad_old_states);
    store_gradients(step, b, j, grads);
    for (int g = 0; g < kGates; ++g) sum[g] += grads.x[g];
    if (!sums) break;
  }
  if constexpr (Traits::kSumsBias) {
    static_assert(kGates <= kRows, "a row of threads sums a gate");
    __shared__ A shared[kRows][kGates][kUnits];
    if (!sums) return;
    for (int g = 0; g < kGates; ++g) shared[row][g][unit] = sum[g];
    __syncthreads();
    if (row >= kGates || j >= step.hidden) return;
    A total = 0;  // the sum of gate `row`
    for (int r = 0; r < kRows; ++r) total += shared[r][row][unit];
    step.grad_bias[row * step.hidden + j] = narrow<T>(total);
  }
}

// A stage of a step that ends in products with the cell's own weights.
template <class Cell, typename T, int kStage, class Step>
__device__ __forceinline__ void run_pointwise_stage(const Step& step) {
  griddepcontrol_wait();
  const unsigned columns = pointwise_columns(step.hidden);
  const int64_t j = int64_t{blockIdx.x % columns} * kPointwiseUnits + threadIdx.x % kPointwiseUnits,
                b = int64_t{blockIdx.x / columns} * kPointwiseRows + threadIdx.x / kPointwiseUnits;
  CellInputs<Cell, acc_t<T>> in;
  if (b < step.batch && j < step.hidden) feed_unit<Cell, typename MathOf<T>::type, kStage>(step, b, j, in);
}

template <class Cell, typename T, typename C>
__global__ void __launch_bounds__(kPointwiseThreads)
    recurrence_pointwise_forward_kernel(const StepForwardArguments<T, C> step) {
  run_pointwise<Cell>(step);
}
template <class Cell, typename T, typename C, typename Extra>
__global__ void __launch_bounds__(kPointwiseThreads)
    recurrence_pointwise_backward_kernel(const StepBackwardArguments<T, C, Extra> step) {
  run_pointwise<Cell>(step);
}

#ifndef __CUDACC_RTC__
// A thread has kValues adjacent values of a row.
template <typename T, int kValues>
__global__ void __launch_bounds__(kPointwiseThreads) keep_rows_kernel(const MaskRowsArguments<T> rows) {
  struct alignas(kValues * sizeof(T)) Values {
    T data[kValues];
  };
  const int64_t width = rows.hidden / kValues, at = int64_t{blockIdx.x} * kPointwiseThreads + threadIdx.x;
  if (at >= rows.batch * width) return;
  Values x = reinterpret_cast<const Values*>(rows.x)[at];
  const acc_t<T> share = rows.resets.share(at / width);
  if (rows.lost && share != 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      rows.lost[at * kValues + i] += scale_by_mask(share, acc_t<T>(widen(x.data[i])));
    }
  }
#pragma unroll
  for (T& value : x.data) value = narrow<T>(scale_by_mask(mask_of(share), acc_t<T>(widen(value))));
  reinterpret_cast<Values*>(rows.y)[at] = x;
}

template <typename T>
cudaError_t mask_rows(const MaskRowsArguments<T>& rows, cudaStream_t stream) {
  constexpr int kMost = 16 / sizeof(T);
  const auto is_aligned = [](const T* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  const bool by_vectors = rows.hidden % kMost == 0 && is_aligned(rows.x) && is_aligned(rows.y);
  const int64_t threads = rows.batch * rows.hidden / (by_vectors ? kMost : 1);
  const dim3 blocks(static_cast<unsigned>((threads + kPointwiseThreads - 1) / kPointwiseThreads));
  return launch_kernel(by_vectors ? keep_rows_kernel<T, kMost> : keep_rows_kernel<T, 1>, blocks,
                       dim3(kPointwiseThreads), /*shared_bytes=*/0, /*programmatic=*/false, stream, rows);
}

// A block has some columns, and each row of its threads adds up every kPointwiseRows-th row.
template <typename T>
__global__ void __launch_bounds__(kPointwiseThreads) sum_rows_kernel(const SumRowsArguments<T> rows) {
  using A = acc_t<T>;
  const int column = threadIdx.x % kPointwiseUnits, row = threadIdx.x / kPointwiseUnits;
  const int64_t j = int64_t{blockIdx.x} * kPointwiseUnits + column;
  A sum = 0;
  for (int64_t b = row; b < rows.rows && j < rows.columns; b += kPointwiseRows) {
    sum += rows.x[b * rows.stride + j];
  }
  __shared__ A sums[kPointwiseRows][kPointwiseUnits];
  sums[row][column] = sum;
  __syncthreads();
  if (row > 0 || j >= rows.columns) return;
  for (int r = 1; r < kPointwiseRows; ++r) sum += sums[r][column];
  rows.y[j] = narrow<T>(sum);
}

template <typename T>
cudaError_t sum_rows(const SumRowsArguments<T>& rows, cudaStream_t stream) {
  return launch_kernel(sum_rows_kernel<T>, dim3(pointwise_columns(rows.columns)), dim3(kPointwiseThreads),
                       /*shared_bytes=*/0, /*programmatic=*/false, stream, rows);
}

template <auto* kKernel, class Step>
cudaError_t launch_pointwise_step(const Step& step, bool sums_rows, cudaStream_t stream) {
  int capability = 0;
  const cudaError_t error = compute_capability<kKernel>(capability);
  if (error != cudaSuccess) return error;
  const unsigned blocks = pointwise_blocks(sums_rows ? 1 : step.batch, step.hidden);
  return launch_kernel(kKernel, dim3(blocks), dim3(kPointwiseThreads), /*shared_bytes=*/0,
                       /*programmatic=*/capability >= 90, stream, step);
}

template <class Cell, typename T, typename C>
cudaError_t recurrence_step(const StepForwardArguments<T, C>& step, cudaStream_t stream) {
  return launch_pointwise_step<recurrence_pointwise_forward_kernel<Cell, T, C>>(step, false, stream);
}
template <class Cell, typename T, typename C, typename Extra>
cudaError_t recurrence_step(const StepBackwardArguments<T, C, Extra>& step, cudaStream_t stream) {
  constexpr auto* kKernel = recurrence_pointwise_backward_kernel<Cell, T, C, Extra>;
  return launch_pointwise_step<kKernel>(step, step.grad_bias != nullptr, stream);
}
#endif

}  // namespace lltm_ext

// Instantiates a step for activations of type T, states of type C and Extra (StepBackwardArguments).
#define INSTANTIATE_STEP(Cell, T, C, Extra)                                                              \
  template cudaError_t lltm_ext::recurrence_step<Cell>(const StepForwardArguments<T, C>&, cudaStream_t); \
  template cudaError_t lltm_ext::recurrence_step<Cell>(const StepBackwardArguments<T, C, Extra>&,        \
                                                       cudaStream_t);
#define INSTANTIATE_ROWS(T)                                                            \
  template cudaError_t lltm_ext::mask_rows(const MaskRowsArguments<T>&, cudaStream_t); \
  template cudaError_t lltm_ext::sum_rows(const SumRowsArguments<T>&, cudaStream_t);
// Instantiates what the steps of sequences need.
#define INSTANTIATE_RECURRENCE_STEP(Cell, T) \
  INSTANTIATE_STEP(Cell, T, acc_t<T>, T)     \
  INSTANTIATE_ROWS(T)
