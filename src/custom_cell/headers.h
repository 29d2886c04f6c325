// The engine's headers, which the kernels of a user's cell include.
#pragma once

#include <vector>

#include "common/runtime/compiler.h"

namespace lltm_ext {

std::vector<Header> cell_headers();

}  // namespace lltm_ext
