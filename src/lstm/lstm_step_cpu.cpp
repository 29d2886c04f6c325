// One step of the LSTM on the CPU.
#include "lstm/lstm_cell.h"
#include "recurrence/stepwise/pointwise_cpu.h"

INSTANTIATE_RECURRENCE_STEP_CPU(LstmCell)
