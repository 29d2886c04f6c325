// sigmoid: its dispatcher ops and raw bindings.
#include "sigmoid/sigmoid.h"

#include "common/unary.h"

namespace lltm_ext {

LLTM_UNARY_OP(sigmoid, Sigmoid, SigmoidBackward, Types::kFloatingOrComplex)

}  // namespace lltm_ext
