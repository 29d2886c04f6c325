// The kernels of a sequence of a single step. A launch takes the host, and often the device, longer than the
// step's arithmetic. So one kernel does all of it, and warps wait for each other only to add up their sums.
//
// A block has some units for some rows of the batch, and its warps split K: the input's elements, followed by
// those of h. Tensor cores multiply several rows of half types and of TF32. One row, rows that are not whole
// vectors, and IEEE float32 are multiplied by threads.
#pragma once

#include "common/fast_math.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "recurrence/persistent/product.cuh"
#include "recurrence/stepwise/single_step.h"

namespace lltm_ext {

// The part of a block that follows the products.
template <class Cell, typename T, int kUnits, int kRows>
class SingleStepBlock {
  static_assert(has_single_step(kCellShape<Cell>));

 protected:
  // Products with the input and with h are summed together, unless the cell sees them apart: those with h
  // then follow the others.
  static constexpr int kGates = Cell::kGates, kProducts = products_of_single_step(kCellShape<Cell>);
  static constexpr int kFirstOfH = kProducts - kGates;
  using Arguments = SingleStepArguments<T>;

  __device__ explicit SingleStepBlock(const Arguments& arguments)
      : s_(arguments),
        first_unit_(static_cast<int>(blockIdx.x) % blocks_of_units() * kUnits),
        first_row_(static_cast<int>(blockIdx.x) / blocks_of_units() * kRows) {}

  // Runs the cell of all units and rows of the block. product(i, unit, row) is the sum over K of the
  // i-th product.
  template <class Product>
  __device__ __forceinline__ void run_cells(const Product& product) const {
    for (int i = static_cast<int>(threadIdx.x); i < kUnits * kRows; i += kSingleStepThreads) {
      const int unit = i % kUnits, row = i / kUnits;
      if (first_unit_ + unit >= s_.hidden || first_row_ + row >= s_.batch) continue;
      run_cell(first_unit_ + unit, first_row_ + row, [&](int i) { return product(i, unit, row); });
    }
  }

  // The weight's row of a gate of a unit of the block. Past the hidden size it is that of the last unit.
  __device__ __forceinline__ int64_t weight_row(int gate, int unit) const {
    return static_cast<int64_t>(gate) * s_.hidden + min(first_unit_ + unit, s_.hidden - 1);
  }

  const Arguments& s_;
  const int first_unit_, first_row_;

 private:
  __device__ __forceinline__ int blocks_of_units() const {
    return static_cast<int>(ceil_div(s_.hidden, kUnits));
  }

  template <class Product>
  __device__ __forceinline__ void run_cell(int j, int b, const Product& product) const {
    const int at = b * s_.hidden + j;
    CellInputs<Cell, float> in;
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      in.x[g] = of_bias(s_.bias, g, j) + of_bias(s_.bias_hh, g, j) + product(g);
      if constexpr (Cell::kSeparate) in.r[g] = product(kFirstOfH + g);
    }
    if constexpr (Cell::kReadsH) in.h = widen(s_.h0[at]);
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p) in.parameters[p] = widen(s_.parameters[p * s_.hidden + j]);
#pragma unroll
    for (int k = 0; k < Cell::kStepInputs; ++k) {
      const int64_t i = int64_t{b} * Cell::kStepInputs + k;
      in.steps[k] = widen(s_.step_inputs[s_.shared_step_inputs ? i : i * s_.hidden + j]);
    }
    float states[at_least_one(Cell::kStates)], saved[at_least_one(Cell::kSaved)];
#pragma unroll
    for (int i = 0; i < Cell::kStates; ++i) states[i] = old_state(i * s_.batch * s_.hidden + at);
    const T h = narrow<T>(Cell::template forward<typename MathOf<T>::type>(in, states, saved));
    s_.output[at] = h;
    s_.h_n[at] = h;
#pragma unroll
    for (int i = 0; i < Cell::kStates; ++i) store_state(i * s_.batch * s_.hidden + at, states[i]);
    if (!s_.save) return;
    constexpr int kSavedInGates = kCellShape<Cell>.saved_in_gates(), kExtra = kCellShape<Cell>.extra();
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      T* const to = v < kSavedInGates ? s_.gates + (int64_t{b} * kGates + v) * s_.hidden
                                      : s_.extra + (int64_t{b} * kExtra + v - kSavedInGates) * s_.hidden;
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
};

// A block of tensor cores has 16 units of each gate and tiles of eight rows, in the layout of product.cuh.
template <class Cell, typename T, int kRowTiles>
class SingleStepOnTensorCores : SingleStepBlock<Cell, T, 16, kRowTiles * kRowTile> {
  static constexpr int kUnits = 16, kRows = kRowTiles * kRowTile;
  static constexpr int kStride = kUnits + 4;  // the lanes of a product then write to different banks
  using Block = SingleStepBlock<Cell, T, kUnits, kRows>;
  using Block::first_row_, Block::first_unit_, Block::kFirstOfH, Block::kGates, Block::kProducts, Block::s_;
  using Product = typename Conditional<kIsSame<T, float>, Tf32Product, typename ProductOf<T>::type>::type;

 public:
  static constexpr int kLeastArchitecture = 800;  // it is never launched on older ones
  using Sums = float[kSingleStepWarps][kProducts][kRows][kStride];

  __device__ explicit SingleStepOnTensorCores(const SingleStepArguments<T>& arguments) : Block(arguments) {}

  __device__ __forceinline__ void run(Sums& shared) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int of_input = chunks(s_.input_size), of_both = of_input + chunks(s_.hidden);
#pragma unroll 2
    for (int chunk = warp; chunk < of_both; chunk += kSingleStepWarps) {
      const bool of_h = chunk >= of_input;
      if (Cell::kSeparate && of_h) {
        multiply<kFirstOfH>(s_.h0, s_.weight_hh, s_.hidden, chunk - of_input);
      } else {
        multiply<0>(of_h ? s_.h0 : s_.input, of_h ? s_.weight_hh : s_.weight_ih,
                    of_h ? s_.hidden : s_.input_size, of_h ? chunk - of_input : chunk);
      }
    }
    write_sums(shared[warp]);
    __syncthreads();
    this->run_cells([&](int i, int unit, int row) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kSingleStepWarps; ++w) sum += shared[w][i][row][unit];
      return sum;
    });
  }

 private:
  static constexpr int kVector = kVecWidth<T>, kChunk = 4 * kVector;

  __device__ static int chunks(int k) { return ceil_div(k, kChunk); }

  // Adds the products of a chunk of x [rows, K] and of a weight [G * H, K] to the sums from kFirst on.
  template <int kFirst>
  __device__ __forceinline__ void multiply(const T* x, const T* weight, int k, int chunk) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4,
              at = chunk * kChunk + lane % 4 * kVector;
    const auto load = [&](const T* from, int64_t row) {
      return at < k ? __ldg(reinterpret_cast<const uint4*>(from + row * k + at)) : make_uint4(0, 0, 0, 0);
    };
    WeightChunk w[kGates];
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      w[gate] = {load(weight, this->weight_row(gate, g)), load(weight, this->weight_row(gate, g + 8))};
    }
    uint4 values[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      values[i] = load(x, min(first_row_ + i * kRowTile + g, s_.batch - 1));
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      if constexpr (Product::kRoundsWeights) {
        w[gate] = {Product::round(w[gate].upper), Product::round(w[gate].lower)};
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) Product::multiply(sums_[kFirst + gate][i], w[gate], values[i]);
    }
  }

  __device__ __forceinline__ void write_sums(float (&to)[kProducts][kRows][kStride]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4;
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        const int row = i * kRowTile + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 4; ++r) to[p][row + r % 2][g + r / 2 * 8] = sums_[p][i][r];
      }
    }
  }

  float sums_[kProducts][kRowTiles][4] = {};
};

// Threads have two units and split K: the input's elements from the first thread on, and those of h from the
// last. Each multiplies its part of the weights by all rows of the block.
template <class Cell, typename T, int kRows>
class SingleStepByThreads : SingleStepBlock<Cell, T, 2, kRows> {
  static constexpr int kUnits = 2;
  using Block = SingleStepBlock<Cell, T, kUnits, kRows>;
  using Block::first_row_, Block::kFirstOfH, Block::kGates, Block::kProducts, Block::s_;
  static constexpr int kColumns = kUnits * kGates, kSums = kUnits * kProducts;  // of a weight; of the block

 public:
  static constexpr int kLeastArchitecture = 0;
  using Sums = float[kSingleStepWarps][kSums][kRows];

  __device__ explicit SingleStepByThreads(const SingleStepArguments<T>& arguments)
      : Block(arguments), rows_(min(kRows, s_.batch - first_row_)) {}

  __device__ __forceinline__ void run(Sums& shared) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    multiply(s_.input, s_.weight_ih, s_.input_size, thread, sums_);
    multiply(s_.h0, s_.weight_hh, s_.hidden, kSingleStepThreads - 1 - thread, sums_ + kUnits * kFirstOfH);
    reduce_over_lanes<kRows>(sums_);
    constexpr int kLanesOfRow = 32 / kRows;
    if (lane % kLanesOfRow == 0) {
#pragma unroll
      for (int c = 0; c < kSums; ++c) shared[thread / 32][c][lane / kLanesOfRow] = sums_[c][0];
    }
    __syncthreads();
    this->run_cells([&](int i, int unit, int row) {
      const int column = i / kGates * kColumns + unit * kGates + i % kGates;
      float sum = 0;
      for (int warp = 0; warp < kSingleStepWarps; ++warp) sum += shared[warp][column][row];
      return sum;
    });
  }

 private:
  // Adds this thread's part of x [rows, K] times the units' rows of a weight [G * H, K] to their sums.
  __device__ __forceinline__ void multiply(const T* x, const T* weight, int k, int thread,
                                           float (*sums)[kRows]) {
    // With vectors of four, few values would leave most threads idle.
    const bool by_fours =
        k > kSingleStepThreads / 2 && k % 4 == 0 && is_vec_aligned(x) && is_vec_aligned(weight);
    by_fours ? multiply_vectors<4>(x, weight, k, thread, sums)
             : multiply_vectors<1>(x, weight, k, thread, sums);
  }

  template <int kWidth>
  __device__ __forceinline__ void multiply_vectors(const T* x, const T* weight, int k, int thread,
                                                   float (*sums)[kRows]) {
    using Vector = Vec<T, kWidth>;
#pragma unroll 1
    for (int at = thread * kWidth; at < k; at += kSingleStepThreads * kWidth) {
      Vector w[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int64_t row = this->weight_row(c % kGates, c / kGates);
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
            sums[c][r] = fmaf(widen(w[c].data[i]), widen(values.data[i]), sums[c][r]);
          }
        }
      }
    }
  }

  const int rows_;
  float sums_[kSums][kRows] = {};
};

template <class Step, typename T>
__device__ __forceinline__ void run_single_step(const SingleStepArguments<T>& arguments) {
#ifdef __CUDA_ARCH__
  __shared__ typename Step::Sums shared;
  if constexpr (__CUDA_ARCH__ >= Step::kLeastArchitecture) Step(arguments).run(shared);
#endif
}

#ifdef LLTM_EXT_WITH_CUDA
template <class Step, typename T>
__global__ void __launch_bounds__(kSingleStepThreads)
    recurrence_single_step_kernel(const __grid_constant__ SingleStepArguments<T> arguments) {
  run_single_step<Step>(arguments);
}

template <class Cell, typename T>
cudaError_t launch_single_step(const SingleStepArguments<T>& arguments, cudaStream_t stream) {
  const bool on_tensor_cores = arguments.on_tensor_cores && arguments.has_vectors();
  constexpr int kProducts = products_of_single_step(kCellShape<Cell>);
  const SingleStepTile tile = single_step_tile(arguments.batch, kProducts, on_tensor_cores);
  const auto launch = [&](auto* kernel) {
    const dim3 blocks(static_cast<unsigned>(tile.blocks(arguments.batch, arguments.hidden)));
    return launch_kernel(kernel, blocks, dim3(kSingleStepThreads), /*shared_bytes=*/0,
                         /*programmatic=*/false, stream, arguments);
  };
  if (on_tensor_cores) {
    return tile.rows == kRowTile
               ? launch(recurrence_single_step_kernel<SingleStepOnTensorCores<Cell, T, 1>, T>)
               : launch(recurrence_single_step_kernel<SingleStepOnTensorCores<Cell, T, 2>, T>);
  }
  return tile.rows == 1 ? launch(recurrence_single_step_kernel<SingleStepByThreads<Cell, T, 1>, T>)
                        : launch(recurrence_single_step_kernel<SingleStepByThreads<Cell, T, 8>, T>);
}
#endif

}  // namespace lltm_ext

#define INSTANTIATE_SINGLE_STEP(Cell)                                                              \
  template cudaError_t launch_single_step<Cell>(const SingleStepArguments<float>&, cudaStream_t);  \
  template cudaError_t launch_single_step<Cell>(const SingleStepArguments<__half>&, cudaStream_t); \
  template cudaError_t launch_single_step<Cell>(const SingleStepArguments<__nv_bfloat16>&, cudaStream_t);
