// lltm, whole sequences in float32: the persistent kernels for its cell.
#include "common/recurrence/engine.cuh"
#include "lltm/lltm_cell.h"

namespace lltm_ext {
INSTANTIATE_RECURRENCE(LltmCell, float)
}  // namespace lltm_ext
