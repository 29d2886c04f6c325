// Hidden sizes that are no multiple of 8 on CUDA. Most fused kernels load units by eights, so such a sequence
// runs with a few more units. Their weights and states are zero, so they stay zero, and no other unit sees
// them. The portable build has no resize_units and uses src/stable/custom_cell/pad_hidden.h instead.
#pragma once

#include <vector>

#include "common/library.h"
#include "custom_cell/launch.h"
#include "recurrence/resize_units.h"

namespace lltm_ext {

constexpr int64_t kUnitsTogether = 8;

// Shorter sequences are not padded: copies of weights and states take as long as some steps.
constexpr int64_t kLeastSteps = 8;

// Whether the fused kernels take a hidden size, or a trace does not know it. This is a cheap first question
// to ask.
inline bool is_multiple_of_8(const at::Tensor& weight_hh) {
  if (!weight_hh.defined() || weight_hh.dim() != 2) return true;  // is refused later
  const auto hidden = weight_hh.sym_size(1).maybe_as_int();
  return !hidden || *hidden % kUnitsTogether == 0;
}

// Whether a persistent kernel takes all steps of an unpadded dense sequence, forward and so backward.
inline bool has_kernels_of(const CellOp& op, const at::Tensor& input, int64_t hidden) {
  const c10::DeviceGuard device(input.device());
  return plan_for(op, input, input.size(1), hidden, /*dense=*/true, /*backward=*/false, "auto", input.size(0))
      .runs_all_steps();
}

// Whether a sequence is padded. Arguments that do not fit are refused later.
inline bool pads_hidden(const CellOp& op, const CellCall& call) {
  const at::Tensor &input = call.input, &weight_hh = call.directions[0].weight_hh;
  if (is_multiple_of_8(weight_hh) || !input.defined() || !op.needs_multiple_of_8(input)) return false;
  if (call.algorithm == "stepwise" || input.scalar_type() == at::kDouble) return false;
  if (!op.shape().recurrent || !op.zeros_stay()) return false;
  if (weight_hh.sym_size(0) != op.shape().gates * weight_hh.sym_size(1)) return false;  // of heads
  if (call.algorithm != "auto") return true;
  if (call.batch_sizes) return static_cast<int64_t>(call.batch_sizes->size()) >= kLeastSteps;
  const auto length = input.sym_size(0).maybe_as_int();
  if (length && *length < kLeastSteps) return false;  // a trace may not know the length
  return is_wrapper(input) || input.dim() != 3 || !has_kernels_of(op, input, weight_hh.size(1));
}

// The next hidden size that fused kernels take.
inline int64_t padded_hidden(int64_t hidden) { return (hidden / kUnitsTogether + 1) * kUnitsTogether; }

// A tensor, and in which of its dimensions it has units (UnitsIn).
struct TensorOfUnits {
  at::Tensor* tensor;
  int64_t units_in;
};

// Replaces tensors by copies with another number of units, in one launch and one node of autograd. Undefined
// tensors stay undefined.
inline void resize_units(at::ArrayRef<TensorOfUnits> all, int64_t from, int64_t to) {
  variable_list tensors;
  std::vector<int64_t> units_in;
  for (const TensorOfUnits& x : all) {
    if (!x.tensor->defined()) continue;
    tensors.push_back(*x.tensor);
    units_in.push_back(x.units_in);
  }
  using Resize = variable_list(at::TensorList, at::IntArrayRef, int64_t, int64_t);
  static const auto op = find_op<Resize>("lltm_ext::resize_units");
  const variable_list copies = op.call(tensors, units_in, from, to);
  size_t next = 0;
  for (const TensorOfUnits& x : all) {
    if (x.tensor->defined()) *x.tensor = copies[next++];
  }
}

// Runs a call with units added, and returns its results without them.
template <typename F>
variable_list run_with_padded_hidden(const CellShape& shape, const CellCall& call, F&& run) {
  const int64_t hidden = call.directions[0].weight_hh.size(1);
  CellCall wide = call;
  std::vector<TensorOfUnits> given, found;
  for (Direction& d : wide.directions) {
    for (at::Tensor* x : {&d.h0, &d.states, &d.bias, &d.parameters, &d.bias_hh}) {
      given.push_back({x, kLastDimension});
    }
    if (d.step_inputs.defined() && d.step_inputs.size(-1) == shape.step_inputs * hidden) {
      given.push_back({&d.step_inputs, kLastDimension});
    }
    given.push_back({&d.weight_ih, kFirstDimension});
    given.push_back({&d.weight_hh, kFirstDimension | kLastDimension});
  }
  if (!wide.directions[0].weight_ih.defined()) given.push_back({&wide.input, kLastDimension});
  resize_units(given, hidden, padded_hidden(hidden));
  variable_list results = run(wide);
  for (at::Tensor& x : results) found.push_back({&x, kLastDimension});
  resize_units(found, padded_hidden(hidden), hidden);
  return results;
}

}  // namespace lltm_ext
