// lstm, whole sequences in float32: the persistent kernels for its cell.
#include "common/recurrence/engine.cuh"
#include "lstm/lstm_cell.h"

namespace lltm_ext {
INSTANTIATE_RECURRENCE(LstmCell, float)
}  // namespace lltm_ext
