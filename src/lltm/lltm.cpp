// lltm, one step: tensors in, tensors out. Dispatcher op lltm_ext::lltm_cell, lltm_cell_forward and
// lltm_cell_backward for its autograd function, and the raw bindings lltm_ext._C.lltm.forward and backward of
// the tutorial. B is the batch, I the input size, H the hidden size; X is [old_h, input], in the order of the
// weights' columns.
#include "lltm/lltm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <climits>

#include "common/dispatch.h"
#include "common/library.h"
#include "common/matmul.h"
#include "common/optional_tensor.h"
#include "common/python.h"

namespace lltm_ext {
namespace {

using torch::autograd::variable_list;

at::Tensor empty_contiguous(const at::Tensor& x) { return at::empty_like(x, at::MemoryFormat::Contiguous); }

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

// Calls f(Type<T>{}, Type<C>{}, stream...) with the types of gates and cell.
template <typename F>
void launch_cell(const char* kernel, const at::Tensor& gates, const at::Tensor& cell, F&& f) {
  launch(kernel, gates, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    if (cell.scalar_type() == gates.scalar_type()) return f(type, type, stream...);
    return f(type, Type<acc_t<T>>{}, stream...);
  });
}

// A step's (new_h, new_cell), and if `save` the activated gates [3, B, H].
struct CellOutputs {
  at::Tensor new_h, new_cell, gates;

  CellOutputs(const at::Tensor& old_h, const at::Tensor& old_cell, bool save)
      : new_h(empty_contiguous(old_h)), new_cell(empty_contiguous(old_cell)) {
    if (save) gates = at::empty_symint({3, old_h.sym_size(0), old_h.sym_size(1)}, old_h.options());
  }

  template <typename T, typename C>
  StepForwardArguments<T, C> arguments(const at::Tensor& old_cell) const {
    const int64_t batch = new_h.size(0), hidden = new_h.size(1);
    return {.batch = batch,
            .hidden = hidden,
            .old_states = pointer<C>(old_cell),
            .new_states = mutable_pointer<C>(new_cell),
            .h = mutable_pointer<T>(new_h),
            .saved = Gates<T>::gate_major(mutable_pointer<T>(gates), batch, hidden)};
  }
};

// Runs the cell on the gates' pre-activations [B, 3 * H].
void run_pointwise(const CellOutputs& out, const at::Tensor& gates, const at::Tensor& old_cell) {
  if (out.new_h.numel() == 0) return;
  launch_cell("recurrence_pointwise_forward", gates, old_cell,
              [&](auto type, auto cell_type, auto... stream) {
                using T = typename decltype(type)::type;
                using C = typename decltype(cell_type)::type;
                StepForwardArguments<T, C> step = out.arguments<T, C>(old_cell);
                step.gates = Gates<const T>::row_major(pointer<T>(gates), 3, step.hidden);
                return recurrence_step<LltmOneStepCell>(step, stream...);
              });
}

// Copies X together for a library's product: a second product costs more than the copy.
at::Tensor concatenate(const at::Tensor& old_h, const at::Tensor& input) {
  return at::cat({old_h, input}, 1);
}
at::Tensor gate_products(const at::Tensor& X, const at::Tensor& weights, const OptionalTensor& bias) {
  return bias ? at::addmm(*bias, X, weights.t()) : at::mm(X, weights.t());
}

#ifdef LLTM_EXT_WITH_CUDA
// Whether the fused kernels can run this step, and are the fastest. Their offsets have 32 bits.
bool uses_fused_cell(const at::Tensor& input, const at::Tensor& weights, const at::Tensor& old_h) {
  const auto fits = [](const at::Tensor& x) { return x.size(0) * x.stride(0) < INT_MAX && x.stride(1) == 1; };
  return input.is_cuda() && input.scalar_type() != at::kDouble && old_h.numel() > 0 &&
         fused_cell_pays(input.size(0), old_h.size(1), weights.size(1)) && fits(input) && fits(weights) &&
         fits(old_h);
}

// Calls f(Type<T>{}, Type<C>{}, stream).
template <typename F>
void launch_fused_cell_on_stream(const char* kernel, const at::Tensor& gates, const at::Tensor& cell, F&& f) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(gates.get_device());
  const auto call = [&](auto type) {
    const bool is_narrow = cell.scalar_type() == gates.scalar_type();
    check_launch(kernel, is_narrow ? f(type, type, stream) : f(type, Type<float>{}, stream));
  };
  if (gates.scalar_type() == at::kHalf) return call(Type<__half>{});
  if (gates.scalar_type() == at::kBFloat16) return call(Type<__nv_bfloat16>{});
  call(Type<float>{});
}

template <typename T>
CellInput<T> cell_input(const at::Tensor& input, const at::Tensor& old_h) {
  const int hidden = static_cast<int>(old_h.size(1));
  return {.old_h = pointer<T>(old_h),
          .input = pointer<T>(input),
          .old_h_row = static_cast<int>(old_h.stride(0)),
          .input_row = static_cast<int>(input.stride(0)),
          .hidden = hidden,
          .columns = hidden + static_cast<int>(input.size(1))};
}
#endif

CellOutputs run_cell(const at::Tensor& input, const at::Tensor& weights, const OptionalTensor& bias,
                     const at::Tensor& old_h, const at::Tensor& old_cell, bool save) {
  check_cell_inputs("lltm_cell", input, weights, bias, old_h, old_cell);
  const KernelGuard guard(input);
  const CellOutputs out(old_h, old_cell, save);
  if (input.is_meta()) return out;
  const at::Tensor cell = old_cell.contiguous();
#ifdef LLTM_EXT_WITH_CUDA
  if (uses_fused_cell(input, weights, old_h)) {
    const at::Tensor bias_row = bias ? bias->contiguous() : at::Tensor();
    launch_fused_cell_on_stream(
        "lltm_fused_cell_forward", input, cell, [&](auto type, auto cell_type, auto stream) {
          using T = typename decltype(type)::type;
          using C = typename decltype(cell_type)::type;
          const FusedCellForwardArguments<T, C> args = {.step = out.arguments<T, C>(cell),
                                                        .X = cell_input<T>(input, old_h),
                                                        .weights = pointer<T>(weights),
                                                        .weights_row = static_cast<int>(weights.stride(0)),
                                                        .bias = pointer<T>(bias_row)};
          return launch_fused_cell(args, stream);
        });
    return out;
  }
#endif
  run_pointwise(out, gate_products(concatenate(old_h, input), weights, bias), cell);
  return out;
}

// Returns (new_h, new_cell).
std::tuple<at::Tensor, at::Tensor> cell(const at::Tensor& input, const at::Tensor& weights,
                                        const OptionalTensor& bias, const at::Tensor& old_h,
                                        const at::Tensor& old_cell) {
  const CellOutputs out = run_cell(input, weights, bias, old_h, old_cell, /*save=*/false);
  return {out.new_h, out.new_cell};
}

// Returns (new_h, new_cell, gates [3, B, H]).
std::tuple<at::Tensor, at::Tensor, at::Tensor> cell_forward(const at::Tensor& input,
                                                            const at::Tensor& weights,
                                                            const OptionalTensor& bias,
                                                            const at::Tensor& old_h,
                                                            const at::Tensor& old_cell) {
  const CellOutputs out = run_cell(input, weights, bias, old_h, old_cell, /*save=*/true);
  return {out.new_h, out.new_cell, out.gates};
}

// The gradients of input, weights, bias [3 * H], old_h and old_cell. That of input, old_h or old_cell is
// undefined unless it is needed.
using OneStepGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void check_cell_backward(const char* op, const OptionalTensor& grad_h, const OptionalTensor& grad_cell,
                         const at::Tensor& new_cell, const at::Tensor& gates, const at::Tensor& input,
                         const at::Tensor& weights, const at::Tensor& old_h) {
  check_device(op, "input", input);
  check_floating(op, "input", input);
  check_dim(op, "input", input, 2, "[batch, input_size]");
  check_same_device(op, "new_cell", new_cell, input);
  check_cell_dtype(op, "new_cell", new_cell, input);
  check_dim(op, "new_cell", new_cell, 2, "[batch, hidden_size]");
  const c10::SymInt batch = input.sym_size(0), hidden = new_cell.sym_size(1);
  CHECK_SHAPE(op, new_cell, "[batch, hidden_size]", batch, hidden);
  const auto check_like_input = [&](const char* name, const at::Tensor& x, c10::SymIntArrayRef shape,
                                    const char* meaning) {
    check_same_device(op, name, x, input);
    check_same_dtype(op, name, x, input.scalar_type());
    check_shape(op, name, x, shape, meaning);
  };
  check_like_input("gates", gates, {3, batch, hidden}, "[3, batch, hidden_size]");
  check_like_input("weights", weights, {3 * hidden, hidden + input.sym_size(1)},
                   "[3*hidden_size, hidden_size+input_size]");
  check_like_input("old_h", old_h, new_cell.sym_sizes(), "[batch, hidden_size]");
  if (grad_h) check_like_input("grad_h", *grad_h, new_cell.sym_sizes(), "[batch, hidden_size]");
  if (grad_cell) {
    check_same_device(op, "grad_cell", *grad_cell, input);
    check_same_dtype(op, "grad_cell", *grad_cell, new_cell.scalar_type());
    check_shape(op, "grad_cell", *grad_cell, new_cell.sym_sizes(), "[batch, hidden_size]");
  }
}

template <typename T>
StridedGradient<T> strided_gradient(const OptionalTensor& x) {
  return x ? StridedGradient<T>{pointer<T>(*x), x->stride(0), x->stride(1)} : StridedGradient<T>{};
}

OneStepGradients cell_backward(const OptionalTensor& grad_h, const OptionalTensor& grad_cell,
                               const at::Tensor& new_cell, const at::Tensor& gates, const at::Tensor& input,
                               const at::Tensor& weights, const at::Tensor& old_h, bool input_needs_grad,
                               bool old_h_needs_grad, bool old_cell_needs_grad) {
  check_cell_backward("lltm_cell_backward", grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  const auto gradient_of = [](const at::Tensor& x, bool needed) {
    return needed ? empty_contiguous(x) : at::Tensor();
  };
  at::Tensor grad_weights = gradient_of(weights, true), grad_input = gradient_of(input, input_needs_grad),
             grad_old_h = gradient_of(old_h, old_h_needs_grad),
             grad_old_cell = gradient_of(new_cell, old_cell_needs_grad),
             grad_bias = at::empty_symint({weights.sym_size(0)}, weights.options());
  if (input.is_meta()) return {grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell};
  const KernelGuard guard(input);
  const at::Tensor saved = gates.contiguous(), cell = new_cell.contiguous();
  const int64_t batch = gates.size(1), hidden = gates.size(2);
  const auto arguments = [&](auto type, auto cell_type) {
    using T = typename decltype(type)::type;
    using C = typename decltype(cell_type)::type;
    return StepBackwardArguments<T, C, C>{
        .batch = batch,
        .hidden = hidden,
        .saved = Gates<const T>::gate_major(pointer<T>(saved), batch, hidden),
        .extra = pointer<C>(cell),
        .grad_output = strided_gradient<T>(grad_h),
        .grad_new_states = strided_gradient<C>(grad_cell),
        .grad_old_states = mutable_pointer<C>(grad_old_cell),
        .grad_bias = mutable_pointer<T>(grad_bias)};
  };
#ifdef LLTM_EXT_WITH_CUDA
  if (uses_fused_cell(input, weights, old_h)) {
    launch_fused_cell_on_stream("lltm_fused_cell_backward", saved, cell,
                                [&](auto type, auto cell_type, auto stream) {
                                  using T = typename decltype(type)::type;
                                  using C = typename decltype(cell_type)::type;
                                  const FusedCellBackwardArguments<T, C> args = {
                                      .step = arguments(type, cell_type),
                                      .X = cell_input<T>(input, old_h),
                                      .weights = pointer<T>(weights),
                                      .weights_row = static_cast<int>(weights.stride(0)),
                                      .grad_weights = mutable_pointer<T>(grad_weights),
                                      .grad_old_h = mutable_pointer<T>(grad_old_h),
                                      .grad_input = mutable_pointer<T>(grad_input),
                                  };
                                  return launch_fused_cell(args, stream);
                                });
    return {grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell};
  }
#endif
  const at::Tensor grad_gates = at::empty({batch, 3 * hidden}, gates.options());
  const bool sums_bias = input.is_cuda() && batch <= kMaxBatchForBias && grad_gates.numel() > 0;
  if (grad_gates.numel() > 0) {
    launch_cell("recurrence_pointwise_backward", saved, cell, [&](auto type, auto cell_type, auto... stream) {
      using T = typename decltype(type)::type;
      auto step = arguments(type, cell_type);
      step.grad_gates = Gates<T>::row_major(mutable_pointer<T>(grad_gates), 3, hidden);
      if (!sums_bias) step.grad_bias = nullptr;
      return recurrence_step<LltmOneStepCell>(step, stream...);
    });
  }
  if (!sums_bias) at::sum_out(grad_bias, grad_gates, 0);
  at::mm_out(grad_weights, grad_gates.t(), concatenate(old_h, input));
  if (input_needs_grad && old_h_needs_grad) {
    const at::Tensor both = affine(grad_gates, weights, std::nullopt);
    grad_old_h.copy_(both.slice(1, 0, hidden)), grad_input.copy_(both.slice(1, hidden));
  } else if (input_needs_grad) {
    at::mm_out(grad_input, grad_gates, weights.slice(1, hidden));
  } else if (old_h_needs_grad) {
    at::mm_out(grad_old_h, grad_gates, weights.slice(1, 0, hidden));
  }
  return {grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell};
}

// The tutorial's raw bindings.

variable_list raw_forward(const at::Tensor& input, const at::Tensor& weights, const OptionalTensor& bias,
                          const at::Tensor& old_h, const at::Tensor& old_cell) {
  const char* op = "lltm.forward";
  CHECK_INPUT(op, input);
  CHECK_INPUT(op, weights);
  CHECK_INPUT(op, old_h);
  CHECK_INPUT(op, old_cell);
  if (bias) check_contiguous(op, "bias", *bias);
  check_cell_inputs(op, input, weights, bias, old_h, old_cell);
  const KernelGuard guard(input);
  const CellOutputs out(old_h, old_cell, /*save=*/true);
  const at::Tensor X = concatenate(old_h, input), gate_weights = gate_products(X, weights, bias);
  run_pointwise(out, gate_weights, old_cell);
  return {out.new_h, out.new_cell, out.gates[0], out.gates[1], out.gates[2], X, gate_weights};
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
  const int64_t h = new_cell.size(1);
  auto [grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell] = cell_backward(
      grad_h, grad_cell, new_cell, at::stack({input_gate, output_gate, candidate_cell}), X.slice(1, h),
      weights, X.slice(1, 0, h), /*input_needs_grad=*/true, /*old_h_needs_grad=*/true,
      /*old_cell_needs_grad=*/true);
  return {grad_old_h, grad_input, grad_weights, grad_bias.unsqueeze(0), grad_old_cell};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  for (const std::string name : {"lltm_cell", "lltm_cell_composed"}) {
    m.def((name + "(Tensor input, Tensor weights, Tensor? bias, Tensor old_h, Tensor old_cell) -> (Tensor, "
                  "Tensor)")
              .c_str(),
          {at::Tag::pt2_compliant_tag});
  }
  m.def(
      "lltm_cell_forward(Tensor input, Tensor weights, Tensor? bias, Tensor old_h, Tensor old_cell) "
      "-> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "lltm_cell_backward(Tensor? grad_h, Tensor? grad_cell, Tensor new_cell, Tensor gates, Tensor input, "
      "Tensor weights, Tensor old_h, bool input_needs_grad, bool old_h_needs_grad, "
      "bool old_cell_needs_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  implement<cell>(m, "lltm_cell");
  implement<cell_forward>(m, "lltm_cell_forward");
  implement<cell_backward>(m, "lltm_cell_backward");
}

#ifdef TORCH_EXTENSION_NAME
void share_lltm();  // lltm_sequence.cpp

namespace {
std::tuple<at::Tensor, at::Tensor> call_lltm_cell(const at::Tensor& input, const at::Tensor& weights,
                                                  const OptionalTensor& bias, const at::Tensor& old_h,
                                                  const at::Tensor& old_cell) {
  return call_op<call_lltm_cell>("lltm_ext::lltm_cell", input, weights, bias, old_h, old_cell);
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  share_lltm();
  m.def("forward", torch::wrap_pybind_function_no_gil(raw_forward), py::arg("input"), py::arg("weights"),
        py::arg("bias"), py::arg("old_h"), py::arg("old_cell"));
  m.def("backward", torch::wrap_pybind_function_no_gil(raw_backward), py::arg("grad_h"), py::arg("grad_cell"),
        py::arg("new_cell"), py::arg("input_gate"), py::arg("output_gate"), py::arg("candidate_cell"),
        py::arg("X"), py::arg("gate_weights"), py::arg("weights"));
  // Calls the dispatcher's op from Python in half of the host time of torch.ops.
  m.def("call_lltm_cell", torch::wrap_pybind_function_no_gil(call_lltm_cell), py::arg("input"),
        py::arg("weights"), py::arg("bias"), py::arg("old_h"), py::arg("old_cell"));
}
#endif

}  // namespace lltm_ext
