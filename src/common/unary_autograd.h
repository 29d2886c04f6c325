// What only native modules have of the ops of unary.h: their autograd, and their calls through the
// dispatcher. The portable build has src/stable/unary_autograd.h in its place.
#pragma once

#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <string>
#include <tuple>

#include "common/function.h"
#include "common/library.h"

namespace lltm_ext {

template <class Op, typename... P>
struct UnaryOps;

template <class Op, typename... P>
struct UnaryAutograd {
  using Ops = UnaryOps<Op, P...>;
  using Context = torch::autograd::AutogradContext;
  using Variables = torch::autograd::variable_list;

  static std::string name(const char* form) { return std::string("lltm_ext::") + Op::kName + form; }

  static at::Tensor call(const at::Tensor& input, P... parameters) {
    static const auto op = find_op<decltype(Ops::forward)>(name("").c_str());
    return op.call(input, parameters...);
  }
  static void call_in_place(const at::Tensor& input, P... parameters) {
    static const auto op = find_op<decltype(Ops::in_place)>(name("_").c_str());
    op.call(input, parameters...);
  }
  static at::Tensor call_backward(const at::Tensor& grad_output, const at::Tensor& saved, P... parameters) {
    static const auto op = find_op<decltype(Ops::backward)>(name("_backward").c_str());
    return op.call(grad_output, saved, parameters...);
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

  template <typename T>
  using Kept = std::conditional_t<std::is_same_v<T, c10::string_view>, std::string, T>;
  using Parameters = std::tuple<Kept<P>...>;

  // A straight-through op saves nothing, launches nothing, and passes the gradient on unchanged.
  template <bool kInPlace>
  struct Node : Function<Node<kInPlace>> {
    static at::Tensor forward(Context* context, const at::Tensor& input, P... parameters) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      bool saves = false;
      if constexpr (Ops::kHasBackward) saves = !Op::is_straight_through(parameters...);
      at::Tensor saved;
      if (saves && Ops::kSavesInput) saved = kInPlace ? input.clone() : input;
      at::Tensor output = input;
      if constexpr (kInPlace) {
        context->mark_dirty({input});
        call_in_place(input, parameters...);
      } else {
        output = call(input, parameters...);
      }
      if (saves) {
        context->save_for_backward({Ops::kSavesInput ? saved : output});
        if constexpr (sizeof...(P) > 0) {
          context->saved_data["parameters"] = Parameters(Kept<P>(parameters)...);
        }
      }
      return output;
    }
    static Variables backward(Context* context, const Variables& grad_outputs) {
      Variables gradients(1 + sizeof...(P));
      gradients[0] = pull(context, grad_outputs[0]);
      return gradients;
    }
  };

  static at::Tensor pull(Context* context, const at::Tensor& grad_output) {
    if constexpr (!Ops::kHasBackward) {
      return grad_output;
    } else if constexpr (sizeof...(P) == 0) {
      return call_backward(grad_output, context->get_saved_variables()[0]);
    } else {
      const auto kept = context->saved_data.find("parameters");
      if (kept == context->saved_data.end()) return grad_output;
      return std::apply(
          [&](const auto&... parameters) {
            return call_backward(grad_output, context->get_saved_variables()[0], parameters...);
          },
          kept->second.template to<Parameters>());
    }
  }

  static at::Tensor forward_autograd(const at::Tensor& input, P... parameters) {
    if (any_needs_grad(input)) return Node<false>::apply(input, parameters...);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call(input, parameters...);
  }

  static void in_place_autograd(at::Tensor input, P... parameters) {
    if (any_needs_grad(input)) {
      Ops::check(input, parameters...);
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
    static const auto op = find_op<decltype(Ops::forward_out)>(name("_out").c_str());
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      op.call(input, parameters..., out);
    }
    note_change(out);
  }

  static at::Tensor backward_autograd(const at::Tensor& grad_output, const at::Tensor& saved,
                                      P... parameters) {
    if (any_needs_grad(grad_output, saved)) {
      Ops::check_backward(grad_output, saved, parameters...);
      static const auto composed = find_composed<decltype(Ops::backward)>(name("_backward"));
      return composed.call(grad_output, saved, parameters...);
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_backward(grad_output, saved, parameters...);
  }

  // Counts the write, so that a backward that needs the old values raises an error.
  static void note_change(const at::Tensor& x) {
    if (x.defined() && !x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
  }

  static void define(torch::Library& m) {
    const std::string op = Op::kName, in_place_name = op + "_", out_name = op + "_out";
    implement_autograd(m, op.c_str(), forward_autograd);
    implement_autograd(m, in_place_name.c_str(), in_place_autograd);
    implement_autograd(m, out_name.c_str(), out_autograd);
    implement_lazy(m, in_place_name.c_str(), in_place_lazy);
    implement_lazy(m, out_name.c_str(), out_lazy);
    if constexpr (Ops::kHasBackward) implement_autograd(m, Op::kBackwardName, backward_autograd);
  }
};

}  // namespace lltm_ext
