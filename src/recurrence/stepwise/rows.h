// How threads share the row of a cell whose units read values over all units of their row (rows.cuh).
#pragma once

#include "recurrence/over_units.h"

namespace lltm_ext {

constexpr int kMostRowThreads = 1024;  // of a block

// A thread a unit. All blocks have equally many.
struct RowOfThreads {
  int blocks, threads;

  LLTM_HOST_DEVICE constexpr int warps() const { return (threads + 31) / 32; }  // of a block
};

// The fewest blocks that have room for a row; none if there are no such blocks.
constexpr RowOfThreads row_of_threads(int64_t hidden, bool has_clusters) {
  for (int blocks = 1; blocks <= (has_clusters ? kMostRowBlocks : 1); ++blocks) {
    if (hidden % blocks == 0 && hidden / blocks <= kMostRowThreads) {
      return {blocks, static_cast<int>(hidden / blocks)};
    }
  }
  return {0, 0};
}

}  // namespace lltm_ext
