// lltm on the CPU, one step and the steps of a sequence: the pointwise loops.
#include "lltm/lltm.h"
#include "recurrence/stepwise/pointwise_cpu.h"

INSTANTIATE_RECURRENCE_STEP_CPU(LltmCell)

INSTANTIATE_STEP_CPU(LltmOneStepCell, float, float, float)
INSTANTIATE_STEP_CPU(LltmOneStepCell, double, double, double)
INSTANTIATE_STEP_CPU(LltmOneStepCell, c10::Half, c10::Half, c10::Half)
INSTANTIATE_STEP_CPU(LltmOneStepCell, c10::Half, float, float)
INSTANTIATE_STEP_CPU(LltmOneStepCell, c10::BFloat16, c10::BFloat16, c10::BFloat16)
INSTANTIATE_STEP_CPU(LltmOneStepCell, c10::BFloat16, float, float)
