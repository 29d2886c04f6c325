// One step of the LLTM on the CPU.
#include "lltm/lltm_cell.h"
#include "recurrence/step/pointwise_cpu.h"

INSTANTIATE_RECURRENCE_STEP_CPU(LltmCell)
