// Which tile of c is whose turn.
#pragma once

#include <stdint.h>

#include "common/math.h"

namespace lltm_ext {
namespace hopper {

struct Tile {
  int row, column, matrix;  // in tiles
};

// Tiles of a batch of matrices, `rows` x `columns` each, in an order in which those under way at a time share
// rows and columns: down bands of kBand rows.
struct Schedule {
  static constexpr int kBand = 8;
  int rows, columns, batch;

  LLTM_HOST_DEVICE int64_t total() const { return int64_t{rows} * columns * batch; }

  LLTM_HOST_DEVICE Tile at(int64_t i) const {
    const int in_matrix = static_cast<int>(i % (int64_t{rows} * columns));
    const int band = in_matrix / (kBand * columns), first = band * kBand;
    const int height = rows - first < kBand ? rows - first : kBand, in_band = in_matrix - first * columns;
    return {first + in_band % height, in_band / height, static_cast<int>(i / (int64_t{rows} * columns))};
  }
};

}  // namespace hopper
}  // namespace lltm_ext
