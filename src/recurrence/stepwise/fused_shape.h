// The sizes of a fused step: its output tiles and its shared memory. The kernels take them at compile time,
// the planner and the launches at run time. For host and device.
#pragma once

#include "common/hopper/sizes.h"
#include "common/portable.h"

namespace lltm_ext {

// The output tile of a fused step, which multiplies and applies the cell in one kernel: `rows` of the batch
// by FusedStepShape::units, whose K is split over a cluster of `split_k` blocks. Both are 0 if the step is
// not fused: a library's product then precedes the pointwise kernel.
struct FusedStepTile {
  int rows = 0, split_k = 0;
  bool is_spread = false;  // no more than two blocks on a multiprocessor, though more have room
};

struct FusedStepShape {
  int gates;
  int rows;  // rows of a tile: 64 or 128
  bool backward;

  constexpr int units() const {
    if (backward) return rows > 64 ? 144 : 64;
    return gates <= 2 ? 64 : 32;
  }
  constexpr int columns() const { return backward ? units() : gates * units(); }  // columns of the product
  // Whether there is such a kernel. wgmma computes at most 256 columns. Forward, a library's product and a
  // pointwise kernel are faster than tiles of 128 rows and more than three gates. Fewer have wider tiles.
  constexpr bool exists() const { return columns() <= 256 && (backward || rows == 64 || gates == 3); }

  constexpr int consumer_threads() const { return 2 * rows; }        // a warpgroup for 64 rows
  constexpr int threads() const { return consumer_threads() + 32; }  // plus a producer warp
  // Blocks per multiprocessor. Many hide the way to memory where a step has many tiles of little K.
  constexpr int blocks() const { return rows > 64 ? 1 : columns() > 128 ? 2 : 3; }
  constexpr int available_bytes() const { return 226 * 1024 / blocks(); }

  // As many stages as fit in shared memory. After the product, the partial sums replace them.
  constexpr int stage_bytes() const { return (rows + columns()) * hopper::kSwizzleBytes; }
  constexpr int stages() const { return (available_bytes() - hopper::kBarrierBytes) / stage_bytes(); }
  constexpr int stages_or_sums_bytes() const {
    return larger(stages() * stage_bytes(), hopper::partial_sums_bytes(rows, columns()));
  }
  constexpr int shared_bytes() const { return stages_or_sums_bytes() + hopper::kBarrierBytes; }
  // Of which a multiprocessor has room for two blocks, not for three.
  constexpr int spread_bytes() const { return larger(shared_bytes(), 228 * 1024 / 3); }
};

}  // namespace lltm_ext
