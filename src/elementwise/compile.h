// Compiles an op made at run time. It needs no GPU.
#pragma once

#include "elementwise/program.h"

namespace lltm_ext {

// The cubin of the forward, or of the gradients in `mask`, cached on disk or compiled in about 0.1 s.
std::string compile_program(const Program& program, at::ScalarType type, GradMask mask,
                            const std::string& architecture);

}  // namespace lltm_ext
