// stochastic_round on CUDA: each thread rounds the elements of two blocks of random bits.
#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "stochastic_round/stochastic_round.h"

namespace lltm_ext {
// The namespace has a name, because nvcc puts the file's path into the names of an unnamed one, and builds
// would not be reproducible.
inline namespace stochastic_round_cuda {

constexpr int kBlock = 128;
// The groups of a thread share the load of the generator's state, and their own loads overlap.
constexpr int kGroups = 2;

struct Group {
  Vec<float, 4> halves[2];
  __device__ __forceinline__ float& at(int k) { return halves[k / 4].data[k % 4]; }
};

// A group of half-type values.
using Rounded = Vec<uint32_t, kRandomGroup / 2>;

// Rounds a group whose values are all in range, with the formulas' results but in fewer instructions. Returns
// false if a value may be out of range, which the sum of magnitudes tells in one comparison.

__device__ __forceinline__ bool round_group(Group x, const PhiloxBits& bits, RoundToBFloat16 round,
                                            Rounded& y) {
  float magnitudes = 0;
#pragma unroll
  for (int k = 0; k < kRandomGroup; ++k) magnitudes += fabsf(x.at(k));
  if (!(magnitudes <= bit_cast<float>(round.kLargest))) return false;
#pragma unroll
  for (int k = 0; k < kRandomGroup; k += 2) {
    const uint32_t first = bit_cast<uint32_t>(x.at(k)) + bits.half_word(k);
    const uint32_t second = bit_cast<uint32_t>(x.at(k + 1)) + bits.half_word(k + 1);
    y.data[k / 2] = __byte_perm(first, second, 0x7632);  // bfloat16 is the upper half
  }
  return true;
}

__device__ __forceinline__ bool round_group(Group x, const PhiloxBits& bits, RoundToFloat16 round,
                                            Rounded& y) {
  float magnitudes = 0;
  uint32_t least = UINT32_MAX;
#pragma unroll
  for (int k = 0; k < kRandomGroup; ++k) {
    magnitudes += fabsf(x.at(k));
    // Doubling drops the sign. Subtracting 1 makes 0, which needs no special formula, the largest.
    least = min(least, 2 * bit_cast<uint32_t>(x.at(k)) - 1);
  }
  if (!(magnitudes <= bit_cast<float>(round.kLargest))) return false;
  float rounded[kRandomGroup];
#pragma unroll
  for (int k = 0; k < kRandomGroup; ++k) {
    rounded[k] = bit_cast<float>((bit_cast<uint32_t>(x.at(k)) + (bits.half_word(k) >> 3)) & 0xffffe000);
  }
  if (least < 2 * round.kSmallestNormal - 1) {  // has subnormals: rare and slow
#pragma unroll
    for (int k = 0; k < kRandomGroup; ++k) rounded[k] = round(x.at(k), bits.half_word(k));
  }
#pragma unroll
  for (int k = 0; k < kRandomGroup; k += 2) {
    const __half2 pair = __floats2half2_rn(rounded[k], rounded[k + 1]);
    y.data[k / 2] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return true;
}

// aligned: all groups begin at 16-byte boundaries.
template <typename T, class Round>
__global__ void __launch_bounds__(kBlock)
    stochastic_round_kernel(const float* __restrict__ input, T* __restrict__ output, int64_t n,
                            const PhiloxState state, const Round round, bool aligned) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kBlock * kGroups) + threadIdx.x;
  Group x[kGroups];
  bool whole[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int64_t i = (first + g * kBlock) * kRandomGroup;
    whole[g] = aligned && i + kRandomGroup <= n;
    if (!whole[g]) continue;
    x[g].halves[0] = *reinterpret_cast<const Vec<float, 4>*>(input + i);
    x[g].halves[1] = *reinterpret_cast<const Vec<float, 4>*>(input + i + 4);
  }
  const uint64_t seed = state.graph_seed ? *state.graph_seed : state.seed;
  const uint64_t offset = (state.graph_offset ? *state.graph_offset : 0) + state.offset;
  unsigned done = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int64_t group = first + g * kBlock;
    Rounded y;
    if (!whole[g] || !round_group(x[g], philox(seed, offset, group), round, y)) continue;
    *reinterpret_cast<Rounded*>(output + group * kRandomGroup) = y;
    done |= 1 << g;
  }
  if (done == (1 << kGroups) - 1) return;
#pragma unroll 1
  for (int g = 0; g < kGroups; ++g) {
    const int64_t group = first + g * kBlock, i = group * kRandomGroup;
    if (done >> g & 1) continue;
    Group one = {};
#pragma unroll
    for (int k = 0; k < kRandomGroup; ++k) {
      if (i + k < n) one.at(k) = input[i + k];
    }
    const PhiloxBits bits = philox(seed, offset, group);
#pragma unroll
    for (int k = 0; k < kRandomGroup; ++k) {
      if (i + k < n) output[i + k] = narrow<T>(round(one.at(k), bits.half_word(k)));
    }
  }
}

}  // namespace stochastic_round_cuda

template <typename T, class Round>
cudaError_t stochastic_round(const float* input, T* output, int64_t n, PhiloxState state, Round round,
                             cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(n, kRandomGroup * kBlock * kGroups));
  const bool aligned = is_vec_aligned(input) && is_vec_aligned(output);
  stochastic_round_kernel<<<blocks, kBlock, 0, stream>>>(input, output, n, state, round, aligned);
  return cudaGetLastError();
}

template cudaError_t stochastic_round(const float*, __half*, int64_t, PhiloxState, RoundToFloat16,
                                      cudaStream_t);
template cudaError_t stochastic_round(const float*, __nv_bfloat16*, int64_t, PhiloxState, RoundToBFloat16,
                                      cudaStream_t);

}  // namespace lltm_ext
