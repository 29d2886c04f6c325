// Parts of a scan as functions of the state before them, h -> a h + b, in double: where |a| > 1, products of
// many a overflow float although h is finite.
#pragma once

#include "scan/doubles.cuh"
#include "scan/scan.h"

namespace lltm_ext {

__device__ __forceinline__ double to_wide(float x) { return x; }
__device__ __forceinline__ double to_wide(double x) { return x; }
template <typename R>
__device__ __forceinline__ Complex<double> to_wide(Complex<R> x) {
  return {x.real, x.imaginary};
}
__device__ __forceinline__ void from_wide(float& to, double x) { to = static_cast<float>(x); }
__device__ __forceinline__ void from_wide(double& to, double x) { to = x; }
template <typename R>
__device__ __forceinline__ void from_wide(Complex<R>& to, Complex<double> x) {
  to = {static_cast<R>(x.real), static_cast<R>(x.imaginary)};
}

template <int kExponent>
__device__ __forceinline__ bool is_below(Complex<double> x) {
  return is_below<kExponent>(x.real) && is_below<kExponent>(x.imaginary);
}

template <typename T>
__device__ __forceinline__ void set_one(T& x) {
  x = narrow<T>(1);
}
template <typename R>
__device__ __forceinline__ void set_one(Complex<R>& x) {
  x = {1, 0};
}

// A reset makes the state b, whatever it was before. Its mark is the factor -0, which no product gives.
__device__ __forceinline__ void mark_reset(double& a) { a = -0.; }
__device__ __forceinline__ void mark_reset(Complex<double>& a) { a = {-0., 0}; }
__device__ __forceinline__ bool is_reset(double a) { return __double2hiint(a) == INT32_MIN && a == 0; }
__device__ __forceinline__ bool is_reset(Complex<double> a) { return is_reset(a.real) && a.imaginary == 0; }

template <typename A>
__device__ __forceinline__ bool is_zero(A x) {
  return x == 0;
}
template <typename R>
__device__ __forceinline__ bool is_zero(Complex<R> x) {
  return x.real == 0 && x.imaginary == 0;
}

// A product of factors of which none is 0 is not 0 either: an infinite state stays infinite. A 0 is +0.
__device__ __forceinline__ double without_underflow(double product, bool any_zero) {
  return product != 0 ? product : any_zero ? 0. : copysign(5e-324, product);
}
__device__ __forceinline__ Complex<double> without_underflow(Complex<double> product, bool any_zero) {
  if (!is_zero(product)) return product;
  return {any_zero ? 0. : 5e-324, 0};
}

__device__ __forceinline__ Complex<double> plain_nan(Complex<double> x) {
  return {plain_nan(x.real), plain_nan(x.imaginary)};
}

template <typename W>
struct Affine {
  using State = W;
  W a, b;

  __device__ __forceinline__ static Affine identity() {
    Affine f = {};
    set_one(f.a);
    return f;
  }
  // The same function; NaNs are the usual ones, so no number of it has all bits set.
  __device__ __forceinline__ Affine with_plain_nans() const { return {plain_nan(a), plain_nan(b)}; }
  // The function that is h, whatever the state before.
  __device__ __forceinline__ static Affine constant(W h) {
    Affine f = {{}, h};
    mark_reset(f.a);
    return f;
  }
};

template <typename W>
__device__ __forceinline__ W apply(const Affine<W>& f, W h) {
  return is_reset(f.a) ? f.b : multiply_add(f.a, h, f.b);
}

// f, then g.
template <typename W>
__device__ __forceinline__ Affine<W> then(const Affine<W>& f, const Affine<W>& g) {
  const bool any_zero = is_zero(f.a) || is_zero(g.a);
  Affine<W> both = {without_underflow(multiply(g.a, f.a), any_zero), apply(g, f.b)};
  if (is_reset(f.a) || is_reset(g.a)) mark_reset(both.a);
  return both;
}

// Whether the function finds the state that the steps find. If a is large, a h and b may cancel or overflow
// although no state on the way is large.
template <typename W>
__device__ __forceinline__ bool is_reliable(const Affine<W>& f) {
  return is_below<32>(f.a) && is_below<1024>(f.b);
}

__device__ __forceinline__ Complex<double> shuffle_up(Complex<double> x, int lanes) {
  return {shuffle_up(x.real, lanes), shuffle_up(x.imaginary, lanes)};
}
template <typename W>
__device__ __forceinline__ Affine<W> shuffle_up(const Affine<W>& f, int lanes) {
  return {shuffle_up(f.a, lanes), shuffle_up(f.b, lanes)};
}

}  // namespace lltm_ext
