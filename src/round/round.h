// round: the contract between the op's files. A stream as last argument means CUDA, none means the CPU.
// There is no backward: the straight-through gradient is the incoming one, untouched.
#pragma once

#include <cstdint>

#include "common/math.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

struct RoundForward {
  template <typename A>
  LLTM_HOST_DEVICE A operator()(A input) const {
    return round_half_to_even(input);
  }
};

// NaN is not above the threshold: 0.
template <typename A>
struct BinarizeForward {
  A threshold;
  LLTM_HOST_DEVICE A operator()(A input) const { return input > threshold ? A(1) : A(0); }
};

template <typename T>
void round_forward(const T* input, T* output, int64_t n);
template <typename T>
void binarize_forward(double threshold, const T* input, T* output, int64_t n);

#ifdef LLTM_EXT_WITH_CUDA
template <typename T>
cudaError_t round_forward(const T* input, T* output, int64_t n, cudaStream_t stream);
template <typename T>
cudaError_t binarize_forward(double threshold, const T* input, T* output, int64_t n, cudaStream_t stream);
#endif

}  // namespace lltm_ext
