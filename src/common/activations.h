// The activations that kernels fuse, declared once: the enum, the names, the dispatch and the derivatives
// follow from this list. A new one is a line here, its formulas in math.h and fast_math.cuh, and a line in
// lltm_ext/_activations.py.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/math.h"

namespace lltm_ext {

// X(identifier, name, whether backward needs only the output, formula of x, derivative from `saved`: the
// output if backward needs only that, else the input). Math is ExactMath or one of fast_math.cuh. relu stays
// first: the Hopper epilogue has a short path for `none` and relu.
#define LLTM_ACTIVATIONS(X)                                                              \
  X(Relu, "relu", true, relu(x), relu_backward(A(1), saved))                             \
  X(Sigmoid, "sigmoid", true, Math::sigmoid(x), sigmoid_derivative(saved))               \
  X(Tanh, "tanh", true, Math::tanh(x), tanh_derivative(saved))                           \
  X(Elu, "elu", true, Math::elu(x), elu_derivative(saved))                               \
  X(Gelu, "gelu", false, Math::gelu(x), Math::gelu_derivative(saved))                    \
  X(GeluTanh, "gelu_tanh", false, Math::gelu_tanh(x), gelu_tanh_derivative<Math>(saved)) \
  X(Silu, "silu", false, Math::silu(x), silu_derivative<Math>(saved))

enum class Activation : int32_t {
  kNone,
#define LLTM_ENUMERATOR(ID, ...) k##ID,
  LLTM_ACTIVATIONS(LLTM_ENUMERATOR)
#undef LLTM_ENUMERATOR
};

struct NamedActivation {
  std::string_view name;
  Activation activation;
};
inline constexpr NamedActivation kActivations[] = {
#define LLTM_NAMED(ID, NAME, ...) {NAME, Activation::k##ID},
    LLTM_ACTIVATIONS(LLTM_NAMED)
#undef LLTM_NAMED
};
// "'relu', 'sigmoid', ..., "
#define LLTM_QUOTED(ID, NAME, ...) "'" NAME "', "
inline constexpr char kActivationNames[] = LLTM_ACTIVATIONS(LLTM_QUOTED);
#undef LLTM_QUOTED

// Whether backward needs only the output. Otherwise it needs the input.
constexpr bool saves_output(Activation activation) {
  switch (activation) {
#define LLTM_CASE(ID, NAME, SAVES_OUTPUT, ...) \
  case Activation::k##ID:                      \
    return SAVES_OUTPUT;
    LLTM_ACTIVATIONS(LLTM_CASE)
#undef LLTM_CASE
    case Activation::kNone:
      break;
  }
  return true;
}

// Applies the activation to each value, with one branch for all N. The loop has an index because nvcc does
// not fully unroll a range-for, and would put the values in local memory.
template <class Math = ExactMath, int N, typename A>
LLTM_HOST_DEVICE void activate(Activation activation, A (&values)[N]) {
  switch (activation) {
    case Activation::kNone:
      return;
#define LLTM_CASE(ID, NAME, SAVES_OUTPUT, FORMULA, DERIVATIVE) \
  case Activation::k##ID:                                      \
    for (int i = 0; i < N; ++i) {                              \
      const A x = values[i];                                   \
      values[i] = FORMULA;                                     \
    }                                                          \
    return;
      LLTM_ACTIVATIONS(LLTM_CASE)
#undef LLTM_CASE
  }
}

template <class Math, typename A>
LLTM_HOST_DEVICE A activation_derivative(Activation activation, A saved) {
  switch (activation) {
    case Activation::kNone:
      break;
#define LLTM_CASE(ID, NAME, SAVES_OUTPUT, FORMULA, DERIVATIVE) \
  case Activation::k##ID:                                      \
    return DERIVATIVE;
      LLTM_ACTIVATIONS(LLTM_CASE)
#undef LLTM_CASE
  }
  return A(1);
}

}  // namespace lltm_ext
