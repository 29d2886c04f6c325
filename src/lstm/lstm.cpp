// lstm, torch.nn.LSTM's cell over a whole sequence: the table of its kernels. src/custom_cell calls them.
#include "common/embed.h"
#include "custom_cell/built_in_schemas.h"
#include "lstm/lstm_cell.h"
#include "recurrence/compiled_cell.h"

LLTM_EMBED(lstm_cell_h, "lstm/lstm_cell.h");

namespace lltm_ext {
namespace {

const CompiledCell compiled = compiled_cell<LstmCell>(lstm_cell_h.text, "LstmCell");

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { define_built_in(m, "lstm"); }

#ifdef TORCH_EXTENSION_NAME
// It has no raw bindings: an LSTM of one step is torch.nn.LSTMCell.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { share_compiled_cell("lstm", compiled); }
#else
[[maybe_unused]] const bool is_added = add_compiled_cell("lstm", compiled);
#endif

}  // namespace lltm_ext
