// lltm, a whole sequence: the dispatcher ops lltm_ext::lltm, lltm_forward and so on.
#include "custom_cell/built_in.h"

namespace lltm_ext {
namespace {

struct Lltm {
  static constexpr const char* kName = "lltm";
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { BuiltInOps<Lltm>::implement(m); }

}  // namespace lltm_ext
