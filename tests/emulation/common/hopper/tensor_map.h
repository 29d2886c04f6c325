// In place of src/common/hopper/tensor_map.h: a tensor of half types, for the TMA of the emulation.
#pragma once

#include <cstdint>

struct CUtensorMap {
  const uint16_t* data;
  int64_t columns, rows, batch, row_stride, batch_stride;  // strides in elements
  int box_rows;                                            // of boxes of 64 columns
};
