#include "elementwise/program.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "common/runtime/text.h"

namespace lltm_ext {
namespace {

int index_of(const Strings& names, const std::string& name) {
  return static_cast<int>(std::find(names.begin(), names.end(), name) - names.begin());
}

// Returns "<prefix>0, <prefix>1, ...".
std::string numbered(const char* prefix, size_t count) {
  Strings parts;
  for (size_t i = 0; i < count; ++i) parts.push_back(prefix + std::to_string(i));
  return c10::Join(", ", parts);
}

// Puts the user's body in a separate function, where only the parameters are visible. The #line directives
// make compiler messages count the user's lines.
std::string define_function(const std::string& name, const Strings& parameters, const std::string& file,
                            const std::string& body) {
  return c10::str("__device__ __forceinline__ T ", name, "(\n#line 1 \"signature\"\nT ",
                  c10::Join(", T ", parameters), ") {\n#line 1 \"", file, "\"\n", body,
                  "\n}\n#line 1 \"lltm_ext\"\n");
}

}  // namespace

Program::Program(std::string_view text_) : text(text_) {
  const Strings fields = fields_of(text);
  TORCH_CHECK_VALUE(fields.size() >= 4 && fields.size() % 3 == 1,
                    "elementwise: expected a program as lltm_ext.elementwise writes it, got ", fields.size(),
                    " fields");
  name = fields[0];
  tensors = split_names(fields[1]);
  scalars = split_names(fields[2]);
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
    const int tensor = index_of(tensors, fields[field]);
    TORCH_CHECK_VALUE(tensor < output(), name, ": has no tensor '", fields[field], "' to have a gradient");
    Gradient& gradient = gradients[tensor];
    for (const std::string& operand : split_names(fields[field + 1])) {
      gradient.operands.push_back(index_of(tensors, operand));
      TORCH_CHECK_VALUE(gradient.operands.back() < output() || operand == "output", name, ": has no tensor '",
                        operand, "'");
    }
    gradient.body = fields[field + 2];
    gradient.defined = true;
  }
}

const Program& Program::get(std::string_view text) {
  // Consecutive calls are mostly of one op, and comparing its text is faster than hashing it.
  static thread_local const Program* last = nullptr;
  if (last && last->text == text) return *last;
  // Keys point into the programs, which are never removed.
  static std::mutex mutex;
  static auto& programs = *new std::unordered_map<std::string_view, std::unique_ptr<const Program>>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = programs.find(text); found != programs.end()) return *(last = found->second.get());
  auto program = std::make_unique<const Program>(text);
  const std::string_view key = program->text;
  return *(last = (programs[key] = std::move(program)).get());
}

void Program::check_count(size_t given) const {
  TORCH_CHECK_VALUE(given == tensors.size(), name, ": expected ", tensors.size(), " tensors, got ", given);
}

const std::string& Program::operand_name(int operand) const {
  static const std::string output_name = "output";
  return operand == output() ? output_name : tensors[operand];
}

std::vector<int> Program::operands_of(GradMask mask) const {
  uint32_t used = 0;
  for (int i = 0; i < output(); ++i) {
    if (mask >> i & 1) {
      for (const int operand : gradients[i].operands) used |= 1u << operand;
    }
  }
  std::vector<int> operands;
  for (int operand = 0; operand <= output(); ++operand) {
    if (used >> operand & 1) operands.push_back(operand);
  }
  return operands;
}

std::string Program::description(GradMask mask) const {
  Strings names;
  for (int i = 0; i < output(); ++i) {
    if (mask >> i & 1) names.push_back(tensors[i]);
  }
  return mask ? name + ": backward of " + c10::Join(", ", names) : name;
}

std::string Program::kernel_name(KernelVariant variant, GradMask mask) const {
  constexpr const char* kSuffixes[kKernelVariants] = {"flat", "scalar", "strided", "strided64"};
  return "lltm_ext_" + name + (mask ? "_backward_" : "_") + kSuffixes[variant];
}

std::string Program::source(at::ScalarType type, GradMask mask) const {
  // Functions with the user's bodies, and calls of them with the loaded values v0, v1, ... and scalars s0,
  // s1, ...
  std::string functions;
  Strings calls;
  const auto add = [&](const std::string& function, Strings parameters, std::string values,
                       const std::string& file, const std::string& body) {
    parameters.insert(parameters.end(), scalars.begin(), scalars.end());
    if (!scalars.empty()) values += ", " + numbered("s", scalars.size());
    functions += define_function(function, parameters, file, body);
    calls.push_back(function + "(" + values + ")");
  };
  size_t inputs = tensors.size();
  if (!mask) {
    add("lltm_ext_forward", tensors, numbered("v", inputs), "forward", forward);
  } else {
    const std::vector<int> operands = operands_of(mask);
    inputs = operands.size() + 1;  // v0 is the incoming gradient
    for (int i = 0; i < output(); ++i) {
      if (!(mask >> i & 1)) continue;
      Strings parameters = {"grad"};
      std::string values = "v0";
      for (size_t k = 0; k < operands.size(); ++k) {
        const std::vector<int>& own = gradients[i].operands;
        if (std::find(own.begin(), own.end(), operands[k]) == own.end()) continue;
        parameters.push_back(operand_name(operands[k]));
        values += ", v" + std::to_string(k + 1);
      }
      add("lltm_ext_gradient" + std::to_string(i), parameters, values, "backward of " + tensors[i],
          gradients[i].body);
    }
  }

  std::string members;
  for (size_t i = 0; i < scalars.size(); ++i) members += "  T s" + std::to_string(i) + ";\n";
  std::string text = c10::str(
      "#include \"common/elementwise_kernel.cuh\"\n\nnamespace lltm_ext {\nusing Element = ",
      element_name("elementwise", type), ";\nusing T = acc_t<Element>;\n}\nusing T = lltm_ext::T;\n\n",
      functions, "\nnamespace lltm_ext {\n\nstruct Formula {\n", members,
      "  __device__ __forceinline__ auto operator()(", numbered("T v", inputs), ") const {\n",
      "    return Values<T, ", calls.size(), ">{{", c10::Join(", ", calls), "}};\n  }\n};\n",
      "using In = Pointers<const Element, ", inputs, ">;\nusing Out = Pointers<Element, ", calls.size(),
      ">;\n");
  const auto add_kernel = [&](KernelVariant variant, const std::string& parameters, const char* call) {
    text += c10::str("\nextern \"C\" __global__ void __launch_bounds__(kElementwiseThreads)\n    ",
                     kernel_name(variant, mask), "(const Formula f, const In in, const Out out, ", parameters,
                     ") {\n  ", call, ";\n}\n");
  };
  const std::string strided =
      c10::str("const __grid_constant__ Strides<", inputs + calls.size(), "> strides, int64_t n");
  add_kernel(kFlat, "int head, int64_t n", "elementwise_flat<kVecWidth<Element>>(f, in, out, head, n)");
  add_kernel(kScalar, "int head, int64_t n", "elementwise_flat<1>(f, in, out, head, n)");
  add_kernel(kStrided, strided, "elementwise_strided<uint32_t>(f, in, out, strides, n)");
  add_kernel(kStrided64, strided, "elementwise_strided<uint64_t>(f, in, out, strides, n)");
  return text + "\n}  // namespace lltm_ext\n";
}

}  // namespace lltm_ext
