// lstm, a whole sequence: the dispatcher ops lltm_ext::lstm, lstm_forward and so on.
#include "custom_cell/built_in.h"

namespace lltm_ext {
namespace {

struct Lstm {
  static constexpr const char* kName = "lstm";
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { BuiltInOps<Lstm>::implement(m); }

}  // namespace lltm_ext
