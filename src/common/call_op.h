// Calls of an op through torch's dispatcher, so that tracing, autocast and autograd see them.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <type_traits>

#include "common/library.h"

#ifndef LLTM_EXT_STABLE_ABI  // in the portable build these calls are in Python

namespace lltm_ext {

// `function` is any function with the op's signature.
template <auto* function, typename... Arguments>
auto call_op(const char* name, const Arguments&... arguments) {
  static const auto op = find_op<std::remove_pointer_t<decltype(function)>>(name);
  return op.call(arguments...);
}

// For the op's own autograd kernel and node.
template <auto* function, typename... Arguments>
auto call_below_autograd(const char* name, const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_op<function>(name, arguments...);
}

}  // namespace lltm_ext

#endif
