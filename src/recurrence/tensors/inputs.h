// The inputs of a sequence op (op.h): checks, directions, the rows of each step.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "common/checks.h"
#include "recurrence/plan.h"

namespace lltm_ext {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::variable_list;

// ---- rows

struct RowRange {
  int64_t first, count;
};

// The rows of each step, in the order in which the steps are computed.
inline std::vector<RowRange> rows_of_steps(at::OptionalIntArrayRef batch_sizes, int64_t length, int64_t batch,
                                           bool reverse) {
  std::vector<RowRange> steps;
  int64_t first = 0;
  for (int64_t t = 0; t < length; ++t) {
    steps.push_back({first, batch_sizes ? (*batch_sizes)[t] : batch});
    first += steps.back().count;
  }
  if (reverse) std::reverse(steps.begin(), steps.end());
  return steps;
}

inline int64_t length_of(const at::Tensor& input, at::OptionalIntArrayRef batch_sizes) {
  return batch_sizes ? static_cast<int64_t>(batch_sizes->size()) : input.size(0);
}

inline at::Tensor flatten_rows(const at::Tensor& x) {
  return x.dim() == 3 ? x.reshape({x.size(0) * x.size(1), x.size(2)}) : x.contiguous();
}

// The first `rows` rows: x itself if that is all of them, to save a view.
inline at::Tensor first_rows(const at::Tensor& x, int64_t rows) {
  return rows == x.size(0) ? x : x.narrow(0, 0, rows);
}

// The input's shape, dense or packed, with another last dimension.
inline c10::SymDimVector sizes_like_input(const at::Tensor& input, const c10::SymInt& width) {
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  sizes.back() = width;
  return sizes;
}

inline at::Tensor empty_like_input(const at::Tensor& input, const c10::SymInt& width) {
  return at::empty_symint(sizes_like_input(input, width), input.options());
}

inline at::Tensor empty_contiguous(const at::Tensor& x) {
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}

// Contiguous, at a multiple of 16 bytes.
inline at::Tensor aligned(const at::Tensor& x) {
  const at::Tensor contiguous = x.contiguous();
  return reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % 16 == 0 ? contiguous : contiguous.clone();
}

inline OptionalTensor if_defined(const at::Tensor& x) {
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}

inline void append(variable_list& to, at::TensorList tensors) {
  to.insert(to.end(), tensors.begin(), tensors.end());
}

// ---- checks

inline Algorithm algorithm_named(const char* op, c10::string_view name) {
  if (name == "auto") return Algorithm::kAuto;
  if (name == "stepwise") return Algorithm::kStepwise;
  if (name == "cluster") return Algorithm::kCluster;
  if (name == "grid") return Algorithm::kGrid;
  TORCH_CHECK_VALUE(false, op, ": expected algorithm to be 'auto', 'stepwise', 'cluster' or 'grid', got '",
                    name, "'");
}

inline void check_batch_sizes(const char* op, at::IntArrayRef sizes, const at::Tensor& input, int64_t batch) {
  int64_t total = 0, previous = batch;
  for (const int64_t size : sizes) {
    TORCH_CHECK(0 < size && size <= previous, op,
                ": expected batch_sizes to be positive, to start at batch = ", batch,
                " and never to grow, got ", sizes);
    previous = size;
    total += size;
  }
  TORCH_CHECK((sizes.empty() || sizes[0] == batch) && total == input.sym_size(0), op,
              ": expected batch_sizes to start at batch = ", batch, " and to sum to the ", input.sym_size(0),
              " rows of input, got ", sizes);
}

// "[3*hidden_size, input_size]" and the like.
inline std::string gates_by(int64_t gates, const char* columns) {
  return "[" + std::to_string(gates) + "*hidden_size" + columns + "]";
}

inline void check_inputs(const char* op, int64_t gates, const at::Tensor& input, const at::Tensor& h0,
                         const at::Tensor& c0, const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                         const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
                         c10::string_view algorithm) {
  check_device(op, "input", input);
  check_floating(op, "input", input);
  if (batch_sizes) {
    check_dim(op, "input", input, 2, "[rows of all steps, input_size]");
  } else {
    check_dim(op, "input", input, 3, "[length, batch, input_size]");
  }
  const auto check_like_input = [&](const char* name, const at::Tensor& x) {
    check_same_device(op, name, x, input);
    check_same_dtype(op, name, x, input.scalar_type());
  };
  check_like_input("h0", h0);
  check_same_device(op, "c0", c0, input);
  check_cell_dtype(op, "c0", c0, input);
  check_like_input("weight_ih", weight_ih);
  check_like_input("weight_hh", weight_hh);
  if (bias) check_like_input("bias", *bias);

  check_dim(op, "h0", h0, 2, "[batch, hidden_size]");
  const c10::SymInt batch = batch_sizes ? h0.sym_size(0) : input.sym_size(1), hidden = h0.sym_size(1);
  CHECK_SHAPE(op, h0, "[batch, hidden_size]", batch, hidden);
  CHECK_SHAPE(op, c0, "[batch, hidden_size]", batch, hidden);
  CHECK_SHAPE(op, weight_ih, gates_by(gates, ", input_size").c_str(), gates * hidden, input.sym_size(-1));
  CHECK_SHAPE(op, weight_hh, gates_by(gates, ", hidden_size").c_str(), gates * hidden, hidden);
  if (bias) check_shape(op, "bias", *bias, {gates * hidden}, gates_by(gates, "").c_str());
  if (batch_sizes) check_batch_sizes(op, *batch_sizes, input, h0.size(0));
  algorithm_named(op, algorithm);
}

// ---- directions

// The dispatcher's name, <op><suffix>.
template <class Op>
std::string op_name(const char* suffix) {
  return std::string(Op::name) + suffix;
}

// The inputs that differ between a layer's directions.
struct Direction {
  at::Tensor h0, c0, weight_ih, weight_hh;
  OptionalTensor bias;
  bool reverse;
};
using Directions = at::ArrayRef<Direction>;

// From [h0, c0, weight_ih, weight_hh] or these and bias.
template <class Op>
std::array<Direction, 2> directions_of(at::TensorList forward_direction, at::TensorList reverse_direction) {
  for (const at::TensorList& given : {forward_direction, reverse_direction}) {
    TORCH_CHECK(given.size() == 4 || given.size() == 5, op_name<Op>("_bidirectional"),
                ": expected a direction to be [h0, c0, weight_ih, weight_hh] or these and bias, got ",
                given.size(), " tensors");
  }
  const auto direction = [](const at::TensorList& x, bool reverse) -> Direction {
    return {x[0], x[1], x[2], x[3], x.size() > 4 ? OptionalTensor(x[4]) : std::nullopt, reverse};
  };
  return {direction(forward_direction, false), direction(reverse_direction, true)};
}

template <class Op>
void check_same_sizes(Directions directions) {
  for (const Direction& d : directions.slice(1)) {
    TORCH_CHECK(d.h0.sym_sizes() == directions[0].h0.sym_sizes(), op_name<Op>("_bidirectional"),
                ": expected h0 of both directions to have one shape, got ", directions[0].h0.sym_sizes(),
                " and ", d.h0.sym_sizes());
  }
}

}  // namespace lltm_ext
