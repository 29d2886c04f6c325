// torch for the bindings of a portable build: its stable C ABI under ATen's names. The build replaces all
// ATen, c10 and torch headers that the bindings include with this one.
#pragma once

// Defined by torch's extension build, but this library is not a Python module.
#undef TORCH_EXTENSION_NAME

#include "stable/library.h"
#include "stable/ops.h"

namespace lltm_ext {
namespace at = ::stable_torch;
namespace c10 = ::stable_torch;
namespace torch = ::stable_torch;
}  // namespace lltm_ext
