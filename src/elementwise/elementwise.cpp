// Ops made at run time: tensors in, tensors out. Dispatcher ops lltm_ext::elementwise and
// elementwise_backward, whose argument `program` says what they compute (program.h); raw bindings
// lltm_ext._C.elementwise.call, source, compile and compilations.
#include <ATen/ExpandUtils.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>

#include <algorithm>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/library.h"
#include "common/python.h"
#include "elementwise/compiler.h"
#include "elementwise/kernels.h"

namespace lltm_ext {
namespace {

using Context = torch::autograd::AutogradContext;
using Tensors = std::vector<at::Tensor>;
using c10::string_view;

// ---- What the ops share

void check_operand(const std::string& op, const char* name, const at::Tensor& x, const at::Tensor& first) {
  check_device(op.c_str(), name, x);
  check_floating(op.c_str(), name, x);
  check_same_device(op.c_str(), name, x, first);
}

void check_scalars(const Program& program, at::ArrayRef<double> scalars) {
  TORCH_CHECK_VALUE(scalars.size() == program.scalars.size(), program.name, ": expected ",
                    program.scalars.size(), " scalars, got ", scalars.size());
}

void check_count(const Program& program, at::TensorList inputs) {
  TORCH_CHECK_VALUE(inputs.size() == program.tensors.size(), program.name, ": expected ",
                    program.tensors.size(), " tensors, got ", inputs.size());
}

void check_inputs(const Program& program, at::TensorList inputs, at::ArrayRef<double> scalars) {
  check_count(program, inputs);
  for (size_t k = 0; k < inputs.size(); ++k) {
    check_operand(program.name, program.tensors[k].c_str(), inputs[k], inputs[0]);
  }
  check_scalars(program, scalars);
}

void convert(Tensors& operands, at::ScalarType type) {
  for (at::Tensor& x : operands) {
    if (x.scalar_type() != type) x = x.to(type);
  }
}

// In the dtype that torch's arithmetic would give them.
Tensors promoted(at::TensorList inputs) {
  Tensors operands = inputs.vec();
  if (operands.size() > 1) convert(operands, at::native::result_type(inputs));
  return operands;
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

// A tensor for the result: it lies like the first operand of its sizes that has no gaps and no broadcast
// dimensions, else in the order of the first of its sizes. The same rule for real and for fake tensors.
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

void run(const Program& program, Wanted wanted, const Tensors& outputs, const Tensors& operands,
         at::ArrayRef<double> scalars) {
  const at::Tensor& like = outputs[0];
  TORCH_CHECK(!like.is_cpu(), program.name,
              ": expected tensors on a CUDA device, got cpu (lltm_ext.elementwise takes cpu=, a function for "
              "CPU tensors)");
  if (like.is_meta() || like.numel() == 0) return;
#ifdef LLTM_EXT_WITH_CUDA
  launch_program(program, wanted, outputs, operands, scalars);
#endif
}

// ---- The ops

at::Tensor elementwise(at::TensorList inputs, at::ArrayRef<double> scalars, string_view text) {
  const Program& program = program_of(text);
  check_inputs(program, inputs, scalars);
  const KernelGuard guard(inputs[0]);
  const Tensors operands = promoted(inputs);
  at::Tensor output = empty_result(program, operands);
  run(program, 0, {output}, operands, scalars);
  return output;
}

Wanted wanted_of(const Program& program, at::IntArrayRef places) {
  Wanted wanted = 0;
  for (const int64_t place : places) {
    TORCH_CHECK_VALUE(place >= 0 && place < program.output() && program.gradients[place].defined,
                      program.name, ": has no gradient with respect to tensor ", place);
    TORCH_CHECK_VALUE(wanted >> place == 0, program.name, ": expected places in ascending order, got ",
                      places);
    wanted |= Wanted(1) << place;
  }
  TORCH_CHECK_VALUE(wanted, program.name, ": expected the places of the wanted gradients, got none");
  return wanted;
}

// The gradients of the tensors at the places `wanted`, in their order, of the output's sizes: those of
// broadcast tensors are still to be summed. `used` are the operands that they follow from: the tensors, then
// the output, those of them that a wanted gradient uses.
Tensors elementwise_backward(const at::Tensor& grad_output, at::TensorList used, at::ArrayRef<double> scalars,
                             string_view text, at::IntArrayRef places) {
  const Program& program = program_of(text);
  const Wanted wanted = wanted_of(program, places);
  const std::vector<int> uses = program.uses(wanted);
  const std::string op = program.name + "_backward";
  TORCH_CHECK_VALUE(used.size() == uses.size(), op, ": expected ", uses.size(), " operands, got ",
                    used.size());
  check_operand(op, "grad_output", grad_output, grad_output);
  Tensors operands = {grad_output};
  for (size_t k = 0; k < used.size(); ++k) {
    check_operand(op, program.operand(uses[k]).c_str(), used[k], grad_output);
    operands.push_back(used[k]);
  }
  check_scalars(program, scalars);
  const KernelGuard guard(grad_output);
  convert(operands, grad_output.scalar_type());
  Tensors gradients = {empty_result(program, operands)};
  while (gradients.size() < places.size()) gradients.push_back(at::empty_like(gradients[0]));
  run(program, wanted, gradients, operands, scalars);
  return gradients;
}

at::Tensor call(at::TensorList inputs, at::ArrayRef<double> scalars, string_view text) {
  static const auto op = find_op<decltype(elementwise)>("lltm_ext::elementwise");
  return op.call(inputs, scalars, text);
}

Tensors call_backward(const at::Tensor& grad_output, at::TensorList used, at::ArrayRef<double> scalars,
                      string_view text, at::IntArrayRef wanted) {
  static const auto op = find_op<decltype(elementwise_backward)>("lltm_ext::elementwise_backward");
  return op.call(grad_output, used, scalars, text, wanted);
}

// ---- Autograd

std::vector<int64_t> places_of(Wanted wanted) {
  std::vector<int64_t> places;
  for (int i = 0; i < kMaxTensors; ++i) {
    if (wanted >> i & 1) places.push_back(i);
  }
  return places;
}

struct Node : torch::autograd::Function<Node> {
  static at::Tensor forward(Context* context, at::TensorList inputs, at::ArrayRef<double> scalars,
                            const Program& program) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Wanted wanted = 0;
    for (int i = 0; i < program.output(); ++i) wanted |= Wanted(inputs[i].requires_grad()) << i;
    const at::Tensor output = call(inputs, scalars, program.text);
    Tensors used;
    for (const int place : program.uses(wanted)) {
      used.push_back(place == program.output() ? output : inputs[place]);
    }
    context->save_for_backward(std::move(used));
    // Programs stay as long as the process does, and so may a node's pointer to one.
    context->saved_data["program"] = reinterpret_cast<int64_t>(&program);
    context->saved_data["wanted"] = static_cast<int64_t>(wanted);
    if (!scalars.empty()) context->saved_data["scalars"] = scalars.vec();
    return output;
  }

  // Of what was wanted, that which this pass asks for. The engine sums the gradients of broadcast inputs, and
  // rounds those of promoted ones.
  static Tensors backward(Context* context, const Tensors& grad_outputs) {
    const Program& program = *reinterpret_cast<const Program*>(context->saved_data["program"].toInt());
    const Wanted recorded = static_cast<Wanted>(context->saved_data["wanted"].toInt());
    Wanted wanted = 0;
    for (int i = 0; i < program.output(); ++i) {
      if (recorded >> i & 1) wanted |= Wanted(context->needs_input_grad(i)) << i;
    }
    Tensors gradients(program.output() + 2);  // after the inputs', undefined ones of scalars and program
    if (!wanted) return gradients;

    Tensors used = context->get_saved_variables();
    if (wanted != recorded) {
      const std::vector<int> saved = program.uses(recorded), uses = program.uses(wanted);
      Tensors fewer;
      for (size_t k = 0; k < saved.size(); ++k) {
        if (std::find(uses.begin(), uses.end(), saved[k]) != uses.end()) fewer.push_back(used[k]);
      }
      used = std::move(fewer);
    }
    std::vector<double> scalars;
    if (!program.scalars.empty()) scalars = context->saved_data["scalars"].toDoubleVector();
    const std::vector<int64_t> places = places_of(wanted);
    const Tensors found = call_backward(grad_outputs[0], used, scalars, program.text, places);
    for (size_t k = 0; k < places.size(); ++k) gradients[places[k]] = found[k];
    return gradients;
  }
};

at::Tensor elementwise_autograd(at::TensorList inputs, at::ArrayRef<double> scalars, string_view text) {
  const auto recorded = [](const at::Tensor& x) { return needs_grad(x); };
  if (std::none_of(inputs.begin(), inputs.end(), recorded)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call(inputs, scalars, text);
  }
  const Program& program = program_of(text);
  check_count(program, inputs);
  for (int i = 0; i < program.output(); ++i) {
    TORCH_CHECK(!needs_grad(inputs[i]) || program.gradients[i].defined, program.name,
                ": a gradient with respect to ", program.tensors[i],
                " is required, but its backward has no formula for ", program.tensors[i]);
  }
  return Node::apply(inputs, scalars, program);
}

// So that a second derivative, which the formulas do not have, is an error and not a zero.
struct BackwardNode : torch::autograd::Function<BackwardNode> {
  static Tensors forward(Context* context, const at::Tensor& grad_output, at::TensorList used,
                         at::ArrayRef<double> scalars, string_view text, at::IntArrayRef wanted) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    context->saved_data["name"] = program_of(text).name;
    return call_backward(grad_output, used, scalars, text, wanted);
  }
  static Tensors backward(Context* context, const Tensors&) {
    TORCH_CHECK(false, context->saved_data["name"].toStringRef(),
                ": its gradient cannot be differentiated again: an op made at run time has first "
                "derivatives only");
  }
};

Tensors elementwise_backward_autograd(const at::Tensor& grad_output, at::TensorList used,
                                      at::ArrayRef<double> scalars, string_view text,
                                      at::IntArrayRef wanted) {
  const auto recorded = [](const at::Tensor& x) { return needs_grad(x); };
  if (any_needs_grad(grad_output) || std::any_of(used.begin(), used.end(), recorded)) {
    return BackwardNode::apply(grad_output, used, scalars, text, wanted);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_backward(grad_output, used, scalars, text, wanted);
}

#ifdef TORCH_EXTENSION_NAME
// ---- Raw bindings

// The dispatcher's op for who calls it from Python, in half of the host's time that torch.ops takes.
at::Tensor call_elementwise(const Tensors& inputs, const std::vector<double>& scalars, string_view text) {
  return call(inputs, scalars, text);
}

std::string source(const std::string& text, at::ScalarType type, const std::vector<int64_t>& wanted) {
  const Program& program = program_of(text);
  return source_for(program, type, wanted.empty() ? 0 : wanted_of(program, wanted));
}

py::bytes compiled(const std::string& text, at::ScalarType type, const std::string& architecture,
                   const std::vector<int64_t>& wanted) {
  std::string binary;
  {
    const py::gil_scoped_release no_gil;
    const Program& program = program_of(text);
    binary = binary_for(program, type, wanted.empty() ? 0 : wanted_of(program, wanted), architecture);
  }
  return py::bytes(binary);
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("elementwise(Tensor[] inputs, float[] scalars, str program) -> Tensor", tags);
  m.def(
      "elementwise_backward(Tensor grad_output, Tensor[] used, float[] scalars, str program, int[] wanted) "
      "-> Tensor[]",
      tags);
  implement<elementwise>(m, "elementwise");
  implement_autograd(m, "elementwise", elementwise_autograd);
  implement<elementwise_backward>(m, "elementwise_backward");
  implement_autograd(m, "elementwise_backward", elementwise_backward_autograd);
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("call", torch::wrap_pybind_function_no_gil(call_elementwise), py::arg("inputs"), py::arg("scalars"),
        py::arg("program"));
  m.def("source", torch::wrap_pybind_function(source), py::arg("program"), py::arg("dtype"),
        py::arg("wanted") = std::vector<int64_t>());
  m.def("compile", torch::wrap_pybind_function(compiled), py::arg("program"), py::arg("dtype"),
        py::arg("architecture"), py::arg("wanted") = std::vector<int64_t>());
  m.def("compilations", compilations);
}
#endif

}  // namespace lltm_ext
