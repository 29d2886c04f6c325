// lltm, one step of a sequence of few rows: the product and the cell in one kernel.
#include "lltm/lltm_cell.h"
#include "recurrence/stepwise/small_batch.cuh"

namespace lltm_ext {
INSTANTIATE_FEW_ROWS_STEPS(LltmCell)
}  // namespace lltm_ext
