// CUDA C++ to machine code at run time, by NVRTC. Needs no GPU.
#pragma once

#include <cstdint>
#include <string>

namespace lltm_ext {

// The cubin of `source` for an architecture such as "sm_90": from the disk's cache if it is there, else
// compiled, which takes a tenth of a second. A mistake in the source raises what NVRTC says of it, after
// `what`.
std::string compile(const std::string& what, const std::string& source, const std::string& architecture);

// How often this process compiled, which the cache is there to avoid.
int64_t compilations();

}  // namespace lltm_ext
