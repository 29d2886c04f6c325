// Registers an op with torch's dispatcher, and its kernels for autograd and autocast.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#ifndef LLTM_EXT_STABLE_ABI
#include <torch/csrc/autograd/custom_function.h>

// Two functions of <ATen/autocast_mode.h>. That header includes those of all of torch's ops, a fifth of the
// compile time of a binding.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& x, DeviceType device_type);
}  // namespace at::autocast
#endif

namespace lltm_ext {

// One function serves every backend: its own checks reject other devices, and for Meta (fake) tensors it
// checks and allocates, but runs no kernel.
template <auto function>
void implement(torch::Library& m, const char* op) {
#ifdef LLTM_EXT_STABLE_ABI
  m.impl<function>(op);
#else
  m.impl(op, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, function));
#endif
}

// The portable build, on the stable ABI, registers the rest in Python (lltm_ext/_portable_rules.py).
#ifndef LLTM_EXT_STABLE_ABI

template <typename F>
void implement_autograd(torch::Library& m, const char* op, F* function) {
  m.impl(op, torch::dispatch(c10::DispatchKey::Autograd, function));
}

template <typename F>
void implement_autocast(torch::Library& m, const char* op, F* function) {
  m.impl(op, torch::dispatch(c10::DispatchKey::AutocastCPU, function));
  m.impl(op, torch::dispatch(c10::DispatchKey::AutocastCUDA, function));
}

// For calls with a tensor whose memory holds the negative or the conjugate. torch's fallback for them expects
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
  // A cell state keeps its dtype, best float32, unless that is the other half type.
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

// Whether autograd must see a call with x. It must for a forward-mode tangent, even under no_grad, so that
// autograd raises its error instead of dropping the tangent.
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
#endif

}  // namespace lltm_ext
