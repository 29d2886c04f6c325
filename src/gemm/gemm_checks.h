// What the binding of gemm and its autograd share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>

#include <numeric>
#include <optional>
#include <string_view>

#include "common/activations.h"
#include "common/checks.h"
#include "common/optional_tensor.h"

namespace lltm_ext {

using std::string_view;
using OptionalName = std::optional<string_view>;

inline Activation activation_of(const char* op, OptionalName name) {
  if (!name) return Activation::kNone;
  for (const auto& [known, activation] : kActivations) {
    if (*name == known) return activation;
  }
  TORCH_CHECK_VALUE(false, op, ": expected activation None or one of ", kActivationNames, "got '", *name,
                    "'");
}

// 3-D operands are batches of matrices. A single matrix, or a batch of one, is multiplied by each matrix of
// the other's batch.
inline bool is_batch(const at::Tensor& x) { return x.dim() == 3 && x.sym_size(0) != 1; }

inline c10::SymDimVector output_sizes(const at::Tensor& a, const at::Tensor& b) {
  c10::SymDimVector sizes = {a.sym_size(-2), b.sym_size(-1)};
  if (a.dim() == 3 || b.dim() == 3) {
    sizes.insert(sizes.begin(), is_batch(a) ? a.sym_size(0) : is_batch(b) ? b.sym_size(0) : c10::SymInt(1));
  }
  return sizes;
}

// c: a tensor of the shape of a @ b.
inline void check_result(const char* op, const char* name, const at::Tensor& c, const at::Tensor& a,
                         const at::Tensor& b) {
  const c10::SymDimVector sizes = output_sizes(a, b);
  check_shape(op, name, c, sizes, sizes.size() == 3 ? "[B, M, N]" : "[M, N]");
}

inline void check_rows(const at::Tensor& saved) {
  TORCH_CHECK(saved.dim() >= 2, "gemm_activation_bias_backward: expected saved of shape [..., M, N], got ",
              saved.sym_sizes());
}

inline at::Tensor sum_of_rows(const at::Tensor& x) {  // half types are summed in float32
  at::DimVector rows(x.dim() - 1);
  std::iota(rows.begin(), rows.end(), 0);
  return x.sum(rows);
}

}  // namespace lltm_ext
