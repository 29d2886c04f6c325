// The binary of an op made at run time. Needs no GPU.
#pragma once

#include "elementwise/program.h"

namespace lltm_ext {

// The cubin of the forward, or of the gradients in `mask`, from the disk cache or compiled in about 0.1 s.
std::string compile_program(const Program& program, at::ScalarType type, GradMask mask,
                            const std::string& architecture);

}  // namespace lltm_ext
