// Copies of tensors with another number of hidden units: units are cut off, or added as zeros.
#include <algorithm>

#include "common/launch.cuh"
#include "recurrence/resize_units.h"

namespace lltm_ext {
namespace {

constexpr int kColumns = 32, kRows = kThreads / kColumns;

// Where an index of the copy is in the tensor, or -1 if it is a unit that the tensor lacks.
template <typename Index>
__device__ Index source_of(Index i, bool are_units, int from, int to) {
  if (!are_units || i < min(from, to)) return i;
  const Index group = i / to, unit = i % to;
  return unit < from ? group * from + unit : -1;
}

template <typename Word>
__device__ void resize(const ResizedTensor& x, int from, int to) {
  const int from_columns = x.columns_are_units ? x.columns / to * from : x.columns;
  for (int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / kColumns; row < x.rows;
       row += int64_t{gridDim.x} * kRows) {
    const int64_t from_row = source_of(row, x.rows_are_units, from, to);
    const Word* const source = static_cast<const Word*>(x.from) + from_row * from_columns;
    Word* const copy = static_cast<Word*>(x.to) + row * x.columns;
    for (int column = threadIdx.x % kColumns; column < x.columns; column += kColumns) {
      const int from_column = source_of(column, x.columns_are_units, from, to);
      copy[column] = from_row < 0 || from_column < 0 ? Word{0} : source[from_column];
    }
  }
}

// blockIdx.y is the tensor. A warp copies a row.
__global__ void __launch_bounds__(kThreads)
    resize_units_kernel(const __grid_constant__ ResizeUnitsArguments arguments) {
  const ResizedTensor& x = arguments.tensors[blockIdx.y];
  const int from = arguments.from, to = arguments.to;
  if (x.element_size == 2) return resize<uint16_t>(x, from, to);
  if (x.element_size == 4) return resize<uint32_t>(x, from, to);
  resize<uint64_t>(x, from, to);
}

}  // namespace

cudaError_t resize_units(const ResizeUnitsArguments& arguments, cudaStream_t stream) {
  int64_t rows = 1;
  for (int i = 0; i < arguments.count; ++i) rows = std::max(rows, arguments.tensors[i].rows);
  const dim3 blocks(static_cast<unsigned>(std::min(ceil_div(rows, kRows), kMaxBlocks)), arguments.count);
  return launch_kernel(resize_units_kernel, blocks, dim3(kThreads), /*shared_bytes=*/0,
                       /*programmatic=*/false, stream, arguments);
}

}  // namespace lltm_ext
