// Interprets the formulas of a cell for a step on the CPU (formula.h). Each instruction is a loop over a
// block of units, which the compiler vectorises; blocks are distributed over threads. A block has some units
// of all rows or, if a cell reads values over all units of its row, these.
//
// No code here looks at floating-point exceptions or errno, so selections need no branch. Copies and zeros of
// a row are loops: calls of memmove and memset would take longer for so few bytes.
#pragma GCC optimize("no-trapping-math", "no-math-errno", "no-tree-loop-distribute-patterns")

#include "custom_cell/formula.h"
#include "recurrence/stepwise/units_cpu.h"

namespace lltm_ext {
namespace {

using step_cpu::kBlock;

// The functions that the cells of recurrent networks use most, without calls; the others are those of std.
struct FloatMath : ExactMath {
  static float sigmoid(float x) { return step_cpu::VectorMath::sigmoid(x); }
  static float tanh(float x) { return step_cpu::VectorMath::tanh(x); }
  static float elu(float x) { return step_cpu::VectorMath::elu(x); }

  static float exp(float x) {
    using step_cpu::VectorMath;
    const float limited = VectorMath::at_most(100.f, VectorMath::at_least(-110.f, x));
    const VectorMath::Exp e = VectorMath::exp(limited);
    // 2^n in two factors, because n is out of the range of an exponent where e^x is infinite or subnormal.
    const int32_t n = static_cast<int32_t>(e.n - 0x4B400000u), half = n >> 1;
    const float first = step_cpu::float_of(static_cast<uint32_t>(half + 127) << 23),
                second = step_cpu::float_of(static_cast<uint32_t>(n - half + 127) << 23);
    return VectorMath::nan_of(x, (1.f + e.rest) * first * second);
  }

  // log(x) = e * ln(2) + log(1 + f), with 1 + f from sqrt(1/2) to sqrt(2).
  static float log(float x) {
    const bool subnormal = x < 0x1p-126f;
    const float scaled = subnormal ? x * 0x1p23f : x;
    const uint32_t bits = step_cpu::bits_of(scaled), above = (bits - 0x3F3504F3u) & 0xFF800000u;
    const float e = static_cast<float>(static_cast<int32_t>(above) >> 23) - (subnormal ? 23.f : 0.f);
    const float f = step_cpu::float_of(bits - above) - 1.f;
    // (log(1 + f) - f + f^2 / 2) / f^3, fitted for a relative error of the logarithm of 1e-9.
    float p = 0.0679729185f;
    p = p * f - 0.117089676f;
    p = p * f + 0.118826285f;
    p = p * f - 0.123991072f;
    p = p * f + 0.142194267f;
    p = p * f - 0.16668402f;
    p = p * f + 0.200021452f;
    p = p * f - 0.250000015f;
    p = p * f + 0.33333312f;
    const float low = p * f * f * f - 0.5f * f * f + e * -2.12194440e-4f;  // e * ln(2) in two parts
    const float y = e * 0.693359375f + (f + low);
    const float special = x == 0.f ? -infinity<float>() : x > 0.f ? x : nan<float>();  // x: infinite
    return x > 0.f && x < infinity<float>() ? y : special;
  }

  // log(u) of the rounded u = 1 + x, corrected by what the rounding lost.
  static float log1p(float x) {
    const float u = 1.f + x, y = log(u) - ((u - 1.f) - x) / u;
    return u > 0.f && u < infinity<float>() ? y : log(u);
  }
  static float softplus(float x) { return relu(x) + log1p(exp(-std::fabs(x))); }
  static float logaddexp(float a, float b) {
    const float size = a == b ? 0.f : std::fabs(a - b);
    return maximum(a, b) + log1p(exp(-size));
  }
};

template <typename T, typename A>
A rounded(A value) {
  T narrow;
  step_cpu::save(static_cast<float>(value), narrow);
  return static_cast<A>(step_cpu::load(narrow));
}

template <typename A>
A sum_of(const A* x, int n) {
  constexpr int kLanes = 16;
  A parts[kLanes] = {}, sum = 0;
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) parts[k] += x[i + k];
  }
  for (; i < n; ++i) parts[0] += x[i];
  for (const A part : parts) sum += part;
  return sum;
}
template <typename A>
void fill(A value, int n, A* to) {
  for (int i = 0; i < n; ++i) to[i] = value;
}
template <typename A>
void set_to_sum(const A* x, int n, A* to) {
  fill(sum_of(x, n), n, to);
}
template <typename A>
void set_to_mean(const A* x, int n, A* to) {
  fill(sum_of(x, n) / static_cast<A>(n), n, to);
}
template <typename A>
void set_to_variance(const A* x, int n, A* to) {
  const A mean = sum_of(x, n) / static_cast<A>(n);
  for (int i = 0; i < n; ++i) to[i] = (x[i] - mean) * (x[i] - mean);
  set_to_mean(to, n, to);
}
template <typename A>
void set_to_largest(const A* x, int n, A* to) {
  A largest = x[0];
  for (int i = 1; i < n; ++i) largest = maximum(largest, x[i]);
  fill(largest, n, to);
}
template <typename A>
void set_to_cumsum(const A* x, int n, A* to) {
  A sum = 0;
  for (int i = 0; i < n; ++i) to[i] = sum += x[i];
}
template <typename A>
void set_to_cumsum_back(const A* x, int n, A* to) {
  A sum = 0;
  for (int i = n - 1; i >= 0; --i) to[i] = sum += x[i];
}

template <typename A>
using MathOf = std::conditional_t<std::is_same_v<A, float>, FloatMath, ExactMath>;

// The memory of a thread for the slots of a formula, each of `width` units, with the numbers in theirs.
// Formulas are never freed.
template <typename A>
class Workspace {
 public:
  A* of(const Formula& formula, int64_t width) {
    if (&formula != formula_ || width != width_) {
      memory_.resize(std::max<size_t>(memory_.size(), formula.slots * width));
      for (const auto& [value, slot] : formula.constants) {
        std::fill_n(memory_.data() + slot * width, width, static_cast<A>(value));
      }
      formula_ = &formula, width_ = width;
    }
    return memory_.data();
  }

 private:
  const Formula* formula_ = nullptr;
  int64_t width_ = 0;
  std::vector<A> memory_;
};

// The instructions of a formula, on values in slots of `width` units.
template <typename A>
struct Instructions {
  const Formula& formula;
  A* memory;
  int64_t width;

  A* slot(int i) const { return memory + i * width; }

  void operator()(int64_t, int64_t, int n) const {
    using Math = MathOf<A>;
    using Op = Formula::Op;
    for (const Formula::Instruction& instruction : formula.code) {
      A* const to = slot(instruction.to);
      const A *const from_a = slot(instruction.a), *const from_b = slot(instruction.b),
                     *const from_c = slot(instruction.c);
      switch (instruction.op) {
#define LLTM_FORMULA_CASE(name, value)                                      \
  case Op::k_##name:                                                        \
    LLTM_STEP_INDEPENDENT                                                   \
    for (int i = 0; i < n; ++i) {                                           \
      [[maybe_unused]] const A a = from_a[i], b = from_b[i], c = from_c[i]; \
      to[i] = value;                                                        \
    }                                                                       \
    break;
        LLTM_FORMULA_OPS(LLTM_FORMULA_CASE)
#undef LLTM_FORMULA_CASE
#define LLTM_FORMULA_CASE(name, f) \
  case Op::k_##name:               \
    f(from_a, n, to);              \
    break;
        LLTM_FORMULA_ROW_OPS(LLTM_FORMULA_CASE)
#undef LLTM_FORMULA_CASE
      }
    }
  }
};

// The values of n units from unit `first` of all B * H on.
template <typename A>
class Block {
 public:
  Block(const Instructions<A>& instructions, int64_t hidden, int64_t first, int n)
      : instructions_(instructions), hidden_(hidden), first_(first), n_(n) {}

  A* slot(int i) const { return instructions_.slot(i); }

  // Calls f(i, row, unit, n) for the parts of the block that are of one row: n units from place i of the
  // block.
  template <typename F>
  void per_row(F&& f) const {
    int64_t row = first_ / hidden_, unit = first_ % hidden_;
    for (int i = 0; i < n_; ++row, unit = 0) {
      const int n = static_cast<int>(std::min<int64_t>(n_ - i, hidden_ - unit));
      f(i, row, unit, n);
      i += n;
    }
  }

  // Compiled once, not inlined into each way to load and to store: it is most of their code.
  void compute() const {
    static const auto units = step_cpu::run_units_of_this_cpu<Instructions<A>>();
    units(instructions_, n_, 0, n_, n_);
  }

 private:
  const Instructions<A> instructions_;
  const int64_t hidden_;
  const int64_t first_;
  const int n_;
};

template <typename A>
void copy(const A* from, int n, A* to) {
  for (int i = 0; i < n; ++i) to[i] = from[i];
}
template <typename A>
void fill_zeros(int n, A* to) {
  for (int i = 0; i < n; ++i) to[i] = 0;
}
template <typename A>
void add_to(const A* from, int n, A* to) {
  LLTM_STEP_INDEPENDENT
  for (int i = 0; i < n; ++i) to[i] += from[i];
}
// The values scaled by what a row keeps at its reset.
template <typename A>
void copy_masked(A mask, const A* from, int n, A* to) {
  if (mask == A(1)) return copy(from, n, to);
  for (int i = 0; i < n; ++i) to[i] = scale_by_mask(mask, from[i]);
}

// The values after a reset that takes a share of the initial ones.
template <typename A>
void copy_reset(A share, const A* from, const A* initial, int n, A* to) {
  if (share == A(0)) return copy(from, n, to);
  for (int i = 0; i < n; ++i) to[i] = reset_to(share, from[i], initial[i]);
}

// Loads the leaves, except those that `other` sets. Those of a row are next to each other in memory, which is
// read in its order.
template <typename A, class Step, typename F>
void load_leaves(const Formula& formula, const CellShape& shape, const Step& s, const Block<A>& block,
                 F&& other) {
  block.per_row([&](int i, int64_t row, int64_t unit, int n) {
    for (const Formula::Place& leaf : formula.leaves) {
      A* const to = block.slot(leaf.slot) + i;
      if (leaf.kind == 'p') {
        copy(s.parameters + leaf.number * s.hidden + unit, n, to);
      } else if (leaf.kind == 'u') {
        copy(s.step_inputs + (row * shape.step_inputs + leaf.number) * s.hidden + unit, n, to);
      } else {
        other(leaf, row, unit, n, to);
      }
    }
  });
}

template <typename A>
void run_block(const Formula& formula, const CellShape& shape, const StepForwardArguments<A>& s,
               const Block<A>& block) {
  const int64_t plane = s.hidden;
  load_leaves(
      formula, shape, s, block, [&](const Formula::Place& leaf, int64_t row, int64_t unit, int n, A* to) {
        const int k = leaf.number;
        const A mask = shape.resets_to_initial ? A(1) : s.resets.mask(row);
        const A* const product = s.product ? s.product + (row * shape.gates + k) * plane + unit : nullptr;
        switch (leaf.kind) {
          case 'x':
            copy(&s.gates.at(row, k, unit), n, to);
            if (!product || shape.separate) return;
            if (mask == A(1)) return add_to(product, n, to);
            for (int i = 0; i < n; ++i) to[i] += scale_by_mask(mask, product[i]);
            return;
          case 'r':
            return product ? copy_masked(mask, product, n, to) : fill_zeros(n, to);
          case 's':
            return copy_masked(mask, s.old_states + k * s.state_stride + row * plane + unit, n, to);
          case 'q':
            return copy(s.products + (row * shape.products + k) * plane + unit, n, to);
          default:
            return copy_masked(mask, s.old_h + row * plane + unit, n, to);
        }
      });
  block.compute();
  block.per_row([&](int i, int64_t row, int64_t unit, int n) {
    const int64_t at = row * plane + unit;
    const bool goes_on = shape.resets_to_initial && row < s.next_batch;
    const A share = goes_on ? s.resets.share(row) : A(0);  // of the initial values in what the step hands on
    for (const Formula::Place& result : formula.results) {
      const A* const from = block.slot(result.slot) + i;
      const int k = result.number;
      const auto write_output = [&] {
        if (result.output < 0 || !s.output_apart) return;
        copy(from, n, s.output_apart + (row * shape.outputs + result.output) * plane + unit);
      };
      if (result.kind == 'h') {
        write_output();
        copy_reset(share, from, s.h0 + at, n, s.h + at);
        if (s.output) copy(shape.recurrent ? s.h + at : from, n, s.output + at);
      } else if (result.kind == 's') {
        const int64_t place = k * s.state_stride + at;
        write_output();
        copy_reset(share, from, s.states0 + place, n, s.new_states + place);
      } else if (result.kind == 'f') {
        copy(from, n, s.fed + (row * shape.fed + k) * plane + unit);
      } else if (k < shape.saved_in_gates()) {
        if (s.saved.data) copy(from, n, &s.saved.at(row, k, unit));
      } else if (s.extra) {
        copy(from, n, s.extra + (row * shape.extra() + k - shape.saved_in_gates()) * plane + unit);
      }
    }
  });
}

// The h that a step of a cell without a product started from.
template <typename A>
void copy_previous_h(const CellShape& shape, const StepBackwardArguments<A>& s, int64_t row, int64_t unit,
                     int n, A* to) {
  const int64_t at = row * s.hidden + unit;
  const A share = s.resets.share(row);
  if (row < s.old_rows) {
    copy(s.old_h + at, n, to);
  } else if (s.h0) {
    copy(s.h0 + at, n, to);
  } else {
    fill_zeros(n, to);
  }
  if (share == A(0)) return;
  for (int i = 0; i < n; ++i) {
    to[i] = reset_to(share, to[i], shape.resets_to_initial ? s.h0[at + i] : A(0));
  }
}

template <typename A>
void run_block(const Formula& formula, const CellShape& shape, const StepBackwardArguments<A>& s,
               const Block<A>& block) {
  const int64_t plane = s.hidden;
  const auto add = [](const auto& gradient, int64_t row, int64_t unit, int n, A* to, int64_t offset = 0) {
    if (!gradient.data) return;
    const A* const from = gradient.data + row * gradient.row + unit * gradient.unit + offset;
    if (gradient.unit == 1) return add_to(from, n, to);
    for (int i = 0; i < n; ++i) to[i] += from[i * gradient.unit];
  };
  load_leaves(
      formula, shape, s, block, [&](const Formula::Place& leaf, int64_t row, int64_t unit, int n, A* to) {
        const int k = leaf.number;
        const int64_t at = row * plane + unit;
        switch (leaf.kind) {
          case 'x':
            return copy(&s.gates.at(row, k, unit), n, to);
          case 'h':
            return copy_previous_h(shape, s, row, unit, n, to);
          case 'q':
            return copy(s.products + (row * shape.products + k) * plane + unit, n, to);
          case 'v':
            return copy(k < shape.saved_in_gates()
                            ? &s.saved.at(row, k, unit)
                            : s.extra + (row * shape.extra() + k - shape.saved_in_gates()) * plane + unit,
                        n, to);
          case 'g':
            s.grad_h ? copy(s.grad_h + at, n, to) : fill_zeros(n, to);
            if (s.grad_own_h) add_to(s.grad_own_h + at, n, to);
            break;
          default:  // of a state
            fill_zeros(n, to);
            add(s.grad_new_states, row, unit, n, to, k * s.state_stride);
        }
        if (leaf.output >= 0) add(s.grad_output, row, leaf.output * plane + unit, n, to);
      });
  block.compute();
  block.per_row([&](int i, int64_t row, int64_t unit, int n) {
    const A share = s.resets.share(row);
    const auto reset = [&](const A* from, int number, A* to) {  // 0 is h, and states follow
      A* const initial = s.grad_initial + number * s.state_stride + row * plane + unit;
      for (int i = 0; i < n && shape.resets_to_initial && share != A(0); ++i) {
        initial[i] += scale_by_mask(share, from[i]);
      }
      copy_masked(mask_of(share), from, n, to + row * plane + unit);
    };
    for (const Formula::Place& result : formula.results) {
      const A* const from = block.slot(result.slot) + i;
      const int k = result.number;
      const auto sum = [&](int number) {
        A* const sums = s.grad_sums + (row * shape.sums() + number) * plane + unit;
        if (s.grad_sums) add_to(from, n, sums);
      };
      switch (result.kind) {
        case 'x':
          sum(k);
          copy(from, n, &(shape.separate ? s.grad_projections : s.grad_gates).at(row, k, unit));
          break;
        case 'r':
          copy(from, n, &s.grad_gates.at(row, k, unit));
          break;
        case 'p':
          sum(shape.gates + k);
          break;
        case 'f':
          copy(from, n, s.grad_products + (row * shape.products + k) * plane + unit);
          break;
        case 'z':
          copy(from, n, s.fed + (row * shape.fed + k) * plane + unit);
          break;
        case 's':
          if (!s.grad_old_states) break;
          reset(from, 1 + k, s.grad_old_states + k * s.state_stride);
          break;
        default:
          if (s.grad_own_h) reset(from, 0, s.grad_own_h);
      }
    }
  });
}

template <typename A, class Step>
void run(const Formula& formula, const CellShape& shape, const Step& step) {
  const int64_t hidden = step.hidden, width = shape.over_units ? hidden : kBlock;
  const auto blocks = [&](int64_t row, int64_t unit, int n) {
    static thread_local Workspace<A> workspace;
    const Instructions<A> instructions = {formula, workspace.of(formula, width), width};
    run_block(formula, shape, step, Block<A>(instructions, hidden, row * hidden + unit, n));
  };
  if (shape.over_units) {
    step_cpu::for_each_row<A>(step.batch, hidden, blocks);
  } else {
    step_cpu::for_each_block<A>(1, step.batch * hidden, blocks);
  }
}

}  // namespace

template <typename A>
void run_formula(const Formula& forward, const CellShape& shape, const StepForwardArguments<A>& step) {
  run<A>(forward, shape, step);
}
template <typename A>
void run_formula(const Formula& backward, const CellShape& shape, const StepBackwardArguments<A>& step) {
  run<A>(backward, shape, step);
}

template void run_formula(const Formula&, const CellShape&, const StepForwardArguments<float>&);
template void run_formula(const Formula&, const CellShape&, const StepForwardArguments<double>&);
template void run_formula(const Formula&, const CellShape&, const StepBackwardArguments<float>&);
template void run_formula(const Formula&, const CellShape&, const StepBackwardArguments<double>&);

}  // namespace lltm_ext
