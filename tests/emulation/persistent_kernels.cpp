// Compares the recurrence kernels that run many steps, on the CPU (cuda_on_cpu.h), with a loop over the steps
// in double: the persistent kernels, and for a cell without a product of h those of independent units. Also
// the kernels of fused steps of few rows, a launch a step.
//
//   persistent_kernels CELL
//
// runs all cases of a cell, forward and backward, and prints a line for each result that differs. The exit
// status is 0 if none does. tests/test_persistent_kernels.py writes cells.h: the cells' structs, and
// FOR_ALL_CELLS(F), which is F(name, type) for each cell.
#include <new>
#include <numeric>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "cells.h"
#include "cuda_on_cpu.h"
#include "recurrence/persistent/backward.cuh"
#include "recurrence/persistent/forward.cuh"
#include "recurrence/plan.h"
#include "recurrence/stepwise/single_step.cuh"
#include "recurrence/stepwise/small_batch.cuh"
#include "recurrence/without_product/tiles.cuh"

namespace lltm_ext {

// The units of a row in the reference, which computes one after the other. It computes the row again for each
// call of theirs: then all units have given what the call takes.
template <>
class RowOfUnits<double> {
 public:
  struct Calls {
    size_t known = 0, next = 0;             // calls whose arguments are complete; the unit's next one
    std::vector<std::vector<double>> of{};  // the units' arguments of each call
  };
  RowOfUnits() = default;
  RowOfUnits(Calls& calls, int hidden, int unit) : calls_(&calls), hidden_(hidden), unit_(unit) {}

  template <int kSums>
  void sums(double (&sums)[kSums]) const {
    for (double& x : sums) x = found(x, 0, hidden_);
  }
  template <int kVariances>
  void moments(double (&variances)[kVariances], double (&means)[kVariances]) const {
    for (int v = 0; v < kVariances; ++v) set_moments(variances[v], means[v]);
  }
  template <int kVariances, int kSums>
  void moments(double (&variances)[kVariances], double (&means)[kVariances], double (&sums)[kSums]) const {
    moments(variances, means);
    this->sums(sums);
  }
  double per_unit(double sum) const { return sum / hidden_; }
  double cumsum(double x) const { return found(x, 0, unit_ + 1); }
  double cumsum_back(double x) const { return found(x, unit_, hidden_); }
  double max(double x) const {
    const std::vector<double>* const values = given(x);
    return values ? *std::max_element(values->begin(), values->end()) : 1;
  }

  // What all units have given this call, if that is known.
  const std::vector<double>* given(double x) const {
    const size_t call = calls_->next++;
    if (calls_->of.size() == call) calls_->of.emplace_back(hidden_);
    std::vector<double>& values = calls_->of[call];
    values[unit_] = x;
    return call < calls_->known ? &values : nullptr;
  }

 private:
  // Replaces x by the variance of the units' x.
  void set_moments(double& x, double& mean) const {
    const std::vector<double>* const values = given(x);
    mean = values ? std::accumulate(values->begin(), values->end(), 0.) / hidden_ : 1;
    x = values ? 0 : 1;
    for (int i = 0; values && i < hidden_; ++i) x += ((*values)[i] - mean) * ((*values)[i] - mean) / hidden_;
  }
  double found(double x, int begin, int end) const {
    const std::vector<double>* const values = given(x);
    double sum = values ? 0 : 1;
    for (int i = begin; values && i < end; ++i) sum += (*values)[i];
    return sum;
  }

  Calls* calls_;
  int hidden_, unit_;
};

namespace {

using Values = std::vector<double>;

// In place of a variant: the kernels of independent units, those of few rows, and those of a single step.
constexpr int kIndependent = -1, kSmallBatchSteps = -2, kSingleStep = -3, kSingleStepOnTensorCores = -4;
constexpr bool is_single_step(int variant) { return variant <= kSingleStep; }
template <typename T, int kVariant>
constexpr PersistentVariant variant_of() {
  if constexpr (kVariant >= 0) return variants_of<T>()[kVariant];
  return {};
}

// ---- cases

struct Case {
  int length, batch, hidden;
  int group_rows;  // rows of the batch that a group of blocks of a persistent kernel has
  bool reverse;
  std::vector<int> rows_of_steps;  // of a packed sequence; empty if every step has the whole batch
  bool save = true;                // for backward, which runs then
  bool from_zeros = false;         // without memory: h0, states0 and the gradients after the last step
  int multiprocessors = 3;         // for which a step of few rows is planned
  int thread_steps = 0;            // of units without a product; 0: one thread has all steps of a row
};

// The rows of a case's steps.
class Steps {
 public:
  explicit Steps(const Case& c) : first_rows_(c.length + 1) {
    const bool packed = !c.rows_of_steps.empty();
    for (int t = 0; t < c.length; ++t) {
      first_rows_[t + 1] = first_rows_[t] + (packed ? c.rows_of_steps[t] : c.batch);
    }
    order_ = {c.length, c.batch, c.reverse, packed ? first_rows_.data() : nullptr};
  }
  Steps(const Steps&) = delete;

  const StepOrder& order() const { return order_; }
  StepRows at(int step) const { return order_.at(step); }
  int64_t rows() const { return first_rows_.back(); }

  // The first row of steps [begin, end), and their number of rows.
  std::pair<int64_t, int64_t> range(int begin, int end) const {
    int64_t first = rows(), last = 0;
    for (int step = begin; step < end; ++step) {
      first = std::min(first, at(step).first);
      last = std::max(last, at(step).first + at(step).count);
    }
    return {first, last - first};
  }

 private:
  std::vector<int64_t> first_rows_;
  StepOrder order_;
};

// ---- rounding

template <typename T>
double rounded(double x) {
  return static_cast<float>(static_cast<T>(static_cast<float>(x)));
}
double rounded_to_tf32(double x) { return __uint_as_float(cvt_rna_tf32(static_cast<float>(x))); }

// Where the kernels round, the reference does too, so that the tolerances can be small.
struct Precision {
  double (*value)(double);    // in memory
  double (*operand)(double);  // of a product
  double tolerance;           // of a result x: this times 1 + |x|
};

template <typename T>
Precision precision_of(bool tf32) {
  if (sizeof(T) >= 4) return {rounded<T>, tf32 ? rounded_to_tf32 : rounded<T>, tf32 ? 2e-4 : 1e-5};
  return {rounded<T>, rounded<T>, std::is_same_v<T, __half> ? 2e-3 : 1.5e-2};
}

// ---- inputs

class Random {
 public:
  // Uniform from center - range to center + range.
  double next(double center, double range) {
    state_ = state_ * 1664525u + 1013904223u;
    return center + range * ((state_ >> 8) / static_cast<double>(1 << 23) - 1);
  }
  Values values(size_t count, double center, double range, double (*round)(double)) {
    Values result(count);
    for (double& x : result) x = round(next(center, range));
    return result;
  }
  // What rows lose: often all or nothing, and always `of_bools`.
  Values resets(size_t count, bool of_bools) {
    Values result(count);
    for (double& reset : result) {
      const double x = next(0, 1);
      reset = x < -0.3 ? 1 : x < 0.2 && !of_bools ? 0.5 : 0;
    }
    return result;
  }

 private:
  uint32_t state_ = 1;
};

// In the shapes of recurrence/cell.h.
// Block-diagonal weights of a cell's own are zeros where the units' heads differ.
template <class Cell>
void clear_between_heads(Values& weight, int hidden) {
  if constexpr (kHeadUnits<Cell> > 0) {
    for (int product = 0; product < Cell::kProducts; ++product) {
      double* const block = &weight[(Cell::kGates + Cell::block_of(product)) * hidden * hidden];
      for (int i = 0; is_block_diagonal<Cell>(product) && i < hidden * hidden; ++i) {
        if (i / hidden / kHeadUnits<Cell> != i % hidden / kHeadUnits<Cell>) block[i] = 0;
      }
    }
  }
}

struct Inputs {
  Values weight, parameters, step_inputs, reset, keep, h0, states0, gates;
  Values grad_output, grad_h_n, grad_states_n;

  // `round_state`: where the states that a caller gives and gets are in memory.
  Inputs(const CellShape& cell, const Case& c, int64_t rows, bool has_resets, bool of_bools,
         double (*round)(double), double (*round_state)(double)) {
    Random random;
    const size_t hidden = c.hidden, of_batch = c.batch * hidden, of_rows = rows * hidden;
    // Without a product of h, the reference multiplies by zeros.
    weight = random.values(cell.rows_of_weight_hh() * hidden * hidden, 0,
                           cell.recurrent ? 0.8 / std::sqrt(hidden) : 0, round);
    parameters = random.values(cell.parameters * hidden, 0, 1, round);
    step_inputs = random.values(cell.step_inputs * of_rows, 0.5, 0.5, round);
    reset = has_resets ? random.resets(rows, of_bools) : Values(rows, 0);
    for (const double x : reset) keep.push_back(1 - x);
    h0 = random.values(of_batch, 0, 0.5, round);
    states0 = random.values(cell.states * of_batch, 0.6, 0.4, round_state);
    gates = random.values(cell.gates * of_rows, 0, 1, round);
    grad_output = random.values(cell.outputs * of_rows, 0, 1, round);
    grad_h_n = random.values(of_batch, 0, 1, round);
    grad_states_n = random.values(cell.states * of_batch, 0, 1, rounded<float>);
    if (!c.from_zeros) return;
    for (Values* x : {&h0, &states0, &grad_h_n, &grad_states_n}) x->assign(x->size(), 0);
  }
};

// ---- the reference: a loop over steps, rows and units

template <class Cell>
class Reference {
  static constexpr CellShape kShape = kCellShape<Cell>;
  static constexpr int kGates = kShape.gates, kSums = kShape.sums();

 public:
  Values output, output_apart, h, states, saved;                           // of forward
  Values grad_products, grad_projections, grad_h, grad_states, grad_sums;  // of backward
  Values grad_initial;   // of h and states by resets to them
  Values grad_own, fed;  // of the products with the cell's own weights, and what these take

  Reference(const Case& c, const Steps& steps, const Inputs& inputs, const Precision& precision)
      : c_(c), steps_(steps), in_(inputs), precision_(precision), weight_(inputs.weight) {
    for (double& w : weight_) w = precision.operand(w);
  }

  void forward() {
    h = in_.h0, states = in_.states0;
    output.resize(steps_.rows() * c_.hidden);
    if (kShape.has_output_apart()) output_apart.resize(kShape.outputs * output.size());
    saved.resize(steps_.rows() * kShape.saved * c_.hidden);
    for (int step = 0; step < c_.length; ++step) {
      const StepRows rows = steps_.at(step), before = steps_.at(step - 1);
      for (int b = 0; b < rows.count; ++b) {
        if (kToInitial) reset(b, rows.first + b, b < before.count ? before.first + b : -1);
        forward_row(b, rows.first + b);
      }
    }
  }

  // What the kernel has saved, and its h of all steps, so that both compute from the same.
  void backward(const Values& saved_values, const Values& kernel_output) {
    grad_h = in_.grad_h_n, grad_states = in_.grad_states_n;
    grad_products.resize(steps_.rows() * kGates * c_.hidden);
    grad_projections = grad_products;
    grad_own.resize(steps_.rows() * kShape.products * c_.hidden);
    fed.resize(steps_.rows() * kShape.fed * c_.hidden);
    grad_sums.resize(kSums * c_.hidden);
    grad_initial.resize((1 + kShape.states) * c_.batch * c_.hidden);
    for (int step = c_.length - 1; step >= 0; --step) {
      const StepRows rows = steps_.at(step), before = steps_.at(step - 1);
      for (int b = 0; b < rows.count; ++b) {
        const double* const from =
            b < before.count ? &kernel_output[at(before.first + b, 1, 0)] : &in_.h0[at(b, 1, 0)];
        backward_row(b, rows.first + b, saved_values, {from, from + c_.hidden});
      }
    }
  }

 private:
  static constexpr bool kToInitial = kResetsToInitial<Cell>;

  // Resets a row to its initial h and states. The row's step before, if it has one, hands that on.
  void reset(int b, int64_t row, int64_t before) {
    const double share = in_.reset[row];
    const auto apply = [&](double& x, double initial) { x = (1 - share) * x + share * initial; };
    for (int unit = 0; unit < c_.hidden; ++unit) {
      double& handed_on = h[at(b, 1, 0) + unit];
      apply(handed_on, in_.h0[at(b, 1, 0) + unit]);
      if (before >= 0) handed_on = precision_.value(handed_on);
      // Nothing but products reads what a step hands on.
      if (before >= 0 && Cell::kRecurrent) output[at(before, 1, 0) + unit] = handed_on;
      for (int s = 0; s < kShape.states; ++s) {
        apply(states[state_at(s, b) + unit], in_.states0[state_at(s, b) + unit]);
      }
    }
  }

  // What a gradient of h (plane 0) or of a state has of the initial ones.
  void collect_initial(int plane, int b, int64_t row, int unit, double gradient) {
    grad_initial[state_at(plane, b) + unit] += in_.reset[row] * gradient;
  }

  // Where `plane` of a row is, in an array [rows, planes, H].
  size_t at(int64_t row, int planes, int plane) const { return (row * planes + plane) * c_.hidden; }
  size_t state_at(int state, int b) const { return at(state, c_.batch, b); }

  void load_inputs(CellInputs<Cell, double>& in, int64_t row, int unit) const {
    for (int p = 0; p < kShape.parameters; ++p) in.parameters[p] = in_.parameters[p * c_.hidden + unit];
    for (int k = 0; k < kShape.step_inputs; ++k) {
      in.steps[k] = in_.step_inputs[at(row, kShape.step_inputs, k) + unit];
    }
  }

  // The product of h with a unit's weights of a gate.
  double product(int gate, int unit, const Values& operands) const {
    const double* const weights = &weight_[at(gate, c_.hidden, unit)];
    double sum = 0;
    for (int i = 0; i < c_.hidden; ++i) sum += weights[i] * operands[i];
    return sum;
  }

  void forward_row(int b, int64_t row) {
    Values operands(&h[at(b, 1, 0)], &h[at(b, 1, 0)] + c_.hidden);
    for (double& x : operands) x = precision_.operand(x);
    run_row([&](Reference& self) {
      for (int unit = 0; unit < c_.hidden; ++unit) self.forward_unit(b, row, unit, operands);
    });
  }

  // Runs a row's units, in copies of this at first until all know what they read of each other.
  template <class Run>
  void run_row(Run&& run) {
    if constexpr (kShape.mixes_units()) {
      calls_ = {};
      do {
        Reference trial = *this;
        run(trial);
        calls_.of = trial.calls_.of;
      } while (++calls_.known <= calls_.of.size());
      calls_.known = calls_.of.size();
    }
    run(*this);
  }
  void set_units(CellInputs<Cell, double>& in, int unit) {
    calls_.next = 0;
    if constexpr (kIsOverUnits<Cell>) in.units = {calls_, c_.hidden, unit};
  }

  // What calls of products give a unit.
  template <bool kBackward>
  struct OwnProducts {
    Reference& reference;
    int unit;
    int64_t row;
    template <int kCall, int kInputs, int kOutputs>
    void multiply(const double (&given)[kInputs], double (&products)[kOutputs]) const {
      const Precision& precision = reference.precision_;
      const int hidden = reference.c_.hidden, first = own_call<Cell, kBackward>(kCall).first;
      const RowOfUnits<double> units(reference.calls_, hidden, unit);
      for (double& sum : products) sum = 0;
      for (int i = 0; i < kInputs; ++i) {
        const double value = precision.value(given[i]);
        const Values* const values = units.given(precision.operand(value));
        for (int out = 0; out < kOutputs; ++out) {
          const int product = first + out * kInputs + i, block = kGates + Cell::block_of(product);
          if (!values) {
            products[out] = 1;
          } else if (kBackward) {
            reference.grad_own[reference.at(row, kShape.products, product) + unit] = value;
            for (int j = 0; j < hidden; ++j) {
              products[out] += (*values)[j] * reference.weight_[reference.at(block, hidden, j) + unit];
            }
          } else {
            products[out] += reference.product(block, unit, *values);
          }
        }
      }
    }
  };
  double run_cell(CellInputs<Cell, double>& in, double (&states)[at_least_one(kShape.states)],
                  double (&saved)[at_least_one(kShape.saved)], int unit) {
    if constexpr (kProductsOf<Cell> > 0) {
      const OwnProducts<false> products = {*this, unit, 0};
      return Cell::template forward<ExactMath>(in, states, saved, products);
    } else {
      return Cell::template forward<ExactMath>(in, states, saved);
    }
  }

  void forward_unit(int b, int64_t row, int unit, const Values& operands) {
    const double keep = kToInitial ? 1 : in_.keep[row];
    CellInputs<Cell, double> in = {};
    set_units(in, unit);
    load_inputs(in, row, unit);
    in.h = keep * h[at(b, 1, 0) + unit];
    for (int gate = 0; gate < kGates; ++gate) {
      const double sum = keep * product(gate, unit, operands);
      in.x[gate] = in_.gates[at(row, kGates, gate) + unit] + (Cell::kSeparate ? 0 : sum);
      if constexpr (Cell::kSeparate) in.r[gate] = sum;
    }
    double of_unit[at_least_one(kShape.states)] = {}, to_save[at_least_one(kShape.saved)] = {};
    for (int s = 0; s < kShape.states; ++s) of_unit[s] = keep * states[state_at(s, b) + unit];
    if constexpr (kShape.products_of_h > 0) {
      for (int p = 0; p < kShape.products_of_h; ++p) {
        in.products[p] = keep * product(kGates + Cell::block_of(p), unit, operands);
      }
    }
    double new_h = run_cell(in, of_unit, to_save, unit);
    if (!kIsAffine<Cell>) new_h = precision_.value(new_h);
    h[at(b, 1, 0) + unit] = output[at(row, 1, 0) + unit] = new_h;
    for (int s = 0; s < kShape.states; ++s) states[state_at(s, b) + unit] = of_unit[s];
    for (int o = 0; o < kShape.outputs && kShape.has_output_apart(); ++o) {
      output_apart[at(row, kShape.outputs, o) + unit] = output_of<Cell>(new_h, of_unit, o);
    }
    for (int v = 0; v < kShape.saved; ++v) saved[at(row, kShape.saved, v) + unit] = to_save[v];
  }

  void backward_row(int b, int64_t row, const Values& saved_values, const Values& previous_h) {
    Values own(c_.hidden);  // gradients of h that don't pass the weights
    run_row([&](Reference& self) {
      for (int unit = 0; unit < c_.hidden; ++unit) {
        own[unit] = self.backward_unit(b, row, unit, saved_values, previous_h);
      }
    });
    double* const to = &grad_h[at(b, 1, 0)];
    std::fill(to, to + c_.hidden, 0);
    for (int gate = 0; gate < kGates; ++gate) {
      for (int unit = 0; unit < c_.hidden; ++unit) {
        const double gradient = precision_.operand(grad_products[at(row, kGates, gate) + unit]);
        const double* const weights = &weight_[at(gate, c_.hidden, unit)];
        for (int i = 0; i < c_.hidden; ++i) to[i] += gradient * weights[i];
      }
    }
    for (int i = 0; i < c_.hidden; ++i) {
      to[i] += own[i];
      collect_initial(0, b, row, i, to[i]);
      to[i] *= in_.keep[row];
    }
  }

  double backward_unit(int b, int64_t row, int unit, const Values& saved_values, const Values& previous_h) {
    CellInputs<Cell, double> in = {};
    set_units(in, unit);
    load_inputs(in, row, unit);
    for (int gate = 0; gate < kGates && !Cell::kRecurrent; ++gate) {
      in.x[gate] = in_.gates[at(row, kGates, gate) + unit];
    }
    in.h = in_.keep[row] * previous_h[unit];
    if (kToInitial) in.h += in_.reset[row] * in_.h0[at(b, 1, 0) + unit];
    double from_save[at_least_one(kShape.saved)] = {}, of_unit[at_least_one(kShape.states)] = {};
    for (int v = 0; v < kShape.saved; ++v) from_save[v] = saved_values[at(row, kShape.saved, v) + unit];
    for (int s = 0; s < kShape.states; ++s) of_unit[s] = grad_states[state_at(s, b) + unit];
    CellGradients<Cell, double> grads = {};
    double of_h = grad_h[at(b, 1, 0) + unit];
    for (int o = 0; o < kShape.outputs; ++o) {
      gradient_of_output<Cell>(of_h, of_unit, o) += in_.grad_output[at(row, kShape.outputs, o) + unit];
    }
    if constexpr (kProductsOf<Cell> > 0) {
      const OwnProducts<true> products = {*this, unit, row};
      Cell::template backward<ExactMath>(from_save, in, of_h, of_unit, grads, products);
      for (int f = 0; f < kShape.fed; ++f) fed[at(row, kShape.fed, f) + unit] = grads.fed[f];
    } else {
      Cell::template backward<ExactMath>(from_save, in, of_h, of_unit, grads);
    }
    for (int s = 0; s < kShape.states; ++s) {
      collect_initial(1 + s, b, row, unit, of_unit[s]);
      grad_states[state_at(s, b) + unit] = in_.keep[row] * of_unit[s];
    }
    for (int gate = 0; gate < kGates; ++gate) {
      grad_projections[at(row, kGates, gate) + unit] = grads.x[gate];
      grad_products[at(row, kGates, gate) + unit] = precision_.value(grads.product(gate));
      grad_sums[gate * c_.hidden + unit] += grads.x[gate];
    }
    for (int p = 0; p < kShape.parameters; ++p) {
      grad_sums[(kGates + p) * c_.hidden + unit] += grads.parameters[p];
    }
    return Cell::kReadsH ? grads.h : 0;
  }

  const Case& c_;
  const Steps& steps_;
  const Inputs& in_;
  const Precision precision_;
  Values weight_;
  RowOfUnits<double>::Calls calls_;
};

// ---- the kernels

// Memory with a margin behind it, which nothing may write.
template <typename T>
struct GuardedAllocator {
  using value_type = T;
  static constexpr size_t kMargin = 1 << 16;
  static constexpr unsigned char kFill = 0xa5;

  GuardedAllocator() = default;
  template <typename U>
  GuardedAllocator(const GuardedAllocator<U>&) {}

  T* allocate(size_t count) {
    auto* const memory = static_cast<unsigned char*>(::operator new(count * sizeof(T) + kMargin));
    std::memset(memory + count * sizeof(T), kFill, kMargin);
    return reinterpret_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) {
    const auto* const margin = reinterpret_cast<const unsigned char*>(memory + count);
    const bool intact =
        std::all_of(margin, margin + kMargin, [](unsigned char byte) { return byte == kFill; });
    if (!intact) cuda_on_cpu::fail("A thread wrote beyond an array");
    ::operator delete(memory);
  }
  friend bool operator==(const GuardedAllocator&, const GuardedAllocator&) { return true; }
  friend bool operator!=(const GuardedAllocator&, const GuardedAllocator&) { return false; }
};
template <typename T>
using Array = std::vector<T, GuardedAllocator<T>>;

template <typename T>
Array<T> narrowed(const Values& values) {
  Array<T> result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = static_cast<T>(static_cast<float>(values[i]));
  return result;
}
template <typename T>
Values widened(const Array<T>& values) {
  Values result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = static_cast<float>(values[i]);
  return result;
}
// Memory that the kernel has not written.
template <typename T>
Array<T> unwritten(size_t count) {
  Array<T> result(count);
  std::memset(static_cast<void*>(result.data()), kUnwrittenByte, count * sizeof(T));
  return result;
}

// Of [G * H, H] the blocks of heads, [G * H, H / heads]. The reference keeps zeros between them.
Values blocks_of(Values& weight, int hidden, int heads) {
  const int size = hidden / heads;
  Values blocks;
  for (size_t i = 0; i < weight.size(); ++i) {
    const size_t row = i / hidden, column = i % hidden;
    if (row % hidden / size == column / size) {
      blocks.push_back(weight[i]);
    } else {
      weight[i] = 0;
    }
  }
  return blocks;
}
// [G * H, H] to [H, G * H].
Values transposed(const Values& weight, int hidden) {
  const size_t rows = weight.size() / hidden;
  Values result(weight.size());
  for (size_t i = 0; i < rows; ++i) {
    for (int j = 0; j < hidden; ++j) result[j * rows + i] = weight[i * hidden + j];
  }
  return result;
}

template <class Cell, typename T, int kVariant, class Reset, int kHeads>
class Kernels {
  static constexpr CellShape kShape = kCellShape<Cell>;
  static constexpr int kGates = kShape.gates, kExtra = kShape.extra(),
                       kSavedInGates = kShape.saved_in_gates(),
                       kTileThreads = kShape.live_states() <= 1 ? 256 : 128;
  static constexpr bool kHasResets = !kIsSame<Reset, NoReset>, kOfBools = kIsSame<Reset, bool>;
  // A vector of bool would have no address for each.
  using StoredReset = std::conditional_t<kOfBools, unsigned char, acc_t<T>>;

 public:
  // The type of the states that a caller gives and gets: either may be.
  static constexpr bool kNarrowStates = sizeof(T) == 2 && !kHasResets;
  using State = std::conditional_t<kNarrowStates, T, acc_t<T>>;

  Array<T> gates, extra, output, output_apart, h_n;
  Array<State> states_n;
  Array<T> grad_gates, grad_projections, grad_h, grad_products, fed;
  Array<acc_t<T>> grad_own_h, grad_states, grad_initial, grad_sums;

  // `weight`: that of the inputs, or its blocks.
  Kernels(const Case& c, const Steps& steps, const Inputs& inputs, const Values& weight)
      : c_(c),
        steps_(steps),
        weight_(narrowed<T>(weight)),
        weight_t_(narrowed<T>(transposed(weight, c.hidden / kHeads))),
        parameters_(narrowed<T>(inputs.parameters)),
        step_inputs_(narrowed<T>(inputs.step_inputs)),
        h0_(narrowed<T>(inputs.h0)),
        grad_output_(narrowed<T>(inputs.grad_output)),
        reset_(narrowed<StoredReset>(inputs.reset)),
        states0_(narrowed<State>(inputs.states0)) {
    const size_t rows = steps.rows(), hidden = c.hidden;
    gates = narrowed<T>(inputs.gates);
    extra = unwritten<T>(rows * kExtra * hidden);
    output = unwritten<T>(rows * hidden);
    if (kShape.has_output_apart()) output_apart = unwritten<T>(kShape.outputs * output.size());
    h_n = unwritten<T>(c.batch * hidden);
    states_n = unwritten<State>(states0_.size());
    grad_gates = unwritten<T>(rows * kGates * hidden);
    if (Cell::kSeparate) grad_projections = grad_gates;
    grad_products = unwritten<T>(rows * kShape.products * hidden);
    fed = unwritten<T>(rows * kShape.fed * hidden);
    grad_h = c.from_zeros ? unwritten<T>(c.batch * hidden) : narrowed<T>(inputs.grad_h_n);
    if (Cell::kReadsH && c.from_zeros) grad_own_h = unwritten<acc_t<T>>(c.batch * hidden);
    if (Cell::kReadsH) grad_own_h.resize(c.batch * hidden);
    grad_states =
        c.from_zeros ? unwritten<acc_t<T>>(states0_.size()) : narrowed<acc_t<T>>(inputs.grad_states_n);
    const UnitTiles tiles = unit_tiles(c.length, /*step_bytes=*/1);
    const bool in_tiles = c.thread_steps > 0;
    const size_t each = in_tiles ? tiles.tiles : 1, threads = in_tiles ? each * tiles.rows() : 1;
    grad_sums.resize(each * c.batch * kShape.sums() * hidden);
    if (kResetsToInitial<Cell>) grad_initial.resize(threads * (1 + kShape.states) * c.batch * hidden);
  }

  void forward() {
    const auto given = gates;  // a cell without a product reads its projections from elsewhere
    const T* const projections = reinterpret_cast<const T*>(given.data());
    const SequenceForwardArguments<T> arguments = {steps_.order(),
                                                   c_.hidden,
                                                   c_.save,
                                                   kNarrowStates,
                                                   kOfBools,
                                                   /*has_bias=*/false,
                                                   kVariant == kIndependent ? projections : weight_.data(),
                                                   parameters_.data(),
                                                   step_inputs_.data(),
                                                   kHasResets ? reset_.data() : nullptr,
                                                   lacks_states() ? nullptr : h0_.data(),
                                                   lacks_states() ? nullptr : states0_.data(),
                                                   gates.data(),
                                                   extra.data(),
                                                   output.data(),
                                                   kShape.has_output_apart() ? output_apart.data() : nullptr,
                                                   h_n.data(),
                                                   states_n.data()};
    if constexpr (kVariant == kIndependent) {
      launch_independent<IndependentForward, ForwardMap>(arguments);
    } else if constexpr (kVariant == kSmallBatchSteps) {
      for (int step = 0; step < c_.length; ++step)
        launch_small_batch<SmallBatchForward<Cell>>(arguments, step);
    } else if constexpr (kVariant == kSingleStep) {
      c_.batch == 1 ? launch_single_step<SingleStepByThreads<Cell, T, 1>>()
                    : launch_single_step<SingleStepByThreads<Cell, T, 8>>();
    } else if constexpr (kVariant == kSingleStepOnTensorCores) {
      single_step_tile().rows == 8 ? launch_single_step<SingleStepOnTensorCores<Cell, T, 1>>()
                                   : launch_single_step<SingleStepOnTensorCores<Cell, T, 2>>();
    } else {
      using Config = PersistentConfig<Cell, T, kVariant, /*kBackward=*/false, Reset, kHeads>;
      launch<Config, ForwardSteps<Config>>(arguments);
      check_prefetches(0, c_.length, /*descending=*/false);
    }
  }

  // Steps [begin, end).
  void backward(int begin, int end) {
    const auto [first_row, rows] = steps_.range(begin, end);
    const size_t first = first_row * kGates * c_.hidden;
    SequenceBackwardArguments<T> arguments = {steps_.order(), begin, end, first_row, rows, c_.hidden};
    arguments.from_zeros = c_.from_zeros && end == c_.length;
    arguments.weight_t = weight_t_.data();
    arguments.parameters = parameters_.data();
    arguments.step_inputs = step_inputs_.data();
    arguments.reset = kHasResets ? reset_.data() : nullptr;
    arguments.reset_is_bool = kOfBools;
    arguments.gates = gates.data();
    arguments.extra = extra.data();
    arguments.grad_output = grad_output_.data();
    arguments.grad_gates = grad_gates.data() + first;
    arguments.grad_projections = Cell::kSeparate ? grad_projections.data() + first : nullptr;
    arguments.grad_products = grad_products.data() + first_row * kShape.products * c_.hidden;
    arguments.fed = fed.data() + first_row * kShape.fed * c_.hidden;
    arguments.grad_h = grad_h.data();
    arguments.grad_own_h = Cell::kReadsH ? grad_own_h.data() : nullptr;
    arguments.grad_states = grad_states.data();
    arguments.grad_initial = kResetsToInitial<Cell> ? grad_initial.data() : nullptr;
    arguments.grad_sums = grad_sums.data();
    arguments.output = output.data();
    arguments.h0 = lacks_states() ? nullptr : h0_.data();
    if constexpr (kVariant == kIndependent) {
      launch_independent<IndependentBackward, BackwardMap>(arguments);
    } else if constexpr (kVariant == kSmallBatchSteps) {
      for (int step = end - 1; step >= begin - 1; --step) {
        launch_small_batch<SmallBatchBackward<Cell>>(arguments, step);
      }
    } else {
      using Config = PersistentConfig<Cell, T, kVariant, /*kBackward=*/true, Reset, kHeads>;
      launch<Config, BackwardSteps<Config>>(arguments);
      if (kShape.saved > 0) check_prefetches(begin, end, /*descending=*/true);
    }
  }

  // Resets lead to states that are in memory.
  bool lacks_states() const { return c_.from_zeros && !kResetsToInitial<Cell>; }

  // The saved values, [N, kSaved, H]: the first are in `gates`, the others in `extra`.
  Values saved() const {
    Values result;
    for (int64_t row = 0; row < steps_.rows(); ++row) {
      for (int v = 0; v < kShape.saved; ++v) {
        const T* const from = v < kSavedInGates ? &gates[(row * kGates + v) * c_.hidden]
                                                : &extra[(row * kExtra + v - kSavedInGates) * c_.hidden];
        for (int unit = 0; unit < c_.hidden; ++unit) result.push_back(static_cast<float>(from[unit]));
      }
    }
    return result;
  }
  Values total_grad_h() const {
    Values result = widened(grad_h);
    for (size_t i = 0; i < grad_own_h.size(); ++i) result[i] += grad_own_h[i];
    return result;
  }
  Values total_grad_sums() const { return sum_of_rows(grad_sums, kShape.sums() * c_.hidden); }
  Values total_grad_initial() const {
    return sum_of_rows(grad_initial, (1 + kShape.states) * c_.batch * c_.hidden);
  }

 private:
  static Values sum_of_rows(const Array<acc_t<T>>& x, size_t width) {
    Values result(width);
    for (size_t i = 0; i < x.size(); ++i) result[i % width] += x[i];
    return result;
  }

  // Of the gates, rows of all steps but the first few must be prefetched, and nothing else.
  void check_prefetches(int begin, int end, bool descending) const {
    std::set<int64_t> expected, found;
    for (int step = begin; step < end; ++step) {
      const int turn = descending ? end - 1 - step : step - begin;
      for (int b = 0; turn >= kStepsAhead && b < steps_.at(step).count; ++b) {
        expected.insert(steps_.at(step).first + b);
      }
    }
    for (const void* address : std::exchange(prefetched, {})) {
      const int64_t at = static_cast<const T*>(address) - gates.data();
      if (at >= 0 && at < static_cast<int64_t>(gates.size())) found.insert(at / (kGates * c_.hidden));
    }
    if (found != expected) cuda_on_cpu::fail("A thread prefetched other rows than those of later steps");
  }

  static constexpr PersistentVariant kPersistent = variant_of<T, kVariant>();
  static constexpr bool kCluster = kPersistent.algorithm == Algorithm::kCluster;

  template <class Config>
  GroupGrid grid() const {
    const int units = Config::kShape.units(), needed = (c_.hidden / kHeads + units - 1) / units;
    // As the planner: a single block can't send to itself.
    const int group_blocks = Config::kThrough == ExchangeThrough::kCluster ? std::max(needed, 2) : needed;
    return {group_blocks, (c_.batch + c_.group_rows - 1) / c_.group_rows, c_.group_rows};
  }

  template <class Config, class Steps, class Arguments>
  void launch(const Arguments& arguments) const {
    GroupGridOfRows groups = {grid<Config>()};
    Array<T> given = unwritten<T>(steps_.rows() * kShape.fed_apart() * c_.hidden);
    groups.given = given.data();
    const Group group = {c_.hidden / kHeads, groups.group_blocks, 0, groups.rows};
    // The groups of a cell that reads other units may be launched in parts.
    const int at_once = kShape.mixes_units() ? 1 : groups.groups;
    const cuda_on_cpu::Grid grid = {at_once * groups.group_blocks, Config::kShape.threads(),
                                    kCluster ? groups.group_blocks : 1,
                                    static_cast<size_t>(Config::kShape.shared_bytes(group))};
    for (; groups.first_group < groups.groups; groups.first_group += at_once) {
      std::vector<Uint64Pair> row_parts(groups.groups * Config::kShape.row_parts_bytes(groups.group_blocks) /
                                        sizeof(Uint64Pair));
      groups.row_parts = row_parts.data();
      for (int head = 0; head < kHeads; ++head) {
        cuda_on_cpu::run(grid, [&] {
          auto* const shared = reinterpret_cast<float*>(cuda_on_cpu::current_block().memory());
          const auto of_head = lltm_ext::of_head<Cell>(arguments, head, c_.hidden / kHeads);
          Steps(of_head, groups, typename Steps::Storage(shared)).run();
        });
      }
    }
  }

  int units_each() const {
    return c_.thread_steps > 0 ? tile_units(c_.hidden, sizeof(T))
                               : independent_units(c_.batch, c_.hidden, sizeof(T));
  }

  // Tiles of so many steps, if they are asked for.
  UnitTiles unit_tiles(int64_t steps, int64_t step_bytes) const {
    UnitTiles tiles = {};
    tiles.stage_steps = 5;  // a group of steps, and single ones
    if (c_.thread_steps == 0) return tiles;
    tiles.units = units_each();
    const int64_t threads = c_.batch * c_.hidden / tiles.units;
    while (1 << tiles.width_bits < std::min<int64_t>(threads, 32)) ++tiles.width_bits;
    tiles.threads = kTileThreads;
    tiles.thread_steps = c_.thread_steps;
    tiles.groups = static_cast<unsigned>(ceil_div(threads, int64_t{1} << tiles.width_bits));
    tiles.tiles = ceil_div(steps, int64_t{tiles.rows()} * tiles.thread_steps);
    const int64_t of_sums = units_each() * kShape.sums() * int64_t{sizeof(acc_t<T>)},
                  of_thread = std::max(c_.thread_steps * step_bytes, of_sums);
    tiles.input_bytes = static_cast<int>(ceil_div(kTileThreads * of_thread, int64_t{16}) * 16);
    tiles.depth = 2;
    return tiles;
  }

  template <template <class, typename, int, bool, int> class Units,
            template <class, typename, int, bool, int> class Map, class Arguments>
  void launch_independent(const Arguments& arguments) const {
    if (arguments.steps.first_rows || arguments.reset) return launch_units<Units, Map, false>(arguments);
    launch_units<Units, Map, true>(arguments);
  }
  template <template <class, typename, int, bool, int> class Units,
            template <class, typename, int, bool, int> class Map, bool kDense, class Arguments>
  void launch_units(const Arguments& arguments) const {
    if (units_each() == 2) {
      launch_tiles<Units<Cell, T, 2, kDense, kIndependentThreads>, Map<Cell, T, 2, kDense, kTileThreads>>(
          arguments);
    } else {
      launch_tiles<Units<Cell, T, 1, kDense, kIndependentThreads>, Map<Cell, T, 1, kDense, kTileThreads>>(
          arguments);
    }
  }
  template <class Units, class Map, class Arguments>
  void launch_tiles(const Arguments& arguments) const {
    constexpr bool kBackward = std::is_same_v<Arguments, SequenceBackwardArguments<T>>,
                   kHasMaps = kIsAffine<Cell> || kBackward;
    const int64_t step_bytes =
        independent_step_bytes(kShape, units_each(), sizeof(T), kBackward, Units::kDense);
    UnitTiles tiles = unit_tiles(steps_of(arguments), step_bytes);
    if constexpr (kHasMaps && kShape.live_states() <= kMostMappedStates) {
      if (c_.thread_steps > 0) {
        constexpr int kLive = kShape.live_states();
        std::vector<uint64_t> links(tiles.link_bytes(kLive) / 8 + 1, ~uint64_t{0});
        tiles.links = links.data();
        return cuda_on_cpu::run({static_cast<int>(tiles.groups * tiles.tiles), kTileThreads, 1,
                                 static_cast<size_t>(tiles.shared_bytes(kLive))},
                                [&] { run_tile_of_units<Map>(arguments, tiles); });
      }
    }
    const int blocks =
        static_cast<int>(ceil_div(c_.batch * c_.hidden / units_each(), int64_t{kIndependentThreads}));
    const size_t ring = kIndependentThreads * tiles.stage_steps * kRingStages * step_bytes;
    cuda_on_cpu::run({blocks, kIndependentThreads, 1, ring},
                     [&] { Units(arguments, independent_thread()).run(tiles); });
  }

  SingleStepTile single_step_tile() const {
    return lltm_ext::single_step_tile(c_.batch, products_of_single_step(kShape),
                                      kVariant == kSingleStepOnTensorCores);
  }

  // Each row of the batch has an input of its own, of zeros and a one, whose weights are its projections less
  // what the biases add.
  template <class Step>
  void launch_single_step() {
    constexpr bool kOnTensorCores = kVariant == kSingleStepOnTensorCores;
    const int batch = c_.batch, hidden = c_.hidden, gate_rows = kGates * hidden;
    // Half of the input has what TF32 rounds off, which is 0 in half types.
    const int half = kOnTensorCores ? (batch + 7) / 8 * 8 : batch, input_size = 2 * half;
    // In half types the difference would be rounded.
    const double first_bias = 0.5, second_bias = sizeof(T) == 2 ? -0.5 : 0.25,
                 bias_sum = first_bias + second_bias;
    Values input(batch * input_size), weight_ih(gate_rows * input_size);
    for (int b = 0; b < batch; ++b) {
      input[b * input_size + b] = input[b * input_size + half + b] = 1;
      for (int i = 0; i < gate_rows; ++i) {
        const double weight = static_cast<float>(gates[b * gate_rows + i]) - bias_sum;
        weight_ih[i * input_size + b] = rounded_to_tf32(weight);
        weight_ih[i * input_size + half + b] = weight - rounded_to_tf32(weight);
      }
    }
    const Array<T> x = narrowed<T>(input), weights = narrowed<T>(weight_ih),
                   bias = narrowed<T>(Values(gate_rows, first_bias)),
                   bias_hh = narrowed<T>(Values(gate_rows, second_bias));
    if (c_.save) gates = unwritten<T>(gates.size());
    const SingleStepArguments<T> arguments = {batch,
                                              hidden,
                                              input_size,
                                              kNarrowStates,
                                              kOnTensorCores,
                                              c_.save,
                                              /*shared_step_inputs=*/false,
                                              x.data(),
                                              h0_.data(),
                                              states0_.data(),
                                              weights.data(),
                                              weight_.data(),
                                              bias.data(),
                                              bias_hh.data(),
                                              parameters_.data(),
                                              step_inputs_.data(),
                                              output.data(),
                                              h_n.data(),
                                              states_n.data(),
                                              gates.data(),
                                              extra.data()};
    const auto blocks = static_cast<int>(single_step_tile().blocks(batch, hidden));
    cuda_on_cpu::run({blocks, kSingleStepThreads, 1, sizeof(typename Step::Sums)}, [&] {
      Step(arguments).run(*reinterpret_cast<typename Step::Sums*>(cuda_on_cpu::current_block().memory()));
    });
  }

  template <class Step, class Arguments>
  void launch_small_batch(const Arguments& arguments, int step) const {
    constexpr bool kBackward = std::is_same_v<Arguments, SequenceBackwardArguments<T>>;
    const DeviceInfo device = {80, c_.multiprocessors, false, /*cluster_multiprocessors=*/{}, 99 << 10};
    const SmallBatchTile tile =
        plan_detail::small_batch_tile({kShape, c_.hidden, c_.batch, true, kBackward, sizeof(T)}, device);
    switch (tile.rows) {
      case 1:
        return launch_small_batch_kernel<SmallBatchKernel<Step, 1>>(arguments, step, tile);
      case 4:
        return launch_small_batch_kernel<SmallBatchKernel<Step, 4>>(arguments, step, tile);
      case 8:
        return launch_small_batch_kernel<SmallBatchKernel<Step, 8>>(arguments, step, tile);
      case 16:
        return launch_small_batch_kernel<SmallBatchKernel<Step, 16>>(arguments, step, tile);
      default:
        cuda_on_cpu::fail("There is no plan for few rows");
    }
  }
  template <class Kernel, class Arguments>
  void launch_small_batch_kernel(const Arguments& arguments, int step, const SmallBatchTile& tile) const {
    const SmallBatchShape shape = {Kernel::kProducts, tile};
    const cuda_on_cpu::Grid grid = {(c_.hidden + tile.units - 1) / tile.units, shape.threads(), 1,
                                    static_cast<size_t>(shape.shared_bytes())};
    cuda_on_cpu::run(grid, [&] {
      auto* const shared = reinterpret_cast<float*>(cuda_on_cpu::current_block().memory());
      Kernel(arguments, step, tile, shared).run();
    });
    prefetched.clear();
  }

  const Case& c_;
  const Steps& steps_;
  const Array<T> weight_, weight_t_, parameters_, step_inputs_, h0_, grad_output_;
  const Array<StoredReset> reset_;
  const Array<State> states0_;
};

// ---- the comparison

int failures = 0;

struct Comparison {
  std::string name;  // of the case
  double tolerance;

  void operator()(const char* result, const Values& found, const Values& expected) const {
    double worst = -1;
    size_t at = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double error = std::abs(found[i] - expected[i]) / (1 + std::abs(expected[i]));
      if (error <= worst) continue;
      worst = error, at = i;
      if (error != error) break;  // NaN
    }
    if (worst <= tolerance) return;
    ++failures;
    std::printf("%s: %s[%zu]: expected %.9g, got %.9g\n", name.c_str(), result, at, expected[at], found[at]);
  }
};

template <typename T>
std::string name_of(const Case& c, int variant, const char* resets) {
  const char* const type = sizeof(T) == 8              ? "float64"
                           : sizeof(T) == 4            ? "float32"
                           : std::is_same_v<T, __half> ? "float16"
                                                       : "bfloat16";
  const std::string kernel = variant == kIndependent               ? ""
                             : variant == kSmallBatchSteps         ? " few rows"
                             : variant == kSingleStep              ? " single step"
                             : variant == kSingleStepOnTensorCores ? " single step on tensor cores"
                                                                   : " variant " + std::to_string(variant);
  return std::string(type) + kernel + (c.rows_of_steps.empty() ? " dense" : " packed") +
         (c.reverse ? " reverse" : "") + resets + (c.save ? "" : " not saved") +
         (c.from_zeros ? " from zeros" : "") +
         (c.thread_steps > 0 ? " in tiles of " + std::to_string(c.thread_steps) : "");
}

template <class Cell, class KernelsOfCase>
void check_backward(const Case& c, KernelsOfCase& kernels, Reference<Cell>& reference,
                    const Comparison& compare) {
  // In two parts, as a long sequence.
  reference.backward(kernels.saved(), widened(kernels.output));
  kernels.backward(c.length / 2, c.length);
  kernels.backward(0, c.length / 2);
  compare("grad_gates", widened(kernels.grad_gates), reference.grad_products);
  if (Cell::kSeparate) {
    compare("grad_projections", widened(kernels.grad_projections), reference.grad_projections);
  }
  compare("grad_h", kernels.total_grad_h(), reference.grad_h);
  compare("grad_states", widened(kernels.grad_states), reference.grad_states);
  if (kResetsToInitial<Cell>) {
    compare("grad_initial", kernels.total_grad_initial(), reference.grad_initial);
  }
  compare("grad_sums", kernels.total_grad_sums(), reference.grad_sums);
  compare("grad_products", widened(kernels.grad_products), reference.grad_own);
  compare("fed", widened(kernels.fed), reference.fed);
}

template <class Cell, typename T, int kVariant, class Reset, int kHeads = 1>
void check(const Case& c) {
  const Precision precision =
      precision_of<T>(variant_of<T, kVariant>().tf32 || kVariant == kSingleStepOnTensorCores);
  constexpr bool kHasResets = !kIsSame<Reset, NoReset>, kOfBools = kIsSame<Reset, bool>;
  const char* const resets = !kHasResets ? "" : kOfBools ? " resets" : " resets of shares";
  const Comparison compare = {name_of<T>(c, kVariant, resets), precision.tolerance};
  const Steps steps(c);
  using KernelsOfCase = Kernels<Cell, T, kVariant, Reset, kHeads>;
  Inputs inputs(kCellShape<Cell>, c, steps.rows(), kHasResets, kOfBools, precision.value,
                rounded<typename KernelsOfCase::State>);
  clear_between_heads<Cell>(inputs.weight, c.hidden);
  const Values weight = kHeads > 1 ? blocks_of(inputs.weight, c.hidden, kHeads) : inputs.weight;
  Reference<Cell> reference(c, steps, inputs, precision);
  KernelsOfCase kernels(c, steps, inputs, weight);

  reference.forward();
  kernels.forward();
  compare("output", widened(kernels.output), reference.output);
  compare("output_apart", widened(kernels.output_apart), reference.output_apart);
  compare("h_n", widened(kernels.h_n), reference.h);
  compare("states_n", widened(kernels.states_n), reference.states);
  if (!c.save) return compare("gates", widened(kernels.gates), inputs.gates);
  compare("saved", kernels.saved(), reference.saved);
  if constexpr (!is_single_step(kVariant)) check_backward<Cell>(c, kernels, reference, compare);
}

template <class Cell>
void check_persistent() {
  const std::vector<int> of_12_rows = {12, 12, 9, 4, 1};
  // Template arguments: the variant, and the type of resets. Every pair of them is two more kernels to
  // compile. A case: length, batch, hidden size, rows of a group, reverse, rows of the steps, whether values
  // are saved, whether initial states and last gradients are zeros without memory. one row a block
  check<Cell, float, 0, NoReset>({4, 2, 24, 1, true, {}});
  check<Cell, float, 0, NoReset>({4, 3, 21, 1, false, {}});
  check<Cell, float, 1, bool>({5, 3, 40, 1, false, {}});
  check<Cell, float, 1, float>({6, 2, 64, 1, true, {}, /*save=*/false});
  check<Cell, float, 2, NoReset>({11, 2, 72, 1, false, {}});
  check<Cell, float, 2, NoReset>({5, 2, 72, 1, false, {}, /*save=*/true, /*from_zeros=*/true});
  if constexpr (Cell::kGates <= 2) check<Cell, float, 3, NoReset>({5, 2, 104, 1, false, {}});
  check<Cell, __half, 0, NoReset>({4, 3, 21, 1, false, {}});
  check<Cell, __nv_bfloat16, 1, bool>({5, 3, 40, 1, true, {}, /*save=*/true, /*from_zeros=*/true});
  // a block that has all units
  check<Cell, float, 16, bool>({5, 9, 40, 8, false, {}});
  check<Cell, float, 4, NoReset>({4, 6, 24, 8, false, {}});
  check<Cell, __half, 3, NoReset>({4, 6, 24, 8, false, {}});
  check<Cell, __half, 3, NoReset>({4, 6, 24, 8, false, {}, /*save=*/true, /*from_zeros=*/true});
  check<Cell, __nv_bfloat16, 4, float>({4, 11, 72, 8, true, {}});
  if constexpr (Cell::kGates == 1) {
    check<Cell, __half, 5, NoReset>({4, 11, 256, 8, false, {}});
    check<Cell, __half, 5, NoReset>({3, 3, 200, 8, true, {}, /*save=*/true, /*from_zeros=*/true});
    check<Cell, __half, 5, bool>({3, 5, 200, 8, false, {}, /*save=*/false});
    check<Cell, __nv_bfloat16, 5, float>({5, 9, 136, 8, true, {}});
    check<Cell, __nv_bfloat16, 5, NoReset, 2>({3, 4, 272, 8, false, {}});
    // large blocks in clusters of two and more
    check<Cell, __half, 6, NoReset>({4, 11, 384, 8, false, {}});
    check<Cell, __nv_bfloat16, 6, float>({3, 9, 264, 8, true, {}, /*save=*/true, /*from_zeros=*/true});
    check<Cell, float, 8, NoReset>({4, 11, 200, 8, true, {}});
    check<Cell, float, 18, bool>({4, 11, 136, 8, false, {}});
    check<Cell, float, 18, NoReset>({3, 4, 256, 2, false, {}, /*save=*/false});
  }
  // float32, one row tile
  check<Cell, float, 19, NoReset>({11, 5, 24, 8, false, {}});
  check<Cell, float, 19, NoReset>({3, 5, 24, 8, false, {}, /*save=*/false});
  check<Cell, float, 19, NoReset>({4, 3, 24, 1, false, {}});
  check<Cell, float, 19, bool>({4, 3, 24, 2, false, {}});
  check<Cell, float, 19, NoReset>({4, 3, 24, 8, false, {}, /*save=*/true, /*from_zeros=*/true});
  check<Cell, float, 20, bool>({4, 11, 72, 8, true, {}});
  // any number of rows
  check<Cell, float, 22, float>({4, 19, 40, 16, true, {}});
  check<Cell, float, 23, bool>({4, 19, 40, 16, false, {}});
  check<Cell, float, 23, float>({4, 19, 40, 16, false, {}, /*save=*/true, /*from_zeros=*/true});
  check<Cell, float, 23, bool>({5, 12, 40, 16, false, of_12_rows});
  check<Cell, float, 23, float>({5, 12, 40, 16, true, of_12_rows});
  // clusters
  check<Cell, float, 17, bool>({5, 5, 104, 8, false, {}});
  check<Cell, float, 17, float>({5, 10, 72, 3, true, {}});
  check<Cell, float, 17, bool>({4, 10, 72, 8, true, {}, /*save=*/true, /*from_zeros=*/true});
  // TF32
  check<Cell, float, 5, NoReset>({4, 11, 72, 8, false, {}});
  check<Cell, float, 7, float>({5, 11, 104, 8, true, {}});
  check<Cell, float, 10, bool>({4, 6, 72, 8, false, {}});
  check<Cell, float, 14, NoReset>({4, 12, 72, 16, false, {12, 9, 3, 1}});
  // Half types
  check<Cell, __half, 7, bool>({4, 11, 200, 8, true, {}});
  check<Cell, __nv_bfloat16, 7, NoReset>({3, 3, 256, 8, false, {}, /*save=*/true, /*from_zeros=*/true});
  check<Cell, __half, 8, NoReset>({4, 6, 72, 8, false, {}});
  check<Cell, __nv_bfloat16, 9, NoReset>({4, 6, 136, 8, true, {}});
  check<Cell, __half, 12, float>({4, 6, 72, 8, false, {}});
  check<Cell, __half, 14, bool>({4, 12, 72, 16, false, {12, 9, 3, 1}});
  // heads, of a few cells
  if constexpr (Cell::kStates == 3 || kResetsToInitial<Cell>) {
    check<Cell, __half, 3, bool, 3>({4, 6, 72, 8, false, {}});
    check<Cell, __nv_bfloat16, 8, NoReset, 2>({4, 11, 144, 8, true, {}});
    check<Cell, float, 19, float, 2>({5, 5, 48, 8, true, {}});
    check<Cell, float, 23, bool, 2>({5, 12, 80, 16, false, of_12_rows});
  }
}

// Cells whose units read values over all units of their row: in one block, a row in one warp and in two; in
// clusters, with all rows of a tile and with few, a part of whose units may not exist.
template <class Cell>
void check_rows() {
  check<Cell, __half, 3, NoReset>({4, 6, 24, 8, false, {}});
  check<Cell, __half, 4, bool>({4, 11, 104, 8, true, {}});
  check<Cell, __half, 4, bool>({3, 3, 128, 8, false, {}, /*save=*/true, /*from_zeros=*/true});
  check<Cell, __nv_bfloat16, 8, float>({5, 11, 136, 8, true, {}});
  check<Cell, __half, 13, NoReset>({4, 5, 136, 8, false, {}});
  check<Cell, __half, 13, NoReset>({3, 2, 200, 2, true, {}, /*save=*/false});
  check<Cell, float, 7, float>({5, 11, 104, 8, true, {}});
  check<Cell, float, 17, bool>({5, 5, 88, 8, false, {}});
  check<Cell, float, 17, bool>({4, 9, 72, 8, true, {}, /*save=*/true, /*from_zeros=*/true});
  // through L2
  check<Cell, __half, 9, NoReset>({4, 11, 104, 8, false, {}});
  check<Cell, __nv_bfloat16, 12, bool>({5, 3, 136, 8, true, {}});
  check<Cell, float, 19, NoReset>({5, 11, 104, 8, true, {}});
  check<Cell, float, 21, float>({4, 5, 520, 8, false, {}});
}

// Where K has one part and several, blocks have fewer units than others, and rows fewer than the kernel
// takes.
template <class Cell>
void check_small_batch() {
  check<Cell, float, kSmallBatchSteps, NoReset>({4, 1, 68, 0, false, {}});
  check<Cell, float, kSmallBatchSteps, float>({4, 3, 36, 0, true, {}});
  check<Cell, float, kSmallBatchSteps, bool>(
      {3, 7, 140, 0, false, {}, /*save=*/true, /*from_zeros=*/false, /*multiprocessors=*/18});
  check<Cell, float, kSmallBatchSteps, NoReset>({3, 16, 20, 0, true, {}});
  check<Cell, float, kSmallBatchSteps, NoReset>({2, 9, 4, 0, false, {}, /*save=*/false});
  check<Cell, float, kSmallBatchSteps, float>({5, 12, 40, 0, false, {12, 12, 9, 4, 1}});
  check<Cell, float, kSmallBatchSteps, bool>({5, 12, 40, 0, true, {12, 12, 9, 4, 1}});
}

// Steps whose coefficients overflow where the values do not, if they start from zeros.
template <class Cell, typename T>
void check_growing() {
  for (const int thread_steps : {3, 20}) {
    Case c = {205, 3, 6, 0, false, {}, /*save=*/true, /*from_zeros=*/true};
    c.thread_steps = thread_steps;
    check<Cell, T, kIndependent, NoReset>(c);
  }
}

template <class Cell, typename T>
void check_independent() {
  const auto check_sizes = [](int batch, int hidden, std::vector<int> rows_of_steps) {
    const bool packed = !rows_of_steps.empty();
    // Fewer steps than a thread loads ahead, and several times as many.
    for (const int length : packed ? std::vector<int>{static_cast<int>(rows_of_steps.size())}
                                   : std::vector<int>{1, 2, 7, 16, 37}) {
      for (const bool reverse : {false, true}) {
        check<Cell, T, kIndependent, NoReset>({length, batch, hidden, 0, reverse, rows_of_steps});
        check<Cell, T, kIndependent, float>({length, batch, hidden, 0, reverse, rows_of_steps});
        if (!packed) continue;  // the dense ones follow
        Case c = {length, batch, hidden, 0, reverse, rows_of_steps};
        c.thread_steps = 1;
        check<Cell, T, kIndependent, float>(c);
      }
    }
    check<Cell, T, kIndependent, bool>({5, batch, hidden, 0, false, {}, /*save=*/false});
    if (packed) return;
    check<Cell, T, kIndependent, NoReset>(
        {5, batch, hidden, 0, false, {}, /*save=*/true, /*from_zeros=*/true});
    // One tile, and more than a segment of tiles.
    for (const int length : {20, 37, 205}) {
      for (const bool reverse : {false, true}) {
        Case c = {length, batch, hidden, 0, reverse, {}};
        c.thread_steps = length == 20 ? 5 : length == 37 ? 1 : 3;
        check<Cell, T, kIndependent, NoReset>(c);
        check<Cell, T, kIndependent, float>(c);
        c.from_zeros = true;
        check<Cell, T, kIndependent, bool>(c);
      }
    }
  };
  check_sizes(5, 24, {});  // a pair of units a thread, less than a block
  check_sizes(3, 67, {});  // one unit a thread, four blocks
  check_sizes(12, 24, {12, 12, 9, 4, 1});
  check_sizes(12, 7, {12, 12, 12, 12, 12, 12, 12, 12, 9, 9, 9, 9, 9, 4, 4, 4, 4, 1, 1});
}

// Where K is in vectors and where it is not, and rows and units fill a block or do not.
template <class Cell>
void check_single_step() {
  if constexpr (has_single_step(kCellShape<Cell>)) {
    check<Cell, float, kSingleStep, NoReset>({1, 1, 24, 0, false, {}});
    check<Cell, float, kSingleStep, NoReset>({1, 4, 21, 0, false, {}});
    check<Cell, float, kSingleStep, NoReset>({1, 16, 40, 0, false, {}, /*save=*/false});
    check<Cell, __half, kSingleStep, NoReset>({1, 1, 21, 0, false, {}});
    check<Cell, __half, kSingleStep, NoReset>({1, 9, 40, 0, false, {}});
    check<Cell, __nv_bfloat16, kSingleStep, NoReset>({1, 8, 2, 0, false, {}});
    check<Cell, float, kSingleStep, NoReset>({1, 1, 136, 0, false, {}});
    check<Cell, __half, kSingleStep, NoReset>({1, 10, 132, 0, false, {}});
    check<Cell, float, kSingleStepOnTensorCores, NoReset>({1, 2, 20, 0, false, {}});
    check<Cell, float, kSingleStepOnTensorCores, NoReset>({1, 17, 36, 0, false, {}, /*save=*/false});
    check<Cell, __half, kSingleStepOnTensorCores, NoReset>({1, 9, 40, 0, false, {}});
    check<Cell, __half, kSingleStepOnTensorCores, NoReset>({1, 8, 264, 0, false, {}});
    check<Cell, __nv_bfloat16, kSingleStepOnTensorCores, NoReset>({1, 33, 16, 0, false, {}});
  }
}

constexpr bool equal(const char* a, const char* b) {
  while (*a && *a == *b) ++a, ++b;
  return *a == *b;
}
// Which checks a cell without a product has: to compile all types of each would take minutes.
enum class Checks { kGrowing, kAllTypes, kTwoTypes };
constexpr Checks checks_of(const char* name) {
  if (equal(name, "growing")) return Checks::kGrowing;
  return equal(name, "without_product") || equal(name, "mingru") ? Checks::kAllTypes : Checks::kTwoTypes;
}

template <class Cell, Checks kChecks>
void check_all() {
  if constexpr (kCellShape<Cell>.mixes_units()) {
    check_rows<Cell>();
  } else if constexpr (Cell::kRecurrent) {
    check_persistent<Cell>();
    check_small_batch<Cell>();
    check_single_step<Cell>();
  } else if constexpr (kChecks == Checks::kGrowing) {
    check_growing<Cell, float>();
    check_growing<Cell, __half>();
  } else {
    check_independent<Cell, float>();
    check_independent<Cell, __nv_bfloat16>();
    if constexpr (kChecks == Checks::kAllTypes) {
      check_independent<Cell, double>();
      check_independent<Cell, __half>();
    }
  }
}

}  // namespace
}  // namespace lltm_ext

int main(int count, char** arguments) {
  const std::string cell = count == 2 ? arguments[1] : "";
  bool known = false;
#define CHECK_CELL(name, ...) \
  if (cell == name) known = true, lltm_ext::check_all<__VA_ARGS__, lltm_ext::checks_of(name)>();
  FOR_ALL_CELLS(CHECK_CELL)
  if (!known) std::printf("expected the name of a cell in cells.h, got '%s'\n", cell.c_str());
  return known && lltm_ext::failures == 0 ? 0 : 1;
}
