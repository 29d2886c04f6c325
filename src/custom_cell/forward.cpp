// Sequences of a cell forward, in one direction or two.
#include <ATen/OpMathType.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "custom_cell/custom_cell.h"
#include "custom_cell/launch.h"
#include "custom_cell/own_products.h"

namespace lltm_ext {
namespace {

struct Outputs {
  at::Tensor output, h_n, states_n;  // output: h of every step, as SequenceForwardArguments has it
  at::Tensor output_apart;           // [..., O * H] the output, if it is not that; or undefined
  at::Tensor gates;  // [..., G * H] at first the input's projections; then, if saved, what backward needs of
                     // CellShape::saved_in_gates. If it is not overwritten, it may be the input
  at::Tensor extra;  // [..., E * H] what else backward needs, or undefined
  // Of a cell without a product: the input, which all steps read in place of `gates`, and the bias that it
  // lacks; or undefined.
  at::Tensor given, given_bias;
};

// The outputs of a direction, but gates and extra. Those that the cell lacks stay undefined.
Outputs empty_outputs(const CellShape& shape, const CellCall& call, const Direction& d) {
  const at::Tensor& input = call.input;
  const c10::SymInt hidden = hidden_of(shape, call, d), batch = batch_of(call, d);
  Outputs out;
  out.output = empty_like_input(input, hidden);
  if (shape.has_output_apart()) out.output_apart = empty_like_input(input, shape.outputs * hidden);
  out.h_n = at::empty_symint({batch, hidden}, input.options());
  out.states_n =
      at::empty_symint(states_sizes(shape, d, batch, hidden), input.options().dtype(states_type(input, d)));
  return out;
}

// A copy of the initial states in the type in which they accumulate: in states_n, if it has this type.
at::Tensor accumulating_states(const Outputs& out, const Direction& d) {
  const at::ScalarType type = at::toOpMathType(out.h_n.scalar_type());
  const bool has_type = out.states_n.scalar_type() == type;
  const at::Tensor states =
      has_type ? out.states_n : at::empty(out.states_n.sizes(), out.states_n.options().dtype(type));
  set_values(states, d.states);
  return states;
}
// The initial states in that type, in memory that no step writes.
at::Tensor initial_states(const Direction& d, const at::Tensor& like) {
  return d.states.defined() ? aligned(d.states.to(like.scalar_type())) : at::Tensor();
}
void finish_states(const Outputs& out, const at::Tensor& states) {
  if (states.scalar_type() != out.states_n.scalar_type()) out.states_n.copy_(states);
}

struct Forward {
  const CellOp& op;
  const CellCall& call;
  const bool save;
  const CellShape shape = op.shape();
  const bool to_initial = shape.resets_to_initial;
  const int64_t gates = shape.gates, extra = shape.extra();
  const SequenceSizes sizes{shape, call};
  std::vector<Outputs> outs = {};  // one for each direction

  void run() {
    const Matmul matmul(call.input);
    for (const Direction& d : call.directions) {
      Outputs& out = outs.emplace_back(empty_outputs(shape, call, d));
      if (input_is_read(shape, call.input, d)) {
        out.given = aligned(call.input.to(projections_type(shape, call.input)));
        out.given_bias = bias_of(d);
      } else {
        out.gates = projections(matmul, d);
      }
      if (save) out.extra = empty_like_input(call.input, extra * sizes.hidden);
    }
    if (outs[0].output.numel() > 0) return run_steps(0, outs.size());
    for (size_t i = 0; i < outs.size(); ++i) {
      set_values(outs[i].h_n, call.directions[i].h0);
      set_values(outs[i].states_n, call.directions[i].states);
    }
  }

  // The input's projections, in memory of their own if the steps overwrite them.
  at::Tensor projections(const Matmul& matmul, const Direction& d) const {
    const at::Tensor &input = call.input, bias = bias_of(d);
    const at::ScalarType wanted = projections_type(shape, input);
    if (d.weight_ih.defined()) {
      return matmul.affine(flatten_rows(input), d.weight_ih.t(), if_defined(bias), wanted)
          .view_symint(sizes_like_input(input, gates * sizes.hidden));
    }
    const at::Tensor given = given_projections(shape, input, bias);
    if (bias.defined()) return given;
    if (!save || kept_gates(shape, d) == 0) return aligned(given);
    const at::Tensor copy = empty_contiguous(given);
    set_values(copy, given);
    return copy;
  }

  // Runs directions [first, first + count): in one launch if they fit, else side by side.
  void run_steps(size_t first, size_t count, bool side_by_side = false) const {
    const Plan plan =
        sizes.plan(op, outs[0].output, /*backward=*/false, call.algorithm, count, side_by_side, sizes.length);
    if (plan.is_fused() && try_run_fused(first, count, plan)) return;
    if (count == 1) return run_stepwise(outs[first], call.directions[first]);
    run_side_by_side(outs[0].output, count, [&](size_t i) { run_steps(i, 1, /*side_by_side=*/true); });
  }

  // Runs a matrix product and a pointwise kernel per step. h_n and `states` hold the current states.
  void run_stepwise(const Outputs& out, const Direction& d) const {
    set_values(out.h_n, d.h0);
    const at::Tensor &h = out.h_n, states = accumulating_states(out, d);
    const int64_t batch = h.size(0), hidden = h.size(1);
    const at::Tensor parameters = contiguous_or_none(d.parameters),
                     step_inputs = step_inputs_of_units(shape, d.step_inputs, hidden),
                     reset = contiguous_or_none(d.reset), h0 = to_initial ? d.h0.contiguous() : at::Tensor(),
                     states0 = to_initial ? initial_states(d, states) : at::Tensor();
    const Matmul matmul(h);
    const OwnProducts own(shape, op.products(), hidden);
    const int stages = op.stages(/*backward=*/false);
    at::Tensor fed, own_products;  // of the cell's own weights
    if (own.any()) {
      fed = at::empty({batch, shape.fed * hidden}, h.options());
      own_products = at::empty({batch, shape.products * hidden}, states.options());
    }
    at::Tensor weight_hh_t, products;
    if (shape.recurrent) {
      // In IEEE float32 cuBLAS multiplies few rows by a transposed view up to six times slower than by a
      // copy. For oneDNN, in TF32, and in half types whose rows are aligned, the copy gains nothing.
      const bool by_view = h.is_cpu() || matmul.tf32() || (h.element_size() == 2 && hidden % 8 == 0);
      const at::Tensor weight = dense_of_heads(d.weight_hh, hidden);
      weight_hh_t = by_view ? weight.contiguous().t() : weight.t().contiguous();
      products = at::empty({batch, gates * hidden}, states.options());
    }
    const at::Tensor of_gates_t = own.any() ? weight_hh_t.narrow(1, 0, gates * hidden) : weight_hh_t;
    const RowsOfSteps steps = sizes.steps(d.reverse);
    const at::Tensor step_projections = out.given.defined() ? projections(matmul, d) : out.gates;
    for (size_t k = 0; k < steps.size(); ++k) {
      const auto [first_row, n] = steps[k];
      const RowRange next = k + 1 < steps.size() ? steps[k + 1] : RowRange{0, 0};
      at::Tensor product;
      if (shape.recurrent) {
        const at::Tensor h_rows = first_rows(h, n);
        product = onednn_product(h_rows, of_gates_t);
        if (!product.defined()) {
          product = first_rows(products, n);
          matmul(product, h_rows, of_gates_t);
        }
      }
      const auto run_stage = [&, first_row = first_row, n = n](int stage, auto type, auto... stream) {
        using T = typename decltype(type)::type;
        T* const step_gates =
            reinterpret_cast<T*>(mutable_pointer<char>(step_projections) +
                                 first_row * gates * hidden * step_projections.element_size());
        const StepForwardArguments<T> step = {
            .batch = n,
            .hidden = hidden,
            .gates = Gates<const T>::row_major(step_gates, gates, hidden),
            .product = pointer<acc_t<T>>(product),
            .parameters = pointer<T>(parameters),
            .step_inputs = rows_from<T>(step_inputs, first_row),
            .resets = resets_from<T>(reset, to_initial ? next.first : first_row),
            .next_batch = next.count,
            .h0 = pointer<T>(h0),
            .states0 = pointer<acc_t<T>>(states0),
            .old_states = pointer<acc_t<T>>(states),
            .new_states = mutable_pointer<acc_t<T>>(states),
            .state_stride = batch * hidden,
            .old_h = pointer<T>(h),
            .h = mutable_pointer<T>(h),
            .output = mutable_pointer<T>(out.output) + first_row * hidden,
            .output_apart = shape.has_output_apart()
                                ? mutable_pointer<T>(out.output_apart) + first_row * shape.outputs * hidden
                                : nullptr,
            .saved =
                Gates<T>::row_major(save && shape.saved_in_gates() > 0 ? step_gates : nullptr, gates, hidden),
            .extra = save ? mutable_pointer<T>(out.extra) + first_row * extra * hidden : nullptr,
            .products = pointer<acc_t<T>>(own_products),
            .fed = mutable_pointer<T>(fed),
        };
        return op.step(step, stage, stream...);
      };
      for (int stage = 0; stage <= stages; ++stage) {
        launch("recurrence_pointwise_forward", h,
               [&](auto type, auto... stream) { return run_stage(stage, type, stream...); });
        if (stage == stages) break;
        own.multiply(matmul, stage, first_rows(fed, n), weight_hh_t, first_rows(own_products, n));
      }
    }
    finish_states(out, states);
  }

  // The products of the first steps of a large layer in float32, whose kernel takes no h0: it may exceed 1.
  void multiply_h0(const LargeGrid& large, const std::vector<at::Tensor>& h0,
                   const std::vector<at::Tensor>& weights, const at::Tensor& links) const {
    const Matmul matmul(links);
    for (size_t i = 0; i < h0.size(); ++i) {
      if (!h0[i].defined()) continue;
      const int64_t columns = weights[i].size(0), size = sizes.batch * columns,
                    at = (large.products_at + static_cast<int64_t>(i) * large.product_bytes) / 4;
      matmul(links.narrow(0, at, size).view({sizes.batch, columns}), h0[i], weights[i].t());
    }
  }

  // Returns false, having run nothing, if the plan does not fit but another one may (try_launch_fused).
  bool try_run_fused(size_t first, size_t count, const Plan& plan) const {
    const at::Tensor first_rows = first_rows_on(outs[0].output, sizes.batch_sizes);
    std::vector<at::Tensor> weights, h0, states0, states_n, parameters, step_inputs, reset;
    for (size_t i = first; i < first + count; ++i) {
      const Direction& d = call.directions[i];
      weights.push_back(aligned(sizes.weight_hh(plan, d)));
      h0.push_back(aligned(d.h0));
      if (plan.runs_all_steps()) {
        states0.push_back(aligned(d.states));
        states_n.push_back(outs[i].states_n);
      } else {  // fused steps read all states from memory
        if (!d.h0.defined()) h0.back() = at::zeros(outs[i].h_n.sizes(), outs[i].h_n.options());
        states_n.push_back(accumulating_states(outs[i], d));
        states0.push_back(to_initial ? initial_states(d, states_n.back()) : states_n.back());
      }
      parameters.push_back(aligned(with_bias(shape, d.parameters, outs[i].given_bias, sizes.hidden)));
      step_inputs.push_back(step_inputs_of_units(shape, d.step_inputs, sizes.hidden));
      reset.push_back(contiguous_or_none(d.reset));
    }
    const auto arguments_of = [&](auto type, size_t i) {
      using T = typename decltype(type)::type;
      const Outputs& out = outs[first + i];
      return SequenceForwardArguments<T>{
          .steps = sizes.order(call.directions[first + i].reverse, first_rows),
          .hidden = static_cast<int>(sizes.hidden),
          .save = save,
          .narrow_states = sizeof(T) < sizeof(acc_t<T>) && states_n[i].scalar_type() == out.h_n.scalar_type(),
          .reset_is_bool = is_bool(reset[i]),
          .has_bias = out.given_bias.defined(),
          .weight =
              out.given.defined() ? static_cast<const T*>(pointer<void>(out.given)) : pointer<T>(weights[i]),
          .parameters = pointer<T>(parameters[i]),
          .step_inputs = pointer<T>(step_inputs[i]),
          .reset = pointer<void>(reset[i]),
          .h0 = pointer<T>(h0[i]),
          .states0 = pointer<void>(states0[i]),
          .gates = mutable_pointer<T>(out.gates),
          .extra = mutable_pointer<T>(out.extra),
          .output = mutable_pointer<T>(out.output),
          .output_apart = mutable_pointer<T>(out.output_apart),
          .h_n = mutable_pointer<T>(out.h_n),
          .states_n = mutable_pointer<void>(states_n[i]),
      };
    };
    const at::Tensor links = sizes.links(plan, shape, outs[0].output);
    if (plan.large.product_bytes > 0) multiply_h0(plan.large, h0, weights, links);
    const bool ran = try_launch_fused(
        "recurrence_forward", outs[0].output, plan, call.algorithm, count, [&](auto type, auto stream) {
          auto sequences = per_direction(type, count, arguments_of);
          sequences.rows = outs[0].output.numel() / sizes.hidden;
          return op.launch(sequences, plan, mutable_pointer<void>(links), stream);
        });
    for (size_t i = 0; ran && i < count; ++i) finish_states(outs[first + i], states_n[i]);
    return ran;
  }
};

// The outputs of a trace, which knows sizes only.
std::vector<Outputs> meta_outputs(const CellShape& shape, const CellCall& call) {
  std::vector<Outputs> outs;
  for (const Direction& d : call.directions) {
    const c10::SymInt hidden = hidden_of(shape, call, d);
    Outputs& out = outs.emplace_back(empty_outputs(shape, call, d));
    out.gates = empty_kept_gates(shape, call, d);
    out.extra = empty_like_input(call.input, shape.extra() * hidden);
  }
  return outs;
}

// ---- a single step

bool steps_on_tensor_cores(const at::Tensor& input, const Direction& d) {
#ifdef LLTM_EXT_WITH_CUDA
  return at::cuda::getDeviceProperties(input.get_device())->major >= 8 &&
         single_step_on_tensor_cores(input.size(1), d.h0.size(1), input.size(2),
                                     static_cast<int>(input.element_size()), allows_tf32(input));
#else
  return false;
#endif
}

// Runs a call that takes_single_step; returns what run_forward does.
variable_list run_single_step(const CellOp& op, const CellCall& call, bool save) {
  const at::Tensor& input = call.input;
  const Direction& d = call.directions[0];
  const KernelGuard guard(input);
  const int64_t batch = input.size(1), hidden = d.h0.size(1);
  const CellShape shape = op.shape();
  variable_list results = {at::empty({1, batch, hidden}, input.options()),
                           at::empty({batch, hidden}, input.options()),
                           d.states.defined() ? at::empty(d.states.sizes(), d.states.options())
                                              : at::empty({0, batch, hidden}, input.options())};
  if (save) {
    results.push_back(at::empty({1, batch, shape.kept_gates() * hidden}, input.options()));
    results.push_back(at::empty({1, batch, shape.extra() * hidden}, input.options()));
    results.push_back(empty_like_input(input, 0));
  }
#ifdef LLTM_EXT_WITH_CUDA
  const at::Tensor x = input.contiguous(), h0 = d.h0.contiguous(), states0 = contiguous_or_none(d.states),
                   parameters = contiguous_or_none(d.parameters),
                   step_inputs = contiguous_or_none(d.step_inputs), weight_ih = d.weight_ih.contiguous(),
                   weight_hh = d.weight_hh.contiguous(), bias = contiguous_or_none(d.bias),
                   bias_hh = contiguous_or_none(d.bias_hh);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(input.get_device());
  check_launch(
      "recurrence_single_step", with_type(input.scalar_type(), [&](auto type) {
        using T = typename decltype(type)::type;
        const bool narrow = sizeof(T) < sizeof(acc_t<T>) && results[2].scalar_type() == input.scalar_type();
        return op.launch(SingleStepArguments<T>{.batch = static_cast<int>(batch),
                                                .hidden = static_cast<int>(hidden),
                                                .input_size = static_cast<int>(input.size(2)),
                                                .narrow_states = narrow,
                                                .on_tensor_cores = steps_on_tensor_cores(input, d),
                                                .save = save,
                                                .shared_step_inputs = is_shared_by_units(shape, step_inputs),
                                                .input = pointer<T>(x),
                                                .h0 = pointer<T>(h0),
                                                .states0 = pointer<void>(states0),
                                                .weight_ih = pointer<T>(weight_ih),
                                                .weight_hh = pointer<T>(weight_hh),
                                                .bias = pointer<T>(bias),
                                                .bias_hh = pointer<T>(bias_hh),
                                                .parameters = pointer<T>(parameters),
                                                .step_inputs = pointer<T>(step_inputs),
                                                .output = mutable_pointer<T>(results[0]),
                                                .h_n = mutable_pointer<T>(results[1]),
                                                .states_n = mutable_pointer<void>(results[2]),
                                                .gates = save ? mutable_pointer<T>(results[3]) : nullptr,
                                                .extra = save ? mutable_pointer<T>(results[4]) : nullptr},
                         stream);
      }));
#endif
  return results;
}

}  // namespace

bool takes_single_step(const CellOp& op, const CellCall& call) {
  const at::Tensor& input = call.input;
  const Direction& d = call.directions[0];
  if (call.directions.size() > 1 || call.batch_sizes || !has_single_step(op.shape())) return false;
  if (!d.weight_ih.defined()) return false;
  if (d.h0.defined() && d.weight_hh.sym_size(1) != d.h0.sym_size(1)) return false;  // of heads
  if (!input.is_cuda() || input.sym_size(0) != 1 || input.scalar_type() == at::kDouble) return false;
  if (!d.h0.defined() || d.reset.defined() || call.algorithm != "auto") return false;
  if (op.shape().states > 0 && !d.states.defined()) return false;
  return single_step_pays(input.size(1), d.h0.size(1), input.size(2), op.shape(),
                          static_cast<int>(input.element_size()), steps_on_tensor_cores(input, d));
}

variable_list run_forward(const CellOp& op, const CellCall& call, bool save) {
  if (takes_single_step(op, call)) return run_single_step(op, call, save);
  const CellShape shape = op.shape();
  std::vector<Outputs> outs;
  if (call.input.is_meta()) {
    outs = meta_outputs(shape, call);
  } else {
    const KernelGuard guard(call.input);
    Forward forward{op, call, save};
    forward.run();
    outs = std::move(forward.outs);
  }
  variable_list results;
  for (size_t i = 0; i < outs.size(); ++i) {
    const Outputs& out = outs[i];
    const Direction& d = call.directions[i];
    append(results, {shape.has_output_apart() ? out.output_apart : out.output, out.h_n, out.states_n});
    if (!save) continue;
    append(results, {kept_gates(shape, d) > 0 ? out.gates : empty_kept_gates(shape, call, d), out.extra,
                     shape.has_output_apart() ? out.output : empty_like_input(call.input, 0)});
  }
  return results;
}

}  // namespace lltm_ext
