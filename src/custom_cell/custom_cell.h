// Calls of the ops of a cell, for custom_cell.cpp, which has what they compute, and custom_cell_autograd.cpp,
// their derivatives and autocast.
#pragma once

#include "custom_cell/kernels.h"
#include "recurrence/tensors/added_units.h"
#include "recurrence/tensors/ops.h"

namespace lltm_ext {

inline CellCall cell_call(const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& states,
                          const at::Tensor& weight_ih, const OptionalTensor& weight_hh,
                          const OptionalTensor& bias, const OptionalTensor& parameters,
                          const OptionalTensor& step_inputs, const OptionalTensor& reset,
                          at::OptionalIntArrayRef batch_sizes, bool reverse, string_view algorithm,
                          string_view program, const OptionalTensor& bias_hh) {
  const Direction only = {or_undefined(h0),
                          or_undefined(states),
                          weight_ih,
                          or_undefined(weight_hh),
                          bias,
                          reverse,
                          or_undefined(parameters),
                          or_undefined(step_inputs),
                          or_undefined(reset),
                          bias_hh};
  return {input, {only}, batch_sizes, algorithm, program};
}

CellCall cell_call(const at::Tensor& input, const TensorsOfDirection& forward_direction,
                   const TensorsOfDirection& reverse_direction, at::OptionalIntArrayRef batch_sizes,
                   string_view algorithm, string_view program);

// The cell of a call.
CellOp op_for(const CellCall& call);

// Raises for arguments that do not fit.
void check(const CellOp& op, const CellCall& call);

// All tensors of a call in float32, but the resets, which are it or bool.
inline CellCall in_float32(const CellCall& call) {
  std::vector<Direction> wide = call.directions;
  for (Direction& d : wide) {
    for (at::Tensor* x : {&d.h0, &d.states, &d.weight_ih, &d.weight_hh, &d.parameters, &d.step_inputs}) {
      *x = in_float32(*x);
    }
    for (OptionalTensor* x : {&d.bias, &d.bias_hh}) {
      if (*x) **x = in_float32(**x);
    }
  }
  CellCall result = call.with(std::move(wide));
  result.input = in_float32(call.input);
  return result;
}

// The results of run(a call with the dtype and the hidden size that kernels take) as those of this call,
// which has been checked: on the CPU half types are computed in float32, on CUDA some hidden sizes are
// extended.
template <typename F>
variable_list run_fitted(const CellOp& op, const CellCall& call, F&& run) {
  if (op.runs_in_float32(call.input)) {
    const variable_list wide = run(in_float32(call));
    variable_list results;
    for (size_t i = 0; i < wide.size(); ++i) {
      const bool of_states = i % 3 == 2;
      results.push_back(
          wide[i].to(of_states ? states_type(call.input, call.directions[i / 3]) : call.input.scalar_type()));
    }
    return results;
  }
  if (adds_units(op, call.input, call.directions[0].weight_hh, call.batch_sizes, call.algorithm)) {
    return run_with_added_units(call.directions,
                                [&](std::vector<Direction> wide) { return run(call.with(std::move(wide))); });
  }
  return run(call);
}

}  // namespace lltm_ext
