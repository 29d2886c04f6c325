// What rows keep of their h, and sums of rows, for the gradients of users' cells.
#include "recurrence/stepwise/pointwise.cuh"

namespace lltm_ext {
INSTANTIATE_ROWS(float)
INSTANTIATE_ROWS(double)
INSTANTIATE_ROWS(__half)
INSTANTIATE_ROWS(__nv_bfloat16)
}  // namespace lltm_ext
