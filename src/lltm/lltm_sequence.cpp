// lltm, a whole sequence: the dispatcher ops lltm_ext::lltm, lltm_forward, lltm_backward and lltm_algorithm.
#include "lltm/lltm_cell.h"
#include "lltm/lltm_composed.h"
#include "recurrence/tensors/op.h"

#ifndef LLTM_EXT_STABLE_ABI
LLTM_EMBED(lltm_cell_h, "lltm/lltm_cell.h");
#endif

namespace lltm_ext {
namespace {

struct Lltm : BuiltInOp<LltmCell> {
  static std::string name() { return "lltm"; }

#ifndef LLTM_EXT_STABLE_ABI
  static constexpr Header kCellHeader = lltm_cell_h;
  static constexpr const char* kCellType = "LltmCell";

  static std::pair<at::Tensor, at::Tensor> composed(const at::Tensor& gates, const at::Tensor& c) {
    return composed_cell(gates, c);
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { SequenceOps<Lltm>::define(m); }

}  // namespace lltm_ext
