// Compilation of CUDA C++ at run time with NVRTC. Needs no GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lltm_ext {

// A file that a source can include.
struct Header {
  const char *name, *text;
};

// The cubin of `source` for an architecture such as "sm_90", from the disk cache or compiled. `options` are
// NVRTC's. Errors begin with `description` and contain NVRTC's messages.
std::string compile(const std::string& description, const std::string& source,
                    const std::vector<Header>& headers, std::vector<std::string> options,
                    const std::string& architecture);

// The number of compilations by this module in this process, which cache hits do not count.
int64_t compilations();

}  // namespace lltm_ext

// Defines the Header `symbol` with the text of `file`, so that an installed package needs no header files.
// `file` is relative to src/, which the build passes to the assembler as its include path. The builds compile
// a file with this macro again whenever a header has changed.
#define LLTM_EMBED(symbol, file)                                                   \
  asm(".pushsection .rodata\nlltm_ext_" #symbol ":\n.incbin \"" file               \
      "\"\n"                                                                       \
      ".byte 0\n.popsection");                                                     \
  extern "C" __attribute__((visibility("hidden"))) const char lltm_ext_##symbol[]; \
  constexpr lltm_ext::Header symbol = {file, lltm_ext_##symbol}
