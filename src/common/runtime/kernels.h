// The kernels of binaries that are compiled at run time.
#pragma once

#ifdef LLTM_EXT_WITH_CUDA

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace lltm_ext {

// The architecture to compile for, such as "sm_90".
std::string architecture_of(c10::DeviceIndex device);

// Loads a binary for the current device, also during the capture of a graph, and returns its kernels of these
// names. The binary is never unloaded.
std::vector<cudaKernel_t> load_kernels(const std::string& binary, const std::vector<std::string>& names);

// Values that are made once for each key. Threads that ask for one wait for each other; references stay
// valid.
template <class Key, class Value>
class Memo {
 public:
  template <class Make>
  const Value& get(const Key& key, Make&& make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = made_.find(key); found != made_.end()) return found->second;
    return made_.emplace(key, make()).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<Key, Value> made_;
};

}  // namespace lltm_ext

#endif
