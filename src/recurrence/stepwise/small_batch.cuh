// A step of a sequence of few rows in float32 in one kernel: the product of h and the recurrent weight, and
// the cell. One launch a step; each loads its first weights while the one before it finishes (programmatic
// dependent launch). Reading the weights takes all the time, so ordinary loads, many in flight, bring them
// straight to registers.
//
// A block has some units and all rows of the batch. The products that a row of the batch needs for them are
// columns: forward the gates of each unit, backward the gradient of its h. Every column is a row of the
// weight, or of its transpose, along K. A warp has eight columns: 16 lanes divide K, four adjacent values
// each, and either half of the warp has four columns. If a block has few columns, its warps split K too.
//
// All columns need the same values of the batch's rows, h or the gradients of the later step's gates. They
// arrive in a ring in shared memory. All sums are taken in an order that depends on the hidden size only.
#pragma once

#include "common/fast_math.cuh"
#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "recurrence/cell.h"
#include "recurrence/stepwise/small_batch_shape.h"
#include "recurrence/stepwise/step.h"

#ifdef LLTM_EXT_WITH_CUDA
#include "recurrence/persistent/launch.h"
#include "recurrence/stepwise/small_batch_launch.h"
#endif

namespace lltm_ext {

// The rows [B, K] that a step multiplies: the first `before` are in `rows`, those up to `count` in `others`.
// A row of a packed sequence may begin or end between two steps.
struct SmallBatchOperands {
  const float* rows;
  int before;
  const float* others;  // also begins with row 0
  int count;
};

// What differs between the directions: where a step's operands are, and what follows the products. `count`
// rows of the batch have something to compute.

// h @ weight^T and the cell forward.
template <class Cell>
struct SmallBatchForward {
  using Arguments = SequenceForwardArguments<float>;
  static constexpr int kProducts = Cell::kGates, kExtra = kCellShape<Cell>.extra();

  const Arguments& s;
  const StepRows rows, before, next;  // those of this step, and of those before and after it
  const int count, k;
  const float* const weight;

  __device__ SmallBatchForward(const Arguments& args, int step)
      : s(args),
        rows(args.steps.at(step)),
        before(args.steps.at(step - 1)),
        next(args.steps.at(step + 1)),
        count(rows.count),
        k(args.hidden),
        weight(args.weight) {}

  // The previous h. Rows that the step before did not have start from h0.
  __device__ SmallBatchOperands operands() const { return {old_h(0), before.count, s.h0, count}; }

  // Calls f(planes, count) for each array of rows [H] that the cell reads.
  template <class F>
  __device__ void for_inputs(F&& f) const {
    f(s.gates + rows.first * kProducts * s.hidden, count * kProducts);
    f(s.step_inputs + rows.first * Cell::kStepInputs * s.hidden, count * Cell::kStepInputs);
  }

  __device__ void finish(int b, int unit, const float (&products)[kProducts]) const {
    const int64_t hidden = s.hidden, first = rows.first;
    float* const gates = s.gates + first * kProducts * hidden;
    StepForwardArguments<float> step = {};
    step.batch = s.steps.batch;
    step.hidden = hidden;
    step.gates = Gates<const float>::row_major(gates, kProducts, hidden);
    step.parameters = s.parameters;
    step.step_inputs = s.step_inputs + first * Cell::kStepInputs * hidden;
    step.resets = s.resets().from(kResetsToInitial<Cell> ? next.first : first);
    step.next_batch = next.count;
    step.h0 = s.h0;
    step.states0 = static_cast<const float*>(s.states0);
    step.new_states = static_cast<float*>(s.states_n);
    step.old_states = b < before.count ? step.new_states : static_cast<const float*>(s.states0);
    step.state_stride = step.batch * hidden;
    step.old_h = old_h(b);
    step.h = s.h_n;
    step.output = s.output + first * hidden;
    step.output_apart = s.output_apart + first * kOutputsOf<Cell> * hidden;
    if (s.save) {
      step.saved = Gates<float>::row_major(gates, kProducts, hidden);
      step.extra = s.extra + first * kExtra * hidden;
    }
    step_unit<Cell, typename MathOf<float>::type>(step, b, unit, products);
  }

 private:
  // The array [B, H] that has the previous h of row b.
  __device__ const float* old_h(int b) const {
    return b < before.count ? s.output + before.first * s.hidden : s.h0;
  }
};

// grad_gates of the later step @ weight, which is this step's gradient of h, then the cell backward. A row's
// last step reads that gradient from memory, and the launch after its first step stores it there.
template <class Cell>
struct SmallBatchBackward {
  using Arguments = SequenceBackwardArguments<float>;
  static constexpr int kGates = Cell::kGates, kExtra = kCellShape<Cell>.extra(),
                       kSums = kCellShape<Cell>.sums(), kProducts = 1, kOutputs = kOutputsOf<Cell>;

  const Arguments& s;
  const StepRows rows, later;  // those of this step, and of the one computed before it
  const int count, k;          // k: 0 if nothing is to be multiplied
  const float* const weight;

  __device__ SmallBatchBackward(const Arguments& args, int step)
      : s(args),
        rows(step >= args.begin ? args.steps.at(step) : StepRows{0, 0}),
        later(step + 1 < args.end ? args.steps.at(step + 1) : StepRows{0, 0}),
        count(larger(rows.count, later.count)),
        k(later.count > 0 ? kGates * args.hidden : 0),
        weight(args.weight_t) {}

  // The gradients of the later step's gates, [G, H] for each row.
  __device__ SmallBatchOperands operands() const {
    const int64_t width = kGates * int64_t{s.hidden};
    return {s.grad_gates + (later.first - s.first_row) * width, later.count, nullptr, later.count};
  }

  template <class F>
  __device__ void for_inputs(F&& f) const {
    f(s.gates + rows.first * kGates * s.hidden, rows.count * kGates);
    f(s.extra + rows.first * kExtra * s.hidden, rows.count * kExtra);
    f(s.step_inputs + rows.first * Cell::kStepInputs * s.hidden, rows.count * Cell::kStepInputs);
    if (s.grad_output) f(s.grad_output + rows.first * kOutputs * s.hidden, rows.count * kOutputs);
  }

  __device__ void finish(int b, int unit, const float (&products)[1]) const {
    const int64_t hidden = s.hidden, first = rows.first, width = kGates * hidden;
    float& stored_grad_h = s.grad_h[b * hidden + unit];
    const float lost = b < later.count ? s.resets().share(later.first + b) : 0;
    if (kResetsToInitial<Cell> && lost != 0) s.grad_initial[b * hidden + unit] += lost * products[0];
    const float grad_h = b < later.count ? scale_by_mask(mask_of(lost), products[0]) : stored_grad_h;
    if (b >= rows.count) {
      stored_grad_h = grad_h;
      return;
    }
    StepBackwardArguments<float> step = {};
    step.batch = s.steps.batch;
    step.hidden = hidden;
    step.saved = Gates<const float>::row_major(s.gates + first * width, kGates, hidden);
    step.extra = s.extra + first * kExtra * hidden;
    step.parameters = s.parameters;
    step.step_inputs = s.step_inputs + first * Cell::kStepInputs * hidden;
    step.resets = s.resets().from(first);
    step.grad_initial = s.grad_initial;
    const int64_t outputs = kOutputs * hidden;
    step.grad_output = {s.grad_output ? s.grad_output + first * outputs : nullptr, outputs, 1};
    step.grad_own_h = s.grad_own_h;
    step.grad_new_states = {s.grad_states, hidden, 1};
    step.grad_old_states = s.grad_states;
    step.state_stride = step.batch * hidden;
    step.grad_gates = Gates<float>::row_major(s.grad_gates + (first - s.first_row) * width, kGates, hidden);
    step.grad_projections =
        Gates<float>::row_major(s.grad_projections + (first - s.first_row) * width, kGates, hidden);
    CellGradients<Cell, float> grads;
    step_unit<Cell, typename MathOf<float>::type>(step, b, unit, grad_h, grads, step.grad_old_states);
    store_gradients<Cell>(step, b, unit, grads);
    if (s.grad_sums) add_gradients(s.grad_sums + b * kSums * hidden + unit, grads);
  }

 private:
  // Adds by reductions, so that no load has to be waited for. In a step every address has one writer, so the
  // order of the sums is fixed.
  __device__ void add_gradients(float* sums, const CellGradients<Cell, float>& grads) const {
#pragma unroll
    for (int g = 0; g < kGates; ++g) red_add_gpu(sums + int64_t{g} * s.hidden, grads.x[g]);
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p) {
      red_add_gpu(sums + int64_t{kGates + p} * s.hidden, grads.parameters[p]);
    }
  }
};

// The kernel's body. Step is one of the above, for at most kRows rows.
template <class Step, int kRows>
class SmallBatchKernel {
  static constexpr int kWarpColumns = SmallBatchShape::kWarpColumns, kDepth = SmallBatchShape::kDepth,
                       kStages = SmallBatchShape::kStages, kStageSize = SmallBatchShape::kStageSize,
                       kStageDepth = SmallBatchShape::stage_depth(kRows);
  // A lane's columns, and its loads of each in flight. Accumulators take the other registers.
  static constexpr int kColumns = 4, kAhead = kRows == 1 ? 4 : kRows <= 8 ? 3 : 2;
  static constexpr int kLanes = kDepth / 4;  // lanes that divide K
  static_assert(kLanes * kWarpColumns == 32 * kColumns);

 public:
  using Arguments = typename Step::Arguments;
  static constexpr int kProducts = Step::kProducts;  // products of a unit

  __device__ SmallBatchKernel(const Arguments& args, int step, const SmallBatchTile& tile, float* shared)
      : step_(args, step),
        shape_{kProducts, tile},
        hidden_(args.hidden),
        unit_(blockIdx.x * tile.units),
        shared_(shared),
        slice_(threadIdx.x / 32 % tile.split_k),
        column_(threadIdx.x / 32 / tile.split_k * kWarpColumns + threadIdx.x % 32 / kLanes * kColumns),
        lane_(threadIdx.x % kLanes),
        slice_depth_(shape_.slice_depth(step_.k)),
        slice_end_(min(slice_depth_, step_.k - slice_ * slice_depth_)),
        operands_(step_.operands()) {}

  __device__ void run() {
    float sums[kColumns * kRows] = {};
    multiply(sums);
    cp_async_wait_group<0>();  // for the copies of zeros past K's end
    __syncthreads();           // the ring is free: the partial sums replace it
    store(sums);
    __syncthreads();
    const int units = shape_.tile.units;
#pragma unroll 1
    for (int i = threadIdx.x; i < units * step_.count; i += shape_.threads()) {
      const int b = i / units, unit = i % units;
      if (unit_ + unit >= hidden_) continue;
      float products[kProducts];
#pragma unroll
      for (int p = 0; p < kProducts; ++p) products[p] = total(p * units + unit, b);
      step_.finish(b, unit_ + unit, products);
    }
  }

 private:
  // Computes the lane's partial sums: [column, row of the batch].
  __device__ __forceinline__ void multiply(float (&sums)[kColumns * kRows]) {
    const float* weights[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) weights[c] = weights_of(column_ + c);
    const int end = slice_end_ - 4 * lane_;
    float4 loaded[kAhead][kColumns];
    const auto load = [&](float4(&to)[kColumns], int depth) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) to[c] = depth < end ? ld_once(weights[c] + depth) : float4{};
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(loaded[i], i * kDepth);
    prefetch_inputs();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) copy_operands(stage);
    for (int begin = 0; begin < slice_depth_; begin += kAhead * kDepth) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int depth = begin + i * kDepth;
        if (depth >= slice_depth_) break;
        if (depth % kStageDepth == 0) next_stage(depth / kStageDepth);
        add_products(sums, loaded[i], depth);
        load(loaded[i], depth + kAhead * kDepth);
      }
    }
  }

  // The weights of a column from the lane's first value of K on. Columns without a unit repeat another's.
  __device__ const float* weights_of(int column) const {
    const int units = shape_.tile.units, product = min(column / units, kProducts - 1);
    const int64_t row = int64_t{product} * hidden_ + min(unit_ + column % units, hidden_ - 1);
    return step_.weight + row * step_.k + slice_ * slice_depth_ + 4 * lane_;
  }

  // Prefetches what the cell reads after the product: earlier steps have long evicted it from L2.
  __device__ void prefetch_inputs() const {
    constexpr int kSector = 8;
    const int sectors = (shape_.tile.units + kSector - 1) / kSector;
    step_.for_inputs([&](const float* planes, int count) {
#pragma unroll 1
      for (int i = threadIdx.x; i < count * sectors; i += shape_.threads()) {
        const int unit = unit_ + i % sectors * kSector;
        if (unit < hidden_) prefetch_global_l2(planes + int64_t{i / sectors} * hidden_ + unit);
      }
    });
  }

  // ---- the ring of operands: [stage, slice, row, depth]

  // Waits for a stage, and begins to fill the one that all warps have read.
  __device__ void next_stage(int stage) {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();
    copy_operands(stage + kStages - 1);
  }

  // A warp copies a few of the pieces that its slice's warps need.
  __device__ __forceinline__ void copy_operands(int stage) {
    constexpr int kVectors = kStageDepth / 4, kPieces = kStageSize / (4 * 32);
    const unsigned lane = threadIdx.x % 32, tiles = shape_.column_tiles();
    float* const to = shared_ + (stage % kStages * shape_.tile.split_k + slice_) * kStageSize + 4 * lane;
#pragma unroll 1
    for (unsigned i = column_ / kWarpColumns; i < kPieces; i += tiles) {
      const int b = (32 * i + lane) / kVectors, depth = stage * kStageDepth + (32 * i + lane) % kVectors * 4;
      const float* const rows = b < operands_.before ? operands_.rows : operands_.others;
      const bool inside = b < operands_.count && depth < slice_end_;
      const int at = inside ? b * step_.k + slice_ * slice_depth_ + depth : 0;
      cp_async<16>(to + 4 * 32 * i, rows + at, inside ? 16 : 0);
    }
    cp_async_commit_group();  // even if empty: the wait counts groups
  }

  __device__ __forceinline__ void add_products(float (&sums)[kColumns * kRows],
                                               const float4 (&weights)[kColumns], int depth) const {
    const int stage = depth / kStageDepth % kStages * shape_.tile.split_k + slice_;
    const float* const operands = shared_ + stage * kStageSize + depth % kStageDepth + 4 * lane_;
#pragma unroll
    for (int b = 0; b < kRows; ++b) {
      const float4 x = *reinterpret_cast<const float4*>(operands + b * kStageDepth);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c * kRows + b] += weights[c].x * x.x;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c * kRows + b] += weights[c].y * x.y;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c * kRows + b] += weights[c].z * x.z;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c * kRows + b] += weights[c].w * x.w;
    }
  }

  // ---- the partial sums: [slice, column, row of the batch]

  // Adds up the sums of the lanes that divide K. In each round two lanes exchange halves of their values, so
  // in the end every lane has the totals of a few.
  __device__ __forceinline__ void store(float (&sums)[kColumns * kRows]) {
    constexpr int kSums = kColumns * kRows, kPerLane = larger(kSums / kLanes, 1),
                  kSharing = larger(kLanes / kSums, 1);  // lanes that end with the same value
    int count = kSums;
#pragma unroll
    for (int other = kLanes / 2; other > 0; other /= 2) {
      const bool upper = lane_ & other;
      if (count == 1) {
        sums[0] += __shfl_xor_sync(~0u, sums[0], other);
        continue;
      }
      count /= 2;
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        if (i >= count) break;
        const float mine = upper ? sums[i + count] : sums[i], others = upper ? sums[i] : sums[i + count];
        sums[i] = mine + __shfl_xor_sync(~0u, others, other);
      }
    }
    if (lane_ % kSharing != 0) return;
    float* const to = shared_ + (slice_ * shape_.columns() + column_) * kRows + lane_ / kSharing * kPerLane;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) to[i] = sums[i];
  }

  __device__ float total(int column, int b) const {
    float sum = 0;
#pragma unroll 1
    for (int slice = 0; slice < shape_.tile.split_k; ++slice) {
      sum += shared_[(slice * shape_.columns() + column) * kRows + b];
    }
    return sum;
  }

  const Step step_;
  const SmallBatchShape shape_;
  const int hidden_, unit_;  // unit_: the block's first
  float* const shared_;
  const int slice_, column_, lane_;    // column_: the lane's first
  const int slice_depth_, slice_end_;  // a slice's part of K; where this one ends
  const SmallBatchOperands operands_;
};

template <class Kernel>
__device__ __forceinline__ void run_small_batch(const typename Kernel::Arguments& args, int step,
                                                const SmallBatchTile& tile) {
#ifdef __CUDA_ARCH__
  extern __shared__ __align__(16) float shared[];
  Kernel(args, step, tile, shared).run();
#endif
}

// Two blocks fit a multiprocessor: the next step's block waits there with its weights loaded.
template <class Kernel>
__global__ void __launch_bounds__(SmallBatchShape::kMostThreads, 2)
    recurrence_small_batch_kernel(const __grid_constant__ typename Kernel::Arguments args, int step,
                                  const SmallBatchTile tile) {
  run_small_batch<Kernel>(args, step, tile);
}

#ifdef LLTM_EXT_WITH_CUDA
// The kernel for tiles of this many rows, one of kSmallBatch. Step is SmallBatchForward or SmallBatchBackward
// of a cell.
template <class Step>
auto small_batch_kernel(int rows) {
  if (rows == 1) return recurrence_small_batch_kernel<SmallBatchKernel<Step, 1>>;
  if (rows == 4) return recurrence_small_batch_kernel<SmallBatchKernel<Step, 4>>;
  if (rows == 8) return recurrence_small_batch_kernel<SmallBatchKernel<Step, 8>>;
  return recurrence_small_batch_kernel<SmallBatchKernel<Step, kMostSmallBatch>>;
}

template <class Step, class Cell>
cudaError_t launch_small_batch(const typename Step::Arguments& s, const SmallBatchTile& tile,
                               cudaStream_t stream) {
  int capability = 0;
  const cudaError_t error =
      compute_capability<recurrence_small_batch_kernel<SmallBatchKernel<Step, 1>>>(capability);
  if (error != cudaSuccess) return error;
  const void* const kernel = reinterpret_cast<const void*>(small_batch_kernel<Step>(tile.rows));
  return run_small_batch_steps(kernel, Cell::kGates, s, tile, /*programmatic=*/capability >= 90, stream);
}

// Declared in persistent/launch.h.
template <class Cell>
cudaError_t launch_small_batch_steps(const SequenceForwardArguments<float>& s, const SmallBatchTile& tile,
                                     cudaStream_t stream) {
  return launch_small_batch<SmallBatchForward<Cell>, Cell>(s, tile, stream);
}
template <class Cell>
cudaError_t launch_small_batch_steps(const SequenceBackwardArguments<float>& s, const SmallBatchTile& tile,
                                     cudaStream_t stream) {
  return launch_small_batch<SmallBatchBackward<Cell>, Cell>(s, tile, stream);
}
#endif

}  // namespace lltm_ext

#define INSTANTIATE_FEW_ROWS_STEPS(Cell)                                                                 \
  template cudaError_t lltm_ext::launch_small_batch_steps<Cell>(const SequenceForwardArguments<float>&,  \
                                                                const SmallBatchTile&, cudaStream_t);    \
  template cudaError_t lltm_ext::launch_small_batch_steps<Cell>(const SequenceBackwardArguments<float>&, \
                                                                const SmallBatchTile&, cudaStream_t);
