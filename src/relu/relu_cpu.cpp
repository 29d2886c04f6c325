// relu on the CPU, with the functors of the kernels.
#include "common/elementwise_cpu.h"
#include "relu/relu.h"

namespace lltm_ext {

LLTM_ELEMENTWISE(Relu, 1)
LLTM_ELEMENTWISE(ReluBackward, 2)

}  // namespace lltm_ext
