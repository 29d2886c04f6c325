// One step of the cell on tensors, shared by the one-step op (lltm.cpp) and the sequence (lltm_sequence.cpp).
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/library.h"
#include "lltm/lltm.h"

namespace lltm_ext {

// For a launcher over T and C: calls f(Type<T>{}, Type<C>{}, stream...) with the types of gates and cell.
template <typename F>
void launch_step(const char* kernel, const at::Tensor& gates, const at::Tensor& cell, F&& f) {
  launch(kernel, gates, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    if (cell.scalar_type() == gates.scalar_type()) return f(type, type, stream...);
    return f(type, Type<acc_t<T>>{}, stream...);
  });
}

// [B, 3 * H], the gates of a row side by side.
template <typename T>
Gates<T> gates_of_rows(const at::Tensor& gates) {
  return {mutable_pointer<T>(gates), gates.size(1), gates.size(1) / 3};
}

// [3, B, H], the gates one after the other.
template <typename T>
Gates<T> stacked_gates(const at::Tensor& gates) {
  if (!gates.defined()) return {nullptr, 0, 0};
  return {mutable_pointer<T>(gates), gates.size(2), gates.size(1) * gates.size(2)};
}

template <typename T>
Matrix<T> matrix(const at::Tensor& x) {
  if (!x.defined()) return {nullptr, 0, 0};
  return {pointer<T>(x), x.stride(0), x.stride(1)};
}

// The cell state comes in the input's dtype, or in float32 to spare half types its rounding at every step.
inline void check_cell_dtype(const char* op, const char* name, const at::Tensor& cell,
                             const at::Tensor& input) {
  const bool half = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  if (half && cell.scalar_type() == at::kFloat) return;
  check_same_dtype(op, name, cell, input.scalar_type());
}

// The cell in torch's differentiable ops, for the double backward: (new_h, new_cell).
inline std::pair<at::Tensor, at::Tensor> composed_cell(const at::Tensor& gates, const at::Tensor& old_cell) {
  const auto parts = gates.chunk(3, 1);
  const at::Tensor new_cell = old_cell + at::elu(parts[2]) * at::sigmoid(parts[0]);
  return {(at::tanh(new_cell) * at::sigmoid(parts[1])).to(gates.scalar_type()),
          new_cell.to(old_cell.scalar_type())};
}

// Gradients that can be differentiated again: runs `composed` on the inputs under autograd.
template <typename F>
torch::autograd::variable_list differentiable_gradients(F&& composed,
                                                        const torch::autograd::variable_list& inputs,
                                                        const torch::autograd::variable_list& grad_outputs) {
  // Fresh aliases: a gradient with respect to an input must not include the paths through which one input
  // depends on another.
  torch::autograd::variable_list aliases, wanted, outputs, grads;
  for (const at::Tensor& x : inputs) {
    aliases.push_back(x.defined() ? x.view_as(x) : x);
    if (x.defined() && x.requires_grad()) wanted.push_back(aliases.back());
  }
  const torch::autograd::variable_list all_outputs = composed(aliases);
  for (size_t i = 0; i < all_outputs.size(); ++i) {
    if (!grad_outputs[i].defined() || !all_outputs[i].requires_grad()) continue;
    outputs.push_back(all_outputs[i]);
    grads.push_back(grad_outputs[i]);
  }
  const auto found =
      torch::autograd::grad(outputs, wanted, grads, /*retain_graph=*/true, /*create_graph=*/true,
                            /*allow_unused=*/true);
  torch::autograd::variable_list gradients(inputs.size());
  for (size_t i = 0, next = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && inputs[i].requires_grad()) gradients[i] = found[next++];
  }
  return gradients;
}

inline bool any_defined(const torch::autograd::variable_list& tensors) {
  for (const at::Tensor& x : tensors) {
    if (x.defined()) return true;
  }
  return false;
}

}  // namespace lltm_ext
