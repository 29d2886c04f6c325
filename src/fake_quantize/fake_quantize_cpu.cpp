// fake_quantize on the CPU, with the kernels' formulas.
#include <algorithm>
#include <vector>

#include "common/elementwise_cpu.h"
#include "fake_quantize/fake_quantize.h"

namespace lltm_ext {
namespace {

template <typename A>
std::vector<Quantizer<A>> make_quantizers(const QuantizationScheme& scheme, int64_t channels) {
  std::vector<Quantizer<A>> quantizers(channels);
  for (int64_t c = 0; c < channels; ++c) quantizers[c] = make_quantizer<A>(scheme, c);
  return quantizers;
}

}  // namespace

// A partial sum covers about 4096 elements.
ReductionPlan plan_reduction(const ChannelLayout& layout) {
  const int64_t length = std::min<int64_t>(layout.inner, 4096);
  const int64_t rows = std::clamp<int64_t>(4096 / length, 1, layout.outer);
  return {ceil_div(layout.outer, rows), ceil_div(layout.inner, length), rows, length, 0};
}

template <typename T>
void fake_quantize_forward(const FakeQuantizeForwardArguments<T>& args) {
  using A = acc_t<T>;
  const ChannelLayout& layout = args.layout;
  const auto quantizers = make_quantizers<A>(args.scheme, layout.channels);
  const int64_t n = layout.size();
  // Threads split the work at whole bytes of the mask.
  at::parallel_for(0, ceil_div(n, 8), kElementwiseGrain / 8, [&](int64_t first_byte, int64_t last_byte) {
    int64_t i = first_byte * 8;
    const int64_t end = std::min(last_byte * 8, n);
    int64_t channel = i / layout.inner % layout.channels, left = layout.inner - i % layout.inner;
    while (i < end) {
      const Quantizer<A> quantizer = quantizers[channel];
      for (const int64_t stop = std::min(i + left, end); i < stop; ++i) {
        const A level = quantizer.level(widen(args.input[i]));
        args.output[i] = narrow<T>(quantizer.dequantize(level));
        if (!args.mask) continue;
        if (i % 8 == 0) args.mask[i / 8] = 0;
        args.mask[i / 8] |= quantizer.in_range(level) << i % 8;
      }
      left = layout.inner;
      channel = channel + 1 == layout.channels ? 0 : channel + 1;
    }
  });
}

template <typename T>
void fake_quantize_mask_backward(const FakeQuantizeMaskBackwardArguments<T>& args) {
  at::parallel_for(0, args.n, kElementwiseGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      args.grad_input[i] = args.mask[i / 8] >> i % 8 & 1 ? args.grad_output[i] : narrow<T>(0);
    }
  });
}

template <typename T>
void fake_quantize_backward(const FakeQuantizeBackwardArguments<T>& args) {
  using A = acc_t<T>;
  const ChannelLayout& layout = args.layout;
  const ReductionPlan& plan = args.plan;
  const auto quantizers = make_quantizers<A>(args.scheme, layout.channels);
  // Partial sums do not depend on the number of threads, so the result is deterministic.
  const int64_t grain = ceil_div(kElementwiseGrain, plan.rows * plan.length);
  at::parallel_for(0, plan.outer * layout.channels * plan.inner, grain, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t outer = part / plan.inner / layout.channels,
                    channel = part / plan.inner % layout.channels;
      const int64_t begin = part % plan.inner * plan.length,
                    end = std::min(begin + plan.length, layout.inner);
      const Quantizer<A> quantizer = quantizers[channel];
      ParameterGradients<A> sums = {};
      for (int64_t o = outer * plan.rows; o < std::min((outer + 1) * plan.rows, layout.outer); ++o) {
        const int64_t row = (o * layout.channels + channel) * layout.inner;
        for (int64_t i = row + begin; i < row + end; ++i) {
          const A gradient = widen(args.grad_output[i]), x = widen(args.input[i]);
          sums += quantizer.gradients(gradient, x);
          args.grad_input[i] = narrow<T>(quantizer.in_range(quantizer.level(x)) ? gradient : A(0));
        }
      }
      args.partial_sums[part] = sums;
    }
  });
  for (int64_t c = 0; c < layout.channels; ++c) {
    ParameterGradients<A> sums = {};
    for (int64_t o = 0; o < plan.outer; ++o) {
      for (int64_t i = 0; i < plan.inner; ++i) {
        sums += args.partial_sums[(o * layout.channels + c) * plan.inner + i];
      }
    }
    args.grad_scale[c] = sums.scale * static_cast<A>(args.grad_factor);
    args.grad_zero_point[c] = sums.zero_point * static_cast<A>(args.grad_factor);
  }
}

#define LLTM_FAKE_QUANTIZE(T)                                                             \
  template void fake_quantize_forward(const FakeQuantizeForwardArguments<T>&);            \
  template void fake_quantize_mask_backward(const FakeQuantizeMaskBackwardArguments<T>&); \
  template void fake_quantize_backward(const FakeQuantizeBackwardArguments<T>&);
LLTM_FAKE_QUANTIZE(float)
LLTM_FAKE_QUANTIZE(double)
LLTM_FAKE_QUANTIZE(at::Half)
LLTM_FAKE_QUANTIZE(at::BFloat16)

}  // namespace lltm_ext
