// Compares the kernel of scan and of its backward, on the CPU (cuda_on_cpu.h), with a loop over the steps in
// double.
//
//   scan
//
// prints a line for each result that differs. The exit status is 0 if none does.
// tests/test_emulated_kernels.py runs it.
#include <complex>
#include <limits>
#include <random>
#include <string>

#include "cuda_on_cpu.h"
#include "scan/serial.cuh"
#include "scan/tiles.cuh"

namespace lltm_ext {
namespace {

using Number = std::complex<double>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- values

template <typename T>
struct Element {
  static constexpr bool kComplex = false;
  static constexpr double kRounding = sizeof(T) == 8 ? 0x1p-53 : 0x1p-24;
  // Of the result and of the expected value.
  static constexpr double kStored = sizeof(T) > 2 ? 0 : kIsSame<T, __half> ? 0x1p-10 : 0x1p-7;
  static T from(Number x) { return narrow<T>(static_cast<acc_t<T>>(x.real())); }
  static Number to(T x) { return static_cast<double>(widen(x)); }
};
template <typename R>
struct Element<Complex<R>> {
  static constexpr bool kComplex = true;
  static constexpr double kRounding = Element<R>::kRounding * 2, kStored = 0;
  static Complex<R> from(Number x) { return {static_cast<R>(x.real()), static_cast<R>(x.imag())}; }
  static Number to(Complex<R> x) { return {x.real, x.imaginary}; }
};

enum class Values {
  kNormal,    // |a| around 1
  kGrowing,   // a = 4, and b is 0 up to the last steps
  kFixed,     // a = 2, b = -1, and the state stays 1
  kDecaying,  // |a| below 1e-20, so that products underflow, with an infinite b
  kZeros,     // some a are 0
  kDiverging  // states overflow, and some b are NaN; resets follow
};

struct Case {
  int64_t steps, rows, columns;  // channels are rows x columns
  // Of a; of b and the results.
  int a_layout, b_layout;  // 0: time is slowest; 1: time is fastest; 2: the same at all steps; 3: of columns
  bool initial, reset;
  Values values = Values::kNormal;
};

// A tensor of all steps, or of one, in some layout.
template <typename T>
struct Tensor {
  std::vector<T> data;
  ScanOperand<T> operand;
  bool has_rows;

  Tensor(const Case& c, int layout) : has_rows(c.rows > 1) {
    const int64_t steps = c.steps, rows = c.rows, columns = c.columns;
    const int64_t strides[4][3] = {
        {rows * columns, columns, 1}, {1, columns * steps, steps}, {0, columns, 1}, {0, 0, 1}};
    const int64_t* s = strides[layout];
    data.resize((steps - 1) * s[0] + (rows - 1) * s[1] + columns);
    if (layout == 1) data.resize(steps * rows * columns);
    operand = {data.data(), s[0], {s[1], s[2]}};
  }
  T& at(int64_t step, int64_t channel, int64_t columns) {
    return data[step * operand.step + channel / columns * operand.strides[0] +
                channel % columns * operand.strides[1]];
  }
  // For kernels, in the order of forward or of backward.
  template <typename P>
  ScanOperand<P> in_order(bool backward, int64_t steps) {
    ScanOperand<P> result = {operand.data, operand.step};
    std::copy(operand.strides + (has_rows ? 0 : 1), operand.strides + 2, result.strides);
    if (backward) result.data += (steps - 1) * operand.step, result.step = -operand.step;
    return result;
  }
};

int failures = 0;

// Finds `expected`, rounded to T.
template <typename T>
void check(const std::string& what, T element, Number exact, double bound) {
  const Number found = Element<T>::to(element), expected = Element<T>::to(Element<T>::from(exact));
  if (sizeof(T) == 2) bound += 0x1p-24;  // the spacing of the smallest numbers of float16
  const auto same = [&](double x, double y) {
    return x == y || (std::isnan(x) && std::isnan(y)) || std::abs(x - y) <= bound;
  };
  if (same(found.real(), expected.real()) && same(found.imag(), expected.imag())) return;
  if (++failures < 20) {
    std::printf("%s: %g%+gi, expected %g%+gi, bound %g\n", what.c_str(), found.real(), found.imag(),
                expected.real(), expected.imag(), bound);
  }
}

// Complex numbers are multiplied as the kernel does, also where they are infinite.
Number product(Number a, Number b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}
Number step_of(Number a, Number h, Number b, bool is_complex) {
  return is_complex ? product(a, h) + b : Number(a.real() * h.real() + b.real());
}

// Devices whose blocks may have as much shared memory as 7.5's, and as 9.0's.
constexpr int kSharedBytes[] = {64 << 10, 227 << 10};

template <class Scan>
void run(const Scan& scan, int shared_bytes) {
  using cuda_on_cpu::current_block;
  const auto blocks_of = [](int64_t blocks) { return static_cast<int>(blocks); };
  if (runs_serially(scan)) {
    DeviceInfo device = {};
    device.multiprocessors = 40, device.shared_bytes = shared_bytes;
    const SerialPlan plan = plan_serial(scan, device);
    const ScanVectors vectors = vectors_of(scan, kScanWarp);
    return cuda_on_cpu::run(
        {blocks_of(plan.blocks), kScanSerialThreads, 1, static_cast<size_t>(serial_bytes<Scan>(plan))}, [&] {
          for (int64_t group = blockIdx.x; group < plan.groups; group += plan.blocks) {
            SerialScan<Scan>(scan, vectors, plan, group, current_block().memory()).run();
          }
        });
  }
  const TileMoves<Scan> moves(scan);
  const ScanPlan plan = plan_of(scan, moves, shared_bytes);
  using Links = TileLinks<Affine<wide_t<Scan>>>;
  std::vector<uint4> memory(Links::bytes(plan.groups, plan.tiles, plan.width) / sizeof(uint4) + 1);
  std::memset(memory.data(), 0xff, memory.size() * sizeof(uint4));
  const Links links = Links::in(memory.data(), plan.groups, plan.tiles, plan.width);
  const int blocks = std::min(blocks_of(plan.blocks()), 7);
  const int bytes = tile_shared_bytes(plan.threads, moves);
  cuda_on_cpu::run({blocks, plan.threads, 1, static_cast<size_t>(bytes)}, [&] {
    auto* const shared = reinterpret_cast<char*>(current_block().memory());
    TiledScan<Scan>(scan, plan, links, moves, blocks, shared).run();
  });
}

template <typename T, typename C>
void run_case(const std::string& name, const Case& c, int shared_bytes) {
  using E = Element<T>;
  std::mt19937 random(static_cast<unsigned>(c.steps * 31 + c.rows * 7 + c.columns));
  std::normal_distribution<double> normal;
  const auto draw = [&] { return Number(normal(random), E::kComplex ? normal(random) : 0); };
  const int64_t channels = c.rows * c.columns;

  Tensor<C> a(c, c.a_layout);
  Tensor<T> b(c, c.b_layout), h(c, c.b_layout % 2), grad(c, 1), grad_b(c, c.b_layout % 2);
  Tensor<C> grad_a(c, 1);
  Tensor<T> initial(c, 2), grad_initial(c, 2);
  Tensor<bool>* reset = nullptr;
  std::vector<unsigned char> resets(c.steps * c.rows);
  (void)reset;
  for (C& x : a.data) {
    const Number drawn = draw() * 0.4 + 0.8;
    x = Element<C>::from(drawn * std::min(1., 1.05 / std::abs(drawn)));
  }
  for (T& x : b.data) x = E::from(draw());
  for (T& x : grad.data) x = E::from(draw());
  for (T& x : initial.data) x = E::from(draw());
  for (unsigned char& x : resets) x = random() % 64 == 0;
  switch (c.values) {
    case Values::kNormal:
      break;
    case Values::kGrowing:
      for (C& x : a.data) x = Element<C>::from(4);
      for (T& x : initial.data) x = E::from(0);
      for (int64_t s = 0; s < c.steps; ++s) {
        for (int64_t i = 0; i < channels; ++i) {
          if (s < c.steps - 5) b.at(s, i, c.columns) = E::from(0);
          if (s >= 5) grad.at(s, i, c.columns) = E::from(0);
        }
      }
      break;
    case Values::kFixed:
      for (C& x : a.data) x = Element<C>::from(2);
      for (T& x : b.data) x = E::from(-1);
      for (T& x : initial.data) x = E::from(1);
      for (T& x : grad.data) x = E::from(0);
      break;
    case Values::kDecaying:
      for (C& x : a.data) x = Element<C>::from(1e-3);
      b.at(1, 0, c.columns) = E::from(kInfinity);
      grad.at(c.steps - 2, 0, c.columns) = E::from(-kInfinity);
      break;
    case Values::kZeros:
      for (C& x : a.data) x = random() % 50 == 0 ? Element<C>::from(0) : x;
      break;
    case Values::kDiverging:
      for (C& x : a.data) x = Element<C>::from(1e30);
      for (T& x : b.data) x = random() % 2000 == 0 ? E::from(std::nan("")) : x;
      break;
  }

  ScanChannels sizes = {channels, 2, {Divisor(c.rows), Divisor(c.columns)}};
  if (c.rows == 1) sizes = {channels, 1, {Divisor(c.columns)}};  // as tensors' dimensions are merged
  ScanOperand<const bool> flags;
  const bool* const flag_data = reinterpret_cast<const bool*>(resets.data());
  const auto flags_of = [&](bool backward) {
    ScanOperand<const bool> result = {flag_data, c.rows, {c.rows > 1, 0}};
    if (backward) result.data += (c.steps - 1) * c.rows, result.step = -c.rows;
    return c.reset ? result : ScanOperand<const bool>{};
  };
  const auto is_reset = [&](int64_t s, int64_t i) { return c.reset && resets[s * c.rows + i / c.columns]; };

  Scan<T, C, false> forward;
  forward.steps = c.steps;
  forward.channels = sizes;
  forward.a = a.template in_order<const C>(false, c.steps);
  forward.b = b.template in_order<const T>(false, c.steps);
  if (c.initial) forward.initial = initial.template in_order<const T>(false, c.steps);
  forward.reset = flags_of(false);
  forward.result = h.template in_order<T>(false, c.steps);
  run(forward, shared_bytes);
  Scan<T, C, true> backward;
  backward.steps = c.steps;
  backward.channels = sizes;
  backward.a = a.template in_order<const C>(true, c.steps);
  backward.b = grad.template in_order<const T>(true, c.steps);
  backward.h = h.template in_order<const T>(true, c.steps);
  if (c.initial) backward.initial = initial.template in_order<const T>(true, c.steps);
  backward.reset = flags_of(true);
  backward.grad_a = grad_a.template in_order<C>(true, c.steps);
  backward.result = grad_b.template in_order<T>(true, c.steps);
  if (c.initial) backward.grad_initial = grad_initial.template in_order<T>(true, c.steps);
  run(backward, shared_bytes);

  // The loop. `size` is the same scan of absolute values.
  using A = acc_t<T>;
  const auto rounded = [](Number x) { return Element<A>::to(Element<A>::from(x)); };
  const bool exact = c.values == Values::kDiverging;  // where float overflows, as the loop in float does
  const auto a_at = [&](int64_t s, int64_t i) { return Element<C>::to(a.at(s, i, c.columns)); };
  for (int64_t i = 0; i < channels; ++i) {
    const std::string where = name + ", channel " + std::to_string(i);
    Number value = c.initial ? E::to(initial.at(0, i, c.columns)) : Number(0);
    double size = std::abs(value);
    for (int64_t s = 0; s < c.steps; ++s) {
      const Number b_here = E::to(b.at(s, i, c.columns));
      const bool forgets = is_reset(s, i);
      value = forgets ? b_here : step_of(a_at(s, i), value, b_here, E::kComplex);
      if (exact) value = rounded(value);
      size = forgets ? std::abs(b_here) : std::abs(a_at(s, i)) * size + std::abs(b_here);
      const double bound = (2 * E::kRounding * (s + 1) + E::kStored) * size;
      check(where + ", h of step " + std::to_string(s), h.at(s, i, c.columns), value,
            std::isfinite(bound) ? bound : 0);
    }
    if (exact) continue;
    Number d = 0;
    size = 0;
    for (int64_t s = c.steps - 1; s >= 0; --s) {
      const Number g = E::to(grad.at(s, i, c.columns));
      const bool forgets = s == c.steps - 1 || is_reset(s + 1, i);
      const Number a_after = forgets ? 0 : std::conj(a_at(s + 1, i));
      d = forgets ? g : step_of(a_after, d, g, E::kComplex);
      size = forgets ? std::abs(g) : std::abs(a_after) * size + std::abs(g);
      const double bound = (2 * E::kRounding * (c.steps - s) + E::kStored) * size;
      const std::string of_step = " of step " + std::to_string(s);
      const auto limited = [](double x) { return std::isfinite(x) ? x : 0; };
      check(where + ", grad_b" + of_step, grad_b.at(s, i, c.columns), d, limited(bound));
      Number before = s > 0 ? E::to(h.at(s - 1, i, c.columns)) : 0;
      if (s == 0 && c.initial) before = E::to(initial.at(0, i, c.columns));
      Number of_a = E::kComplex ? product(d, std::conj(before)) : Number(d.real() * before.real());
      Number of_initial = step_of(std::conj(a_at(0, i)), d, 0, E::kComplex);
      if (is_reset(s, i)) of_a = of_initial = 0;
      const double more = 1 + 4 * E::kRounding + E::kStored;
      check(where + ", grad_a" + of_step, grad_a.at(s, i, c.columns), of_a,
            limited((bound * more + (4 * E::kRounding + E::kStored) * std::abs(d)) * std::abs(before)));
      if (s == 0 && c.initial) {
        check(where + ", grad_initial", grad_initial.at(0, i, c.columns), of_initial,
              limited((bound * more + (4 * E::kRounding + E::kStored) * std::abs(d)) * std::abs(a_at(0, i))));
      }
    }
  }
}

void run_all() {
  const Case cases[] = {
      {1, 1, 1, 0, 0, true, true},
      {3, 5, 211, 0, 0, false, false},
      {1, 1, 1300, 0, 0, true, false},
      {260, 2, 17, 0, 0, true, true},
      {700, 3, 20, 0, 1, true, true},
      {513, 1, 40, 3, 0, false, true},
      {1500, 1, 16, 0, 0, true, true},
      {2100, 5, 1, 1, 2, true, false},
      {9000, 1, 2, 1, 1, true, true},
      {20000, 1, 1, 0, 0, false, false},
      {17000, 1, 1, 0, 0, true, true},
      {1200, 1, 33, 2, 0, true, true},
      {300, 3, 11, 1, 1, true, true},
      {20, 2, 300, 1, 1, false, true},
      {700, 1, 35, 1, 1, true, true},
      {150, 1, 40, 0, 1, false, true},
      {150, 3, 370, 0, 0, true, true},
      {90, 2, 800, 0, 0, true, true},
      {90, 1, 1601, 3, 0, true, true},
      {260, 1, 3000, 0, 0, true, true},
      {700, 1, 1700, 3, 0, true, true},
      {270, 3, 667, 0, 0, true, true},
      {41, 3, 6667, 0, 0, true, true},
      {5, 1, 20000, 1, 0, false, true},
      {300, 1, 2001, 2, 0, true, false},
      {32, 1, 20001, 2, 0, true, false},
      {270, 4, 501, 0, 0, true, true, Values::kDiverging},
      {40, 4, 5001, 0, 0, true, true, Values::kDiverging},
      {600, 1, 40, 0, 1, true, true, Values::kDiverging},
      {900, 1, 40, 0, 0, true, false, Values::kGrowing},
      {900, 1, 40, 0, 0, true, true, Values::kGrowing},
      {20000, 1, 1, 0, 0, true, false, Values::kGrowing},
      {900, 1, 33, 0, 0, true, false, Values::kFixed},
      {20000, 1, 1, 0, 0, true, false, Values::kFixed},
      {900, 1, 33, 0, 0, true, false, Values::kDecaying},
      {900, 1, 33, 0, 0, true, true, Values::kDecaying},
      {20000, 1, 1, 0, 0, true, false, Values::kDecaying},
      {900, 3, 11, 0, 0, true, true, Values::kZeros},
      {9000, 1, 2, 0, 0, true, false, Values::kZeros},
      {900, 3, 11, 0, 0, true, true, Values::kDiverging},
      {20000, 1, 1, 0, 0, true, true, Values::kDiverging},
  };
  int number = 0;
  for (const Case& c : cases) {
    const std::string name = "case " + std::to_string(number++);
    const int shared_bytes = kSharedBytes[number % 2];
    run_case<float, float>(name + ", float", c, shared_bytes);
    if (c.values == Values::kDiverging) continue;
    run_case<double, double>(name + ", double", c, shared_bytes);
    // An infinite complex number has a finite part, which is rounded.
    if (c.values != Values::kDecaying)
      run_case<Complex<float>, Complex<float>>(name + ", complex", c, shared_bytes);
    if (c.values != Values::kNormal) continue;
    run_case<__half, __half>(name + ", half", c, shared_bytes);
    run_case<__nv_bfloat16, float>(name + ", bfloat16 and float", c, shared_bytes);
  }
}

}  // namespace
}  // namespace lltm_ext

int main() {
  lltm_ext::run_all();
  if (lltm_ext::failures > 0) std::printf("%d results differ\n", lltm_ext::failures);
  return lltm_ext::failures > 0;
}
