// Python registers the autograd of elementwise ops (lltm_ext/_portable_rules.py).
#pragma once

#include "stable/library.h"

namespace lltm_ext {
template <class Op, typename... P>
struct UnaryAutograd {
  static void define(::stable_torch::Library&) {}
};
}  // namespace lltm_ext
