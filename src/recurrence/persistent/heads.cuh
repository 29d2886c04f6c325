// A head of a sequence whose product with h is divided into heads. Its units are among those of the rows, so
// it has their memory, but begins elsewhere.
#pragma once

#include "recurrence/cell.h"

namespace lltm_ext {

template <typename... X>
__device__ __forceinline__ void advance(int64_t by, X*&... pointers) {
  ((pointers = pointers ? pointers + by : nullptr), ...);
}
// Values in memory of T, or of A if these are not `narrow`.
template <typename T, typename Void>
__device__ __forceinline__ void advance_states(int64_t by, bool narrow, Void*& pointer) {
  using Byte = typename Conditional<kIsSame<Void, void>, char, const char>::type;
  if (pointer) pointer = static_cast<Byte*>(pointer) + by * (narrow ? sizeof(T) : sizeof(acc_t<T>));
}

template <class Cell, typename T>
__device__ __forceinline__ SequenceForwardArguments<T> of_head(SequenceForwardArguments<T> s, int64_t head,
                                                               int hidden) {
  const int64_t unit = head * hidden;
  advance(unit * hidden, s.weight);
  advance(unit, s.parameters, s.step_inputs, s.h0, s.extra, s.output, s.output_apart, s.h_n);
  advance_states<T>(unit, s.narrow_states, s.states0);
  advance_states<T>(unit, s.narrow_states, s.states_n);
  s.gates = reinterpret_cast<T*>(s.template projections<Cell>() + unit);
  return s;
}

template <class Cell, typename T>
__device__ __forceinline__ SequenceBackwardArguments<T> of_head(SequenceBackwardArguments<T> s, int64_t head,
                                                                int hidden) {
  advance(head * hidden, s.weight_t, s.parameters, s.step_inputs, s.gates, s.extra, s.grad_output,
          s.grad_gates, s.grad_projections, s.grad_h, s.grad_own_h, s.grad_states, s.grad_initial,
          s.grad_sums);
  return s;
}

}  // namespace lltm_ext
