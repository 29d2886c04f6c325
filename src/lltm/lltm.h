// lltm, one step: the contract between the op's files. B rows (batch) and H units (hidden_size); T is the
// type of activations, C that of the cell state: T or float32.
#pragma once

#include "common/types.h"
#include "lltm/lltm_cell.h"
#include "recurrence/stepwise/step.h"

namespace lltm_ext {

// The one-step op's cell. Its saved values are an output of the op: the activated gates, and the new cell
// state instead of its tanh.
struct LltmOneStepCell : CellDefaults {
  static constexpr int kGates = LltmCell::kGates, kStates = LltmCell::kStates, kSaved = LltmCell::kSaved;

  template <typename Math, typename A>
  LLTM_HOST_DEVICE static A forward(const CellInputs<LltmOneStepCell, A>& in, A (&states)[1],
                                    A (&saved)[kSaved]) {
    const A h = LltmCell::forward<Math>({{in.x[0], in.x[1], in.x[2]}}, states, saved);
    saved[0] = unfolded(saved[0]);
    saved[1] = unfolded(saved[1]);
    saved[3] = states[0];
    return h;
  }
  template <typename Math, typename A>
  LLTM_HOST_DEVICE static void backward(const A (&saved)[kSaved], const CellInputs<LltmOneStepCell, A>&,
                                        A grad_h, A (&grad_states)[1],
                                        CellGradients<LltmOneStepCell, A>& grads) {
    const A tanh_c = Math::tanh(saved[3]);
    const A of_cell[kSaved] = {folded(saved[0]), folded(saved[1]), saved[2], Math::folded_tanh(tanh_c)};
    CellGradients<LltmCell, A> found;
    LltmCell::backward<Math>(of_cell, {}, grad_h, grad_states, found);
    for (int g = 0; g < kGates; ++g) grads.x[g] = found.x[g];
  }
};

// Up to this batch, the backward's pointwise kernel also sums the bias gradient. Larger batches use a
// separate reduction.
constexpr int64_t kMaxBatchForBias = 256;

#ifdef LLTM_EXT_WITH_CUDA
// [old_h, input], the columns that the weights multiply, in two matrices of contiguous rows. Offsets in a
// fused cell fit in 32 bits.
template <typename T>
struct CellInput {
  const T *old_h, *input;
  int old_h_row, input_row;  // strides
  int hidden, columns;       // H, H + I

  LLTM_HOST_DEVICE acc_t<T> at(int b, int k) const {
    const bool of_h = k < hidden;
    const T* from = of_h ? old_h : input;
    return widen(from[b * (of_h ? old_h_row : input_row) + (of_h ? k : k - hidden)]);
  }
};

template <typename T, typename C>
struct FusedCellForwardArguments {
  StepForwardArguments<T, C> step;  // its gates are not set
  CellInput<T> X;
  const T* weights;  // [3H, H + I]
  int weights_row;
  const T* bias;  // [3H], or null
};

template <typename T, typename C>
struct FusedCellBackwardArguments {
  StepBackwardArguments<T, C, C> step;  // its grad_gates are not set
  CellInput<T> X;
  const T* weights;  // [3H, H + I]
  int weights_row;
  T* grad_weights;             // [3H, H + I]
  T *grad_old_h, *grad_input;  // [B, H], [B, I], or null
};

// Whether one kernel, with the matrix products and the cell, is the fastest. Up to these sizes it takes an
// H200 no longer than a library's products in float32, and the host a third of their time. It has no float64.
constexpr bool fused_cell_pays(int64_t batch, int64_t hidden, int64_t columns) {
  return batch <= 64 && columns <= 512 && batch * 3 * hidden * columns <= int64_t{3} << 21;
}
template <typename T, typename C>
cudaError_t launch_fused_cell(const FusedCellForwardArguments<T, C>& args, cudaStream_t stream);
template <typename T, typename C>
cudaError_t launch_fused_cell(const FusedCellBackwardArguments<T, C>& args, cudaStream_t stream);
#endif

}  // namespace lltm_ext
