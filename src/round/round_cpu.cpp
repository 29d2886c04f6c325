// round, floor, ceil, trunc and binarize on the CPU, with the functors of the kernels.
#include "common/elementwise_cpu.h"
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
