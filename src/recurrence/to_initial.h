// Turns a cell with resets to the initial states into one without resets: kernels reset to zeros only.
#pragma once

#include "recurrence/cell.h"

namespace lltm_ext {

// The cell Own, except that a step hands on what the row's next step starts from: its results or, where that
// step has a reset, the initial h and states. No step has to reset what it gets, and products see the h that
// the next step starts from.
//
// The states are Own's; then the output of the step, which no step reads; then the initial h and states,
// which do not change and collect their gradients. The step inputs are Own's and then the reset of the next
// step: 0, 1 or the share of the initial states. The saved values are Own's.
template <class Own>
struct ResetsToInitial {
  static constexpr int kGates = Own::kGates, kSaved = Own::kSaved, kParameters = Own::kParameters;
  static constexpr int kOutputState = Own::kStates, kInitialH = kOutputState + 1, kInitial = kInitialH + 1;
  static constexpr int kStates = kInitial + Own::kStates, kStepInputs = Own::kStepInputs + 1;
  static constexpr bool kRecurrent = Own::kRecurrent, kSeparate = Own::kSeparate, kReadsH = Own::kReadsH;
  static constexpr bool kWideProjections = kIsWide<Own>;

  template <typename Math, typename A>
  LLTM_HOST_DEVICE static A forward(const CellInputs<ResetsToInitial, A>& in, A (&states)[kStates],
                                    A (&saved)[at_least_one(kSaved)]) {
    CellInputs<Own, A> own;
    copy<kGates>(own.x, in.x);
    if constexpr (kSeparate) copy<kGates>(own.r, in.r);
    if constexpr (kReadsH) own.h = in.h;
    copy_constants(own, in);
    A of_own[at_least_one(Own::kStates)];
    copy<Own::kStates>(of_own, states);
    const A h = Own::template forward<Math>(own, of_own, saved);
    states[kOutputState] = Own::kOutputState < 0 ? h : of_own[larger(Own::kOutputState, 0)];
    const A reset = in.steps[Own::kStepInputs], keep = 1 - reset;
    for (int s = 0; s < Own::kStates; ++s) {
      states[s] = scale_by_mask(keep, of_own[s]) + scale_by_mask(reset, states[kInitial + s]);
    }
    return scale_by_mask(keep, h) + scale_by_mask(reset, states[kInitialH]);
  }

  template <typename Math, typename A>
  LLTM_HOST_DEVICE static void backward(const A (&saved)[at_least_one(kSaved)],
                                        const CellInputs<ResetsToInitial, A>& in, A grad_h,
                                        A (&grad_states)[kStates], CellGradients<ResetsToInitial, A>& grads) {
    CellInputs<Own, A> own;
    copy_constants(own, in);
    const A reset = in.steps[Own::kStepInputs], keep = 1 - reset;
    grad_states[kInitialH] += scale_by_mask(reset, grad_h);
    grad_h = scale_by_mask(keep, grad_h);
    A of_own[at_least_one(Own::kStates)];
    for (int s = 0; s < Own::kStates; ++s) {
      grad_states[kInitial + s] += scale_by_mask(reset, grad_states[s]);
      of_own[s] = scale_by_mask(keep, grad_states[s]);
    }
    gradient_of_output<Own>(grad_h, of_own) += grad_states[kOutputState];
    grad_states[kOutputState] = 0;
    CellGradients<Own, A> own_grads;
    Own::template backward<Math>(saved, own, grad_h, of_own, own_grads);
    copy<Own::kStates>(grad_states, of_own);
    copy<kGates>(grads.x, own_grads.x);
    if constexpr (kSeparate) copy<kGates>(grads.r, own_grads.r);
    if constexpr (kReadsH) grads.h = own_grads.h;
    copy<kParameters>(grads.parameters, own_grads.parameters);
  }

 private:
  template <int kCount, typename A, int kTo, int kFrom>
  LLTM_HOST_DEVICE static void copy(A (&to)[kTo], const A (&from)[kFrom]) {
    for (int i = 0; i < kCount; ++i) to[i] = from[i];
  }
  // Copies the inputs that backward gets too.
  template <typename A>
  LLTM_HOST_DEVICE static void copy_constants(CellInputs<Own, A>& own,
                                              const CellInputs<ResetsToInitial, A>& in) {
    copy<kParameters>(own.parameters, in.parameters);
    copy<Own::kStepInputs>(own.steps, in.steps);
  }
};

}  // namespace lltm_ext
