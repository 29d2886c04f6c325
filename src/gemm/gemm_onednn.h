// Half types on the CPU by oneDNN, where it has instructions for them: several times the rate of
// gemm_cpu.cpp, which computes in float32. A bias and an activation are fused for weights stored as [N, K]
// only: for others oneDNN takes a reference implementation in float16, 1,000 times as slow on CPUs with AMX.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sum.h>

#include <cmath>
#include <limits>

#include "common/onednn.h"
#include "gemm/gemm_checks.h"

namespace lltm_ext {
namespace {

constexpr int64_t kLeastProducts = 1 << 20;  // multiply-adds; below, a call of torch takes longer

struct OneDnnActivation {
  Activation activation;
  const char *name, *algorithm;
};
constexpr OneDnnActivation kOneDnnActivations[] = {
    {Activation::kNone, "none", ""},         {Activation::kRelu, "none", ""},  // its relu makes 0 of NaN
    {Activation::kTanh, "tanh", ""},         {Activation::kSigmoid, "sigmoid", ""},
    {Activation::kSilu, "swish", ""},        {Activation::kGelu, "gelu", "none"},
    {Activation::kGeluTanh, "gelu", "tanh"},
};

bool is_finite(const at::Tensor& x) { return std::isfinite(x.sum(at::kFloat).item<float>()); }

// oneDNN's sigmoid in float16 makes a number of NaN on CPUs with AMX.
bool onednn_may_lose_nan(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                         Activation activation) {
  return activation == Activation::kSigmoid && a.scalar_type() == at::kHalf &&
         !(is_finite(a) && is_finite(b) && (!bias || is_finite(*bias)));
}

// Whether some value is NaN, or some are infinities of both signs. One pass.
bool may_have_nan(const at::Tensor& x) { return std::isnan(x.sum().item<double>()); }

// Of a @ b + bias, rounded. torch's gelu makes NaN of infinity, as oneDNN's does.
at::Tensor gelu_of(const at::Tensor& x) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor y = at::gelu(x, "none");
  return may_have_nan(y) ? y.masked_fill(x == kInfinity, kInfinity) : y;
}

// activation(a @ b + bias) if oneDNN takes it, else undefined.
at::Tensor onednn_gemm(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias,
                       Activation activation) {
  if (!a.is_cpu() || b.dim() != 2 || !onednn_multiplies(a.scalar_type())) return {};
  if (!at::globalContext().userEnabledMkldnn() || a.numel() * b.size(1) < kLeastProducts) return {};
  if (onednn_may_lose_nan(a, b, bias, activation)) return {};
  if (!bias && activation == Activation::kNone) return at::matmul(a, b);
  if (!bias && activation == Activation::kRelu) return at::matmul(a, b).relu_();
  const at::Tensor stored_along_k = b.t().contiguous().t();
  for (const OneDnnActivation& known : kOneDnnActivations) {
    if (activation != known.activation) continue;
    const at::Tensor c = onednn_linear(a, stored_along_k, bias, known.name, known.algorithm);
    if (activation == Activation::kRelu) return c.relu_();
    return activation == Activation::kGelu && may_have_nan(c)
               ? gelu_of(onednn_linear(a, stored_along_k, bias))
               : c;
  }
  return {};
}

// In torch's ops, of the rounded a @ b + bias. Undefined for the activations whose backward reads the output.
at::Tensor apply(Activation activation, const at::Tensor& pre_activation) {
  if (activation == Activation::kGelu) return gelu_of(pre_activation);
  if (activation == Activation::kGeluTanh) return at::gelu(pre_activation, "tanh");
  return activation == Activation::kSilu ? at::silu(pre_activation) : at::Tensor();
}

}  // namespace
}  // namespace lltm_ext
