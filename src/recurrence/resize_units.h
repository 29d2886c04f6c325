// Copies of tensors with another number of hidden units, all in one launch.
#pragma once

#include <cstdint>

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace lltm_ext {

// Which dimensions of a tensor count hidden units, in groups where a weight has rows for several gates.
enum UnitsIn : int64_t { kLastDimension = 1, kFirstDimension = 2 };

// A copy [rows, columns] of a contiguous tensor.
struct ResizedTensor {
  const void* from;
  void* to;
  int64_t rows;
  int columns;
  int element_size;  // 2, 4 or 8
  bool rows_are_units, columns_are_units;
};

constexpr int kMostResized = 12;
struct ResizeUnitsArguments {
  ResizedTensor tensors[kMostResized];
  int count;
  int from, to;  // units of a group, in the tensors and in their copies
};

#ifdef LLTM_EXT_WITH_CUDA
cudaError_t resize_units(const ResizeUnitsArguments& arguments, cudaStream_t stream);
#endif

}  // namespace lltm_ext
