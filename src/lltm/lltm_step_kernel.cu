// lltm, one step of a sequence: the pointwise kernels for its cell.
#include "lltm/lltm_cell.h"
#include "recurrence/step/pointwise.cuh"

namespace lltm_ext {
INSTANTIATE_RECURRENCE_STEP(LltmCell, float)
INSTANTIATE_RECURRENCE_STEP(LltmCell, double)
INSTANTIATE_RECURRENCE_STEP(LltmCell, __half)
INSTANTIATE_RECURRENCE_STEP(LltmCell, __nv_bfloat16)
}  // namespace lltm_ext
