// lltm, a whole sequence: the table of its kernels. src/custom_cell calls them.
#include "common/embed.h"
#include "custom_cell/built_in_schemas.h"
#include "lltm/lltm_cell.h"
#include "recurrence/compiled_cell.h"

LLTM_EMBED(lltm_cell_h, "lltm/lltm_cell.h");

namespace lltm_ext {
namespace {

const CompiledCell compiled = compiled_cell<LltmCell>(lltm_cell_h.text, "LltmCell");

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { define_built_in(m, "lltm"); }

#ifdef TORCH_EXTENSION_NAME
void share_lltm() { share_compiled_cell("lltm", compiled); }
#else
[[maybe_unused]] const bool is_added = add_compiled_cell("lltm", compiled);
#endif

}  // namespace lltm_ext
