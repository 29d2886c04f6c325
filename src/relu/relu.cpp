// relu: its dispatcher ops and raw bindings.
#include "relu/relu.h"

#include "common/unary.h"

namespace lltm_ext {

LLTM_UNARY_OP(relu, Relu, ReluBackward, Types::kFloating)

}  // namespace lltm_ext
