// fake_quantize: the formulas, for CPU and GPU alike, and what its files agree on. No torch.
//
// A channel's grid is scale * {low, ..., high}, integers: quant_min and quant_max less the zero point, which
// shifts the integers but not the values. So a value is rounded to the grid by
//
//   steps = nearbyint(input * (1 / scale)),  output = clamp(steps, low, high) * scale.
//
// The range has fewer than 2^22 integers.
#pragma once

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include "common/math.h"
#include "common/types.h"

namespace lltm_ext {

enum class ParameterType { kFloat, kDouble, kInt, kLong };

// A scale or zero point as it comes: a tensor's elements, one for all channels (stride 0) or one a channel;
// or, without data, a number.
struct Parameter {
  const void* data;
  int64_t stride;
  ParameterType type;
  double number;
};

struct QuantizationScheme {
  Parameter scale, zero_point;
  double quant_min, quant_max;
};

// The input's elements in memory order, [outer, channels, inner].
struct ChannelLayout {
  int64_t outer, channels, inner;
  LLTM_HOST_DEVICE int64_t size() const { return outer * channels * inner; }
};

// How each channel's gradient sums are shared out: [outer, channels, inner] partial sums, each in a fixed
// order, so that the same call gives the same bits.
struct PartialSums {
  int64_t outer, inner;
  // What one of them covers: rows of the layout's outer dimension, and a length of its inner one.
  int64_t rows, length;
  // If not 0, it covers the elements at one place in memory modulo `period` instead.
  int64_t period;
};

// Two sums: of the gradient with respect to a scale and to a zero point.
template <typename A>
struct ScaleAndZeroPoint {
  A scale, zero_point;
  LLTM_HOST_DEVICE void operator+=(ScaleAndZeroPoint other) {
    scale += other.scale;
    zero_point += other.zero_point;
  }
};

// With one conversion for integers and one for the others: of a switch over the types a kernel that reads for
// several channels would have a way for each of them through all of its channels.
template <typename A>
LLTM_HOST_DEVICE A parameter_at(const Parameter& x, int64_t channel) {
  if (!x.data) return static_cast<A>(x.number);
  const int64_t at = channel * x.stride;
  const bool wide = x.type == ParameterType::kDouble || x.type == ParameterType::kLong;
  if (x.type == ParameterType::kInt || x.type == ParameterType::kLong) {
    return static_cast<A>(wide ? static_cast<const int64_t*>(x.data)[at]
                               : int64_t{static_cast<const int32_t*>(x.data)[at]});
  }
  return static_cast<A>(wide ? static_cast<const double*>(x.data)[at]
                             : double{static_cast<const float*>(x.data)[at]});
}

// NaN counts as below the range, as in torch.
template <typename A>
LLTM_HOST_DEVICE A clamp_to(A x, A low, A high) {
  return std::fmin(std::fmax(x, low), high);
}

// A channel's grid. 16 bytes in float32.
template <typename A>
struct Quantizer {
  A scale, inverse, low, high;

  // A sum with 1.5 * 2^23 (2^52), where there are whole numbers only, rounds what is small, ties to even.
  // What is not small stays beyond the range, and NaN is NaN.
  LLTM_HOST_DEVICE A steps(A input) const {
    constexpr A kWhole = sizeof(A) == 4 ? A(12582912) : A(6755399441055744);
    return (product(input, inverse) + kWhole) - kWhole;
  }
  LLTM_HOST_DEVICE A clamped(A steps) const { return clamp_to(steps, low, high); }
  LLTM_HOST_DEVICE bool holds(A steps) const { return steps == clamped(steps); }

  // The zero of an integer has no sign, and neither has a sum's.
  LLTM_HOST_DEVICE A value(A steps) const { return clamped(steps) * scale; }

  // Esser et al., "Learned Step Size Quantization", 2019; the zero point as in torch and Bhalgat et al.,
  // "LSQ+", 2020: it moves only what is clamped.
  LLTM_HOST_DEVICE ScaleAndZeroPoint<A> gradient(A grad_output, A input) const {
    const A steps = this->steps(input);
    if (holds(steps)) return {grad_output * (steps * scale - input) * inverse, A(0)};
    return {grad_output * clamped(steps), -grad_output * scale};
  }
};

// A scale is float32, or float64 for an input of that.
template <typename A>
LLTM_HOST_DEVICE A scale_at(const Parameter& x, int64_t channel) {
  if (sizeof(A) > 4 || !x.data) return parameter_at<A>(x, channel);
  return static_cast<const float*>(x.data)[channel * x.stride];
}

// As in torch, the inverse is that of the scale in the scale's own type, however wide the input's is; and a
// zero point is rounded and clamped.
template <typename A>
LLTM_HOST_DEVICE Quantizer<A> quantizer_of(const Parameter& scale_, const Parameter& zero_point_, A lowest,
                                           A highest, int64_t channel) {
  const A scale = scale_at<A>(scale_, channel);
  const A inverse = sizeof(A) > 4 && scale_.type == ParameterType::kDouble
                        ? A(1) / scale
                        : static_cast<A>(1.0f / static_cast<float>(scale));
  const A zero_point = clamp_to(round_half_to_even(parameter_at<A>(zero_point_, channel)), lowest, highest);
  return {scale, inverse, lowest - zero_point, highest - zero_point};
}
template <typename A>
LLTM_HOST_DEVICE Quantizer<A> quantizer_of(const QuantizationScheme& scheme, int64_t channel) {
  return quantizer_of(scheme.scale, scheme.zero_point, static_cast<A>(scheme.quant_min),
                      static_cast<A>(scheme.quant_max), channel);
}

constexpr int64_t mask_bytes(int64_t n) { return (n + 7) / 8; }

// The CPU's functions have the launchers' arguments but for the stream. In all of them tensors are dense, in
// the same memory order. A mask has one bit an element, in that order from each byte's lowest bit up: 1 where
// the input was within the grid. It may be null.
PartialSums plan_partial_sums(const ChannelLayout& layout);

template <typename T>
void fake_quantize_forward(const T* input, T* output, unsigned char* mask, const ChannelLayout& layout,
                           const QuantizationScheme& scheme);
template <typename T>
void fake_quantize_mask_backward(const T* grad_output, const unsigned char* mask, T* grad_input, int64_t n);
// partial_sums: scratch, as planned; grad_scale and grad_zero_point: one element a channel.
template <typename T>
void fake_quantize_backward(const T* grad_output, const T* input, T* grad_input,
                            ScaleAndZeroPoint<acc_t<T>>* partial_sums, acc_t<T>* grad_scale,
                            acc_t<T>* grad_zero_point, const ChannelLayout& layout, const PartialSums& plan,
                            const QuantizationScheme& scheme, double grad_factor);

#ifdef LLTM_EXT_WITH_CUDA
PartialSums plan_partial_sums_cuda(const ChannelLayout& layout);

template <typename T>
cudaError_t fake_quantize_forward(const T* input, T* output, unsigned char* mask, const ChannelLayout& layout,
                                  const QuantizationScheme& scheme, cudaStream_t stream);
template <typename T>
cudaError_t fake_quantize_mask_backward(const T* grad_output, const unsigned char* mask, T* grad_input,
                                        int64_t n, cudaStream_t stream);
template <typename T>
cudaError_t fake_quantize_backward(const T* grad_output, const T* input, T* grad_input,
                                   ScaleAndZeroPoint<acc_t<T>>* partial_sums, acc_t<T>* grad_scale,
                                   acc_t<T>* grad_zero_point, const ChannelLayout& layout,
                                   const PartialSums& plan, const QuantizationScheme& scheme,
                                   double grad_factor, cudaStream_t stream);
#endif

}  // namespace lltm_ext
