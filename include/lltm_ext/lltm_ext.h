// The ops for C++ programs, on the CPU and on CUDA. Each function calls the dispatcher op of its name, so
// autograd, autocast and tracing see it. The README gives shapes, dtypes and options; errors are c10::Errors
// with the messages of the Python ops. Other ops are called by name:
// c10::Dispatcher::singleton().findSchemaOrThrow("lltm_ext::fake_quantize", "").
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#define LLTM_EXT_API __attribute__((visibility("default")))

namespace lltm_ext {

using State = std::tuple<at::Tensor, at::Tensor>;  // h and c

LLTM_EXT_API at::Tensor sigmoid(const at::Tensor& input);
LLTM_EXT_API at::Tensor relu(const at::Tensor& input);
LLTM_EXT_API at::Tensor round(const at::Tensor& input);  // straight-through gradient

// activation(a @ b + bias)
LLTM_EXT_API at::Tensor gemm(const at::Tensor& a, const at::Tensor& b,
                             const std::optional<at::Tensor>& bias = {},
                             std::optional<std::string_view> activation = {},
                             std::string_view precision = "ieee");

// One step: input [B, I], weights [3H, H+I], bias [3H], states [B, H] -> (new_h, new_cell).
LLTM_EXT_API State lltm_cell(const at::Tensor& input, const at::Tensor& weights,
                             const std::optional<at::Tensor>& bias, const at::Tensor& old_h,
                             const at::Tensor& old_cell);

// A sequence: input [T, B, I], hx = (h0, c0) each [B, H], weights [3H, I] and [3H, H], bias [3H]
// -> (output [T, B, H], (h_n, c_n)).
LLTM_EXT_API std::tuple<at::Tensor, State> lltm(const at::Tensor& input, const State& hx,
                                                const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                                const std::optional<at::Tensor>& bias = {},
                                                std::string_view algorithm = "auto");

// The same with the cell of torch.nn.LSTM: weights [4H, I] and [4H, H], the sum of its two biases [4H].
LLTM_EXT_API std::tuple<at::Tensor, State> lstm(const at::Tensor& input, const State& hx,
                                                const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                                const std::optional<at::Tensor>& bias = {},
                                                std::string_view algorithm = "auto");

LLTM_EXT_API const char* version();

// A linker drops a library that a program does not reference, and then its ops are not registered. This
// reference keeps the library even in programs that use the ops only through the dispatcher or an exported
// model.
inline const char* const kVersion = version();

}  // namespace lltm_ext
