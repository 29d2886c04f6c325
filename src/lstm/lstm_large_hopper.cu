// lstm, whole sequences of large layers on Hopper.
#ifdef LLTM_EXT_SM90A
#include "lstm/lstm_cell.h"
#include "recurrence/large/launch.cuh"

namespace lltm_ext {
INSTANTIATE_LARGE_LAYER(LstmCell, __half)
INSTANTIATE_LARGE_LAYER(LstmCell, __nv_bfloat16)
}  // namespace lltm_ext
#endif
