// The sizes of a fused step of few rows (small_batch.cuh): how a block divides its work, and its shared
// memory. The kernels take the rows at compile time. For host and device.
#pragma once

#include "common/portable.h"

namespace lltm_ext {

// A block's part of a step: all rows of the batch, at most `rows`, by `units`. Its warps split K `split_k`
// times. All are 0 for another kind of step.
struct SmallBatchTile {
  int rows = 0, units = 0, split_k = 0;
};

// The rows that kernels are compiled for.
constexpr int kSmallBatch[] = {1, 4, 8, 16};
constexpr int kMostSmallBatch = 16;

struct SmallBatchShape {
  int products;  // products of a unit: forward its gates, backward the gradient of its h
  SmallBatchTile tile;

  // The products of a row of the batch are columns. A warp has some of them, for one slice of K.
  static constexpr int kWarpColumns = 8, kMostWarps = 8, kMostColumns = kMostWarps * kWarpColumns;
  static constexpr int kMostThreads = 32 * kMostWarps;
  static constexpr int kDepth = 64;  // elements of K that a warp takes at once

  // A ring of stages holds the rows' values in K. A stage has the same size for any number of rows.
  static constexpr int kStages = 3, kStageSize = 1024;  // in floats, for each slice of K
  static constexpr int stage_depth(int rows) { return kStageSize / rows; }

  LLTM_HOST_DEVICE constexpr int column_tiles() const {
    return (tile.units * products + kWarpColumns - 1) / kWarpColumns;
  }
  LLTM_HOST_DEVICE constexpr int columns() const { return column_tiles() * kWarpColumns; }
  LLTM_HOST_DEVICE constexpr int threads() const { return 32 * column_tiles() * tile.split_k; }
  // A slice's part of K.
  LLTM_HOST_DEVICE constexpr int slice_depth(int k) const {
    return ((k + kDepth - 1) / kDepth + tile.split_k - 1) / tile.split_k * kDepth;
  }
  // The partial sums replace the ring, and never need more.
  constexpr int shared_bytes() const { return kStages * tile.split_k * kStageSize * 4; }
};
static_assert(SmallBatchShape::kMostColumns * kMostSmallBatch <=
              SmallBatchShape::kStages * SmallBatchShape::kStageSize);

}  // namespace lltm_ext
