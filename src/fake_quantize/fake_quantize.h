// fake_quantize: the formulas for CPU and GPU, and the launchers' contract. No torch.
//
// A channel's values are scale * {low, ..., high}, where low and high are quant_min and quant_max minus the
// zero point. The zero point shifts the integers but not the values, so
//
//   level = nearbyint(input * (1 / scale)),  output = clamp(level, low, high) * scale.
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

// A scale or zero point: a tensor's elements, one per channel or one for all channels (stride 0), or a number
// if `data` is null.
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

// The backward reduces to [outer, channels, inner] partial sums. The plan depends only on the layout, so
// results are deterministic.
struct ReductionPlan {
  int64_t outer, inner;
  // The part of the layout that a partial sum covers: rows of the outer dimension, elements of the inner one.
  int64_t rows, length;
  // If not 0, a partial sum instead covers the elements whose offsets are equal modulo `period`.
  int64_t period;
};

// Sums of the gradients with respect to a scale and a zero point.
template <typename A>
struct ParameterGradients {
  A scale, zero_point;
  LLTM_HOST_DEVICE void operator+=(ParameterGradients other) {
    scale += other.scale;
    zero_point += other.zero_point;
  }
};

// Converts once per kind of type: with a switch over all types, a kernel that loads several channels would
// get a code path through all of them for each type.
template <typename A>
LLTM_HOST_DEVICE A load_parameter(const Parameter& x, int64_t channel) {
  if (!x.data) return static_cast<A>(x.number);
  const int64_t i = channel * x.stride;
  const bool wide = x.type == ParameterType::kDouble || x.type == ParameterType::kLong;
  if (x.type == ParameterType::kInt || x.type == ParameterType::kLong) {
    return static_cast<A>(wide ? static_cast<const int64_t*>(x.data)[i]
                               : int64_t{static_cast<const int32_t*>(x.data)[i]});
  }
  return static_cast<A>(wide ? static_cast<const double*>(x.data)[i]
                             : double{static_cast<const float*>(x.data)[i]});
}

// NaN becomes `low`, as in torch.
template <typename A>
LLTM_HOST_DEVICE A clamp_to(A x, A low, A high) {
  return std::fmin(std::fmax(x, low), high);
}

// The parameters of one channel, which take 16 bytes in float32.
template <typename A>
struct Quantizer {
  A scale, inverse, low, high;

  // Adding and subtracting 1.5 * 2^23 (2^52 for double) rounds small values to integers, ties to even. Larger
  // values stay out of range, and NaN stays NaN.
  LLTM_HOST_DEVICE A level(A input) const {
    constexpr A kMagic = sizeof(A) == 4 ? A(12582912) : A(6755399441055744);
    return (product(input, inverse) + kMagic) - kMagic;
  }
  LLTM_HOST_DEVICE A clamped(A level) const { return clamp_to(level, low, high); }
  LLTM_HOST_DEVICE bool in_range(A level) const { return level == clamped(level); }
  LLTM_HOST_DEVICE A dequantize(A level) const { return clamped(level) * scale; }

  // From Esser et al., "Learned Step Size Quantization", 2019. As in torch and in Bhalgat et al., "LSQ+",
  // 2020, the zero point moves only clamped values.
  LLTM_HOST_DEVICE ParameterGradients<A> gradients(A grad_output, A input) const {
    const A level = this->level(input);
    if (in_range(level)) return {grad_output * (level * scale - input) * inverse, A(0)};
    return {grad_output * clamped(level), -grad_output * scale};
  }
};

// A scale is float32, or float64 if the input is.
template <typename A>
LLTM_HOST_DEVICE A load_scale(const Parameter& x, int64_t channel) {
  if (sizeof(A) > 4 || !x.data) return load_parameter<A>(x, channel);
  return static_cast<const float*>(x.data)[channel * x.stride];
}

// As in torch, the inverse is computed in the scale's own type, and the zero point is rounded and clamped.
template <typename A>
LLTM_HOST_DEVICE Quantizer<A> make_quantizer(const Parameter& scale_, const Parameter& zero_point_,
                                             A quant_min, A quant_max, int64_t channel) {
  const A scale = load_scale<A>(scale_, channel);
  const A inverse = sizeof(A) > 4 && scale_.type == ParameterType::kDouble
                        ? A(1) / scale
                        : static_cast<A>(1.0f / static_cast<float>(scale));
  const A zero_point =
      clamp_to(round_half_to_even(load_parameter<A>(zero_point_, channel)), quant_min, quant_max);
  return {scale, inverse, quant_min - zero_point, quant_max - zero_point};
}
template <typename A>
LLTM_HOST_DEVICE Quantizer<A> make_quantizer(const QuantizationScheme& scheme, int64_t channel) {
  return make_quantizer(scheme.scale, scheme.zero_point, static_cast<A>(scheme.quant_min),
                        static_cast<A>(scheme.quant_max), channel);
}

// All tensors are dense, in the same memory order. Masks have one bit per element, least significant first: 1
// where the input was in range.

template <typename T>
struct FakeQuantizeForwardArguments {
  const T* input;
  T* output;
  unsigned char* mask;  // may be null
  ChannelLayout layout;
  QuantizationScheme scheme;
};

template <typename T>
struct FakeQuantizeMaskBackwardArguments {
  const T* grad_output;
  const unsigned char* mask;
  T* grad_input;
  int64_t n;
};

template <typename T>
struct FakeQuantizeBackwardArguments {
  const T *grad_output, *input;
  T* grad_input;
  ParameterGradients<acc_t<T>>* partial_sums;  // scratch, [plan.outer, layout.channels, plan.inner]
  acc_t<T>*grad_scale, *grad_zero_point;       // one element per channel
  ChannelLayout layout;
  ReductionPlan plan;
  QuantizationScheme scheme;
  double grad_factor;
};

ReductionPlan plan_reduction(const ChannelLayout& layout);
template <typename T>
void fake_quantize_forward(const FakeQuantizeForwardArguments<T>& args);
template <typename T>
void fake_quantize_mask_backward(const FakeQuantizeMaskBackwardArguments<T>& args);
template <typename T>
void fake_quantize_backward(const FakeQuantizeBackwardArguments<T>& args);

#ifdef LLTM_EXT_WITH_CUDA
ReductionPlan plan_reduction_cuda(const ChannelLayout& layout);
template <typename T>
cudaError_t fake_quantize_forward(const FakeQuantizeForwardArguments<T>& args, cudaStream_t stream);
template <typename T>
cudaError_t fake_quantize_mask_backward(const FakeQuantizeMaskBackwardArguments<T>& args,
                                        cudaStream_t stream);
template <typename T>
cudaError_t fake_quantize_backward(const FakeQuantizeBackwardArguments<T>& args, cudaStream_t stream);
#endif

}  // namespace lltm_ext
