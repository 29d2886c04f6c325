#include "custom_cell/compile.h"

#include "custom_cell/headers.h"

namespace lltm_ext {
namespace {

const std::vector<std::string> kOptions = {"--std=c++17", "--device-as-default-execution-space"};

}  // namespace

std::string compile_cell(const CellProgram& program, const CellKernel& kernel,
                         const std::string& architecture) {
  const std::string description = program.name + (kernel.backward ? ": backward" : "");
  return compile(description, program.source(kernel), cell_headers(), kOptions, architecture);
}

}  // namespace lltm_ext
