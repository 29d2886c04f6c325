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
  bool forgets[kTogether];
  for (int i = 0; i < count; ++i) {
    channels[i] = scan.channel(first + i);
    h[i] = scan.before_first(channels[i]);
    forgets[i] = scan.forgets(channels[i], true);
  }
  for (int64_t s = 0; s < scan.steps; ++s) {
    const bool is_last = s + 1 == scan.steps;
    for (int i = 0; i < count; ++i) {
      const auto step = scan.load(channels[i], s == 0, is_last);
      h[i] = advance(step, forgets[i], h[i]);
      const auto next = scan.moved(channels[i], 1);
      forgets[i] = (Scan::kBackward || !is_last) && scan.forgets(next, false);
      scan.store(channels[i], step, forgets[i], is_last, h[i]);
      channels[i] = next;
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
  template void run_scan(const ScanForward<T, C>& scan); \
  template void run_scan(const ScanBackward<T, C>& scan);
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
