// relu on CUDA: one elementwise kernel for each direction.
#include "common/elementwise.cuh"
#include "relu/relu.h"

namespace lltm_ext {

LLTM_ELEMENTWISE(Relu, 1)
LLTM_ELEMENTWISE(ReluBackward, 2)

}  // namespace lltm_ext
