// Headers as text inside a module, for code that is compiled at run time.
#pragma once

namespace lltm_ext {

// A file that a source can include.
struct Header {
  const char *name, *text;
};

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
