// lltm, whole sequences in float32: the persistent kernels for its cell.
#include "lltm/lltm_cell.h"
#include "recurrence/persistent/launch.cuh"

namespace lltm_ext {
INSTANTIATE_RECURRENCE(LltmCell, float)
}  // namespace lltm_ext
