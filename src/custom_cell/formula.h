// The formulas of a cell as instructions that the CPU interprets, one after the other, each for a block of
// units. So a cell that is made of a Python function needs no compiler there.
// lltm_ext/_formula/instructions.py writes the text, and says what is in it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recurrence/cell.h"
#include "recurrence/stepwise/step.h"

namespace lltm_ext {

// The ops of instructions, of values a, b and c. True and false are 1 and 0.
#define LLTM_FORMULA_OPS(OP)                             \
  OP(add, a + b)                                         \
  OP(sub, a - b)                                         \
  OP(mul, a* b)                                          \
  OP(div, a / b)                                         \
  OP(reciprocal, A(1) / a)                               \
  OP(neg, -a)                                            \
  OP(abs, Math::abs(a))                                  \
  OP(maximum, maximum(a, b))                             \
  OP(minimum, minimum(a, b))                             \
  OP(where, a != A(0) ? b : c)                           \
  OP(lt, a < b ? A(1) : A(0))                            \
  OP(le, a <= b ? A(1) : A(0))                           \
  OP(gt, a > b ? A(1) : A(0))                            \
  OP(ge, a >= b ? A(1) : A(0))                           \
  OP(eq, a == b ? A(1) : A(0))                           \
  OP(ne, a != b ? A(1) : A(0))                           \
  OP(and, (a != A(0)) & (b != A(0)) ? A(1) : A(0))       \
  OP(or, (a != A(0)) | (b != A(0)) ? A(1) : A(0))        \
  OP(not, a == A(0) ? A(1) : A(0))                       \
  OP(sigmoid, Math::sigmoid(a))                          \
  OP(tanh, Math::tanh(a))                                \
  OP(relu, relu(a))                                      \
  OP(elu, Math::elu(a))                                  \
  OP(silu, a* Math::sigmoid(a))                          \
  OP(gelu, Math::gelu(a))                                \
  OP(gelu_derivative, Math::gelu_derivative(a))          \
  OP(gelu_tanh, Math::gelu_tanh(a))                      \
  OP(softplus, Math::softplus(a))                        \
  OP(logaddexp, Math::logaddexp(a, b))                   \
  OP(exp, Math::exp(a))                                  \
  OP(expm1, Math::expm1(a))                              \
  OP(log, Math::log(a))                                  \
  OP(log1p, Math::log1p(a))                              \
  OP(sqrt, Math::sqrt(a))                                \
  OP(rsqrt, Math::rsqrt(a))                              \
  OP(pow, Math::pow(a, b))                               \
  OP(sin, Math::sin(a))                                  \
  OP(cos, Math::cos(a))                                  \
  OP(sinh, Math::sinh(a))                                \
  OP(cosh, Math::cosh(a))                                \
  OP(atan, Math::atan(a))                                \
  OP(erf, Math::erf(a))                                  \
  OP(floor, Math::floor(a))                              \
  OP(round, Math::round(a))                              \
  OP(fmod, Math::fmod(a, b))                             \
  OP(bit, A((static_cast<int>(a) >> instruction.b) & 1)) \
  OP(float16, rounded<c10::Half>(a))                     \
  OP(bfloat16, rounded<c10::BFloat16>(a))

// Ops of a value `a` of all n units of a row: f(a, n, to).
#define LLTM_FORMULA_ROW_OPS(OP)  \
  OP(units_sum, set_to_sum)       \
  OP(units_mean, set_to_mean)     \
  OP(units_var, set_to_variance)  \
  OP(units_max, set_to_largest)   \
  OP(units_cumsum, set_to_cumsum) \
  OP(units_cumsum_back, set_to_cumsum_back)

// One list of instructions. Values are in slots, each a block of units.
class Formula {
 public:
  enum class Op : uint8_t {
#define LLTM_FORMULA_OP(name, text) k_##name,
    LLTM_FORMULA_OPS(LLTM_FORMULA_OP) LLTM_FORMULA_ROW_OPS(LLTM_FORMULA_OP)
#undef LLTM_FORMULA_OP
  };
  struct Instruction {
    Op op;
    uint16_t to, a, b, c;  // slots; b of `bit` is the number of the bit
  };
  // A leaf or a result: x[2] is 'x', 2. Of h and the states, and of their gradients, `output` is the number
  // of the step's output that is this value, or -1.
  struct Place {
    char kind;
    uint16_t number, slot;
    int output;
  };

  // Raises a ValueError for a text that is no list of this cell.
  Formula(const std::string& cell, const CellShape& shape, const std::vector<int>& outputs, bool backward,
          std::string_view text);

  std::vector<Place> leaves, results;
  std::vector<std::pair<double, uint16_t>> constants;
  std::vector<Instruction> code;
  int slots = 0;
};

// A cell's formulas for one step, on the CPU: of the stages that end in products (CellShape::products), and
// then of the results.
struct CellFormulas {
  std::vector<Formula> forward, backward;
};

template <typename A>
void run_formula(const Formula& forward, const CellShape& shape, const StepForwardArguments<A>& step);
template <typename A>
void run_formula(const Formula& backward, const CellShape& shape, const StepBackwardArguments<A>& step);

}  // namespace lltm_ext
