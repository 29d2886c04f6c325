// ATen's ArrayRef: torch's header-only one, plus == and slices of its own type.
#pragma once

#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

namespace stable_torch {

template <typename T>
struct ArrayRef : ::c10::HeaderOnlyArrayRef<T> {
  using Base = ::c10::HeaderOnlyArrayRef<T>;
  using Base::Base;
  ArrayRef(Base list) : Base(list) {}
  ArrayRef slice(size_t first, size_t count) const { return Base::slice(first, count); }
  ArrayRef slice(size_t first) const { return Base::slice(first); }
  friend bool operator==(ArrayRef a, ArrayRef b) { return a.equals(b); }
  friend bool operator!=(ArrayRef a, ArrayRef b) { return !a.equals(b); }
};

}  // namespace stable_torch
