// Elementwise ops of one tensor: three dispatcher ops each (out of place, in place with a trailing "_", into
// a given tensor with "_out") and their autograd. LLTM_UNARY_OP declares an op whose gradient follows from
// its output. UnaryOps works for any op. Op defines
//
//   kName, kParameters: its name, and its parameters P... in the dispatcher's schema (", float low=0.0");
//   kTypes: the element types it takes;
//   check(parameters...): throws for bad parameters;
//   run(output, input, parameters...): writes a tensor of the input's sizes, maybe the input itself;
//   keep(context, in_place, input, parameters...): saves what the backward needs, before the forward;
//   kept(context, output): the same after the forward;
//   pull(context, grad_output): the gradient with respect to the input.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/native/Resize.h>

#ifndef LLTM_EXT_STABLE_ABI
#include <torch/csrc/autograd/VariableTypeUtils.h>
#endif

#include <string>

#include "common/checks.h"
#include "common/elementwise.h"
#include "common/function.h"
#include "common/library.h"
#include "common/python.h"

namespace lltm_ext {

template <class Op, typename... P>
struct UnaryOps {
  static void check(const at::Tensor& input, P... parameters) {
    check_device(Op::kName, "input", input);
    check_type(Op::kName, "input", input, Op::kTypes);
    check_bytes(Op::kName, input);
    Op::check(parameters...);
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

#ifndef LLTM_EXT_STABLE_ABI
  using Context = torch::autograd::AutogradContext;
  using Variables = torch::autograd::variable_list;

  // ---- The same through the dispatcher

  static std::string name(const char* form) { return std::string("lltm_ext::") + Op::kName + form; }

  static at::Tensor call(const at::Tensor& input, P... parameters) {
    static const auto op = find_op<decltype(forward)>(name("").c_str());
    return op.call(input, parameters...);
  }
  static void call_in_place(const at::Tensor& input, P... parameters) {
    static const auto op = find_op<decltype(in_place)>(name("_").c_str());
    op.call(input, parameters...);
  }

  // ---- Tensors whose memory holds the negative or the conjugate (implement_lazy)

  static void in_place_lazy(at::Tensor input, P... parameters) {
    check_writable(Op::kName, "input", input);
    check_no_overlap(Op::kName, "input", input);
    input.copy_(call(input, parameters...));
  }

  static void out_lazy(const at::Tensor& input, P... parameters, at::Tensor out) {
    const at::Tensor output = call(input, parameters...);
    CHECK_SAME(Op::kName, out, output);
    check_writable(Op::kName, "out", out);
    at::native::resize_output_symint(out, output.sym_sizes());
    check_no_overlap(Op::kName, "out", out);
    out.copy_(output);
  }

  // ---- Autograd

  template <bool kInPlace>
  struct Node : Function<Node<kInPlace>> {
    static at::Tensor forward(Context* context, const at::Tensor& input, P... parameters) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      Op::keep(context, kInPlace, input, parameters...);
      at::Tensor output = input;
      if constexpr (kInPlace) {
        context->mark_dirty({input});
        call_in_place(input, parameters...);
      } else {
        output = call(input, parameters...);
      }
      Op::kept(context, output);
      return output;
    }
    static Variables backward(Context* context, const Variables& grad_outputs) {
      Variables gradients(1 + sizeof...(P));
      gradients[0] = Op::pull(context, grad_outputs[0]);
      return gradients;
    }
  };

  static at::Tensor forward_autograd(const at::Tensor& input, P... parameters) {
    if (any_needs_grad(input)) return Node<false>::apply(input, parameters...);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call(input, parameters...);
  }

  static void in_place_autograd(at::Tensor input, P... parameters) {
    if (any_needs_grad(input)) {
      check(input, parameters...);
      torch::autograd::check_inplace(input, /*requires_grad=*/true);
      Node<true>::apply(input, parameters...);
      return;
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      call_in_place(input, parameters...);
    }
    note_change(input);
  }

  static void out_autograd(const at::Tensor& input, P... parameters, at::Tensor out) {
    TORCH_CHECK(!any_needs_grad(input, out), Op::kName,
                ": with out= there is no gradient, but an argument requires it");
    static const auto op = find_op<decltype(forward_out)>(name("_out").c_str());
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      op.call(input, parameters..., out);
    }
    note_change(out);
  }

  // A backward that needs the old values then raises an error.
  static void note_change(const at::Tensor& x) {
    if (x.defined() && !x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
  }
#endif

  static void define(torch::Library& m) {
    const std::string op = Op::kName, parameters = Op::kParameters;
    const std::string in_place_name = op + "_", out_name = op + "_out";
    const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
    m.def((op + "(Tensor input" + parameters + ") -> Tensor").c_str(), tags);
    m.def((in_place_name + "(Tensor(a!) input" + parameters + ") -> ()").c_str(), tags);
    m.def((out_name + "(Tensor input" + without_defaults(parameters) + ", Tensor(a!) out) -> ()").c_str(),
          tags);
    implement<forward>(m, op.c_str());
    implement<in_place>(m, in_place_name.c_str());
    implement<forward_out>(m, out_name.c_str());
#ifndef LLTM_EXT_STABLE_ABI
    implement_autograd(m, op.c_str(), forward_autograd);
    implement_autograd(m, in_place_name.c_str(), in_place_autograd);
    implement_autograd(m, out_name.c_str(), out_autograd);
    implement_lazy(m, in_place_name.c_str(), in_place_lazy);
    implement_lazy(m, out_name.c_str(), out_lazy);
#endif
  }

#ifdef TORCH_EXTENSION_NAME
  // call_<name>: the dispatcher op as Python calls it, in half the host time of torch.ops.
  static void bind_call(py::module_& m) {
    m.def((std::string("call_") + Op::kName).c_str(), torch::wrap_pybind_function_no_gil(call),
          py::arg("input"));
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

// An op whose gradient is the dispatcher op <name>_backward of its output. Op also defines
//
//   kBackwardName, kRawForward, kRawBackward: names in the dispatcher and in error messages;
//   run_backward(grad_input, grad_output, output);
//   gradient(grad_output, output): the gradient in torch's differentiable ops, for the double backward.
template <class Op>
struct ActivationOps : UnaryOps<Op> {
  static at::Tensor backward(const at::Tensor& grad_output, const at::Tensor& output) {
    check_gradient(Op::kBackwardName, grad_output, output, Op::kTypes);
    const KernelGuard guard(output);
    at::Tensor grad_input = at::empty_like(output);
    Op::run_backward(grad_input, grad_output, output);
    return grad_input;
  }

#ifndef LLTM_EXT_STABLE_ABI
  static at::Tensor call_backward(const at::Tensor& grad_output, const at::Tensor& output) {
    static const auto op = find_op<decltype(backward)>(UnaryOps<Op>::name("_backward").c_str());
    return op.call(grad_output, output);
  }

  static at::Tensor backward_autograd(const at::Tensor& grad_output, const at::Tensor& output) {
    if (any_needs_grad(grad_output, output)) {
      check_gradient(Op::kBackwardName, grad_output, output, Op::kTypes);
      return Op::gradient(grad_output, output);
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_backward(grad_output, output);
  }
#endif

  static void define(torch::Library& m) {
    UnaryOps<Op>::define(m);
    m.def((std::string(Op::kBackwardName) + "(Tensor grad_output, Tensor output) -> Tensor").c_str(),
          {at::Tag::pt2_compliant_tag});
    implement<backward>(m, Op::kBackwardName);
#ifndef LLTM_EXT_STABLE_ABI
    implement_autograd(m, Op::kBackwardName, backward_autograd);
#endif
  }

#ifdef TORCH_EXTENSION_NAME
  static at::Tensor raw_forward(const at::Tensor& input) {
    CHECK_INPUT(Op::kRawForward, input);
    return UnaryOps<Op>::forward(input);
  }
  static at::Tensor raw_backward(const at::Tensor& grad_output, const at::Tensor& output) {
    CHECK_INPUT(Op::kRawBackward, grad_output);
    CHECK_INPUT(Op::kRawBackward, output);
    return backward(grad_output, output);
  }
  static void bind(py::module_& m) {
    m.def("forward", torch::wrap_pybind_function_no_gil(raw_forward), py::arg("input"));
    m.def("backward", torch::wrap_pybind_function_no_gil(raw_backward), py::arg("grad_output"),
          py::arg("output"));
    UnaryOps<Op>::bind_call(m);
  }
#endif
};

// The autograd of an op in ActivationOps.
template <class Op>
struct FromOutput {
  static constexpr const char* kParameters = "";
  static void check() {}
#ifndef LLTM_EXT_STABLE_ABI
  static void keep(torch::autograd::AutogradContext*, bool, const at::Tensor&) {}
  static void kept(torch::autograd::AutogradContext* context, const at::Tensor& output) {
    context->save_for_backward({output});
  }
  static at::Tensor pull(torch::autograd::AutogradContext* context, const at::Tensor& grad_output) {
    return ActivationOps<Op>::call_backward(grad_output, context->get_saved_variables()[0]);
  }
#endif
};

// Straight-through: saves nothing, launches nothing, passes the gradient on unchanged.
struct StraightThrough {
#ifndef LLTM_EXT_STABLE_ABI
  template <typename... P>
  static void keep(torch::autograd::AutogradContext*, bool, const at::Tensor&, P...) {}
  static void kept(torch::autograd::AutogradContext*, const at::Tensor&) {}
  static at::Tensor pull(torch::autograd::AutogradContext*, const at::Tensor& grad_output) {
    return grad_output;
  }
#endif
};

#ifdef LLTM_EXT_STABLE_ABI
#define LLTM_GRADIENT(GRADIENT)
#else
#define LLTM_GRADIENT(GRADIENT) \
  static at::Tensor gradient(const at::Tensor& grad_output, const at::Tensor& output) { return GRADIENT; }
#endif

#ifdef TORCH_EXTENSION_NAME
#define LLTM_UNARY_MODULE(OPS) \
  PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { OPS::bind(m); }
#else
#define LLTM_UNARY_MODULE(OPS)
#endif

// Declares the op NAME and its Python module, from the functors FORWARD (input) and BACKWARD (grad_output,
// output). GRADIENT is the gradient in torch's ops, of tensors of these names.
#define LLTM_UNARY_OP(NAME, FORWARD, BACKWARD, TYPES, GRADIENT)                             \
  namespace {                                                                               \
  struct NAME##_op : FromOutput<NAME##_op> {                                                \
    static constexpr const char* kName = #NAME;                                             \
    static constexpr const char* kBackwardName = #NAME "_backward";                         \
    static constexpr const char* kRawForward = #NAME ".forward";                            \
    static constexpr const char* kRawBackward = #NAME ".backward";                          \
    static constexpr Types kTypes = TYPES;                                                  \
    static constexpr bool kComplex = kTypes == Types::kFloatingOrComplex;                   \
    static void run(const at::Tensor& output, const at::Tensor& input) {                    \
      elementwise<FORWARD, 1, kComplex>(kName, output, {input});                            \
    }                                                                                       \
    static void run_backward(const at::Tensor& grad_input, const at::Tensor& grad_output,   \
                             const at::Tensor& output) {                                    \
      elementwise<BACKWARD, 2, kComplex>(kBackwardName, grad_input, {grad_output, output}); \
    }                                                                                       \
    LLTM_GRADIENT(GRADIENT)                                                                 \
  };                                                                                        \
  }                                                                                         \
  TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { ActivationOps<NAME##_op>::define(m); }              \
  LLTM_UNARY_MODULE(ActivationOps<NAME##_op>)

}  // namespace lltm_ext
