// The stable ABI cannot call oneDNN's layer.
#pragma once

#include "custom_cell/custom_cell.h"

namespace lltm_ext {

struct OneDnnLstm {
  static bool takes(const CellOp&, const CellCall&) { return false; }
  static variable_list run(const CellCall&) { return {}; }
};

}  // namespace lltm_ext
