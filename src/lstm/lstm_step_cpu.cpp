// One step of the LSTM on the CPU.
#include "common/recurrence/step_cpu.h"
#include "lstm/lstm_cell.h"

INSTANTIATE_RECURRENCE_STEP_CPU(LstmCell)
