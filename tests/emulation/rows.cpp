// What the units of a row compute together (stepwise/rows.cuh), on the CPU, against loops.
#include "recurrence/stepwise/rows.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "cuda_on_cpu.h"

namespace lltm_ext {
namespace {

int failures = 0;

// All that a row can compute, one after the other, so that calls take turns in their memory.
template <typename A>
struct Found {
  A sum, max, cumsum, cumsum_back, mean;
  A variances[3];  // the first beside sums, which takes more than one exchange
};

template <typename A>
std::vector<Found<A>> found(const std::vector<A>& x, const RowOfThreads& row) {
  std::vector<Found<A>> results(x.size());
  using Memory = typename RowOfUnits<A>::Memory;
  cuda_on_cpu::run({row.blocks, row.threads, row.blocks, sizeof(Memory)}, [&] {
    auto& memory = *reinterpret_cast<Memory*>(cuda_on_cpu::current_block().memory());
    const int block = static_cast<int>(blockIdx.x), j = block * row.threads + static_cast<int>(threadIdx.x);
    const RowOfUnits<A> units(memory, row, block);
    Found<A>& f = results[j];
    A variances[] = {x[j], 2 * x[j], x[j] + 1000}, means[3], alone[] = {x[j]};
    A sums[] = {x[j], 0, 0, 3 * x[j]};
    units.moments(variances, means, sums);
    units.sums(alone);
    f = {sums[0], units.max(x[j]), units.cumsum(x[j]), units.cumsum_back(x[j]), units.per_unit(sums[3]) / 3};
    std::copy_n(variances, 3, f.variances);
    const bool is_mean = std::abs(means[1] - 2 * f.mean) <= std::abs(f.mean) * A(1e-5);
    if (alone[0] != sums[0] || !is_mean) f.sum = -infinity<A>();
  });
  return results;
}

template <typename A>
void check(int blocks, int threads) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> whole(-50, 50);  // whose sums are exact
  std::vector<A> x(blocks * threads);
  for (A& value : x) value = static_cast<A>(whole(random));
  const std::vector<Found<A>> results = found<A>(x, {blocks, threads});
  A sum = 0, largest = x[0], upto = 0;
  for (const A value : x) sum += value, largest = std::max(largest, value);
  const A mean = sum / static_cast<A>(x.size()), bound = sizeof(A) == 8 ? A(1e-13) : A(1e-5);
  double variance = 0;
  for (const A value : x) variance += std::pow(double(value) - double(sum) / double(x.size()), 2);
  variance /= double(x.size());
  const auto is_near = [&](A y, double exact) { return std::abs(y - exact) <= bound * exact; };
  for (size_t j = 0; j < x.size(); ++j) {
    const A from = sum - upto;
    upto += x[j];
    const Found<A>& f = results[j];
    const bool right = f.sum == sum && is_near(std::abs(f.mean), std::abs(mean)) && f.max == largest &&
                       f.cumsum == upto && f.cumsum_back == from;
    const bool right_variances = is_near(f.variances[0], variance) && is_near(f.variances[1], 4 * variance) &&
                                 is_near(f.variances[2], variance);
    if (right && right_variances) continue;
    std::printf("variances %g, %g, %g, expected %g; ", double(f.variances[0]), double(f.variances[1]),
                double(f.variances[2]), variance);
    std::printf("%d blocks of %d threads, unit %zu: sum %g, max %g, cumsum %g, cumsum_back %g, mean %g\n",
                blocks, threads, j, double(f.sum), double(f.max), double(f.cumsum), double(f.cumsum_back),
                double(f.mean));
    ++failures;
    return;
  }
}

// The new h is the old one, plus the sum of the row's gates. Its gradient is the gate's, too.
struct SumCell : CellDefaults {
  static constexpr int kGates = 1, kStates = 0, kSaved = 0;
  static constexpr bool kReadsH = true, kOverUnits = true;

  template <typename Math, typename A>
  static A forward(const CellInputs<SumCell, A>& in, A (&)[1], A (&)[1]) {
    A sums[] = {in.x[0]};
    in.units.sums(sums);
    return in.h + sums[0];
  }
  template <typename Math, typename A>
  static void backward(const A (&)[1], const CellInputs<SumCell, A>& in, A grad_h, A (&)[1],
                       CellGradients<SumCell, A>& grads) {
    A sums[] = {grad_h};
    in.units.sums(sums);
    grads.x[0] = sums[0];
    grads.h = grad_h;
  }
};

// Three rows of clusters of two blocks, forward and backward.
void check_step() {
  constexpr int kRows = 3, kHidden = 70;
  const RowOfThreads row = {2, kHidden / 2};
  std::vector<float> gates(kRows * kHidden), old_h(gates.size()), h(gates.size()), grad(gates.size()),
      grad_h(gates.size(), 0.f), own(gates.size(), 1.f);
  for (size_t i = 0; i < gates.size(); ++i) gates[i] = float(i % 11), old_h[i] = float(i % 7);
  using Memory = RowOfUnits<float>::Memory;
  const auto run = [&](const auto& step) {
    cuda_on_cpu::run({row.blocks * kRows, row.threads, row.blocks, sizeof(Memory)}, [&] {
      run_rows<SumCell, float>(step, row, *reinterpret_cast<Memory*>(cuda_on_cpu::current_block().memory()));
    });
  };
  StepForwardArguments<float> forward = {};
  forward.batch = kRows, forward.hidden = kHidden;
  forward.gates = Gates<const float>::row_major(gates.data(), 1, kHidden);
  forward.old_h = old_h.data(), forward.h = h.data();
  run(forward);
  StepBackwardArguments<float> backward = {};
  backward.batch = kRows, backward.hidden = kHidden;
  backward.grad_h = old_h.data(), backward.grad_own_h = own.data();
  backward.grad_gates = Gates<float>::row_major(grad.data(), 1, kHidden);
  run(backward);
  for (int b = 0; b < kRows; ++b) {
    float sum = 0, sum_of_grads = 0;
    for (int j = 0; j < kHidden; ++j)
      sum += gates[b * kHidden + j], sum_of_grads += old_h[b * kHidden + j] + 1;
    for (int j = 0; j < kHidden; ++j) {
      const int at = b * kHidden + j;
      if (h[at] == old_h[at] + sum && grad[at] == sum_of_grads && own[at] == old_h[at] + 1) continue;
      std::printf("step: row %d, unit %d: h %g, gradients %g and %g\n", b, j, h[at], grad[at], own[at]);
      ++failures;
      return;
    }
  }
}

}  // namespace
}  // namespace lltm_ext

int main() {
  for (const int threads : {1, 2, 31, 32, 33, 64, 100, 1024}) {
    for (const int blocks : {1, 2, 3, 8}) {
      if (threads * blocks > 1100) continue;
      lltm_ext::check<float>(blocks, threads);
      lltm_ext::check<double>(blocks, threads);
    }
  }
  lltm_ext::check_step();
  return lltm_ext::failures == 0 ? 0 : 1;
}
