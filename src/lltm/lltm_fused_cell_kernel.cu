// lltm on CUDA: one step of few units in one launch, with its matrix products. At these sizes each further
// launch, and each call of a library, takes the host longer than the step takes the device.
//
// Latency matters most, so warps synchronise only to add up their sums. Forward, a block has one unit of 16
// rows; its threads split K. Backward, a lane has one column: of [old_h, input] for grad_weights, of the
// weights for grad_old_h and grad_input. Each warp computes the gate gradients that it needs, 4 units of 8
// rows at a time, in shared memory.
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "lltm/lltm.h"

namespace lltm_ext {

constexpr int kWarp = 32;

// ---- forward

constexpr int kForwardWarps = 4, kForwardRows = 16;

template <typename T, typename C>
__global__ void __launch_bounds__(kForwardWarps* kWarp)
    lltm_fused_cell_forward_kernel(const FusedCellForwardArguments<T, C> args) {
  using A = acc_t<T>;
  const int hidden = args.X.hidden, unit = blockIdx.x % hidden, row = blockIdx.x / hidden * kForwardRows;
  const int rows = static_cast<int>(args.step.batch) - row;
  A sum[3][kForwardRows] = {};
#pragma unroll 1
  for (int k = threadIdx.x; k < args.X.columns; k += kForwardWarps * kWarp) {
    A weight[3];
#pragma unroll
    for (int g = 0; g < 3; ++g) weight[g] = widen(args.weights[(g * hidden + unit) * args.weights_row + k]);
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
      const A x = r < rows ? args.X.at(row + r, k) : A(0);
#pragma unroll
      for (int g = 0; g < 3; ++g) sum[g][r] += weight[g] * x;
    }
  }
  reduce_over_lanes<kForwardRows>(sum);  // lanes 2 r and 2 r + 1 have the sums of row r
  __shared__ A warp_sums[kForwardWarps][3][kForwardRows];
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int g = 0; g < 3; ++g) warp_sums[threadIdx.x / kWarp][g][lane / 2] = sum[g][0];
  __syncthreads();
  const int r = threadIdx.x;
  if (r >= kForwardRows || r >= rows) return;
  CellInputs<LltmOneStepCell, A> in;
#pragma unroll
  for (int g = 0; g < 3; ++g) {
    in.x[g] = args.bias ? widen(args.bias[g * hidden + unit]) : A(0);
    for (int w = 0; w < kForwardWarps; ++w) in.x[g] += warp_sums[w][g][r];
  }
  step_unit<LltmOneStepCell, ExactMath>(args.step, row + r, unit, in);
}

// ---- backward

constexpr int kWarps = 8, kUnits = 4, kRows = 8, kGates = 3 * kUnits;

// A warp's shared memory: gradients of the gates, or its sums for kRows rows.
union WarpScratch {
  float gradients[kRows][kGates];
  float sums[kRows][kWarp];
};

// Computes the gradients of the gates of kUnits units of kRows rows, 0 outside the matrix.
template <typename T, typename C>
__device__ __forceinline__ void gate_gradients(const FusedCellBackwardArguments<T, C>& args,
                                               WarpScratch& shared, int unit, int row,
                                               bool stores_grad_old_c) {
  const int lane = threadIdx.x % kWarp, u = lane % kUnits, r = lane / kUnits;
  CellGradients<LltmOneStepCell, float> gradients = {};
  __syncwarp();  // all lanes have read the previous gradients
  if (unit + u < args.X.hidden && row + r < args.step.batch) {
    step_unit<LltmOneStepCell, ExactMath>(args.step, row + r, unit + u, gradients,
                                          stores_grad_old_c ? args.step.grad_old_states : nullptr);
  }
#pragma unroll
  for (int g = 0; g < 3; ++g) shared.gradients[r][g * kUnits + u] = gradients.x[g];
  __syncwarp();
}

// A warp has kUnits units and 32 columns. The bias adds one column, of ones.
template <typename T, typename C>
__device__ __forceinline__ void compute_grad_weights(const FusedCellBackwardArguments<T, C>& args,
                                                     WarpScratch& shared, int task) {
  const int hidden = args.X.hidden, columns = args.X.columns, tiles = columns / kWarp + 1;
  const int unit = task / tiles * kUnits, column = task % tiles * kWarp + threadIdx.x % kWarp;
  if (unit >= hidden) return;
  const int batch = static_cast<int>(args.step.batch);
  float sum[kGates] = {};
#pragma unroll 1
  for (int row = 0; row < batch; row += kRows) {
    float x[kRows];  // loaded while the cell is computed
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r] = column == columns ? 1.f : 0.f;
      if (column < columns && row + r < batch) x[r] = args.X.at(row + r, column);
    }
    gate_gradients(args, shared, unit, row, task % tiles == 0);
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
    T* to = column < columns ? args.grad_weights + gate * columns + column : args.step.grad_bias + gate;
    *to = narrow<T>(sum[i]);
  }
}

// grad_old_h and grad_input: a block has kRows rows and 32 of the columns [begin, end), and its warps share
// out the units.
template <typename T, typename C>
__device__ __forceinline__ void compute_grad_inputs(const FusedCellBackwardArguments<T, C>& args,
                                                    WarpScratch* shared, int begin, int end, int tile) {
  const int hidden = args.X.hidden, batch = static_cast<int>(args.step.batch);
  const int tiles = static_cast<int>(ceil_div(end - begin, kWarp));
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = begin + tile % tiles * kWarp + lane, row = tile / tiles * kRows;
  float sum[kRows] = {};
#pragma unroll 1
  for (int unit = warp * kUnits; unit < hidden; unit += kWarps * kUnits) {
    float weight[kGates];  // loaded while the cell is computed
#pragma unroll
    for (int i = 0; i < kGates; ++i) {
      const int gate = i / kUnits * hidden + unit + i % kUnits;
      const bool inside = unit + i % kUnits < hidden && column < end;
      weight[i] = inside ? widen(args.weights[gate * args.weights_row + column]) : 0.f;
    }
    gate_gradients(args, shared[warp], unit, row, false);
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
  T* to = column < hidden ? args.grad_old_h + (row + warp) * hidden + column
                          : args.grad_input + (row + warp) * (args.X.columns - hidden) + column - hidden;
  *to = narrow<T>(total);
}

template <typename T, typename C>
__global__ void __launch_bounds__(kWarps* kWarp)
    lltm_fused_cell_backward_kernel(const FusedCellBackwardArguments<T, C> args, int weight_blocks, int begin,
                                    int end) {
  alignas(16) __shared__ WarpScratch shared[kWarps];
  const int block = static_cast<int>(blockIdx.x), warp = threadIdx.x / kWarp;
  if (block < weight_blocks) {
    compute_grad_weights(args, shared[warp], block * kWarps + warp);
  } else {
    compute_grad_inputs(args, shared, begin, end, block - weight_blocks);
  }
}

// ---- launchers

template <typename T, typename C>
cudaError_t launch_fused_cell(const FusedCellForwardArguments<T, C>& args, cudaStream_t stream) {
  const int64_t blocks = args.X.hidden * ceil_div(args.step.batch, kForwardRows);
  lltm_fused_cell_forward_kernel<<<static_cast<unsigned>(blocks), kForwardWarps * kWarp, 0, stream>>>(args);
  return cudaGetLastError();
}

template <typename T, typename C>
cudaError_t launch_fused_cell(const FusedCellBackwardArguments<T, C>& args, cudaStream_t stream) {
  const int begin = args.grad_old_h ? 0 : args.X.hidden,
            end = args.grad_input ? args.X.columns : args.X.hidden;
  const int64_t tasks = ceil_div(args.X.hidden, kUnits) * (args.X.columns / kWarp + 1);
  const int64_t weight_blocks = ceil_div(tasks, kWarps);
  const int64_t input_blocks =
      begin < end ? ceil_div(end - begin, kWarp) * ceil_div(args.step.batch, kRows) : 0;
  lltm_fused_cell_backward_kernel<<<static_cast<unsigned>(weight_blocks + input_blocks), kWarps * kWarp, 0,
                                    stream>>>(args, static_cast<int>(weight_blocks), begin, end);
  return cudaGetLastError();
}

#define INSTANTIATE(T, C)                                                                       \
  template cudaError_t launch_fused_cell(const FusedCellForwardArguments<T, C>&, cudaStream_t); \
  template cudaError_t launch_fused_cell(const FusedCellBackwardArguments<T, C>&, cudaStream_t);
INSTANTIATE(float, float)
INSTANTIATE(__half, __half)
INSTANTIATE(__half, float)
INSTANTIATE(__nv_bfloat16, __nv_bfloat16)
INSTANTIATE(__nv_bfloat16, float)

}  // namespace lltm_ext
