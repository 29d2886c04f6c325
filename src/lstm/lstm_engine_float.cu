// lstm, whole sequences in float32: the persistent kernels for its cell.
#include "lstm/lstm_cell.h"
#include "recurrence/persistent/launch.cuh"

namespace lltm_ext {
INSTANTIATE_RECURRENCE(LstmCell, float)
}  // namespace lltm_ext
