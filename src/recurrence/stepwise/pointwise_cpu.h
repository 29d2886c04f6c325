// One step of a cell on the CPU (step.h). Included by <op>_step_cpu.cpp, which instantiates it for its cell.
#pragma once

#include "recurrence/stepwise/step.h"
#include "recurrence/stepwise/units_cpu.h"

namespace lltm_ext {
namespace step_cpu {

template <typename A>
alignas(64) inline constexpr A kZeros[kBlock] = {};

// These kernels are for cells that read only one state and the sums of projections and products.
template <class Cell>
constexpr bool kHasOneState = Cell::kStates == 1 && Cell::kParameters == 0 && Cell::kStepInputs == 0 &&
                              !Cell::kSeparate && !Cell::kReadsH && Cell::kOutputState < 0;

template <class Cell, typename T, typename C>
void step_block(const StepForwardArguments<T, C>& s, int64_t row, int64_t unit, int n) {
  static_assert(kHasOneState<Cell>);
  constexpr int kGates = Cell::kGates, kSaved = Cell::kSaved, kExtra = kSaved - kGates;
  using A = acc_t<T>;
  const int64_t at = row * s.hidden + unit;
  const A mask = s.resets.mask(row);        // 0 also of NaN and infinities
  const auto saved_at = [&](int v) -> T* {  // null if v is not to be saved
    if (v < kGates) return s.saved.data ? &s.saved.at(row, v, unit) : nullptr;
    return s.extra ? s.extra + (row * kExtra + v - kGates) * s.hidden + unit : nullptr;
  };
  alignas(64) A buffers[kSaved][kBlock], c_buffer[kBlock], h_buffer[kBlock];
  const A *gates[kGates], *products[kGates];
  A* saved[kSaved];
  for (int g = 0; g < kGates; ++g) {
    gates[g] = source(&s.gates.at(row, g, unit), buffers[g], n);
    products[g] = s.product && mask != 0 ? s.product + (row * kGates + g) * s.hidden + unit : kZeros<A>;
  }
  for (int v = 0; v < kSaved; ++v) saved[v] = saved_at(v) ? target(saved_at(v), buffers[v]) : buffers[v];
  const A* old_c = mask != 0 ? source(s.old_states + at, c_buffer, n) : kZeros<A>;
  A *new_c = target(s.new_states + at, c_buffer), *h = target(s.h + at, h_buffer);
  LLTM_STEP_INDEPENDENT
  for (int i = 0; i < n; ++i) {
    CellInputs<Cell, ValueOf<T>> in;
    ValueOf<T> y[kSaved], c[1] = {mask * old_c[i]};
    for (int g = 0; g < kGates; ++g) in.x[g] = gates[g][i] + mask * products[g][i];
    h[i] = Cell::template forward<MathOf<T>>(in, c, y);
    new_c[i] = c[0];
    for (int v = 0; v < kSaved; ++v) saved[v][i] = y[v];
  }
  store(h, s.h + at, n);
  store(new_c, s.new_states + at, n);
  if (s.output) std::copy_n(s.h + at, n, s.output + at);
  for (int v = 0; v < kSaved; ++v) {
    if (saved_at(v)) store(saved[v], saved_at(v), n);
  }
}

template <class Cell, typename T, typename C, typename Extra>
void step_block(const StepBackwardArguments<T, C, Extra>& s, int64_t row, int64_t unit, int n) {
  static_assert(kHasOneState<Cell>);
  constexpr int kGates = Cell::kGates, kSaved = Cell::kSaved, kExtra = kSaved - kGates;
  using A = acc_t<T>;
  const int64_t at = row * s.hidden + unit;
  const A mask = s.resets.mask(row);
  const auto gradient = [&](const auto& x, A* buffer) {
    return x.data ? strided_source(x.data + row * x.row + unit * x.unit, x.unit, buffer, n) : kZeros<A>;
  };
  alignas(64) A buffers[kSaved][kBlock], gate_buffers[kGates][kBlock], output_buffer[kBlock],
      h_buffer[kBlock], c_buffer[kBlock];
  const A* saved[kSaved];
  A* grad_gates[kGates];
  for (int g = 0; g < kGates; ++g) {
    saved[g] = source(&s.saved.at(row, g, unit), buffers[g], n);
    grad_gates[g] = target(&s.grad_gates.at(row, g, unit), gate_buffers[g]);
  }
  for (int e = 0; e < kExtra; ++e) {
    const int v = kGates + e;
    saved[v] = source(s.extra + (row * kExtra + e) * s.hidden + unit, buffers[v], n);
  }
  const A* grad_output = gradient(s.grad_output, output_buffer);
  const A* grad_h = s.grad_h ? source(s.grad_h + at, h_buffer, n) : kZeros<A>;
  const A* grad_new_c = gradient(s.grad_new_states, c_buffer);
  A* grad_old_c = s.grad_old_states ? target(s.grad_old_states + at, c_buffer) : c_buffer;
  LLTM_STEP_INDEPENDENT
  for (int i = 0; i < n; ++i) {
    CellGradients<Cell, ValueOf<T>> grads;
    ValueOf<T> y[kSaved], dc[1] = {grad_new_c[i]};
    const ValueOf<T> dh = grad_h[i] + grad_output[i];
    for (int v = 0; v < kSaved; ++v) y[v] = saved[v][i];
    Cell::template backward<MathOf<T>>(y, {}, dh, dc, grads);
    grad_old_c[i] = mask * dc[0];
    for (int g = 0; g < kGates; ++g) grad_gates[g][i] = grads.x[g];
  }
  if (mask == 0) std::fill_n(grad_old_c, n, A(0));  // also where a gradient is NaN or infinite
  if (s.grad_old_states) store(grad_old_c, s.grad_old_states + at, n);
  for (int g = 0; g < kGates; ++g) {
    store(grad_gates[g], &s.grad_gates.at(row, g, unit), n);
    if (!s.grad_sums) continue;
    A* sums = s.grad_sums + (row * kGates + g) * s.hidden + unit;
    for (int i = 0; i < n; ++i) sums[i] += grad_gates[g][i];
  }
}

template <class Cell, typename T, class Step>
void run_step(const Step& step) {
  for_each_block<T>(step.batch, step.hidden,
                    [&](int64_t row, int64_t unit, int n) { step_block<Cell>(step, row, unit, n); });
}

}  // namespace step_cpu

template <class Cell, typename T, typename C>
void recurrence_step(const StepForwardArguments<T, C>& step) {
  step_cpu::run_step<Cell, T>(step);
}
template <class Cell, typename T, typename C, typename Extra>
void recurrence_step(const StepBackwardArguments<T, C, Extra>& step) {
  step_cpu::run_step<Cell, T>(step);
}

}  // namespace lltm_ext

// Instantiates a step for activations of type T, a state of type C and Extra (StepBackwardArguments).
#define INSTANTIATE_STEP_CPU(Cell, T, C, Extra)                                                         \
  template void lltm_ext::recurrence_step<lltm_ext::Cell>(const lltm_ext::StepForwardArguments<T, C>&); \
  template void lltm_ext::recurrence_step<lltm_ext::Cell>(                                              \
      const lltm_ext::StepBackwardArguments<T, C, Extra>&);
// Instantiates what the steps of sequences need.
#define INSTANTIATE_RECURRENCE_STEP_CPU(Cell)             \
  INSTANTIATE_STEP_CPU(Cell, float, float, float)         \
  INSTANTIATE_STEP_CPU(Cell, double, double, double)      \
  INSTANTIATE_STEP_CPU(Cell, c10::Half, float, c10::Half) \
  INSTANTIATE_STEP_CPU(Cell, c10::BFloat16, float, c10::BFloat16)
