// lstm, whole sequences in bfloat16: the persistent kernels for its cell.
#include "lstm/lstm_cell.h"
#include "recurrence/persistent/launch.cuh"

namespace lltm_ext {
INSTANTIATE_RECURRENCE(LstmCell, __nv_bfloat16)
}  // namespace lltm_ext
