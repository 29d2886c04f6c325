// The ops of a whole sequence (sequence.h) backward: <op>_backward, and that of both directions. From the
// last step to the first in a few chunks, each of which leaves the gradients of its gates, and then adds what
// follows from them by matrix products.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "common/dispatch.h"
#include "common/matmul.h"
#include "recurrence/step/step.h"
#include "recurrence/tensors/launch.h"

namespace lltm_ext {

// Steps [first, last), whose rows [begin, end) lie side by side.
struct Chunk {
  size_t first, last;
  int64_t begin, end;
};

// At most four chunks, so that the gradients of a quarter of all gates are in memory at a time; few, so that
// the weights' gradients stay large matrix products and half types round their sum but thrice.
inline std::vector<Chunk> chunks_of(const std::vector<Steps::Step>& steps, int64_t total_rows) {
  const int64_t enough_rows = std::max<int64_t>(4096, (total_rows + 3) / 4);
  std::vector<Chunk> chunks;
  for (size_t k = 0; k < steps.size(); ++k) {
    const int64_t begin = steps[k].first_row, end = begin + steps[k].rows;
    if (chunks.empty() || chunks.back().end - chunks.back().begin >= enough_rows) {
      chunks.push_back({k, k + 1, begin, end});
    } else {
      Chunk& chunk = chunks.back();
      chunk = {chunk.first, k + 1, std::min(chunk.begin, begin), std::max(chunk.end, end)};
    }
  }
  return chunks;
}

// gradient += grad_gates^T @ (the h that each of the chunk's rows started from: h0, or the step before).
inline void add_weight_hh_gradient(at::Tensor& gradient, const at::Tensor& grad_gates,
                                   const at::Tensor& output, const at::Tensor& h0,
                                   const std::vector<Steps::Step>& steps, const Chunk& chunk) {
  struct Run {
    int64_t row;  // the first of the rows in grad_gates
    const at::Tensor* source;
    int64_t source_row, rows;
  };
  std::vector<Run> runs;
  const auto add = [&](int64_t row, const at::Tensor& source, int64_t source_row, int64_t rows) {
    if (rows == 0) return;
    if (!runs.empty() && runs.back().source == &source && runs.back().row + runs.back().rows == row &&
        runs.back().source_row + runs.back().rows == source_row) {
      runs.back().rows += rows;
    } else {
      runs.push_back({row, &source, source_row, rows});
    }
  };
  const bool descending = steps[chunk.first].first_row != chunk.begin;
  for (size_t i = chunk.first; i < chunk.last; ++i) {
    const size_t k = descending ? chunk.first + chunk.last - 1 - i : i;  // in the order of the rows
    const int64_t row = steps[k].first_row - chunk.begin;
    const int64_t carried = k == 0 ? 0 : std::min(steps[k].rows, steps[k - 1].rows);
    if (carried > 0) add(row, output, steps[k - 1].first_row, carried);
    add(row + carried, h0, carried, steps[k].rows - carried);
  }
  std::vector<at::Tensor> sources;
  for (const Run& run : runs) sources.push_back(run.source->narrow(0, run.source_row, run.rows));
  if (runs.size() > 2) {  // a packed sequence; a dense one has no more than two, and needs no copy
    add_weight_gradient(gradient, grad_gates, at::cat(sources));
    return;
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    add_weight_gradient(gradient, grad_gates.narrow(0, runs[i].row, runs[i].rows), sources[i]);
  }
}

template <class Op>
struct SequenceBackward {
  using Cell = typename Op::Cell;
  static constexpr int64_t kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;

  // What a direction's backward starts from.
  struct Saved {
    OptionalTensor grad_output, grad_h_n, grad_c_n;
    at::Tensor output, gates, extra;  // as the forward left them
  };

  static void check_backward_inputs(const Saved& saved, const at::Tensor& input, const at::Tensor& h0,
                                    const at::Tensor& c0) {
    const auto& [grad_output, grad_h_n, grad_c_n, output, gates, extra] = saved;
    const std::string op_name = std::string(Op::name) + "_backward";
    const char* op = op_name.c_str();
    check_device(op, "input", input);
    check_floating(op, "input", input);
    const at::ScalarType type = input.scalar_type();
    const auto check = [&](const char* name, const at::Tensor& x, at::ScalarType dtype,
                           c10::SymIntArrayRef shape, const char* meaning) {
      check_same_device(op, name, x, input);
      check_same_dtype(op, name, x, dtype);
      check_shape(op, name, x, shape, meaning);
    };
    TORCH_CHECK(input.dim() >= 2 && h0.dim() == 2, op,
                ": expected input of 2 or 3 and h0 of 2 dimensions, got ", input.sym_sizes(), " and ",
                h0.sym_sizes());
    const auto rows_of = [&](const c10::SymInt& width) { return sizes_of_rows(input, width); };
    const c10::SymInt hidden = h0.sym_size(1);
    check("output", output, type, rows_of(hidden), "[..., hidden_size]");
    check("gates", gates, type, rows_of(kGates * hidden), "[..., gates*hidden_size]");
    check("extra", extra, type, rows_of(kExtra * hidden), "[..., extra*hidden_size]");
    if (grad_output) check("grad_output", *grad_output, type, rows_of(hidden), "[..., hidden_size]");
    if (grad_h_n) check("grad_h_n", *grad_h_n, type, h0.sym_sizes(), "[batch, hidden_size]");
    if (grad_c_n) check("grad_c_n", *grad_c_n, c0.scalar_type(), h0.sym_sizes(), "[batch, hidden_size]");
  }

  // A direction on its way backward, chunk by chunk from the last step to the first.
  struct Retreat {
    const Direction& direction;
    OptionalTensor grad_output;
    at::Tensor output, gates, extra;  // their rows
    std::vector<Steps::Step> steps;
    std::vector<Chunk> chunks;
    at::Tensor grad_h, grad_c;  // [B, H] from after a chunk's steps to before them
    at::Tensor grad_bias;       // [B, G * H], whose sum is the bias's gradient; or undefined
    at::Tensor grad_input, grad_weight_ih, grad_weight_hh;  // of weights: undefined until the first chunk
    // For the engine: weight_hh transposed, and grad_output with nothing between its rows.
    at::Tensor weight_hh_t, dense_grad_output;

    Retreat(const at::Tensor& input, const Direction& direction, const Saved& saved, const Rows& rows,
            bool input_needs_grad, bool bias_needs_grad)
        : direction(direction),
          grad_output(saved.grad_output),
          output(flatten_rows(saved.output)),
          gates(aligned(flatten_rows(saved.gates))),
          extra(aligned(flatten_rows(saved.extra))),
          steps(rows.steps(direction.reverse)),
          chunks(chunks_of(steps, output.size(0))) {
      const auto state_options = input.options().dtype(at::toOpMathType(input.scalar_type()));
      grad_h = at::zeros({rows.batch, rows.hidden}, direction.h0.options());
      grad_c = at::zeros({rows.batch, rows.hidden}, state_options);
      if (saved.grad_h_n) grad_h.copy_(*saved.grad_h_n);
      if (saved.grad_c_n) grad_c.copy_(*saved.grad_c_n);
      if (bias_needs_grad) grad_bias = at::zeros({rows.batch, kGates * rows.hidden}, state_options);
      if (input_needs_grad) {
        grad_input = empty_contiguous(input);
        if (rows.batch * rows.hidden == 0) grad_input.zero_();
      }
    }

    void prepare_for_engine() {
      if (!weight_hh_t.defined()) weight_hh_t = aligned(direction.weight_hh.t());
      if (grad_output && !dense_grad_output.defined()) dense_grad_output = aligned(*grad_output);
    }
  };

  struct RetreatChunk {
    Retreat& of;
    Chunk chunk;
    at::Tensor grad_gates;  // of the chunk's rows
  };

  // The same by the engine, or by steps: all directions at once where there is room, else one after the
  // other.
  static void backward_steps(at::ArrayRef<RetreatChunk> parts, const Rows& rows, c10::string_view algorithm) {
    const Plan plan = rows.plan<Op>(parts[0].of.gates, /*backward=*/true, algorithm, parts.size());
    if (plan.is_fused() && backward_at_once(parts, rows, plan, algorithm)) return;
    if (parts.size() == 1) return backward_stepwise(parts[0]);
    for (size_t i = 0; i < parts.size(); ++i) backward_steps(parts.slice(i, 1), rows, algorithm);
  }

  // grad_gates of the chunk's rows, a product and a kernel a step.
  static void backward_stepwise(const RetreatChunk& part) {
    const auto& [of, chunk, grad_gates] = part;
    const at::Tensor &gates = of.gates, &extra = of.extra, &grad_h = of.grad_h, &grad_c = of.grad_c,
                     &grad_bias = of.grad_bias, &weight_hh = of.direction.weight_hh;
    const int64_t batch = grad_h.size(0), hidden = grad_h.size(1);
    const at::Tensor dy = of.grad_output.value_or(at::Tensor());
    const Matmul matmul(gates);
    for (size_t k = chunk.last; k-- > chunk.first;) {
      const auto [first_row, n] = of.steps[k];
      const at::Tensor step_grad_gates = grad_gates.narrow(0, first_row - chunk.begin, n);
      // In steps, or in rows.
      const int64_t dy_at =
          !dy.defined() ? 0 : (dy.dim() == 3 ? first_row / batch : first_row) * dy.stride(0);
      launch("recurrence_pointwise_step", gates,
             [&, first_row = first_row, n = n](auto type, auto... stream) {
               using T = typename decltype(type)::type;
               const StepBackwardArguments<T> step = {
                   .batch = n,
                   .hidden = hidden,
                   .gates = pointer<T>(gates) + first_row * kGates * hidden,
                   .extra = pointer<T>(extra) + first_row * kExtra * hidden,
                   .grad_output = dy.defined() ? pointer<T>(dy) + dy_at : nullptr,
                   .output_row = dy.defined() ? dy.stride(-2) : 0,
                   .output_unit = dy.defined() ? dy.stride(-1) : 0,
                   .grad_h = pointer<T>(grad_h),
                   .grad_c = mutable_pointer<acc_t<T>>(grad_c),
                   .grad_gates = mutable_pointer<T>(step_grad_gates),
                   .grad_bias = mutable_pointer<acc_t<T>>(grad_bias),
               };
               return recurrence_step<Cell>(step, stream...);
             });
      matmul(first_rows(grad_h, n), step_grad_gates, weight_hh);
    }
  }

  // The same by the engine. False if the GPU has no room for its kernel now; nothing has run then.
  static bool backward_at_once(at::ArrayRef<RetreatChunk> parts, const Rows& rows, const Plan& plan,
                               c10::string_view algorithm) {
    const at::Tensor& like = parts[0].of.gates;
    const at::Tensor first_rows = first_rows_on(like, rows.batch_sizes);
    for (const RetreatChunk& part : parts) part.of.prepare_for_engine();
    const auto sequence_of = [&](auto type, size_t i) {
      using T = typename decltype(type)::type;
      const auto& [of, chunk, grad_gates] = parts[i];
      return SequenceBackwardArguments<T>{
          .steps = rows.order(of.direction.reverse, first_rows),
          .begin = static_cast<int>(chunk.first),
          .end = static_cast<int>(chunk.last),
          .first_row = chunk.begin,
          .rows = chunk.end - chunk.begin,
          .hidden = static_cast<int>(rows.hidden),
          .weight_t = pointer<T>(of.weight_hh_t),
          .gates = pointer<T>(of.gates),
          .extra = pointer<T>(of.extra),
          .grad_output = pointer<T>(of.dense_grad_output),
          .grad_gates = mutable_pointer<T>(grad_gates),
          .grad_h = mutable_pointer<T>(of.grad_h),
          .grad_c = mutable_pointer<float>(of.grad_c),
          .grad_bias = mutable_pointer<float>(of.grad_bias),
      };
    };
    return launch_at_once(
        "recurrence_persistent_backward", like, plan, algorithm, parts.size(), [&](auto type, auto stream) {
          return launch_sequence_backward<Cell>(together(type, parts.size(), sequence_of), plan, stream);
        });
  }

  // The matrix products that follow from the gradients of a chunk's gates.
  static void add_gradients(const RetreatChunk& part, const at::Tensor& input_rows) {
    const auto& [of, chunk, grad_gates] = part;
    const int64_t count = chunk.end - chunk.begin;
    add_weight_gradient(of.grad_weight_ih, grad_gates, input_rows.narrow(0, chunk.begin, count));
    add_weight_hh_gradient(of.grad_weight_hh, grad_gates, of.output, of.direction.h0, of.steps, chunk);
    if (!of.grad_input.defined()) return;
    const at::Tensor grad_rows = flatten_rows(of.grad_input).narrow(0, chunk.begin, count);
    Matmul{input_rows}(grad_rows, grad_gates, of.direction.weight_ih);
  }

  static at::Tensor or_zeros(const at::Tensor& gradient, const at::Tensor& of) {
    return gradient.defined() ? gradient : at::zeros(of.sizes(), of.options());
  }

  // Of each direction {grad_input, grad_h0, grad_c0, grad_weight_ih, grad_weight_hh, grad_bias}; grad_input
  // and grad_bias are empty unless they are needed.
  static variable_list checked_backward(const at::Tensor& input, Directions directions,
                                        at::ArrayRef<Saved> saved, at::OptionalIntArrayRef batch_sizes,
                                        c10::string_view algorithm, bool input_needs_grad,
                                        bool bias_needs_grad) {
    for (size_t i = 0; i < directions.size(); ++i) {
      const Direction& d = directions[i];
      check_backward_inputs(saved[i], input, d.h0, d.c0);
      check_inputs(Op::name, kGates, input, d.h0, d.c0, d.weight_ih, d.weight_hh, std::nullopt, batch_sizes,
                   algorithm);
    }
    check_alike<Op>(directions);
    if (input.is_meta()) return meta_backward(input, directions, input_needs_grad, bias_needs_grad);
    const KernelGuard guard(input);
    const Rows rows(input, directions, batch_sizes);
    const at::Tensor input_rows = flatten_rows(input);
    std::vector<Retreat> retreats;
    size_t turns = 0;
    for (size_t i = 0; i < directions.size(); ++i) {
      retreats.emplace_back(input, directions[i], saved[i], rows, input_needs_grad, bias_needs_grad);
      turns = std::max(turns, retreats[i].chunks.size());
    }
    for (size_t turn = 1; turn <= turns && rows.batch * rows.hidden > 0; ++turn) {
      std::vector<RetreatChunk> parts;  // of packed rows, a direction may have a chunk less
      for (Retreat& of : retreats) {
        if (turn > of.chunks.size()) continue;
        const Chunk chunk = of.chunks[of.chunks.size() - turn];
        const int64_t count = chunk.end - chunk.begin;
        parts.push_back({of, chunk, at::empty({count, kGates * rows.hidden}, of.gates.options())});
      }
      backward_steps(parts, rows, algorithm);
      for (const RetreatChunk& part : parts) add_gradients(part, input_rows);
    }
    variable_list found;
    for (const Retreat& of : retreats) {
      const Direction& d = of.direction;
      append(found, {input_needs_grad ? of.grad_input : at::empty({0}, input.options()), of.grad_h,
                     of.grad_c.to(d.c0.scalar_type()), or_zeros(of.grad_weight_ih, d.weight_ih),
                     or_zeros(of.grad_weight_hh, d.weight_hh),
                     bias_needs_grad ? of.grad_bias.sum(0).to(d.weight_hh.scalar_type())
                                     : at::empty({0}, input.options())});
    }
    return found;
  }

  static variable_list meta_backward(const at::Tensor& input, Directions directions, bool input_needs_grad,
                                     bool bias_needs_grad) {
    variable_list found;
    for (const Direction& d : directions) {
      const c10::SymInt width = bias_needs_grad ? d.weight_hh.sym_size(0) : 0;
      append(found, {input_needs_grad ? empty_contiguous(input) : at::empty({0}, input.options()),
                     empty_contiguous(d.h0), empty_contiguous(d.c0), empty_contiguous(d.weight_ih),
                     empty_contiguous(d.weight_hh), at::empty_symint({width}, d.weight_hh.options())});
    }
    return found;
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> sequence_backward(
      const OptionalTensor& grad_output, const OptionalTensor& grad_h_n, const OptionalTensor& grad_c_n,
      const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
      const at::Tensor& weight_hh, const at::Tensor& output, const at::Tensor& gates, const at::Tensor& extra,
      at::OptionalIntArrayRef batch_sizes, bool reverse, c10::string_view algorithm, bool input_needs_grad,
      bool bias_needs_grad) {
    const Direction only = {h0, c0, weight_ih, weight_hh, std::nullopt, reverse};
    const Saved saved = {grad_output, grad_h_n, grad_c_n, output, gates, extra};
    const variable_list g =
        checked_backward(input, only, saved, batch_sizes, algorithm, input_needs_grad, bias_needs_grad);
    return {g[0], g[1], g[2], g[3], g[4], g[5]};
  }

  // grad_input, and of each direction {grad_h0, grad_c0, grad_weight_ih, grad_weight_hh, grad_bias}, from the
  // gradients of what the forward gave of each, and {output, gates, extra} as it left them.
  static variable_list both_backward(const c10::List<OptionalTensor>& grad_outputs, const at::Tensor& input,
                                     at::TensorList onward, at::TensorList reverse, at::TensorList saved,
                                     at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm,
                                     bool input_needs_grad, bool bias_needs_grad) {
    TORCH_CHECK(grad_outputs.size() == 6 && saved.size() == 6, named<Op>("_bidirectional_backward"),
                ": expected three of grad_outputs and three of saved a direction, got ", grad_outputs.size(),
                " and ", saved.size());
    std::vector<Saved> of_each;
    for (size_t i = 0; i < 6; i += 3) {
      of_each.push_back({grad_outputs.get(i), grad_outputs.get(i + 1), grad_outputs.get(i + 2), saved[i],
                         saved[i + 1], saved[i + 2]});
    }
    variable_list g = checked_backward(input, both_of<Op>(onward, reverse), of_each, batch_sizes, algorithm,
                                       input_needs_grad, bias_needs_grad);
    if (input_needs_grad) g[0] = g[0] + g[6];
    g.erase(g.begin() + 6);
    return g;
  }
};

}  // namespace lltm_ext
