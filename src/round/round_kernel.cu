// round, floor, ceil, trunc and binarize on CUDA: one elementwise kernel each.
#include "common/elementwise.cuh"
#include "round/round.h"

namespace lltm_ext {

LLTM_ELEMENTWISE(Round, 1)
LLTM_ELEMENTWISE(Floor, 1)
LLTM_ELEMENTWISE(Ceil, 1)
LLTM_ELEMENTWISE(Trunc, 1)
LLTM_ELEMENTWISE(Binarize, 1)
LLTM_ELEMENTWISE(BinarizeClippedBackward, 2)
LLTM_ELEMENTWISE(BinarizeTanhBackward, 2)

}  // namespace lltm_ext
