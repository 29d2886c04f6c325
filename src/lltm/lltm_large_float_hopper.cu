// lltm, whole sequences of large layers in float32 on Hopper, where TF32 is allowed. The backward is
// stepwise.
#ifdef LLTM_EXT_SM90A
#include "lltm/lltm_cell.h"
#include "recurrence/large/launch.cuh"

namespace lltm_ext {
INSTANTIATE_LARGE_LAYER_FORWARD(LltmCell, float)
}  // namespace lltm_ext
#endif
