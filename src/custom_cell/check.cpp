// Checks of the arguments of a cell's op.
#include <ATen/OpMathType.h>

#include "common/checks.h"
#include "custom_cell/custom_cell.h"
#include "custom_cell/launch.h"

namespace lltm_ext {
namespace {

void check_batch_sizes(const char* op, at::IntArrayRef sizes, const at::Tensor& input, int64_t batch) {
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

// Returns "[3*hidden_size, input_size]" and the like.
std::string gates_by(int64_t gates, const char* columns) {
  return "[" + std::to_string(gates) + "*hidden_size" + columns + "]";
}

void check_bias_hh(const char* op, const at::Tensor& bias_ih, const at::Tensor& bias_hh) {
  check_strided(op, "bias", bias_ih);
  check_same_device(op, "bias_hh", bias_hh, bias_ih);
  check_same_dtype(op, "bias_hh", bias_hh, bias_ih.scalar_type());
  check_shape(op, "bias_hh", bias_hh, bias_ih.sym_sizes(), "of bias");
}

void check_inputs(const CellOp& cell, const char* op, const CellCall& call, const Direction& d) {
  const CellShape shape = cell.shape();
  const at::Tensor& input = call.input;
  check_device(op, "input", input);
  check_floating(op, "input", input);
  if (call.batch_sizes) {
    check_dim(op, "input", input, 2, "[rows of all steps, input_size]");
  } else {
    check_dim(op, "input", input, 3, "[length, batch, input_size]");
  }
  const auto check_like_input = [&](const char* name, const at::Tensor& x) {
    check_same_device(op, name, x, input);
    check_same_dtype(op, name, x, input.scalar_type());
  };
  const char* const states = cell.states_name();
  if (d.h0.defined()) check_like_input("h0", d.h0);
  if (d.states.defined()) {
    check_same_device(op, states, d.states, input);
    check_cell_dtype(op, states, d.states, input);
  }
  if (d.weight_ih.defined()) check_like_input("weight_ih", d.weight_ih);
  if (shape.recurrent) check_like_input("weight_hh", d.weight_hh);
  if (d.bias.defined()) check_like_input("bias", d.bias);
  if (shape.parameters > 0) check_like_input("parameters", d.parameters);
  if (shape.step_inputs > 0) check_like_input("step_inputs", d.step_inputs);

  TORCH_CHECK(shape.gates > 0 || !d.weight_ih.defined(), op,
              ": expected weight_ih to be None, because the cell has no gates");
  TORCH_CHECK(shape.gates > 0 || d.h0.defined(), op,
              ": expected h0, from which a cell without gates has its hidden_size, but it is missing");
  if (shape.resets_to_initial) {
    TORCH_CHECK(d.h0.defined() && (shape.states == 0 || d.states.defined()), op, ": expected h0 and ", states,
                " to reset to, but they are missing");
  }
  if (d.h0.defined()) {
    check_dim(op, "h0", d.h0, 2, "[batch, hidden_size]");
  } else if (d.weight_ih.defined()) {
    check_dim(op, "weight_ih", d.weight_ih, 2, gates_by(shape.gates, ", input_size").c_str());
  }
  const c10::SymInt hidden = hidden_of(shape, call, d), batch = batch_of(call, d),
                    rows = shape.gates * hidden;
  const auto check = [&](const char* name, const at::Tensor& x, c10::SymIntArrayRef sizes,
                         const std::string& meaning) {
    if (x.defined()) check_shape(op, name, x, sizes, meaning.c_str());
  };
  check("h0", d.h0, {batch, hidden}, "[batch, hidden_size]");
  check(states, d.states, states_sizes(shape, d, batch, hidden),
        d.states.defined() && d.states.dim() == 3 ? "[states, batch, hidden_size]" : "[batch, hidden_size]");
  check("weight_ih", d.weight_ih, {rows, input.sym_size(-1)}, gates_by(shape.gates, ", input_size"));
  TORCH_CHECK_TYPE(d.weight_ih.defined() || input.sym_size(-1) == rows, op,
                   ": expected weight_ih to be a Tensor, got None, or input of ", shape.gates,
                   "*hidden_size = ", rows, " features, which need none, got ", input.sym_sizes());
  if (shape.recurrent) {
    const int blocks = shape.rows_of_weight_hh();
    const at::Tensor& weight = d.weight_hh;
    const bool of_heads = shape.products == 0 && weight.defined() && weight.dim() == 2 &&
                          weight.sym_size(1) != hidden && weight.sym_size(1) > 0 &&
                          hidden % weight.sym_size(1) == 0;
    check("weight_hh", weight, {blocks * hidden, of_heads ? weight.sym_size(1) : hidden},
          gates_by(blocks, ", hidden_size"));
  }
  check("bias", d.bias, {rows}, gates_by(shape.gates, ""));
  if (d.bias_hh.defined()) check_bias_hh(op, d.bias, d.bias_hh);
  if (shape.parameters > 0) {
    if (d.parameters.dim() == 1) {
      check("parameters", d.parameters, {shape.parameters * hidden}, "[parameters*hidden_size]");
    } else {
      check("parameters", d.parameters, {shape.parameters, hidden}, "[parameters, hidden_size]");
    }
  }
  if (shape.step_inputs > 0) {
    const c10::SymInt width =
        is_shared_by_units(shape, d.step_inputs) ? shape.step_inputs : shape.step_inputs * hidden;
    check("step_inputs", d.step_inputs, sizes_like_input(input, width), "[..., step inputs * hidden_size]");
  }
  if (d.reset.defined()) {
    check_same_device(op, "reset", d.reset, input);
    if (!is_bool(d.reset)) {
      check_same_dtype(op, "reset", d.reset, at::toOpMathType(input.scalar_type()));
    }
    check("reset", d.reset, input.sym_sizes().slice(0, input.dim() - 1), "[length, batch]");
  }
  if (call.batch_sizes)
    check_batch_sizes(op, *call.batch_sizes, input, packed_batch_of(d, *call.batch_sizes));
}

}  // namespace

void check(const CellOp& op, const CellCall& call) {
  const std::string name = op.name();
  for (const Direction& d : call.directions) {
    check_inputs(op, name.c_str(), call, d);
    algorithm_named(name.c_str(), call.algorithm);
    const at::Tensor &first = call.directions[0].h0, &other = d.h0;
    TORCH_CHECK(call.directions[0].weight_ih.defined() == d.weight_ih.defined(), name,
                "_bidirectional: expected weight_ih of both directions, or none");
    TORCH_CHECK(first.defined() == other.defined(), name,
                "_bidirectional: expected h0 of both directions, or none");
    TORCH_CHECK(!first.defined() || other.sym_sizes() == first.sym_sizes(), name,
                "_bidirectional: expected h0 of both directions to have one shape, got ", first.sym_sizes(),
                " and ", other.sym_sizes());
  }
}

}  // namespace lltm_ext
