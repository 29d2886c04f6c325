// Sequences of a cell backward, in one direction or two. The steps run in a few chunks,
// the last steps first. A chunk computes the gradients of its gates, from which matrix products follow.
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "custom_cell/custom_cell.h"
#include "custom_cell/launch.h"
#include "custom_cell/own_products.h"

namespace lltm_ext {
namespace {

// A chunk: steps [first, last) and their rows [begin, end).
struct Chunk {
  size_t first, last;
  int64_t begin, end;
};

// One if no products follow. Four chunks keep only a quarter of all gate gradients in memory. More chunks, or
// smaller ones, would make the products smaller, take more launches and round half-type sums more often. In
// each, kernels load the weights again, so a chunk has several steps.
std::vector<Chunk> chunks_of(const RowsOfSteps& steps, int64_t total_rows, bool has_products) {
  if (!has_products && steps.size() > 0) return {{0, steps.size(), 0, total_rows}};
  constexpr size_t kLeastSteps = 4;
  const int64_t least_rows = std::max<int64_t>(8192, (total_rows + 3) / 4);
  const auto is_full = [&](const Chunk& chunk) {
    return chunk.end - chunk.begin >= least_rows && chunk.last - chunk.first >= kLeastSteps;
  };
  std::vector<Chunk> chunks;
  for (size_t k = 0; k < steps.size(); ++k) {
    const int64_t begin = steps[k].first, end = begin + steps[k].count;
    if (chunks.empty() || is_full(chunks.back())) {
      chunks.push_back({k, k + 1, begin, end});
    } else {
      Chunk& chunk = chunks.back();
      chunk = {chunk.first, k + 1, std::min(chunk.begin, begin), std::max(chunk.end, end)};
    }
  }
  return chunks;
}

// gradient += grad_gates^T @ h, an undefined gradient being zeros; of heads only the blocks that it has.
void add_weight_hh_gradient(const Matmul& matmul, at::Tensor& gradient, const at::Tensor& grad_gates,
                            const at::Tensor& h) {
  const int64_t hidden = h.size(1), size = gradient.defined() ? gradient.size(1) : hidden;
  if (size == hidden) return matmul.add_weight_gradient(gradient, grad_gates, h);
  for (int64_t row = 0; row < gradient.size(0); row += size) {
    at::Tensor block = gradient.narrow(0, row, size);
    matmul.add_weight_gradient(block, grad_gates.narrow(1, row, size), h.narrow(1, row % hidden, size));
  }
}

// The same, with the h that each row of the chunk started from: h0 or the previous step's, less what a reset
// to zeros took of it. Only dense sequences may lack h0, which then is zeros.
void add_weight_hh_gradient(const Matmul& matmul, at::Tensor& gradient, const at::Tensor& grad_gates,
                            const at::Tensor& output, const at::Tensor& h0, const at::Tensor& reset,
                            const RowsOfSteps& steps, const Chunk& chunk) {
  struct Run {
    int64_t row;  // the first row in grad_gates
    const at::Tensor* source;
    int64_t source_row, rows;
  };
  std::vector<Run> runs;
  const auto add = [&](int64_t row, const at::Tensor& source, int64_t source_row, int64_t rows) {
    if (rows == 0 || !source.defined()) return;
    if (!runs.empty() && runs.back().source == &source && runs.back().row + runs.back().rows == row &&
        runs.back().source_row + runs.back().rows == source_row) {
      runs.back().rows += rows;
    } else {
      runs.push_back({row, &source, source_row, rows});
    }
  };
  const bool descending = steps[chunk.first].first != chunk.begin;
  for (size_t i = chunk.first; i < chunk.last; ++i) {
    const size_t k = descending ? chunk.first + chunk.last - 1 - i : i;  // steps in the order of their rows
    const int64_t row = steps[k].first - chunk.begin;
    const int64_t carried = k == 0 ? 0 : std::min(steps[k].count, steps[k - 1].count);
    if (carried > 0) add(row, output, steps[k - 1].first, carried);
    add(row + carried, h0, carried, steps[k].count - carried);
  }
  if (reset.defined() && !runs.empty()) {  // without h0, the rows of the first step have no run
    const int64_t first = runs[0].row, count = runs.back().row + runs.back().rows - first;
    const at::Tensor kept_h = at::empty({count, output.size(1)}, output.options());
    for (const auto& [row, source, source_row, rows] : runs) {
      mask_rows({kept_h, row - first}, {*source, source_row}, {reset, chunk.begin + row}, rows);
    }
    return add_weight_hh_gradient(matmul, gradient, grad_gates.narrow(0, first, count), kept_h);
  }
  std::vector<at::Tensor> sources;
  for (const Run& run : runs) sources.push_back(run.source->narrow(0, run.source_row, run.rows));
  // A packed sequence has more than two runs; two products are faster than a copy.
  if (runs.size() > 2) return add_weight_hh_gradient(matmul, gradient, grad_gates, at::cat(sources));
  for (size_t i = 0; i < runs.size(); ++i) {
    add_weight_hh_gradient(matmul, gradient, grad_gates.narrow(0, runs[i].row, runs[i].rows), sources[i]);
  }
}

// The gradients of a direction; undefined where they are not needed.
struct Gradients {
  at::Tensor input, h0, states, weight_ih, weight_hh, bias, parameters;
};

// What a direction's backward reads in addition to the forward's inputs.
struct BackwardInputs {
  OptionalTensor grad_output, grad_h_n, grad_states_n;
  at::Tensor output, gates, extra;  // as the forward left them; output: h of every step
};

void check_backward_inputs(const CellOp& op, const CellCall& call, const Direction& d,
                           const BackwardInputs& given) {
  const auto& [grad_output, grad_h_n, grad_states_n, output, gates, extra] = given;
  const at::Tensor& input = call.input;
  const std::string full_name = op.name() + "_backward";
  const char* name_of_op = full_name.c_str();
  const CellShape shape = op.shape();
  const at::ScalarType type = input.scalar_type();
  const c10::SymInt hidden = hidden_of(shape, call, d), batch = batch_of(call, d);
  const auto check = [&](const char* name, const at::Tensor& x, at::ScalarType dtype,
                         c10::SymIntArrayRef sizes, const char* meaning) {
    check_same_device(name_of_op, name, x, input);
    check_same_dtype(name_of_op, name, x, dtype);
    check_shape(name_of_op, name, x, sizes, meaning);
  };
  const auto rows_of = [&](const c10::SymInt& width) { return sizes_like_input(input, width); };
  check("output", output, type, rows_of(hidden), "[..., hidden_size]");
  check("gates", gates, kept_gates_type(shape, input, d), rows_of(kept_gates(shape, d) * hidden),
        "[..., gates*hidden_size]");
  check("extra", extra, type, rows_of(shape.extra() * hidden), "[..., extra*hidden_size]");
  if (grad_output) {
    check("grad_output", *grad_output, type, rows_of(shape.outputs * hidden),
          shape.outputs == 1 ? "[..., hidden_size]" : "[..., outputs*hidden_size]");
  }
  if (grad_h_n) check("grad_h_n", *grad_h_n, type, {batch, hidden}, "[batch, hidden_size]");
  if (!grad_states_n) return;
  const c10::SymDimVector sizes = states_sizes(shape, d, batch, hidden);
  check("grad_states_n", *grad_states_n, states_type(input, d), sizes,
        sizes.size() == 2 ? "[batch, hidden_size]" : "[states, batch, hidden_size]");
}

// A direction: what its backward reads, and the gradients that its chunks add to.
struct DirectionGradients {
  const Direction& inputs;
  OptionalTensor grad_output;
  at::Tensor output, gates, extra;  // [N, ...]
  at::Tensor bias;                  // that the gates lack, if they are the input; or undefined
  at::Tensor h0;                    // undefined for zeros before a dense sequence
  RowsOfSteps steps;
  std::vector<Chunk> chunks;
  // The gradients after a chunk's steps, replaced by those before them: [B, H]; [B, H] if the cell reads h;
  // [S, B, H]. They start as zeros, which have not been written if `are_unset`.
  at::Tensor grad_h, grad_own_h, grad_states;
  bool are_unset;
  // What is summed over the first dimension: gradients of h0 and states through resets to them, [threads of
  // a unit, 1 + S, B, H], and those of bias and parameters, [tiles * B, (G + P) * H]; or undefined.
  at::Tensor grad_initial, grad_sums;
  at::Tensor grad_input, grad_weight_ih, grad_weight_hh;  // weights': undefined until the first chunk
  at::Tensor parameters, step_inputs, reset;              // aligned; rows
  at::Tensor weight_hh_t, dense_grad_output;              // for fused kernels: transposed; aligned

  DirectionGradients(const CellShape& shape, const at::Tensor& input, const Direction& inputs,
                     const BackwardInputs& given, const SequenceSizes& sizes, bool input_needs_grad,
                     bool bias_needs_grad)
      : inputs(inputs),
        grad_output(given.grad_output),
        output(flatten_rows(given.output).contiguous()),
        gates(aligned(flatten_rows(given.gates))),
        extra(aligned(flatten_rows(given.extra))),
        h0(inputs.reset.defined() || !shape.recurrent ? aligned(inputs.h0) : inputs.h0),
        steps(sizes.steps(inputs.reverse)),
        chunks(chunks_of(steps, output.size(0), shape.recurrent || inputs.weight_ih.defined())),
        parameters(aligned(inputs.parameters)),
        step_inputs(step_inputs_of_units(shape, inputs.step_inputs, sizes.hidden)),
        reset(contiguous_or_none(inputs.reset)) {
    if (kept_gates(shape, inputs) == 0 && !shape.recurrent) {
      bias = bias_of(inputs);
      gates = aligned(flatten_rows(input.to(projections_type(shape, input))));
    }
    if (!h0.defined() && sizes.batch_sizes) h0 = at::zeros({sizes.batch, sizes.hidden}, input.options());
    const auto options = input.options().dtype(at::toOpMathType(input.scalar_type()));
    grad_h = at::empty({sizes.batch, sizes.hidden}, input.options());
    grad_states = at::empty({shape.states, sizes.batch, sizes.hidden}, options);
    if (shape.reads_h) grad_own_h = at::empty({sizes.batch, sizes.hidden}, options);
    are_unset = !sizes.batch_sizes && !given.grad_h_n && !given.grad_states_n;
    if (!are_unset) {
      set_values(grad_h, or_undefined(given.grad_h_n));
      if (grad_own_h.defined()) grad_own_h.zero_();
      if (given.grad_states_n) {
        grad_states.view(given.grad_states_n->sizes()).copy_(*given.grad_states_n);
      } else {
        grad_states.zero_();
      }
    }
    if (bias_needs_grad || shape.parameters > 0) {
      grad_sums = at::zeros({sizes.batch, shape.sums() * sizes.hidden}, options);
    }
    if (shape.resets_to_initial) {
      grad_initial = at::zeros({1, 1 + shape.states, sizes.batch, sizes.hidden}, options);
    }
    if (input_needs_grad) {
      grad_input = empty_contiguous(input);
      if (sizes.batch * sizes.hidden == 0) grad_input.zero_();
    }
  }

  // Steps that are computed one by one read these gradients from memory.
  void write_zeros() {
    if (!std::exchange(are_unset, false)) return;
    for (const at::Tensor& x : {grad_h, grad_own_h, grad_states}) {
      if (x.defined()) x.zero_();
    }
  }

  // Steps that are computed one by one read the projections with the bias.
  void add_bias() {
    if (!bias.defined()) return;
    gates = gates + bias.to(gates.scalar_type());
    bias = at::Tensor();
  }

  void prepare_for_fused(const Plan& plan, const SequenceSizes& sizes) {
    const UnitTiles& tiles = plan.tiles;
    const bool is_other = weight_hh_t.defined() && weight_hh_t.size(0) != sizes.hidden / plan.heads;
    if (inputs.weight_hh.defined() && (!weight_hh_t.defined() || is_other)) {
      weight_hh_t = aligned(sizes.weight_hh(plan, inputs).t());
    }
    if (grad_output && !dense_grad_output.defined()) dense_grad_output = aligned(*grad_output);
    if (tiles.threads == 0) return;
    extend(grad_initial, tiles.tiles * tiles.rows());
    extend(grad_sums, tiles.tiles * grad_h.size(0));
  }

  // Adds zeros to the first dimension.
  static void extend(at::Tensor& x, int64_t count) {
    if (!x.defined() || x.size(0) >= count) return;
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes[0] = count - x.size(0);
    x = at::cat({x, at::zeros(sizes, x.options())});
  }
};

struct DirectionChunk {
  DirectionGradients& direction;
  Chunk chunk;
  int64_t steps() const { return static_cast<int64_t>(chunk.last - chunk.first); }
  at::Tensor grad_gates;        // [rows of the chunk, G * H]
  at::Tensor grad_projections;  // likewise; is grad_gates if the cell sees only sums
  // Of the products with the cell's own weights: [rows of the chunk, products * H], and what they took,
  // [rows of the chunk, fed * H]; or undefined.
  at::Tensor grad_products, fed;
};

struct Backward {
  const CellOp& op;
  const CellCall& call;
  const CellShape shape = op.shape();
  const SequenceSizes sizes{shape, call};

  std::vector<Gradients> run(at::ArrayRef<BackwardInputs> given, bool input_needs_grad,
                             bool bias_needs_grad) {
    const at::Tensor &input = call.input, input_rows = flatten_rows(input);
    std::vector<DirectionGradients> gradients;
    size_t chunk_count = 0;
    for (size_t i = 0; i < given.size(); ++i) {
      gradients.emplace_back(shape, input, call.directions[i], given[i], sizes, input_needs_grad,
                             bias_needs_grad);
      chunk_count = std::max(chunk_count, gradients[i].chunks.size());
    }
    for (size_t from_last = 1; from_last <= chunk_count && sizes.batch * sizes.hidden > 0; ++from_last) {
      std::vector<DirectionChunk> parts;
      for (DirectionGradients& direction : gradients) {
        if (from_last > direction.chunks.size()) continue;  // packed directions may differ in their chunks
        const Chunk chunk = direction.chunks[direction.chunks.size() - from_last];
        const int64_t count = chunk.end - chunk.begin;
        const auto planes = [&](int64_t n) { return at::empty({count, n * sizes.hidden}, input.options()); };
        // Without weight_ih the gradient of the projections is that of the input.
        const bool is_of_input = direction.grad_input.defined() && !direction.inputs.weight_ih.defined();
        const at::Tensor projections = is_of_input
                                           ? flatten_rows(direction.grad_input).narrow(0, chunk.begin, count)
                                           : planes(shape.gates);
        parts.push_back({direction, chunk, shape.separate ? planes(shape.gates) : projections, projections});
        if (shape.products > 0) {
          parts.back().grad_products = planes(shape.products);
          parts.back().fed = planes(shape.fed);
        }
      }
      run_steps(parts);
      for (const DirectionChunk& part : parts) add_products(part, input_rows);
    }
    std::vector<Gradients> results;
    for (DirectionGradients& g : gradients) results.push_back(finished(g, bias_needs_grad));
    return results;
  }

  Plan plan_of(at::ArrayRef<DirectionChunk> parts, bool side_by_side) const {
    return sizes.plan(op, parts[0].direction.output, /*backward=*/true, call.algorithm, parts.size(),
                      side_by_side, parts[0].steps());
  }

  // Computes grad_gates of a chunk of each direction: in one launch if they fit, else side by side.
  void run_steps(at::ArrayRef<DirectionChunk> parts, bool side_by_side = false) const {
    const at::Tensor& like = parts[0].direction.output;
    const Plan plan = plan_of(parts, side_by_side);
    if (plan.is_fused() && try_run_fused(parts, plan)) return;
    if (parts.size() == 1) return run_stepwise(parts[0]);
    // A direction keeps these tensors for its other chunks, so they are allocated on the current stream.
    for (size_t i = 0; i < parts.size(); ++i) {
      const Plan of_one = plan_of(parts.slice(i, 1), /*side_by_side=*/true);
      if (of_one.is_fused()) parts[i].direction.prepare_for_fused(of_one, sizes);
    }
    run_side_by_side(like, parts.size(),
                     [&](size_t i) { run_steps(parts.slice(i, 1), /*side_by_side=*/true); });
  }

  // Runs a pointwise kernel and a matrix product per step.
  void run_stepwise(const DirectionChunk& part) const {
    const auto& [direction, chunk, grad_gates, grad_projections, grad_products, fed] = part;
    direction.write_zeros();
    direction.add_bias();
    const at::Tensor &gates = direction.gates, &extra = direction.extra, &grad_h = direction.grad_h,
                     &grad_states = direction.grad_states, &h = direction.output;
    const int64_t batch = grad_h.size(0), hidden = grad_h.size(1);
    const at::Tensor dy = direction.grad_output.value_or(at::Tensor());
    const Matmul matmul(h);
    const OwnProducts own(shape, op.products(), hidden);
    const int stages = op.stages(/*backward=*/true);
    const at::Tensor weight_hh = dense_of_heads(direction.inputs.weight_hh, hidden);
    at::Tensor own_products;
    if (own.any()) own_products = at::empty({batch, shape.products * hidden}, grad_states.options());
    for (size_t k = chunk.last; k-- > chunk.first;) {
      const auto [first_row, n] = direction.steps[k];
      const RowRange previous = k > 0 ? direction.steps[k - 1] : RowRange{0, 0};
      const at::Tensor step_grad_gates = grad_gates.narrow(0, first_row - chunk.begin, n),
                       step_grad_projections = grad_projections.narrow(0, first_row - chunk.begin, n);
      const auto run_stage = [&, &direction = direction, first_row = first_row, n = n](int stage, auto type,
                                                                                       auto... stream) {
        using T = typename decltype(type)::type;
        StridedGradient<T> grad_output = {};
        if (dy.defined()) {
          const int64_t index = dy.dim() == 3 ? first_row / batch : first_row;  // a step, or a row
          grad_output = {pointer<T>(dy) + index * dy.stride(0), dy.stride(-2), dy.stride(-1)};
        }
        const auto row_major = [&](const at::Tensor& x) {
          return Gates<T>::row_major(mutable_pointer<T>(x), shape.gates, hidden);
        };
        const auto* const step_gates = reinterpret_cast<const T*>(
            pointer<char>(gates) + first_row * shape.gates * hidden * gates.element_size());
        const StepBackwardArguments<T> step = {
            .batch = n,
            .hidden = hidden,
            .saved = Gates<const T>::row_major(step_gates, shape.gates, hidden),
            .extra = rows_from<T>(extra, first_row),
            .parameters = pointer<T>(direction.parameters),
            .step_inputs = rows_from<T>(direction.step_inputs, first_row),
            .resets = resets_from<T>(direction.reset, first_row),
            .grad_initial = mutable_pointer<acc_t<T>>(direction.grad_initial),
            .grad_output = grad_output,
            .grad_h = pointer<T>(grad_h),
            .grad_own_h = mutable_pointer<acc_t<T>>(direction.grad_own_h),
            .grad_new_states = {pointer<acc_t<T>>(grad_states), hidden, 1},
            .grad_old_states = mutable_pointer<acc_t<T>>(grad_states),
            .state_stride = batch * hidden,
            .grad_gates = row_major(step_grad_gates),
            .grad_projections = row_major(step_grad_projections),
            .grad_sums = mutable_pointer<acc_t<T>>(direction.grad_sums),
            .gates = Gates<const T>::row_major(step_gates, shape.gates, hidden),
            .old_h = rows_from<T>(h, previous.first),
            .old_rows = previous.count,
            .h0 = pointer<T>(direction.h0),
            .products = pointer<acc_t<T>>(own_products),
            .grad_products =
                mutable_pointer<T>(grad_products) + (first_row - chunk.begin) * shape.products * hidden,
            .fed = mutable_pointer<T>(fed) + (first_row - chunk.begin) * shape.fed * hidden,
        };
        return op.step(step, stage, stream...);
      };
      for (int stage = 0; stage <= stages; ++stage) {
        launch("recurrence_pointwise_backward", h,
               [&](auto type, auto... stream) { return run_stage(stage, type, stream...); });
        if (stage == stages) break;
        own.multiply_back(matmul, stage, grad_products.narrow(0, first_row - chunk.begin, n), weight_hh,
                          first_rows(own_products, n));
      }
      if (shape.recurrent) {
        matmul(first_rows(grad_h, n), step_grad_gates, own.of_gates(weight_hh));
      } else {
        first_rows(grad_h, n).zero_();
      }
      // The kernel has scaled the gradients of the states.
      if (direction.reset.defined()) {
        mask_rows({grad_h}, {grad_h}, {direction.reset, first_row}, n, direction.grad_initial);
      }
    }
  }

  // Returns false, having run nothing, if the plan does not fit but another one may (try_launch_fused).
  bool try_run_fused(at::ArrayRef<DirectionChunk> parts, const Plan& plan) const {
    const at::Tensor& like = parts[0].direction.output;
    const at::Tensor first_rows = first_rows_on(like, sizes.batch_sizes);
    variable_list parameters;
    for (const DirectionChunk& part : parts) {
      const DirectionGradients& d = part.direction;
      parameters.push_back(aligned(with_bias(shape, d.parameters, d.bias, sizes.hidden)));
      part.direction.prepare_for_fused(plan, sizes);
      if (!plan.runs_all_steps()) part.direction.write_zeros();
    }
    const auto arguments_of = [&](auto type, size_t i) {
      using T = typename decltype(type)::type;
      const auto& [direction, chunk, grad_gates, grad_projections, grad_products, fed] = parts[i];
      return SequenceBackwardArguments<T>{
          .steps = sizes.order(direction.inputs.reverse, first_rows),
          .begin = static_cast<int>(chunk.first),
          .end = static_cast<int>(chunk.last),
          .first_row = chunk.begin,
          .rows = chunk.end - chunk.begin,
          .hidden = static_cast<int>(sizes.hidden),
          .from_zeros = direction.are_unset,
          .reset_is_bool = is_bool(direction.reset),
          .has_bias = direction.bias.defined(),
          .weight_t = pointer<T>(direction.weight_hh_t),
          .parameters = pointer<T>(parameters[i]),
          .step_inputs = pointer<T>(direction.step_inputs),
          .reset = pointer<void>(direction.reset),
          .gates = static_cast<const T*>(pointer<void>(direction.gates)),
          .extra = pointer<T>(direction.extra),
          .grad_output = pointer<T>(direction.dense_grad_output),
          .grad_gates = mutable_pointer<T>(grad_gates),
          .grad_projections = mutable_pointer<T>(grad_projections),
          .grad_h = mutable_pointer<T>(direction.grad_h),
          .grad_own_h = mutable_pointer<acc_t<T>>(direction.grad_own_h),
          .grad_states = mutable_pointer<acc_t<T>>(direction.grad_states),
          .grad_initial = mutable_pointer<acc_t<T>>(direction.grad_initial),
          .grad_sums = mutable_pointer<acc_t<T>>(direction.grad_sums),
          .output = pointer<T>(direction.output),
          .h0 = pointer<T>(direction.h0),
          .grad_products = mutable_pointer<T>(grad_products),
          .fed = mutable_pointer<T>(fed),
      };
    };
    const at::Tensor links = sizes.links(plan, shape, like);
    const bool ran = try_launch_fused("recurrence_backward", like, plan, call.algorithm, parts.size(),
                                      [&](auto type, auto stream) {
                                        return op.launch(per_direction(type, parts.size(), arguments_of),
                                                         plan, mutable_pointer<void>(links), stream);
                                      });
    for (const DirectionChunk& part : parts) part.direction.are_unset &= !ran;
    return ran;
  }

  // Adds the matrix products with a chunk's gradients.
  void add_products(const DirectionChunk& part, const at::Tensor& input_rows) const {
    const auto& [direction, chunk, grad_gates, grad_projections, grad_products, fed] = part;
    const int64_t count = chunk.end - chunk.begin;
    const Matmul matmul(input_rows);
    if (direction.inputs.weight_ih.defined()) {
      matmul.add_weight_gradient(direction.grad_weight_ih, grad_projections,
                                 input_rows.narrow(0, chunk.begin, count));
    }
    if (shape.recurrent) {
      const at::Tensor masks = shape.resets_to_initial ? at::Tensor() : direction.reset;
      const OwnProducts own(shape, op.products(), sizes.hidden);
      at::Tensor& gradient = direction.grad_weight_hh;
      if (own.any() || sizes.heads > 1) gradient = or_zeros(gradient, direction.inputs.weight_hh);
      at::Tensor of_gates = own.any() ? own.of_gates(gradient) : gradient;
      add_weight_hh_gradient(matmul, of_gates, grad_gates, direction.output, direction.h0, masks,
                             direction.steps, chunk);
      if (own.any()) {
        own.add_weight_gradients(matmul, gradient, grad_products, fed);
      } else {
        gradient = of_gates;
      }
    }
    if (!direction.grad_input.defined() || !direction.inputs.weight_ih.defined()) return;
    const at::Tensor grad_rows = flatten_rows(direction.grad_input).narrow(0, chunk.begin, count);
    matmul(grad_rows, grad_projections, direction.inputs.weight_ih);
  }

  static at::Tensor or_zeros(const at::Tensor& gradient, const at::Tensor& of) {
    return gradient.defined() || !of.defined() ? gradient : at::zeros(of.sizes(), of.options());
  }

  Gradients finished(DirectionGradients& g, bool bias_needs_grad) const {
    const Direction& d = g.inputs;
    g.write_zeros();  // if there were no steps
    if (g.grad_initial.defined()) {
      const int64_t segments = g.grad_initial.size(0);
      const at::Tensor rows = g.grad_initial.view({segments, g.grad_initial.numel() / segments});
      const at::Tensor sum = segments > 1 ? sum_of_rows(rows, rows) : rows;
      g.grad_initial = sum.view(g.grad_initial.sizes().slice(1));
    }
    Gradients result = {.input = g.grad_input,
                        .weight_ih = or_zeros(g.grad_weight_ih, d.weight_ih),
                        .weight_hh = or_zeros(g.grad_weight_hh, d.weight_hh)};
    if (d.h0.defined()) {
      at::Tensor grad_h0 = g.grad_h;
      if (shape.reads_h) grad_h0 = grad_h0 + g.grad_own_h;
      if (g.grad_initial.defined()) grad_h0 = grad_h0 + g.grad_initial.narrow(0, 0, 1).view(d.h0.sizes());
      result.h0 = grad_h0.to(d.h0.scalar_type());
    }
    if (g.grad_initial.defined()) g.grad_states.add_(g.grad_initial.narrow(0, 1, shape.states));
    if (d.states.defined()) result.states = g.grad_states.view(d.states.sizes()).to(d.states.scalar_type());
    if (!g.grad_sums.defined()) return result;
    const int64_t hidden = g.grad_h.size(1);
    const auto sums = [&](int64_t first, int64_t count) {  // [count * H], in its own memory
      return sum_of_rows(g.grad_sums.narrow(1, first * hidden, count * hidden), g.grad_h);
    };
    if (bias_needs_grad) result.bias = sums(0, shape.gates);
    if (shape.parameters > 0) {
      result.parameters = sums(shape.gates, shape.parameters).view(d.parameters.sizes());
    }
    return result;
  }
};

std::vector<Gradients> meta_backward(const CellShape& shape, const CellCall& call, bool input_needs_grad,
                                     bool bias_needs_grad) {
  std::vector<Gradients> results;
  for (const Direction& d : call.directions) {
    Gradients g;
    if (d.weight_ih.defined()) g.weight_ih = empty_contiguous(d.weight_ih);
    if (d.h0.defined()) g.h0 = empty_contiguous(d.h0);
    if (d.states.defined()) g.states = empty_contiguous(d.states);
    if (input_needs_grad) g.input = empty_contiguous(call.input);
    if (shape.recurrent) g.weight_hh = empty_contiguous(d.weight_hh);
    if (bias_needs_grad) {
      g.bias = at::empty_symint({shape.gates * hidden_of(shape, call, d)}, call.input.options());
    }
    if (shape.parameters > 0) g.parameters = empty_contiguous(d.parameters);
    results.push_back(std::move(g));
  }
  return results;
}

}  // namespace

variable_list run_backward(const CellOp& op, const CellCall& call, const std::vector<OptionalTensor>& grads,
                           at::TensorList saved, bool input_needs_grad, bool bias_needs_grad) {
  check(op, call);
  std::vector<BackwardInputs> inputs;
  for (size_t i = 0; i < saved.size(); i += 3) {
    inputs.push_back({grads[i], grads[i + 1], grads[i + 2], saved[i], saved[i + 1], saved[i + 2]});
    check_backward_inputs(op, call, call.directions[i / 3], inputs.back());
  }
  std::vector<Gradients> found;
  if (call.input.is_meta()) {
    found = meta_backward(op.shape(), call, input_needs_grad, bias_needs_grad);
  } else {
    const KernelGuard guard(call.input);
    found = Backward{op, call}.run(inputs, input_needs_grad, bias_needs_grad);
  }
  variable_list gradients;
  for (const Gradients& g : found) {
    append(gradients, {g.input, g.h0, g.states, g.weight_ih, g.weight_hh, g.bias, g.parameters});
  }
  for (at::Tensor& x : gradients) {
    if (!x.defined()) x = at::empty({0}, call.input.options());
  }
  return gradients;
}

}  // namespace lltm_ext
