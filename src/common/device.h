// What launchers need to know about a device. No torch.
#pragma once

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>

#include <vector>
#endif

namespace lltm_ext {

struct DeviceInfo {
  int compute_capability;  // major * 10 + minor
  int multiprocessors;
  bool has_sm90a;  // compute capability 9.0, in a build with code for sm_90a
};

// How many multiprocessors clusters of more than two blocks can use. A cluster fits inside one GPC, and
// rarely fills a GPC's last multiprocessors: we measured 15 clusters of 8 blocks on 132 multiprocessors.
constexpr int multiprocessors_for_clusters(int multiprocessors) { return multiprocessors / 11 * 10; }

#ifdef LLTM_EXT_WITH_CUDA
// The current device's. The driver is asked once, not once a call.
inline cudaError_t current_device_info(DeviceInfo& info) {
  static const std::vector<DeviceInfo> devices = [] {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    std::vector<DeviceInfo> found(count);
    for (int device = 0; device < count; ++device) {
      int major = 0, minor = 0, multiprocessors = 0;
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      found[device] = {major * 10 + minor, multiprocessors, false};
#ifdef LLTM_EXT_SM90A
      found[device].has_sm90a = major == 9 && minor == 0;
#endif
    }
    return found;
  }();
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= static_cast<int>(devices.size())) return cudaErrorInvalidDevice;
  info = devices[device];
  return cudaSuccess;
}
#endif

}  // namespace lltm_ext
