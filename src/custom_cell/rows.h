// The rows of a sequence: which ones belong to a step, and how kernels get them.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "common/dispatch.h"
#include "custom_cell/call.h"
#include "recurrence/cell.h"

namespace lltm_ext {

struct RowRange {
  int64_t first, count;
};

// The rows of each step, in the order in which the steps are computed.
class RowsOfSteps {
 public:
  RowsOfSteps(at::OptionalIntArrayRef batch_sizes, int64_t length, int64_t batch, bool reverse)
      : length_(length), batch_(batch), reverse_(reverse) {
    if (!batch_sizes) return;
    int64_t first = 0;
    for (const int64_t count : *batch_sizes) {
      packed_.push_back({first, count});
      first += count;
    }
  }
  size_t size() const { return static_cast<size_t>(length_); }
  RowRange operator[](size_t k) const {
    const int64_t step = static_cast<int64_t>(k), time = reverse_ ? length_ - 1 - step : step;
    return packed_.empty() ? RowRange{time * batch_, batch_} : packed_[static_cast<size_t>(time)];
  }

 private:
  int64_t length_, batch_;
  bool reverse_;
  std::vector<RowRange> packed_;  // by time; empty if all steps have `batch_` rows
};

inline int64_t length_of(const at::Tensor& input, at::OptionalIntArrayRef batch_sizes) {
  return batch_sizes ? static_cast<int64_t>(batch_sizes->size()) : input.size(0);
}

inline int64_t packed_batch_of(const Direction& d, at::IntArrayRef batch_sizes) {
  return d.h0.defined() ? d.h0.size(0) : batch_sizes.empty() ? 0 : batch_sizes[0];
}

inline at::Tensor flatten_rows(const at::Tensor& x) {
  return x.dim() == 3 ? x.reshape({x.size(0) * x.size(1), x.size(2)}) : x.contiguous();
}

// The first `rows` rows of [..., rows, columns]: x itself if that is all of them, to save a view.
inline at::Tensor first_rows(const at::Tensor& x, int64_t rows) {
  return rows == x.size(-2) ? x : x.narrow(-2, 0, rows);
}

// The input's shape, dense or packed, with another last dimension.
inline c10::SymDimVector sizes_like_input(const at::Tensor& input, const c10::SymInt& width) {
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  sizes.back() = width;
  return sizes;
}

inline at::Tensor empty_like_input(const at::Tensor& input, const c10::SymInt& width) {
  return at::empty_symint(sizes_like_input(input, width), input.options());
}

inline at::Tensor empty_contiguous(const at::Tensor& x) {
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}

// x, contiguous and at a multiple of 16 bytes; undefined if x is.
inline at::Tensor aligned(const at::Tensor& x) {
  if (!x.defined()) return x;
  const at::Tensor contiguous = x.contiguous();
  return reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % 16 == 0 ? contiguous : contiguous.clone();
}

// A pointer to rows from `row` on of x, contiguous [..., width] of T; null if x is undefined.
template <typename T>
const T* rows_from(const at::Tensor& x, int64_t row) {
  return x.defined() ? pointer<T>(x) + row * x.size(-1) : nullptr;
}

inline bool is_bool(const at::Tensor& x) { return x.defined() && x.scalar_type() == at::kBool; }

// The resets from `row` on.
template <typename T>
Resets<acc_t<T>> resets_from(const at::Tensor& reset, int64_t row) {
  if (!reset.defined()) return {};
  return Resets<acc_t<T>>{pointer<void>(reset), is_bool(reset)}.from(row);
}

inline at::Tensor in_float32(const at::Tensor& x) { return x.defined() ? x.to(at::kFloat) : x; }

inline at::Tensor contiguous_or_none(const at::Tensor& x) { return x.defined() ? x.contiguous() : x; }

// values = x, or zeros if x is undefined.
inline void set_values(const at::Tensor& values, const at::Tensor& x) {
  x.defined() ? values.copy_(x) : values.zero_();
}

}  // namespace lltm_ext
