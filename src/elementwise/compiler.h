// Compilation of CUDA C++ at run time with NVRTC. Needs no GPU.
#pragma once

#include <cstdint>
#include <string>

namespace lltm_ext {

// The cubin of `source` for an architecture such as "sm_90", from the disk cache or compiled in about 0.1 s.
// Errors begin with `description` and contain NVRTC's messages.
std::string compile(const std::string& description, const std::string& source,
                    const std::string& architecture);

// The number of compilations in this process, which cache hits do not count.
int64_t compilations();

}  // namespace lltm_ext
