// The CPU's way of one step of a sequence. Included by <op>_step_cpu.cpp alone, which instantiates it for its
// cell.
#pragma once

#include "recurrence/step/step.h"
#include "recurrence/step/units_cpu.h"

namespace lltm_ext {
namespace step_cpu {

// Saved value v of a unit: the gates first, the extra ones after them.
template <class Cell, typename T>
T* saved_at(T* gates, T* extra, int v, int64_t hidden, int64_t row, int64_t unit) {
  constexpr int kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;
  return v < kGates ? gates + (row * kGates + v) * hidden + unit
                    : extra + (row * kExtra + v - kGates) * hidden + unit;
}

template <class Cell, typename T>
void step_block(const StepForwardArguments<T>& s, int64_t row, int64_t unit, int n) {
  constexpr int kGates = Cell::kGates, kSaved = Cell::kSaved;
  using A = acc_t<T>;
  const auto place = [&](int v) { return saved_at<Cell>(s.gates, s.extra, v, s.hidden, row, unit); };
  const int64_t at = row * s.hidden + unit;
  alignas(64) A buffers[kSaved + 1][kBlock];
  const A *gates[kGates], *products[kGates];
  A* saved[kSaved];
  for (int g = 0; g < kGates; ++g) {
    gates[g] = source(place(g), buffers[g], n);
    products[g] = s.product + (row * kGates + g) * s.hidden + unit;
  }
  for (int v = 0; v < kSaved; ++v) saved[v] = s.extra ? target(place(v), buffers[v]) : buffers[v];
  A *c = s.c + at, *h = target(s.h + at, buffers[kSaved]);
  LLTM_STEP_INDEPENDENT
  for (int i = 0; i < n; ++i) {
    ValueOf<T> x[kGates], y[kSaved], unit_c = c[i];
    for (int g = 0; g < kGates; ++g) x[g] = gates[g][i] + products[g][i];
    h[i] = Cell::template forward<MathOf<T>>(x, unit_c, y);
    c[i] = unit_c;
    for (int v = 0; v < kSaved; ++v) saved[v][i] = y[v];
  }
  store(h, s.h + at, n);
  std::copy_n(s.h + at, n, s.output + at);
  if (!s.extra) return;
  for (int v = 0; v < kSaved; ++v) store(saved[v], place(v), n);
}

template <class Cell, typename T>
void step_block(const StepBackwardArguments<T>& s, int64_t row, int64_t unit, int n) {
  constexpr int kGates = Cell::kGates, kSaved = Cell::kSaved;
  using A = acc_t<T>;
  const int64_t at = row * s.hidden + unit;
  const auto gate_at = [&](int g) { return (row * kGates + g) * s.hidden + unit; };
  alignas(64) A buffers[kSaved + kGates + 2][kBlock];
  const A* saved[kSaved];
  A* grad_gates[kGates];
  for (int v = 0; v < kSaved; ++v) {
    saved[v] = source(saved_at<Cell>(s.gates, s.extra, v, s.hidden, row, unit), buffers[v], n);
  }
  for (int g = 0; g < kGates; ++g) grad_gates[g] = target(s.grad_gates + gate_at(g), buffers[kSaved + g]);
  const A* grad_h = source(s.grad_h + at, buffers[kSaved + kGates], n);
  const T* from = s.grad_output ? s.grad_output + row * s.output_row + unit * s.output_unit : nullptr;
  const A* grad_output = strided_source(from, s.output_unit, buffers[kSaved + kGates + 1], n);
  A* grad_c = s.grad_c + at;
  LLTM_STEP_INDEPENDENT
  for (int i = 0; i < n; ++i) {
    ValueOf<T> y[kSaved], dx[kGates], dc = grad_c[i];
    const ValueOf<T> dh = grad_h[i] + grad_output[i];
    for (int v = 0; v < kSaved; ++v) y[v] = saved[v][i];
    Cell::template backward<MathOf<T>>(y, dh, dc, dx);
    grad_c[i] = dc;
    for (int g = 0; g < kGates; ++g) grad_gates[g][i] = dx[g];
  }
  for (int g = 0; g < kGates; ++g) {
    store(grad_gates[g], s.grad_gates + gate_at(g), n);
    if (!s.grad_bias) continue;
    A* grad_bias = s.grad_bias + gate_at(g);
    for (int i = 0; i < n; ++i) grad_bias[i] += grad_gates[g][i];
  }
}

}  // namespace step_cpu

template <class Cell, typename T>
void recurrence_step(const StepForwardArguments<T>& step) {
  step_cpu::for_each_block<T>(step.batch, step.hidden, [&](int64_t row, int64_t unit, int n) {
    step_cpu::step_block<Cell>(step, row, unit, n);
  });
}

template <class Cell, typename T>
void recurrence_step(const StepBackwardArguments<T>& step) {
  step_cpu::for_each_block<T>(step.batch, step.hidden, [&](int64_t row, int64_t unit, int n) {
    step_cpu::step_block<Cell>(step, row, unit, n);
  });
}

}  // namespace lltm_ext

#define INSTANTIATE_RECURRENCE_STEP_CPU_FOR(Cell, T)                                                    \
  template void lltm_ext::recurrence_step<lltm_ext::Cell, T>(const lltm_ext::StepForwardArguments<T>&); \
  template void lltm_ext::recurrence_step<lltm_ext::Cell, T>(const lltm_ext::StepBackwardArguments<T>&);
#define INSTANTIATE_RECURRENCE_STEP_CPU(Cell)          \
  INSTANTIATE_RECURRENCE_STEP_CPU_FOR(Cell, float)     \
  INSTANTIATE_RECURRENCE_STEP_CPU_FOR(Cell, double)    \
  INSTANTIATE_RECURRENCE_STEP_CPU_FOR(Cell, c10::Half) \
  INSTANTIATE_RECURRENCE_STEP_CPU_FOR(Cell, c10::BFloat16)
