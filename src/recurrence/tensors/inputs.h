// A call of a cell over a sequence: its checks, its directions, the rows of each step.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "common/checks.h"
#include "common/dispatch.h"
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

// The first `rows` rows of [..., rows, columns]: x itself if that is all of them, to save a view.
inline at::Tensor first_rows(const at::Tensor& x, int64_t rows) {
  return rows == x.size(-2) ? x : x.narrow(-2, 0, rows);
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

// Contiguous, at a multiple of 16 bytes; undefined if x is.
inline at::Tensor aligned(const at::Tensor& x) {
  if (!x.defined()) return x;
  const at::Tensor contiguous = x.contiguous();
  return reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % 16 == 0 ? contiguous : contiguous.clone();
}

// Rows of T in x, contiguous [..., width], from `row` on; null if x is undefined.
template <typename T>
const T* rows_from(const at::Tensor& x, int64_t row) {
  return x.defined() ? pointer<T>(x) + row * x.size(-1) : nullptr;
}

inline bool is_bool(const at::Tensor& x) { return x.defined() && x.scalar_type() == at::kBool; }

// Resets from `row` on, for kernels; none on the CPU.
template <typename T>
Resets<acc_t<T>> resets_from(const at::Tensor& reset, int64_t row) {
  if (!reset.defined() || reset.is_cpu()) return {};
  return Resets<acc_t<T>>{pointer<void>(reset), is_bool(reset)}.from(row);
}

// What each row of x [..., rows, H] keeps after its reset [rows], bool or a number. Nothing of an infinity or
// NaN is left if that is 0.
inline at::Tensor kept(const at::Tensor& x, const at::Tensor& reset) {
  const at::Tensor lost = reset.unsqueeze(-1);
  if (is_bool(reset)) return at::where(lost, at::zeros({}, x.options()), x);
  const at::Tensor share = at::ones({}, reset.options()) - lost;
  return at::where(share.to(at::kBool), at::mul(x, share), at::zeros({}, reset.options()));
}

inline at::Tensor contiguous_or_none(const at::Tensor& x) { return x.defined() ? x.contiguous() : x; }

inline OptionalTensor if_defined(const at::Tensor& x) {
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}

inline at::Tensor in_float32(const at::Tensor& x) { return x.defined() ? x.to(at::kFloat) : x; }

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

inline std::string name_of(Algorithm algorithm) {
  return algorithm == Algorithm::kCluster ? "cluster" : algorithm == Algorithm::kGrid ? "grid" : "stepwise";
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

// ---- directions

// The inputs that differ between a layer's directions.
struct Direction {
  at::Tensor h0, states;  // initial ones; undefined: zeros
  at::Tensor weight_ih, weight_hh;
  OptionalTensor bias;
  bool reverse;
  at::Tensor parameters = {}, step_inputs = {};  // undefined if the cell has none
  // [T, B] or [N], what a row loses of h and its states before a step: bool, or a number. Undefined: nothing.
  at::Tensor reset = {};
  OptionalTensor bias_hh = {};  // is added to the bias, as nn.LSTM has it
};
using Directions = at::ArrayRef<Direction>;

// A call that runs a cell over a sequence. Two directions are those of a bidirectional layer, forward and in
// reverse.
struct CellCall {
  at::Tensor input;
  std::vector<Direction> directions;
  at::OptionalIntArrayRef batch_sizes;
  c10::string_view algorithm, program;

  CellCall with(std::vector<Direction> others) const {
    return {input, std::move(others), batch_sizes, algorithm, program};
  }
};

inline at::Tensor or_undefined(const OptionalTensor& x) { return x.value_or(at::Tensor()); }

// The type of the final states, which is that of the initial ones.
inline at::ScalarType states_type(const at::Tensor& input, const Direction& d) {
  return d.states.defined() ? d.states.scalar_type() : input.scalar_type();
}

inline c10::SymInt hidden_of(const CellShape& shape, const Direction& d) {
  return d.h0.defined() ? d.h0.sym_size(1) : d.weight_ih.sym_size(0) / shape.gates;
}
inline int64_t packed_batch_of(const Direction& d, at::IntArrayRef batch_sizes) {
  return d.h0.defined() ? d.h0.size(0) : batch_sizes.empty() ? 0 : batch_sizes[0];
}

// The same with the sum of two biases as its bias.
inline Direction with_one_bias(Direction d) {
  if (d.bias_hh) d.bias = *d.bias + *d.bias_hh;
  d.bias_hh.reset();
  return d;
}

inline void check_bias_hh(const char* op, const at::Tensor& bias_ih, const at::Tensor& bias_hh) {
  check_strided(op, "bias", bias_ih);
  check_same_device(op, "bias_hh", bias_hh, bias_ih);
  check_same_dtype(op, "bias_hh", bias_hh, bias_ih.scalar_type());
  check_shape(op, "bias_hh", bias_hh, bias_ih.sym_sizes(), "of bias");
}

// values = x, or zeros if x is undefined.
inline void set_values(const at::Tensor& values, const at::Tensor& x) {
  x.defined() ? values.copy_(x) : values.zero_();
}

// The resets of all rows, contiguous; on the CPU [N].
inline at::Tensor rows_of_reset(const Direction& d) {
  const at::Tensor rows = contiguous_or_none(d.reset);
  return rows.defined() && rows.is_cpu() ? rows.view({rows.numel()}) : rows;
}

// The sizes of the states: as they are given, or [S, B, H].
inline c10::SymDimVector states_sizes(const CellShape& shape, const Direction& d, const c10::SymInt& batch,
                                      const c10::SymInt& hidden) {
  if (shape.states == 1 && d.states.defined() && d.states.dim() != 3) return {batch, hidden};
  return {shape.states, batch, hidden};
}

// What a cell is to the code that runs it on tensors:
//
//   struct Op {
//     name();               // in messages
//     shape();              // a CellShape
//     states_name();        // the argument that has the states
//     has_single_step();    // whether it has the kernel of a single step
//     loads_eights(input);  // whether fused kernels on its device load units by eights
//     zeros_stay();         // whether a unit of zeros stays so, forward and backward
//     ...                   // the launches of tensors/launch.h
//   };
template <class Op>
void check_inputs(const Op& of, const char* op, const at::Tensor& input, const Direction& d,
                  at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
  const CellShape shape = of.shape();
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
  const char* const states = of.states_name();
  if (d.h0.defined()) check_like_input("h0", d.h0);
  if (d.states.defined()) {
    check_same_device(op, states, d.states, input);
    check_cell_dtype(op, states, d.states, input);
  }
  check_like_input("weight_ih", d.weight_ih);
  if (shape.recurrent) check_like_input("weight_hh", d.weight_hh);
  if (d.bias) check_like_input("bias", *d.bias);

  if (d.h0.defined()) check_dim(op, "h0", d.h0, 2, "[batch, hidden_size]");
  if (!d.h0.defined()) {
    check_dim(op, "weight_ih", d.weight_ih, 2, gates_by(shape.gates, ", input_size").c_str());
  }
  const c10::SymInt hidden = hidden_of(shape, d);
  const c10::SymInt batch = batch_sizes ? packed_batch_of(d, *batch_sizes) : input.sym_size(1);
  const auto check = [&](const char* name, const at::Tensor& x, c10::SymIntArrayRef sizes,
                         const std::string& meaning) { check_shape(op, name, x, sizes, meaning.c_str()); };
  if (d.h0.defined()) check("h0", d.h0, {batch, hidden}, "[batch, hidden_size]");
  if (d.states.defined()) {
    check(states, d.states, states_sizes(shape, d, batch, hidden),
          d.states.dim() == 3 ? "[states, batch, hidden_size]" : "[batch, hidden_size]");
  }
  const c10::SymInt rows = shape.gates * hidden;
  check("weight_ih", d.weight_ih, {rows, input.sym_size(-1)}, gates_by(shape.gates, ", input_size"));
  if (shape.recurrent)
    check("weight_hh", d.weight_hh, {rows, hidden}, gates_by(shape.gates, ", hidden_size"));
  if (d.bias) check("bias", *d.bias, {rows}, gates_by(shape.gates, ""));
  if (d.bias_hh) check_bias_hh(op, or_undefined(d.bias), *d.bias_hh);
  if (shape.parameters > 0) {
    check_like_input("parameters", d.parameters);
    check("parameters", d.parameters, {shape.parameters, hidden}, "[parameters, hidden_size]");
  }
  if (shape.step_inputs > 0) {
    check_like_input("step_inputs", d.step_inputs);
    check("step_inputs", d.step_inputs, sizes_like_input(input, shape.step_inputs * hidden),
          "[..., step inputs * hidden_size]");
  }
  if (d.reset.defined()) {
    check_same_device(op, "reset", d.reset, input);
    if (!is_bool(d.reset)) {
      check_same_dtype(op, "reset", d.reset, at::toOpMathType(input.scalar_type()));
    }
    check("reset", d.reset, input.sym_sizes().slice(0, input.dim() - 1), "[length, batch]");
  }
  if (batch_sizes) check_batch_sizes(op, *batch_sizes, input, packed_batch_of(d, *batch_sizes));
  algorithm_named(op, algorithm);
}

// Both directions of a layer have states of the same sizes.
inline void check_same_sizes(const std::string& op, Directions directions) {
  for (const Direction& d : directions.slice(1)) {
    const at::Tensor &first = directions[0].h0, &other = d.h0;
    TORCH_CHECK(first.defined() == other.defined(), op, "_bidirectional",
                ": expected h0 of both directions, or none");
    TORCH_CHECK(!first.defined() || other.sym_sizes() == first.sym_sizes(), op, "_bidirectional",
                ": expected h0 of both directions to have one shape, got ", first.sym_sizes(), " and ",
                other.sym_sizes());
  }
}

}  // namespace lltm_ext
