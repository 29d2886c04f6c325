// torch's error macros. A stable library can only throw standard C++ exceptions, and torch turns all of
// them into RuntimeErrors. So the message has other types as a prefix, which _portable_bindings.py removes.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
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

using ::torch::headeronly::DeviceType;
using ::torch::headeronly::Layout;
using ::torch::headeronly::ScalarType;

// A dtype's name in Python, as the first of a pair like c10's.
inline std::pair<const char*, const char*> getDtypeNames(ScalarType type) {
  constexpr std::pair<ScalarType, const char*> kNames[] = {{ScalarType::Byte, "uint8"},
                                                           {ScalarType::Char, "int8"},
                                                           {ScalarType::Short, "int16"},
                                                           {ScalarType::Int, "int32"},
                                                           {ScalarType::Long, "int64"},
                                                           {ScalarType::Half, "float16"},
                                                           {ScalarType::Float, "float32"},
                                                           {ScalarType::Double, "float64"},
                                                           {ScalarType::ComplexHalf, "complex32"},
                                                           {ScalarType::ComplexFloat, "complex64"},
                                                           {ScalarType::ComplexDouble, "complex128"},
                                                           {ScalarType::Bool, "bool"},
                                                           {ScalarType::BFloat16, "bfloat16"}};
  for (const auto& [known, name] : kNames) {
    if (type == known) return {name, ""};
  }
  return {::torch::headeronly::toString(type), ""};
}

template <typename T>
void print(std::ostream& out, const T& x) {
  out << x;
}
inline void print(std::ostream& out, Layout x) {
  constexpr const char* kNames[] = {"Strided",   "Sparse",    "SparseCsr", "Mkldnn",
                                    "SparseCsc", "SparseBsr", "SparseBsc", "Jagged"};
  const auto i = static_cast<size_t>(x);
  out << (i < std::size(kNames) ? kNames[i] : "another");
}
inline void print(std::ostream& out, const ::torch::stable::Device& x) {
  out << (x.type() == DeviceType::CPU ? "cpu" : x.type() == DeviceType::CUDA ? "cuda" : "another device");
  if (x.has_index() && x.type() != DeviceType::CPU) out << ':' << x.index();
}
inline void print(std::ostream& out, ArrayRef<int64_t> x) {
  out << '[';
  for (size_t i = 0; i < x.size(); ++i) out << (i == 0 ? "" : ", ") << x[i];
  out << ']';
}

using Error = std::runtime_error;

template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream text;
  (print(text, parts), ...);
  return text.str();
}

template <typename... Parts>
[[noreturn]] void raise(const Parts&... parts) {
  throw Error(str(parts...));
}

inline std::string Join(const char* separator, const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

}  // namespace stable_torch

#define TORCH_WARN_ONCE(...)                  \
  [[maybe_unused]] static const bool warned = \
      (aoti_torch_warn(__func__, __FILE__, __LINE__, ::stable_torch::str(__VA_ARGS__).c_str()), true)
#define LLTM_EXT_STABLE_CHECK(condition, type, ...)             \
  do {                                                          \
    if (!(condition)) ::stable_torch::raise(type, __VA_ARGS__); \
  } while (false)
#define TORCH_CHECK(condition, ...) LLTM_EXT_STABLE_CHECK(condition, "", __VA_ARGS__)
#define TORCH_CHECK_TYPE(condition, ...) LLTM_EXT_STABLE_CHECK(condition, "TypeError: ", __VA_ARGS__)
#define TORCH_CHECK_VALUE(condition, ...) LLTM_EXT_STABLE_CHECK(condition, "ValueError: ", __VA_ARGS__)
#define TORCH_INTERNAL_ASSERT(condition, ...) \
  LLTM_EXT_STABLE_CHECK(condition, "internal assert failed: " #condition " ", "" __VA_OPT__(, ) __VA_ARGS__)
