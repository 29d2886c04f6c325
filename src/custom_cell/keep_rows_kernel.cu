// What rows keep of their h, for the gradients of users' cells.
#include "recurrence/step/pointwise.cuh"

namespace lltm_ext {
INSTANTIATE_KEEP_ROWS(float)
INSTANTIATE_KEEP_ROWS(double)
INSTANTIATE_KEEP_ROWS(__half)
INSTANTIATE_KEEP_ROWS(__nv_bfloat16)
}  // namespace lltm_ext
