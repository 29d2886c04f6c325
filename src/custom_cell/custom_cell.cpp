// A user's recurrent cell over a whole sequence: the dispatcher ops lltm_ext::custom_cell,
// custom_cell_forward, custom_cell_backward and custom_cell_algorithm, whose argument `program` is the cell
// (program.h). Autocast and the CPU are in Python (lltm_ext/recurrence.py), and so is custom_cell_by_loop,
// the cell in torch's differentiable ops for the double backward. Raw bindings:
// lltm_ext._C.custom_cell.source, compile and compilations.
//
// T is the length, B the batch, I the input size, H the hidden size; G, S, P, K and E as in
// recurrence/cell.h.
#include "common/differentiable.h"
#include "common/function.h"
#include "common/library.h"
#include "common/python.h"
#include "common/runtime/compiler.h"
#include "custom_cell/compile.h"
#include "custom_cell/kernels.h"
#include "recurrence/tensors/backward.h"
#include "recurrence/tensors/forward.h"

namespace lltm_ext {
namespace {

using c10::string_view;

using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // output, h_n, states_n

// The arguments of all ops; without h0 or states they are zeros. Shapes: input [T, B, I], or packed rows [N,
// I] with their batch_sizes; h0 [B, H]; states [S, B, H]; weight_ih [G * H, I]; weight_hh [G * H, H]; bias [G
// * H]; parameters [P, H]; step_inputs [T, B, K * H] or [N, K * H]; reset [T, B] or [N].
constexpr const char* kSchema =
    "Tensor input, Tensor? h0, Tensor? states, Tensor weight_ih, Tensor? weight_hh, Tensor? bias, "
    "Tensor? parameters, Tensor? step_inputs, Tensor? reset, int[]? batch_sizes, bool reverse, str "
    "algorithm, "
    "str program";

Direction direction_of(const OptionalTensor& h0, const OptionalTensor& states, const at::Tensor& weight_ih,
                       const OptionalTensor& weight_hh, const OptionalTensor& bias,
                       const OptionalTensor& parameters, const OptionalTensor& step_inputs,
                       const OptionalTensor& reset, bool reverse) {
  return {or_undefined(h0),
          or_undefined(states),
          weight_ih,
          or_undefined(weight_hh),
          bias,
          reverse,
          or_undefined(parameters),
          or_undefined(step_inputs),
          or_undefined(reset)};
}

CustomCellOp op_for(string_view program, const at::Tensor& input) {
  const CustomCellOp op(CellProgram::get(program));
  op.check_device(input);
  return op;
}

variable_list run_forward(const at::Tensor& input, const Direction& direction,
                          at::OptionalIntArrayRef batch_sizes, string_view algorithm, string_view program,
                          bool save) {
  const ForwardOps<CustomCellOp> ops{op_for(program, input)};
  return ops.check_and_run(input, direction, batch_sizes, algorithm, save);
}

// (output [T, B, H], h_n [B, H], states_n [S, B, H])
Outputs custom_cell(const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& states,
                    const at::Tensor& weight_ih, const OptionalTensor& weight_hh, const OptionalTensor& bias,
                    const OptionalTensor& parameters, const OptionalTensor& step_inputs,
                    const OptionalTensor& reset, at::OptionalIntArrayRef batch_sizes, bool reverse,
                    string_view algorithm, string_view program) {
  const Direction direction =
      direction_of(h0, states, weight_ih, weight_hh, bias, parameters, step_inputs, reset, reverse);
#ifndef LLTM_EXT_STABLE_ABI
  if (!is_in_eights(direction.weight_hh)) {  // asked first, because finding the program hashes its text
    const CustomCellOp op = op_for(program, input);
    if (adds_units(op, input, direction.weight_hh, batch_sizes, algorithm)) {
      return run_with_added_units(op, input, direction, batch_sizes, algorithm, [&](const Direction& d) {
        return custom_cell(input, if_defined(d.h0), if_defined(d.states), d.weight_ih, d.weight_hh, d.bias,
                           if_defined(d.parameters), if_defined(d.step_inputs), reset, batch_sizes, reverse,
                           algorithm, program);
      });
    }
  }
#endif
  const variable_list y = run_forward(input, direction, batch_sizes, algorithm, program, /*save=*/false);
  return {y[0], y[1], y[2]};
}

// As above, and for the backward (gates [T, B, G * H], extra [T, B, E * H], h [T, B, H] of every step, or
// [T, B, 0] if that is the output).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> custom_cell_forward(
    const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& states,
    const at::Tensor& weight_ih, const OptionalTensor& weight_hh, const OptionalTensor& bias,
    const OptionalTensor& parameters, const OptionalTensor& step_inputs, const OptionalTensor& reset,
    at::OptionalIntArrayRef batch_sizes, bool reverse, string_view algorithm, string_view program) {
  const Direction direction =
      direction_of(h0, states, weight_ih, weight_hh, bias, parameters, step_inputs, reset, reverse);
  const variable_list y = run_forward(input, direction, batch_sizes, algorithm, program, /*save=*/true);
  return {y[0], y[1], y[2], y[3], y[4], y.size() > 5 ? y[5] : empty_like_input(input, 0)};
}

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
                                   string_view program, bool input_needs_grad, bool bias_needs_grad) {
  const Direction direction =
      direction_of(h0, states, weight_ih, weight_hh, bias, parameters, step_inputs, reset, reverse);
  using Backward = BackwardOps<CustomCellOp>;
  const Backward::BackwardInputs given = {grad_output, grad_h_n, grad_states_n, h, gates, extra};
  const Gradients g = Backward{op_for(program, input)}.check_and_run(
      input, direction, given, batch_sizes, algorithm, input_needs_grad, bias_needs_grad)[0];
  variable_list gradients = {g.input, g.h0, g.states, g.weight_ih, g.weight_hh, g.bias, g.parameters};
  for (at::Tensor& x : gradients) {
    if (!x.defined()) x = at::empty({0}, input.options());
  }
  return gradients;
}

// The algorithm that a call would take.
std::string custom_cell_algorithm(const at::Tensor& input, const OptionalTensor& h0,
                                  const OptionalTensor& states, const at::Tensor& weight_ih,
                                  const OptionalTensor& weight_hh, const OptionalTensor& bias,
                                  const OptionalTensor& parameters, const OptionalTensor& step_inputs,
                                  const OptionalTensor& reset, at::OptionalIntArrayRef batch_sizes,
                                  bool reverse, string_view algorithm, string_view program, bool backward) {
  const CustomCellOp op = op_for(program, input);
  const std::string name = op.name();
  const Direction direction =
      direction_of(h0, states, weight_ih, weight_hh, bias, parameters, step_inputs, reset, reverse);
  check_inputs(op, name.c_str(), input, direction, batch_sizes, algorithm);
  const KernelGuard guard(input);
  const SequenceSizes sizes(op.shape(), input, direction, batch_sizes);
  const int64_t hidden =
      hidden_of_kernels(op, input, sizes.hidden, direction.weight_hh, batch_sizes, algorithm);
  return name_of(
      plan_for(op, name.c_str(), input, sizes.batch, hidden, !batch_sizes, backward, algorithm).algorithm);
}

#ifndef LLTM_EXT_STABLE_ABI
// ---- autograd

struct CustomCellFunction : Function<CustomCellFunction> {
  static constexpr size_t kArguments = 13, kDifferentiable = 7, kTensors = 9;

  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                               const OptionalTensor& h0, const OptionalTensor& states,
                               const at::Tensor& weight_ih, const OptionalTensor& weight_hh,
                               const OptionalTensor& bias, const OptionalTensor& parameters,
                               const OptionalTensor& step_inputs, const OptionalTensor& reset,
                               at::OptionalIntArrayRef batch_sizes, bool reverse, string_view algorithm,
                               string_view program) {
    static const auto op = find_op<decltype(custom_cell_forward)>("lltm_ext::custom_cell_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [output, h_n, states_n, gates, extra, h] =
        op.call(input, h0, states, weight_ih, weight_hh, bias, parameters, step_inputs, reset, batch_sizes,
                reverse, algorithm, program);
    ctx->save_for_backward({input, or_undefined(h0), or_undefined(states), weight_ih, or_undefined(weight_hh),
                            or_undefined(bias), or_undefined(parameters), or_undefined(step_inputs),
                            or_undefined(reset), CellProgram::get(program).shape.outputs_state() ? h : output,
                            gates, extra});
    ctx->set_materialize_grads(false);
    if (batch_sizes) ctx->saved_data["batch_sizes"] = batch_sizes->vec();
    ctx->saved_data["reverse"] = reverse;
    ctx->saved_data["algorithm"] = std::string(algorithm);
    ctx->saved_data["program"] = std::string(program);
    return {output, h_n, states_n};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
    variable_list gradients(kArguments);
    if (!any_defined(grad_outputs)) return gradients;
    const variable_list x = ctx->get_saved_variables();
    const auto entry = ctx->saved_data.find("batch_sizes");
    std::optional<std::vector<int64_t>> sizes;
    if (entry != ctx->saved_data.end()) sizes = entry->second.toIntVector();
    const at::OptionalIntArrayRef batch_sizes(sizes);
    const bool reverse = ctx->saved_data["reverse"].toBool();
    const std::string algorithm = ctx->saved_data["algorithm"].toStringRef(),
                      program = ctx->saved_data["program"].toStringRef();
    const auto needs = [&](size_t i) { return x[i].defined() && x[i].requires_grad(); };
    if (at::GradMode::is_enabled()) {
      static const auto by_loop = find_op<decltype(custom_cell)>("lltm_ext::custom_cell_by_loop");
      const auto composed = [&](const variable_list& y) -> variable_list {
        const auto [output, h_n, states_n] = by_loop.call(
            y[0], if_defined(y[1]), if_defined(y[2]), y[3], if_defined(y[4]), if_defined(y[5]),
            if_defined(y[6]), if_defined(x[7]), if_defined(x[8]), batch_sizes, reverse, algorithm, program);
        return {output, h_n, states_n};
      };
      gradients = differentiable_gradients(composed, variable_list(x.begin(), x.begin() + kDifferentiable),
                                           grad_outputs);
      gradients.resize(kArguments);
      return gradients;
    }
    static const auto op = find_op<decltype(custom_cell_backward)>("lltm_ext::custom_cell_backward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const variable_list found =
        op.call(if_defined(grad_outputs[0]), if_defined(grad_outputs[1]), if_defined(grad_outputs[2]),
                x[kTensors], x[kTensors + 1], x[kTensors + 2], x[0], if_defined(x[1]), if_defined(x[2]), x[3],
                if_defined(x[4]), if_defined(x[5]), if_defined(x[6]), if_defined(x[7]), if_defined(x[8]),
                batch_sizes, reverse, algorithm, program, needs(0), needs(5));
    for (size_t i = 0; i < kDifferentiable; ++i) {
      if (needs(i)) gradients[i] = found[i];
    }
    return gradients;
  }
};

Outputs custom_cell_autograd(const at::Tensor& input, const OptionalTensor& h0, const OptionalTensor& states,
                             const at::Tensor& weight_ih, const OptionalTensor& weight_hh,
                             const OptionalTensor& bias, const OptionalTensor& parameters,
                             const OptionalTensor& step_inputs, const OptionalTensor& reset,
                             at::OptionalIntArrayRef batch_sizes, bool reverse, string_view algorithm,
                             string_view program) {
  if (any_needs_grad(input, h0, states, weight_ih, weight_hh, bias, parameters)) {
    if (!is_in_eights(or_undefined(weight_hh))) {
      const CustomCellOp of = op_for(program, input);
      if (adds_units(of, input, *weight_hh, batch_sizes, algorithm)) {
        const Direction direction =
            direction_of(h0, states, weight_ih, weight_hh, bias, parameters, step_inputs, reset, reverse);
        return run_with_added_units(of, input, direction, batch_sizes, algorithm, [&](const Direction& d) {
          return custom_cell_autograd(input, if_defined(d.h0), if_defined(d.states), d.weight_ih, d.weight_hh,
                                      d.bias, if_defined(d.parameters), if_defined(d.step_inputs), reset,
                                      batch_sizes, reverse, algorithm, program);
        });
      }
    }
    const variable_list y =
        CustomCellFunction::apply(input, h0, states, weight_ih, weight_hh, bias, parameters, step_inputs,
                                  reset, batch_sizes, reverse, algorithm, program);
    return {y[0], y[1], y[2]};
  }
  static const auto op = find_op<decltype(custom_cell)>("lltm_ext::custom_cell");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(input, h0, states, weight_ih, weight_hh, bias, parameters, step_inputs, reset, batch_sizes,
                 reverse, algorithm, program);
}

// ---- the two biases of nn.RNN

// Their gradients are equal, but each has memory of its own: a user may scale one in place.
struct AddBiases : torch::autograd::Function<AddBiases> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& bias_ih,
                            const at::Tensor& bias_hh) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return bias_ih + bias_hh;
  }
  static variable_list backward(torch::autograd::AutogradContext*, const variable_list& grads) {
    return {grads[0], grads[0].clone()};
  }
};

at::Tensor add_biases(const at::Tensor& bias_ih, const at::Tensor& bias_hh) { return bias_ih + bias_hh; }
at::Tensor add_biases_autograd(const at::Tensor& bias_ih, const at::Tensor& bias_hh) {
  return AddBiases::apply(bias_ih, bias_hh);
}

#endif

// ---- Raw bindings. A kernel is given by the fields of CellKernel.

std::string source(const std::string& program, at::ScalarType type, bool backward, int variant,
                   int fused_rows, const std::string& reset, int independent_units, int few_rows) {
  return CellProgram::get(program).source(
      {type, backward, variant, fused_rows, reset, independent_units, few_rows});
}

std::string compile_binary(const std::string& program, at::ScalarType type, bool backward, int variant,
                           const std::string& architecture, int fused_rows, const std::string& reset,
                           int independent_units, int few_rows) {
  return compile_cell(CellProgram::get(program),
                      {type, backward, variant, fused_rows, reset, independent_units, few_rows},
                      architecture);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  const auto def = [&](const std::string& name, const std::string& before, const std::string& after) {
    m.def((name + "(" + before + kSchema + after).c_str(), {at::Tag::pt2_compliant_tag});
  };
  def("custom_cell", "", ") -> (Tensor, Tensor, Tensor)");
  def("custom_cell_by_loop", "", ") -> (Tensor, Tensor, Tensor)");
  def("custom_cell_forward", "", ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("custom_cell_backward",
      "Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_states_n, Tensor h, Tensor gates, "
      "Tensor extra, ",
      ", bool input_needs_grad, bool bias_needs_grad) -> Tensor[]");
  def("custom_cell_algorithm", "", ", bool backward) -> str");
  implement<custom_cell>(m, "custom_cell");
  implement<custom_cell_forward>(m, "custom_cell_forward");
  implement<custom_cell_backward>(m, "custom_cell_backward");
  implement<custom_cell_algorithm>(m, "custom_cell_algorithm");
#ifdef LLTM_EXT_STABLE_ABI
  const std::string kernel = ", int fused_rows=0, str reset='', int independent_units=0, int few_rows=0) -> ";
  m.def(("custom_cell_source(str program, ScalarType dtype, bool backward, int variant" + kernel + "str")
            .c_str(),
        {});
  m.def(("custom_cell_compile(str program, ScalarType dtype, bool backward, int variant, str architecture" +
         kernel + "Tensor")
            .c_str(),
        {});
  m.def("custom_cell_compilations() -> int", {});
  implement<source>(m, "custom_cell_source");
  implement<at::AsTensor<compile_binary>::call>(m, "custom_cell_compile");
  implement<compilations>(m, "custom_cell_compilations");
#else
  implement_autograd(m, "custom_cell", custom_cell_autograd);
  m.def("sum_of_biases(Tensor bias_ih, Tensor bias_hh) -> Tensor", {at::Tag::pt2_compliant_tag});
  implement<add_biases>(m, "sum_of_biases");
  implement_autograd(m, "sum_of_biases", add_biases_autograd);
#endif
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("source", torch::wrap_pybind_function(source), py::arg("program"), py::arg("dtype"),
        py::arg("backward"), py::arg("variant"), py::arg("fused_rows") = 0, py::arg("reset") = "",
        py::arg("independent_units") = 0, py::arg("few_rows") = 0);
  m.def("compile", torch::wrap_pybind_function(returning_bytes(compile_binary)), py::arg("program"),
        py::arg("dtype"), py::arg("backward"), py::arg("variant"), py::arg("architecture"),
        py::arg("fused_rows") = 0, py::arg("reset") = "", py::arg("independent_units") = 0,
        py::arg("few_rows") = 0);
  m.def("compilations", compilations);
}
#endif

}  // namespace lltm_ext
