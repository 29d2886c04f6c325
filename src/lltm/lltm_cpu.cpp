// lltm on the CPU: the pointwise half of one step, from the same unit functions as the kernels.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "lltm/lltm.h"

namespace lltm_ext {
namespace {

// Rows are shared out among threads; a unit costs about three exponentials.
template <typename Step, typename Unit>
void for_each_unit(const Step& step, Unit unit) {
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, step.hidden));
  at::parallel_for(0, step.batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t j = 0; j < step.hidden; ++j) unit(step, b, j);
    }
  });
}

}  // namespace

template <typename T, typename C>
void lltm_forward_step(const ForwardStep<T, C>& step) {
  for_each_unit(step, lltm_forward_unit<ExactMath, T, C>);
}

template <typename T, typename C>
void lltm_backward_step(const BackwardStep<T, C>& step) {
  for_each_unit(step, [](const auto& step, int64_t b, int64_t j) {
    acc_t<T> unused[3] = {};
    lltm_backward_unit<ExactMath>(step, b, j, unused);
  });
}

#define INSTANTIATE(T, C)                                    \
  template void lltm_forward_step(const ForwardStep<T, C>&); \
  template void lltm_backward_step(const BackwardStep<T, C>&);
INSTANTIATE(float, float)
INSTANTIATE(double, double)
INSTANTIATE(c10::Half, c10::Half)
INSTANTIATE(c10::Half, float)
INSTANTIATE(c10::BFloat16, c10::BFloat16)
INSTANTIATE(c10::BFloat16, float)

}  // namespace lltm_ext
