// Hidden sizes are not padded, because the autograd of padding is in C++ (docs/design/portable.md).
#pragma once

#include "custom_cell/launch.h"

namespace lltm_ext {

inline bool pads_hidden(const CellOp&, const CellCall&) { return false; }
inline int64_t padded_hidden(int64_t hidden) { return hidden; }

template <typename F>
variable_list run_with_padded_hidden(const CellShape&, const CellCall&, F&&) {
  return {};
}

}  // namespace lltm_ext
