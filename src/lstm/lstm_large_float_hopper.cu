// lstm, whole sequences of large layers in float32 on Hopper, where TF32 is allowed. The backward is
// stepwise.
#ifdef LLTM_EXT_SM90A
#include "lstm/lstm_cell.h"
#include "recurrence/large/launch.cuh"

namespace lltm_ext {
INSTANTIATE_LARGE_LAYER_FORWARD(LstmCell, float)
}  // namespace lltm_ext
#endif
