// lltm on CUDA: the products of a step of few units, each step's in one launch. There a call of a library
// takes the host longer than its product takes the device, and forward the cell comes with the product.
//
// Latency is what counts, so warps work alone. Forward, a warp has a unit: its lanes share out the length of
// the products, each with the three gates of 16 rows, and then exchange their sums. Backward, lanes have
// neighbouring columns of a matrix that lies in memory, each with 16 sums; the gates' gradients, the other
// factor, are the same for all lanes.
#include "common/launch.cuh"
#include "common/vec.cuh"
#include "lltm/lltm.h"

namespace lltm_ext {

constexpr int kWarp = 32, kSums = 16;  // sums of a lane: rows of the batch, or gates
constexpr unsigned kAllLanes = ~0u;

// ---- forward

constexpr int kUnitsOfBlock = 4;  // which read the same rows

// Each lane has sums of its own for 16 rows. Afterwards lanes 2 r and 2 r + 1 have those of row r over all
// lanes.
template <int kRows = kSums, typename A>
__device__ __forceinline__ void exchange(A (&sum)[3][kSums]) {
  constexpr int kHalf = kRows / 2;
  const bool upper = threadIdx.x % kWarp & kRows;
#pragma unroll
  for (int g = 0; g < 3; ++g) {
    if constexpr (kRows == 1) {
      sum[g][0] += __shfl_xor_sync(kAllLanes, sum[g][0], 1);
    } else {
#pragma unroll
      for (int r = 0; r < kHalf; ++r) {
        const A keep = upper ? sum[g][r + kHalf] : sum[g][r], give = upper ? sum[g][r] : sum[g][r + kHalf];
        sum[g][r] = keep + __shfl_xor_sync(kAllLanes, give, kRows);
      }
    }
  }
  if constexpr (kRows > 1) exchange<kHalf>(sum);
}

template <typename T, typename C>
__global__ void __launch_bounds__(kUnitsOfBlock* kWarp)
    lltm_whole_forward_kernel(const WholeForward<T, C> step, int blocks_of_units) {
  using A = acc_t<T>;
  const int lane = threadIdx.x % kWarp, hidden = step.X.hidden;
  const int unit = blockIdx.x % blocks_of_units * kUnitsOfBlock + threadIdx.x / kWarp;
  const int row = blockIdx.x / blocks_of_units * kSums;
  if (unit >= hidden) return;
  const int rows = static_cast<int>(step.units.batch) - row;
  A sum[3][kSums] = {};
#pragma unroll 1
  for (int k = lane; k < step.X.columns; k += kWarp) {
    A weight[3];
#pragma unroll
    for (int g = 0; g < 3; ++g) weight[g] = widen(step.weights[(g * hidden + unit) * step.weights_row + k]);
#pragma unroll
    for (int r = 0; r < kSums; ++r) {
      const A x = r < rows ? step.X.at(row + r, k) : A(0);
#pragma unroll
      for (int g = 0; g < 3; ++g) sum[g][r] += weight[g] * x;
    }
  }
  exchange(sum);
  if (lane % 2 > 0 || lane / 2 >= rows) return;
  A gates[3];
#pragma unroll
  for (int g = 0; g < 3; ++g) gates[g] = sum[g][0] + (step.bias ? widen(step.bias[g * hidden + unit]) : A(0));
  lltm_unit_of_gates<ExactMath>(step.units, row + lane / 2, unit, gates);
}

// ---- backward

constexpr int kWarps = 8, kSlice = 8;

// A warp's shared memory: a slice of gradients during the products, the sums after them.
template <typename A>
union OfWarp {
  Vec<A, 4> slice[kSlice][kSums / 4 + 1];
  A sums[kSums][kWarp];
};

// sum[i] += gradient(k, i) * column(k) for k from `begin` to `end`. kAlongK: whether the gradients of
// neighbouring k are neighbours in memory, else those of neighbouring i.
template <bool kAlongK, typename A, class Gradient, class Column>
__device__ __forceinline__ void multiply(A (&sum)[kSums], OfWarp<A>& shared, int begin, int end,
                                         Gradient gradient, Column column) {
  auto& slice = shared.slice;
  for (int first = begin; first < end; first += kSlice) {
    A found[kSlice];  // all on their way at a time
#pragma unroll
    for (int k = 0; k < kSlice; ++k) found[k] = first + k < end ? column(first + k) : A(0);
#pragma unroll
    for (int n = 0; n < kSlice * kSums; n += kWarp) {
      const int i = n + threadIdx.x % kWarp;
      const int k = kAlongK ? i % kSlice : i / kSums, s = kAlongK ? i / kSlice : i % kSums;
      slice[k][s / 4].data[s % 4] = first + k < end ? gradient(first + k, s) : A(0);
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kSlice; ++k) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) sum[s] += slice[k][s / 4].data[s % 4] * found[k];
    }
    __syncwarp();
  }
}

// grad_weights: a warp has 16 gates and 32 columns.
template <typename T>
__device__ __forceinline__ void grad_weights(const BackwardProducts<T>& step, OfWarp<acc_t<T>>* shared,
                                             int tile) {
  using A = acc_t<T>;
  const int gates = 3 * step.X.hidden, columns = step.X.columns;
  const int tiles = static_cast<int>(ceil_div(columns, kWarp));
  const int column = tile % tiles * kWarp + threadIdx.x % kWarp;
  const int first = (tile / tiles * kWarps + threadIdx.x / kWarp) * kSums;
  A sum[kSums] = {};
  multiply<false>(
      sum, shared[threadIdx.x / kWarp], 0, step.batch,
      [&](int b, int i) { return first + i < gates ? widen(step.grad_gates[b * gates + first + i]) : A(0); },
      [&](int b) { return column < columns ? step.X.at(b, column) : A(0); });
  T* to = step.grad_weights + first * columns + column;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    if (first + i < gates && column < columns) to[i * columns] = narrow<T>(sum[i]);
  }
}

// grad_old_h and grad_input: a block has 16 rows and 32 columns, of those from `begin` to `end`, and its
// warps share out the gates.
template <typename T>
__device__ __forceinline__ void grad_input(const BackwardProducts<T>& step, OfWarp<acc_t<T>>* shared,
                                           int begin, int end, int tile) {
  using A = acc_t<T>;
  const int hidden = step.X.hidden, gates = 3 * hidden;
  const int tiles = static_cast<int>(ceil_div(end - begin, kWarp)), warp = threadIdx.x / kWarp;
  const int column = begin + tile % tiles * kWarp + threadIdx.x % kWarp, row = tile / tiles * kSums;
  A sum[kSums] = {};
  multiply<true>(
      sum, shared[warp], gates * warp / kWarps, gates * (warp + 1) / kWarps,
      [&](int k, int i) {
        return row + i < step.batch ? widen(step.grad_gates[(row + i) * gates + k]) : A(0);
      },
      [&](int k) { return column < end ? widen(step.weights[k * step.weights_row + column]) : A(0); });
#pragma unroll
  for (int i = 0; i < kSums; ++i) shared[warp].sums[i][threadIdx.x % kWarp] = sum[i];
  __syncthreads();
  for (int i = warp; i < kSums && row + i < step.batch && column < end; i += kWarps) {
    A total = 0;
    for (int w = 0; w < kWarps; ++w) total += shared[w].sums[i][threadIdx.x % kWarp];
    T* to = column < hidden ? step.grad_old_h + (row + i) * hidden + column
                            : step.grad_input + (row + i) * (step.X.columns - hidden) + column - hidden;
    *to = narrow<T>(total);
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kWarp)
    lltm_backward_products_kernel(const BackwardProducts<T> step, int of_weights, int begin, int end) {
  __shared__ OfWarp<acc_t<T>> shared[kWarps];
  const int tile = static_cast<int>(blockIdx.x);
  if (tile < of_weights) {
    grad_weights(step, shared, tile);
  } else {
    grad_input(step, shared, begin, end, tile - of_weights);
  }
}

// ---- launchers

template <typename T, typename C>
cudaError_t lltm_whole_forward(const WholeForward<T, C>& step, cudaStream_t stream) {
  const int64_t of_units = ceil_div(step.X.hidden, kUnitsOfBlock),
                of_rows = ceil_div(step.units.batch, kSums);
  lltm_whole_forward_kernel<<<static_cast<unsigned>(of_units * of_rows), kUnitsOfBlock * kWarp, 0, stream>>>(
      step, static_cast<int>(of_units));
  return cudaGetLastError();
}

template <typename T>
cudaError_t lltm_backward_products(const BackwardProducts<T>& step, cudaStream_t stream) {
  const int begin = step.grad_old_h ? 0 : step.X.hidden,
            end = step.grad_input ? step.X.columns : step.X.hidden;
  const int64_t of_weights = ceil_div(step.X.columns, kWarp) * ceil_div(3 * step.X.hidden, kWarps * kSums);
  const int64_t of_input = begin < end ? ceil_div(end - begin, kWarp) * ceil_div(step.batch, kSums) : 0;
  lltm_backward_products_kernel<<<static_cast<unsigned>(of_weights + of_input), kWarps * kWarp, 0, stream>>>(
      step, static_cast<int>(of_weights), begin, end);
  return cudaGetLastError();
}

#define INSTANTIATE(T, C) template cudaError_t lltm_whole_forward(const WholeForward<T, C>&, cudaStream_t);
INSTANTIATE(float, float)
INSTANTIATE(double, double)
INSTANTIATE(__half, __half)
INSTANTIATE(__half, float)
INSTANTIATE(__nv_bfloat16, __nv_bfloat16)
INSTANTIATE(__nv_bfloat16, float)
#undef INSTANTIATE
#define INSTANTIATE(T) template cudaError_t lltm_backward_products(const BackwardProducts<T>&, cudaStream_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)

}  // namespace lltm_ext
