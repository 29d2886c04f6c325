// One step of the LLTM on the CPU.
#include "common/recurrence/step_cpu.h"
#include "lltm/lltm_cell.h"

INSTANTIATE_RECURRENCE_STEP_CPU(LltmCell)
