// lltm on the CPU: the pointwise half of one step.
#include "lltm/lltm.h"
#include "recurrence/step/units_cpu.h"

namespace lltm_ext {
namespace {

using namespace step_cpu;

constexpr int kGates = LltmCell::kGates, kSaved = LltmCell::kSaved;

template <typename T, typename C>
void step_block(const ForwardStep<T, C>& s, int64_t row, int64_t unit, int n) {
  using A = acc_t<T>;
  const int64_t at = row * s.hidden + unit;
  alignas(64) A buffers[kGates + 2][kBlock];
  const A* gates[kGates];
  A* activated[kGates];
  for (int g = 0; g < kGates; ++g) {
    gates[g] = source(&s.gates.at(row, g, unit), buffers[g], n);
    activated[g] = s.activated.data ? target(&s.activated.at(row, g, unit), buffers[g]) : buffers[g];
  }
  const A* old_cell = source(s.old_cell + at, buffers[kGates], n);
  A *new_cell = target(s.new_cell + at, buffers[kGates]), *new_h = target(s.new_h + at, buffers[kGates + 1]);
  LLTM_STEP_INDEPENDENT
  for (int i = 0; i < n; ++i) {
    ValueOf<T> x[kGates], saved[kSaved], cell = old_cell[i];
    for (int g = 0; g < kGates; ++g) x[g] = gates[g][i];
    new_h[i] = LltmCell::forward<MathOf<T>>(x, cell, saved);
    new_cell[i] = cell;
    for (int g = 0; g < kGates; ++g) activated[g][i] = saved[g];
  }
  store(new_h, s.new_h + at, n);
  store(new_cell, s.new_cell + at, n);
  if (!s.activated.data) return;
  for (int g = 0; g < kGates; ++g) store(activated[g], &s.activated.at(row, g, unit), n);
}

template <typename T, typename C>
void step_block(const BackwardStep<T, C>& s, int64_t row, int64_t unit, int n) {
  using A = acc_t<T>;
  const int64_t at = row * s.hidden + unit;
  const auto gradient = [&](const auto& of, A* buffer) {
    return strided_source(of.data + row * of.row + unit * of.unit, of.unit, buffer, n);
  };
  alignas(64) A buffers[kGates + 3][kBlock];
  const A* activated[kGates];
  A* grad_gates[kGates];
  for (int g = 0; g < kGates; ++g) {
    activated[g] = source(&s.activated.at(row, g, unit), buffers[g], n);
    grad_gates[g] = target(&s.grad_gates.at(row, g, unit), buffers[g]);
  }
  const A *new_cell = source(s.new_cell + at, buffers[kGates], n),
          *grad_h = gradient(s.grad_h, buffers[kGates + 1]),
          *grad_cell = gradient(s.grad_cell, buffers[kGates + 2]);
  A* grad_old_cell = s.grad_old_cell ? target(s.grad_old_cell + at, buffers[kGates]) : buffers[kGates];
  LLTM_STEP_INDEPENDENT
  for (int i = 0; i < n; ++i) {
    ValueOf<T> saved[kSaved], dx[kGates], dc = grad_cell[i];
    const ValueOf<T> dh = grad_h[i];
    for (int g = 0; g < kGates; ++g) saved[g] = activated[g][i];
    saved[kGates] = MathOf<T>::tanh(new_cell[i]);
    LltmCell::backward<MathOf<T>>(saved, dh, dc, dx);
    grad_old_cell[i] = dc;
    for (int g = 0; g < kGates; ++g) grad_gates[g][i] = dx[g];
  }
  for (int g = 0; g < kGates; ++g) store(grad_gates[g], &s.grad_gates.at(row, g, unit), n);
  if (s.grad_old_cell) store(grad_old_cell, s.grad_old_cell + at, n);
}

}  // namespace

template <typename T, typename C>
void lltm_forward_step(const ForwardStep<T, C>& step) {
  for_each_block<T>(step.batch, step.hidden,
                    [&](int64_t row, int64_t unit, int n) { step_block(step, row, unit, n); });
}

template <typename T, typename C>
void lltm_backward_step(const BackwardStep<T, C>& step) {
  for_each_block<T>(step.batch, step.hidden,
                    [&](int64_t row, int64_t unit, int n) { step_block(step, row, unit, n); });
}

#define INSTANTIATE(T, C)                                    \
  template void lltm_forward_step(const ForwardStep<T, C>&); \
  template void lltm_backward_step(const BackwardStep<T, C>&);
INSTANTIATE(float, float)
INSTANTIATE(double, double)
INSTANTIATE(c10::Half, c10::Half)
INSTANTIATE(c10::Half, float)
INSTANTIATE(c10::BFloat16, c10::BFloat16)
INSTANTIATE(c10::BFloat16, float)

}  // namespace lltm_ext
