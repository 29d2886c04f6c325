// A step of a sequence as one kernel, for half types on Hopper: the product of h with the recurrent weight by
// TMA and wgmma, and the cell right behind it. A launch a step, each of which prepares while the one before
// it ends.
//
// A block has a tile of [rows of the batch, units] with all gates of its units, so that the cell finds what
// it needs in one place. Where there are few tiles, the blocks of a cluster share out the product's K.
#pragma once

#include <stdlib.h>
#include "common/hopper/launch.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/split.cuh"
#include "common/recurrence/engine.h"
#include "common/recurrence/math.cuh"

namespace lltm_ext {
namespace step_hopper {

using namespace hopper;

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T data[4];
};

template <typename T>
__device__ __forceinline__ void load(const T* from, float (&x)[4]) {
  const Four<T> found = *reinterpret_cast<const Four<T>*>(from);
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = widen(found.data[e]);
}
template <typename T>
__device__ __forceinline__ void store(T* to, const float (&x)[4]) {
  Four<T> rounded;
#pragma unroll
  for (int e = 0; e < 4; ++e) rounded.data[e] = narrow<T>(x[e]);
  *reinterpret_cast<Four<T>*>(to) = rounded;
}

// h @ weight^T and the cell forward. Columns of the product: the tile's units of one gate, then of the next.
template <class Cell, typename T_, int kStages>
struct ForwardStep {
  using T = T_;
  static constexpr int kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;
  static constexpr int kRows = kForwardTile.rows, kUnits = kForwardTile.units;
  using Operands = hopper::Operands<T, kRows, kGates * kUnits, kStages, false, false>;
  using Stage = typename Pipeline<Operands>::Stage;

  struct Arguments {
    ForwardSequence<T> s;
    CUtensorMap h0, output, weight;
  };

  __device__ static __forceinline__ int tiles_of_k(const Arguments& args, int) {
    return (args.s.hidden + kTileK - 1) / kTileK;
  }
  __device__ static __forceinline__ void fetch_weights(const Arguments& args, const Stage& to, int unit, int k) {
#pragma unroll
    for (int g = 0; g < kGates; ++g) copy_in(to.b + g * kUnits * kLineBytes, &args.weight, k, unit, g, to.full);
  }
  __device__ static __forceinline__ void fetch_rows(const Arguments& args, const Stage& to, int step, int row, int k) {
    if (step == 0) {
      copy_in(to.a, &args.h0, k, row, 0, to.full);
    } else {
      copy_in(to.a, &args.output, k, row, time_of(args.s.steps, step - 1), to.full);
    }
  }

  // Four units from `unit` of a row. sum(gate): their products.
  template <class Sum>
  __device__ static __forceinline__ void finish(const Arguments& args, int step, int row, int unit, Sum&& sum) {
    const ForwardSequence<T>& s = args.s;
    const int64_t at = s.steps.at(step).first + row, state = static_cast<int64_t>(row) * s.hidden + unit;
    float gates[kGates][4], c[4], h[4], saved[Cell::kSaved][4];
#pragma unroll
    for (int g = 0; g < kGates; ++g) load(s.gates + (at * kGates + g) * s.hidden + unit, gates[g]);
    load((step == 0 ? s.c0 : s.c_n) + state, c);
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      const float4 product = sum(g);
      gates[g][0] += product.x, gates[g][1] += product.y, gates[g][2] += product.z, gates[g][3] += product.w;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float mine[kGates], kept[Cell::kSaved];
#pragma unroll
      for (int g = 0; g < kGates; ++g) mine[g] = gates[g][e];
      h[e] = Cell::template forward<typename MathOf<T>::type>(mine, c[e], kept);
#pragma unroll
      for (int i = 0; i < Cell::kSaved; ++i) saved[i][e] = kept[i];
    }
    store(s.c_n + state, c);
    store(s.output + at * s.hidden + unit, h);
    if (step == s.steps.length - 1) store(s.h_n + state, h);
    if (!s.extra) return;
#pragma unroll
    for (int g = 0; g < kGates; ++g) store(s.gates + (at * kGates + g) * s.hidden + unit, saved[g]);
#pragma unroll
    for (int e = 0; e < kExtra; ++e) {
      store(s.extra + (at * kExtra + e) * s.hidden + unit, saved[kGates + e]);
    }
  }

  __device__ static __forceinline__ int time_of(const StepOrder& steps, int step) {
    return steps.reverse ? steps.length - 1 - step : step;
  }
};

// grad_gates of the step after @ weight, which is the gradient of this step's h, and the cell backward. From
// the last step, which finds it in memory, to the one before the first, which only leaves it there.
template <class Cell, typename T_, int kStages>
struct BackwardStep {
  using T = T_;
  static constexpr int kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;
  static constexpr int kRows = kBackwardTile.rows, kUnits = kBackwardTile.units;
  using Operands = hopper::Operands<T, kRows, kUnits, kStages, false, false>;
  using Stage = typename Pipeline<Operands>::Stage;

  struct Arguments {
    BackwardSequence<T> s;
    CUtensorMap grad_gates, weight_t;
  };

  __device__ static __forceinline__ int tiles_of_k(const Arguments& args, int step) {
    return step == args.s.end - 1 ? 0 : (kGates * args.s.hidden + kTileK - 1) / kTileK;
  }
  __device__ static __forceinline__ void fetch_weights(const Arguments& args, const Stage& to, int unit, int k) {
    copy_in(to.b, &args.weight_t, k, unit, 0, to.full);
  }
  __device__ static __forceinline__ void fetch_rows(const Arguments& args, const Stage& to, int step, int row, int k) {
    const int64_t first = args.s.steps.at(step + 1).first - args.s.first_row;
    copy_in(to.a, &args.grad_gates, k, row, static_cast<int>(first / args.s.steps.batch), to.full);
  }

  template <class Sum>
  __device__ static __forceinline__ void finish(const Arguments& args, int step, int row, int unit, Sum&& sum) {
    const BackwardSequence<T>& s = args.s;
    const int64_t state = static_cast<int64_t>(row) * s.hidden + unit;
    float grad_h[4];
    if (step == s.end - 1) {
      load(s.grad_h + state, grad_h);
    } else {
      const float4 found = sum(0);
      grad_h[0] = found.x, grad_h[1] = found.y, grad_h[2] = found.z, grad_h[3] = found.w;
    }
    if (step < s.begin) {
      store(s.grad_h + state, grad_h);
      return;
    }
    const int64_t at = s.steps.at(step).first + row, in_chunk = at - s.first_row;
    float saved[Cell::kSaved][4], grad_c[4], grad_output[4] = {}, grad_gates[kGates][4];
#pragma unroll
    for (int g = 0; g < kGates; ++g) load(s.gates + (at * kGates + g) * s.hidden + unit, saved[g]);
#pragma unroll
    for (int e = 0; e < kExtra; ++e) {
      load(s.extra + (at * kExtra + e) * s.hidden + unit, saved[kGates + e]);
    }
    if (s.grad_output) load(s.grad_output + at * s.hidden + unit, grad_output);
    load(s.grad_c + state, grad_c);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float kept[Cell::kSaved], mine[kGates];
#pragma unroll
      for (int i = 0; i < Cell::kSaved; ++i) kept[i] = saved[i][e];
      Cell::template backward<typename MathOf<T>::type>(kept, grad_h[e] + grad_output[e], grad_c[e], mine);
#pragma unroll
      for (int g = 0; g < kGates; ++g) grad_gates[g][e] = mine[g];
    }
    store(s.grad_c + state, grad_c);
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      store(s.grad_gates + (in_chunk * kGates + g) * s.hidden + unit, grad_gates[g]);
      if (!s.grad_bias) continue;
      float* const bias = s.grad_bias + (static_cast<int64_t>(row) * kGates + g) * s.hidden + unit;
      float total[4];
      load(bias, total);
#pragma unroll
      for (int e = 0; e < 4; ++e) total[e] += grad_gates[g][e];
      store(bias, total);
    }
  }
};

template <class Step>
struct StepKernel {
  using Operands = typename Step::Operands;
  using Arguments = typename Step::Arguments;
  using Sums = Parts<Step::kRows, Operands::kTileN>;
  static constexpr int kThreads = 128 * Operands::kConsumers + 32;  // the last warp fetches
  static constexpr int kOperandsOrSums = std::max(Operands::kBytes, Sums::kBytes);
  static constexpr int kShared = kOperandsOrSums + kBarrierBytes + kAlignment;
  static constexpr int kResident = kShared <= 113 * 1024 ? 2 : 1;

  __device__ static void run(const Arguments& args, int step) {
    unsigned char* shared = aligned_shared();
    Pipeline<Operands> pipeline(
        shared, *reinterpret_cast<typename Pipeline<Operands>::Barriers*>(shared + kOperandsOrSums));
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();

    const int parts = gridDim.z, part = blockIdx.z, warpgroup = threadIdx.x / 128;
    const int row = blockIdx.y * Step::kRows, unit = blockIdx.x * Step::kUnits;
    const int tiles = Step::tiles_of_k(args, step);
    const int begin = tiles * part / parts, end = tiles * (part + 1) / parts;
    float d[Operands::kTileN / 2];
    if (warpgroup == Operands::kConsumers) {
      if (threadIdx.x % 32 == 0) fetch(pipeline, args, step, row, unit, begin, end);
      __syncwarp();
    } else if (begin < end) {
      pipeline.multiply(d, end - begin, warpgroup);
    }
    wait_for_launch_before();
    Sums sums(shared);
    if (tiles > 0) {
      __syncthreads();  // nobody multiplies from the stages any more: the sums take their place
      if (warpgroup < Operands::kConsumers) sums.write(d, warpgroup);
      cluster_sync();
    }
    finish(sums, args, step, row, unit, part, parts);
    cluster_sync();  // the others have read this block's part
  }

 private:
  // What no step writes comes while the step before still runs.
  __device__ static __forceinline__ void fetch(Pipeline<Operands>& pipeline, const Arguments& args, int step,
                                               int row, int unit, int begin, int end) {
    const int early = end - begin < Operands::kStages ? end - begin : Operands::kStages;
    for (int i = 0; i < early; ++i) Step::fetch_weights(args, pipeline.next(), unit, (begin + i) * kTileK);
    wait_for_launch_before();
    let_next_launch_begin();
    for (int i = 0; i < early; ++i) {
      Step::fetch_rows(args, pipeline.stage(i), step, row, (begin + i) * kTileK);
    }
    for (int i = begin + early; i < end; ++i) {
      const auto to = pipeline.next();
      Step::fetch_weights(args, to, unit, i * kTileK);
      Step::fetch_rows(args, to, step, row, i * kTileK);
    }
  }

  // The cell, for this block's share of the tile's rows.
  __device__ static __forceinline__ void finish(const Sums& sums, const Arguments& args, int step, int row,
                                                int unit, int part, int parts) {
    constexpr int kPerRow = Step::kUnits / 4;
    const int rows = Step::kRows / parts, batch = args.s.steps.batch, hidden = args.s.hidden;
    for (int i = threadIdx.x; i < rows * kPerRow; i += kThreads) {
      const int r = rows * part + i / kPerRow, u = i % kPerRow * 4;
      if (row + r >= batch || unit + u >= hidden) continue;
      Step::finish(args, step, row + r, unit + u,
                   [&](int gate) { return sums.sum(r, gate * Step::kUnits + u, parts); });
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kResident)
    recurrence_product_step_kernel(const __grid_constant__ typename Kernel::Arguments args, int step) {
  LLTM_HOPPER(Kernel::run(args, step));
}

// Steps first, first + by, ... up to last.
template <class Step>
cudaError_t launch_steps(const typename Step::Arguments& args, int first, int last, int by, int parts,
                         cudaStream_t stream) {
  using Kernel = StepKernel<Step>;
  const auto kernel = recurrence_product_step_kernel<Kernel>;
  cudaError_t error = allow_shared(kernel, Kernel::kShared);
  const int columns = tiles_of(args.s.hidden, Step::kUnits), rows = tiles_of(args.s.steps.batch, Step::kRows);
  for (int step = first; error == cudaSuccess; step += by) {
    error = launch_clusters(kernel, dim3(columns, rows, parts), dim3(1, 1, parts), Kernel::kThreads,
                            Kernel::kShared, /*early=*/step != first, stream, args, step);
    if (step == last) break;
  }
  return error;
}

}  // namespace step_hopper

template <class Step, class Cell, typename T>
cudaError_t run_forward(const ForwardSequence<T>& s, int parts, cudaStream_t stream) {
  using namespace step_hopper;
  typename Step::Arguments args = {s, {}, {}, {}};
  const int64_t hidden = s.hidden, batch = s.steps.batch;
  cudaError_t error = describe<T>(args.h0, {s.h0, hidden, batch, 1, hidden, 0}, Step::kRows);
  if (error == cudaSuccess) {
    error = describe<T>(args.output, {s.output, hidden, batch, s.steps.length, hidden, batch * hidden},
                        Step::kRows);
  }
  if (error == cudaSuccess) {
    error = describe<T>(args.weight, {s.weight, hidden, hidden, Cell::kGates, hidden, hidden * hidden},
                        Step::kUnits);
  }
  if (error != cudaSuccess) return error;
  return launch_steps<Step>(args, 0, s.steps.length - 1, 1, parts, stream);
}
template <class Step, class Cell, typename T>
cudaError_t run_backward(const BackwardSequence<T>& s, int parts, cudaStream_t stream) {
  using namespace step_hopper;
  typename Step::Arguments args = {s, {}, {}};
  const int64_t width = Cell::kGates * s.hidden, batch = s.steps.batch;
  cudaError_t error = describe<T>(
      args.grad_gates, {s.grad_gates, width, batch, s.end - s.begin, width, batch * width}, Step::kRows);
  if (error == cudaSuccess) {
    error = describe<T>(args.weight_t, {s.weight_t, width, s.hidden, 1, width, 0}, Step::kUnits);
  }
  if (error != cudaSuccess) return error;
  return launch_steps<Step>(args, s.end - 1, s.begin - 1, -1, parts, stream);
}

template <class Cell, typename T>
cudaError_t recurrence_steps_forward(const ForwardSequence<T>& s, int parts, cudaStream_t stream) {
  using namespace step_hopper;
  static const bool deep = getenv("LLTM_DEEP");
  if (const char* p = getenv("LLTM_PARTS_F")) parts = atoi(p);
  return deep ? run_forward<ForwardStep<Cell, T, 6>, Cell, T>(s, parts, stream) : run_forward<ForwardStep<Cell, T, 3>, Cell, T>(s, parts, stream);
}

template <class Cell, typename T>
cudaError_t recurrence_steps_backward(const BackwardSequence<T>& s, int parts, cudaStream_t stream) {
  using namespace step_hopper;
  static const bool deep = getenv("LLTM_DEEP");
  if (const char* p = getenv("LLTM_PARTS_B")) parts = atoi(p);
  return deep ? run_backward<BackwardStep<Cell, T, 12>, Cell, T>(s, parts, stream) : run_backward<BackwardStep<Cell, T, 6>, Cell, T>(s, parts, stream);
}

}  // namespace lltm_ext

#define INSTANTIATE_RECURRENCE_STEPS(Cell, T)                                                      \
  template cudaError_t lltm_ext::recurrence_steps_forward<Cell, T>(const ForwardSequence<T>&, int, \
                                                                   cudaStream_t);                  \
  template cudaError_t lltm_ext::recurrence_steps_backward<Cell, T>(const BackwardSequence<T>&, int, \
                                                                    cudaStream_t);
