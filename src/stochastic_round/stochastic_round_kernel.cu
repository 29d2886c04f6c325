// stochastic_round on CUDA: a thread rounds the elements of one block of random bits.
#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "stochastic_round/stochastic_round.h"

namespace lltm_ext {
namespace {

// kVec: 16-byte accesses.
template <bool kVec, typename T, class Round>
__global__ void __launch_bounds__(kThreads)
    stochastic_round_kernel(const float* __restrict__ input, T* __restrict__ output, int64_t n,
                            const PhiloxState state, const Round round) {
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t i = group * kRandomGroup;
  if (i >= n) return;
  const bool whole = kVec && i + kRandomGroup <= n;
  const int count = static_cast<int>(min(n - i, int64_t{kRandomGroup}));
  Vec<float, 4> x[2] = {};
  if (whole) {
    x[0] = *reinterpret_cast<const Vec<float, 4>*>(input + i);
    x[1] = *reinterpret_cast<const Vec<float, 4>*>(input + i + 4);
  } else {
#pragma unroll
    for (int k = 0; k < kRandomGroup; ++k) {
      if (k < count) x[k / 4].data[k % 4] = input[i + k];
    }
  }
  const uint64_t seed = state.seed_at ? *state.seed_at : state.seed;
  const uint64_t offset = (state.offset_at ? *state.offset_at : 0) + state.offset;
  const PhiloxBits bits = philox(seed, offset, group);
  Vec<T, kRandomGroup> y;
#pragma unroll
  for (int k = 0; k < kRandomGroup; ++k) {
    y.data[k] = narrow<T>(round(x[k / 4].data[k % 4], bits.half_word(k)));
  }
  if (whole) {
    *reinterpret_cast<Vec<T, kRandomGroup>*>(output + i) = y;
  } else {
#pragma unroll
    for (int k = 0; k < kRandomGroup; ++k) {
      if (k < count) output[i + k] = y.data[k];
    }
  }
}

}  // namespace

template <typename T, class Round>
cudaError_t stochastic_round(const float* input, T* output, int64_t n, PhiloxState state, Round round,
                             cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(ceil_div(n, kRandomGroup), kThreads));
  if (is_vec_aligned(input) && is_vec_aligned(output)) {
    stochastic_round_kernel<true><<<blocks, kThreads, 0, stream>>>(input, output, n, state, round);
  } else {
    stochastic_round_kernel<false><<<blocks, kThreads, 0, stream>>>(input, output, n, state, round);
  }
  return cudaGetLastError();
}

template cudaError_t stochastic_round(const float*, __half*, int64_t, PhiloxState, RoundToFloat16,
                                      cudaStream_t);
template cudaError_t stochastic_round(const float*, __nv_bfloat16*, int64_t, PhiloxState, RoundToBFloat16,
                                      cudaStream_t);

}  // namespace lltm_ext
