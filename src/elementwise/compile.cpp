#include "elementwise/compile.h"

#include "common/runtime/compiler.h"

#ifdef LLTM_EXT_WITH_CUDA
LLTM_EMBED(portable_h, "common/portable.h");
LLTM_EMBED(types_h, "common/types.h");
LLTM_EMBED(vec_cuh, "common/vec.cuh");
LLTM_EMBED(elementwise_call_h, "common/elementwise_call.h");
LLTM_EMBED(elementwise_kernel_cuh, "common/elementwise_kernel.cuh");
#endif

namespace lltm_ext {
namespace {

const std::vector<Header> kHeaders = {
#ifdef LLTM_EXT_WITH_CUDA
    portable_h, types_h, vec_cuh, elementwise_call_h, elementwise_kernel_cuh
#endif
};

// Errors 117 and 940: a function body that returns nothing or has no return statement.
const std::vector<std::string> kOptions = {"--std=c++17", "--diag-error=117,940"};

}  // namespace

std::string compile_program(const Program& program, at::ScalarType type, GradMask mask,
                            const std::string& architecture) {
  return compile(program.description(mask), program.source(type, mask), kHeaders, kOptions, architecture);
}

}  // namespace lltm_ext
