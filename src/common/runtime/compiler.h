// Compilation of CUDA C++ at run time with NVRTC. It needs no GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/embed.h"

namespace lltm_ext {

// The cubin of `source` for an architecture such as "sm_90", cached on disk or compiled now. `options` are
// NVRTC's. Errors begin with `description` and contain NVRTC's messages.
std::string compile(const std::string& description, const std::string& source,
                    const std::vector<Header>& headers, std::vector<std::string> options,
                    const std::string& architecture);

// The number of compilations by this module in this process, which cache hits do not count.
int64_t compilations();

}  // namespace lltm_ext
