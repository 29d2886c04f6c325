// Tensors that a call may leave out: an optional one of a dispatcher op, or an undefined one.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace lltm_ext {

using OptionalTensor = std::optional<at::Tensor>;

inline OptionalTensor if_defined(const at::Tensor& x) {
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}
inline at::Tensor or_undefined(const OptionalTensor& x) { return x.value_or(at::Tensor()); }

}  // namespace lltm_ext
