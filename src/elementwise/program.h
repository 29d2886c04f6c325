// An op made at run time, in the text form that the dispatcher carries, so that it can be traced and
// exported. The text has these fields (common/runtime/text.h):
//
//   the op's name; the names of its tensors and of its scalars, each separated by commas; the forward's body;
//   for each gradient: the tensor's name, the names of the operands it uses (including "output"), its body.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lltm_ext {

constexpr int kMaxTensors = 8;

// The tensors whose gradients a kernel computes, one bit each. 0 means the forward.
using GradMask = uint32_t;

enum KernelVariant { kFlat, kScalar, kStrided, kStrided64, kKernelVariants };

// Operands are numbered: the tensors in order, then the output.
struct Program {
  explicit Program(std::string_view text);

  // The program of a text. Each text is parsed once per process, and references stay valid.
  static const Program& get(std::string_view text);

  struct Gradient {
    std::string body;
    std::vector<int> operands;
    bool defined = false;
  };

  std::string text, name;
  std::vector<std::string> tensors, scalars;
  std::string forward;
  std::vector<Gradient> gradients;  // one for each tensor

  // Throws if the op does not take this many tensors.
  void check_count(size_t given) const;

  int output() const { return static_cast<int>(tensors.size()); }
  const std::string& operand_name(int operand) const;

  // The operands that the gradients in `mask` use, in ascending order.
  std::vector<int> operands_of(GradMask mask) const;

  // For error messages: "softsign", or "softsign: backward of x, y".
  std::string description(GradMask mask) const;

  // The CUDA C++ source of the kernels, for NVRTC.
  std::string source(at::ScalarType type, GradMask mask) const;
  std::string kernel_name(KernelVariant variant, GradMask mask) const;
};

}  // namespace lltm_ext
