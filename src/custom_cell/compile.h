// The kernels of a user's cell, compiled at run time.
#pragma once

#include <string>

#include "custom_cell/program.h"

namespace lltm_ext {

// The binary for an architecture such as "sm_90", from the disk cache or compiled.
std::string compile_cell(const CellProgram& program, const CellKernel& kernel,
                         const std::string& architecture);

}  // namespace lltm_ext
