// Text of programs that are compiled at run time: what Python sends, and the C++ that is made of it.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

namespace lltm_ext {

using Strings = std::vector<std::string>;

// They separate a program's fields, and the lines of a field, so that a program is a text of one line.
constexpr char kSeparator = '\x1f', kLine = '\x17';

inline Strings split(std::string_view text, char separator) {
  Strings parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

// The fields of a program. Older programs have line feeds in them.
inline Strings fields_of(std::string_view program) {
  std::string text(program);
  std::replace(text.begin(), text.end(), kLine, '\n');
  return split(text, kSeparator);
}

// A list of names, separated by commas; none if it is empty.
inline Strings split_names(const std::string& list) { return list.empty() ? Strings() : split(list, ','); }

inline bool is_identifier(const std::string& name) {
  const auto valid = [](unsigned char c) { return std::isalnum(c) || c == '_'; };
  return !name.empty() && !std::isdigit(static_cast<unsigned char>(name[0])) &&
         std::all_of(name.begin(), name.end(), valid);
}

// A dtype's name in CUDA C++ (common/types.h).
inline const char* element_name(const char* op, at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float";
    case at::kDouble:
      return "double";
    case at::kHalf:
      return "__half";
    case at::kBFloat16:
      return "__nv_bfloat16";
    default:
      TORCH_CHECK_TYPE(false, op, ": expected dtype float16, bfloat16, float32 or float64, got ",
                       c10::getDtypeNames(type).first);
  }
}

}  // namespace lltm_ext
