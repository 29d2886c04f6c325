// The kernels of an op made at run time, on tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include "elementwise/program.h"

namespace lltm_ext {

// The program of a text, parsed once in a process.
const Program& program_of(std::string_view text);

// For messages: "softsign", or "softsign: backward of x and y" for its backward.
std::string description(const Program& program, Wanted wanted);

// The source of the program's kernels for a dtype, and their binary for an architecture such as "sm_90".
std::string source_for(const Program& program, at::ScalarType type, Wanted wanted);
std::string binary_for(const Program& program, at::ScalarType type, Wanted wanted,
                       const std::string& architecture);

#ifdef LLTM_EXT_WITH_CUDA
// outputs = the program's formulas of inputs and scalars, on the current stream of the inputs' device. All
// tensors are of one dtype; inputs are broadcast to the outputs, which all lie alike.
void launch_program(const Program& program, Wanted wanted, const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& inputs, at::ArrayRef<double> scalars);
#endif

}  // namespace lltm_ext
