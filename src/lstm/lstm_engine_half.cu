// lstm, whole sequences in float16: the persistent kernels for its cell.
#include "lstm/lstm_cell.h"
#include "recurrence/persistent/launch.cuh"

namespace lltm_ext {
INSTANTIATE_RECURRENCE(LstmCell, __half)
}  // namespace lltm_ext
