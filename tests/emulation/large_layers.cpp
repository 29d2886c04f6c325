// The kernels of large layers on the CPU: all results of a sequence, what it saves for backward, and its
// gradients are compared with loops over the steps.
#include "cuda_on_cpu.h"
#include "lltm/lltm_cell.h"
#include "lstm/lstm_cell.h"
#include "recurrence/large/backward.cuh"
#include "recurrence/large/forward.cuh"

using namespace lltm_ext;

namespace {

// All that a cell of the contract can read: products apart, h, parameters and step inputs.
struct GruOfAll : CellDefaults {
  static constexpr int kGates = 3, kStates = 1, kSaved = 6, kParameters = 2, kStepInputs = 1;
  static constexpr bool kSeparate = true, kReadsH = true;

  template <typename Math, typename A>
  static A forward(const CellInputs<GruOfAll, A>& in, A (&states)[1], A (&saved)[kSaved]) {
    const A r = Math::sigmoid(in.x[0] + in.r[0]), z = Math::sigmoid(in.x[1] + in.r[1] + in.parameters[0]);
    const A n = Math::tanh(in.x[2] + r * in.r[2] + in.parameters[1] * states[0]);
    saved[0] = r, saved[1] = z, saved[2] = n, saved[3] = states[0], saved[4] = in.r[2], saved[5] = in.h;
    states[0] = A(.5) * states[0] + n * in.steps[0];
    return z * in.h + (A(1) - z) * n;
  }
  template <typename Math, typename A>
  static void backward(const A (&saved)[kSaved], const CellInputs<GruOfAll, A>& in, A grad_h,
                       A (&grad_states)[1], CellGradients<GruOfAll, A>& grads) {
    const A r = saved[0], z = saved[1], n = saved[2], state = saved[3], product = saved[4], h = saved[5];
    const A of_n = (grad_h * (A(1) - z) + grad_states[0] * in.steps[0]) * (A(1) - n * n);
    const A of_z = grad_h * (h - n) * z * (A(1) - z), of_r = of_n * product * r * (A(1) - r);
    grads.x[0] = of_r, grads.x[1] = of_z, grads.x[2] = of_n;
    grads.r[0] = of_r, grads.r[1] = of_z, grads.r[2] = of_n * r;
    grads.parameters[0] = of_z, grads.parameters[1] = of_n * state;
    grads.h = grad_h * z;
    grad_states[0] = A(.5) * grad_states[0] + of_n * in.parameters[1];
  }
};

// Projections in float32, and the state as the output.
struct WideRnn : CellDefaults {
  static constexpr int kGates = 1, kStates = 1, kSaved = 2, kOutputState = 0;
  static constexpr bool kWideProjections = true;

  template <typename Math, typename A>
  static A forward(const CellInputs<WideRnn, A>& in, A (&states)[1], A (&saved)[kSaved]) {
    saved[0] = states[0], saved[1] = Math::tanh(in.x[0]);
    states[0] = A(.5) * states[0] + saved[1];
    return saved[1];
  }
  template <typename Math, typename A>
  static void backward(const A (&saved)[kSaved], const CellInputs<WideRnn, A>&, A grad_h, A (&grad_states)[1],
                       CellGradients<WideRnn, A>& grads) {
    grads.x[0] = (grad_h + grad_states[0]) * (A(1) - saved[1] * saved[1]);
    grad_states[0] *= A(.5);
  }
};

enum class Reset { kNone, kBool, kShare };
struct Problem {
  int batch, hidden, length;
  bool reverse, from_zeros, narrow_states;
};

float random(float scale) {
  static uint64_t state = 1;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (static_cast<float>(state >> 40) / 8388608.f - 1) * scale;
}
template <typename X>
std::vector<X> randoms(int64_t count, float scale = 1) {
  std::vector<X> values(std::max<int64_t>(count, 1));
  for (X& value : values) value = static_cast<X>(random(scale));
  return values;
}

template <class Cell, typename T, int kTile, Reset kReset>
class Test {
  using Config = hopper::LargeConfig<Cell, T, kTile, kReset != Reset::kNone>;
  using Projection = projection_t<Cell, T>;
  static constexpr LargeShape kShape = Config::kShape;
  static constexpr int G = Cell::kGates, S = Cell::kStates, P = Cell::kParameters, K = Cell::kStepInputs,
                       V = Cell::kSaved, E = kShape.cell.extra(),
                       kSavedInGates = kShape.cell.saved_in_gates();

 public:
  explicit Test(const Problem& problem) : p(problem) {
    for (int64_t i = 0; i < S * state; ++i) {
      states0[i] = static_cast<float>(narrow_states0[i]) + (p.narrow_states ? 0 : .01f);
    }
    for (int64_t i = 0; i < rows; ++i) {
      const float x = random(1);
      if (kReset == Reset::kBool) lost[i] = x > .5f;
      if (kReset == Reset::kShare) lost[i] = x > .6f ? 1 : x > .2f ? .25f : 0;
      is_lost[i] = lost[i] == 1;
    }
    s.steps = {p.length, p.batch, p.reverse, nullptr};
    s.hidden = p.hidden;
    s.save = true;
    s.narrow_states = p.narrow_states;
    s.reset_is_bool = kReset == Reset::kBool;
    s.weight = weight.data(), s.parameters = parameters.data(), s.step_inputs = step_inputs.data();
    if (kReset == Reset::kBool) s.reset = is_lost.data();
    if (kReset == Reset::kShare) s.reset = lost.data();
    if (!p.from_zeros) s.h0 = h0.data();
    if (!p.from_zeros && p.narrow_states) s.states0 = narrow_states0.data();
    if (!p.from_zeros && !p.narrow_states) s.states0 = states0.data();
    s.gates = reinterpret_cast<T*>(gates.data()), s.extra = extra.data(), s.output = output.data();
    s.output_apart = output_apart.data(), s.h_n = h_n.data(), s.states_n = states_n.data();
  }

  // Two launches, if there are several groups.
  void run() {
    LargeGrid grid = {kTile, kShape.group_pairs(p.hidden)};
    grid.groups = static_cast<int>(ceil_div(p.batch, kShape.tile.group_rows()));
    std::vector<unsigned> arrivals(kShape.arrival_bytes(grid) / sizeof(unsigned));
    LargeForwardArguments<T> args = {s, {}, {}, arrivals.data(), grid.group_pairs, 0};
    args.h = map_of(output, p.length);
    args.h0 = p.from_zeros ? args.h : map_of(h0, 1);
    const int first_groups = (grid.groups + 1) / 2;
    for (const int groups : {first_groups, grid.groups - first_groups}) {
      if (groups == 0) break;
      cuda_on_cpu::run({2 * grid.group_pairs * groups, LargeShape::kThreads, /*cluster_blocks=*/2,
                        static_cast<size_t>(kShape.shared_bytes())},
                       [&] { hopper::run_large_forward<Config>(args); });
      args.first_group += groups;
    }
  }

  bool passes() {
    std::vector<float> h(state), states(S * state);
    for (int64_t i = 0; i < state && !p.from_zeros; ++i) h[i] = static_cast<float>(h0[i]);
    if (!p.from_zeros) states.assign(states0.begin(), states0.begin() + S * state);
    for (int k = 0; k < p.length; ++k) step(s.steps.at(k).first, h, states);
    for (int64_t i = 0; i < state; ++i) check(h_n[i], h[i]);
    for (int64_t i = 0; i < S * state; ++i) {
      check(p.narrow_states ? static_cast<float>(reinterpret_cast<T*>(states_n.data())[i]) : states_n[i],
            states[i]);
    }
    // The largest value is below 4.
    return largest <= (std::is_same_v<T, __half> ? 0x1p-9 : 0x1p-6);
  }
  double largest_difference() const { return largest; }

 private:
  CUtensorMap map_of(const std::vector<T>& of, int matrices) const {
    const auto* const data = reinterpret_cast<const uint16_t*>(of.data());
    return {data, p.hidden, p.batch, matrices, p.hidden, state, kShape.tile.rows};
  }
  template <typename X>
  void check(X found, float expected, bool may_be_folded = false) {
    double difference = std::abs(static_cast<double>(static_cast<float>(found)) - expected);
    // Near 1/2 one of them may be folded (common/math.h) and the other not.
    if (may_be_folded && difference > .9) difference = std::abs(difference - 1);
    if (!(difference <= largest)) largest = difference == difference ? difference : INFINITY;
  }

  void step(int64_t first, std::vector<float>& h, std::vector<float>& states) {
    const std::vector<float> old_h = h;
    for (int64_t i = 0; i < state; ++i) {
      const int64_t b = i / p.hidden, unit = i % p.hidden, row = first + b;
      const float kept = 1 - lost[row];
      CellInputs<Cell, float> in;
      for (int g = 0; g < G; ++g) {
        double product = 0;
        for (int j = 0; j < p.hidden; ++j) {
          product += static_cast<double>(old_h[b * p.hidden + j]) *
                     static_cast<float>(weight[(int64_t{g} * p.hidden + unit) * p.hidden + j]);
        }
        in.x[g] = static_cast<float>(projections[(row * G + g) * p.hidden + unit]);
        (Cell::kSeparate ? in.r[Cell::kSeparate ? g : 0] = 0 : in.x[g]) += static_cast<float>(kept * product);
      }
      in.h = kept * old_h[i];
      for (int j = 0; j < P; ++j) in.parameters[j] = static_cast<float>(parameters[j * p.hidden + unit]);
      for (int j = 0; j < K; ++j)
        in.steps[j] = static_cast<float>(step_inputs[(row * K + j) * p.hidden + unit]);
      float mine[at_least_one(S)], saved[V];
      for (int j = 0; j < S; ++j) mine[j] = kept * states[j * state + i];
      h[i] = static_cast<float>(T(Cell::template forward<ExactMath>(in, mine, saved)));
      for (int j = 0; j < S; ++j) states[j * state + i] = mine[j];
      check(output[row * p.hidden + unit], h[i]);
      if (kShape.cell.has_output_apart()) check(output_apart[row * p.hidden + unit], mine[0]);
      for (int v = 0; v < V; ++v) {
        check(v < kSavedInGates ? s.gates[(row * G + v) * p.hidden + unit]
                                : extra[(row * E + v - kSavedInGates) * p.hidden + unit],
              saved[v], /*may_be_folded=*/true);
      }
    }
  }

  const Problem p;
  const int64_t rows = int64_t{p.length} * p.batch, state = int64_t{p.batch} * p.hidden;
  std::vector<Projection> gates = randoms<Projection>(rows * G * p.hidden);
  const std::vector<Projection> projections = gates;
  const std::vector<T> weight = randoms<T>(int64_t{G} * p.hidden * p.hidden, 1.7f / std::sqrt(p.hidden));
  const std::vector<T> parameters = randoms<T>(P * p.hidden), step_inputs = randoms<T>(rows * K * p.hidden),
                       h0 = randoms<T>(state), narrow_states0 = randoms<T>(S * state);
  std::vector<float> states0 = std::vector<float>(at_least_one(S) * state), lost = std::vector<float>(rows);
  std::vector<char> is_lost = std::vector<char>(rows);
  // What the kernel does not write is NaN.
  std::vector<T> extra = randoms<T>(rows * E * p.hidden, NAN), output = randoms<T>(rows * p.hidden, NAN),
                 output_apart = output, h_n = randoms<T>(state, NAN);
  std::vector<float> states_n = randoms<float>(S * state, NAN);
  SequenceForwardArguments<T> s = {};
  double largest = 0;
};

// The steps run in two chunks, the last ones first.
template <class Cell, typename T, int kTile, Reset kReset>
class BackwardTest {
  using Config = hopper::LargeBackwardConfig<Cell, T, kTile, kReset != Reset::kNone>;
  static constexpr LargeShape kShape = Config::kShape;
  static constexpr int G = Cell::kGates, S = Cell::kStates, P = Cell::kParameters, K = Cell::kStepInputs,
                       V = Cell::kSaved, E = kShape.cell.extra(), kSums = G + P,
                       kSavedInGates = kShape.cell.saved_in_gates();

 public:
  explicit BackwardTest(const Problem& problem) : p(problem) {
    for (int64_t i = 0; i < rows; ++i) {
      const float x = random(1);
      if (kReset == Reset::kBool) lost[i] = x > .5f;
      if (kReset == Reset::kShare) lost[i] = x > .6f ? 1 : x > .2f ? .25f : 0;
      is_lost[i] = lost[i] == 1;
    }
    for (int64_t unit = 0; unit < p.hidden; ++unit) {
      for (int64_t k = 0; k < G * p.hidden; ++k)
        weight_t[unit * G * p.hidden + k] = weight[k * p.hidden + unit];
    }
    s.steps = {p.length, p.batch, p.reverse, nullptr};
    s.hidden = p.hidden;
    s.reset_is_bool = kReset == Reset::kBool;
    s.weight_t = weight_t.data(), s.parameters = parameters.data(), s.step_inputs = step_inputs.data();
    if (kReset == Reset::kBool) s.reset = is_lost.data();
    if (kReset == Reset::kShare) s.reset = lost.data();
    s.gates = gates.data(), s.extra = extra.data();
    if (!p.narrow_states) s.grad_output = grad_output.data();
    s.grad_h = grad_h.data(), s.grad_own_h = grad_own_h.data(), s.grad_states = grad_states.data();
    s.grad_sums = grad_sums.data();
  }

  void run() {
    std::vector<float> h(state), own_h = grad_own_h, states = grad_states;
    for (int64_t i = 0; i < state; ++i) h[i] = static_cast<float>(grad_h[i]);
    if (p.from_zeros) {
      for (std::vector<float>* x : {&h, &own_h, &states}) std::fill(x->begin(), x->end(), 0.f);
      // The kernel does not read them.
      std::fill(grad_own_h.begin(), grad_own_h.end(), NAN);
      std::fill(grad_states.begin(), grad_states.end(), NAN);
      std::fill(grad_h.begin(), grad_h.end(), T(NAN));
    }
    const int middle = p.length / 2;
    run_steps(middle, p.length, p.from_zeros);
    if (middle > 0) run_steps(0, middle, /*from_zeros=*/false);
    for (int k = p.length - 1; k >= 0; --k) step(k, h, own_h, states);
    for (int64_t i = 0; i < state; ++i) {
      check(grad_h[i], h[i]);
      if (Cell::kReadsH) check(grad_own_h[i], own_h[i]);
    }
    for (int64_t i = 0; i < S * state; ++i) check(grad_states[i], states[i]);
    for (int64_t i = 0; i < kSums * p.hidden; ++i) {
      double sum = 0;
      for (int b = 0; b < p.batch; ++b) sum += grad_sums[b * kSums * p.hidden + i];
      check(static_cast<float>(sum), static_cast<float>(sums[i]));
    }
  }
  bool passes() const {
    return largest <= (std::is_same_v<T, __half> ? 0x1p-7 : 0x1p-4) && largest_value > .5;
  }
  double largest_difference() const { return largest; }

 private:
  // Two launches, if there are several groups.
  void run_steps(int begin, int end, bool from_zeros) {
    s.begin = begin, s.end = end, s.from_zeros = from_zeros;
    s.first_row = std::min(s.steps.at(begin).first, s.steps.at(end - 1).first);
    s.rows = int64_t{end - begin} * p.batch;
    s.grad_gates = grad_gates.data() + s.first_row * G * p.hidden;
    s.grad_projections = grad_projections.data() + s.first_row * G * p.hidden;
    LargeGrid grid = {kTile, kShape.group_pairs(p.hidden)};
    grid.groups = static_cast<int>(ceil_div(p.batch, kShape.tile.group_rows()));
    std::vector<unsigned> arrivals(kShape.arrival_bytes(grid) / sizeof(unsigned));
    LargeBackwardArguments<T> args = {s, {}, arrivals.data(), grid.group_pairs, 0};
    const auto* const data = reinterpret_cast<const uint16_t*>(s.grad_gates);
    args.grad_gates = {data, p.hidden, s.rows, G, int64_t{G} * p.hidden, p.hidden, kShape.tile.rows};
    const int first_groups = (grid.groups + 1) / 2;
    for (const int groups : {first_groups, grid.groups - first_groups}) {
      if (groups == 0) break;
      cuda_on_cpu::run({2 * grid.group_pairs * groups, LargeShape::kThreads, kShape.cluster_blocks(),
                        static_cast<size_t>(kShape.shared_bytes())},
                       [&] { hopper::run_large_backward<Config>(args); });
      args.first_group += groups;
    }
  }
  template <typename X>
  void check(X found, float expected) {
    const double difference = std::abs(static_cast<double>(static_cast<float>(found)) - expected);
    // The sums, and the gradients of many steps, are larger than 1.
    const double relative = difference / std::max(1.f, std::abs(expected));
    if (!(relative <= largest)) largest = relative == relative ? relative : INFINITY;
    largest_value = std::max<double>(largest_value, std::abs(expected));
  }

  void step(int k, std::vector<float>& h, std::vector<float>& own_h, std::vector<float>& states) {
    const int64_t first = s.steps.at(k).first;
    std::vector<float> gradients(state * G);
    for (int64_t i = 0; i < state; ++i) {
      const int64_t b = i / p.hidden, unit = i % p.hidden, row = first + b;
      const float kept = 1 - lost[row];
      CellInputs<Cell, float> in;
      CellGradients<Cell, float> grads;
      float saved[V], mine[at_least_one(S)], of_h = h[i];
      for (int v = 0; v < V; ++v) {
        saved[v] =
            static_cast<float>(v < kSavedInGates ? gates[(row * G + v) * p.hidden + unit]
                                                 : extra[(row * E + v - kSavedInGates) * p.hidden + unit]);
      }
      for (int j = 0; j < P; ++j) in.parameters[j] = static_cast<float>(parameters[j * p.hidden + unit]);
      for (int j = 0; j < K; ++j) {
        in.steps[j] = static_cast<float>(step_inputs[(row * K + j) * p.hidden + unit]);
      }
      for (int j = 0; j < S; ++j) mine[j] = states[j * state + i];
      if (s.grad_output) {
        gradient_of_output<Cell>(of_h, mine, 0) += static_cast<float>(grad_output[row * p.hidden + unit]);
      }
      if (Cell::kReadsH) of_h += own_h[i];
      Cell::template backward<ExactMath>(saved, in, of_h, mine, grads);
      for (int j = 0; j < S; ++j) states[j * state + i] = kept * mine[j];
      own_h[i] = kept * grads.h;
      for (int g = 0; g < G; ++g) {
        const int64_t at = (row * G + g) * p.hidden + unit;
        check(grad_gates[at], grads.product(g));
        if (Cell::kSeparate) check(grad_projections[at], grads.x[g]);
        gradients[(b * G + g) * p.hidden + unit] = static_cast<float>(T(grads.product(g)));
        sums[g * p.hidden + unit] += grads.x[g];
      }
      for (int j = 0; j < P; ++j) sums[(G + j) * p.hidden + unit] += grads.parameters[j];
    }
    for (int64_t i = 0; i < state; ++i) {
      const int64_t b = i / p.hidden, unit = i % p.hidden;
      double product = 0;
      for (int64_t j = 0; j < G * p.hidden; ++j) {
        product += static_cast<double>(gradients[b * G * p.hidden + j]) *
                   static_cast<float>(weight_t[unit * G * p.hidden + j]);
      }
      h[i] = static_cast<float>((1 - lost[first + b]) * product);
    }
  }

  const Problem p;
  const int64_t rows = int64_t{p.length} * p.batch, state = int64_t{p.batch} * p.hidden;
  const std::vector<T> weight = randoms<T>(int64_t{G} * p.hidden * p.hidden, 1.7f / std::sqrt(p.hidden)),
                       parameters = randoms<T>(P * p.hidden), step_inputs = randoms<T>(rows * K * p.hidden),
                       gates = randoms<T>(rows * G * p.hidden), extra = randoms<T>(rows * E * p.hidden),
                       grad_output = randoms<T>(rows * p.hidden);
  std::vector<T> weight_t = weight, grad_h = randoms<T>(state);
  std::vector<float> grad_own_h = randoms<float>(state), grad_states = randoms<float>(S * state),
                     grad_sums = std::vector<float>(kSums * state), lost = std::vector<float>(rows);
  std::vector<double> sums = std::vector<double>(kSums * p.hidden);
  std::vector<char> is_lost = std::vector<char>(rows);
  // What the kernel does not write is NaN.
  std::vector<T> grad_gates = randoms<T>(rows * G * p.hidden, NAN), grad_projections = grad_gates;
  SequenceBackwardArguments<T> s = {};
  double largest = 0, largest_value = 0;
};

// The LSTM and the LLTM in float32, whose products have operands of float16. The reference is a loop in
// float64. Errors are relative to the root mean square of what they are errors of, so that small values count
// as much as large ones: h, the state and each of the saved values.
struct FloatProblem {
  int batch, hidden, length;
  bool reverse, from_zeros;
  float inputs = 1, h0 = 1;  // sizes
  // Units of the third gate have projections and weights of sizes from 1e-28 to 1e20. Only that gate's saved
  // values are compared, those of each unit apart: other values would differ where such a sum changes sign.
  bool of_all_sizes = false;
  float bad = 0;  // an infinity or NaN in a row of the weights
};

template <class Cell, int kTile, Reset kReset>
class FloatTest {
  using Config = hopper::LargeConfig<Cell, float, kTile, kReset != Reset::kNone>;
  static constexpr LargeShape kShape = Config::kShape;
  static constexpr int G = Cell::kGates, V = Cell::kSaved, E = kShape.cell.extra(), kThirdGate = 2;

 public:
  explicit FloatTest(const FloatProblem& problem) : p(problem) {
    for (int64_t i = 0; i < rows && kReset == Reset::kBool; ++i) is_lost[i] = random(1) > .5f;
    for (int64_t unit = 0; unit < p.hidden && p.of_all_sizes; ++unit) {
      const float scale = std::vector<float>{1e20f, 1e-20f, 1e-28f, 0, 1}[unit % 5];
      const int64_t row = kThirdGate * p.hidden + unit;
      for (int j = 0; j < p.hidden; ++j) weight[row * p.hidden + j] *= scale;
      for (int64_t i = 0; i < rows; ++i) gates[i * G * p.hidden + row] *= scale;
    }
    projections = gates;
    if (p.bad != 0) weight[(p.hidden + 5) * p.hidden + p.hidden - 1] = p.bad;
  }

  void run() {
    SequenceForwardArguments<float> s = {};
    s.steps = {p.length, p.batch, p.reverse, nullptr};
    s.hidden = p.hidden, s.save = true, s.reset_is_bool = true;
    s.weight = weight.data();
    if (kReset == Reset::kBool) s.reset = is_lost.data();
    if (!p.from_zeros) s.h0 = h0.data(), s.states0 = states0.data();
    s.gates = gates.data(), s.extra = extra.data(), s.output = output.data();
    s.h_n = h_n.data(), s.states_n = states_n.data();
    LargeGrid grid = {kTile, kShape.group_pairs(p.hidden)};
    grid.groups = static_cast<int>(ceil_div(p.batch, kShape.tile.group_rows()));
    std::vector<unsigned> arrivals(kShape.arrival_bytes(grid) / sizeof(unsigned));
    std::vector<uint16_t> exchanged(2 * state, 0x7fff);  // NaN
    std::vector<float> products(state * G);
    for (int64_t i = 0; i < state * G; ++i) {
      const float* const h = h0.data() + i / (G * p.hidden) * p.hidden;
      products[i] = static_cast<float>(product_of(h, i % (G * p.hidden)));
    }
    LargeForwardArguments<float> args = {s, {}, {}, arrivals.data(), grid.group_pairs, 0};
    args.exchanged = exchanged.data();
    if (!p.from_zeros) args.first_products = products.data();
    args.h = {exchanged.data(), p.hidden, p.batch, 2, p.hidden, state, kShape.tile.rows};
    args.h0 = args.h;
    cuda_on_cpu::run({2 * grid.group_pairs * grid.groups, LargeShape::kThreads, /*cluster_blocks=*/2,
                      static_cast<size_t>(kShape.shared_bytes())},
                     [&] { hopper::run_large_forward<Config>(args); });
  }

  bool passes() {
    std::vector<double> h(state), c(state);
    for (int64_t i = 0; i < state && !p.from_zeros; ++i) h[i] = h0[i], c[i] = states0[i];
    const StepOrder order = {p.length, p.batch, p.reverse, nullptr};
    for (int k = 0; k < p.length; ++k) step(order.at(k).first, h, c);
    for (int64_t i = 0; i < state && !p.of_all_sizes; ++i) {
      check(0, h_n[i], h[i]), check(1, states_n[i], c[i]);
    }
    return difference() <= 0x1p-10 && same_classes && finite > 0;
  }
  double difference() const {
    double largest = 0;
    for (const Errors& x : of) {
      if (x.errors > 0) largest = std::max(largest, std::sqrt(x.errors / x.squares));
    }
    return largest;
  }

 private:
  struct Errors {
    double errors = 0, squares = 0;
  };

  template <typename X>
  double product_of(const X* h, int64_t row) const {
    double product = 0;
    for (int j = 0; j < p.hidden; ++j) product += static_cast<double>(h[j]) * weight[row * p.hidden + j];
    return product;
  }
  void check(int kind, float found, double expected, bool may_be_folded = false) {
    same_classes = same_classes && std::isnan(found) == std::isnan(expected);
    if (std::isnan(expected)) return;
    double error = std::abs(found - expected);
    if (may_be_folded && error > .9 && error < 1.1) error = std::abs(error - 1);
    of[kind].errors += error * error, of[kind].squares += expected * expected;
    ++finite;
  }
  void step(int64_t first, std::vector<double>& h, std::vector<double>& c) {
    const std::vector<double> old_h = h;
    for (int64_t i = 0; i < state; ++i) {
      const int64_t b = i / p.hidden, unit = i % p.hidden, row = first + b;
      const bool lost = is_lost[row];
      CellInputs<Cell, double> in;
      for (int g = 0; g < G; ++g) {
        in.x[g] = projections[(row * G + g) * p.hidden + unit];
        if (!lost) in.x[g] += product_of(old_h.data() + b * p.hidden, g * p.hidden + unit);
      }
      double mine[1] = {lost ? 0 : c[i]}, saved[V];
      h[i] = Cell::template forward<ExactMath>(in, mine, saved);
      c[i] = mine[0];
      if (p.of_all_sizes) {
        check(unit, gates[(row * G + kThirdGate) * p.hidden + unit], saved[kThirdGate]);
        continue;
      }
      check(0, output[row * p.hidden + unit], h[i]);
      for (int v = 0; v < V; ++v) {
        check(2 + v,
              v < G ? gates[(row * G + v) * p.hidden + unit] : extra[(row * E + v - G) * p.hidden + unit],
              saved[v], /*may_be_folded=*/true);
      }
    }
  }

  const FloatProblem p;
  const int64_t rows = int64_t{p.length} * p.batch, state = int64_t{p.batch} * p.hidden;
  std::vector<float> gates = randoms<float>(rows * G * p.hidden, p.inputs), projections,
                     weight = randoms<float>(int64_t{G} * p.hidden * p.hidden, 1.7f / std::sqrt(p.hidden));
  const std::vector<float> h0 = randoms<float>(state, p.h0), states0 = randoms<float>(state, p.inputs);
  std::vector<char> is_lost = std::vector<char>(rows);
  // What the kernel does not write is NaN.
  std::vector<float> extra = randoms<float>(rows * E * p.hidden, NAN),
                     output = randoms<float>(rows * p.hidden, NAN), h_n = randoms<float>(state, NAN),
                     states_n = h_n;
  std::vector<Errors> of = std::vector<Errors>(2 + V + p.hidden);
  bool same_classes = true;
  int64_t finite = 0;
};

int failed = 0;
void report(const char* name, int tile, double difference, bool passes) {
  std::printf("%s, tile %d: differs by %.2g%s\n", name, tile, difference, passes ? "" : ", FAILED");
  failed += !passes;
}
template <class Cell, typename T, int kTile, Reset kReset>
void test(const char* name, const Problem& problem) {
  Test<Cell, T, kTile, kReset> test(problem);
  test.run();
  const bool passes = test.passes();
  report(name, kTile, test.largest_difference(), passes);
}
template <class Cell, int kTile, Reset kReset = Reset::kNone>
void test_float(const char* name, const FloatProblem& problem) {
  FloatTest<Cell, kTile, kReset> test(problem);
  test.run();
  const bool passes = test.passes();
  report(name, kTile, test.difference(), passes);
}
template <class Cell, typename T, int kTile, Reset kReset>
void test_backward(const char* name, const Problem& problem) {
  BackwardTest<Cell, T, kTile, kReset> test(problem);
  test.run();
  report(name, kTile, test.largest_difference(), test.passes());
}

}  // namespace

int main() {
  // A batch, a hidden size, steps; whether in reverse, from zeros, and with states of T
  test<LstmCell, __half, 0, Reset::kNone>("lstm", {150, 72, 4, true, true, false});
  test<LstmCell, __half, 1, Reset::kNone>("lstm", {70, 128, 3, false, false, false});
  test<LstmCell, __half, 2, Reset::kNone>("lstm", {70, 64, 3, false, false, false});
  test<LstmCell, __nv_bfloat16, 2, Reset::kBool>("lstm", {200, 64, 3, false, false, false});
  test<LstmCell, __half, 3, Reset::kShare>("lstm", {50, 128, 4, true, false, false});
  test<LstmCell, __half, 7, Reset::kNone>("lstm", {100, 136, 3, false, false, true});
  test<GruOfAll, __half, 1, Reset::kShare>("gru", {70, 128, 3, false, false, true});
  test<GruOfAll, __half, 7, Reset::kBool>("gru", {70, 64, 3, true, false, false});
  test<WideRnn, __half, 1, Reset::kNone>("rnn", {70, 64, 1, false, false, false});

  // A batch, a hidden size, steps; whether in reverse, and from zeros
  test_float<LstmCell, 0>("float32", {150, 72, 6, true, false});
  test_float<LstmCell, 1>("float32", {250, 64, 4, false, false});
  test_float<LstmCell, 2>("float32", {70, 128, 7, false, true});
  test_float<LltmCell, 2, Reset::kBool>("float32 lltm, resets", {130, 72, 6, true, false});
  test_float<LstmCell, 3>("float32", {34, 136, 4, false, false});
  test_float<LstmCell, 4>("float32", {70, 64, 4, false, false});
  test_float<LstmCell, 5>("float32", {70, 64, 4, false, false});
  test_float<LstmCell, 6>("float32", {34, 64, 4, false, false});
  test_float<LstmCell, 7>("float32", {100, 136, 4, true, false});
  test_float<LstmCell, 0>("float32, h0 of 1e5", {40, 128, 5, false, false, 1, 1e5f});
  test_float<LstmCell, 0>("float32, inputs of 1e-8", {40, 128, 5, false, true, 1e-8f});
  test_float<LltmCell, 0>("float32 lltm, weights of all sizes", {40, 128, 2, false, false, 1, 1, true});
  test_float<LstmCell, 0>("float32, infinity", {40, 128, 4, false, false, 1, 1, false, INFINITY});
  test_float<LstmCell, 0>("float32, infinity", {40, 128, 2, false, true, 1, 1, false, -INFINITY});
  test_float<LstmCell, 0>("float32, NaN", {40, 128, 2, false, false, 1, 1, false, NAN});

  // The same, but without gradients of the output in place of states of T.
  test_backward<LstmCell, __half, 1, Reset::kNone>("lstm backward", {70, 72, 4, true, true, false});
  test_backward<LstmCell, __half, 5, Reset::kNone>("lstm backward", {70, 128, 3, false, false, true});
  test_backward<LstmCell, __half, 6, Reset::kShare>("lstm backward", {70, 64, 4, true, false, false});
  test_backward<LstmCell, __nv_bfloat16, 0, Reset::kBool>("lstm backward", {150, 64, 3, false, false, false});
  test_backward<LstmCell, __half, 7, Reset::kNone>("lstm backward", {34, 136, 3, false, false, false});
  test_backward<LstmCell, __half, 8, Reset::kNone>("lstm backward", {70, 64, 2, false, false, false});
  test_backward<GruOfAll, __half, 2, Reset::kShare>("gru backward", {70, 128, 3, false, false, false});
  test_backward<GruOfAll, __half, 3, Reset::kBool>("gru backward", {70, 64, 3, true, false, false});
  test_backward<WideRnn, __half, 0, Reset::kNone>("rnn backward", {70, 64, 1, false, false, false});
  return failed;
}
