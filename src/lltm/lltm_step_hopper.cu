// lltm, one step of a sequence on Hopper: the product and the cell in one kernel.
#ifdef LLTM_EXT_SM90A
#include "common/recurrence/step_hopper.cuh"
#include "lltm/lltm_cell.h"

namespace lltm_ext {
INSTANTIATE_RECURRENCE_STEPS(LltmCell, __half)
INSTANTIATE_RECURRENCE_STEPS(LltmCell, __nv_bfloat16)
}  // namespace lltm_ext
#endif
