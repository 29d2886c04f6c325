// Ops made at run time: the binding. Dispatcher ops lltm_ext::elementwise and elementwise_backward, whose
// argument `program` defines the computation (program.h); raw bindings lltm_ext._C.elementwise.call, source,
// compile and compilations.
#include <ATen/ExpandUtils.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/library.h"
#include "common/python.h"
#include "common/runtime/compiler.h"
#include "elementwise/compile.h"
#include "elementwise/kernels.h"

namespace lltm_ext {
namespace {

using Tensors = std::vector<at::Tensor>;
using c10::string_view;

void check_operand(const std::string& op, const std::string& name, const at::Tensor& x,
                   const at::Tensor& first) {
  check_device(op.c_str(), name.c_str(), x);
  check_floating(op.c_str(), name.c_str(), x);
  check_same_device(op.c_str(), name.c_str(), x, first);
}

void check_scalars(const Program& program, at::ArrayRef<double> scalars) {
  TORCH_CHECK_VALUE(scalars.size() == program.scalars.size(), program.name, ": expected ",
                    program.scalars.size(), " scalars, got ", scalars.size());
}

void convert(Tensors& operands, at::ScalarType type) {
  for (at::Tensor& x : operands) {
    if (x.scalar_type() != type) x = x.to(type);
  }
}

c10::SymDimVector broadcast_sizes(const Program& program, const Tensors& operands) {
  const c10::SymIntArrayRef first = operands[0].sym_sizes();
  c10::SymDimVector sizes(first.begin(), first.end());
  for (const at::Tensor& x : operands) {
    if (x.sym_sizes() == c10::SymIntArrayRef(sizes)) continue;
    try {
      sizes = at::infer_size_symdimvector(sizes, x.sym_sizes());
    } catch (const c10::Error&) {
      TORCH_CHECK(false, program.name, ": expected shapes that can be broadcast to one, got ",
                  c10::SymIntArrayRef(sizes), " and ", x.sym_sizes());
    }
  }
  return sizes;
}

// The result takes the strides of the first dense operand of its sizes, or else the dimension order of the
// first operand of these sizes. Real and fake tensors follow the same rule.
at::Tensor empty_result(const Program& program, const Tensors& operands) {
  const c10::SymDimVector sizes = broadcast_sizes(program, operands);
  const at::Tensor* like = nullptr;
  for (const at::Tensor& x : operands) {
    if (x.sym_sizes() != c10::SymIntArrayRef(sizes)) continue;
    if (x.is_non_overlapping_and_dense()) return at::empty_like(x);
    if (!like) like = &x;
  }
  return like ? at::empty_like(*like) : at::empty_symint(sizes, operands[0].options());
}

void run(const Program& program, GradMask mask, const Tensors& outputs, const Tensors& operands,
         at::ArrayRef<double> scalars) {
  const at::Tensor& like = outputs[0];
  TORCH_CHECK(!like.is_cpu(), program.name,
              ": expected tensors on a CUDA device, got cpu (lltm_ext.elementwise takes cpu=, a function for "
              "CPU tensors)");
  if (like.is_meta() || like.numel() == 0) return;
#ifdef LLTM_EXT_WITH_CUDA
  launch_program(program, mask, outputs, operands, scalars);
#endif
}

// ---- The ops

at::Tensor elementwise(at::TensorList inputs, at::ArrayRef<double> scalars, string_view text) {
  const Program& program = Program::get(text);
  program.check_count(inputs.size());
  for (size_t k = 0; k < inputs.size(); ++k) {
    check_operand(program.name, program.tensors[k], inputs[k], inputs[0]);
  }
  check_scalars(program, scalars);
  const KernelGuard guard(inputs[0]);
  Tensors operands = inputs.vec();
  if (operands.size() > 1) convert(operands, at::native::result_type(inputs));
  at::Tensor output = empty_result(program, operands);
  run(program, 0, {output}, operands, scalars);
  return output;
}

GradMask mask_of(const Program& program, at::IntArrayRef indices) {
  GradMask mask = 0;
  for (const int64_t i : indices) {
    TORCH_CHECK_VALUE(i >= 0 && i < program.output() && program.gradients[i].defined, program.name,
                      ": has no gradient with respect to tensor ", i);
    TORCH_CHECK_VALUE(mask >> i == 0, program.name, ": expected indices in ascending order, got ", indices);
    mask |= GradMask(1) << i;
  }
  TORCH_CHECK_VALUE(mask, program.name, ": expected the indices of gradients, got none");
  return mask;
}

// Returns the gradients of the tensors with the indices `wanted`, each of the output's sizes: the caller sums
// those of broadcast tensors. `used` are the operands that these gradients use (Program::operands_of).
Tensors elementwise_backward(const at::Tensor& grad_output, at::TensorList used, at::ArrayRef<double> scalars,
                             string_view text, at::IntArrayRef wanted) {
  const Program& program = Program::get(text);
  const GradMask mask = mask_of(program, wanted);
  const std::vector<int> operand_indices = program.operands_of(mask);
  const std::string op = program.name + "_backward";
  TORCH_CHECK_VALUE(used.size() == operand_indices.size(), op, ": expected ", operand_indices.size(),
                    " operands, got ", used.size());
  check_operand(op, "grad_output", grad_output, grad_output);
  Tensors operands = {grad_output};
  for (size_t k = 0; k < used.size(); ++k) {
    check_operand(op, program.operand_name(operand_indices[k]), used[k], grad_output);
    operands.push_back(used[k]);
  }
  check_scalars(program, scalars);
  const KernelGuard guard(grad_output);
  convert(operands, grad_output.scalar_type());
  Tensors gradients = {empty_result(program, operands)};
  while (gradients.size() < wanted.size()) gradients.push_back(at::empty_like(gradients[0]));
  run(program, mask, gradients, operands, scalars);
  return gradients;
}

// ---- Raw bindings

std::string source(const std::string& text, at::ScalarType type, const std::vector<int64_t>& wanted) {
  const Program& program = Program::get(text);
  return program.source(type, wanted.empty() ? 0 : mask_of(program, wanted));
}

std::string compile_binary(const std::string& text, at::ScalarType type, const std::string& architecture,
                           const std::vector<int64_t>& wanted) {
  const Program& program = Program::get(text);
  const GradMask mask = wanted.empty() ? 0 : mask_of(program, wanted);
  return compile_program(program, type, mask, architecture);
}

#ifdef TORCH_EXTENSION_NAME
// Calls the dispatcher op from Python in half of the host time of torch.ops.
at::Tensor call(const Tensors& inputs, const std::vector<double>& scalars, string_view text) {
  return call_op<elementwise>("lltm_ext::elementwise", at::TensorList(inputs), at::ArrayRef<double>(scalars),
                              text);
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("elementwise(Tensor[] inputs, float[] scalars, str program) -> Tensor", tags);
  for (const std::string name : {"elementwise_backward", "elementwise_backward_composed"}) {
    m.def(
        (name + "(Tensor grad_output, Tensor[] used, float[] scalars, str program, int[] wanted) -> Tensor[]")
            .c_str(),
        tags);
  }
  implement<elementwise>(m, "elementwise");
  implement<elementwise_backward>(m, "elementwise_backward");
#ifdef LLTM_EXT_STABLE_ABI  // a native module has them by pybind11, below
  m.def("elementwise_source(str program, ScalarType dtype, int[] wanted=[]) -> str", tags);
  m.def("elementwise_compile(str program, ScalarType dtype, str architecture, int[] wanted=[]) -> Tensor",
        tags);
  m.def("elementwise_compilations() -> int", tags);
  implement<source>(m, "elementwise_source");
  implement<at::AsTensor<compile_binary>::call>(m, "elementwise_compile");
  implement<compilations>(m, "elementwise_compilations");
#endif
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("call", torch::wrap_pybind_function_no_gil(call), py::arg("inputs"), py::arg("scalars"),
        py::arg("program"));
  m.def("source", torch::wrap_pybind_function(source), py::arg("program"), py::arg("dtype"),
        py::arg("wanted") = std::vector<int64_t>());
  m.def("compile", torch::wrap_pybind_function(returning_bytes(compile_binary)), py::arg("program"),
        py::arg("dtype"), py::arg("architecture"), py::arg("wanted") = std::vector<int64_t>());
  m.def("compilations", compilations);
}
#endif

}  // namespace lltm_ext
