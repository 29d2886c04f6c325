// One step of a cell, pointwise: what follows the gates' matrix products, for every unit of every row. It
// serves the steps of a sequence that no fused kernel runs, and ops of a single step. Functions with a stream
// as last argument run on CUDA, the others on the CPU.
//
// Shapes are those of cell.h, with B rows of the batch in the step. T is the type of activations, C that of
// the states: T or acc_t<T>.
#pragma once

#include "recurrence/cell.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

// A value for each gate of every unit.
template <typename T>
struct Gates {
  T* data;
  int64_t row, gate;  // strides

  // Gates that are [B, G, H] or [G, B, H] in memory.
  LLTM_HOST_DEVICE static Gates row_major(T* data, int64_t gates, int64_t hidden) {
    return {data, gates * hidden, hidden};
  }
  static Gates gate_major(T* data, int64_t batch, int64_t hidden) { return {data, hidden, batch * hidden}; }

  LLTM_HOST_DEVICE T& at(int64_t b, int g, int64_t j) const { return data[b * row + g * gate + j]; }
};

// A gradient [B, H] from autograd, of any strides: that of a sum is one expanded number.
template <typename T>
struct StridedGradient {
  const T* data;  // null means zeros
  int64_t row, unit;

  LLTM_HOST_DEVICE acc_t<T> at(int64_t b, int64_t j, int64_t offset = 0) const {
    return data ? widen(data[b * row + j * unit + offset]) : acc_t<T>(0);
  }
};

template <typename T, typename C = acc_t<T>>
struct StepForwardArguments {
  int64_t batch, hidden;
  Gates<const T> gates;     // [B, G, H] pre-activations, or the input's part of them (projection_of)
  const acc_t<T>* product;  // [B, G, H] the other part, h times the recurrent weight, or null
  const T* parameters;      // [P, H]
  const T* step_inputs;     // [B, K, H]
  Resets<acc_t<T>> resets;  // [B] before this step or, with resets to the initial h and states, the next one
  int64_t next_batch;       // rows of the next step, in that case
  const T* h0;              // [B, H], in that case
  const C* states0;         // S times [B, H], in that case, each state_stride after the one before
  const C* old_states;      // S times [B, H], each state_stride after the one before
  C* new_states;            // likewise; may be old_states
  int64_t state_stride;
  const T* old_h;   // [B, H] the previous h, if the cell reads it
  T* h;             // [B, H] the new h; may be old_h
  T* output;        // [B, H] a second copy of it, or null
  T* output_apart;  // [B, O, H] the step's outputs, if they are not that
  Gates<T> saved;   // [B, G, H] the first G saved values; may be `gates`, or null
  T* extra;         // [B, E, H] the other saved values, or null
  // Of a cell with further products (CellShape::products): those of the step's stages before this one
  // [B, products, H], and what the products of this stage take [B, fed, H].
  const acc_t<T>* products;
  T* fed;
};

// Extra is the type of the saved values after the first G.
template <typename T, typename C = acc_t<T>, typename Extra = T>
struct StepBackwardArguments {
  int64_t batch, hidden;
  Gates<const T> saved;                // [B, G, H]
  const Extra* extra;                  // [B, E, H]
  const T* parameters;                 // [P, H]
  const T* step_inputs;                // [B, K, H]
  Resets<acc_t<T>> resets;             // [B] before this step; grad_h is already scaled by the later step's
  acc_t<T>* grad_initial;              // 1 + S times [B, H], each state_stride after the one before, += the
                                       // gradients of h0 and states0 through resets to them; or null
  StridedGradient<T> grad_output;      // [B, O * H] gradients of the outputs, from outside
  const T* grad_h;                     // [B, H] gradient of h from the next step's products, or null
  acc_t<T>* grad_own_h;                // [B, H] that from its cell; replaced by this step's; or null
  StridedGradient<C> grad_new_states;  // S times [B, H]
  C* grad_old_states;                  // likewise, or null; may be grad_new_states.data
  int64_t state_stride;
  Gates<T> grad_gates;        // [B, G, H] of products, if the cell sees these and projections apart
  Gates<T> grad_projections;  // [B, G, H] of projections, for such a cell
  acc_t<T>* grad_sums;  // [B, G + P, H] to which gradients of projections and parameters are added; or null
  T* grad_bias;         // [G, H] the sums of grad_gates over the batch, or null; CUDA only
  // What a cell without a product reads again (CellInputs): projections [B, G, H], and the previous h, which
  // the first rows [old_rows, H] have from the step before, and the others from h0 [B, H], or null for zeros.
  Gates<const T> gates;
  const T* old_h;
  int64_t old_rows;
  const T* h0;
  // Of a cell with further products: the gradients of what they take, so far [B, products, H]; the gradients
  // of the products of this stage [B, products, H]; after all stages, what the products took [B, fed, H].
  const acc_t<T>* products;
  T* grad_products;
  T* fed;
};

template <class Cell, typename T, typename C>
void recurrence_step(const StepForwardArguments<T, C>& step);
template <class Cell, typename T, typename C, typename Extra>
void recurrence_step(const StepBackwardArguments<T, C, Extra>& step);

// Row b of y [B, H] becomes what row b of x keeps; y may be x.
template <typename T>
struct MaskRowsArguments {
  int64_t batch, hidden;
  const T* x;
  Resets<acc_t<T>> resets;  // [B]
  T* y;
  acc_t<T>* lost;  // [B, H] += what row b of x loses; or null
};
template <typename T>
void mask_rows(const MaskRowsArguments<T>& s) {
  for (int64_t b = 0; b < s.batch; ++b) {
    const acc_t<T> share = s.resets.share(b);
    for (int64_t i = b * s.hidden; i < (b + 1) * s.hidden; ++i) {
      const acc_t<T> x = widen(s.x[i]);
      if (s.lost) s.lost[i] += scale_by_mask(share, x);
      s.y[i] = narrow<T>(scale_by_mask(mask_of(share), x));
    }
  }
}

// y [columns] becomes the sum of the rows of x [rows, columns], in a fixed order. CUDA only.
template <typename T>
struct SumRowsArguments {
  int64_t rows, columns;
  int64_t stride;  // from a row of x to the next
  const acc_t<T>* x;
  T* y;
};

#ifdef LLTM_EXT_WITH_CUDA
template <typename T>
cudaError_t mask_rows(const MaskRowsArguments<T>& rows, cudaStream_t stream);
template <typename T>
cudaError_t sum_rows(const SumRowsArguments<T>& rows, cudaStream_t stream);
template <class Cell, typename T, typename C>
cudaError_t recurrence_step(const StepForwardArguments<T, C>& step, cudaStream_t stream);
template <class Cell, typename T, typename C, typename Extra>
cudaError_t recurrence_step(const StepBackwardArguments<T, C, Extra>& step, cudaStream_t stream);
#endif

// The parameters and the step inputs of unit j of row b.
template <class Cell, class Step, typename A>
LLTM_HOST_DEVICE void load_step_constants(const Step& s, int64_t b, int64_t j, CellInputs<Cell, A>& in) {
  for (int p = 0; p < Cell::kParameters; ++p) in.parameters[p] = widen(s.parameters[p * s.hidden + j]);
  for (int k = 0; k < Cell::kStepInputs; ++k) {
    in.steps[k] = widen(s.step_inputs[(b * Cell::kStepInputs + k) * s.hidden + j]);
  }
}

// A block of the pointwise kernels has a few units of a few rows, or of all rows if it sums over them.
constexpr int kPointwiseThreads = 256, kPointwiseUnits = 32,
              kPointwiseRows = kPointwiseThreads / kPointwiseUnits;
LLTM_HOST_DEVICE unsigned pointwise_columns(int64_t hidden) {
  return static_cast<unsigned>((hidden + kPointwiseUnits - 1) / kPointwiseUnits);
}
LLTM_HOST_DEVICE unsigned pointwise_blocks(int64_t batch, int64_t hidden) {
  return pointwise_columns(hidden) * static_cast<unsigned>((batch + kPointwiseRows - 1) / kPointwiseRows);
}

// What row b keeps of h and its states before the step.
template <class Cell, typename T, typename C>
LLTM_HOST_DEVICE acc_t<T> mask_before(const StepForwardArguments<T, C>& s, int64_t b) {
  return kResetsToInitial<Cell> ? acc_t<T>(1) : s.resets.mask(b);
}

// Resets a unit of row b to its initial h and states, for the next step.
template <class Cell, typename T, typename C>
LLTM_HOST_DEVICE void reset_unit(const StepForwardArguments<T, C>& s, int64_t b, int64_t at, acc_t<T>& h,
                                 acc_t<T> (&states)[at_least_one(Cell::kStates)]) {
  const acc_t<T> share = s.resets.share(b);
  if (share == 0) return;
  h = reset_to(share, h, acc_t<T>(widen(s.h0[at])));
  for (int i = 0; i < Cell::kStates; ++i) {
    states[i] = reset_to(share, states[i], acc_t<T>(widen(s.states0[i * s.state_stride + at])));
  }
}

// What unit j of row b keeps between steps, less what a reset takes of it.
template <class Cell, typename T, typename C>
LLTM_HOST_DEVICE void load_old(const StepForwardArguments<T, C>& s, int64_t b, int64_t j,
                               CellInputs<Cell, acc_t<T>>& in,
                               acc_t<T> (&states)[at_least_one(Cell::kStates)]) {
  const int64_t at = b * s.hidden + j;
  const acc_t<T> mask = mask_before<Cell>(s, b);
  load_step_constants<Cell>(s, b, j, in);
  if constexpr (Cell::kReadsH) in.h = scale_by_mask(mask, widen(s.old_h[at]));
  for (int i = 0; i < Cell::kStates; ++i) {
    states[i] = scale_by_mask(mask, acc_t<T>(widen(s.old_states[i * s.state_stride + at])));
  }
}

// Unit j of row b forward, given its projections and products.
template <class Cell, class Math, typename T, typename C>
LLTM_HOST_DEVICE void step_unit(const StepForwardArguments<T, C>& s, int64_t b, int64_t j,
                                CellInputs<Cell, acc_t<T>>& in) {
  constexpr int kGates = kCellShape<Cell>.saved_in_gates(), kExtra = kCellShape<Cell>.extra();
  const int64_t at = b * s.hidden + j;
  acc_t<T> saved[at_least_one(Cell::kSaved)], states[at_least_one(Cell::kStates)];
  load_old(s, b, j, in, states);
  acc_t<T> h = Cell::template forward<Math>(in, states, saved);
  for (int i = 0; i < kOutputsOf<Cell> && kCellShape<Cell>.has_output_apart(); ++i) {
    s.output_apart[at + (b * (kOutputsOf<Cell> - 1) + i) * s.hidden] =
        narrow<T>(output_of<Cell>(h, states, i));
  }
  if (s.output && !Cell::kRecurrent) s.output[at] = narrow<T>(h);
  if constexpr (kResetsToInitial<Cell>) {
    if (b < s.next_batch) reset_unit<Cell>(s, b, at, h, states);
  }
  for (int i = 0; i < Cell::kStates; ++i) s.new_states[i * s.state_stride + at] = narrow<C>(states[i]);
  s.h[at] = narrow<T>(h);
  if (s.output && Cell::kRecurrent) s.output[at] = narrow<T>(h);
  if (kGates > 0 && !s.saved.data) return;  // nothing is saved
  for (int g = 0; g < kGates; ++g) s.saved.at(b, g, j) = narrow<T>(saved[g]);
  if (!s.extra) return;
  for (int e = 0; e < kExtra; ++e) s.extra[(b * kExtra + e) * s.hidden + j] = narrow<T>(saved[kGates + e]);
}

// The projection of a gate.
template <class Cell, typename T>
LLTM_HOST_DEVICE acc_t<T> projection_of(const Gates<const T>& gates, int64_t b, int g, int64_t j) {
  using X = const projection_t<Cell, T>;
  return widen(Gates<X>{reinterpret_cast<X*>(gates.data), gates.row, gates.gate}.at(b, g, j));
}

// Reads the projections of unit j of row b from memory, given its products.
template <class Cell, typename T, typename C>
LLTM_HOST_DEVICE void load_gates(const StepForwardArguments<T, C>& s, int64_t b, int64_t j,
                                 const acc_t<T> (&products)[at_least_one(Cell::kGates)],
                                 CellInputs<Cell, acc_t<T>>& in) {
  const acc_t<T> mask = mask_before<Cell>(s, b);
  for (int g = 0; g < Cell::kGates; ++g) {
    const acc_t<T> product = scale_by_mask(mask, products[g]);
    in.x[g] = projection_of<Cell>(s.gates, b, g, j);
    if constexpr (Cell::kSeparate) {
      in.r[g] = product;
    } else {
      in.x[g] += product;
    }
  }
}

// Reads the products too.
template <class Cell, typename T, typename C>
LLTM_HOST_DEVICE void load_gates(const StepForwardArguments<T, C>& s, int64_t b, int64_t j,
                                 CellInputs<Cell, acc_t<T>>& in) {
  acc_t<T> products[at_least_one(Cell::kGates)];
  for (int g = 0; g < Cell::kGates; ++g) {
    products[g] = s.product ? s.product[(b * Cell::kGates + g) * s.hidden + j] : acc_t<T>(0);
  }
  load_gates<Cell>(s, b, j, products, in);
  for (int i = 0; i < kProductsOf<Cell>; ++i) {
    in.products[i] = s.products[(b * kProductsOf<Cell> + i) * s.hidden + j];
  }
}

// What products take of unit j of row b, in a stage of the step that ends in them.
template <class Cell, class Math, int kStage, typename T, typename C>
LLTM_HOST_DEVICE void feed_unit(const StepForwardArguments<T, C>& s, int64_t b, int64_t j,
                                CellInputs<Cell, acc_t<T>>& in) {
  acc_t<T> states[at_least_one(Cell::kStates)], fed[at_least_one(kFedOf<Cell>)];
  load_gates<Cell>(s, b, j, in);
  load_old(s, b, j, in, states);
  Cell::template feed<kStage, Math>(in, states, fed);
  for (int i = 0; i < kFedOf<Cell>; ++i) {
    if (Cell::stage_of(i) == kStage) s.fed[(b * kFedOf<Cell> + i) * s.hidden + j] = narrow<T>(fed[i]);
  }
}

// Unit j of row b forward, given only its products.
template <class Cell, class Math, typename T, typename C>
LLTM_HOST_DEVICE void step_unit(const StepForwardArguments<T, C>& s, int64_t b, int64_t j,
                                const acc_t<T> (&products)[at_least_one(Cell::kGates)]) {
  CellInputs<Cell, acc_t<T>> in;
  load_gates<Cell>(s, b, j, products, in);
  step_unit<Cell, Math>(s, b, j, in);
}

// Unit j of row b forward.
template <class Cell, class Math, typename T, typename C>
LLTM_HOST_DEVICE void step_unit(const StepForwardArguments<T, C>& s, int64_t b, int64_t j) {
  CellInputs<Cell, acc_t<T>> in;
  load_gates<Cell>(s, b, j, in);
  step_unit<Cell, Math>(s, b, j, in);
}

// What the backward of a cell without a product reads again.
template <class Cell, class Step, typename A>
LLTM_HOST_DEVICE void load_step_inputs(const Step& s, int64_t b, int64_t j, CellInputs<Cell, A>& in) {
  for (int g = 0; g < Cell::kGates; ++g) {
    if (Cell::backward_reads(g)) in.x[g] = projection_of<Cell>(s.gates, b, g, j);
  }
  if constexpr (Cell::kBackwardReadsH) {
    const int64_t at = b * s.hidden + j;
    const A initial = s.h0 ? A(widen(s.h0[at])) : A(0), h = b < s.old_rows ? A(widen(s.old_h[at])) : initial;
    in.h = reset_to(s.resets.share(b), h, kResetsToInitial<Cell> ? initial : A(0));
  }
}

// What the backward of unit j of row b reads, given the gradient of its h from the next step's products.
template <class Cell, typename T, typename C, typename Extra>
LLTM_HOST_DEVICE void load_for_backward(const StepBackwardArguments<T, C, Extra>& s, int64_t b, int64_t j,
                                        CellInputs<Cell, acc_t<T>>& in,
                                        acc_t<T> (&saved)[at_least_one(Cell::kSaved)], acc_t<T>& grad_h,
                                        acc_t<T> (&grad_states)[at_least_one(Cell::kStates)]) {
  constexpr int kGates = kCellShape<Cell>.saved_in_gates(), kExtra = kCellShape<Cell>.extra();
  load_step_constants<Cell>(s, b, j, in);
  if constexpr (!Cell::kRecurrent) load_step_inputs<Cell>(s, b, j, in);
  for (int i = 0; i < Cell::kStates; ++i) grad_states[i] = s.grad_new_states.at(b, j, i * s.state_stride);
  for (int i = 0; i < kOutputsOf<Cell>; ++i) {
    gradient_of_output<Cell>(grad_h, grad_states, i) += s.grad_output.at(b, i * s.hidden + j);
  }
  for (int g = 0; g < kGates; ++g) saved[g] = widen(s.saved.at(b, g, j));
  for (int e = 0; e < kExtra; ++e) saved[kGates + e] = widen(s.extra[(b * kExtra + e) * s.hidden + j]);
  if constexpr (Cell::kReadsH) grad_h += s.grad_own_h[b * s.hidden + j];
  for (int i = 0; i < kProductsOf<Cell>; ++i) {
    in.products[i] = s.products[(b * kProductsOf<Cell> + i) * s.hidden + j];
  }
}

// The gradients of the products of unit j of row b that a stage of the backward finds.
template <class Cell, class Math, int kStage, typename T, typename C, typename Extra>
LLTM_HOST_DEVICE void feed_unit(const StepBackwardArguments<T, C, Extra>& s, int64_t b, int64_t j,
                                CellInputs<Cell, acc_t<T>>& in) {
  constexpr int kProducts = kProductsOf<Cell>;
  acc_t<T> saved[at_least_one(Cell::kSaved)], grad_states[at_least_one(Cell::kStates)], grads[kProducts];
  acc_t<T> grad_h = s.grad_h ? widen(s.grad_h[b * s.hidden + j]) : acc_t<T>(0);
  load_for_backward(s, b, j, in, saved, grad_h, grad_states);
  Cell::template feed_back<kStage, Math>(saved, in, grad_h, grad_states, grads);
  for (int i = 0; i < kProducts; ++i) {
    if (Cell::back_stage_of(i) == kStage) {
      s.grad_products[(b * kProducts + i) * s.hidden + j] = narrow<T>(grads[i]);
    }
  }
}

// Unit j of row b backward, given the gradient of its h from the next step's products: computes the gradients
// of what its cell reads, and stores those of its states in grad_old_states, unless it is null. `in` has the
// row's units, if the cell reads them.
template <class Cell, class Math, typename T, typename C, typename Extra>
LLTM_HOST_DEVICE void step_unit(const StepBackwardArguments<T, C, Extra>& s, int64_t b, int64_t j,
                                acc_t<T> grad_h, CellGradients<Cell, acc_t<T>>& grads, C* grad_old_states,
                                CellInputs<Cell, acc_t<T>> in = {}) {
  const int64_t at = b * s.hidden + j;
  acc_t<T> saved[at_least_one(Cell::kSaved)], grad_states[at_least_one(Cell::kStates)];
  load_for_backward(s, b, j, in, saved, grad_h, grad_states);
  Cell::template backward<Math>(saved, in, grad_h, grad_states, grads);
  const acc_t<T> share = s.resets.share(b), mask = mask_of(share);
  if (kResetsToInitial<Cell> && share != 0) {
    if constexpr (Cell::kReadsH) s.grad_initial[at] += scale_by_mask(share, grads.h);
    for (int i = 0; i < Cell::kStates; ++i) {
      s.grad_initial[(1 + i) * s.state_stride + at] += scale_by_mask(share, grad_states[i]);
    }
  }
  if constexpr (Cell::kReadsH) s.grad_own_h[at] = scale_by_mask(mask, grads.h);
  for (int i = 0; i < Cell::kStates && grad_old_states; ++i) {
    grad_old_states[i * s.state_stride + at] = narrow<C>(scale_by_mask(mask, grad_states[i]));
  }
}

// Unit j of row b backward: reads the gradient of its h from memory.
template <class Cell, class Math, typename T, typename C, typename Extra>
LLTM_HOST_DEVICE void step_unit(const StepBackwardArguments<T, C, Extra>& s, int64_t b, int64_t j,
                                CellGradients<Cell, acc_t<T>>& grads, C* grad_old_states) {
  const acc_t<T> grad_h = s.grad_h ? widen(s.grad_h[b * s.hidden + j]) : acc_t<T>(0);
  step_unit<Cell, Math>(s, b, j, grad_h, grads, grad_old_states);
}

// Stores the gradients of unit j of row b, and adds those that are summed over rows.
template <class Cell, typename T, typename C, typename Extra>
LLTM_HOST_DEVICE void store_gradients(const StepBackwardArguments<T, C, Extra>& s, int64_t b, int64_t j,
                                      const CellGradients<Cell, acc_t<T>>& grads) {
  constexpr int kGates = Cell::kGates, kSums = kCellShape<Cell>.sums();
  acc_t<T>* const to = s.grad_sums ? s.grad_sums + b * kSums * s.hidden + j : nullptr;
  acc_t<T> sums[at_least_one(kSums)] = {};  // loaded together, before the first store
  for (int i = 0; i < kSums && to; ++i) sums[i] = to[i * s.hidden];
  for (int g = 0; g < kGates; ++g) {
    s.grad_gates.at(b, g, j) = narrow<T>(grads.product(g));
    if constexpr (Cell::kSeparate) s.grad_projections.at(b, g, j) = narrow<T>(grads.x[g]);
  }
  for (int i = 0; i < kFedOf<Cell>; ++i) {
    s.fed[(b * kFedOf<Cell> + i) * s.hidden + j] = narrow<T>(grads.fed[i]);
  }
  if (!to) return;
  for (int g = 0; g < kGates; ++g) to[g * s.hidden] = sums[g] + grads.x[g];
  for (int p = 0; p < Cell::kParameters; ++p)
    to[(kGates + p) * s.hidden] = sums[kGates + p] + grads.parameters[p];
}

}  // namespace lltm_ext
