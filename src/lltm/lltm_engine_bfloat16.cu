// lltm, whole sequences in bfloat16: the persistent kernels for its cell.
#include "common/recurrence/engine.cuh"
#include "lltm/lltm_cell.h"

namespace lltm_ext {
INSTANTIATE_RECURRENCE(LltmCell, __nv_bfloat16)
}  // namespace lltm_ext
