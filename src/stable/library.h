// Registration with the dispatcher, on the stable C ABI: definitions and their kernels for every backend.
// Gradients, casts and shapes of traced graphs are registered by lltm_ext/_portable_rules.py.
#pragma once

#include <string>
#include <vector>

#include "stable/tensor.h"

namespace stable_torch {

enum class Tag { pt2_compliant_tag };

// Each op has a twin of another namespace, <name>_checks: the same kernel. It is for meta tensors, by which
// traced calls are checked; those of the op itself go to the shapes registered in Python.
class Library {
 public:
  Library(const std::string& name, const char* file, uint32_t line)
      : op_(name, file, line), twin_(name + "_checks", file, line) {}

  void def(const char* schema, const std::vector<Tag>&) {
    op_.definitions.def(schema);
    twin_.definitions.def(schema);
  }

  template <auto function>
  void impl(const char* op) {
    op_.kernels.impl(op, Signature<decltype(function)>::template boxed<function>);
    twin_.kernels.impl(op, Signature<decltype(function)>::template boxed<function>);
  }

 private:
  struct Namespace {
    Namespace(const std::string& name, const char* file, uint32_t line)
        : definitions(Stable::Kind::FRAGMENT, name.c_str(), nullptr, file, line),
          kernels(Stable::Kind::IMPL, name.c_str(), "CompositeExplicitAutograd", file, line) {}
    using Stable = ::torch::stable::detail::StableLibrary;
    Stable definitions, kernels;
  };
  Namespace op_, twin_;
};

namespace autograd {
using variable_list = std::vector<Tensor>;
}

}  // namespace stable_torch

// As torch's, in the namespace of the caller.
#define TORCH_LIBRARY_FRAGMENT(name, m)                                                                \
  static void register_##name(::stable_torch::Library&);                                               \
  static ::stable_torch::Library& name##_library() {                                                   \
    static ::stable_torch::Library library(#name, __FILE__, __LINE__);                                 \
    return library;                                                                                    \
  }                                                                                                    \
  [[maybe_unused]] static const bool name##_is_registered = (register_##name(name##_library()), true); \
  static void register_##name(::stable_torch::Library& m)
