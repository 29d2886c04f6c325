// A recurrent cell over a whole sequence: the dispatcher ops lltm_ext::custom_cell, custom_cell_forward,
// custom_cell_backward, custom_cell_algorithm, and those of both directions of a layer. Their argument
// `program` is the cell (program.h). On the CPU the cells that are compiled with the package run in their own
// code, and others by their formulas (formula.h). custom_cell_by_loop, a cell in torch's differentiable ops,
// is in Python (lltm_ext/_loop.py). Raw bindings: lltm_ext._C.custom_cell.source, compile and compilations.
#include "custom_cell/custom_cell.h"

#include "common/library.h"
#include "common/python.h"
#include "common/runtime/compiler.h"
#include "custom_cell/compile.h"
#include "custom_cell/launch.h"
#include "custom_cell/onednn_lstm.h"

namespace lltm_ext {

CellCall cell_call(const at::Tensor& input, const TensorsOfDirection& forward_direction,
                   const TensorsOfDirection& reverse_direction, at::OptionalIntArrayRef batch_sizes,
                   string_view algorithm, string_view program) {
  CellCall call = {input, std::vector<Direction>(2), batch_sizes, algorithm, program};
  call.directions[1].reverse = true;
  for (size_t k = 0; k < 2; ++k) {
    const TensorsOfDirection& given = k == 0 ? forward_direction : reverse_direction;
    TORCH_CHECK(given.size() == Direction::kTensors, CellProgram::get(program).name,
                "_bidirectional: expected a direction of ", Direction::kTensors, " tensors, got ",
                given.size());
    size_t next = 0;
    for (at::Tensor* x : call.directions[k].tensors()) *x = materialized(given.get(next++));
  }
  return call;
}

CellOp op_for(const CellCall& call) {
  const bool resets_on_cuda = call.input.is_cuda() && call.directions[0].reset.defined();
  const CellProgram& program = CellProgram::get(call.program);
  const CellOp op(program, resets_on_cuda, input_is_read(program.shape, call.input, call.directions[0]));
  op.check_device(call.input);
  return op;
}

namespace {

variable_list run(const CellCall& call) {
  const CellOp op = op_for(call);
  check(op, call);
  return run_fitted(op, call, [&](const CellCall& fitted) {
    if (!OneDnnLstm::takes(op, fitted)) {
      return run_forward(op, fitted, /*save=*/false);
    }
    variable_list results;
    for (const Direction& d : fitted.directions) append(results, OneDnnLstm::run(fitted.with({d})));
    return results;
  });
}

variable_list run_and_save(const CellCall& call) {
  const CellOp op = op_for(call);
  check(op, call);
  return run_forward(op, call, /*save=*/true);
}

template <typename R>
R cell_backward(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                const OptionalTensor& grad_states_n, const at::Tensor& h, const at::Tensor& gates,
                const at::Tensor& extra, const at::Tensor& input, const OptionalTensor& h0,
                const OptionalTensor& states, const OptionalTensor& weight_ih,
                const OptionalTensor& weight_hh, const OptionalTensor& bias, const OptionalTensor& parameters,
                const OptionalTensor& step_inputs, const OptionalTensor& reset,
                at::OptionalIntArrayRef batch_sizes, bool reverse, string_view algorithm, string_view program,
                bool input_needs_grad, bool bias_needs_grad) {
  const CellCall call = cell_call(input, h0, states, weight_ih, weight_hh, bias, parameters, step_inputs,
                                  reset, batch_sizes, reverse, algorithm, program, /*bias_hh=*/std::nullopt);
  return results_as<R>(run_backward(op_for(call), call, {grad_output, grad_h_n, grad_states_n},
                                    {h, gates, extra}, input_needs_grad, bias_needs_grad));
}

variable_list both_backward(const c10::List<OptionalTensor>& grad_outputs, const at::Tensor& input,
                            const TensorsOfDirection& forward_direction,
                            const TensorsOfDirection& reverse_direction, at::TensorList saved,
                            at::OptionalIntArrayRef batch_sizes, string_view algorithm, string_view program,
                            bool input_needs_grad, bool bias_needs_grad) {
  TORCH_CHECK(
      grad_outputs.size() == 6 && saved.size() == 6, CellProgram::get(program).name,
      "_bidirectional_backward: expected three of grad_outputs and three of saved for each direction, got ",
      grad_outputs.size(), " and ", saved.size());
  const CellCall call =
      cell_call(input, forward_direction, reverse_direction, batch_sizes, algorithm, program);
  std::vector<OptionalTensor> grads;
  for (size_t i = 0; i < grad_outputs.size(); ++i) {
    grads.push_back(if_defined(materialized(grad_outputs.get(i))));
  }
  variable_list gradients = run_backward(op_for(call), call, grads, saved, input_needs_grad, bias_needs_grad);
  const size_t of_direction = gradients.size() / 2;
  if (input_needs_grad) gradients[0] = gradients[0] + gradients[of_direction];
  gradients.erase(gradients.begin() + of_direction);
  return gradients;
}

}  // namespace

std::string custom_cell_algorithm(const at::Tensor& input, const OptionalTensor& h0,
                                  const OptionalTensor& states, const OptionalTensor& weight_ih,
                                  const OptionalTensor& weight_hh, const OptionalTensor& bias,
                                  const OptionalTensor& parameters, const OptionalTensor& step_inputs,
                                  const OptionalTensor& reset, at::OptionalIntArrayRef batch_sizes,
                                  bool reverse, string_view algorithm, string_view program, bool backward) {
  const CellCall call = cell_call(input, h0, states, weight_ih, weight_hh, bias, parameters, step_inputs,
                                  reset, batch_sizes, reverse, algorithm, program, /*bias_hh=*/std::nullopt);
  const CellOp op = op_for(call);
  check(op, call);
  if (!backward && takes_single_step(op, call)) return "stepwise";
  const KernelGuard guard(input);
  const SequenceSizes sizes(op.shape(), call);
  const Plan plan = pads_hidden(op, call) ? plan_for(op, input, sizes.batch, padded_hidden(sizes.hidden),
                                                     !batch_sizes, backward, algorithm, sizes.length)
                                          : sizes.plan(op, input, backward, algorithm, /*sequences=*/1,
                                                       /*side_by_side=*/false, sizes.length);
  return plan.algorithm == Algorithm::kCluster ? "cluster"
         : plan.algorithm == Algorithm::kGrid  ? "grid"
                                               : "stepwise";
}

namespace {

std::string source(const std::string& program, at::ScalarType type, bool backward, int variant,
                   int fused_rows, const std::string& reset, int independent_units, int small_batch,
                   int single_step_rows, bool on_tensor_cores, bool dense, int block_threads, int stage,
                   int heads, int large_tile, bool narrow) {
  return CellProgram::get(program).source({type, backward, variant, fused_rows, reset, independent_units,
                                           small_batch, single_step_rows, on_tensor_cores, dense,
                                           block_threads, stage, heads, large_tile, narrow});
}

std::string compile_binary(const std::string& program, at::ScalarType type, bool backward, int variant,
                           const std::string& architecture, int fused_rows, const std::string& reset,
                           int independent_units, int small_batch, int single_step_rows, bool on_tensor_cores,
                           bool dense, int block_threads, int stage, int heads, int large_tile, bool narrow) {
  return compile_cell(
      CellProgram::get(program),
      {type, backward, variant, fused_rows, reset, independent_units, small_batch, single_step_rows,
       on_tensor_cores, dense, block_threads, stage, heads, large_tile, narrow},
      architecture);
}

// The numbers that fake tensors in Python need: gates, states, kept gates and other saved values of a unit;
// whether h of every step is apart from the output; whether there is a product; whether projections are wide;
// and outputs.
[[maybe_unused]] std::vector<int64_t> sizes_of_cell(const std::string& program) {
  const CellShape& shape = CellProgram::get(program).shape;
  return {shape.gates,     shape.states, shape.kept_gates(), shape.extra(), shape.has_output_apart(),
          shape.recurrent, shape.wide,   shape.outputs};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  const std::string inputs =
      "Tensor input, Tensor? h0, Tensor? states, Tensor? weight_ih, Tensor? weight_hh, Tensor? bias, "
      "Tensor? parameters, Tensor? step_inputs, Tensor? reset, int[]? batch_sizes, bool reverse, "
      "str algorithm, str program";
  const std::string of_layer = "Tensor input, Tensor?[] forward_direction, Tensor?[] reverse_direction, ";
  const std::string how = "int[]? batch_sizes, str algorithm, str program";
  const auto def = [&](const std::string& schema) {
    m.def(("custom_cell" + schema).c_str(), {at::Tag::pt2_compliant_tag});
  };
  def("(" + inputs + ", Tensor? bias_hh=None) -> (Tensor, Tensor, Tensor)");
  def("_by_loop(" + inputs + ", Tensor? bias_hh=None) -> (Tensor, Tensor, Tensor)");
  def("_forward(" + inputs + ", Tensor? bias_hh=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  const std::string for_backward =
      "(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_states_n, Tensor h, Tensor gates, Tensor "
      "extra, " +
      inputs + ", bool input_needs_grad, bool bias_needs_grad) -> ";
  def("_backward" + for_backward + "Tensor[]");
  // A copy of _backward: torch's vmap of is_grads_batched=True takes no ops that return lists.
  def("_gradients" + for_backward + "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("_algorithm(" + inputs + ", bool backward) -> str");
  def("_bidirectional(" + of_layer + how + ") -> Tensor[]");
  def("_bidirectional_forward(" + of_layer + how + ") -> Tensor[]");
  def("_bidirectional_backward(Tensor?[] grad_outputs, " + of_layer + "Tensor[] saved, " + how +
      ", bool input_needs_grad, bool bias_needs_grad) -> Tensor[]");
  implement<Kernel<CellSignature>::of<run>>(m, "custom_cell");
  implement<Kernel<ForwardSignature>::of<run_and_save>>(m, "custom_cell_forward");
  implement<cell_backward<variable_list>>(m, "custom_cell_backward");
  implement<cell_backward<Tensors7>>(m, "custom_cell_gradients");
  implement<custom_cell_algorithm>(m, "custom_cell_algorithm");
  implement<Kernel<BothSignature>::of<run>>(m, "custom_cell_bidirectional");
  implement<Kernel<BothSignature>::of<run_and_save>>(m, "custom_cell_bidirectional_forward");
  implement<both_backward>(m, "custom_cell_bidirectional_backward");
#ifdef LLTM_EXT_STABLE_ABI  // a native module has them by pybind11, below
  const std::string kernel =
      ", int fused_rows=0, str reset='', int independent_units=0, int small_batch=0, "
      "int single_step_rows=0, bool on_tensor_cores=False, bool dense=False, int block_threads=0, "
      "int stage=0, int heads=1, int large_tile=-1, bool narrow=False) -> ";
  m.def(("custom_cell_source(str program, ScalarType dtype, bool backward, int variant" + kernel + "str")
            .c_str(),
        {});
  m.def(("custom_cell_compile(str program, ScalarType dtype, bool backward, int variant, str architecture" +
         kernel + "Tensor")
            .c_str(),
        {});
  m.def("custom_cell_compilations() -> int", {});
  m.def("custom_cell_sizes(str program) -> int[]", {});
  implement<source>(m, "custom_cell_source");
  implement<at::AsTensor<compile_binary>::call>(m, "custom_cell_compile");
  implement<compilations>(m, "custom_cell_compilations");
  implement<sizes_of_cell>(m, "custom_cell_sizes");
#endif
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("source", torch::wrap_pybind_function(source), py::arg("program"), py::arg("dtype"),
        py::arg("backward"), py::arg("variant"), py::arg("fused_rows") = 0, py::arg("reset") = "",
        py::arg("independent_units") = 0, py::arg("small_batch") = 0, py::arg("single_step_rows") = 0,
        py::arg("on_tensor_cores") = false, py::arg("dense") = false, py::arg("block_threads") = 0,
        py::arg("stage") = 0, py::arg("heads") = 1, py::arg("large_tile") = -1, py::arg("narrow") = false);
  m.def("compile", torch::wrap_pybind_function(returning_bytes(compile_binary)), py::arg("program"),
        py::arg("dtype"), py::arg("backward"), py::arg("variant"), py::arg("architecture"),
        py::arg("fused_rows") = 0, py::arg("reset") = "", py::arg("independent_units") = 0,
        py::arg("small_batch") = 0, py::arg("single_step_rows") = 0, py::arg("on_tensor_cores") = false,
        py::arg("dense") = false, py::arg("block_threads") = 0, py::arg("stage") = 0, py::arg("heads") = 1,
        py::arg("large_tile") = -1, py::arg("narrow") = false);
  m.def("compilations", compilations);
  m.def("add_compiled_cell", [](const std::string& name, intptr_t cell) {
    add_compiled_cell(name, *reinterpret_cast<const CompiledCell*>(cell));
  });
}
#endif

}  // namespace lltm_ext
