// What the units of a row compute together (stepwise/rows.cuh), on the CPU, against loops.
#include "recurrence/stepwise/rows.cuh"

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
    f = {units.sum(x[j]), units.max(x[j]), units.cumsum(x[j]), units.cumsum_back(x[j]), units.mean(x[j])};
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
  for (size_t j = 0; j < x.size(); ++j) {
    const A from = sum - upto;
    upto += x[j];
    const Found<A>& f = results[j];
    const bool right = f.sum == sum && f.mean == sum / static_cast<A>(x.size()) && f.max == largest &&
                       f.cumsum == upto && f.cumsum_back == from;
    if (right) continue;
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
    return in.h + in.units.sum(in.x[0]);
  }
  template <typename Math, typename A>
  static void backward(const A (&)[1], const CellInputs<SumCell, A>& in, A grad_h, A (&)[1],
                       CellGradients<SumCell, A>& grads) {
    grads.x[0] = in.units.sum(grad_h);
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
