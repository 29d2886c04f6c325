// The LLTM's cell in torch's differentiable ops, for the double backward of one step and of a sequence.
#pragma once

#ifndef LLTM_EXT_STABLE_ABI
#include <ATen/TensorOperators.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>

#include <utility>

#include "common/differentiable.h"

namespace lltm_ext {

// (new_h, new_cell) of gates [B, 3 * H].
inline std::pair<at::Tensor, at::Tensor> composed_cell(const at::Tensor& gates, const at::Tensor& old_cell) {
  const auto parts = gates.chunk(3, 1);
  const at::Tensor new_cell = old_cell + at::elu(parts[2]) * at::sigmoid(parts[0]);
  return {(at::tanh(new_cell) * at::sigmoid(parts[1])).to(gates.scalar_type()),
          new_cell.to(old_cell.scalar_type())};
}

}  // namespace lltm_ext
#endif
