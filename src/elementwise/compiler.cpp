// NVRTC, the compiler of CUDA C++ that every CUDA build of torch brings along.
#include "elementwise/compiler.h"

#include <c10/util/Exception.h>

#include <atomic>

#include "elementwise/cache.h"

#ifdef LLTM_EXT_WITH_CUDA

#include <ATen/Context.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <vector>

// Included for the compiler's list of what this file depends on: the texts below are theirs.
#include "common/elementwise_kernel.cuh"

// The headers that the kernels include, as they are in src/: NVRTC gets them by name, so that an installed
// package needs no file of them. setup.py tells the assembler where they are.
#define LLTM_EMBED(symbol, file)                            \
  asm(".pushsection .rodata\n" #symbol ":\n.incbin \"" file \
      "\"\n"                                                \
      ".byte 0\n.popsection");                              \
  extern "C" __attribute__((visibility("hidden"))) const char symbol[]
LLTM_EMBED(lltm_ext_portable_h, "common/portable.h");
LLTM_EMBED(lltm_ext_types_h, "common/types.h");
LLTM_EMBED(lltm_ext_vec_cuh, "common/vec.cuh");
LLTM_EMBED(lltm_ext_elementwise_call_h, "common/elementwise_call.h");
LLTM_EMBED(lltm_ext_elementwise_kernel_cuh, "common/elementwise_kernel.cuh");

namespace lltm_ext {
namespace {

constexpr const char* kHeaderNames[] = {"common/portable.h", "common/types.h", "common/vec.cuh",
                                        "common/elementwise_call.h", "common/elementwise_kernel.cuh"};
const char* const kHeaders[] = {lltm_ext_portable_h, lltm_ext_types_h, lltm_ext_vec_cuh,
                                lltm_ext_elementwise_call_h, lltm_ext_elementwise_kernel_cuh};
constexpr int kHeaderCount = 5;

// 117 and 940: a body that returns nothing, or ends without a return, is a mistake and not a warning.
const std::vector<std::string> kOptions = {"--std=c++17", "--diag-error=117,940"};

// The functions of NVRTC, by their C interface. torch has the same table, at::globalContext().getNVRTC(), but
// torch 2.11 ships its header no more; and its library of stubs needs the driver, where this one compiles
// on a machine without a GPU.
class Nvrtc {
 public:
  static const Nvrtc& get() {
    static const Nvrtc nvrtc;
    return nvrtc;
  }

  using Handle = void*;
  int (*version)(int*, int*);
  const char* (*error_string)(int);
  int (*create)(Handle*, const char*, const char*, int, const char* const*, const char* const*);
  int (*destroy)(Handle*);
  int (*compile)(Handle, int, const char* const*);
  int (*log_size)(Handle, size_t*);
  int (*log)(Handle, char*);
  int (*cubin_size)(Handle, size_t*);
  int (*cubin)(Handle, char*);

  void check(const char* what, int error) const {
    TORCH_CHECK(error == 0, "lltm_ext: NVRTC cannot ", what, ": ", error_string(error));
  }

 private:
  Nvrtc() {
    void* const library = open();
    take(library, "nvrtcVersion", version);
    take(library, "nvrtcGetErrorString", error_string);
    take(library, "nvrtcCreateProgram", create);
    take(library, "nvrtcDestroyProgram", destroy);
    take(library, "nvrtcCompileProgram", compile);
    take(library, "nvrtcGetProgramLogSize", log_size);
    take(library, "nvrtcGetProgramLog", log);
    take(library, "nvrtcGetCUBINSize", cubin_size);
    take(library, "nvrtcGetCUBIN", cubin);
  }

  // torch's own, which a library of torch has mostly loaded by now; else through the library of torch that
  // depends on it and knows where it lies.
  static void* open() {
    const std::string name = "libnvrtc.so." + std::to_string(CUDART_VERSION / 1000);
    if (void* const found = dlopen(name.c_str(), RTLD_NOW)) return found;
    const std::string error = dlerror();
    Dl_info torch;
    if (dladdr(reinterpret_cast<void*>(&at::globalContext), &torch)) {
      const std::string file = torch.dli_fname;
      const std::string stubs = file.substr(0, file.rfind('/') + 1) + "libcaffe2_nvrtc.so";
      if (void* const found = dlopen(stubs.c_str(), RTLD_NOW)) return found;
    }
    TORCH_CHECK(false, "lltm_ext: to compile an op at run time takes NVRTC, which belongs to torch: ", error);
  }

  template <typename F>
  static void take(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    TORCH_CHECK(function, "lltm_ext: NVRTC has no ", name);
  }
};

class Compilation {
 public:
  explicit Compilation(const std::string& source) {
    nvrtc_.check("take the source",
                 nvrtc_.create(&program_, source.c_str(), "lltm_ext", kHeaderCount, kHeaders, kHeaderNames));
  }
  ~Compilation() { nvrtc_.destroy(&program_); }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;

  bool run(const std::vector<std::string>& options) {
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());
    return nvrtc_.compile(program_, static_cast<int>(pointers.size()), pointers.data()) == 0;
  }
  std::string log() const { return text("give its log", nvrtc_.log_size, nvrtc_.log); }
  std::string cubin() const { return text("give the binary", nvrtc_.cubin_size, nvrtc_.cubin); }

 private:
  std::string text(const char* what, int (*size_of)(Nvrtc::Handle, size_t*),
                   int (*read)(Nvrtc::Handle, char*)) const {
    size_t size = 0;
    nvrtc_.check(what, size_of(program_, &size));
    std::string result(size, '\0');
    nvrtc_.check(what, read(program_, result.data()));
    return result;
  }

  const Nvrtc& nvrtc_ = Nvrtc::get();
  Nvrtc::Handle program_ = nullptr;
};

std::atomic<int64_t> compiled = 0;

// All that a binary follows from.
std::string key(const std::string& source, const std::vector<std::string>& options) {
  int major = 0, minor = 0;
  Nvrtc::get().check("name its version", Nvrtc::get().version(&major, &minor));
  std::string text = "NVRTC " + std::to_string(major) + "." + std::to_string(minor);
  for (const std::string& option : options) text += " " + option;
  for (int i = 0; i < kHeaderCount; ++i) text += std::string("\n// ") + kHeaderNames[i] + "\n" + kHeaders[i];
  return text + "\n" + source;
}

}  // namespace

std::string compile(const std::string& what, const std::string& source, const std::string& architecture) {
  std::vector<std::string> options = kOptions;
  options.push_back("--gpu-architecture=" + architecture);
  const Cache cache(key(source, options));
  if (std::optional<std::string> found = cache.read()) return *std::move(found);
  ++compiled;
  Compilation compilation(source);
  TORCH_CHECK(compilation.run(options), what, " does not compile:\n", compilation.log().c_str());
  std::string cubin = compilation.cubin();
  cache.write(cubin);
  return cubin;
}

int64_t compilations() { return compiled; }

}  // namespace lltm_ext

#else

namespace lltm_ext {

std::string compile(const std::string& what, const std::string&, const std::string&) {
  TORCH_CHECK(false, what, " cannot be compiled: this lltm_ext was built for the CPU alone");
}

int64_t compilations() { return 0; }

}  // namespace lltm_ext

#endif
