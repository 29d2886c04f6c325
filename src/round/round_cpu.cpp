// round and binarize on the CPU, from the same formulas as the kernels.
#include "common/elementwise_cpu.h"
#include "round/round.h"

namespace lltm_ext {

template <typename T>
void round_forward(const T* input, T* output, int64_t n) {
  run_elementwise(RoundForward{}, n, output, input);
}

template <typename T>
void binarize_forward(double threshold, const T* input, T* output, int64_t n) {
  run_elementwise(BinarizeForward<acc_t<T>>{static_cast<acc_t<T>>(threshold)}, n, output, input);
}

#define INSTANTIATE(T)                                \
  template void round_forward(const T*, T*, int64_t); \
  template void binarize_forward(double, const T*, T*, int64_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(c10::Half)
INSTANTIATE(c10::BFloat16)

}  // namespace lltm_ext
