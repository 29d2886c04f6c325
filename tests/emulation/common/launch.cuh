// In place of src/common/launch.cuh: kernels run one after the other, so none waits for another.
#pragma once

#include "cuda_on_cpu.h"

namespace lltm_ext {

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1;

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline dim3 gridDim(1);

// Runs the blocks one after the other, so that they share what is __shared__ without being dynamic.
template <class F, class... Args>
cudaError_t launch_kernel(F* kernel, dim3 blocks, dim3 threads, int shared_bytes, bool, cudaStream_t,
                          const Args&... args) {
  gridDim = blocks;
  for (unsigned i = 0; i < blocks.x * blocks.y; ++i) {
    cuda_on_cpu::run({1, static_cast<int>(threads.x), 1, static_cast<size_t>(shared_bytes)}, [&] {
      cuda_on_cpu::current_block().index = blockIdx = {i % blocks.x, i / blocks.x, 0};
      kernel(args...);
    });
  }
  return cudaSuccess;
}

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace lltm_ext
