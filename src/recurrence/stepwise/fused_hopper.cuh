// A step of a sequence in one kernel, for half types on Hopper: the product of h and the recurrent weight by
// TMA and wgmma, with the cell as its epilogue. One launch a step; each prepares while the one before it
// finishes (programmatic dependent launch).
//
// A block has a tile of [rows of the batch, units] and all gates of its units, so the epilogue has what the
// cell needs. If there are few tiles, K is split over a cluster. Two blocks of 64 rows fit a multiprocessor:
// the next step's block waits there with its weights loaded. A block of 128 rows uses a whole multiprocessor,
// with more stages: with a long K, L2 bandwidth is the limit, and large tiles read least.
#pragma once

#include "common/fast_math.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/split.cuh"
#include "recurrence/cell.h"
#include "recurrence/stepwise/fused_arguments.h"
#include "recurrence/stepwise/fused_shape.h"

#ifndef __CUDACC_RTC__
#include "recurrence/persistent/launch.h"
#include "recurrence/stepwise/fused_launch.h"
#endif

namespace lltm_ext {
namespace hopper {

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T data[4];
};
template <typename T>
__device__ __forceinline__ Four<T> load(const T* from) {
  return *reinterpret_cast<const Four<T>*>(from);
}
template <typename T>
__device__ __forceinline__ void store(T* to, const float (&x)[4]) {
  Four<T> rounded;
#pragma unroll
  for (int e = 0; e < 4; ++e) rounded.data[e] = narrow<T>(x[e]);
  *reinterpret_cast<Four<T>*>(to) = rounded;
}

// Where a state is in [S, B, H].
template <class Sequence>
__device__ __forceinline__ int64_t state_at(const Sequence& s, int state, int64_t at) {
  return static_cast<int64_t>(state) * s.steps.batch * s.hidden + at;
}

// The parameters and the step inputs of four units of a row.
template <class Cell, typename T>
struct StepConstants {
  Four<T> parameters[at_least_one(Cell::kParameters)], steps[at_least_one(Cell::kStepInputs)];

  template <class Sequence>
  __device__ __forceinline__ void load_from(const Sequence& s, int64_t row, int unit) {
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p) parameters[p] = load(s.parameters + p * s.hidden + unit);
#pragma unroll
    for (int k = 0; k < Cell::kStepInputs; ++k) {
      steps[k] = load(s.step_inputs + (row * Cell::kStepInputs + k) * s.hidden + unit);
    }
  }
  __device__ __forceinline__ void widen_into(CellInputs<Cell, float>& in, int e) const {
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p) in.parameters[p] = widen(parameters[p].data[e]);
#pragma unroll
    for (int k = 0; k < Cell::kStepInputs; ++k) in.steps[k] = widen(steps[k].data[e]);
  }
};

// h @ weight^T and the cell forward. The product's columns are the tile's units of the first gate, then those
// of the next.
template <class Cell, typename T_, int kRows, bool kHasResets = false>
struct FusedForwardStep {
  using T = T_;
  static constexpr int kGates = Cell::kGates, kExtra = kCellShape<Cell>.extra(), kStates = Cell::kStates,
                       kSavedInGates = kCellShape<Cell>.saved_in_gates(), kOutputs = kOutputsOf<Cell>;
  static constexpr FusedStepShape kShape = {kGates, kRows, /*backward=*/false};
  static constexpr int kUnits = kShape.units();
  using Mainloop = hopper::Mainloop<T, kRows, kShape.columns(), kShape.stages(), false, false>;
  using Stage = typename Pipeline<Mainloop>::Stage;
  using Arguments = FusedForwardArguments<T>;

  __device__ static __forceinline__ void prefetch_maps(const Arguments& args) {
    prefetch_tensor_map(&args.weight);
    prefetch_tensor_map(&args.output);
  }

  // What the cell needs, besides the products, of four units of a row.
  struct Inputs {
    Four<projection_t<Cell, T>> gates[kGates];
    Four<T> h;
    Four<float> states[at_least_one(kStates)];
    StepConstants<Cell, T> constants;
    float lost;  // the share that the row loses before this step or, if kToInitial, before the next one

    __device__ __forceinline__ void load_from(const Arguments& args, int step, int row, int unit) {
      const SequenceForwardArguments<T>& s = args.s;
      const int64_t at = s.steps.at(step).first + row;
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        gates[g] = load(s.template projections<Cell>() + (at * kGates + g) * s.hidden + unit);
      }
      const int64_t state = static_cast<int64_t>(row) * s.hidden + unit;
#pragma unroll
      for (int i = 0; i < kStates; ++i) {
        const void* const states_before = step == 0 ? s.states0 : s.states_n;
        states[i] = load(static_cast<const float*>(states_before) + state_at(s, i, state));
      }
      if constexpr (Cell::kReadsH) {
        h = load(step == 0 ? s.h0 + state : s.output + s.steps.at(step - 1).first * s.hidden + state);
      }
      constants.load_from(s, at, unit);
      if constexpr (kToInitial) {
        lost = step + 1 < s.steps.length ? s.resets().share(s.steps.at(step + 1).first + row) : 0;
      } else if constexpr (kHasResets) {
        lost = s.resets().share(at);
      }
    }
  };

  __device__ static __forceinline__ int tiles_of_k(const Arguments& args, int) {
    return (args.s.hidden + kTileK - 1) / kTileK;
  }
  __device__ static __forceinline__ void load_weights(const Arguments& args, const Stage& to, int unit,
                                                      int k) {
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      tma_load(to.b + g * kUnits * kSwizzleBytes, &args.weight, k, unit, g, to.full);
    }
  }
  __device__ static __forceinline__ void load_rows(const Arguments& args, const Stage& to, int step, int row,
                                                   int k) {
    const StepOrder& steps = args.s.steps;
    if (step == 0) {
      tma_load(to.a, &args.h0, k, row, 0, to.full);
    } else {
      tma_load(to.a, &args.output, k, row, steps.reverse ? steps.length - step : step - 1, to.full);
    }
  }

  static constexpr int kProducts = kGates;  // products of a unit
  __device__ static __forceinline__ void epilogue(const Arguments& args, int step, int row, int unit,
                                                  const Inputs& inputs, const float (&products)[kGates][4]) {
    const SequenceForwardArguments<T>& s = args.s;
    const int64_t at = s.steps.at(step).first + row, state = static_cast<int64_t>(row) * s.hidden + unit;
    constexpr bool kMasks = kHasResets && !kToInitial;
    const float mask = kMasks ? mask_of(inputs.lost) : 1;
    float states[at_least_one(kStates)][4], h[4], saved[at_least_one(Cell::kSaved)][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      CellInputs<Cell, float> in;
      float mine[at_least_one(kStates)], kept[at_least_one(Cell::kSaved)];
      inputs.constants.widen_into(in, e);
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        const float product = kMasks ? scale_by_mask(mask, products[g][e]) : products[g][e];
        in.x[g] = widen(inputs.gates[g].data[e]);
        if constexpr (Cell::kSeparate) {
          in.r[g] = product;
        } else {
          in.x[g] += product;
        }
      }
      if constexpr (Cell::kReadsH) {
        in.h = widen(inputs.h.data[e]);
        if constexpr (kMasks) in.h = scale_by_mask(mask, in.h);
      }
#pragma unroll
      for (int i = 0; i < kStates; ++i) {
        mine[i] = inputs.states[i].data[e];
        if constexpr (kMasks) mine[i] = scale_by_mask(mask, mine[i]);
      }
      h[e] = Cell::template forward<typename MathOf<T>::type>(in, mine, kept);
#pragma unroll
      for (int i = 0; i < kStates; ++i) states[i][e] = mine[i];
#pragma unroll
      for (int i = 0; i < Cell::kSaved; ++i) saved[i][e] = kept[i];
    }
    if constexpr (kCellShape<Cell>.has_output_apart()) {
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        store(s.output_apart + (at * kOutputs + o) * s.hidden + unit, output_of<Cell>(h, states, o));
      }
    }
    if (kToInitial && inputs.lost != 0) reset(s, state, inputs.lost, h, states);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      store(static_cast<float*>(s.states_n) + state_at(s, i, state), states[i]);
    }
    store(s.output + at * s.hidden + unit, h);
    if (step == s.steps.length - 1) store(s.h_n + state, h);
    if (!s.save) return;
#pragma unroll
    for (int g = 0; g < kSavedInGates; ++g) store(s.gates + (at * kGates + g) * s.hidden + unit, saved[g]);
#pragma unroll
    for (int e = 0; e < kExtra; ++e) {
      store(s.extra + (at * kExtra + e) * s.hidden + unit, saved[kSavedInGates + e]);
    }
  }

 private:
  static constexpr bool kToInitial = kHasResets && kResetsToInitial<Cell>;

  // Resets four units to their initial h and states, for the next step.
  __device__ static __forceinline__ void reset(const SequenceForwardArguments<T>& s, int64_t at, float share,
                                               float (&h)[4], float (&states)[at_least_one(kStates)][4]) {
    const Four<T> h0 = load(s.h0 + at);
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = reset_to(share, h[e], widen(h0.data[e]));
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      const Four<float> state0 = load(static_cast<const float*>(s.states0) + state_at(s, i, at));
#pragma unroll
      for (int e = 0; e < 4; ++e) states[i][e] = reset_to(share, states[i][e], state0.data[e]);
    }
  }
};

// grad_gates of the later step @ weight, which is this step's gradient of h, then the cell backward. The last
// step reads that gradient from memory, and one more launch after the first step stores it.
template <class Cell, typename T_, int kRows, bool kHasResets = false>
struct FusedBackwardStep {
  using T = T_;
  static constexpr int kGates = Cell::kGates, kExtra = kCellShape<Cell>.extra(), kStates = Cell::kStates,
                       kSavedInGates = kCellShape<Cell>.saved_in_gates(), kOutputs = kOutputsOf<Cell>;
  static constexpr FusedStepShape kShape = {kGates, kRows, /*backward=*/true};
  static constexpr int kUnits = kShape.units();
  using Mainloop = hopper::Mainloop<T, kRows, kShape.columns(), kShape.stages(), false, false>;
  using Stage = typename Pipeline<Mainloop>::Stage;
  using Arguments = FusedBackwardArguments<T>;

  __device__ static __forceinline__ void prefetch_maps(const Arguments& args) {
    prefetch_tensor_map(&args.weight_t);
    prefetch_tensor_map(&args.grad_gates);
  }

  struct Inputs {
    Four<T> saved[at_least_one(Cell::kSaved)], grad_output[kOutputs], grad_h;
    Four<float> grad_states[at_least_one(kStates)], grad_own_h;
    StepConstants<Cell, T> constants;
    float lost, later_lost;  // the shares that the row lost before this step, and the one computed before it

    __device__ __forceinline__ void load_from(const Arguments& args, int step, int row, int unit) {
      const SequenceBackwardArguments<T>& s = args.s;
      const int64_t state = static_cast<int64_t>(row) * s.hidden + unit;
      if (step == s.end - 1) grad_h = load(s.grad_h + state);
      if (kHasResets && step < s.end - 1) later_lost = s.resets().share(s.steps.at(step + 1).first + row);
      if (step < s.begin) return;
      const int64_t at = s.steps.at(step).first + row;
#pragma unroll
      for (int g = 0; g < kSavedInGates; ++g) saved[g] = load(s.gates + (at * kGates + g) * s.hidden + unit);
#pragma unroll
      for (int e = 0; e < kExtra; ++e) {
        saved[kSavedInGates + e] = load(s.extra + (at * kExtra + e) * s.hidden + unit);
      }
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        if (s.grad_output) grad_output[o] = load(s.grad_output + (at * kOutputs + o) * s.hidden + unit);
      }
#pragma unroll
      for (int i = 0; i < kStates; ++i) grad_states[i] = load(s.grad_states + state_at(s, i, state));
      if constexpr (Cell::kReadsH) grad_own_h = load(s.grad_own_h + state);
      constants.load_from(s, at, unit);
      if constexpr (kHasResets) lost = s.resets().share(at);
    }
  };

  __device__ static __forceinline__ int tiles_of_k(const Arguments& args, int step) {
    return step == args.s.end - 1 ? 0 : (kGates * args.s.hidden + kTileK - 1) / kTileK;
  }
  __device__ static __forceinline__ void load_weights(const Arguments& args, const Stage& to, int unit,
                                                      int k) {
    tma_load(to.b, &args.weight_t, k, unit, 0, to.full);
  }
  __device__ static __forceinline__ void load_rows(const Arguments& args, const Stage& to, int step, int row,
                                                   int k) {
    const int64_t first = args.s.steps.at(step + 1).first - args.s.first_row;
    tma_load(to.a, &args.grad_gates, k, row, static_cast<int>(first / args.s.steps.batch), to.full);
  }

  static constexpr int kProducts = 1;  // products of a unit
  __device__ static __forceinline__ void epilogue(const Arguments& args, int step, int row, int unit,
                                                  const Inputs& inputs, const float (&product)[1][4]) {
    const SequenceBackwardArguments<T>& s = args.s;
    const int64_t state = static_cast<int64_t>(row) * s.hidden + unit;
    float grad_h[4], grad_states[at_least_one(kStates)][4];
    CellGradients<Cell, float> grads[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float through_weights =
          kHasResets ? scale_by_mask(mask_of(inputs.later_lost), product[0][e]) : product[0][e];
      grad_h[e] = step == s.end - 1 ? widen(inputs.grad_h.data[e]) : through_weights;
    }
    if (step < s.end - 1) collect_initial(s, 0, state, inputs.later_lost, product[0]);
    if (step < s.begin) {
      store(s.grad_h + state, grad_h);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      CellInputs<Cell, float> in;
      float saved[at_least_one(Cell::kSaved)], mine[at_least_one(kStates)];
      inputs.constants.widen_into(in, e);
#pragma unroll
      for (int i = 0; i < Cell::kSaved; ++i) saved[i] = widen(inputs.saved[i].data[e]);
#pragma unroll
      for (int i = 0; i < kStates; ++i) mine[i] = inputs.grad_states[i].data[e];
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        float& of_output = gradient_of_output<Cell>(grad_h[e], mine, o);
        if (s.grad_output) of_output += widen(inputs.grad_output[o].data[e]);
      }
      if constexpr (Cell::kReadsH) grad_h[e] += inputs.grad_own_h.data[e];
      Cell::template backward<typename MathOf<T>::type>(saved, in, grad_h[e], mine, grads[e]);
#pragma unroll
      for (int i = 0; i < kStates; ++i) grad_states[i][e] = mine[i];
    }
    if constexpr (kHasResets) reset(s, state, inputs.lost, grad_states, grads);
#pragma unroll
    for (int i = 0; i < kStates; ++i) store(s.grad_states + state_at(s, i, state), grad_states[i]);
    if constexpr (Cell::kReadsH) {
      store(s.grad_own_h + state, {grads[0].h, grads[1].h, grads[2].h, grads[3].h});
    }
    store_gradients(s, s.steps.at(step).first - s.first_row + row, row, unit, grads);
  }

 private:
  // Divides the gradients of h and the states among what the row kept and, with resets to them, the initial
  // ones.
  __device__ static __forceinline__ void reset(const SequenceBackwardArguments<T>& s, int64_t at, float share,
                                               float (&grad_states)[at_least_one(kStates)][4],
                                               CellGradients<Cell, float> (&grads)[4]) {
    const float mask = mask_of(share);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      collect_initial(s, 1 + i, at, share, grad_states[i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) grad_states[i][e] = scale_by_mask(mask, grad_states[i][e]);
    }
    if constexpr (Cell::kReadsH) {
      collect_initial(s, 0, at, share, {grads[0].h, grads[1].h, grads[2].h, grads[3].h});
#pragma unroll
      for (int e = 0; e < 4; ++e) grads[e].h = scale_by_mask(mask, grads[e].h);
    }
  }
  // Adds what the gradients of h (plane 0) or of a state (planes from 1 on) have of the initial ones.
  __device__ static __forceinline__ void collect_initial(const SequenceBackwardArguments<T>& s, int plane,
                                                         int64_t at, float share, const float (&x)[4]) {
    if constexpr (kHasResets && kResetsToInitial<Cell>) {
      if (share == 0) return;
      float* const to = s.grad_initial + state_at(s, plane, at);
      const Four<float> sums = load(to);
      store(to, {sums.data[0] + scale_by_mask(share, x[0]), sums.data[1] + scale_by_mask(share, x[1]),
                 sums.data[2] + scale_by_mask(share, x[2]), sums.data[3] + scale_by_mask(share, x[3])});
    }
  }
  // Stores the gates' gradients in row `at` of the chunk, and adds to the sums of row `row` of the batch.
  __device__ static __forceinline__ void store_gradients(const SequenceBackwardArguments<T>& s, int64_t at,
                                                         int64_t row, int unit,
                                                         const CellGradients<Cell, float> (&grads)[4]) {
    constexpr int kSums = kCellShape<Cell>.sums();
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      const int64_t to = (at * kGates + g) * s.hidden + unit;
      store(s.grad_gates + to,
            {grads[0].product(g), grads[1].product(g), grads[2].product(g), grads[3].product(g)});
      const float x[4] = {grads[0].x[g], grads[1].x[g], grads[2].x[g], grads[3].x[g]};
      if constexpr (Cell::kSeparate) store(s.grad_projections + to, x);
      if (s.grad_sums) add(s.grad_sums + (row * kSums + g) * s.hidden + unit, x);
    }
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p) {
      if (!s.grad_sums) continue;
      add(s.grad_sums + (row * kSums + kGates + p) * s.hidden + unit,
          {grads[0].parameters[p], grads[1].parameters[p], grads[2].parameters[p], grads[3].parameters[p]});
    }
  }

  // Adds by a reduction, so that no load has to be waited for. In a step every address has one writer, so the
  // order of the sums is fixed.
  __device__ static __forceinline__ void add(float* to, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
  }
};

// The kernel's body. Step is one of the above.
template <class Step>
struct FusedStepKernel {
  using Mainloop = typename Step::Mainloop;
  using Arguments = typename Step::Arguments;
  static constexpr FusedStepShape kShape = Step::kShape;
  static constexpr int kRows = kShape.rows, kConsumerThreads = kShape.consumer_threads(),
                       kThreads = kShape.threads(), kBlocks = kShape.blocks();
  using Sums = SplitKPartials<kRows, Mainloop::kTileN>;
  static_assert(kShape.exists() && kShape.shared_bytes() <= kShape.available_bytes());
  static_assert(larger(Mainloop::kBytes, Sums::kBytes) == kShape.stages_or_sums_bytes());
  static_assert(sizeof(typename Pipeline<Mainloop>::Barriers) <= kBarrierBytes);

  __device__ static void run(const Arguments& args, int step) {
    unsigned char* shared = dynamic_shared();
    Pipeline<Mainloop> pipeline(shared, *reinterpret_cast<typename Pipeline<Mainloop>::Barriers*>(
                                            shared + kShape.stages_or_sums_bytes()));
    if (threadIdx.x == 0) pipeline.init();
    if (threadIdx.x == kConsumerThreads) Step::prefetch_maps(args);
    __syncthreads();

    const int split_k = gridDim.z, part = blockIdx.z;
    const int row = blockIdx.y * kRows, unit = blockIdx.x * Step::kUnits;
    const int tiles = Step::tiles_of_k(args, step);
    const int begin = tiles * part / split_k, end = tiles * (part + 1) / split_k;
    const bool is_producer = threadIdx.x >= kConsumerThreads;
    float d[Mainloop::kTileN / 2];
    Sums sums(shared);
    Epilogue epilogue(args, step, row, unit, part, split_k);
    if (is_producer) {
      if (threadIdx.x == kConsumerThreads) produce(pipeline, args, step, row, unit, begin, end);
      __syncwarp();
    } else {
      griddepcontrol_wait();
      epilogue.load(0);  // while the product runs
      if (tiles > 0) pipeline.mma(d, end - begin, threadIdx.x / 128);
    }
    if (tiles > 0) {
      __syncthreads();  // the stages are free: the partial sums replace them
      if (!is_producer) sums.store(d, threadIdx.x / 128);
      cluster_sync();
    }
    if (!is_producer) {
      epilogue.run(sums, tiles > 0);
    } else {
      cluster_arrive();
    }
    cluster_wait();  // the other blocks have read this block's partial sums
  }

 private:
  // Weights, which no step writes, are loaded while the step before still runs.
  __device__ static __forceinline__ void produce(Pipeline<Mainloop>& pipeline, const Arguments& args,
                                                 int step, int row, int unit, int begin, int end) {
    const int early = end - begin < Mainloop::kStages ? end : begin + Mainloop::kStages;
    for (int i = begin; i < early; ++i)
      Step::load_weights(args, pipeline.producer_acquire(), unit, i * kTileK);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (int i = begin; i < early; ++i) {
      Step::load_rows(args, pipeline.stage(i - begin), step, row, i * kTileK);
    }
    for (int i = early; i < end; ++i) {
      const auto to = pipeline.producer_acquire();
      Step::load_weights(args, to, unit, i * kTileK);
      Step::load_rows(args, to, step, row, i * kTileK);
    }
  }

  // Runs the cell for this block's share of the tile's rows. A thread takes a few vectors of four units at a
  // time.
  class Epilogue {
    static constexpr int kPerRow = Step::kUnits / 4, kVectorsAtOnce = kBlocks == 1 ? 3 : 2;

   public:
    __device__ Epilogue(const Arguments& args, int step, int row, int unit, int part, int split_k)
        : args_(args),
          step_(step),
          row_(row),
          unit_(unit),
          split_k_(split_k),
          first_(kRows / split_k * part),
          vectors_(kRows / split_k * kPerRow) {}

    __device__ __forceinline__ void load(int begin) {
#pragma unroll
      for (int i = 0; i < kVectorsAtOnce; ++i) {
        const Vector v = vector(begin, i);
        if (v.valid) inputs_[i].load_from(args_, step_, row_ + v.row, unit_ + v.unit);
      }
    }
    __device__ __forceinline__ void run(const Sums& sums, bool any_products) {
      for (int begin = 0; begin < vectors_; begin += kVectorsAtOnce * kConsumerThreads) {
        if (begin > 0) load(begin);
        float products[kVectorsAtOnce][Step::kProducts][4];
#pragma unroll
        for (int i = 0; i < kVectorsAtOnce; ++i) {
          const Vector v = vector(begin, i);
#pragma unroll
          for (int g = 0; g < Step::kProducts; ++g) {
            if (!v.valid || !any_products) continue;
            const float4 sum = sums.reduce(v.row, g * Step::kUnits + v.unit, split_k_);
            products[i][g][0] = sum.x, products[i][g][1] = sum.y;
            products[i][g][2] = sum.z, products[i][g][3] = sum.w;
          }
        }
        if (begin + kVectorsAtOnce * kConsumerThreads >= vectors_)
          cluster_arrive();  // this block has read the other partial sums
#pragma unroll
        for (int i = 0; i < kVectorsAtOnce; ++i) {
          const Vector v = vector(begin, i);
          if (v.valid) Step::epilogue(args_, step_, row_ + v.row, unit_ + v.unit, inputs_[i], products[i]);
        }
      }
    }

   private:
    struct Vector {
      int row, unit;  // in the tile
      bool valid;
    };
    __device__ __forceinline__ Vector vector(int begin, int i) const {
      const int at = begin + i * kConsumerThreads + threadIdx.x;
      const int row = first_ + at / kPerRow, unit = at % kPerRow * 4;
      return {row, unit, at < vectors_ && row_ + row < args_.s.steps.batch && unit_ + unit < args_.s.hidden};
    }

    const Arguments& args_;
    const int step_, row_, unit_, split_k_, first_, vectors_;
    typename Step::Inputs inputs_[kVectorsAtOnce];
  };
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    recurrence_fused_step_kernel(const __grid_constant__ typename Kernel::Arguments args, int step) {
  LLTM_HOPPER(Kernel::run(args, step));
}

}  // namespace hopper

#ifndef __CUDACC_RTC__
template <class Step>
const void* fused_step_kernel() {
  return reinterpret_cast<const void*>(hopper::recurrence_fused_step_kernel<hopper::FusedStepKernel<Step>>);
}

// Declared in persistent/launch.h.
template <class Cell, typename T>
cudaError_t launch_fused_steps(const SequenceForwardArguments<T>& s, const FusedStepTile& tile,
                               cudaStream_t stream) {
  using hopper::FusedForwardStep;
  const void* kernel = fused_step_kernel<FusedForwardStep<Cell, T, 64>>();
  if constexpr (FusedStepShape{Cell::kGates, 128, /*backward=*/false}.exists()) {
    if (tile.rows == 128) kernel = fused_step_kernel<FusedForwardStep<Cell, T, 128>>();
  }
  return run_fused_steps(kernel, Cell::kGates, s, tile, stream);
}

template <class Cell, typename T>
cudaError_t launch_fused_steps(const SequenceBackwardArguments<T>& s, const FusedStepTile& tile,
                               cudaStream_t stream) {
  using hopper::FusedBackwardStep;
  const void* kernel = tile.rows == 128 ? fused_step_kernel<FusedBackwardStep<Cell, T, 128>>()
                                        : fused_step_kernel<FusedBackwardStep<Cell, T, 64>>();
  return run_fused_steps(kernel, Cell::kGates, s, tile, stream);
}
#endif

}  // namespace lltm_ext

#define INSTANTIATE_FUSED_STEPS(Cell, T)                                                          \
  template cudaError_t lltm_ext::launch_fused_steps<Cell, T>(const SequenceForwardArguments<T>&,  \
                                                             const FusedStepTile&, cudaStream_t); \
  template cudaError_t lltm_ext::launch_fused_steps<Cell, T>(const SequenceBackwardArguments<T>&, \
                                                             const FusedStepTile&, cudaStream_t);
