// scan on the CPU: step by step, with the formulas of the kernels.
#include <algorithm>

#include "common/elementwise_cpu.h"
#include "scan/scan.h"

namespace lltm_ext {
namespace {

// Channels that a thread advances together, so that a step reads whole cache lines.
constexpr int kTogether = 64;

template <class Scan>
void run_channels(const Scan& scan, int64_t first, int count) {
  typename Scan::Channel channels[kTogether];
  typename Scan::A h[kTogether];
  bool was_reset[kTogether];  // backward: whether the step before forgets this one
  for (int i = 0; i < count; ++i) {
    channels[i] = scan.channel(first + i);
    h[i] = scan.before_first(channels[i]);
    was_reset[i] = true;
  }
  for (int64_t s = 0; s < scan.steps; ++s) {
    const bool is_last = s + 1 == scan.steps;
    for (int i = 0; i < count; ++i) {
      const typename Scan::Channel& x = channels[i];
      const bool is_reset = x.reset && *x.reset, forgets = Scan::kBackward ? was_reset[i] : is_reset;
      if (forgets) {
        h[i] = widen(*x.b);
      } else {
        h[i] = multiply_add(scan.factor(x.a[Scan::kBackward ? -scan.a.step : 0]), h[i], widen(*x.b));
      }
      *x.result = narrow<typename Scan::T>(h[i]);
      if constexpr (Scan::kBackward) {
        if (x.h)
          *x.grad_a =
              scan.gradient_of_a(h[i], widen(is_last ? scan.before_all(x) : x.h[scan.h.step]), is_reset);
        if (is_last) scan.store_grad_initial(x, h[i], is_reset);
        was_reset[i] = is_reset;
      }
      channels[i] = scan.moved(x, 1);
    }
  }
}

}  // namespace

template <class Scan>
void run_scan(const Scan& scan) {
  const int64_t groups = ceil_div(scan.channels.count, kTogether);
  const int64_t grain = std::max<int64_t>(1, kElementwiseGrain / (scan.steps * kTogether));
  at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * kTogether;
      run_channels(scan, first, static_cast<int>(std::min<int64_t>(kTogether, scan.channels.count - first)));
    }
  });
}

#define LLTM_SCAN(T, C)                                  \
  template void run_scan(const Scan<T, C, false>& scan); \
  template void run_scan(const Scan<T, C, true>& scan);
LLTM_SCAN(float, float)
LLTM_SCAN(double, double)
LLTM_SCAN(at::Half, at::Half)
LLTM_SCAN(at::Half, float)
LLTM_SCAN(at::BFloat16, at::BFloat16)
LLTM_SCAN(at::BFloat16, float)
LLTM_SCAN(Complex<float>, Complex<float>)
LLTM_SCAN(Complex<double>, Complex<double>)
#undef LLTM_SCAN

}  // namespace lltm_ext
