// lstm, one step of a sequence on Hopper: the product and the cell in one kernel.
#ifdef LLTM_EXT_SM90A
#include "lstm/lstm_cell.h"
#include "recurrence/stepwise/fused_hopper.cuh"

namespace lltm_ext {
INSTANTIATE_FUSED_STEPS(LstmCell, __half)
INSTANTIATE_FUSED_STEPS(LstmCell, __nv_bfloat16)
}  // namespace lltm_ext
#endif
