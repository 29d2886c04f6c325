// A head of a sequence whose product with h is divided into heads. Its units are among those of the rows, so
// it has their memory, but begins elsewhere.
#pragma once

#include "recurrence/cell.h"

namespace lltm_ext {

template <typename X>
__device__ __forceinline__ void advance(X*& pointer, int64_t by) {
  if (pointer) pointer += by;
}
// Values in memory of T, or of A if these are not `narrow`.
template <typename T, typename Void>
__device__ __forceinline__ void advance(Void*& pointer, int64_t by, bool narrow) {
  using Byte = typename Conditional<kIsSame<Void, void>, char, const char>::type;
  if (pointer) pointer = static_cast<Byte*>(pointer) + by * (narrow ? sizeof(T) : sizeof(acc_t<T>));
}

template <class Cell, typename T>
__device__ __forceinline__ SequenceForwardArguments<T> of_head(SequenceForwardArguments<T> sequence,
                                                               int64_t head, int hidden) {
  const int64_t unit = head * hidden;
  advance(sequence.weight, unit * hidden);
  advance(sequence.parameters, unit);
  advance(sequence.step_inputs, unit);
  advance(sequence.h0, unit);
  advance<T>(sequence.states0, unit, sequence.narrow_states);
  sequence.gates = reinterpret_cast<T*>(sequence.template projections<Cell>() + unit);
  advance(sequence.extra, unit);
  advance(sequence.output, unit);
  advance(sequence.output_apart, unit);
  advance(sequence.h_n, unit);
  advance<T>(sequence.states_n, unit, sequence.narrow_states);
  return sequence;
}

template <class Cell, typename T>
__device__ __forceinline__ SequenceBackwardArguments<T> of_head(SequenceBackwardArguments<T> sequence,
                                                                int64_t head, int hidden) {
  const int64_t unit = head * hidden;
  advance(sequence.weight_t, unit);
  advance(sequence.parameters, unit);
  advance(sequence.step_inputs, unit);
  advance(sequence.gates, unit);
  advance(sequence.extra, unit);
  advance(sequence.grad_output, unit);
  advance(sequence.grad_gates, unit);
  advance(sequence.grad_projections, unit);
  advance(sequence.grad_h, unit);
  advance(sequence.grad_own_h, unit);
  advance(sequence.grad_states, unit);
  advance(sequence.grad_initial, unit);
  advance(sequence.grad_sums, unit);
  return sequence;
}

}  // namespace lltm_ext
