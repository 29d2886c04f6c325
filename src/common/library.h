// Registers an op with torch's dispatcher, and its kernels for autograd and autocast; calls ops through it.
// The portable build has src/stable/library.h in its place, and the rest in Python
// (lltm_ext/_portable_rules.py).
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <type_traits>

// Two functions of <ATen/autocast_mode.h>. That header includes those of all of torch's ops, a fifth of the
// compile time of a binding.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& x, DeviceType device_type);
}  // namespace at::autocast

namespace lltm_ext {

// One function serves every backend: its own checks reject other devices, and for Meta (fake) tensors it
// checks and allocates, but runs no kernel.
template <auto function>
void implement(torch::Library& m, const char* op) {
  m.impl(op, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, function));
}

template <typename F>
void implement_autograd(torch::Library& m, const char* op, F* function) {
  m.impl(op, torch::dispatch(c10::DispatchKey::Autograd, function));
}

template <typename F>
void implement_autocast(torch::Library& m, const char* op, F* function) {
  m.impl(op, torch::dispatch(c10::DispatchKey::AutocastCPU, function));
  m.impl(op, torch::dispatch(c10::DispatchKey::AutocastCUDA, function));
}

// Serves calls with a tensor whose memory holds the negative or the conjugate. torch's fallback expects
// that an op returns what it writes, and ends the process otherwise.
template <typename F>
void implement_lazy(torch::Library& m, const char* op, F* function) {
  m.impl(op, torch::dispatch(c10::DispatchKey::Conjugate, function));
  m.impl(op, torch::dispatch(c10::DispatchKey::Negative, function));
}

// For an autocast kernel: casts tensors to autocast's dtype (weights through its cache), and turns autocast
// off for the calls below it.
class AutocastInputs {
 public:
  explicit AutocastInputs(const at::Tensor& input)
      : device_(input.device().type()), dtype_(at::autocast::get_autocast_dtype(device_)) {}
  at::Tensor operator()(const at::Tensor& x) const { return at::autocast::cached_cast(dtype_, x, device_); }
  std::optional<at::Tensor> operator()(const std::optional<at::Tensor>& x) const {
    return x ? std::optional(at::autocast::cached_cast(dtype_, *x, device_)) : std::nullopt;
  }
  std::optional<at::Tensor> cell(const std::optional<at::Tensor>& x) const {
    return x ? std::optional(cell(*x)) : std::nullopt;
  }
  // A cell state keeps its dtype, ideally float32, unless that is the other half type.
  at::Tensor cell(const at::Tensor& x) const {
    const bool half = x.defined() && (x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16);
    return half && x.scalar_type() != dtype_ ? x.to(at::kFloat) : x;
  }

 private:
  at::DeviceType device_;
  at::ScalarType dtype_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

// The op at the top of the dispatcher, for calls that tracing, autocast or autograd must see.
template <typename Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Calls the op at the top. `function` is any function with its signature.
template <auto* function, typename... Arguments>
auto call_op(const char* name, const Arguments&... arguments) {
  static const auto op = find_op<std::remove_pointer_t<decltype(function)>>(name);
  return op.call(arguments...);
}

// Calls the op from its own autograd kernel or node.
template <auto* function, typename... Arguments>
auto call_below_autograd(const char* name, const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_op<function>(name, arguments...);
}

// Finds <name>_composed, which computes by torch's differentiable ops what will be differentiated again.
// Only Python implements it (lltm_ext/_library.py).
template <typename Signature>
auto find_composed(const std::string& name) {
  const auto op = find_op<Signature>((name + "_composed").c_str());
  TORCH_CHECK(op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd),
              name.substr(name.rfind(':') + 1),
              ": expected the Python package for a gradient that can be differentiated again (create_graph), "
              "got none. In Python: import lltm_ext");
  return op;
}

// Whether autograd must see a call with x. Even under no_grad it must see a forward-mode tangent, so that it
// raises its error instead of dropping the tangent.
inline bool needs_grad(const at::Tensor& x) {
  return x.defined() && ((at::GradMode::is_enabled() && x.requires_grad()) || x._fw_grad(0).defined());
}
inline bool needs_grad(const std::optional<at::Tensor>& x) { return x.has_value() && needs_grad(*x); }

inline bool may_be_recorded(const at::Tensor& x) { return x.defined(); }
inline bool may_be_recorded(const std::optional<at::Tensor>&) { return true; }

// An autograd node cannot take an undefined tensor (Python's None) for a required argument: such a call goes
// to the op, whose checks name the argument.
template <typename... Tensors>
bool any_needs_grad(const Tensors&... tensors) {
  return (may_be_recorded(tensors) && ...) && (needs_grad(tensors) || ...);
}

}  // namespace lltm_ext
