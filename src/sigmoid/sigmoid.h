// sigmoid: the forward and backward functors, for CPU and GPU.
#pragma once

#include "common/math.h"
#include "common/types.h"

namespace lltm_ext {

// 1 / (1 + e^-x), or e^x / (1 + e^x) below 0: e^-|x| does not overflow, and small results keep their digits.
template <typename A>
LLTM_HOST_DEVICE A logistic(A x) {
  const A e = std::exp(-std::abs(x));
  return (x < A(0) ? e : A(1)) / (A(1) + e);
}

template <typename A>
LLTM_HOST_DEVICE Complex<A> logistic(Complex<A> x) {
  const A e = std::exp(-std::abs(x.real)), c = std::cos(x.imaginary), s = std::sin(x.imaginary);
  // With w = e^-|re| * (cos, -+sin): 1 / (1 + w), or below 0, with the other sign of im, w / (1 + w).
  const bool below = x.real < A(0);
  const Complex<A> w = {e * c, (below ? e : -e) * s}, sum = {A(1) + w.real, w.imaginary};
  const A size = sum.real * sum.real + sum.imaginary * sum.imaginary;
  if (!below) return {sum.real / size, -sum.imaginary / size};
  return {(w.real * sum.real + w.imaginary * sum.imaginary) / size,
          (w.imaginary * sum.real - w.real * sum.imaginary) / size};
}

#ifdef __CUDACC__
// Within 1.5 units in the last place. CUDA's expf has an error of 1, which doubles if the result is in the
// lower half of a power of two. So e^-|x| is computed here, as 2^n times a polynomial on +-ln(2) / 2 fitted
// for the least relative error. All of it runs on the multiply-add units, except the reciprocal.
__device__ __forceinline__ float exact_logistic(float x) {
  constexpr float kWhole = 12582912.f;  // 1.5 * 2^23: a sum with it has n in its last bits
  const float size = fmaxf(-fabsf(x), -120.f), shifted = fmaf(size, 1.44269504f, kWhole),
              n = shifted - kWhole;
  float f = fmaf(n, -0.69314575f, size);  // ln(2) in two parts; n times the first is exact
  f = fmaf(n, -1.4286068e-6f, f);
  float p = 0.001381449f;
  p = fmaf(p, f, 0.008368736f);
  p = fmaf(p, f, 0.04166839f);
  p = fmaf(p, f, 0.16666521f);
  p = fmaf(p, f, 0.49999994f);
  p = fmaf(p, f, 1.f);
  p = fmaf(p, f, 1.f);
  // Scaled by 2^64 and back, because the result may be subnormal.
  const int scaled = __float_as_int(p) + (__float_as_int(shifted) << 23) + (64 << 23);
  const float e = __int_as_float(scaled) * 5.42101086e-20f;
  // e or 1, divided by 1 + e; `lost` is the rounding error of that sum.
  const float top = x < 0.f ? e : 1.f, sum = 1.f + e, lost = e - (sum - 1.f);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  const float quotient = top * inverse;
  const float y = fmaf(fmaf(-quotient, lost, fmaf(-quotient, sum, top)), inverse, quotient);
  return x == x ? y : x;
}

// For the half types: their rounding error is larger than that of the approximate instructions.
__device__ __forceinline__ float fast_logistic(float x) {
  float e, inverse;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(-fabsf(x) * 1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + e));
  return (x < 0.f ? e : 1.f) * inverse;
}
#endif

template <typename T>
struct Sigmoid {
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> input) const {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(T) == 2) return fast_logistic(input);
    if constexpr (sizeof(T) == 4) return exact_logistic(input);
#endif
    return logistic(input);
  }
};

template <typename A>
LLTM_HOST_DEVICE A logistic_backward(A grad_output, A output) {
  return grad_output * sigmoid_derivative(output);
}
// torch's convention for complex gradients: times the conjugate of the derivative.
template <typename A>
LLTM_HOST_DEVICE Complex<A> logistic_backward(Complex<A> grad_output, Complex<A> y) {
  const Complex<A> d = {y.real - (y.real * y.real - y.imaginary * y.imaginary),
                        y.imaginary - 2 * y.real * y.imaginary};
  return {grad_output.real * d.real + grad_output.imaginary * d.imaginary,
          grad_output.imaginary * d.real - grad_output.real * d.imaginary};
}

template <typename T>
struct SigmoidBackward {
  LLTM_HOST_DEVICE acc_t<T> operator()(acc_t<T> grad_output, acc_t<T> output) const {
    return logistic_backward(grad_output, output);
  }
};

}  // namespace lltm_ext
