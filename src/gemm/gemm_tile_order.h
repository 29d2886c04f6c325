// In which order blocks compute the tiles of c.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/divisor.h"

namespace lltm_ext {

// Tiles of a batch of matrices, `rows` x `columns` each. Bands of kBand tile rows are walked column by
// column, so that blocks that run at the same time share rows of a and columns of b in L2.
struct TileOrder {
  static constexpr int kBand = 8;

  TileOrder(int64_t rows_, int64_t columns, int64_t batch)
      : rows(rows_),
        total(rows_ * columns * batch),
        by_matrix(std::max<int64_t>(rows_ * columns, 1)),
        by_band(std::max<int64_t>(kBand * columns, 1)),
        by_last_rows(rows_ % kBand == 0 ? kBand : rows_ % kBand) {}

#ifdef __CUDACC__
  struct Tile {
    int64_t matrix, row, column;
  };
  __device__ __forceinline__ Tile at(int64_t i) const {
    const int64_t matrix = by_matrix.quotient(i), in_matrix = i - matrix * by_matrix.divisor;
    const int64_t band = by_band.quotient(in_matrix), in_band = in_matrix - band * by_band.divisor;
    const bool whole = (band + 1) * kBand <= rows;
    const int64_t column = whole ? in_band / kBand : by_last_rows.quotient(in_band);
    return {matrix, band * kBand + in_band - column * (whole ? kBand : by_last_rows.divisor), column};
  }
#endif

  int64_t rows, total;
  Divisor by_matrix, by_band, by_last_rows;  // tiles of a matrix, tiles of a band, rows of the last band
};

}  // namespace lltm_ext
