// lltm, whole sequences in float16: the persistent kernels for its cell.
#include "lltm/lltm_cell.h"
#include "recurrence/persistent/launch.cuh"

namespace lltm_ext {
INSTANTIATE_RECURRENCE(LltmCell, __half)
}  // namespace lltm_ext
