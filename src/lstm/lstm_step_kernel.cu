// lstm, one step of a sequence: the pointwise kernels for its cell.
#include "lstm/lstm_cell.h"
#include "recurrence/stepwise/pointwise.cuh"

namespace lltm_ext {
INSTANTIATE_RECURRENCE_STEP(LstmCell, float)
INSTANTIATE_RECURRENCE_STEP(LstmCell, double)
INSTANTIATE_RECURRENCE_STEP(LstmCell, __half)
INSTANTIATE_RECURRENCE_STEP(LstmCell, __nv_bfloat16)
}  // namespace lltm_ext
