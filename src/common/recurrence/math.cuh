// The functions of cells on CUDA, as exact as the type of the activations deserves.
#pragma once

#include "common/math.h"
#include "common/types.h"

namespace lltm_ext {

// An absolute error of about 2^-21, and no branch: for float16, which rounds to 2^-11.
struct FastMath {
  __device__ static float exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
  }
  __device__ static float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ static float sigmoid(float x) { return reciprocal(1.f + exp(-x)); }
  __device__ static float tanh(float x) { return 1.f - 2.f * reciprocal(1.f + exp(2.f * x)); }
  __device__ static float elu(float x) { return x > 0.f ? x : exp(x) - 1.f; }
  __device__ static float gelu(float x) {
    const float size = fminf(fabsf(x), 20.f), tail = normal_tail(size, exp(-.5f * size * size));
    return x > 0.f ? x - size * tail : x * tail;
  }
  __device__ static float gelu_derivative(float x) {
    const float size = fabsf(x) > 20.f ? 20.f : fabsf(x);  // and NaN for NaN
    const float e = exp(-.5f * size * size), tail = normal_tail(size, e);
    return (x > 0.f ? 1.f - tail : tail) + copysignf(size, x) * e * 0.39894228f;
  }

 private:
  // 1 - Phi(size), the share of a normal distribution beyond it, = poly(t) e / 2 with e = e^(-size^2 / 2) and
  // t = 1 / (1 + p size): Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26. At 20 it is 0.
  __device__ static float normal_tail(float size, float e) {
    const float t = reciprocal(fmaf(.23164189f, size, 1.f));
    float poly = fmaf(t, .5307027145f, -.726576013f);
    poly = fmaf(t, poly, .7107068705f);
    poly = fmaf(t, poly, -.142248368f);
    poly = fmaf(t, poly, .127414796f);
    return poly * t * e;
  }
};

// 2^-11, by the chip's own tanh: for bfloat16, which rounds to 2^-9.
struct FastestMath : FastMath {
  __device__ static float tanh(float x) {
#if __CUDA_ARCH__ >= 750
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return FastMath::tanh(x);
#endif
  }
  __device__ static float sigmoid(float x) { return fmaf(tanh(.5f * x), .5f, .5f); }
};

template <typename T>
struct MathOf {
  using type = ExactMath;
};
template <>
struct MathOf<__half> {
  using type = FastMath;
};
template <>
struct MathOf<__nv_bfloat16> {
  using type = FastestMath;
};

}  // namespace lltm_ext
