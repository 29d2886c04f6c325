// A sequence op (op.h) forward: <op>, <op>_forward, which saves what the backward needs, and both for two
// directions.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <string>
#include <tuple>
#include <vector>

#include "common/dispatch.h"
#include "common/matmul.h"
#include "recurrence/step/step.h"
#include "recurrence/tensors/launch.h"

namespace lltm_ext {

template <class Op>
struct ForwardOps {
  using Cell = typename Op::Cell;
  static constexpr int64_t kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;

  struct Outputs {
    at::Tensor output, h_n, c_n;
    at::Tensor gates;  // [..., G * H] in: the input's projections; out, if saved: what backward needs
    at::Tensor extra;  // [..., E * H] what else backward needs, or undefined
  };

  static std::vector<Outputs> run_forward(const at::Tensor& input, Directions directions,
                                          at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm,
                                          bool save) {
    const KernelGuard guard(input);
    const SequenceSizes sizes(input, directions, batch_sizes);
    std::vector<Outputs> outs;
    for (const Direction& d : directions) outs.push_back(before_first_step(input, d, save));
    if (outs[0].output.numel() > 0) run_steps(directions, outs, sizes, algorithm);
    for (size_t i = 0; i < outs.size(); ++i) outs[i].c_n = outs[i].c_n.to(directions[i].c0.scalar_type());
    return outs;
  }

  // h_n and c_n hold the states of the current step, c_n in the type in which it accumulates.
  static Outputs before_first_step(const at::Tensor& input, const Direction& d, bool save) {
    const int64_t hidden = d.h0.size(1);
    Outputs out;
    out.output = empty_like_input(input, hidden);
    out.gates = affine(flatten_rows(input), d.weight_ih.t(), d.bias)
                    .view_symint(sizes_like_input(input, kGates * hidden));
    if (save) out.extra = empty_like_input(input, kExtra * hidden);
    out.h_n = d.h0.clone(at::MemoryFormat::Contiguous);
    out.c_n =
        at::empty(d.c0.sizes(), input.options().dtype(at::toOpMathType(input.scalar_type()))).copy_(d.c0);
    return out;
  }

  // All directions in one launch if they fit, else one after the other.
  static void run_steps(Directions directions, at::ArrayRef<Outputs> outs, const SequenceSizes& sizes,
                        c10::string_view algorithm) {
    const Plan plan = sizes.plan<Op>(outs[0].output, /*backward=*/false, algorithm, directions.size());
    if (plan.is_fused() && try_run_fused(directions, outs, sizes, plan, algorithm)) return;
    if (directions.size() == 1) {
      return run_stepwise(outs[0], directions[0].weight_hh, sizes.steps(directions[0].reverse));
    }
    for (size_t i = 0; i < directions.size(); ++i) {
      run_steps(directions.slice(i, 1), outs.slice(i, 1), sizes, algorithm);
    }
  }

  // A matrix product and a pointwise kernel a step.
  static void run_stepwise(const Outputs& out, const at::Tensor& weight_hh,
                           const std::vector<RowRange>& steps) {
    const at::Tensor &h = out.h_n, &c = out.c_n, &gates = out.gates;
    const int64_t hidden = h.size(1);
    // Copied, because in float32 cuBLAS multiplies few rows by a transposed view up to six times slower.
    const at::Tensor weight_hh_t = weight_hh.t().contiguous();
    const at::Tensor products = at::empty({h.size(0), kGates * hidden}, c.options());
    const Matmul matmul(h);
    for (const auto& [first_row, n] : steps) {
      const at::Tensor h_rows = first_rows(h, n);
      at::Tensor product = onednn_product(h_rows, weight_hh_t);
      if (!product.defined()) {
        product = first_rows(products, n);
        matmul(product, h_rows, weight_hh_t);
      }
      launch("recurrence_pointwise_forward", gates,
             [&, first_row = first_row, n = n](auto type, auto... stream) {
               using T = typename decltype(type)::type;
               T* const step_gates = mutable_pointer<T>(gates) + first_row * kGates * hidden;
               const bool save = out.extra.defined();
               const StepForwardArguments<T> step = {
                   .batch = n,
                   .hidden = hidden,
                   .gates = Gates<const T>::in_rows(step_gates, kGates, hidden),
                   .product = pointer<acc_t<T>>(product),
                   .old_c = pointer<acc_t<T>>(c),
                   .new_c = mutable_pointer<acc_t<T>>(c),
                   .h = mutable_pointer<T>(h),
                   .output = mutable_pointer<T>(out.output) + first_row * hidden,
                   .saved = Gates<T>::in_rows(save ? step_gates : nullptr, kGates, hidden),
                   .extra = save ? mutable_pointer<T>(out.extra) + first_row * kExtra * hidden : nullptr,
               };
               return recurrence_step<Cell>(step, stream...);
             });
    }
  }

  // As try_launch_fused.
  static bool try_run_fused(Directions directions, at::ArrayRef<Outputs> outs, const SequenceSizes& sizes,
                            const Plan& plan, c10::string_view algorithm) {
    const at::Tensor first_rows = first_rows_on(outs[0].output, sizes.batch_sizes);
    std::vector<at::Tensor> weights, h0;
    for (const Direction& d : directions) {
      weights.push_back(aligned(d.weight_hh));
      h0.push_back(aligned(d.h0));
    }
    const auto arguments_of = [&](auto type, size_t i) {
      using T = typename decltype(type)::type;
      const Outputs& out = outs[i];
      return SequenceForwardArguments<T>{
          .steps = sizes.order(directions[i].reverse, first_rows),
          .rows = out.output.numel() / sizes.hidden,
          .hidden = static_cast<int>(sizes.hidden),
          .weight = pointer<T>(weights[i]),
          .h0 = pointer<T>(h0[i]),
          .c0 = pointer<float>(out.c_n),
          .gates = mutable_pointer<T>(out.gates),
          .extra = mutable_pointer<T>(out.extra),
          .output = mutable_pointer<T>(out.output),
          .h_n = mutable_pointer<T>(out.h_n),
          .c_n = mutable_pointer<float>(out.c_n),
      };
    };
    return try_launch_fused("recurrence_forward", outs[0].output, plan, algorithm, directions.size(),
                            [&](auto type, auto stream) {
                              return launch_sequence_forward<Cell>(
                                  per_direction(type, directions.size(), arguments_of), plan, stream);
                            });
  }

  // Of each direction {output [T, B, H] or [N, H], h_n [B, H], c_n [B, H]}, and if `save` {gates, extra}.
  static variable_list check_and_run(const at::Tensor& input, Directions directions,
                                     at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm,
                                     bool save) {
    for (const Direction& d : directions) {
      check_inputs(Op::name, kGates, input, d.h0, d.c0, d.weight_ih, d.weight_hh, d.bias, batch_sizes,
                   algorithm);
    }
    check_same_sizes<Op>(directions);
    const auto outs = input.is_meta() ? meta_forward(input, directions)
                                      : run_forward(input, directions, batch_sizes, algorithm, save);
    variable_list outputs;
    for (const Outputs& out : outs) {
      append(outputs, {out.output, out.h_n, out.c_n});
      if (save) append(outputs, {out.gates, out.extra});
    }
    return outputs;
  }

  static std::vector<Outputs> meta_forward(const at::Tensor& input, Directions directions) {
    std::vector<Outputs> outs;
    for (const Direction& d : directions) {
      const c10::SymInt hidden = d.h0.sym_size(1);
      outs.push_back({empty_like_input(input, hidden), empty_contiguous(d.h0), empty_contiguous(d.c0),
                      empty_like_input(input, kGates * hidden), empty_like_input(input, kExtra * hidden)});
    }
    return outs;
  }

  // (output, h_n, c_n)
  static std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence(
      const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
      const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
      bool reverse, c10::string_view algorithm) {
    const Direction only = {h0, c0, weight_ih, weight_hh, bias, reverse};
    const variable_list y = check_and_run(input, only, batch_sizes, algorithm, /*save=*/false);
    return {y[0], y[1], y[2]};
  }

  // As above, and (gates, extra) for the backward.
  static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> sequence_forward(
      const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
      const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
      bool reverse, c10::string_view algorithm) {
    const Direction only = {h0, c0, weight_ih, weight_hh, bias, reverse};
    const variable_list y = check_and_run(input, only, batch_sizes, algorithm, /*save=*/true);
    return {y[0], y[1], y[2], y[3], y[4]};
  }

  // (output, h_n, c_n) of each direction.
  static variable_list bidirectional(const at::Tensor& input, at::TensorList forward_direction,
                                     at::TensorList reverse_direction, at::OptionalIntArrayRef batch_sizes,
                                     c10::string_view algorithm) {
    return check_and_run(input, directions_of<Op>(forward_direction, reverse_direction), batch_sizes,
                         algorithm, /*save=*/false);
  }

  // As above, each with (gates, extra) for the backward.
  static variable_list bidirectional_forward(const at::Tensor& input, at::TensorList forward_direction,
                                             at::TensorList reverse_direction,
                                             at::OptionalIntArrayRef batch_sizes,
                                             c10::string_view algorithm) {
    return check_and_run(input, directions_of<Op>(forward_direction, reverse_direction), batch_sizes,
                         algorithm, /*save=*/true);
  }
};

}  // namespace lltm_ext
