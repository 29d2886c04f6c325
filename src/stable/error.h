// Errors of the bindings as torch's headers have them. A stable library can only throw what the C++ library
// has, and torch makes RuntimeErrors of all of it: so the other types travel as a prefix of the message,
// which lltm_ext/_portable_rules.py takes off.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/Layout.h>
#include <torch/headeronly/core/ScalarType.h>

#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "stable/array_ref.h"

namespace stable_torch {

// A dtype by its names in Python, of which the first is the one to print.
inline std::pair<std::string, std::string> getDtypeNames(::torch::headeronly::ScalarType type) {
  using ::torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Byte:
      return {"uint8", ""};
    case ScalarType::Char:
      return {"int8", ""};
    case ScalarType::Short:
      return {"int16", "short"};
    case ScalarType::Int:
      return {"int32", "int"};
    case ScalarType::Long:
      return {"int64", "long"};
    case ScalarType::Half:
      return {"float16", "half"};
    case ScalarType::Float:
      return {"float32", "float"};
    case ScalarType::Double:
      return {"float64", "double"};
    case ScalarType::ComplexHalf:
      return {"complex32", "chalf"};
    case ScalarType::ComplexFloat:
      return {"complex64", "cfloat"};
    case ScalarType::ComplexDouble:
      return {"complex128", "cdouble"};
    case ScalarType::Bool:
      return {"bool", ""};
    case ScalarType::BFloat16:
      return {"bfloat16", ""};
    default:
      return {::torch::headeronly::toString(type), ""};
  }
}

template <typename T>
void print(std::ostream& to, const T& x) {
  to << x;
}
inline void print(std::ostream& to, bool x) { to << (x ? "True" : "False"); }
inline void print(std::ostream& to, ::torch::headeronly::Layout x) {
  constexpr const char* kNames[] = {"Strided",   "Sparse",    "SparseCsr", "Mkldnn",
                                    "SparseCsc", "SparseBsr", "SparseBsc", "Jagged"};
  const auto i = static_cast<size_t>(x);
  to << (i < std::size(kNames) ? kNames[i] : "another");
}
inline void print(std::ostream& to, const ::torch::stable::Device& x) {
  using ::torch::headeronly::DeviceType;
  to << (x.type() == DeviceType::CPU ? "cpu" : x.type() == DeviceType::CUDA ? "cuda" : "another device");
  if (x.has_index() && x.type() != DeviceType::CPU) to << ':' << x.index();
}
inline void print(std::ostream& to, ArrayRef<int64_t> x) {
  to << '[';
  for (size_t i = 0; i < x.size(); ++i) to << (i == 0 ? "" : ", ") << x[i];
  to << ']';
}
inline void print(std::ostream& to, const std::vector<int64_t>& x) { print(to, ArrayRef<int64_t>(x)); }

template <typename... Parts>
[[noreturn]] void raise(const char* type, const Parts&... parts) {
  std::ostringstream message;
  message << type;
  (print(message, parts), ...);
  throw std::runtime_error(message.str());
}

}  // namespace stable_torch

#define LLTM_EXT_STABLE_CHECK(condition, type, ...)             \
  do {                                                          \
    if (!(condition)) ::stable_torch::raise(type, __VA_ARGS__); \
  } while (false)
#define TORCH_CHECK(condition, ...) LLTM_EXT_STABLE_CHECK(condition, "", __VA_ARGS__)
#define TORCH_CHECK_TYPE(condition, ...) LLTM_EXT_STABLE_CHECK(condition, "TypeError: ", __VA_ARGS__)
#define TORCH_CHECK_VALUE(condition, ...) LLTM_EXT_STABLE_CHECK(condition, "ValueError: ", __VA_ARGS__)
#define TORCH_INTERNAL_ASSERT(condition, ...) \
  LLTM_EXT_STABLE_CHECK(condition, "internal assert failed: " #condition " ", "" __VA_OPT__(, ) __VA_ARGS__)
