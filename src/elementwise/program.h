// An op made at run time, as the dispatcher carries it: a text, so that it can be traced, exported and sent
// anywhere. Fields, kSeparator between them:
//
//   the op's name; the names of its tensors and of its scalars, each list with commas; the forward's body;
//   for each gradient the tensor's name, the names of the operands it uses ("output" among them), its body.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lltm_ext {

constexpr char kSeparator = '\x1f';
constexpr int kMaxTensors = 8;

// A set of tensors of the op, a bit each. Asked for the gradients of none, a kernel is the forward.
using Wanted = uint32_t;

struct Gradient {
  std::string body;
  std::vector<int> uses;  // operands, in order: the tensors by their places, then the output
  bool defined = false;
};

struct Program {
  explicit Program(std::string_view text);

  std::string text, name;
  std::vector<std::string> tensors, scalars;
  std::string forward;
  std::vector<Gradient> gradients;  // of each tensor

  int output() const { return static_cast<int>(tensors.size()); }
  const std::string& operand(int place) const;

  // What the wanted gradients together use, in order.
  std::vector<int> uses(Wanted wanted) const;

  // The CUDA C++ of its kernels, as NVRTC takes it. `element` is float, double, __half or __nv_bfloat16.
  std::string source(const char* element, Wanted wanted) const;
  std::string kernel(const char* form, Wanted wanted) const;
};

// The kernels of a source, by what their names end in.
constexpr const char* kForms[] = {"flat", "scalar", "strided", "strided64"};

}  // namespace lltm_ext
