// lltm, one step: tensors in, tensors out. Dispatcher op lltm_ext::lltm_cell with the forward and backward
// that its autograd node calls, and the raw bindings lltm_ext._C.lltm.forward and backward of the tutorial.
// B is the batch, I the input size, H the hidden size; X is [old_h, input] side by side, as weights' columns.
#include "lltm/lltm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>

#include "common/python.h"
#include "lltm/lltm_step.h"

namespace lltm_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::variable_list;

void check_cell_inputs(const char* op, const at::Tensor& input, const at::Tensor& weights,
                       const OptionalTensor& bias, const at::Tensor& old_h, const at::Tensor& old_cell) {
  check_device(op, "input", input);
  check_floating(op, "input", input);
  check_dim(op, "input", input, 2, "[batch, input_size]");
  check_same_device(op, "old_h", old_h, input);
  check_same_device(op, "old_cell", old_cell, input);
  check_same_device(op, "weights", weights, input);
  check_same_dtype(op, "old_h", old_h, input.scalar_type());
  check_cell_dtype(op, "old_cell", old_cell, input);
  check_same_dtype(op, "weights", weights, input.scalar_type());

  check_dim(op, "old_h", old_h, 2, "[batch, hidden_size]");
  const c10::SymInt batch = input.sym_size(0), hidden = old_h.sym_size(1);
  CHECK_SHAPE(op, old_h, "[batch, hidden_size]", batch, hidden);
  CHECK_SHAPE(op, old_cell, "[batch, hidden_size]", batch, hidden);
  CHECK_SHAPE(op, weights, "[3*hidden_size, hidden_size+input_size]", 3 * hidden, hidden + input.sym_size(1));
  if (!bias) return;
  check_same_device(op, "bias", *bias, input);
  check_same_dtype(op, "bias", *bias, input.scalar_type());
  // Checkpoints of the tutorial's repository hold a bias of one row.
  const bool one_row = bias->dim() == 2 && bias->sym_size(0) == 1;
  check_shape(op, "bias", one_row ? bias->squeeze(0) : *bias, {3 * hidden}, "[3*hidden_size]");
}

// ((new_h, new_cell), gates [3, B, H] activated and X if `save`, pre-activations [B, 3 * H])
struct CellOutputs {
  at::Tensor new_h, new_cell, gates, X, gate_weights;
};

CellOutputs run_cell(const at::Tensor& input, const at::Tensor& weights, const OptionalTensor& bias,
                     const at::Tensor& old_h, const at::Tensor& old_cell, bool save) {
  const KernelGuard guard(input);
  const int64_t batch = input.size(0), hidden = old_h.size(1);
  CellOutputs out;
  out.X = at::cat({old_h, input}, 1);
  out.gate_weights = bias ? at::addmm(*bias, out.X, weights.t()) : at::mm(out.X, weights.t());
  out.new_h = at::empty({batch, hidden}, old_h.options());
  out.new_cell = at::empty({batch, hidden}, old_cell.options());
  if (save) out.gates = at::empty({3, batch, hidden}, old_h.options());
  if (out.new_h.numel() == 0) return out;
  const at::Tensor cell = old_cell.contiguous();
  launch_step("lltm_forward_step", out.gate_weights, cell, [&](auto type, auto cell_type, auto... stream) {
    using T = typename decltype(type)::type;
    using C = typename decltype(cell_type)::type;
    const ForwardStep<T, C> step = {
        .batch = batch,
        .hidden = hidden,
        .gates = gates_of_rows<T>(out.gate_weights),
        .old_cell = pointer<C>(cell),
        .new_cell = mutable_pointer<C>(out.new_cell),
        .new_h = mutable_pointer<T>(out.new_h),
        .activated = stacked_gates<T>(out.gates),
    };
    return lltm_forward_step(step, stream...);
  });
  return out;
}

// (new_h, new_cell)
std::tuple<at::Tensor, at::Tensor> cell(const at::Tensor& input, const at::Tensor& weights,
                                        const OptionalTensor& bias, const at::Tensor& old_h,
                                        const at::Tensor& old_cell) {
  check_cell_inputs("lltm_cell", input, weights, bias, old_h, old_cell);
  if (input.is_meta()) {
    return {at::empty_like(old_h, at::MemoryFormat::Contiguous),
            at::empty_like(old_cell, at::MemoryFormat::Contiguous)};
  }
  const CellOutputs out = run_cell(input, weights, bias, old_h, old_cell, /*save=*/false);
  return {out.new_h, out.new_cell};
}

// (new_h, new_cell, gates [3, B, H], X [B, H + I])
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> cell_forward(const at::Tensor& input,
                                                                        const at::Tensor& weights,
                                                                        const OptionalTensor& bias,
                                                                        const at::Tensor& old_h,
                                                                        const at::Tensor& old_cell) {
  check_cell_inputs("lltm_cell", input, weights, bias, old_h, old_cell);
  if (input.is_meta()) {
    const c10::SymInt batch = input.sym_size(0), hidden = old_h.sym_size(1);
    return {at::empty_like(old_h, at::MemoryFormat::Contiguous),
            at::empty_like(old_cell, at::MemoryFormat::Contiguous),
            at::empty_symint({3, batch, hidden}, old_h.options()),
            at::empty_symint({batch, hidden + input.sym_size(1)}, old_h.options())};
  }
  const CellOutputs out = run_cell(input, weights, bias, old_h, old_cell, /*save=*/true);
  return {out.new_h, out.new_cell, out.gates, out.X};
}

// (grad_X [B, H + I], grad_weights, grad_bias [1, 3 * H], grad_old_cell [B, H]); grad_X is empty unless
// `X_needs_grad`.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> cell_backward(
    const OptionalTensor& grad_h, const OptionalTensor& grad_cell, const at::Tensor& new_cell,
    const at::Tensor& gates, const at::Tensor& X, const at::Tensor& weights, bool X_needs_grad) {
  const char* op = "lltm_cell_backward";
  check_device(op, "X", X);
  check_floating(op, "X", X);
  check_dim(op, "X", X, 2, "[batch, hidden_size+input_size]");
  check_same_device(op, "new_cell", new_cell, X);
  check_cell_dtype(op, "new_cell", new_cell, X);
  check_dim(op, "new_cell", new_cell, 2, "[batch, hidden_size]");
  const c10::SymInt batch_size = X.sym_size(0), hidden_size = new_cell.sym_size(1);
  const auto check_like_X = [&](const char* name, const at::Tensor& x, c10::SymIntArrayRef shape,
                                const char* meaning) {
    check_same_device(op, name, x, X);
    check_same_dtype(op, name, x, X.scalar_type());
    check_shape(op, name, x, shape, meaning);
  };
  check_like_X("gates", gates, {3, batch_size, hidden_size}, "[3, batch, hidden_size]");
  check_like_X("weights", weights, {3 * hidden_size, X.sym_size(1)},
               "[3*hidden_size, hidden_size+input_size]");
  CHECK_SHAPE(op, new_cell, "[batch, hidden_size]", batch_size, hidden_size);
  if (grad_h) check_like_X("grad_h", *grad_h, new_cell.sym_sizes(), "[batch, hidden_size]");
  if (grad_cell) {
    check_same_device(op, "grad_cell", *grad_cell, X);
    check_same_dtype(op, "grad_cell", *grad_cell, new_cell.scalar_type());
    check_shape(op, "grad_cell", *grad_cell, new_cell.sym_sizes(), "[batch, hidden_size]");
  }
  at::Tensor grad_X = X_needs_grad ? at::Tensor() : at::empty({0}, X.options());
  if (X.is_meta()) {
    return {X_needs_grad ? at::empty_like(X) : grad_X, at::empty_like(weights, at::MemoryFormat::Contiguous),
            at::empty_symint({1, weights.sym_size(0)}, weights.options()),
            at::empty_like(new_cell, at::MemoryFormat::Contiguous)};
  }
  const KernelGuard guard(X);
  const int64_t batch = gates.size(1), hidden = gates.size(2);
  const at::Tensor grad_gates = at::empty({batch, 3 * hidden}, gates.options());
  const at::Tensor activated = gates.contiguous(), cell = new_cell.contiguous();
  const at::Tensor grad_old_cell = at::empty_like(cell);
  at::Tensor grad_bias;
  if (X.is_cuda() && batch <= kMaxBatchForBias && grad_gates.numel() > 0) {
    grad_bias = at::empty({1, 3 * hidden}, gates.options());
  }
  if (grad_gates.numel() > 0) {
    launch_step("lltm_backward_step", activated, cell, [&](auto type, auto cell_type, auto... stream) {
      using T = typename decltype(type)::type;
      using C = typename decltype(cell_type)::type;
      const BackwardStep<T, C> step = {
          .batch = batch,
          .hidden = hidden,
          .grad_h = matrix<T>(grad_h.value_or(at::Tensor())),
          .grad_cell = matrix<C>(grad_cell.value_or(at::Tensor())),
          .activated = stacked_gates<T>(activated),
          .new_cell = pointer<C>(cell),
          .grad_gates = gates_of_rows<T>(grad_gates),
          .grad_bias = mutable_pointer<T>(grad_bias),
          .grad_old_cell = mutable_pointer<C>(grad_old_cell),
      };
      return lltm_backward_step(step, stream...);
    });
  }
  if (X_needs_grad) grad_X = at::mm(grad_gates, weights);
  if (!grad_bias.defined()) grad_bias = grad_gates.sum(0, /*keepdim=*/true);
  return {grad_X, at::mm(grad_gates.t(), X), grad_bias, grad_old_cell};
}

#ifndef LLTM_EXT_STABLE_ABI
std::tuple<at::Tensor, at::Tensor> call_cell(const at::Tensor& input, const at::Tensor& weights,
                                             const OptionalTensor& bias, const at::Tensor& old_h,
                                             const at::Tensor& old_cell) {
  static const auto op = find_op<decltype(cell)>("lltm_ext::lltm_cell");
  return op.call(input, weights, bias, old_h, old_cell);
}

struct CellNode : torch::autograd::Function<CellNode> {
  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                               const at::Tensor& weights, const OptionalTensor& bias, const at::Tensor& old_h,
                               const at::Tensor& old_cell) {
    static const auto op = find_op<decltype(cell_forward)>("lltm_ext::lltm_cell_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [new_h, new_cell, gates, X] = op.call(input, weights, bias, old_h, old_cell);
    ctx->save_for_backward(
        {input, weights, bias.value_or(at::Tensor()), old_h, old_cell, new_cell, gates, X});
    ctx->set_materialize_grads(false);
    return {new_h, new_cell};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
    if (!any_defined(grad_outputs)) return variable_list(5);
    const variable_list saved = ctx->get_saved_variables();
    if (at::GradMode::is_enabled()) {
      return differentiable_gradients(composed, variable_list(saved.begin(), saved.begin() + 5),
                                      grad_outputs);
    }
    static const auto op = find_op<decltype(cell_backward)>("lltm_ext::lltm_cell_backward");
    const at::Tensor &input = saved[0], &bias = saved[2], &old_h = saved[3], &new_cell = saved[5];
    const auto optional = [](const at::Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; };
    const bool X_needs_grad = input.requires_grad() || old_h.requires_grad();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [grad_X, grad_weights, grad_bias, grad_old_cell] =
        op.call(optional(grad_outputs[0]), optional(grad_outputs[1]), new_cell, saved[6], saved[7], saved[1],
                X_needs_grad);
    const c10::SymInt hidden = new_cell.sym_size(1);
    return {input.requires_grad() ? grad_X.slice_symint(1, hidden) : at::Tensor(), grad_weights,
            bias.defined() ? grad_bias.view_symint(bias.sym_sizes()) : at::Tensor(),
            old_h.requires_grad() ? grad_X.slice_symint(1, 0, hidden) : at::Tensor(), grad_old_cell};
  }

  static variable_list composed(const variable_list& inputs) {
    const at::Tensor gates = at::cat({inputs[3], inputs[0]}, 1).mm(inputs[1].t());
    auto [new_h, new_cell] = composed_cell(inputs[2].defined() ? gates + inputs[2] : gates, inputs[4]);
    return {new_h, new_cell};
  }
};

std::tuple<at::Tensor, at::Tensor> cell_autograd(const at::Tensor& input, const at::Tensor& weights,
                                                 const OptionalTensor& bias, const at::Tensor& old_h,
                                                 const at::Tensor& old_cell) {
  if (any_needs_grad(input, weights, bias, old_h, old_cell)) {
    const variable_list outputs = CellNode::apply(input, weights, bias, old_h, old_cell);
    return {outputs[0], outputs[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_cell(input, weights, bias, old_h, old_cell);
}

// Everything but the cell state, which float32 serves best.
std::tuple<at::Tensor, at::Tensor> cell_autocast(const at::Tensor& input, const at::Tensor& weights,
                                                 const OptionalTensor& bias, const at::Tensor& old_h,
                                                 const at::Tensor& old_cell) {
  const AutocastInputs cast(input);
  return call_cell(cast(input), cast(weights), cast(bias), cast(old_h), old_cell);
}
#endif

// The raw bindings, of the tutorial's contract.

variable_list raw_forward(const at::Tensor& input, const at::Tensor& weights, const OptionalTensor& bias,
                          const at::Tensor& old_h, const at::Tensor& old_cell) {
  const char* op = "lltm.forward";
  CHECK_INPUT(op, input);
  CHECK_INPUT(op, weights);
  CHECK_INPUT(op, old_h);
  CHECK_INPUT(op, old_cell);
  if (bias) check_contiguous(op, "bias", *bias);
  check_cell_inputs(op, input, weights, bias, old_h, old_cell);
  const CellOutputs out = run_cell(input, weights, bias, old_h, old_cell, /*save=*/true);
  return {out.new_h, out.new_cell, out.gates[0], out.gates[1], out.gates[2], out.X, out.gate_weights};
}

variable_list raw_backward(const at::Tensor& grad_h, const at::Tensor& grad_cell, const at::Tensor& new_cell,
                           const at::Tensor& input_gate, const at::Tensor& output_gate,
                           const at::Tensor& candidate_cell, const at::Tensor& X,
                           const at::Tensor& gate_weights, const at::Tensor& weights) {
  const char* op = "lltm.backward";
  CHECK_INPUT(op, weights);
  check_dim(op, "weights", weights, 2, "[3*hidden_size, hidden_size+input_size]");
  CHECK_INPUT(op, X);
  check_dim(op, "X", X, 2, "[batch, hidden_size+input_size]");
  const c10::SymInt batch = X.sym_size(0), hidden = weights.sym_size(0) / 3;
  CHECK_SAME(op, X, weights);
  CHECK_SHAPE(op, X, "[batch, hidden_size+input_size]", batch, weights.sym_size(1));
  const auto check_state = [&](const char* name, const at::Tensor& x) {
    check_contiguous(op, name, x);
    check_same_device(op, name, x, weights);
    check_shape(op, name, x, {batch, hidden}, "[batch, hidden_size]");
  };
  check_state("grad_h", grad_h);
  check_state("grad_cell", grad_cell);
  check_state("new_cell", new_cell);
  check_state("input_gate", input_gate);
  check_state("output_gate", output_gate);
  check_state("candidate_cell", candidate_cell);
  for (const auto& [name, x] : {std::pair<const char*, const at::Tensor&>{"grad_h", grad_h},
                                {"input_gate", input_gate},
                                {"output_gate", output_gate},
                                {"candidate_cell", candidate_cell},
                                {"gate_weights", gate_weights}}) {
    check_same_dtype(op, name, x, weights.scalar_type());
  }
  check_cell_dtype(op, "new_cell", new_cell, weights);
  check_same_dtype(op, "grad_cell", grad_cell, new_cell.scalar_type());
  check_same_device(op, "gate_weights", gate_weights, weights);
  CHECK_CONTIGUOUS(op, gate_weights);
  CHECK_SHAPE(op, gate_weights, "[batch, 3*hidden_size]", batch, 3 * hidden);

  const KernelGuard guard(X);
  auto [grad_X, grad_weights, grad_bias, grad_old_cell] = cell_backward(
      grad_h, grad_cell, new_cell, at::stack({input_gate, output_gate, candidate_cell}), X, weights,
      /*X_needs_grad=*/true);
  const int64_t h = new_cell.size(1);
  return {grad_X.slice(1, 0, h), grad_X.slice(1, h), grad_weights, grad_bias, grad_old_cell};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  m.def(
      "lltm_cell(Tensor input, Tensor weights, Tensor? bias, Tensor old_h, Tensor old_cell) -> (Tensor, "
      "Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "lltm_cell_forward(Tensor input, Tensor weights, Tensor? bias, Tensor old_h, Tensor old_cell) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "lltm_cell_backward(Tensor? grad_h, Tensor? grad_cell, Tensor new_cell, Tensor gates, Tensor X, "
      "Tensor weights, bool X_needs_grad) -> (Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  implement<cell>(m, "lltm_cell");
  implement<cell_forward>(m, "lltm_cell_forward");
  implement<cell_backward>(m, "lltm_cell_backward");
#ifndef LLTM_EXT_STABLE_ABI
  implement_autograd(m, "lltm_cell", cell_autograd);
  implement_autocast(m, "lltm_cell", cell_autocast);
#endif
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", torch::wrap_pybind_function_no_gil(raw_forward), py::arg("input"), py::arg("weights"),
        py::arg("bias"), py::arg("old_h"), py::arg("old_cell"));
  m.def("backward", torch::wrap_pybind_function_no_gil(raw_backward), py::arg("grad_h"), py::arg("grad_cell"),
        py::arg("new_cell"), py::arg("input_gate"), py::arg("output_gate"), py::arg("candidate_cell"),
        py::arg("X"), py::arg("gate_weights"), py::arg("weights"));
}
#endif

}  // namespace lltm_ext
