// lltm, whole sequences of large layers on Hopper.
#ifdef LLTM_EXT_SM90A
#include "lltm/lltm_cell.h"
#include "recurrence/large/launch.cuh"

namespace lltm_ext {
INSTANTIATE_LARGE_LAYER(LltmCell, __half)
INSTANTIATE_LARGE_LAYER(LltmCell, __nv_bfloat16)
}  // namespace lltm_ext
#endif
