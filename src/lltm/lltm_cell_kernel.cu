// lltm on CUDA: a whole step of few units in one launch, its products included. There every further launch,
// and every call of a library, takes the host longer than the whole step takes the device.
//
// Latency is what counts, so warps work alone. Forward, the warps of a block have one unit: all lanes share
// out the length of the products, each with the three gates of 16 rows, and then exchange their sums.
// Backward, a lane has a column of what lies in memory: of [old_h, input] for grad_weights, of the weights
// for their gradients. The other factor, the gates' gradients, a warp computes as it goes along, for 4 units
// of 8 rows at a time, one a lane. They never lie in memory.
#include "common/launch.cuh"
#include "common/vec.cuh"
#include "lltm/lltm.h"

namespace lltm_ext {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = ~0u;

// ---- forward

constexpr int kForwardWarps = 4, kForwardRows = 16;

// Each lane has sums of its own for 16 rows. Afterwards lanes 2 r and 2 r + 1 have those of row r over all
// lanes.
template <int kRows = kForwardRows, typename A>
__device__ __forceinline__ void exchange(A (&sum)[3][kForwardRows]) {
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
__global__ void __launch_bounds__(kForwardWarps* kWarp)
    lltm_whole_forward_kernel(const WholeForward<T, C> step) {
  using A = acc_t<T>;
  const int hidden = step.X.hidden, unit = blockIdx.x % hidden, row = blockIdx.x / hidden * kForwardRows;
  const int rows = static_cast<int>(step.units.batch) - row;
  A sum[3][kForwardRows] = {};
#pragma unroll 1
  for (int k = threadIdx.x; k < step.X.columns; k += kForwardWarps * kWarp) {
    A weight[3];
#pragma unroll
    for (int g = 0; g < 3; ++g) weight[g] = widen(step.weights[(g * hidden + unit) * step.weights_row + k]);
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
      const A x = r < rows ? step.X.at(row + r, k) : A(0);
#pragma unroll
      for (int g = 0; g < 3; ++g) sum[g][r] += weight[g] * x;
    }
  }
  exchange(sum);
  __shared__ A of_warps[kForwardWarps][3][kForwardRows];
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int g = 0; g < 3; ++g) of_warps[threadIdx.x / kWarp][g][lane / 2] = sum[g][0];
  __syncthreads();
  const int r = threadIdx.x;
  if (r >= kForwardRows || r >= rows) return;
  A gates[3];
#pragma unroll
  for (int g = 0; g < 3; ++g) {
    gates[g] = step.bias ? widen(step.bias[g * hidden + unit]) : A(0);
    for (int w = 0; w < kForwardWarps; ++w) gates[g] += of_warps[w][g][r];
  }
  lltm_unit_of_gates<ExactMath>(step.units, row + r, unit, gates);
}

// ---- backward

constexpr int kWarps = 8, kUnits = 4, kRows = 8, kGates = 3 * kUnits;

// A warp's shared memory: gradients of the gates, or its sums for kRows rows.
union OfWarp {
  float gradients[kRows][kGates];
  float sums[kRows][kWarp];
};

// The gradients of the gates of kUnits units of kRows rows, 0 where there is none; stores grad_old_cell if
// asked to.
template <typename T, typename C>
__device__ __forceinline__ void gate_gradients(const WholeBackward<T, C>& step, OfWarp& shared, int unit,
                                               int row, bool stores) {
  const int lane = threadIdx.x % kWarp, u = lane % kUnits, r = lane / kUnits;
  float gradients[3] = {};
  __syncwarp();  // those before have been read
  if (unit + u < step.X.hidden && row + r < step.units.batch) {
    lltm_gate_gradients<ExactMath>(step.units, row + r, unit + u, gradients,
                                   stores ? step.units.grad_old_cell : nullptr);
  }
#pragma unroll
  for (int g = 0; g < 3; ++g) shared.gradients[r][g * kUnits + u] = gradients[g];
  __syncwarp();
}

// grad_weights: a warp has kUnits units and 32 columns. The bias is a column more, of ones.
template <typename T, typename C>
__device__ __forceinline__ void grad_weights(const WholeBackward<T, C>& step, OfWarp& shared, int task) {
  const int hidden = step.X.hidden, columns = step.X.columns, tiles = columns / kWarp + 1;
  const int unit = task / tiles * kUnits, column = task % tiles * kWarp + threadIdx.x % kWarp;
  if (unit >= hidden) return;
  const int batch = static_cast<int>(step.units.batch);
  float sum[kGates] = {};
#pragma unroll 1
  for (int row = 0; row < batch; row += kRows) {
    float x[kRows];  // on their way during the cell
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r] = column == columns ? 1.f : 0.f;
      if (column < columns && row + r < batch) x[r] = step.X.at(row + r, column);
    }
    gate_gradients(step, shared, unit, row, task % tiles == 0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kGates; ++i) sum[i] += shared.gradients[r][i] * x[r];
    }
  }
  if (column > columns) return;
#pragma unroll
  for (int i = 0; i < kGates; ++i) {
    const int gate = i / kUnits * hidden + unit + i % kUnits;
    if (unit + i % kUnits >= hidden) continue;
    T* to = column < columns ? step.grad_weights + gate * columns + column : step.units.grad_bias + gate;
    *to = narrow<T>(sum[i]);
  }
}

// grad_old_h and grad_input: a block has kRows rows and 32 columns, of those from `begin` to `end`, and its
// warps share out the units.
template <typename T, typename C>
__device__ __forceinline__ void grad_input(const WholeBackward<T, C>& step, OfWarp* shared, int begin,
                                           int end, int tile) {
  const int hidden = step.X.hidden, batch = static_cast<int>(step.units.batch);
  const int tiles = static_cast<int>(ceil_div(end - begin, kWarp));
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = begin + tile % tiles * kWarp + lane, row = tile / tiles * kRows;
  float sum[kRows] = {};
#pragma unroll 1
  for (int unit = warp * kUnits; unit < hidden; unit += kWarps * kUnits) {
    float weight[kGates];  // on their way during the cell
#pragma unroll
    for (int i = 0; i < kGates; ++i) {
      const int gate = i / kUnits * hidden + unit + i % kUnits;
      const bool inside = unit + i % kUnits < hidden && column < end;
      weight[i] = inside ? widen(step.weights[gate * step.weights_row + column]) : 0.f;
    }
    gate_gradients(step, shared[warp], unit, row, false);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kGates; ++i) sum[r] += shared[warp].gradients[r][i] * weight[i];
    }
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kRows; ++r) shared[warp].sums[r][lane] = sum[r];
  __syncthreads();
  static_assert(kWarps == kRows, "a warp finishes a row");
  if (row + warp >= batch || column >= end) return;
  float total = 0;
  for (int w = 0; w < kWarps; ++w) total += shared[w].sums[warp][lane];
  T* to = column < hidden ? step.grad_old_h + (row + warp) * hidden + column
                          : step.grad_input + (row + warp) * (step.X.columns - hidden) + column - hidden;
  *to = narrow<T>(total);
}

template <typename T, typename C>
__global__ void __launch_bounds__(kWarps* kWarp)
    lltm_whole_backward_kernel(const WholeBackward<T, C> step, int of_weights, int begin, int end) {
  alignas(16) __shared__ OfWarp shared[kWarps];
  const int block = static_cast<int>(blockIdx.x), warp = threadIdx.x / kWarp;
  if (block < of_weights) {
    grad_weights(step, shared[warp], block * kWarps + warp);
  } else {
    grad_input(step, shared, begin, end, block - of_weights);
  }
}

// ---- launchers

template <typename T, typename C>
cudaError_t lltm_whole_forward(const WholeForward<T, C>& step, cudaStream_t stream) {
  const int64_t blocks = step.X.hidden * ceil_div(step.units.batch, kForwardRows);
  lltm_whole_forward_kernel<<<static_cast<unsigned>(blocks), kForwardWarps * kWarp, 0, stream>>>(step);
  return cudaGetLastError();
}

template <typename T, typename C>
cudaError_t lltm_whole_backward(const WholeBackward<T, C>& step, cudaStream_t stream) {
  const int begin = step.grad_old_h ? 0 : step.X.hidden,
            end = step.grad_input ? step.X.columns : step.X.hidden;
  const int64_t tasks = ceil_div(step.X.hidden, kUnits) * (step.X.columns / kWarp + 1);
  const int64_t of_weights = ceil_div(tasks, kWarps);
  const int64_t of_input = begin < end ? ceil_div(end - begin, kWarp) * ceil_div(step.units.batch, kRows) : 0;
  lltm_whole_backward_kernel<<<static_cast<unsigned>(of_weights + of_input), kWarps * kWarp, 0, stream>>>(
      step, static_cast<int>(of_weights), begin, end);
  return cudaGetLastError();
}

#define INSTANTIATE(T, C)                                                           \
  template cudaError_t lltm_whole_forward(const WholeForward<T, C>&, cudaStream_t); \
  template cudaError_t lltm_whole_backward(const WholeBackward<T, C>&, cudaStream_t);
INSTANTIATE(float, float)
INSTANTIATE(__half, __half)
INSTANTIATE(__half, float)
INSTANTIATE(__nv_bfloat16, __nv_bfloat16)
INSTANTIATE(__nv_bfloat16, float)

}  // namespace lltm_ext
