// lltm, a whole sequence: tensors in, tensors out. Dispatcher op lltm_ext::lltm with the forward and backward
// that its autograd node calls.
//
// T is the length, B the batch, I the input size, H the hidden size. The input projection of all steps is one
// matrix product before the loop, the weights' gradients one after it; a step in the loop is one product with
// weight_hh and one pointwise kernel. Packed sequences come as the rows of all steps, one step after the
// other
// ([N, I], longest sequence first), with the number of rows in each; a dense input is the case of B rows in
// each. `reverse` walks from the last step to the first and leaves every output at its own step.
#include <ATen/OpMathType.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "lltm/lltm_step.h"

namespace lltm_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::variable_list;

// The rows of each step, in the order in which the steps are computed.
struct Steps {
  struct Step {
    int64_t first_row, rows;
  };
  std::vector<Step> steps;

  Steps(at::OptionalIntArrayRef batch_sizes, int64_t length, int64_t batch, bool reverse) {
    const auto rows_of = [&](int64_t t) { return batch_sizes ? (*batch_sizes)[t] : batch; };
    int64_t first_row = 0;
    for (int64_t t = 0; t < length; ++t) {
      steps.push_back({first_row, rows_of(t)});
      first_row += rows_of(t);
    }
    if (reverse) std::reverse(steps.begin(), steps.end());
  }
};

void check_batch_sizes(const char* op, at::IntArrayRef sizes, const at::Tensor& input, int64_t batch) {
  int64_t total = 0, previous = batch;
  for (const int64_t size : sizes) {
    TORCH_CHECK(0 < size && size <= previous, op,
                ": expected batch_sizes to be positive, to start at batch = ", batch,
                " and never to grow, got ", sizes);
    previous = size;
    total += size;
  }
  TORCH_CHECK((sizes.empty() || sizes[0] == batch) && total == input.sym_size(0), op,
              ": expected batch_sizes to start at batch = ", batch, " and to sum to the ", input.sym_size(0),
              " rows of input, got ", sizes);
}

void check_inputs(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                  const at::Tensor& weight_ih, const at::Tensor& weight_hh, const OptionalTensor& bias,
                  at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
  const char* op = "lltm";
  check_device(op, "input", input);
  check_floating(op, "input", input);
  if (batch_sizes) {
    check_dim(op, "input", input, 2, "[rows of all steps, input_size]");
  } else {
    check_dim(op, "input", input, 3, "[length, batch, input_size]");
  }
  const auto check_like_input = [&](const char* name, const at::Tensor& x) {
    check_same_device(op, name, x, input);
    check_same_dtype(op, name, x, input.scalar_type());
  };
  check_like_input("h0", h0);
  check_same_device(op, "c0", c0, input);
  check_cell_dtype(op, "c0", c0, input);
  check_like_input("weight_ih", weight_ih);
  check_like_input("weight_hh", weight_hh);
  if (bias) check_like_input("bias", *bias);

  check_dim(op, "h0", h0, 2, "[batch, hidden_size]");
  const c10::SymInt batch = batch_sizes ? h0.sym_size(0) : input.sym_size(1), hidden = h0.sym_size(1);
  CHECK_SHAPE(op, h0, "[batch, hidden_size]", batch, hidden);
  CHECK_SHAPE(op, c0, "[batch, hidden_size]", batch, hidden);
  CHECK_SHAPE(op, weight_ih, "[3*hidden_size, input_size]", 3 * hidden, input.sym_size(-1));
  CHECK_SHAPE(op, weight_hh, "[3*hidden_size, hidden_size]", 3 * hidden, hidden);
  if (bias) check_shape(op, "bias", *bias, {3 * hidden}, "[3*hidden_size]");
  if (batch_sizes) check_batch_sizes(op, *batch_sizes, input, h0.size(0));
  TORCH_CHECK_VALUE(algorithm == "auto" || algorithm == "stepwise", op,
                    ": expected algorithm to be 'auto' or 'stepwise', got '", algorithm, "'");
}

int64_t length_of(const at::Tensor& input, at::OptionalIntArrayRef batch_sizes) {
  return batch_sizes ? static_cast<int64_t>(batch_sizes->size()) : input.size(0);
}

at::Tensor flatten_rows(const at::Tensor& x) {
  return x.dim() == 3 ? x.reshape({x.size(0) * x.size(1), x.size(2)}) : x.contiguous();
}

// The first `rows` rows; skips making a view where that is all of them.
at::Tensor first_rows(const at::Tensor& x, int64_t rows) {
  return rows == x.size(0) ? x : x.narrow(0, 0, rows);
}

struct Outputs {
  at::Tensor output, h_n, c_n;
  at::Tensor gates;  // activated, for the backward; as output, but 3 * H wide
  at::Tensor cells;  // the cell state after each step, for the backward; as output
};

// Rows as the input has them, dense or packed, of another width.
at::Tensor empty_rows(const at::Tensor& input, const c10::SymInt& width, at::ScalarType type) {
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  sizes.back() = width;
  return at::empty_symint(sizes, input.options().dtype(type));
}

Outputs run_forward(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                    const at::Tensor& weight_ih, const at::Tensor& weight_hh, const OptionalTensor& bias,
                    at::OptionalIntArrayRef batch_sizes, bool reverse, bool save) {
  const KernelGuard guard(input);
  const int64_t batch = h0.size(0), hidden = h0.size(1);
  const at::Tensor rows = flatten_rows(input);
  const at::ScalarType state_type = at::toOpMathType(input.scalar_type());

  Outputs out;
  out.output = empty_rows(input, hidden, input.scalar_type());
  out.gates = empty_rows(input, 3 * hidden, input.scalar_type());
  at::Tensor all_gates = out.gates.view({rows.size(0), 3 * hidden});
  if (bias) {
    at::addmm_out(all_gates, *bias, rows, weight_ih.t());
  } else {
    at::mm_out(all_gates, rows, weight_ih.t());
  }
  if (save) out.cells = empty_rows(input, hidden, state_type);
  const at::Tensor h = h0.clone(at::MemoryFormat::Contiguous);
  const at::Tensor c = at::empty({batch, hidden}, input.options().dtype(state_type)).copy_(c0);
  // Copied, because in float32 cuBLAS multiplies few rows by a transposed view up to six times slower.
  const at::Tensor weight_hh_t = weight_hh.t().contiguous();

  for (const auto& [first_row, n] : Steps(batch_sizes, length_of(input, batch_sizes), batch, reverse).steps) {
    if (n * hidden == 0) break;
    at::Tensor gates = all_gates.narrow(0, first_row, n);
    gates.addmm_(first_rows(h, n), weight_hh_t);
    launch_step("lltm_forward_step", gates, c,
                [&, first_row = first_row, n = n](auto type, auto cell_type, auto... stream) {
                  using T = typename decltype(type)::type;
                  using C = typename decltype(cell_type)::type;
                  const ForwardStep<T, C> step = {
                      .batch = n,
                      .hidden = hidden,
                      .gates = gates_of_rows<T>(gates),
                      .old_cell = pointer<C>(c),
                      .new_cell = mutable_pointer<C>(c),
                      .new_h = mutable_pointer<T>(h),
                      .output = mutable_pointer<T>(out.output) + first_row * hidden,
                      .activated = save ? gates_of_rows<T>(gates) : Gates<T>{nullptr, 0, 0},
                      .saved_cell = save ? mutable_pointer<C>(out.cells) + first_row * hidden : nullptr,
                  };
                  return lltm_forward_step(step, stream...);
                });
  }
  out.h_n = h;
  out.c_n = c.to(c0.scalar_type());
  return out;
}

// (output [T, B, H] or [N, H], h_n [B, H], c_n [B, H])
std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence(const at::Tensor& input, const at::Tensor& h0,
                                                        const at::Tensor& c0, const at::Tensor& weight_ih,
                                                        const at::Tensor& weight_hh,
                                                        const OptionalTensor& bias,
                                                        at::OptionalIntArrayRef batch_sizes, bool reverse,
                                                        c10::string_view algorithm) {
  check_inputs(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, algorithm);
  if (input.is_meta()) {
    return {empty_rows(input, h0.sym_size(1), input.scalar_type()),
            at::empty_like(h0, at::MemoryFormat::Contiguous),
            at::empty_like(c0, at::MemoryFormat::Contiguous)};
  }
  const Outputs out =
      run_forward(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, /*save=*/false);
  return {out.output, out.h_n, out.c_n};
}

// As above, and (gates, cells) for the backward.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> sequence_forward(
    const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
    const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
    bool reverse, c10::string_view algorithm) {
  check_inputs(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, algorithm);
  if (input.is_meta()) {
    const c10::SymInt hidden = h0.sym_size(1);
    const at::ScalarType type = input.scalar_type();
    return {empty_rows(input, hidden, type), at::empty_like(h0, at::MemoryFormat::Contiguous),
            at::empty_like(c0, at::MemoryFormat::Contiguous), empty_rows(input, 3 * hidden, type),
            empty_rows(input, hidden, at::toOpMathType(type))};
  }
  const Outputs out =
      run_forward(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, /*save=*/true);
  return {out.output, out.h_n, out.c_n, out.gates, out.cells};
}

// Steps [first, last), whose rows [begin, end) lie side by side.
struct Chunk {
  size_t first, last;
  int64_t begin, end;
};

// At most four chunks, so that the gradients of a quarter of all gates are in memory at a time; few, so that
// the weights' gradients stay large matrix products and half types round their sum but thrice.
std::vector<Chunk> chunks_of(const std::vector<Steps::Step>& steps, int64_t total_rows) {
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
void add_weight_hh_gradient(at::Tensor& gradient, const at::Tensor& grad_gates, const at::Tensor& output,
                            const at::Tensor& h0, const std::vector<Steps::Step>& steps, const Chunk& chunk) {
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
  variable_list sources;
  for (const Run& run : runs) sources.push_back(run.source->narrow(0, run.source_row, run.rows));
  if (runs.size() > 2) {  // a packed sequence; a dense one has no more than two, and needs no copy
    gradient.addmm_(grad_gates.t(), at::cat(sources));
    return;
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    gradient.addmm_(grad_gates.narrow(0, runs[i].row, runs[i].rows).t(), sources[i]);
  }
}

void check_backward_inputs(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                           const OptionalTensor& grad_c_n, const at::Tensor& input, const at::Tensor& h0,
                           const at::Tensor& c0, const at::Tensor& output, const at::Tensor& gates,
                           const at::Tensor& cells) {
  const char* op = "lltm_backward";
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
  c10::SymDimVector wide(input.sym_sizes().begin(), input.sym_sizes().end()), narrow = wide;
  narrow.back() = h0.sym_size(1);
  wide.back() = 3 * h0.sym_size(1);
  check("output", output, type, narrow, "[..., hidden_size]");
  check("gates", gates, type, wide, "[..., 3*hidden_size]");
  check("cells", cells, at::toOpMathType(type), narrow, "[..., hidden_size]");
  if (grad_output) check("grad_output", *grad_output, type, narrow, "[..., hidden_size]");
  if (grad_h_n) check("grad_h_n", *grad_h_n, type, h0.sym_sizes(), "[batch, hidden_size]");
  if (grad_c_n) check("grad_c_n", *grad_c_n, c0.scalar_type(), h0.sym_sizes(), "[batch, hidden_size]");
}

// Carries dh and dc, of which the step takes the first rows, from after the step to before it; but dh lacks
// the product with weight_hh, which is of grad_gates. Adds to grad_bias.
void backward_step(const at::Tensor& dy, const at::Tensor& dh, const at::Tensor& dc, const at::Tensor& gates,
                   const at::Tensor& cells, const at::Tensor& grad_gates, const at::Tensor& grad_bias) {
  launch_step("lltm_backward_step", gates, cells, [&](auto type, auto cell_type, auto... stream) {
    using T = typename decltype(type)::type;
    using C = typename decltype(cell_type)::type;
    const BackwardStep<T, C> step = {
        .batch = cells.size(0),
        .hidden = cells.size(1),
        .grad_output = matrix<T>(dy),
        .grad_h = pointer<T>(dh),
        .grad_cell = matrix<C>(dc),
        .activated = gates_of_rows<T>(gates),
        .new_cell = pointer<C>(cells),
        .grad_gates = gates_of_rows<T>(grad_gates),
        .grad_old_cell = mutable_pointer<C>(dc),
        .grad_bias =
            grad_bias.defined() ? gates_of_rows<acc_t<T>>(grad_bias) : Gates<acc_t<T>>{nullptr, 0, 0},
    };
    return lltm_backward_step(step, stream...);
  });
}

// (grad_input, grad_h0, grad_c0, grad_weight_ih, grad_weight_hh, grad_bias); grad_input and
// grad_bias are empty unless they are needed.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> sequence_backward(
    const OptionalTensor& grad_output, const OptionalTensor& grad_h_n, const OptionalTensor& grad_c_n,
    const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
    const at::Tensor& weight_hh, const at::Tensor& output, const at::Tensor& saved_gates,
    const at::Tensor& saved_cells, at::OptionalIntArrayRef batch_sizes, bool reverse, bool input_needs_grad,
    bool bias_needs_grad) {
  check_backward_inputs(grad_output, grad_h_n, grad_c_n, input, h0, c0, output, saved_gates, saved_cells);
  check_inputs(input, h0, c0, weight_ih, weight_hh, std::nullopt, batch_sizes, "auto");
  const auto contiguous_like = [](const at::Tensor& x) {
    return at::empty_like(x, at::MemoryFormat::Contiguous);
  };
  const auto not_needed = [&] { return at::empty({0}, input.options()); };
  if (input.is_meta()) {
    return {input_needs_grad ? contiguous_like(input) : not_needed(),
            contiguous_like(h0),
            contiguous_like(c0),
            contiguous_like(weight_ih),
            contiguous_like(weight_hh),
            bias_needs_grad ? at::empty_symint({weight_hh.sym_size(0)}, weight_hh.options()) : not_needed()};
  }
  const KernelGuard guard(input);
  const int64_t batch = h0.size(0), hidden = h0.size(1);
  const at::Tensor gates = flatten_rows(saved_gates).contiguous(),
                   cells = flatten_rows(saved_cells).contiguous();
  const at::Tensor rows = flatten_rows(input), outputs = flatten_rows(output);
  at::Tensor grad_input = input_needs_grad ? contiguous_like(input) : not_needed();
  at::Tensor grad_weight_ih = at::zeros(weight_ih.sizes(), weight_ih.options());
  at::Tensor grad_weight_hh = at::zeros(weight_hh.sizes(), weight_hh.options());
  at::Tensor grad_bias;  // a row of the batch each
  if (bias_needs_grad) grad_bias = at::zeros({batch, 3 * hidden}, cells.options());
  at::Tensor dh = at::zeros({batch, hidden}, h0.options());
  const at::Tensor dc = at::zeros({batch, hidden}, cells.options());
  if (grad_h_n) dh.copy_(*grad_h_n);
  if (grad_c_n) dc.copy_(*grad_c_n);

  const auto steps = Steps(batch_sizes, length_of(input, batch_sizes), batch, reverse).steps;
  const auto chunks = chunks_of(steps, rows.size(0));
  for (auto chunk = chunks.rbegin(); chunk != chunks.rend() && batch * hidden > 0; ++chunk) {
    const int64_t chunk_rows = chunk->end - chunk->begin;
    const at::Tensor grad_gates = at::empty({chunk_rows, 3 * hidden}, gates.options());
    for (size_t k = chunk->last; k-- > chunk->first;) {
      const auto [first_row, n] = steps[k];
      const at::Tensor step_grad_gates = grad_gates.narrow(0, first_row - chunk->begin, n);
      const at::Tensor dy = !grad_output       ? at::Tensor()
                            : input.dim() == 3 ? grad_output->select(0, first_row / batch)
                                               : grad_output->narrow(0, first_row, n);
      backward_step(dy, dh, dc, gates.narrow(0, first_row, n), cells.narrow(0, first_row, n), step_grad_gates,
                    grad_bias);
      at::Tensor dh_rows = first_rows(dh, n);
      at::mm_out(dh_rows, step_grad_gates, weight_hh);
    }
    grad_weight_ih.addmm_(grad_gates.t(), rows.narrow(0, chunk->begin, chunk_rows));
    add_weight_hh_gradient(grad_weight_hh, grad_gates, outputs, h0, steps, *chunk);
    if (input_needs_grad) {
      at::Tensor grad_rows = flatten_rows(grad_input).narrow(0, chunk->begin, chunk_rows);
      at::mm_out(grad_rows, grad_gates, weight_ih);
    }
  }
  if (batch * hidden == 0 && input_needs_grad) grad_input.zero_();
  return {grad_input,
          dh,
          dc.to(c0.scalar_type()),
          grad_weight_ih,
          grad_weight_hh,
          bias_needs_grad ? grad_bias.sum(0).to(weight_hh.scalar_type()) : not_needed()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_sequence(
    const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
    const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
    bool reverse, c10::string_view algorithm) {
  static const auto op = find_op<decltype(sequence)>("lltm_ext::lltm");
  return op.call(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm);
}

struct SequenceNode : torch::autograd::Function<SequenceNode> {
  static constexpr size_t kArguments = 9;

  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                               const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
                               const at::Tensor& weight_hh, const OptionalTensor& bias,
                               at::OptionalIntArrayRef batch_sizes, bool reverse,
                               c10::string_view algorithm) {
    static const auto op = find_op<decltype(sequence_forward)>("lltm_ext::lltm_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [output, h_n, c_n, gates, cells] =
        op.call(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm);
    ctx->save_for_backward(
        {input, h0, c0, weight_ih, weight_hh, bias.value_or(at::Tensor()), output, gates, cells});
    ctx->set_materialize_grads(false);
    if (batch_sizes) ctx->saved_data["batch_sizes"] = batch_sizes->vec();
    ctx->saved_data["reverse"] = reverse;
    return {output, h_n, c_n};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
    variable_list gradients(kArguments);
    if (!any_defined(grad_outputs)) return gradients;
    const variable_list saved = ctx->get_saved_variables();
    std::vector<int64_t> sizes;
    at::OptionalIntArrayRef batch_sizes;
    if (const auto found = ctx->saved_data.find("batch_sizes"); found != ctx->saved_data.end()) {
      sizes = found->second.toIntVector();
      batch_sizes = at::IntArrayRef(sizes);
    }
    const bool reverse = ctx->saved_data["reverse"].toBool(), input_needs_grad = saved[0].requires_grad();
    if (at::GradMode::is_enabled()) {
      const auto found = differentiable_gradients(
          [&](const variable_list& inputs) { return composed(inputs, batch_sizes, reverse); },
          variable_list(saved.begin(), saved.begin() + 6), grad_outputs);
      std::copy(found.begin(), found.end(), gradients.begin());
      return gradients;
    }
    const bool bias_needs_grad = saved[5].defined() && saved[5].requires_grad();
    static const auto op = find_op<decltype(sequence_backward)>("lltm_ext::lltm_backward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto optional = [](const at::Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; };
    auto found = op.call(optional(grad_outputs[0]), optional(grad_outputs[1]), optional(grad_outputs[2]),
                         saved[0], saved[1], saved[2], saved[3], saved[4], saved[6], saved[7], saved[8],
                         batch_sizes, reverse, input_needs_grad, bias_needs_grad);
    std::tie(gradients[0], gradients[1], gradients[2], gradients[3], gradients[4], gradients[5]) =
        std::move(found);
    if (!input_needs_grad) gradients[0] = at::Tensor();
    if (!bias_needs_grad) gradients[5] = at::Tensor();
    return gradients;
  }

  // The sequence in torch's differentiable ops: {output, h_n, c_n}.
  static variable_list composed(const variable_list& inputs, at::OptionalIntArrayRef batch_sizes,
                                bool reverse) {
    const at::Tensor &input = inputs[0], &weight_hh = inputs[4], &bias = inputs[5];
    at::Tensor h = inputs[1], c = inputs[2];
    at::Tensor projection = flatten_rows(input).mm(inputs[3].t());
    if (bias.defined()) projection = projection + bias;
    const auto replace_first_rows = [](const at::Tensor& state, const at::Tensor& rows) {
      if (rows.size(0) == state.size(0)) return rows;
      return at::cat({rows, state.narrow(0, rows.size(0), state.size(0) - rows.size(0))});
    };
    variable_list outputs;
    for (const auto& [first_row, n] :
         Steps(batch_sizes, length_of(input, batch_sizes), h.size(0), reverse).steps) {
      const at::Tensor gates = projection.narrow(0, first_row, n) + h.narrow(0, 0, n).mm(weight_hh.t());
      const auto [new_h, new_cell] = composed_cell(gates, c.narrow(0, 0, n));
      outputs.push_back(new_h);
      h = replace_first_rows(h, new_h);
      c = replace_first_rows(c, new_cell);
    }
    if (reverse) std::reverse(outputs.begin(), outputs.end());
    at::DimVector sizes(input.sizes().begin(), input.sizes().end());
    sizes.back() = h.size(1);
    return {outputs.empty() ? at::zeros(sizes, input.options()) : at::cat(outputs).view(sizes), h, c};
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence_autograd(
    const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
    const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
    bool reverse, c10::string_view algorithm) {
  if (any_needs_grad(input, h0, c0, weight_ih, weight_hh, bias)) {
    const variable_list outputs =
        SequenceNode::apply(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm);
    return {outputs[0], outputs[1], outputs[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_sequence(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm);
}

// Everything but the cell state, which float32 serves best.
std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence_autocast(
    const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
    const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
    bool reverse, c10::string_view algorithm) {
  const AutocastInputs cast(input);
  return call_sequence(cast(input), cast(h0), c0, cast(weight_ih), cast(weight_hh), cast(bias), batch_sizes,
                       reverse, algorithm);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  m.def(
      "lltm(Tensor input, Tensor h0, Tensor c0, Tensor weight_ih, Tensor weight_hh, Tensor? bias=None, "
      "int[]? batch_sizes=None, bool reverse=False, str algorithm='auto') -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "lltm_forward(Tensor input, Tensor h0, Tensor c0, Tensor weight_ih, Tensor weight_hh, Tensor? bias, "
      "int[]? batch_sizes, bool reverse, str algorithm) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "lltm_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor input, Tensor h0, "
      "Tensor c0, "
      "Tensor weight_ih, Tensor weight_hh, Tensor output, Tensor gates, Tensor cells, int[]? batch_sizes, "
      "bool reverse, bool input_needs_grad, bool bias_needs_grad) -> (Tensor, Tensor, Tensor, Tensor, "
      "Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  implement(m, "lltm", sequence);
  implement(m, "lltm_forward", sequence_forward);
  implement(m, "lltm_backward", sequence_backward);
  implement_autograd(m, "lltm", sequence_autograd);
  implement_autocast(m, "lltm", sequence_autocast);
}

}  // namespace lltm_ext
