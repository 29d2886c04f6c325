// The cell on tensors, shared by the one-step op (lltm.cpp) and the sequence (lltm_sequence.cpp).
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>

#include <utility>

#include "common/checks.h"
#include "common/differentiable.h"
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

#ifndef LLTM_EXT_STABLE_ABI
// The cell in torch's differentiable ops, for the double backward: (new_h, new_cell).
inline std::pair<at::Tensor, at::Tensor> composed_cell(const at::Tensor& gates, const at::Tensor& old_cell) {
  const auto parts = gates.chunk(3, 1);
  const at::Tensor new_cell = old_cell + at::elu(parts[2]) * at::sigmoid(parts[0]);
  return {(at::tanh(new_cell) * at::sigmoid(parts[1])).to(gates.scalar_type()),
          new_cell.to(old_cell.scalar_type())};
}
#endif

}  // namespace lltm_ext
