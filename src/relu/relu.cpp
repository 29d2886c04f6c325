// relu: its dispatcher ops and raw bindings.
#include "relu/relu.h"

#include <ATen/ops/masked_fill.h>

#include "common/unary.h"

namespace lltm_ext {

LLTM_UNARY_OP(relu, Relu, ReluBackward, Types::kFloating, grad_output.masked_fill(output <= 0, 0))

}  // namespace lltm_ext
