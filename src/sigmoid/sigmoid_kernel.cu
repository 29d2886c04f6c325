// sigmoid on CUDA: one elementwise kernel for each direction.
#include "common/elementwise.cuh"
#include "sigmoid/sigmoid.h"

namespace lltm_ext {

LLTM_ELEMENTWISE(Sigmoid, 1)
LLTM_ELEMENTWISE(SigmoidBackward, 2)
LLTM_ELEMENTWISE_COMPLEX(Sigmoid, 1)
LLTM_ELEMENTWISE_COMPLEX(SigmoidBackward, 2)

}  // namespace lltm_ext
