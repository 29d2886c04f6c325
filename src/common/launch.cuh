// Kernel launches: grid sizes, programmatic dependent launches and the grid-stride loop.
#pragma once

#include "common/portable.h"

#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#endif

namespace lltm_ext {

constexpr int kThreads = 256;
// More blocks than any device holds at once; CUDA_KERNEL_LOOP covers the rest.
constexpr int64_t kMaxBlocks = 1 << 16;

#ifndef __CUDACC_RTC__
inline unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(threads, kThreads), 1, kMaxBlocks));
}

// Returns that of the kernel's code on the current device, which is less than the device's for older PTX.
template <auto* kKernel>
cudaError_t compute_capability(int& capability) {
  static std::array<std::atomic<int>, 64> known = {};  // one for each device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool is_kept = device < static_cast<int>(known.size());
  capability = is_kept ? known[device].load() : 0;
  if (capability > 0) return cudaSuccess;
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, kKernel);
  if (error != cudaSuccess) return error;
  capability = attributes.ptxVersion;
  if (is_kept) known[device] = capability;
  return cudaSuccess;
}

// programmatic: a programmatic dependent launch, for compute capability 9.0 and later. The kernel may start
// before the previous one ends, and calls griddepcontrol_wait before it reads that one's results. CUDA
// refuses a launch without blocks, so there is none.
template <class F, class... Args>
cudaError_t launch_kernel(F* kernel, dim3 blocks, dim3 threads, int shared_bytes, bool programmatic,
                          cudaStream_t stream, const Args&... args) {
  if (blocks.x == 0) return cudaSuccess;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}
#endif

// Waits until the previous kernel's results are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// Lets the next kernel start, if its launch is programmatic.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

}  // namespace lltm_ext

// Grid-stride loop over [0, n). Offsets are 64-bit: tensors may hold more than 2^31 elements.
#define CUDA_KERNEL_LOOP(i, n)                                                           \
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < (n); \
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
