// Elementwise ops on tensors: allocation, memory order and launch. Includes the engines' contract only.
#pragma once

#include <ATen/ops/empty_like.h>

#include "common/dispatch.h"

namespace lltm_ext {

// A tensor whose elements lie without gaps, in whatever order; copies only one that has gaps or overlaps.
inline at::Tensor dense(const at::Tensor& x) { return x.is_non_overlapping_and_dense() ? x : x.contiguous(); }

// The same values with the strides of `like`, so that both can be walked in memory order.
inline at::Tensor with_strides_of(const at::Tensor& like, const at::Tensor& x) {
  return x.sym_strides().equals(like.sym_strides()) ? x : at::empty_like(like).copy_(x);
}

// output = f(inputs...): f(const T*..., T*, n) on the CPU, f(const T*..., T*, n, stream) on CUDA. The
// inputs are dense and have the strides of the first, and so has the output.
template <typename F, typename... In>
at::Tensor elementwise(const char* op, F&& f, const at::Tensor& first, const In&... others) {
  at::Tensor output = at::empty_like(first);
  if (output.is_meta() || output.numel() == 0) return output;
  launch(op, first, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    return f(pointer<T>(first), pointer<T>(others)..., mutable_pointer<T>(output), output.numel(), stream...);
  });
  return output;
}

}  // namespace lltm_ext
