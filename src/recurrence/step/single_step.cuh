// The kernel of a sequence of a single step. A launch takes the host, and often the device, longer than the
// step's arithmetic. So one kernel has all of it, and warps wait for each other only to add up their sums.
//
// A block has two units for eight rows of the batch, or for one row if the batch has one. Its threads split
// K: the input's elements from the first thread on, and those of h from the last. Each multiplies its part of
// the weights by all rows of the block.
#pragma once

#include "common/fast_math.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "recurrence/step/single_step.h"

namespace lltm_ext {

constexpr int kSingleStepThreads = 256, kSingleStepWarps = kSingleStepThreads / 32;

template <class Cell, typename T, int kRows>
class SingleStep {
  static_assert(Cell::kRecurrent && !Cell::kSeparate && !Cell::kReadsH && Cell::kOutputState < 0);
  static_assert(Cell::kParameters == 0 && Cell::kStepInputs == 0);
  static constexpr int kGates = Cell::kGates, kColumns = kSingleStepUnits * kGates;
  using Arguments = SingleStepArguments<T>;

 public:
  using Sums = float[kSingleStepWarps][kColumns][kRows];

  __device__ explicit SingleStep(const Arguments& arguments)
      : s_(arguments),
        first_unit_(static_cast<int>(blockIdx.x) % single_step_columns(s_.hidden) * kSingleStepUnits),
        first_row_(static_cast<int>(blockIdx.x) / single_step_columns(s_.hidden) * kRows),
        rows_(min(kRows, s_.batch - first_row_)) {}

  __device__ __forceinline__ void run(Sums& shared) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    multiply(s_.input, s_.weight_ih, s_.input_size, thread);
    multiply(s_.h0, s_.weight_hh, s_.hidden, kSingleStepThreads - 1 - thread);
    reduce_over_lanes<kRows>(sums_);
    constexpr int kLanesOfRow = 32 / kRows;
    if (lane % kLanesOfRow == 0) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) shared[thread / 32][c][lane / kLanesOfRow] = sums_[c][0];
    }
    __syncthreads();
    const int unit = thread / kRows, row = thread % kRows;
    if (unit < kSingleStepUnits && first_unit_ + unit < s_.hidden && row < rows_) finish(shared, unit, row);
  }

 private:
  // Adds this thread's part of x [rows, K] times the units' rows of a weight [G * H, K].
  __device__ __forceinline__ void multiply(const T* x, const T* weight, int k, int thread) {
    // With vectors of four, few values would leave most threads idle.
    const bool by_fours =
        k > kSingleStepThreads / 2 && k % 4 == 0 && is_vec_aligned(x) && is_vec_aligned(weight);
    by_fours ? multiply_vectors<4>(x, weight, k, thread) : multiply_vectors<1>(x, weight, k, thread);
  }

  template <int kWidth>
  __device__ __forceinline__ void multiply_vectors(const T* x, const T* weight, int k, int thread) {
    using Vector = Vec<T, kWidth>;
#pragma unroll 1
    for (int at = thread * kWidth; at < k; at += kSingleStepThreads * kWidth) {
      Vector w[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int unit = min(first_unit_ + c / kGates, s_.hidden - 1);  // the last unit twice, if H is odd
        const int64_t row = static_cast<int64_t>(c % kGates) * s_.hidden + unit;
        w[c] = *reinterpret_cast<const Vector*>(weight + row * k + at);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows_) continue;
        const Vector values =
            *reinterpret_cast<const Vector*>(x + static_cast<int64_t>(first_row_ + r) * k + at);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            sums_[c][r] = fmaf(widen(w[c].data[i]), widen(values.data[i]), sums_[c][r]);
          }
        }
      }
    }
  }

  // The cell of a unit of a row of the block.
  __device__ __forceinline__ void finish(const Sums& shared, int unit, int row) const {
    const int j = first_unit_ + unit, b = first_row_ + row, at = b * s_.hidden + j;
    CellInputs<Cell, float> in;
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      in.x[g] = of_bias(s_.bias, g, j) + of_bias(s_.bias_hh, g, j);
      for (int warp = 0; warp < kSingleStepWarps; ++warp) in.x[g] += shared[warp][unit * kGates + g][row];
    }
    float states[at_least_one(Cell::kStates)], saved[at_least_one(Cell::kSaved)];
#pragma unroll
    for (int i = 0; i < Cell::kStates; ++i) states[i] = old_state(i * s_.batch * s_.hidden + at);
    const T h = narrow<T>(Cell::template forward<typename MathOf<T>::type>(in, states, saved));
    s_.output[at] = h;
    s_.h_n[at] = h;
#pragma unroll
    for (int i = 0; i < Cell::kStates; ++i) store_state(i * s_.batch * s_.hidden + at, states[i]);
    if (!s_.gates) return;
    constexpr int kExtra = kCellShape<Cell>.extra();
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      T* const to = v < kGates ? s_.gates + (int64_t{b} * kGates + v) * s_.hidden
                               : s_.extra + (int64_t{b} * kExtra + v - kGates) * s_.hidden;
      to[j] = narrow<T>(saved[v]);
    }
  }

  __device__ __forceinline__ float of_bias(const T* bias, int gate, int unit) const {
    return bias ? widen(bias[gate * s_.hidden + unit]) : 0;
  }
  __device__ __forceinline__ float old_state(int at) const {
    if (s_.narrow_states) return widen(static_cast<const T*>(s_.states0)[at]);
    return static_cast<const float*>(s_.states0)[at];
  }
  __device__ __forceinline__ void store_state(int at, float x) const {
    if (s_.narrow_states) {
      static_cast<T*>(s_.states_n)[at] = narrow<T>(x);
    } else {
      static_cast<float*>(s_.states_n)[at] = x;
    }
  }

  const Arguments& s_;
  const int first_unit_, first_row_, rows_;
  float sums_[kColumns][kRows] = {};
};

#ifdef LLTM_EXT_WITH_CUDA
template <class Cell, typename T, int kRows>
__global__ void __launch_bounds__(kSingleStepThreads)
    recurrence_single_step_kernel(const __grid_constant__ SingleStepArguments<T> arguments) {
  __shared__ typename SingleStep<Cell, T, kRows>::Sums shared;
  SingleStep<Cell, T, kRows>(arguments).run(shared);
}

template <class Cell, typename T>
cudaError_t launch_single_step(const SingleStepArguments<T>& arguments, cudaStream_t stream) {
  const bool one_row = arguments.batch == 1;
  const dim3 blocks(static_cast<unsigned>(single_step_blocks(arguments.batch, arguments.hidden)));
  const auto kernel = one_row ? recurrence_single_step_kernel<Cell, T, 1>
                              : recurrence_single_step_kernel<Cell, T, kSingleStepRows>;
  return launch_kernel(kernel, blocks, dim3(kSingleStepThreads), /*shared_bytes=*/0, /*programmatic=*/false,
                       stream, arguments);
}
#endif

}  // namespace lltm_ext

#define INSTANTIATE_SINGLE_STEP(Cell)                                                              \
  template cudaError_t launch_single_step<Cell>(const SingleStepArguments<float>&, cudaStream_t);  \
  template cudaError_t launch_single_step<Cell>(const SingleStepArguments<__half>&, cudaStream_t); \
  template cudaError_t launch_single_step<Cell>(const SingleStepArguments<__nv_bfloat16>&, cudaStream_t);
