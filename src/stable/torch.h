// torch as the bindings see it in a portable build: its stable C ABI under ATen's names. The build puts this
// header in place of every header of ATen, c10 and torch that they include, so that one source serves both.
#pragma once

// torch's build of extensions asks for a Python module; this library has no part of Python.
#undef TORCH_EXTENSION_NAME

#include "stable/library.h"
#include "stable/ops.h"

namespace lltm_ext {
namespace at = ::stable_torch;
namespace c10 = ::stable_torch;
namespace torch = ::stable_torch;
}  // namespace lltm_ext
