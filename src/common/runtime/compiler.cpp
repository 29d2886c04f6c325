#include "common/runtime/compiler.h"

#include <c10/util/Exception.h>

#include <atomic>

#ifdef LLTM_EXT_WITH_CUDA

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <signal.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "common/python.h"
#include "common/runtime/cache.h"

extern "C" {
bool aoti_torch_grad_mode_is_enabled();  // a symbol of libtorch, in whose folder we look for NVRTC
}

#endif

namespace lltm_ext {
namespace {

std::atomic<int64_t> compilation_count = 0;

#ifdef LLTM_EXT_WITH_CUDA

struct Symbol {
  void* address;
  template <typename F>
  operator F*() const {
    return reinterpret_cast<F*>(address);
  }
};

// NVRTC's functions. torch has such a table too, at::globalContext().getNVRTC(), but torch 2.11 does not ship
// its header, and its stub library needs the driver, which a machine without a GPU does not have.
class Nvrtc {
  void* const library_ = open();

 public:
  static const Nvrtc& get() {
    static const Nvrtc nvrtc;
    return nvrtc;
  }

  using Handle = void*;
  int (*const version)(int*, int*) = symbol("nvrtcVersion");
  const char* (*const error_string)(int) = symbol("nvrtcGetErrorString");
  int (*const create)(Handle*, const char*, const char*, int, const char* const*,
                      const char* const*) = symbol("nvrtcCreateProgram");
  int (*const destroy)(Handle*) = symbol("nvrtcDestroyProgram");
  int (*const compile)(Handle, int, const char* const*) = symbol("nvrtcCompileProgram");
  int (*const log_size)(Handle, size_t*) = symbol("nvrtcGetProgramLogSize");
  int (*const log)(Handle, char*) = symbol("nvrtcGetProgramLog");
  int (*const cubin_size)(Handle, size_t*) = symbol("nvrtcGetCUBINSize");
  int (*const cubin)(Handle, char*) = symbol("nvrtcGetCUBIN");

  void check(const char* action, int error) const {
    TORCH_CHECK(error == 0, "lltm_ext: NVRTC cannot ", action, ": ", error_string(error));
  }

 private:
  // NVRTC loads its second library by name. In Python, torch has loaded both; a C++ program's RUNPATH does
  // not apply to what NVRTC loads. If this fails, the first compilation says so.
  Nvrtc() {
    int major = 0, minor = 0;
    check("return its version", version(&major, &minor));
    const std::string name = "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
    dlopen((folder_of(reinterpret_cast<void*>(version)) + name).c_str(), RTLD_NOW);
  }

  // torch has usually loaded its NVRTC, that of the CUDA that we are built with or, for the portable library,
  // of the major version before. Otherwise libcaffe2_nvrtc.so, next to libtorch, finds it.
  static void* open() {
    constexpr int kMajor = CUDART_VERSION / 1000;
    std::string error;
    for (const int major : {kMajor, kMajor - 1}) {
      const std::string name = "libnvrtc.so." + std::to_string(major);
      if (void* const library = dlopen(name.c_str(), RTLD_NOW)) return library;
      if (error.empty()) error = dlerror();
    }
    const std::string stubs =
        folder_of(reinterpret_cast<void*>(&aoti_torch_grad_mode_is_enabled)) + "libcaffe2_nvrtc.so";
    if (void* const library = dlopen(stubs.c_str(), RTLD_NOW)) return library;
    TORCH_CHECK(false, "lltm_ext: compiling an op at run time needs torch's NVRTC: ", error);
  }

  // The folder of the library that has the function, with a slash; empty if it is unknown.
  static std::string folder_of(void* function) {
    Dl_info library;
    if (!dladdr(function, &library)) return "";
    const std::string file = library.dli_fname;
    return file.substr(0, file.rfind('/') + 1);
  }

  Symbol symbol(const char* name) const {
    void* const address = dlsym(library_, name);
    TORCH_CHECK(address, "lltm_ext: NVRTC has no ", name);
    return {address};
  }
};

class Compilation {
 public:
  Compilation(const std::string& source, const std::vector<Header>& headers) {
    std::vector<const char*> names, texts;
    for (const Header& header : headers) {
      names.push_back(header.name);
      texts.push_back(header.text);
    }
    nvrtc_.check("read the source",
                 nvrtc_.create(&program_, source.c_str(), "lltm_ext", static_cast<int>(headers.size()),
                               texts.data(), names.data()));
  }
  ~Compilation() { nvrtc_.destroy(&program_); }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;

  bool run(const std::vector<std::string>& options) {
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());
    return nvrtc_.compile(program_, static_cast<int>(pointers.size()), pointers.data()) == 0;
  }
  std::string log() const { return text("return its log", nvrtc_.log_size, nvrtc_.log); }
  std::string cubin() const { return text("return the binary", nvrtc_.cubin_size, nvrtc_.cubin); }

 private:
  std::string text(const char* action, int (*size_of)(Nvrtc::Handle, size_t*),
                   int (*read)(Nvrtc::Handle, char*)) const {
    size_t size = 0;
    nvrtc_.check(action, size_of(program_, &size));
    std::string result(size, '\0');
    nvrtc_.check(action, read(program_, result.data()));
    return result;
  }

  const Nvrtc& nvrtc_ = Nvrtc::get();
  Nvrtc::Handle program_ = nullptr;
};

// Compiles in a thread of its own, so that Ctrl-C ends the wait for it. NVRTC cannot be stopped: the thread
// goes on. While it reads the source it replaces the handler of SIGINT by one that ends the process; the wait
// puts the handler back.
bool run_interruptibly(const std::shared_ptr<Compilation>& compilation,
                       const std::vector<std::string>& options) {
  struct sigaction handler;
  sigaction(SIGINT, nullptr, &handler);
  std::packaged_task<bool()> task([compilation, options] { return compilation->run(options); });
  std::future<bool> result = task.get_future();
  std::thread(std::move(task)).detach();
  while (result.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) {
    sigaction(SIGINT, &handler, nullptr);
    check_interrupt();
  }
  sigaction(SIGINT, &handler, nullptr);
  return result.get();
}

// Everything that the binary depends on.
std::string cache_key(const std::string& source, const std::vector<Header>& headers,
                      const std::vector<std::string>& options) {
  int major = 0, minor = 0;
  Nvrtc::get().check("return its version", Nvrtc::get().version(&major, &minor));
  std::string key = "NVRTC " + std::to_string(major) + "." + std::to_string(minor);
  for (const std::string& option : options) key += " " + option;
  for (const Header& header : headers) key += std::string("\n// ") + header.name + "\n" + header.text;
  return key + "\n" + source;
}

#endif

}  // namespace

int64_t compilations() { return compilation_count; }

#ifdef LLTM_EXT_WITH_CUDA

std::string compile(const std::string& description, const std::string& source,
                    const std::vector<Header>& headers, std::vector<std::string> options,
                    const std::string& architecture) {
  options.push_back("--gpu-architecture=" + architecture);
  const Cache cache(cache_key(source, headers, options));
  if (std::optional<std::string> cubin = cache.read()) return *std::move(cubin);
  ++compilation_count;
  const auto compilation = std::make_shared<Compilation>(source, headers);
  TORCH_CHECK(run_interruptibly(compilation, options), description, " does not compile:\n",
              compilation->log().c_str());
  std::string cubin = compilation->cubin();
  cache.write(cubin);
  return cubin;
}
#else
std::string compile(const std::string& description, const std::string&, const std::vector<Header>&,
                    std::vector<std::string>, const std::string&) {
  TORCH_CHECK(false, description, " cannot be compiled: this lltm_ext was built without CUDA");
}
#endif

}  // namespace lltm_ext
