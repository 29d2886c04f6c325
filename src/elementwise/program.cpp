// From the text of an op to the CUDA C++ around its formulas.
#include "elementwise/program.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cctype>

namespace lltm_ext {
namespace {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

bool is_identifier(const std::string& name) {
  const auto letter = [](unsigned char c) { return std::isalnum(c) || c == '_'; };
  return !name.empty() && !std::isdigit(static_cast<unsigned char>(name[0])) &&
         std::all_of(name.begin(), name.end(), letter);
}

std::vector<std::string> names(const std::string& list) {
  return list.empty() ? std::vector<std::string>() : split(list, ',');
}

int place_of(const std::vector<std::string>& names, const std::string& name) {
  return static_cast<int>(std::find(names.begin(), names.end(), name) - names.begin());
}

std::string joined(const std::vector<std::string>& parts) { return c10::Join(", ", parts); }

// "v0, v1, ...", each after `before`.
std::string numbered(const char* before, const char* name, int count) {
  std::vector<std::string> parts;
  for (int i = 0; i < count; ++i) parts.push_back(before + (name + std::to_string(i)));
  return joined(parts);
}

// The user's body as a function of its own, which sees the parameters by their names and nothing of ours.
// Messages about it count its lines as the user wrote them.
std::string function(const std::string& name, const std::vector<std::string>& parameters,
                     const std::string& file, const std::string& body) {
  std::vector<std::string> typed;
  for (const std::string& parameter : parameters) typed.push_back("T " + parameter);
  return "__device__ __forceinline__ T " + name + "(\n#line 1 \"signature\"\n" + joined(typed) + ") {\n" +
         "#line 1 \"" + file + "\"\n" + body + "\n}\n#line 1 \"lltm_ext\"\n";
}

}  // namespace

Program::Program(std::string_view given) : text(given) {
  const std::vector<std::string> fields = split(text, kSeparator);
  TORCH_CHECK_VALUE(fields.size() >= 4 && fields.size() % 3 == 1,
                    "elementwise: expected a program as lltm_ext.elementwise writes it, got ", fields.size(),
                    " fields");
  name = fields[0];
  tensors = names(fields[1]);
  scalars = names(fields[2]);
  forward = fields[3];
  gradients.resize(tensors.size());
  TORCH_CHECK_VALUE(!tensors.empty() && tensors.size() <= kMaxTensors, name, ": expected 1 to ", kMaxTensors,
                    " tensors, got ", tensors.size());
  for (const auto* list : {&tensors, &scalars}) {
    for (const std::string& parameter : *list) {
      TORCH_CHECK_VALUE(is_identifier(parameter), name, ": expected a parameter's name, got '", parameter,
                        "'");
    }
  }
  TORCH_CHECK_VALUE(is_identifier(name), "elementwise: expected the op's name, got '", name, "'");
  for (size_t field = 4; field < fields.size(); field += 3) {
    const int tensor = place_of(tensors, fields[field]);
    TORCH_CHECK_VALUE(tensor < output(), name, ": has no tensor '", fields[field], "' to have a gradient");
    Gradient& gradient = gradients[tensor];
    for (const std::string& operand : names(fields[field + 1])) {
      const int place = place_of(tensors, operand);
      TORCH_CHECK_VALUE(place < output() || operand == "output", name, ": has no tensor '", operand, "'");
      gradient.uses.push_back(place);
    }
    gradient.body = fields[field + 2];
    gradient.defined = true;
  }
}

const std::string& Program::operand(int place) const {
  static const std::string output_name = "output";
  return place == output() ? output_name : tensors[place];
}

std::vector<int> Program::uses(Wanted wanted) const {
  Wanted used = 0;
  for (int i = 0; i < output(); ++i) {
    if (wanted >> i & 1) {
      for (const int place : gradients[i].uses) used |= Wanted(1) << place;
    }
  }
  std::vector<int> places;
  for (int place = 0; place <= output(); ++place) {
    if (used >> place & 1) places.push_back(place);
  }
  return places;
}

std::string Program::kernel(const char* form, Wanted wanted) const {
  return "lltm_ext_" + name + (wanted ? "_backward_" : "_") + form;
}

std::string Program::source(const char* element, Wanted wanted) const {
  // The user's functions, and calls of them on the loaded values v0, v1, ...
  std::string functions;
  std::vector<std::string> calls;
  const std::string scalar_values = scalars.empty() ? "" : ", " + numbered("", "s", scalars.size());
  const auto add = [&](const std::string& function_name, std::vector<std::string> parameters,
                       const std::string& values, const std::string& file, const std::string& body) {
    parameters.insert(parameters.end(), scalars.begin(), scalars.end());
    functions += function(function_name, parameters, file, body);
    calls.push_back(function_name + "(" + values + scalar_values + ")");
  };
  int inputs = output();
  if (!wanted) {
    add("lltm_ext_forward", tensors, numbered("", "v", inputs), "forward", forward);
  } else {
    const std::vector<int> used = uses(wanted);
    inputs = static_cast<int>(used.size()) + 1;  // v0 is the incoming gradient
    for (int i = 0; i < output(); ++i) {
      if (!(wanted >> i & 1)) continue;
      std::vector<std::string> parameters = {"grad"};
      std::string values = "v0";
      for (size_t k = 0; k < used.size(); ++k) {
        const std::vector<int>& own = gradients[i].uses;
        if (std::find(own.begin(), own.end(), used[k]) == own.end()) continue;
        parameters.push_back(operand(used[k]));
        values += ", v" + std::to_string(k + 1);
      }
      add("lltm_ext_gradient" + std::to_string(i), parameters, values, "backward of " + tensors[i],
          gradients[i].body);
    }
  }

  const std::string outputs = std::to_string(calls.size()), inputs_ = std::to_string(inputs);
  const std::string operands = std::to_string(inputs + static_cast<int>(calls.size()));
  std::string text = std::string("#include \"common/elementwise_kernel.cuh\"\n\nnamespace lltm_ext {\n") +
                     "using Element = " + element + ";\nusing T = acc_t<Element>;\n" +
                     "}\nusing T = lltm_ext::T;\n\n" + functions + "\nnamespace lltm_ext {\n\n" +
                     "struct Formula {\n";
  for (size_t i = 0; i < scalars.size(); ++i) text += "  T s" + std::to_string(i) + ";\n";
  text += "  __device__ __forceinline__ auto operator()(" + numbered("T ", "v", inputs) + ") const {\n" +
          "    return Values<T, " + outputs + ">{{" + joined(calls) + "}};\n  }\n};\n" +
          "using In = Pointers<const Element, " + inputs_ + ">;\nusing Out = Pointers<Element, " + outputs +
          ">;\n";
  const auto add_kernel = [&](const char* form, const std::string& parameters, const std::string& call) {
    text += "\nextern \"C\" __global__ void __launch_bounds__(kElementwiseThreads)\n    " +
            kernel(form, wanted) + "(const Formula f, const In in, const Out out, " + parameters + ") {\n  " +
            call + ";\n}\n";
  };
  const std::string flat = "int head, int64_t n";
  const std::string strided = "const __grid_constant__ Strides<" + operands + "> strides, int64_t n";
  add_kernel(kForms[0], flat, "elementwise_flat<kVecWidth<Element>>(f, in, out, head, n)");
  add_kernel(kForms[1], flat, "elementwise_flat<1>(f, in, out, head, n)");
  add_kernel(kForms[2], strided, "elementwise_strided<uint32_t>(f, in, out, strides, n)");
  add_kernel(kForms[3], strided, "elementwise_strided<uint64_t>(f, in, out, strides, n)");
  return text + "\n}  // namespace lltm_ext\n";
}

}  // namespace lltm_ext
