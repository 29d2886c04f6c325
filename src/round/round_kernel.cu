// round and binarize on CUDA: one pass of the elementwise engine.
#include "common/elementwise.cuh"
#include "round/round.h"

namespace lltm_ext {

template <typename T>
cudaError_t round_forward(const T* input, T* output, int64_t n, cudaStream_t stream) {
  return launch_elementwise(RoundForward{}, n, stream, output, input);
}

template <typename T>
cudaError_t binarize_forward(double threshold, const T* input, T* output, int64_t n, cudaStream_t stream) {
  return launch_elementwise(BinarizeForward<acc_t<T>>{static_cast<acc_t<T>>(threshold)}, n, stream, output,
                            input);
}

#define INSTANTIATE(T)                                                     \
  template cudaError_t round_forward(const T*, T*, int64_t, cudaStream_t); \
  template cudaError_t binarize_forward(double, const T*, T*, int64_t, cudaStream_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)

}  // namespace lltm_ext
