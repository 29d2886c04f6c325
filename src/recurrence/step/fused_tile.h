// The output tiles of fused steps. For host and device.
#pragma once

namespace lltm_ext {

// The output tile of a fused step, which multiplies and applies the cell in one kernel: `rows` of the batch
// by fused_*_units units, whose K is split over a cluster of `split_k` blocks. 0: the step is not fused, and
// a library's product precedes the pointwise kernel.
struct FusedStepTile {
  int rows = 0, split_k = 0;
};
constexpr int kFusedForwardUnits = 32;
constexpr int fused_backward_units(int rows) { return rows > 64 ? 144 : 64; }

}  // namespace lltm_ext
