// lstm, a whole sequence of torch.nn.LSTM's cell: the dispatcher ops lltm_ext::lstm, lstm_forward,
// lstm_backward and lstm_algorithm.
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>

#include "common/python.h"
#include "lstm/lstm_cell.h"
#ifndef LLTM_EXT_STABLE_ABI
#include "lstm/lstm_onednn.h"
#endif
#include "recurrence/tensors/op.h"

#ifndef LLTM_EXT_STABLE_ABI
LLTM_EMBED(lstm_cell_h, "lstm/lstm_cell.h");
#endif

namespace lltm_ext {
namespace {

struct Lstm : BuiltInOp<LstmCell> {
  static std::string name() { return "lstm"; }

#ifndef LLTM_EXT_STABLE_ABI
  static constexpr Header kCellHeader = lstm_cell_h;
  static constexpr const char* kCellType = "LstmCell";

  using CpuLayer = OneDnnLstm;
  static constexpr bool has_cpu_layer() { return true; }

  static std::pair<at::Tensor, at::Tensor> composed(const at::Tensor& gates, const at::Tensor& c) {
    const auto parts = gates.chunk(4, 1);
    const at::Tensor new_c = at::sigmoid(parts[1]) * c + at::sigmoid(parts[0]) * at::tanh(parts[2]);
    return {(at::sigmoid(parts[3]) * at::tanh(new_c)).to(gates.scalar_type()), new_c.to(c.scalar_type())};
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) { SequenceOps<Lstm>::define(m); }

#ifdef TORCH_EXTENSION_NAME
// No raw bindings: an LSTM of one step is torch.nn.LSTMCell.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}
#endif

}  // namespace lltm_ext
