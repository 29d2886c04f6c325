// lltm, one step and the steps of a sequence: the pointwise kernels.
#include "lltm/lltm.h"
#include "recurrence/stepwise/pointwise.cuh"

namespace lltm_ext {

template <typename T>
struct StepTraits<LltmOneStepCell, T> {
  using Math = ExactMath;
  static constexpr bool kSumsBias = true;
};

INSTANTIATE_RECURRENCE_STEP(LltmCell, float)
INSTANTIATE_RECURRENCE_STEP(LltmCell, double)
INSTANTIATE_RECURRENCE_STEP(LltmCell, __half)
INSTANTIATE_RECURRENCE_STEP(LltmCell, __nv_bfloat16)

INSTANTIATE_STEP(LltmOneStepCell, float, float, float)
INSTANTIATE_STEP(LltmOneStepCell, double, double, double)
INSTANTIATE_STEP(LltmOneStepCell, __half, __half, __half)
INSTANTIATE_STEP(LltmOneStepCell, __half, float, float)
INSTANTIATE_STEP(LltmOneStepCell, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16)
INSTANTIATE_STEP(LltmOneStepCell, __nv_bfloat16, float, float)

}  // namespace lltm_ext
