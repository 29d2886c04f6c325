// The ops of a whole sequence (sequence.h) forward: <op>, and <op>_forward, which saves what the backward
// needs; likewise of both directions.
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
struct SequenceForward {
  using Cell = typename Op::Cell;
  static constexpr int64_t kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;

  struct Outputs {
    at::Tensor output, h_n, c_n;
    at::Tensor gates;  // activated, for the backward; as output, but G * H wide
    at::Tensor extra;  // what else the backward needs; as output, but E * H wide
  };

  static std::vector<Outputs> run_forward(const at::Tensor& input, Directions directions,
                                          at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm,
                                          bool save) {
    const KernelGuard guard(input);
    const Rows rows(input, directions, batch_sizes);
    std::vector<Outputs> outs;
    for (const Direction& d : directions) outs.push_back(before_first_step(input, d, save));
    if (outs[0].output.numel() > 0) forward_steps(directions, outs, rows, algorithm);
    for (size_t i = 0; i < outs.size(); ++i) outs[i].c_n = outs[i].c_n.to(directions[i].c0.scalar_type());
    return outs;
  }

  // h_n and c_n hold the states of the step at hand, c_n in the type in which it accumulates.
  static Outputs before_first_step(const at::Tensor& input, const Direction& d, bool save) {
    const int64_t hidden = d.h0.size(1);
    Outputs out;
    out.output = empty_rows(input, hidden);
    out.gates = affine(flatten_rows(input), d.weight_ih.t(), d.bias)
                    .view_symint(sizes_of_rows(input, kGates * hidden));
    if (save) out.extra = empty_rows(input, kExtra * hidden);
    out.h_n = d.h0.clone(at::MemoryFormat::Contiguous);
    out.c_n =
        at::empty(d.c0.sizes(), input.options().dtype(at::toOpMathType(input.scalar_type()))).copy_(d.c0);
    return out;
  }

  // All directions at once where the engine has room for them, else one after the other.
  static void forward_steps(Directions directions, at::ArrayRef<Outputs> outs, const Rows& rows,
                            c10::string_view algorithm) {
    const Plan plan = rows.plan<Op>(outs[0].output, /*backward=*/false, algorithm, directions.size());
    if (plan.is_fused() && forward_at_once(directions, outs, rows, plan, algorithm)) return;
    if (directions.size() == 1) {
      return forward_stepwise(outs[0], directions[0].weight_hh, rows.steps(directions[0].reverse));
    }
    for (size_t i = 0; i < directions.size(); ++i) {
      forward_steps(directions.slice(i, 1), outs.slice(i, 1), rows, algorithm);
    }
  }

  static void forward_stepwise(const Outputs& out, const at::Tensor& weight_hh,
                               const std::vector<Steps::Step>& steps) {
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
      launch("recurrence_pointwise_step", gates,
             [&, first_row = first_row, n = n](auto type, auto... stream) {
               using T = typename decltype(type)::type;
               const StepForwardArguments<T> step = {
                   .batch = n,
                   .hidden = hidden,
                   .gates = mutable_pointer<T>(gates) + first_row * kGates * hidden,
                   .product = pointer<acc_t<T>>(product),
                   .extra = out.extra.defined() ? mutable_pointer<T>(out.extra) + first_row * kExtra * hidden
                                                : nullptr,
                   .c = mutable_pointer<acc_t<T>>(c),
                   .h = mutable_pointer<T>(h),
                   .output = mutable_pointer<T>(out.output) + first_row * hidden,
               };
               return recurrence_step<Cell>(step, stream...);
             });
    }
  }

  // All steps by the engine. False if the GPU has no room for its kernel now; nothing has run then.
  static bool forward_at_once(Directions directions, at::ArrayRef<Outputs> outs, const Rows& rows,
                              const Plan& plan, c10::string_view algorithm) {
    const at::Tensor first_rows = first_rows_on(outs[0].output, rows.batch_sizes);
    std::vector<at::Tensor> weights, h0;
    for (const Direction& d : directions) {
      weights.push_back(aligned(d.weight_hh));
      h0.push_back(aligned(d.h0));
    }
    const auto sequence_of = [&](auto type, size_t i) {
      using T = typename decltype(type)::type;
      const Outputs& out = outs[i];
      return SequenceForwardArguments<T>{
          .steps = rows.order(directions[i].reverse, first_rows),
          .rows = out.output.numel() / rows.hidden,
          .hidden = static_cast<int>(rows.hidden),
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
    return launch_at_once("recurrence_persistent_forward", outs[0].output, plan, algorithm, directions.size(),
                          [&](auto type, auto stream) {
                            return launch_sequence_forward<Cell>(
                                together(type, directions.size(), sequence_of), plan, stream);
                          });
  }

  // Of each direction {output [T, B, H] or [N, H], h_n [B, H], c_n [B, H]}, and if `save` {gates, extra}.
  static variable_list checked_forward(const at::Tensor& input, Directions directions,
                                       at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm,
                                       bool save) {
    for (const Direction& d : directions) {
      check_inputs(Op::name, kGates, input, d.h0, d.c0, d.weight_ih, d.weight_hh, d.bias, batch_sizes,
                   algorithm);
    }
    check_alike<Op>(directions);
    const auto outs = input.is_meta() ? meta_forward(input, directions)
                                      : run_forward(input, directions, batch_sizes, algorithm, save);
    variable_list found;
    for (const Outputs& out : outs) {
      append(found, {out.output, out.h_n, out.c_n});
      if (save) append(found, {out.gates, out.extra});
    }
    return found;
  }

  static std::vector<Outputs> meta_forward(const at::Tensor& input, Directions directions) {
    std::vector<Outputs> outs;
    for (const Direction& d : directions) {
      const c10::SymInt hidden = d.h0.sym_size(1);
      outs.push_back({empty_rows(input, hidden), empty_contiguous(d.h0), empty_contiguous(d.c0),
                      empty_rows(input, kGates * hidden), empty_rows(input, kExtra * hidden)});
    }
    return outs;
  }

  // (output, h_n, c_n)
  static std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence(
      const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
      const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
      bool reverse, c10::string_view algorithm) {
    const Direction only = {h0, c0, weight_ih, weight_hh, bias, reverse};
    const variable_list y = checked_forward(input, only, batch_sizes, algorithm, /*save=*/false);
    return {y[0], y[1], y[2]};
  }

  // As above, and (gates, extra) for the backward.
  static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> sequence_forward(
      const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
      const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
      bool reverse, c10::string_view algorithm) {
    const Direction only = {h0, c0, weight_ih, weight_hh, bias, reverse};
    const variable_list y = checked_forward(input, only, batch_sizes, algorithm, /*save=*/true);
    return {y[0], y[1], y[2], y[3], y[4]};
  }

  // (output, h_n, c_n) onward and the same in reverse.
  static variable_list both(const at::Tensor& input, at::TensorList onward, at::TensorList reverse,
                            at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
    return checked_forward(input, both_of<Op>(onward, reverse), batch_sizes, algorithm, /*save=*/false);
  }

  // As above, each with (gates, extra) for the backward.
  static variable_list both_forward(const at::Tensor& input, at::TensorList onward, at::TensorList reverse,
                                    at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
    return checked_forward(input, both_of<Op>(onward, reverse), batch_sizes, algorithm, /*save=*/true);
  }
};

}  // namespace lltm_ext
