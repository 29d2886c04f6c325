// The functions of cells on CUDA, as exact as the type of the activations deserves.
#pragma once

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
  // By the tail 1 - Phi(|x|) = poly(t) e^(-x^2 / 2) / 2, t = 1 / (1 + p |x|): Abramowitz and Stegun, Handbook
  // of Mathematical Functions, 7.1.26.
  __device__ static float gelu(float x) {
    const float size = fminf(fabsf(x), 20.f), t = reciprocal(fmaf(.23164189f, size, 1.f));  // there it is 0
    float poly = fmaf(t, .5307027145f, -.726576013f);
    poly = fmaf(t, poly, .7107068705f);
    poly = fmaf(t, poly, -.142248368f);
    poly = fmaf(t, poly, .127414796f);
    const float tail = poly * t * exp(-.5f * size * size);
    return x > 0.f ? x - size * tail : x * tail;
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
