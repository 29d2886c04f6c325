// Registration with the dispatcher on the stable C ABI: schemas, and their kernels for every backend.
// lltm_ext/_portable_rules.py registers gradients, autocast and the shapes of traced graphs.
#pragma once

#include <string>
#include <vector>

#include "stable/ops.h"

namespace stable_torch {

enum class Tag { pt2_compliant_tag };

// Each op is also registered in a second namespace, <name>_checks, with the same kernel. Traced calls run it
// on meta tensors for its checks, because the op itself has a meta kernel in Python.
class Library {
 public:
  Library(const std::string& name, const char* file, uint32_t line)
      : ops_(name, file, line), checks_(name + "_checks", file, line) {}

  void def(const char* schema, const std::vector<Tag>&) {
    ops_.definitions.def(schema);
    checks_.definitions.def(schema);
  }

  template <auto function>
  void impl(const char* op) {
    ops_.kernels.impl(op, Signature<decltype(function)>::template boxed<function>);
    checks_.kernels.impl(op, Signature<decltype(function)>::template boxed<function>);
  }

 private:
  struct Namespace {
    Namespace(const std::string& name, const char* file, uint32_t line)
        : definitions(Stable::Kind::FRAGMENT, name.c_str(), nullptr, file, line),
          kernels(Stable::Kind::IMPL, name.c_str(), "CompositeExplicitAutograd", file, line) {}
    using Stable = ::torch::stable::detail::StableLibrary;
    Stable definitions, kernels;
  };
  Namespace ops_, checks_;
};

// Makes a function return its bytes as a tensor, because the dispatcher's strings can't hold them.
template <auto function>
struct AsTensor;
template <typename... Args, std::string (*function)(Args...)>
struct AsTensor<function> {
  static Tensor call(Args... args) {
    const std::string bytes = function(args...);
    const Tensor tensor = empty({static_cast<int64_t>(bytes.size())}, kByte);
    std::copy(bytes.begin(), bytes.end(), tensor.mutable_data_ptr<char>());
    return tensor;
  }
};

namespace autograd {
using variable_list = std::vector<Tensor>;
}

}  // namespace stable_torch

namespace lltm_ext {
template <auto function>
void implement(::stable_torch::Library& m, const char* op) {
  m.impl<function>(op);
}
}  // namespace lltm_ext

// Like torch's macro, but in the caller's namespace.
#define TORCH_LIBRARY_FRAGMENT(name, m)                                                                \
  static void register_##name(::stable_torch::Library&);                                               \
  static ::stable_torch::Library& name##_library() {                                                   \
    static ::stable_torch::Library library(#name, __FILE__, __LINE__);                                 \
    return library;                                                                                    \
  }                                                                                                    \
  [[maybe_unused]] static const bool name##_is_registered = (register_##name(name##_library()), true); \
  static void register_##name(::stable_torch::Library& m)
