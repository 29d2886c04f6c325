// stochastic_round on the CPU, with the kernel's formulas.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "stochastic_round/stochastic_round.h"

namespace lltm_ext {

template <typename T, class Round>
void stochastic_round(const float* input, T* output, int64_t n, PhiloxState state, Round round) {
  constexpr int64_t kGrain = 1024;  // with fewer groups, a second thread costs more time than it saves
  const int64_t groups = (n + kRandomGroup - 1) / kRandomGroup;
  at::parallel_for(0, groups, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const PhiloxBits bits = philox(state.seed, state.offset, group);
      const int64_t first = group * kRandomGroup, last = std::min(first + kRandomGroup, n);
      for (int64_t i = first; i < last; ++i) {
        output[i] = narrow<T>(round(input[i], bits.half_word(static_cast<int>(i - first))));
      }
    }
  });
}

template void stochastic_round(const float*, at::Half*, int64_t, PhiloxState, RoundToFloat16);
template void stochastic_round(const float*, at::BFloat16*, int64_t, PhiloxState, RoundToBFloat16);

}  // namespace lltm_ext
