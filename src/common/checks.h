// Checks of an op's arguments. Every message names the op, the argument, the expectation and the actual
// value. Sizes are read as SymInt, so that real and fake tensors raise the same errors.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <limits>

#include "common/tensor.h"

namespace lltm_ext {

inline void check_memory(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK(has_memory(x), op, ": expected ", name,
              " with memory that a kernel can use, got a tensor without (a wrapper, a fake tensor or freed "
              "storage)");
}

inline void check_strided(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.defined(), op, ": expected ", name, " to be a Tensor, got None");
  TORCH_CHECK(x.layout() == at::kStrided, op, ": expected ", name, " of layout torch.strided, got ",
              x.layout());
  TORCH_CHECK(!x.is_nested(), op, ": expected ", name, " not to be a nested tensor");
  if (!is_wrapper(x)) check_memory(op, name, x);
}

// The check of a raw binding's tensor.
inline void check_plain(const char* op, const char* name, const at::Tensor& x) {
  check_strided(op, name, x);
  TORCH_CHECK_TYPE(
      !is_wrapper(x), op, ": expected ", name,
      " to be a plain Tensor, got a wrapper (a subclass with __torch_dispatch__, a fake tensor, a "
      "tensor of torch.func or an _efficientzerotensor)");
}

inline void check_device(const char* op, const char* name, const at::Tensor& x) {
  check_strided(op, name, x);
  TORCH_CHECK(x.is_cpu() || x.is_cuda() || x.is_meta(), op, ": expected ", name,
              " on a CPU or CUDA device, got ", x.device());
#ifndef LLTM_EXT_WITH_CUDA
  TORCH_CHECK(!x.is_cuda(), op, ": expected ", name,
              " on the CPU, because this lltm_ext was built without CUDA, got ", x.device());
#endif
}

inline void check_same_device(const char* op, const char* name, const at::Tensor& x, const at::Tensor& like) {
  check_strided(op, name, x);
  TORCH_CHECK(x.device() == like.device(), op, ": expected ", name, " on ", like.device(), ", got ",
              x.device());
}

inline void check_contiguous(const char* op, const char* name, const at::Tensor& x) {
  check_plain(op, name, x);
  TORCH_CHECK(x.is_contiguous(), op, ": expected ", name, " to be contiguous, got strides ", x.strides());
  // Raw bindings bypass the dispatcher, which would resolve such views.
  TORCH_CHECK(!x.is_neg() && !x.is_conj(), op, ": expected ", name,
              " to be materialized, got a lazily negated or conjugated view");
}

// Inference tensors have no version counter, so autograd could not detect the write. torch's in-place ops
// raise the same error.
inline void check_writable(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK(!x.is_inference() || x.is_meta() || c10::InferenceMode::is_enabled(), op, ": expected ", name,
              " not to be an inference tensor, because it is written outside inference mode; clone it first");
}

// Several elements at one address have no result. torch's in-place ops raise an error too, without a name.
inline void check_no_overlap(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK(x.is_meta() || at::has_internal_overlap(x) != at::MemOverlap::Yes, op, ": expected ", name,
              " with memory for each element, because it is written, got strides ", x.strides(), " of sizes ",
              x.sizes(), "; clone it first");
}

// torch's resize_ allocates too little where the number of bytes overflows.
inline void check_bytes(const char* op, const at::Tensor& input) {
  TORCH_CHECK(input.is_meta() || input.numel() <= std::numeric_limits<int64_t>::max() /
                                                      static_cast<int64_t>(input.element_size()),
              op, ": expected a result of less than 2^63 bytes, got an input of sizes ", input.sizes());
}

enum class Types { kFloating, kFloatingOrComplex };

inline void check_type(const char* op, const char* name, const at::Tensor& x, Types types) {
  const at::ScalarType type = x.scalar_type();
  const bool complex = types == Types::kFloatingOrComplex;
  if (complex && (type == at::kComplexFloat || type == at::kComplexDouble)) return;
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16,
                   op, ": expected ", name, " of dtype float16, bfloat16, float32",
                   complex ? ", float64, complex64 or complex128, got " : " or float64, got ",
                   c10::getDtypeNames(type).first);
}

inline void check_floating(const char* op, const char* name, const at::Tensor& x) {
  check_type(op, name, x, Types::kFloating);
}

inline void check_same_dtype(const char* op, const char* name, const at::Tensor& x, at::ScalarType expected) {
  TORCH_CHECK_TYPE(x.scalar_type() == expected, op, ": expected ", name, " of dtype ",
                   c10::getDtypeNames(expected).first, ", got ", c10::getDtypeNames(x.scalar_type()).first);
}

inline void check_dim(const char* op, const char* name, const at::Tensor& x, int64_t dim,
                      const char* meaning) {
  TORCH_CHECK(x.dim() == dim, op, ": expected ", name, " of shape ", meaning, ", got ", x.sym_sizes());
}

inline void check_shape(const char* op, const char* name, const at::Tensor& x, c10::SymIntArrayRef expected,
                        const char* meaning) {
  TORCH_CHECK(x.sym_sizes().equals(expected), op, ": expected ", name, " of shape ", meaning, " = ", expected,
              ", got ", x.sym_sizes());
}

// The checks of an elementwise op's backward.
inline void check_gradient(const char* op, const at::Tensor& grad_output, const at::Tensor& output,
                           Types types = Types::kFloating) {
  check_device(op, "output", output);
  check_type(op, "output", output, types);
  check_same_device(op, "grad_output", grad_output, output);
  check_same_dtype(op, "grad_output", grad_output, output.scalar_type());
  check_shape(op, "grad_output", grad_output, output.sym_sizes(), "of output");
}

// With half types the cell state may be float32, which avoids rounding it at every step.
inline void check_cell_dtype(const char* op, const char* name, const at::Tensor& cell,
                             const at::Tensor& input) {
  const bool half = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  if (half && cell.scalar_type() == at::kFloat) return;
  check_same_dtype(op, name, cell, input.scalar_type());
}

}  // namespace lltm_ext

// Checks for the raw bindings, by the names that the PyTorch tutorials use. `x` is also the argument's name
// in the message.
#define CHECK_PLAIN(op, x) ::lltm_ext::check_plain(op, #x, x)
#define CHECK_CONTIGUOUS(op, x) ::lltm_ext::check_contiguous(op, #x, x)
#define CHECK_INPUT(op, x)                 \
  do {                                     \
    CHECK_PLAIN(op, x);                    \
    ::lltm_ext::check_device(op, #x, x);   \
    CHECK_CONTIGUOUS(op, x);               \
    ::lltm_ext::check_floating(op, #x, x); \
  } while (false)
#define CHECK_SAME(op, x, like)                                    \
  do {                                                             \
    ::lltm_ext::check_same_device(op, #x, x, like);                \
    ::lltm_ext::check_same_dtype(op, #x, x, (like).scalar_type()); \
  } while (false)
#define CHECK_SHAPE(op, x, meaning, ...) ::lltm_ext::check_shape(op, #x, x, {__VA_ARGS__}, meaning)
