// Ops made at run time: their autograd.
#include <algorithm>

#include "common/function.h"
#include "common/library.h"
#include "elementwise/program.h"

namespace lltm_ext {
namespace {

using Tensors = std::vector<at::Tensor>;
using c10::string_view;
using Context = torch::autograd::AutogradContext;

constexpr const char *kForward = "lltm_ext::elementwise", *kBackward = "lltm_ext::elementwise_backward";

bool list_needs_grad(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& x) { return needs_grad(x); });
}

// An op made at run time has first derivatives only: those of the composed op raise an error.
Tensors backward_autograd(const at::Tensor& grad_output, at::TensorList used, at::ArrayRef<double> scalars,
                          string_view text, at::IntArrayRef wanted) {
  if (any_needs_grad(grad_output) || list_needs_grad(used)) {
    static const auto composed = find_composed<decltype(backward_autograd)>(kBackward);
    return composed.call(grad_output, used, scalars, text, wanted);
  }
  return call_below_autograd<backward_autograd>(kBackward, grad_output, used, scalars, text, wanted);
}

struct Node : Function<Node> {
  static at::Tensor kernel(at::TensorList inputs, at::ArrayRef<double> scalars, string_view text) {
    if (!list_needs_grad(inputs)) return call_below_autograd<kernel>(kForward, inputs, scalars, text);
    const Program& program = Program::get(text);
    program.check_count(inputs.size());
    for (int i = 0; i < program.output(); ++i) {
      TORCH_CHECK(!needs_grad(inputs[i]) || program.gradients[i].defined, program.name,
                  ": a gradient with respect to ", program.tensors[i],
                  " is required, but its backward has no formula for ", program.tensors[i]);
    }
    return apply(inputs, scalars, program);
  }

  static at::Tensor forward(Context* context, at::TensorList inputs, at::ArrayRef<double> scalars,
                            const Program& program) {
    GradMask mask = 0;
    for (int i = 0; i < program.output(); ++i) mask |= GradMask(inputs[i].requires_grad()) << i;
    const at::Tensor output =
        call_below_autograd<kernel>(kForward, inputs, scalars, string_view(program.text));
    Tensors used;
    for (const int operand : program.operands_of(mask)) {
      used.push_back(operand == program.output() ? output : inputs[operand]);
    }
    context->save_for_backward(std::move(used));
    context->saved_data["program"] = reinterpret_cast<int64_t>(&program);
    context->saved_data["mask"] = static_cast<int64_t>(mask);
    if (!scalars.empty()) context->saved_data["scalars"] = scalars.vec();
    return output;
  }

  // Computes those of the recorded gradients that this backward pass needs. The engine sums gradients of
  // broadcast inputs and converts those of promoted ones.
  static Tensors backward(Context* context, const Tensors& grad_outputs) {
    const Program& program = *reinterpret_cast<const Program*>(context->saved_data["program"].toInt());
    const GradMask recorded = static_cast<GradMask>(context->saved_data["mask"].toInt());
    GradMask mask = 0;
    std::vector<int64_t> indices;
    for (int i = 0; i < program.output(); ++i) {
      if (!(recorded >> i & 1) || !context->needs_input_grad(i)) continue;
      mask |= GradMask(1) << i;
      indices.push_back(i);
    }
    Tensors gradients(program.output() + 2);  // those of scalars and program stay undefined
    if (!mask) return gradients;

    const Tensors recorded_operands = context->get_saved_variables();
    const std::vector<int> saved = program.operands_of(recorded), needed = program.operands_of(mask);
    Tensors used;
    for (size_t k = 0; k < saved.size(); ++k) {
      if (std::find(needed.begin(), needed.end(), saved[k]) != needed.end()) {
        used.push_back(recorded_operands[k]);
      }
    }
    std::vector<double> scalars;
    if (!program.scalars.empty()) scalars = context->saved_data["scalars"].toDoubleVector();
    const Tensors computed = call_op<backward_autograd>(kBackward, grad_outputs[0], at::TensorList(used),
                                                        at::ArrayRef<double>(scalars),
                                                        string_view(program.text), at::IntArrayRef(indices));
    for (size_t k = 0; k < indices.size(); ++k) gradients[indices[k]] = computed[k];
    return gradients;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  implement_autograd(m, "elementwise", Node::kernel);
  implement_autograd(m, "elementwise_backward", backward_autograd);
}

}  // namespace lltm_ext
