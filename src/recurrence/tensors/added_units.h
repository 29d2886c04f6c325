// Hidden sizes that are no multiple of 8 on CUDA. Most fused kernels load units by eights, so such a sequence
// runs with some units more. Their weights and states are zero, so they stay zero, and no other unit sees
// them.
#pragma once

#ifndef LLTM_EXT_STABLE_ABI
#include <ATen/ops/constant_pad_nd.h>
#endif

#include <tuple>

#include "recurrence/tensors/launch.h"

namespace lltm_ext {

constexpr int64_t kUnitsTogether = 8;

// Copies of weights and states take as long as some steps.
constexpr int64_t kLeastSteps = 8;

// Whether a hidden size is one that the fused kernels take, or a trace does not know it. A cheap first
// question.
inline bool is_in_eights(const at::Tensor& weight_hh) {
#ifndef LLTM_EXT_STABLE_ABI
  if (!weight_hh.defined() || weight_hh.dim() != 2) return true;  // refused later
  const auto hidden = weight_hh.sym_size(1).maybe_as_int();
  return !hidden || *hidden % kUnitsTogether == 0;
#else
  return true;
#endif
}

// Whether a persistent kernel takes all steps of a dense sequence as they are, forward, and so backward.
template <class Op>
bool has_kernels_of(const Op& op, const at::Tensor& input, int64_t hidden) {
  const c10::DeviceGuard device(input.device());
  return plan_for(op, op.name().c_str(), input, input.size(1), hidden, /*dense=*/true, /*backward=*/false,
                  "auto")
      .runs_all_steps();
}

// Whether a sequence runs with more units. Arguments that do not fit are refused later. In the portable
// library none does: torch's stable ABI can't call constant_pad_nd.
template <class Op>
bool adds_units(const Op& op, const at::Tensor& input, const at::Tensor& weight_hh,
                at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
#ifndef LLTM_EXT_STABLE_ABI
  if (is_in_eights(weight_hh) || !input.defined() || !op.loads_eights(input)) return false;
  if (algorithm == "stepwise" || input.scalar_type() == at::kDouble) return false;
  if (!op.shape().recurrent || !op.zeros_stay()) return false;
  if (algorithm != "auto") return true;
  if (batch_sizes) return static_cast<int64_t>(batch_sizes->size()) >= kLeastSteps;
  const auto length = input.sym_size(0).maybe_as_int();
  if (length && *length < kLeastSteps) return false;  // a trace may not know it
  return is_wrapper(input) || input.dim() != 3 || !has_kernels_of(op, input, weight_hh.size(1));
#else
  return false;
#endif
}

// The same for both directions of a layer.
template <class Op>
bool both_add_units(const Op& op, const at::Tensor& input, at::TensorList forward_direction,
                    at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
  return forward_direction.size() > 3 && adds_units(op, input, forward_direction[3], batch_sizes, algorithm);
}

// The hidden size that kernels see.
template <class Op>
int64_t hidden_of_kernels(const Op& op, const at::Tensor& input, int64_t hidden, const at::Tensor& weight_hh,
                          at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
  if (!adds_units(op, input, weight_hh, batch_sizes, algorithm)) return hidden;
  return (hidden / kUnitsTogether + 1) * kUnitsTogether;
}

#ifndef LLTM_EXT_STABLE_ABI
// The direction with the units added.
inline Direction with_added_units(const CellShape& shape, const Direction& d) {
  const int64_t hidden = d.weight_hh.size(1), added = kUnitsTogether - hidden % kUnitsTogether;
  const auto padded = [&](const at::Tensor& x) {  // [..., H]
    return x.defined() ? at::constant_pad_nd(x, {0, added}) : x;
  };
  const auto padded_gates = [&](const at::Tensor& x, at::IntArrayRef padding) {  // [G * H, ...]
    return at::constant_pad_nd(x.unflatten(0, {shape.gates, hidden}), padding).flatten(0, 1);
  };
  Direction wide = d;
  wide.h0 = padded(d.h0);
  wide.states = padded(d.states);
  wide.weight_ih = padded_gates(d.weight_ih, {0, 0, 0, added});
  wide.weight_hh = padded_gates(d.weight_hh, {0, added, 0, added});
  if (d.bias) wide.bias = padded_gates(*d.bias, {0, added});
  wide.parameters = padded(d.parameters);
  if (d.step_inputs.defined()) {
    wide.step_inputs = padded(d.step_inputs.unflatten(-1, {shape.step_inputs, hidden})).flatten(-2);
  }
  return wide;
}

// A result x [..., H] without the units added, in its own memory.
inline at::Tensor without_added_units(const at::Tensor& x, int64_t hidden) {
  return x.narrow(-1, 0, hidden).clone(at::MemoryFormat::Contiguous);
}

// (output, h_n, states_n) of run(direction with the units added).
template <class Op, typename F>
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_with_added_units(const Op& op, const at::Tensor& input,
                                                                    const Direction& d,
                                                                    at::OptionalIntArrayRef batch_sizes,
                                                                    c10::string_view algorithm, F&& run) {
  check_inputs(op, op.name().c_str(), input, d, batch_sizes, algorithm);
  const int64_t hidden = d.weight_hh.size(1);
  const auto [output, h_n, states_n] = run(with_added_units(op.shape(), d));
  return {without_added_units(output, hidden), without_added_units(h_n, hidden),
          without_added_units(states_n, hidden)};
}

// The same for both directions of a layer, which run(forward_direction, reverse_direction) gets as lists.
template <class Op, typename F>
variable_list run_both_with_added_units(const Op& op, const at::Tensor& input,
                                        at::TensorList forward_direction, at::TensorList reverse_direction,
                                        at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm,
                                        F&& run) {
  variable_list wide[2];
  const auto directions =
      checked_directions(op, input, forward_direction, reverse_direction, batch_sizes, algorithm);
  for (size_t i = 0; i < 2; ++i) {
    const Direction d = with_added_units(op.shape(), directions[i]);
    wide[i] = {d.h0, d.states, d.weight_ih, d.weight_hh};
    if (d.bias) wide[i].push_back(*d.bias);
  }
  variable_list outputs = run(wide[0], wide[1]);
  for (at::Tensor& x : outputs) x = without_added_units(x, directions[0].h0.size(1));
  return outputs;
}
#endif

}  // namespace lltm_ext
