// Fast functions of cells and activations on CUDA, as accurate as the dtype of the results needs.
#pragma once

#include "common/math.h"
#include "common/types.h"

namespace lltm_ext {

// The functions for float16, which rounds to 2^-11. They have no branches. Absolute errors are about 2^-21;
// gelu, gelu_tanh and silu err by at most 2^-14 of the result, or 2^-24 where it is below 2^-10.
struct FastMath : FoldedTanh {
  __device__ static float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ static float sigmoid(float x) { return reciprocal(1.f + approximate_exp(-x)); }
  __device__ static float tanh(float x) { return 1.f - 2.f * reciprocal(1.f + approximate_exp(2.f * x)); }
  __device__ static float elu(float x) { return x > 0.f ? x : approximate_exp(x) - 1.f; }
  __device__ static float gelu(float x) {
    const float size = size_of(x);
    return share(x, size, normal_tail(size));
  }
  __device__ static float gelu_tanh(float x) {
    const float size = size_of(x), slope = -2.f * 0.79788456f * kLog2E;
    return share(x, size, logistic_tail(size * fmaf(size * size, slope * .044715f, slope)));
  }
  __device__ static float silu(float x) {
    const float size = size_of(x);
    return share(x, size, logistic_tail(-kLog2E * size));
  }
  // The absolute error is below 2^-15.
  __device__ static float gelu_derivative(float x) {
    const float size = fabsf(x) > kTailEnd ? kTailEnd : fabsf(x);  // NaN for NaN
    const float e = approximate_exp(-.5f * size * size), tail = normal_tail(size);
    return (x > 0.f ? 1.f - tail : tail) + copysignf(size, x) * e * 0.39894228f;
  }

  // The functions below are for users' cells, whose values can be far from [-1, 1]. Their errors are
  // relative, and at most 2^-21 of the result unless stated.

  // It is not approximate_exp, because errors of an exponential multiply from step to step.
  __device__ static float exp(float x) { return expf(x); }
  __device__ static float expm1(float x) { return expm1f(x); }
  // The absolute error is 2^-22 between 1/2 and 2.
  __device__ static float log(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return 0.69314718f * y;
  }
  __device__ static float log1p(float x) { return log1pf(x); }
  // The relative error is about 2^-21 + 2^-24 |x| where the result is below 1.
  __device__ static float softplus(float x) { return relu(x) + log1p_exp(-fabsf(x)); }
  __device__ static float logaddexp(float a, float b) {
    return maximum(a, b) + log1p_exp(a == b ? 0.f : -fabsf(a - b));
  }
  __device__ static float sqrt(float x) {
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ static float rsqrt(float x) {
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  // The absolute errors of sin and cos are about 2^-20 for |x| < 2^22.
  __device__ static float sin(float x) {
    float y;
    asm("sin.approx.f32 %0, %1;" : "=f"(y) : "f"(reduced(x)));
    return y;
  }
  __device__ static float cos(float x) {
    float y;
    asm("cos.approx.f32 %0, %1;" : "=f"(y) : "f"(reduced(x)));
    return y;
  }
  __device__ static float sinh(float x) { return sinhf(x); }
  __device__ static float cosh(float x) { return coshf(x); }
  __device__ static float atan(float x) { return atanf(x); }
  __device__ static float erf(float x) { return erff(x); }
  __device__ static float floor(float x) { return floorf(x); }
  __device__ static float round(float x) { return rintf(x); }
  __device__ static float fmod(float a, float b) { return fmodf(a, b); }
  __device__ static float abs(float x) { return fabsf(x); }
  __device__ static float pow(float a, float b) { return powf(a, b); }
  __device__ static float divide(float a, float b) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }

  // y as two values of float16 with 22 bits of its mantissa, for sizes from 1e-9 to 4e6. They are divided by
  // 2^6, and the second is multiplied by 2^11.
  __device__ static float high_part(float y) { return y * 0x1p-6f; }
  __device__ static float low_part(float y) {
    const float high = high_part(y);
    return (high - rounded_to_float16(high)) * 0x1p11f;
  }
  __device__ static float of_parts(float high, float low) { return fmaf(low, 0x1p-5f, high * 0x1p6f); }

  // c[0] + c[1] x + ...
  template <int N>
  __device__ static float polynomial(float x, const float (&c)[N]) {
    float y = c[N - 1];
#pragma unroll
    for (int i = N - 2; i >= 0; --i) y = fmaf(y, x, c[i]);
    return y;
  }

 protected:
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kTailEnd = 128.f;  // where the tails are 0

  __device__ static float rounded_to_float16(float x) {
    float y;
    asm("{\n"
        " .reg .b16 half;\n"
        " cvt.rn.f16.f32 half, %1;\n"
        " cvt.f32.f16 %0, half;\n"
        "}"
        : "=f"(y)
        : "f"(x));
    return y;
  }

  __device__ static float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  // The relative error is about 2^-23 + 2^-24 |x|.
  __device__ static float approximate_exp(float x) { return exp2(x * kLog2E); }

  // log(1 + e^x) for x <= 0. The polynomial of degree 7 approximates log(1 + e) / e with the least maximum
  // relative error, 2^-22, on 0 to 1.
  __device__ static float log1p_exp(float x) {
    const float e = approximate_exp(x);
    return e * polynomial(e, {.999999821f, -.499974042f, .332754791f, -.244954646f, .17745243f, -.107681729f,
                              .0440896377f, -.00853920914f});
  }

  // x minus the nearest multiple of 2 pi, which is subtracted in two parts. The first difference is exact.
  __device__ static float reduced(float x) {
    const float turns = rintf(x * .159154943f);
    return fmaf(-turns, -1.74845553e-7f, fmaf(-turns, 6.28318548f, x));
  }

  __device__ static float size_of(float x) { return fminf(fabsf(x), kTailEnd); }

  // x * share(x), where share(-x) = 1 - share(x), from tail = share(-size). Small results have the relative
  // accuracy of the tail, infinities give infinity and 0, and relu passes NaN on.
  __device__ static float share(float x, float size, float tail) { return fmaf(-size, tail, relu(x)); }

  // 1 - Phi(size), the tail of the normal distribution. Its logarithm is nearly a parabola. The polynomial of
  // degree 5 minimises gelu's maximum error, relative where gelu is above 2^-11; found by linear programming
  // on 0 to 14. Beyond, it decreases for all sizes.
  __device__ static float normal_tail(float size) {
    return exp2(polynomial(
        size, {-1.00007296f, -1.14988256f, -.462532103f, -.0494583622f, .00620386517f, -3.60622245e-4f}));
  }

  // 1 / (1 + e^v) = e^-v / (1 + e^-v), from exponent = -v log2(e) <= 0. The polynomial of degree 5
  // approximates 1 / (1 + e) with the least maximum error, 2^-14.2; found by linear programming on 0 to 1.
  __device__ static float logistic_tail(float exponent) {
    const float e = exp2(exponent);
    return e *
           polynomial(e, {.999948978f, -.996275842f, .953421414f, -.770573556f, .417937666f, -.104484148f});
  }
};

// The functions for bfloat16, which rounds to 2^-8: the hardware's tanh errs by 2^-11. Near 1 it is more
// exact: up to x = 6 its distance from 1 has a relative error of 0.014 at most.
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
  // The parts are bits: those of bfloat16 are the upper half of a float's. The last two bits are lost.
  __device__ static float high_part(float y) { return __uint_as_float(__float_as_uint(y) & 0xffff0000); }
  __device__ static float low_part(float y) {
    return __uint_as_float((__float_as_uint(y) >> 2 & 0x3fff) << 16);
  }
  __device__ static float of_parts(float high, float low) {
    return __uint_as_float(__float_as_uint(high) | __float_as_uint(low) >> 14);
  }
  // The error is at most 2^-11 of the result, or 2^-21 where that is below 2^-10. The polynomial is the
  // tail's logarithm, as in normal_tail.
  __device__ static float gelu_tanh(float x) {
    const float size = size_of(x);
    return share(x, size,
                 exp2(polynomial(size, {-1.00062847f, -1.14042771f, -.488501549f, -.0248675179f,
                                        -1.13296608e-6f, -8.15765059e-4f})));
  }
};

// The functions for cells in float32, whose step waits for them: those of ExactMath, but these have no
// branches and no IEEE division. Their errors are at most three units in the last place, softplus's four.
struct BranchlessMath : ExactMath {
  __device__ static float divide(float a, float b) { return FastMath::divide(a, b); }
  __device__ static float sqrt(float x) { return FastMath::sqrt(x); }
  __device__ static float sigmoid(float x) { return FastMath::reciprocal(1.f + expf(-x)); }
  // Below 0.6 it is the polynomial, which has the least maximum relative error there, 2^-28 before rounding.
  __device__ static float tanh(float x) {
    const float square = x * x, size = fabsf(x);
    const float near = fmaf(x * square,
                            FastMath::polynomial(square, {-.333332986f, .133319244f, -.0537838303f,
                                                          .0207959693f, -.00589515518f}),
                            x);
    const float far = fmaf(-2.f, FastMath::reciprocal(1.f + expf(2.f * size)), 1.f);
    return size < .6f ? near : copysignf(far, x);
  }
  // The polynomial approximates log(1 + e) / e on 0 to 1 with the least maximum relative error, 2^-27.6
  // before rounding.
  __device__ static float softplus(float x) {
    const float e = expf(-fabsf(x));
    const float ratio =
        FastMath::polynomial(e, {1.f, -.499999017f, .333299637f, -.249541342f, .196759388f, -.153055921f,
                                 .106036551f, -.0569595359f, .0198514629f, -.00324402517f});
    return fmaf(e, ratio, relu(x));
  }
};

// The functions for cells in float32 whose products are rounded to TF32, which errs more than those for
// float16. They save what the other functions for float32 do: another kernel may run the backward.
struct Tf32Math : FastMath, PlainTanh {
  using PlainTanh::folded_tanh, PlainTanh::unfolded_tanh;
};

// The same for large layers, whose values may be small: near 0 the errors of tanh and elu are relative, too,
// 2^-18 at most. The polynomials are Taylor's.
struct LargeTf32Math : Tf32Math {
  __device__ static float tanh(float x) {
    const float square = x * x;
    const float near = fmaf(x * square, fmaf(square, 2.f / 15, -1.f / 3), x);
    return fabsf(x) < kNear ? near : FastMath::tanh(x);
  }
  __device__ static float elu(float x) {
    const float near = fmaf(x * x, fmaf(x, fmaf(x, 1.f / 24, 1.f / 6), .5f), x);
    return fabsf(x) < kNear && x < 0.f ? near : FastMath::elu(x);
  }

 private:
  static constexpr float kNear = .125f;
};

template <typename T>
struct MathOf {
  using type = ExactMath;
};
template <>
struct MathOf<float> {
  using type = BranchlessMath;
};
template <>
struct MathOf<__half> {
  using type = FastMath;
};
template <>
struct MathOf<__nv_bfloat16> {
  using type = FastestMath;
};

// The functions for half-type results that are not a cell's gates: those of MathOf, but sigmoid's error is
// relative (2^-14), because the result can be far below 1.
template <typename T>
struct ActivationMath : MathOf<T>::type {
  __device__ static float sigmoid(float x) {
    const float tail = FastMath::logistic_tail(-FastMath::kLog2E * fabsf(x));
    return x > 0.f ? 1.f - tail : tail;
  }
};

}  // namespace lltm_ext
