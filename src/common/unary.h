// Elementwise ops of one tensor: three dispatcher ops each (out of place, in place with a trailing "_", into
// a given tensor with "_out"), the op <name>_backward, and their autograd. LLTM_UNARY_OP declares an op
// without parameters whose gradient follows from its output. UnaryOps works for any op. Op defines
//
//   kName, kParameters: its name, and its parameters P... in the dispatcher's schema (", float low=0.0");
//   kTypes: the element types it takes;
//   check(name, parameters...): throws for bad parameters; errors name that op;
//   run(output, input, parameters...): writes a tensor of the input's sizes, maybe the input itself;
//   kSaved: what the gradient is computed from, Saved::kOutput or kInput; kNothing: it passes unchanged, and
//   Op has none of the following; kBackwardName: the name of that op, <name>_backward;
//   is_straight_through(parameters...): whether the gradient passes unchanged with these;
//   run_backward(grad_input, grad_output, saved, parameters...).
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/native/Resize.h>

#include <string>

#include "common/checks.h"
#include "common/elementwise.h"
#include "common/library.h"
#include "common/python.h"
#include "common/unary_autograd.h"

namespace lltm_ext {

enum class Saved { kNothing, kInput, kOutput };

template <class Op, typename... P>
struct UnaryOps {
  static constexpr bool kHasBackward = Op::kSaved != Saved::kNothing;
  static constexpr bool kSavesInput = Op::kSaved == Saved::kInput;

  static void check(const at::Tensor& input, P... parameters) {
    check_device(Op::kName, "input", input);
    check_type(Op::kName, "input", input, Op::kTypes);
    check_bytes(Op::kName, input);
    Op::check(Op::kName, parameters...);
  }

  static at::Tensor forward(const at::Tensor& input, P... parameters) {
    check(input, parameters...);
    const KernelGuard guard(input);
    at::Tensor output = at::empty_like(input);
    Op::run(output, input, parameters...);
    return output;
  }

  static void in_place(at::Tensor input, P... parameters) {
    check(input, parameters...);
    check_writable(Op::kName, "input", input);
    const KernelGuard guard(input);
    check_no_overlap(Op::kName, "input", input);
    Op::run(input, input, parameters...);
  }

  static void forward_out(const at::Tensor& input, P... parameters, at::Tensor out) {
    check(input, parameters...);
    CHECK_SAME(Op::kName, out, input);
    check_writable(Op::kName, "out", out);
    const KernelGuard guard(input);
    at::native::resize_output_symint(out, input.sym_sizes());
    check_no_overlap(Op::kName, "out", out);
    Op::run(out, input, parameters...);
  }

  static void check_backward(const at::Tensor& grad_output, const at::Tensor& saved, P... parameters) {
    check_gradient(Op::kBackwardName, grad_output, saved, Op::kTypes);
    Op::check(Op::kBackwardName, parameters...);
  }

  static at::Tensor backward(const at::Tensor& grad_output, const at::Tensor& saved, P... parameters) {
    check_backward(grad_output, saved, parameters...);
    const KernelGuard guard(saved);
    at::Tensor grad_input = at::empty_like(saved);
    Op::run_backward(grad_input, grad_output, saved, parameters...);
    return grad_input;
  }

  static void define(torch::Library& m) {
    const std::string op = Op::kName, parameters = Op::kParameters, required = without_defaults(parameters);
    const std::string in_place_name = op + "_", out_name = op + "_out";
    const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
    m.def((op + "(Tensor input" + parameters + ") -> Tensor").c_str(), tags);
    m.def((in_place_name + "(Tensor(a!) input" + parameters + ") -> ()").c_str(), tags);
    m.def((out_name + "(Tensor input" + required + ", Tensor(a!) out) -> ()").c_str(), tags);
    implement<forward>(m, op.c_str());
    implement<in_place>(m, in_place_name.c_str());
    implement<forward_out>(m, out_name.c_str());
    if constexpr (kHasBackward) {
      const std::string saved = kSavesInput ? "input" : "output";
      const std::string schema = "(Tensor grad_output, Tensor " + saved + required + ") -> Tensor";
      m.def((Op::kBackwardName + schema).c_str(), tags);
      m.def((Op::kBackwardName + ("_composed" + schema)).c_str(), tags);
      implement<backward>(m, Op::kBackwardName);
    }
    UnaryAutograd<Op, P...>::define(m);
  }

#ifdef TORCH_EXTENSION_NAME
  // Binds call_<name>: the dispatcher op, which Python calls in half the host time of torch.ops.
  static void bind_call(py::module_& m) {
    m.def((std::string("call_") + Op::kName).c_str(),
          torch::wrap_pybind_function_no_gil(UnaryAutograd<Op, P...>::call), py::arg("input"));
  }

  // The raw bindings of an op without parameters.
  static at::Tensor raw_forward(const at::Tensor& input) {
    static const std::string name = std::string(Op::kName) + ".forward";
    CHECK_INPUT(name.c_str(), input);
    return forward(input);
  }
  static at::Tensor raw_backward(const at::Tensor& grad_output, const at::Tensor& output) {
    static const std::string name = std::string(Op::kName) + ".backward";
    CHECK_INPUT(name.c_str(), grad_output);
    CHECK_INPUT(name.c_str(), output);
    return backward(grad_output, output);
  }
  static void bind(py::module_& m) {
    m.def("forward", torch::wrap_pybind_function_no_gil(raw_forward), py::arg("input"));
    m.def("backward", torch::wrap_pybind_function_no_gil(raw_backward), py::arg("grad_output"),
          py::arg("output"));
    bind_call(m);
  }
#endif

 private:
  // A parameter without a default may not follow one that has a default.
  static std::string without_defaults(std::string parameters) {
    for (size_t at; (at = parameters.find('=')) != std::string::npos;) {
      parameters.erase(at, std::min(parameters.find(',', at), parameters.size()) - at);
    }
    return parameters;
  }
};

#ifdef TORCH_EXTENSION_NAME
#define LLTM_UNARY_MODULE(OPS) \
  PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { OPS::bind(m); }
#else
#define LLTM_UNARY_MODULE(OPS)
#endif

// Declares the op NAME and its Python module, from the functors FORWARD (input) and BACKWARD (grad_output,
// output).
#define LLTM_UNARY_OP(NAME, FORWARD, BACKWARD, TYPES)                                       \
  namespace {                                                                               \
  struct NAME##_op {                                                                        \
    static constexpr const char *kName = #NAME, *kParameters = "";                          \
    static constexpr const char* kBackwardName = #NAME "_backward";                         \
    static constexpr Types kTypes = TYPES;                                                  \
    static constexpr Saved kSaved = Saved::kOutput;                                         \
    static constexpr bool kComplex = kTypes == Types::kFloatingOrComplex;                   \
    static bool is_straight_through() { return false; }                                     \
    static void check(const char*) {}                                                       \
    static void run(const at::Tensor& output, const at::Tensor& input) {                    \
      elementwise<FORWARD, 1, kComplex>(kName, output, {input});                            \
    }                                                                                       \
    static void run_backward(const at::Tensor& grad_input, const at::Tensor& grad_output,   \
                             const at::Tensor& output) {                                    \
      elementwise<BACKWARD, 2, kComplex>(kBackwardName, grad_input, {grad_output, output}); \
    }                                                                                       \
  };                                                                                        \
  }                                                                                         \
  TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { UnaryOps<NAME##_op>::define(m); }                   \
  LLTM_UNARY_MODULE(UnaryOps<NAME##_op>)

}  // namespace lltm_ext
