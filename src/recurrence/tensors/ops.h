// The signatures of the dispatcher ops of a cell over a sequence (src/custom_cell).
//
// T is the length, B the batch, I the input size, H the hidden size; G, S, P, K and E as in
// recurrence/cell.h.
#pragma once

#include <string>
#include <tuple>

#include "recurrence/tensors/inputs.h"

namespace lltm_ext {

using c10::string_view;

// output [T, B, H], h_n [B, H], states_n [S, B, H], or [B, H] if the only state was given so
using CellOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The arguments of all ops of one direction. Without h0 or states they are zeros. Shapes: input [T, B, I], or
// packed rows [N, I] with their batch_sizes; h0 [B, H]; states [S, B, H]; weight_ih [G * H, I]; weight_hh [G
// * H, H]; bias [G * H]; parameters [P, H]; step_inputs [T, B, K * H] or [N, K * H]; reset [T, B] or [N].
CellOutputs custom_cell(const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& states,
                        const at::Tensor& weight_ih, const OptionalTensor& weight_hh,
                        const OptionalTensor& bias, const OptionalTensor& parameters,
                        const OptionalTensor& step_inputs, const OptionalTensor& reset,
                        at::OptionalIntArrayRef batch_sizes, bool reverse, string_view algorithm,
                        string_view program, const OptionalTensor& bias_hh);

// As above, and for the backward (gates [T, B, G * H], or [T, B, 0] of a wide cell; extra [T, B, E * H]; h
// [T, B, H] of every step, or [T, B, 0] if that is the output).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> custom_cell_forward(
    const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& states,
    const at::Tensor& weight_ih, const OptionalTensor& weight_hh, const OptionalTensor& bias,
    const OptionalTensor& parameters, const OptionalTensor& step_inputs, const OptionalTensor& reset,
    at::OptionalIntArrayRef batch_sizes, bool reverse, string_view algorithm, string_view program,
    const OptionalTensor& bias_hh);

// The gradients of input, h0, states, weight_ih, weight_hh, bias and parameters; empty where not needed, or
// where the cell has none. h: of every step, [T, B, H].
variable_list custom_cell_backward(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                                   const OptionalTensor& grad_states_n, const at::Tensor& h,
                                   const at::Tensor& gates, const at::Tensor& extra, const at::Tensor& input,
                                   const OptionalTensor& h0, const OptionalTensor& states,
                                   const at::Tensor& weight_ih, const OptionalTensor& weight_hh,
                                   const OptionalTensor& bias, const OptionalTensor& parameters,
                                   const OptionalTensor& step_inputs, const OptionalTensor& reset,
                                   at::OptionalIntArrayRef batch_sizes, bool reverse, string_view algorithm,
                                   string_view program, bool input_needs_grad, bool bias_needs_grad);

using CellGradients7 =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The algorithm that a call would take.
std::string custom_cell_algorithm(const at::Tensor& input, const OptionalTensor& h0,
                                  const OptionalTensor& states, const at::Tensor& weight_ih,
                                  const OptionalTensor& weight_hh, const OptionalTensor& bias,
                                  const OptionalTensor& parameters, const OptionalTensor& step_inputs,
                                  const OptionalTensor& reset, at::OptionalIntArrayRef batch_sizes,
                                  bool reverse, string_view algorithm, string_view program, bool backward);

// ---- both directions of a layer

// A direction as a list: h0, states, weight_ih, weight_hh, bias, parameters, step_inputs, reset, bias_hh.
constexpr size_t kDirectionTensors = 9;
using TensorsOfDirection = c10::List<OptionalTensor>;

// The results of custom_cell for each direction.
variable_list custom_cell_bidirectional(const at::Tensor& input, const TensorsOfDirection& forward_direction,
                                        const TensorsOfDirection& reverse_direction,
                                        at::OptionalIntArrayRef batch_sizes, string_view algorithm,
                                        string_view program);
variable_list custom_cell_bidirectional_forward(const at::Tensor& input,
                                                const TensorsOfDirection& forward_direction,
                                                const TensorsOfDirection& reverse_direction,
                                                at::OptionalIntArrayRef batch_sizes, string_view algorithm,
                                                string_view program);
// grad_input, and of each direction those of custom_cell_backward without it, from the gradients of each
// direction's outputs, and its {h, gates, extra}.
variable_list custom_cell_bidirectional_backward(const c10::List<OptionalTensor>& grad_outputs,
                                                 const at::Tensor& input,
                                                 const TensorsOfDirection& forward_direction,
                                                 const TensorsOfDirection& reverse_direction,
                                                 at::TensorList saved, at::OptionalIntArrayRef batch_sizes,
                                                 string_view algorithm, string_view program,
                                                 bool input_needs_grad, bool bias_needs_grad);

}  // namespace lltm_ext
