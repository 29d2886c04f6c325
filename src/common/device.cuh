// Asks the driver about the current device, once.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "common/device.h"

namespace lltm_ext {

template <int kThreads>
__global__ void __launch_bounds__(kThreads) cluster_probe_kernel() {}

// The multiprocessors that clusters can fill with one block each; all of them if the device has no clusters.
inline int cluster_multiprocessors(int cluster_blocks, int multiprocessors, int shared_bytes) {
  constexpr int kThreads = 256;
  const auto kernel = cluster_probe_kernel<kThreads>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster_blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster_blocks * multiprocessors);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;  // all there is, so that a multiprocessor has one block
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (error == cudaSuccess) return clusters * cluster_blocks;
  cudaGetLastError();
  return multiprocessors;
}

inline cudaError_t ask_driver(DeviceInfo& info, int device) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  const auto ask = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  ask(minor, cudaDevAttrComputeCapabilityMinor);
  ask(info.multiprocessors, cudaDevAttrMultiProcessorCount);
  ask(info.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (error != cudaSuccess) return error;
  info.compute_capability = major * 10 + minor;
#ifdef LLTM_EXT_SM90A
  info.has_sm90a = info.compute_capability == 90;
#endif
  for (int n = 1; n <= kMostClusterBlocks; ++n) {
    info.cluster_multiprocessors[n] =
        major >= 9 ? cluster_multiprocessors(n, info.multiprocessors, info.shared_bytes)
                   : info.multiprocessors;
  }
  return cudaSuccess;
}

inline cudaError_t current_device_info(DeviceInfo& info) {
  static std::array<DeviceInfo, 64> known = {};
  static std::mutex mutex;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= static_cast<int>(known.size())) return ask_driver(info = {}, device);
  const std::lock_guard<std::mutex> lock(mutex);
  if (known[device].multiprocessors == 0) {
    DeviceInfo asked = {};
    error = ask_driver(asked, device);
    if (error != cudaSuccess) return error;
    known[device] = asked;
  }
  info = known[device];
  return cudaSuccess;
}

}  // namespace lltm_ext
