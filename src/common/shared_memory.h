// The host side of kernels with more than 48 KiB of dynamic shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

namespace lltm_ext {

// Must precede a launch with more. The driver takes microseconds for it, so it is asked only for more than
// before: a thread that needs less must not lower what another one needs. kernel: a __global__ function or a
// cudaKernel_t.
inline cudaError_t set_max_dynamic_shared(const void* kernel, int bytes) {
  static std::map<std::pair<const void*, int>, int> allowed;  // per kernel and device
  static std::mutex mutex;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{kernel, device}];
  if (bytes <= most) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) most = bytes;
  return error;
}
template <class... Parameters>
cudaError_t set_max_dynamic_shared(void (*kernel)(Parameters...), int bytes) {
  return set_max_dynamic_shared(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace lltm_ext
