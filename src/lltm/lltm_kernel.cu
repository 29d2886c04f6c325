// lltm on CUDA: the pointwise half of one step, forward and backward, a thread a unit or, backward, a few
// rows of one. The other half, the gates' matrix product, is the binding's.
#include "common/fast_math.cuh"
#include "common/launch.cuh"
#include "lltm/lltm.h"

namespace lltm_ext {

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) lltm_forward_kernel(ForwardStep<T, C> step) {
  CUDA_KERNEL_LOOP(i, step.batch * step.hidden)
  lltm_forward_unit<ExactMath>(step, i / step.hidden, i % step.hidden);
}

// Threads share out the batch of a block's units, and sum the bias's gradient in a fixed order.
constexpr int kUnits = 32, kRows = kThreads / kUnits;

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) lltm_backward_kernel(BackwardStep<T, C> step) {
  using A = acc_t<T>;
  __shared__ A shared[kRows][3][kUnits];
  const int unit = threadIdx.x % kUnits, row = threadIdx.x / kUnits;
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kUnits + unit;
  A sums[3] = {};
  for (int64_t b = blockIdx.y * kRows + row; b < step.batch && j < step.hidden; b += gridDim.y * kRows) {
    lltm_backward_unit<ExactMath>(step, b, j, sums);
  }
  if (!step.grad_bias) return;
  for (int g = 0; g < 3; ++g) shared[row][g][unit] = sums[g];
  __syncthreads();
  if (row >= 3 || j >= step.hidden) return;
  A sum = 0;  // of gate `row`
  for (int r = 0; r < kRows; ++r) sum += shared[r][row][unit];
  step.grad_bias[row * step.hidden + j] = narrow<T>(sum);
}

template <typename T, typename C>
cudaError_t lltm_forward_step(const ForwardStep<T, C>& step, cudaStream_t stream) {
  lltm_forward_kernel<<<blocks_for(step.batch * step.hidden), kThreads, 0, stream>>>(step);
  return cudaGetLastError();
}

// One block has all of the batch if it is to sum over it.
template <typename T, typename C>
cudaError_t lltm_backward_step(const BackwardStep<T, C>& step, cudaStream_t stream) {
  const int64_t rows = step.grad_bias ? 1 : std::clamp<int64_t>(ceil_div(step.batch, kRows), 1, 1024);
  const dim3 grid(static_cast<unsigned>(ceil_div(step.hidden, kUnits)), static_cast<unsigned>(rows));
  lltm_backward_kernel<<<grid, kThreads, 0, stream>>>(step);
  return cudaGetLastError();
}

#define INSTANTIATE(T, C)                                                         \
  template cudaError_t lltm_forward_step(const ForwardStep<T, C>&, cudaStream_t); \
  template cudaError_t lltm_backward_step(const BackwardStep<T, C>&, cudaStream_t);
INSTANTIATE(float, float)
INSTANTIATE(double, double)
INSTANTIATE(__half, __half)
INSTANTIATE(__half, float)
INSTANTIATE(__nv_bfloat16, __nv_bfloat16)
INSTANTIATE(__nv_bfloat16, float)

}  // namespace lltm_ext
