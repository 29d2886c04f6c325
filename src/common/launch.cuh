// How a kernel is launched: grid sizes and the loop over what one grid does not cover.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace lltm_ext {

constexpr int kThreads = 256;
// More blocks than any chip holds at once; the loop below covers the rest.
constexpr int64_t kMaxBlocks = 1 << 16;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(threads, kThreads), 1, kMaxBlocks));
}

// early: the kernel may begin before the launch before it has ended, and calls wait_for_launch_before itself;
// compute capability 9.0 and later.
template <class F, class... Args>
cudaError_t launch_kernel(F* kernel, dim3 blocks, dim3 threads, bool early, cudaStream_t stream,
                          const Args&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// In a kernel that was launched early: from here on all that the launch before wrote is there.
__device__ __forceinline__ void wait_for_launch_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// The launch after may begin, if it is an early one.
__device__ __forceinline__ void let_next_launch_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

}  // namespace lltm_ext

// Grid-stride loop over [0, n). Offsets are 64-bit: tensors may hold more than 2^31 elements.
#define CUDA_KERNEL_LOOP(i, n)                                                           \
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < (n); \
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
