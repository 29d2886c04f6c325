// fake_quantize on the CPU, from the same formulas as the kernels.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <vector>

#include "fake_quantize/fake_quantize.h"

namespace lltm_ext {
namespace {

// Below this many elements a second thread costs more than it saves.
constexpr int64_t kGrain = 32768;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename A>
std::vector<Quantizer<A>> quantizers_of(const QuantizationScheme& scheme, int64_t channels) {
  std::vector<Quantizer<A>> grids(channels);
  for (int64_t c = 0; c < channels; ++c) grids[c] = quantizer_of<A>(scheme, c);
  return grids;
}

}  // namespace

// Some 4096 elements a sum.
PartialSums plan_partial_sums(const ChannelLayout& layout) {
  const int64_t length = std::min<int64_t>(layout.inner, 4096);
  const int64_t rows = std::clamp<int64_t>(4096 / length, 1, layout.outer);
  return {ceil_div(layout.outer, rows), ceil_div(layout.inner, length), rows, length, 0};
}

template <typename T>
void fake_quantize_forward(const T* input, T* output, unsigned char* mask, const ChannelLayout& layout,
                           const QuantizationScheme& scheme) {
  using A = acc_t<T>;
  const auto grids = quantizers_of<A>(scheme, layout.channels);
  const int64_t n = layout.size();
  // Threads share out bytes of the mask.
  at::parallel_for(0, mask_bytes(n), kGrain / 8, [&](int64_t first, int64_t last) {
    int64_t i = first * 8;
    const int64_t end = std::min(last * 8, n);
    int64_t channel = i / layout.inner % layout.channels, left = layout.inner - i % layout.inner;
    while (i < end) {
      const Quantizer<A> grid = grids[channel];
      for (const int64_t stop = std::min(i + left, end); i < stop; ++i) {
        const A steps = grid.steps(widen(input[i]));
        output[i] = narrow<T>(grid.value(steps));
        if (!mask) continue;
        if (i % 8 == 0) mask[i / 8] = 0;
        mask[i / 8] |= grid.holds(steps) << i % 8;
      }
      left = layout.inner;
      channel = channel + 1 == layout.channels ? 0 : channel + 1;
    }
  });
}

template <typename T>
void fake_quantize_mask_backward(const T* grad_output, const unsigned char* mask, T* grad_input, int64_t n) {
  at::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      grad_input[i] = mask[i / 8] >> i % 8 & 1 ? grad_output[i] : narrow<T>(0);
    }
  });
}

template <typename T>
void fake_quantize_backward(const T* grad_output, const T* input, T* grad_input,
                            ScaleAndZeroPoint<acc_t<T>>* partial_sums, acc_t<T>* grad_scale,
                            acc_t<T>* grad_zero_point, const ChannelLayout& layout, const PartialSums& plan,
                            const QuantizationScheme& scheme, double grad_factor) {
  using A = acc_t<T>;
  using Sums = ScaleAndZeroPoint<A>;
  const auto grids = quantizers_of<A>(scheme, layout.channels);
  const auto pass = [&](int64_t piece) {
    const int64_t outer = piece / plan.inner / layout.channels,
                  channel = piece / plan.inner % layout.channels;
    const int64_t begin = piece % plan.inner * plan.length, end = std::min(begin + plan.length, layout.inner);
    const Quantizer<A> grid = grids[channel];
    Sums sums = {};
    for (int64_t o = outer * plan.rows; o < std::min((outer + 1) * plan.rows, layout.outer); ++o) {
      const int64_t row = (o * layout.channels + channel) * layout.inner;
      for (int64_t i = row + begin; i < row + end; ++i) {
        const A gradient = widen(grad_output[i]), x = widen(input[i]);
        sums += grid.gradient(gradient, x);
        grad_input[i] = narrow<T>(grid.holds(grid.steps(x)) ? gradient : A(0));
      }
    }
    partial_sums[piece] = sums;
  };
  // What a partial sum takes does not depend on the threads, so neither do the bits.
  at::parallel_for(0, plan.outer * layout.channels * plan.inner, ceil_div(kGrain, plan.rows * plan.length),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t piece = begin; piece < end; ++piece) pass(piece);
                   });
  for (int64_t c = 0; c < layout.channels; ++c) {
    Sums sum = {};
    for (int64_t o = 0; o < plan.outer; ++o) {
      for (int64_t i = 0; i < plan.inner; ++i) {
        sum += partial_sums[(o * layout.channels + c) * plan.inner + i];
      }
    }
    grad_scale[c] = sum.scale * static_cast<A>(grad_factor);
    grad_zero_point[c] = sum.zero_point * static_cast<A>(grad_factor);
  }
}

#define LLTM_FAKE_QUANTIZE(T)                                                                           \
  template void fake_quantize_forward(const T*, T*, unsigned char*, const ChannelLayout&,               \
                                      const QuantizationScheme&);                                       \
  template void fake_quantize_mask_backward(const T*, const unsigned char*, T*, int64_t);               \
  template void fake_quantize_backward(const T*, const T*, T*, ScaleAndZeroPoint<acc_t<T>>*, acc_t<T>*, \
                                       acc_t<T>*, const ChannelLayout&, const PartialSums&,             \
                                       const QuantizationScheme&, double);
LLTM_FAKE_QUANTIZE(float)
LLTM_FAKE_QUANTIZE(double)
LLTM_FAKE_QUANTIZE(at::Half)
LLTM_FAKE_QUANTIZE(at::BFloat16)

}  // namespace lltm_ext
