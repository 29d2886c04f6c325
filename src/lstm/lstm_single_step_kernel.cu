// lstm, a sequence of a single step: the products and the cell in one kernel.
#include "lstm/lstm_cell.h"
#include "recurrence/stepwise/single_step.cuh"

namespace lltm_ext {
INSTANTIATE_SINGLE_STEP(LstmCell)
}  // namespace lltm_ext
