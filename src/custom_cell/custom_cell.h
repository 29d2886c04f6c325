// What the parts of a cell's ops share: custom_cell.cpp runs them, custom_cell_autograd.cpp has their
// derivatives and autocast, check.cpp the checks, forward.cpp and backward.cpp the sequences.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "custom_cell/call.h"
#include "custom_cell/kernels.h"
#include "custom_cell/pad_hidden.h"
#include "custom_cell/rows.h"

namespace lltm_ext {

// ---- sizes

// The type of the final states, which is that of the initial ones.
inline at::ScalarType states_type(const at::Tensor& input, const Direction& d) {
  return d.states.defined() ? d.states.scalar_type() : input.scalar_type();
}

inline c10::SymInt hidden_of(const CellShape& shape, const CellCall& call, const Direction& d) {
  if (d.h0.defined()) return d.h0.sym_size(1);
  return (d.weight_ih.defined() ? d.weight_ih.sym_size(0) : call.input.sym_size(-1)) / shape.gates;
}
inline c10::SymInt batch_of(const CellCall& call, const Direction& d) {
  return call.batch_sizes ? packed_batch_of(d, *call.batch_sizes) : call.input.sym_size(1);
}

// The sizes of the final states: those of the given ones, or [S, B, H].
inline c10::SymDimVector states_sizes(const CellShape& shape, const Direction& d, const c10::SymInt& batch,
                                      const c10::SymInt& hidden) {
  if (shape.states == 1 && d.states.defined() && d.states.dim() != 3) return {batch, hidden};
  return {shape.states, batch, hidden};
}

// The type of the input's projections, which are the input if there is no weight_ih.
inline at::ScalarType projections_type(const CellShape& shape, const at::Tensor& input) {
  const at::ScalarType type = input.scalar_type();
  return shape.wide ? at::toOpMathType(type) : type;
}
// What forward returns of the gates for backward: how many planes, and their type. These are saved values or,
// without a product, the projections, unless they are the input.
inline int64_t kept_gates(const CellShape& shape, const Direction& d) {
  return shape.recurrent || d.weight_ih.defined() ? shape.kept_gates() : 0;
}
inline at::ScalarType kept_gates_type(const CellShape& shape, const at::Tensor& input, const Direction& d) {
  const bool are_projections = !shape.recurrent && d.weight_ih.defined();
  return are_projections ? projections_type(shape, input) : input.scalar_type();
}
inline at::Tensor empty_kept_gates(const CellShape& shape, const CellCall& call, const Direction& d) {
  const c10::SymInt width = kept_gates(shape, d) * hidden_of(shape, call, d);
  return at::empty_symint(sizes_like_input(call.input, width),
                          call.input.options().dtype(kept_gates_type(shape, call.input, d)));
}

// Whether a kernel that runs all steps reads the input as projections.
inline bool input_is_read(const CellShape& shape, const at::Tensor& input, const Direction& d) {
  return input.is_cuda() && !shape.recurrent && !d.weight_ih.defined();
}
// The bias of the projections, or undefined.
inline at::Tensor bias_of(const Direction& d) { return d.bias_hh.defined() ? d.bias + d.bias_hh : d.bias; }
// The input without weight_ih as projections, with the bias.
inline at::Tensor given_projections(const CellShape& shape, const at::Tensor& input, const at::Tensor& bias) {
  const at::Tensor given = input.to(projections_type(shape, input));
  return bias.defined() ? given + bias.to(given.scalar_type()) : given;
}
// The parameters [P, H], then the bias [G, H].
inline at::Tensor with_bias(const CellShape& shape, const at::Tensor& parameters, const at::Tensor& bias,
                            int64_t hidden) {
  if (!bias.defined()) return parameters;
  const at::Tensor rows = bias.view({shape.gates, hidden});
  return parameters.defined() ? at::cat({parameters.view({shape.parameters, hidden}), rows}) : rows;
}

// Whether all units share the values of step inputs.
inline bool is_shared_by_units(const CellShape& shape, const at::Tensor& step_inputs) {
  return step_inputs.defined() && step_inputs.dim() > 0 && step_inputs.sym_size(-1) == shape.step_inputs;
}
// The step inputs of each unit, [..., K * H], contiguous and aligned.
inline at::Tensor step_inputs_of_units(const CellShape& shape, const at::Tensor& step_inputs,
                                       int64_t hidden) {
  if (!is_shared_by_units(shape, step_inputs)) return aligned(step_inputs);
  std::vector<int64_t> sizes = step_inputs.sizes().vec();
  sizes.back() *= hidden;
  const at::Tensor of_units = at::empty(sizes, step_inputs.options());
  of_units.view({step_inputs.numel(), hidden}).copy_(step_inputs.reshape({step_inputs.numel(), 1}));
  return of_units;
}

// ---- a call

// The cell of a call.
CellOp op_for(const CellCall& call);

// Raises for arguments that do not fit.
void check(const CellOp& op, const CellCall& call);

// Runs a call that has been checked. Returns {output, h_n, states_n} for each direction, followed by
// {gates, extra, h} if `save`.
variable_list run_forward(const CellOp& op, const CellCall& call, bool save);

// Checks all arguments, and returns for each direction the gradients of input, h0, states, weight_ih,
// weight_hh, bias and parameters, from its {grad_output, grad_h_n, grad_states_n} and {h, gates, extra}.
variable_list run_backward(const CellOp& op, const CellCall& call,
                           const std::vector<OptionalTensor>& grad_outputs, at::TensorList saved,
                           bool input_needs_grad, bool bias_needs_grad);

// Whether a call, which has been checked, is one step that has a kernel of its own.
bool takes_single_step(const CellOp& op, const CellCall& call);

AlgorithmSignature custom_cell_algorithm;

// The results of the cell in torch's differentiable ops, which Python implements (custom_cell_autograd.cpp).
variable_list call_by_loop(const CellCall& call);

// A call with its tensors in float32, except the resets, which are float32 or bool already.
inline CellCall in_float32(const CellCall& call) {
  CellCall wide = call;
  wide.input = in_float32(call.input);
  for (Direction& d : wide.directions) {
    for (at::Tensor* x : d.tensors()) {
      if (x != &d.reset) *x = in_float32(*x);
    }
  }
  return wide;
}

// Runs a call, which has been checked, with the dtype and the hidden size that kernels take: on the CPU half
// types are computed in float32, on CUDA some hidden sizes are padded. Returns run(such a call), converted
// back.
template <typename F>
variable_list run_fitted(const CellOp& op, const CellCall& call, F&& run) {
  if (op.runs_in_float32(call.input)) {
    variable_list results = run(in_float32(call));
    for (size_t i = 0; i < results.size(); ++i) {
      const bool of_states = i % 3 == 2;
      results[i] = results[i].to(of_states ? states_type(call.input, call.directions[i / 3])
                                           : call.input.scalar_type());
    }
    return results;
  }
  return pads_hidden(op, call) ? run_with_padded_hidden(op.shape(), call, run) : run(call);
}

}  // namespace lltm_ext
