// An op that runs a whole sequence of a recurrent cell: tensors in, tensors out. SequenceOps<Op> makes the
// dispatcher ops lltm_ext::<op>, <op>_forward, <op>_backward and <op>_algorithm, and of both directions of a
// layer <op>_bidirectional, <op>_bidirectional_forward and <op>_bidirectional_backward, from
//
//   struct Op {
//     static constexpr const char* name;
//     using Cell = ...;  // see cell.h
//     // The cell in torch's differentiable ops, for the double backward: (h, c) from gates [B, G * H] and c.
//     static std::pair<at::Tensor, at::Tensor> composed(const at::Tensor& gates, const at::Tensor& c);
//   };
//
// T is the length, B the batch, I the input size, H the hidden size, G the number of gates. The input
// projection of all steps is one matrix product before the loop, the weights' gradients one after it. The
// loop itself is the engine's (engine.h): a persistent kernel, or a kernel a step. What that does not take is
// a product and a pointwise kernel a step.
//
// Packed sequences come as the rows of all steps, one step after the other ([N, I], longest sequence first),
// with the number of rows in each; a dense input is the case of B rows in each. `reverse` walks from the last
// step to the first and leaves every output at its own step.
//
// All that runs takes a list of directions, of which a sequence alone is the list of one. Two share the input
// and nothing else; the engine runs them side by side where the GPU has room for both.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#ifndef LLTM_EXT_STABLE_ABI
#include <torch/csrc/autograd/autograd.h>
#endif

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "common/checks.h"
#include "common/differentiable.h"
#include "common/dispatch.h"
#include "common/library.h"
#include "common/matmul.h"
#include "common/recurrence/engine.h"
#include "common/recurrence/step.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace lltm_ext {

using OptionalTensor = std::optional<at::Tensor>;

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
    gradient.addmm_(grad_gates.t(), at::cat(sources));
    return;
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    gradient.addmm_(grad_gates.narrow(0, runs[i].row, runs[i].rows).t(), sources[i]);
  }
}

inline int64_t length_of(const at::Tensor& input, at::OptionalIntArrayRef batch_sizes) {
  return batch_sizes ? static_cast<int64_t>(batch_sizes->size()) : input.size(0);
}

inline at::Tensor flatten_rows(const at::Tensor& x) {
  return x.dim() == 3 ? x.reshape({x.size(0) * x.size(1), x.size(2)}) : x.contiguous();
}

// The first `rows` rows; skips making a view where that is all of them.
inline at::Tensor first_rows(const at::Tensor& x, int64_t rows) {
  return rows == x.size(0) ? x : x.narrow(0, 0, rows);
}

// Rows as the input has them, dense or packed, of another width.
inline at::Tensor empty_rows(const at::Tensor& input, const c10::SymInt& width, at::ScalarType type) {
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  sizes.back() = width;
  return at::empty_symint(sizes, input.options().dtype(type));
}

// Contiguous, and aligned for accesses of 16 bytes.
inline at::Tensor aligned(const at::Tensor& x) {
  const at::Tensor contiguous = x.contiguous();
  return reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % 16 == 0 ? contiguous : contiguous.clone();
}

inline Algorithm algorithm_named(const char* op, c10::string_view name) {
  if (name == "auto") return Algorithm::kAuto;
  if (name == "stepwise") return Algorithm::kStepwise;
  if (name == "cluster") return Algorithm::kCluster;
  if (name == "grid") return Algorithm::kGrid;
  TORCH_CHECK_VALUE(false, op, ": expected algorithm to be 'auto', 'stepwise', 'cluster' or 'grid', got '",
                    name, "'");
}

#ifdef LLTM_EXT_WITH_CUDA
template <class Cell>
size_t shared_bytes(at::ScalarType type, const Variant& variant, const GridShape& grid, int hidden,
                    bool backward) {
  switch (type) {
    case at::kHalf:
      return recurrence_shared_bytes<Cell, __half>(variant, grid, hidden, backward);
    case at::kBFloat16:
      return recurrence_shared_bytes<Cell, __nv_bfloat16>(variant, grid, hidden, backward);
    default:
      return recurrence_shared_bytes<Cell, float>(variant, grid, hidden, backward);
  }
}
#endif

// Plans `sequences` side by side on the tensors' device. An algorithm that was asked for and can't run one is
// an error; several can still run one after the other.
template <class Cell>
Plan plan_for(const char* op, const at::Tensor& input, int64_t batch, int64_t hidden, bool dense,
              bool backward, c10::string_view algorithm, size_t sequences = 1) {
  const Algorithm wanted = algorithm_named(op, algorithm);
  Plan plan;
  if (!input.is_cuda()) {
    if (wanted == Algorithm::kCluster || wanted == Algorithm::kGrid) plan.why_not = "needs a CUDA device";
  } else {
#ifdef LLTM_EXT_WITH_CUDA
    const cudaDeviceProp* chip = at::cuda::getDeviceProperties(input.get_device());
    const auto has_room = [&](const Variant& variant, const GridShape& grid) {
      return shared_bytes<Cell>(input.scalar_type(), variant, grid, static_cast<int>(hidden), backward) <=
             chip->sharedMemPerBlockOptin;
    };
    plan = plan_recurrence({hidden, batch, dense, backward, static_cast<int>(input.element_size()),
                            Cell::kGates, static_cast<int>(sequences)},
                           {chip->major * 10 + chip->minor, chip->multiProcessorCount,
                            kHasStepsForHopper && chip->major == 9 && chip->minor == 0},
                           wanted, has_room);
    // The table of a packed sequence's rows is copied from the host, which a captured graph would not repeat.
    if (!dense && c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
      if (wanted != Algorithm::kAuto && wanted != Algorithm::kStepwise) {
        plan.why_not = "can't be captured in a graph with a packed sequence";
      }
      plan.algorithm = Algorithm::kStepwise;
    }
#endif
  }
  TORCH_CHECK(plan.why_not.empty() || sequences > 1, op, ": algorithm '", algorithm, "' ", plan.why_not,
              " (algorithm 'auto' runs everything)");
  return plan;
}

template <class Op>
struct SequenceOps {
  using Cell = typename Op::Cell;
  using variable_list = torch::autograd::variable_list;
  static constexpr int64_t kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;

  // ---- checks
  // -------------------------------------------------------------------------------------------------

  static void check_batch_sizes(const char* op, at::IntArrayRef sizes, const at::Tensor& input,
                                int64_t batch) {
    int64_t total = 0, previous = batch;
    for (const int64_t size : sizes) {
      TORCH_CHECK(0 < size && size <= previous, op,
                  ": expected batch_sizes to be positive, to start at batch = ", batch,
                  " and never to grow, got ", sizes);
      previous = size;
      total += size;
    }
    TORCH_CHECK((sizes.empty() || sizes[0] == batch) && total == input.sym_size(0), op,
                ": expected batch_sizes to start at batch = ", batch, " and to sum to the ",
                input.sym_size(0), " rows of input, got ", sizes);
  }

  // "[3*hidden_size, input_size]" and the like.
  static std::string gates_by(const char* columns) {
    return "[" + std::to_string(kGates) + "*hidden_size" + columns + "]";
  }

  static void check_inputs(const char* op, const at::Tensor& input, const at::Tensor& h0,
                           const at::Tensor& c0, const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                           const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
                           c10::string_view algorithm) {
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
    CHECK_SHAPE(op, weight_ih, gates_by(", input_size").c_str(), kGates * hidden, input.sym_size(-1));
    CHECK_SHAPE(op, weight_hh, gates_by(", hidden_size").c_str(), kGates * hidden, hidden);
    if (bias) check_shape(op, "bias", *bias, {kGates * hidden}, gates_by("").c_str());
    if (batch_sizes) check_batch_sizes(op, *batch_sizes, input, h0.size(0));
    algorithm_named(op, algorithm);
  }

  // ---- directions
  // ---------------------------------------------------------------------------------------------

  // What a direction has of its own.
  struct Direction {
    at::Tensor h0, c0, weight_ih, weight_hh;
    OptionalTensor bias;
    bool reverse;
  };
  using Directions = at::ArrayRef<Direction>;

  // Of lists of h0, c0, weight_ih, weight_hh and, if there is one, the bias.
  static std::array<Direction, 2> both_of(at::TensorList onward, at::TensorList reverse) {
    for (const at::TensorList& given : {onward, reverse}) {
      TORCH_CHECK(given.size() == 4 || given.size() == 5, named("_bidirectional"),
                  ": expected a direction to be [h0, c0, weight_ih, weight_hh] or these and bias, got ",
                  given.size(), " tensors");
    }
    const auto direction = [](const at::TensorList& x, bool reverse) -> Direction {
      return {x[0], x[1], x[2], x[3], x.size() > 4 ? OptionalTensor(x[4]) : std::nullopt, reverse};
    };
    return {direction(onward, false), direction(reverse, true)};
  }

  static void check_alike(Directions directions) {
    for (const Direction& d : directions.slice(1)) {
      TORCH_CHECK(d.h0.sym_sizes() == directions[0].h0.sym_sizes(), named("_bidirectional"),
                  ": expected h0 of both directions to have one shape, got ", directions[0].h0.sym_sizes(),
                  " and ", d.h0.sym_sizes());
    }
  }

  // The rows of the input, as all directions take them.
  struct Rows {
    int64_t length, batch, hidden;
    at::OptionalIntArrayRef batch_sizes;

    Rows(const at::Tensor& input, Directions directions, at::OptionalIntArrayRef batch_sizes)
        : length(length_of(input, batch_sizes)),
          batch(directions[0].h0.size(0)),
          hidden(directions[0].h0.size(1)),
          batch_sizes(batch_sizes) {}
    Plan plan(const at::Tensor& like, bool backward, c10::string_view algorithm, size_t sequences) const {
      return plan_for<Cell>(Op::name, like, batch, hidden, !batch_sizes, backward, algorithm, sequences);
    }
    std::vector<Steps::Step> steps(bool reverse) const {
      return Steps(batch_sizes, length, batch, reverse).steps;
    }
    StepOrder order(bool reverse, const at::Tensor& first_rows) const {
      return {static_cast<int>(length), static_cast<int>(batch), reverse,
              first_rows.defined() ? first_rows.const_data_ptr<int64_t>() : nullptr};
    }
  };

  // ---- forward
  // ------------------------------------------------------------------------------------------------

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
    out.output = empty_rows(input, hidden, input.scalar_type());
    at::DimVector sizes(input.sizes().begin(), input.sizes().end());
    sizes.back() = kGates * hidden;
    out.gates = affine(flatten_rows(input), d.weight_ih.t(), d.bias).view(sizes);
    if (save) out.extra = empty_rows(input, kExtra * hidden, input.scalar_type());
    out.h_n = d.h0.clone(at::MemoryFormat::Contiguous);
    out.c_n =
        at::empty(d.c0.sizes(), input.options().dtype(at::toOpMathType(input.scalar_type()))).copy_(d.c0);
    return out;
  }

  // All directions at once where the engine has room for them, else one after the other.
  static void forward_steps(Directions directions, at::ArrayRef<Outputs> outs, const Rows& rows,
                            c10::string_view algorithm) {
    const Plan plan = rows.plan(outs[0].output, /*backward=*/false, algorithm, directions.size());
    if (plan.by_engine() && forward_at_once(directions, outs, rows, plan, algorithm)) return;
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
      launch("recurrence_step", gates, [&, first_row = first_row, n = n](auto type, auto... stream) {
        using T = typename decltype(type)::type;
        const StepForward<T> step = {
            .batch = n,
            .hidden = hidden,
            .gates = mutable_pointer<T>(gates) + first_row * kGates * hidden,
            .product = pointer<acc_t<T>>(product),
            .extra =
                out.extra.defined() ? mutable_pointer<T>(out.extra) + first_row * kExtra * hidden : nullptr,
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
      return ForwardSequence<T>{
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
    return launch_at_once("recurrence_forward", outs[0].output, plan, algorithm, directions.size(),
                          [&](auto type, auto stream) {
                            return recurrence_forward<Cell>(together(type, directions.size(), sequence_of),
                                                            plan, stream);
                          });
  }

  // sequence_of(type, 0), (type, 1), ... as one launch takes them.
  template <typename Type, typename F>
  static auto together(Type type, size_t count, F&& sequence_of) {
    Sequences<decltype(sequence_of(type, 0))> sequences = {};
    TORCH_INTERNAL_ASSERT(count <= kMaxSequences);
    sequences.count = static_cast<int>(count);
    for (size_t i = 0; i < count; ++i) sequences.of[i] = sequence_of(type, i);
    return sequences;
  }

  // Calls f(Type<T>{}, stream) for the types that the engine takes.
  template <typename F>
  static bool launch_at_once(const char* kernel, const at::Tensor& like, const Plan& plan,
                             c10::string_view algorithm, size_t sequences, F&& f) {
#ifdef LLTM_EXT_WITH_CUDA
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(like.get_device());
    cudaError_t error = cudaErrorInvalidValue;
    if (like.scalar_type() == at::kFloat) error = f(Type<float>{}, stream);
    if (like.scalar_type() == at::kHalf) error = f(Type<__half>{}, stream);
    if (like.scalar_type() == at::kBFloat16) error = f(Type<__nv_bfloat16>{}, stream);
    const bool no_room = error == cudaErrorCooperativeLaunchTooLarge ||
                         error == cudaErrorInvalidConfiguration || error == cudaErrorInvalidValue ||
                         error == cudaErrorLaunchOutOfResources || error == cudaErrorInvalidClusterSize ||
                         error == cudaErrorNotSupported;
    if (no_room && (algorithm == "auto" || sequences > 1 || plan.algorithm == Algorithm::kStepwise)) {
      cudaGetLastError();
      return false;
    }
    check_launch(kernel, error);
#endif
    return true;
  }

  // The first row of each step of a packed sequence, on the device of `like`.
  static at::Tensor first_rows_on(const at::Tensor& like, at::OptionalIntArrayRef batch_sizes) {
    if (!batch_sizes) return {};
    const int64_t length = static_cast<int64_t>(batch_sizes->size());
    at::Tensor rows = at::empty({length + 1}, at::TensorOptions(at::kLong).pinned_memory(true));
    int64_t* row = rows.mutable_data_ptr<int64_t>();
    row[0] = 0;
    for (int64_t t = 0; t < length; ++t) row[t + 1] = row[t] + (*batch_sizes)[t];
    return rows.to(like.device(), /*non_blocking=*/true);
  }

  // Of each direction {output [T, B, H] or [N, H], h_n [B, H], c_n [B, H]}, and if `save` {gates, extra}.
  static variable_list checked_forward(const at::Tensor& input, Directions directions,
                                       at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm,
                                       bool save) {
    for (const Direction& d : directions) {
      check_inputs(Op::name, input, d.h0, d.c0, d.weight_ih, d.weight_hh, d.bias, batch_sizes, algorithm);
    }
    check_alike(directions);
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
    const auto like = [](const at::Tensor& x) { return at::empty_like(x, at::MemoryFormat::Contiguous); };
    const auto rows = [&](const c10::SymInt& width) { return empty_rows(input, width, input.scalar_type()); };
    std::vector<Outputs> outs;
    for (const Direction& d : directions) {
      const c10::SymInt hidden = d.h0.sym_size(1);
      outs.push_back({rows(hidden), like(d.h0), like(d.c0), rows(kGates * hidden), rows(kExtra * hidden)});
    }
    return outs;
  }

  static void append(variable_list& to, at::TensorList tensors) {
    to.insert(to.end(), tensors.begin(), tensors.end());
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
    return checked_forward(input, both_of(onward, reverse), batch_sizes, algorithm, /*save=*/false);
  }

  // As above, each with (gates, extra) for the backward.
  static variable_list both_forward(const at::Tensor& input, at::TensorList onward, at::TensorList reverse,
                                    at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
    return checked_forward(input, both_of(onward, reverse), batch_sizes, algorithm, /*save=*/true);
  }

  // The algorithm that a call would take.
  static std::string algorithm_of(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                                  const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                  const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
                                  c10::string_view algorithm, bool backward) {
    const std::string op = named("_algorithm");
    check_inputs(op.c_str(), input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, algorithm);
    const Plan plan =
        plan_for<Cell>(op.c_str(), input, h0.size(0), h0.size(1), !batch_sizes, backward, algorithm);
    switch (plan.algorithm) {
      case Algorithm::kCluster:
        return "cluster";
      case Algorithm::kGrid:
        return "grid";
      default:
        return "stepwise";
    }
  }

  // ---- backward
  // -----------------------------------------------------------------------------------------------

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
    const auto rows_of = [&](const c10::SymInt& width) {
      c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
      sizes.back() = width;
      return sizes;
    };
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
    at::Tensor grad_input, grad_weight_ih, grad_weight_hh;
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
          chunks(chunks_of(steps, output.size(0))),
          grad_weight_ih(at::zeros(direction.weight_ih.sizes(), direction.weight_ih.options())),
          grad_weight_hh(at::zeros(direction.weight_hh.sizes(), direction.weight_hh.options())) {
      const auto state_options = input.options().dtype(at::toOpMathType(input.scalar_type()));
      grad_h = at::zeros({rows.batch, rows.hidden}, direction.h0.options());
      grad_c = at::zeros({rows.batch, rows.hidden}, state_options);
      if (saved.grad_h_n) grad_h.copy_(*saved.grad_h_n);
      if (saved.grad_c_n) grad_c.copy_(*saved.grad_c_n);
      if (bias_needs_grad) grad_bias = at::zeros({rows.batch, kGates * rows.hidden}, state_options);
      if (input_needs_grad) {
        grad_input = at::empty_like(input, at::MemoryFormat::Contiguous);
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
    const Plan plan = rows.plan(parts[0].of.gates, /*backward=*/true, algorithm, parts.size());
    if (plan.by_engine() && backward_at_once(parts, rows, plan, algorithm)) return;
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
      launch("recurrence_step", gates, [&, first_row = first_row, n = n](auto type, auto... stream) {
        using T = typename decltype(type)::type;
        const StepBackward<T> step = {
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
      return BackwardSequence<T>{
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
        "recurrence_backward", like, plan, algorithm, parts.size(), [&](auto type, auto stream) {
          return recurrence_backward<Cell>(together(type, parts.size(), sequence_of), plan, stream);
        });
  }

  // The matrix products that follow from the gradients of a chunk's gates.
  static void add_gradients(const RetreatChunk& part, const at::Tensor& input_rows) {
    const auto& [of, chunk, grad_gates] = part;
    const int64_t count = chunk.end - chunk.begin;
    of.grad_weight_ih.addmm_(grad_gates.t(), input_rows.narrow(0, chunk.begin, count));
    add_weight_hh_gradient(of.grad_weight_hh, grad_gates, of.output, of.direction.h0, of.steps, chunk);
    if (!of.grad_input.defined()) return;
    const at::Tensor grad_rows = flatten_rows(of.grad_input).narrow(0, chunk.begin, count);
    Matmul{input_rows}(grad_rows, grad_gates, of.direction.weight_ih);
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
      check_inputs(Op::name, input, d.h0, d.c0, d.weight_ih, d.weight_hh, std::nullopt, batch_sizes,
                   algorithm);
    }
    check_alike(directions);
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
                     of.grad_c.to(d.c0.scalar_type()), of.grad_weight_ih, of.grad_weight_hh,
                     bias_needs_grad ? of.grad_bias.sum(0).to(d.weight_hh.scalar_type())
                                     : at::empty({0}, input.options())});
    }
    return found;
  }

  static variable_list meta_backward(const at::Tensor& input, Directions directions, bool input_needs_grad,
                                     bool bias_needs_grad) {
    const auto like = [](const at::Tensor& x) { return at::empty_like(x, at::MemoryFormat::Contiguous); };
    variable_list found;
    for (const Direction& d : directions) {
      const c10::SymInt width = bias_needs_grad ? d.weight_hh.sym_size(0) : 0;
      append(found, {input_needs_grad ? like(input) : at::empty({0}, input.options()), like(d.h0), like(d.c0),
                     like(d.weight_ih), like(d.weight_hh), at::empty_symint({width}, d.weight_hh.options())});
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
    TORCH_CHECK(grad_outputs.size() == 6 && saved.size() == 6, named("_bidirectional_backward"),
                ": expected three of grad_outputs and three of saved a direction, got ", grad_outputs.size(),
                " and ", saved.size());
    std::vector<Saved> of_each;
    for (size_t i = 0; i < 6; i += 3) {
      of_each.push_back({grad_outputs.get(i), grad_outputs.get(i + 1), grad_outputs.get(i + 2), saved[i],
                         saved[i + 1], saved[i + 2]});
    }
    variable_list g = checked_backward(input, both_of(onward, reverse), of_each, batch_sizes, algorithm,
                                       input_needs_grad, bias_needs_grad);
    if (input_needs_grad) g[0] = g[0] + g[6];
    g.erase(g.begin() + 6);
    return g;
  }

#ifndef LLTM_EXT_STABLE_ABI
  // ---- autograd
  // -----------------------------------------------------------------------------------------------

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> call_sequence(
      const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
      const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
      bool reverse, c10::string_view algorithm) {
    static const auto op = find_op<decltype(sequence)>(qualified("").c_str());
    return op.call(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm);
  }

  static variable_list call_both(const at::Tensor& input, at::TensorList onward, at::TensorList reverse,
                                 at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
    static const auto op = find_op<decltype(both)>(qualified("_bidirectional").c_str());
    return op.call(input, onward, reverse, batch_sizes, algorithm);
  }

  struct Node : torch::autograd::Function<Node> {
    static constexpr size_t kArguments = 9;

    static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                                 const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
                                 const at::Tensor& weight_hh, const OptionalTensor& bias,
                                 at::OptionalIntArrayRef batch_sizes, bool reverse,
                                 c10::string_view algorithm) {
      static const auto op = find_op<decltype(sequence_forward)>(qualified("_forward").c_str());
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      auto [output, h_n, c_n, gates, extra] =
          op.call(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm);
      ctx->save_for_backward(
          {input, h0, c0, weight_ih, weight_hh, bias.value_or(at::Tensor()), output, gates, extra});
      ctx->set_materialize_grads(false);
      if (batch_sizes) ctx->saved_data["batch_sizes"] = batch_sizes->vec();
      ctx->saved_data["reverse"] = reverse;
      ctx->saved_data["algorithm"] = std::string(algorithm);
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
      const std::string algorithm = ctx->saved_data["algorithm"].toStringRef();
      if (at::GradMode::is_enabled()) {
        const auto found = differentiable_gradients(
            [&](const variable_list& inputs) { return composed(inputs, batch_sizes, reverse); },
            variable_list(saved.begin(), saved.begin() + 6), grad_outputs);
        std::copy(found.begin(), found.end(), gradients.begin());
        return gradients;
      }
      const bool bias_needs_grad = saved[5].defined() && saved[5].requires_grad();
      static const auto op = find_op<decltype(sequence_backward)>(qualified("_backward").c_str());
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const auto optional = [](const at::Tensor& x) {
        return x.defined() ? OptionalTensor(x) : std::nullopt;
      };
      auto found = op.call(optional(grad_outputs[0]), optional(grad_outputs[1]), optional(grad_outputs[2]),
                           saved[0], saved[1], saved[2], saved[3], saved[4], saved[6], saved[7], saved[8],
                           batch_sizes, reverse, algorithm, input_needs_grad, bias_needs_grad);
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
        const auto [new_h, new_cell] = Op::composed(gates, c.narrow(0, 0, n));
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

  // Both directions of a layer.
  struct BothNode : torch::autograd::Function<BothNode> {
    static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                                 at::TensorList onward, at::TensorList reverse,
                                 at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
      static const auto op = find_op<decltype(both_forward)>(qualified("_bidirectional_forward").c_str());
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const variable_list y = op.call(input, onward, reverse, batch_sizes, algorithm);
      variable_list saved = {input};
      saved.insert(saved.end(), onward.begin(), onward.end());
      saved.insert(saved.end(), reverse.begin(), reverse.end());
      saved.insert(saved.end(), {y[0], y[3], y[4], y[5], y[8], y[9]});
      ctx->save_for_backward(std::move(saved));
      ctx->set_materialize_grads(false);
      if (batch_sizes) ctx->saved_data["batch_sizes"] = batch_sizes->vec();
      ctx->saved_data["onward"] = static_cast<int64_t>(onward.size());
      ctx->saved_data["algorithm"] = std::string(algorithm);
      return {y[0], y[1], y[2], y[5], y[6], y[7]};
    }

    static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
      const variable_list all = ctx->get_saved_variables();
      const size_t given = all.size() - 6;
      const at::TensorList inputs = at::TensorList(all).slice(0, given),
                           saved = at::TensorList(all).slice(given);
      const size_t split = 1 + ctx->saved_data["onward"].toInt();
      variable_list gradients(inputs.size() + 2);
      if (!any_defined(grad_outputs)) return gradients;
      std::vector<int64_t> sizes;
      at::OptionalIntArrayRef batch_sizes;
      if (const auto found = ctx->saved_data.find("batch_sizes"); found != ctx->saved_data.end()) {
        sizes = found->second.toIntVector();
        batch_sizes = at::IntArrayRef(sizes);
      }
      if (at::GradMode::is_enabled()) {
        const auto found = differentiable_gradients(
            [&](at::TensorList x) {
              variable_list outputs = composed(x[0], x.slice(1, split - 1), batch_sizes, /*reverse=*/false);
              const variable_list others = composed(x[0], x.slice(split), batch_sizes, /*reverse=*/true);
              outputs.insert(outputs.end(), others.begin(), others.end());
              return outputs;
            },
            inputs.vec(), grad_outputs);
        std::copy(found.begin(), found.end(), gradients.begin());
        return gradients;
      }
      c10::List<OptionalTensor> grads;
      for (const at::Tensor& x : grad_outputs)
        grads.push_back(x.defined() ? OptionalTensor(x) : std::nullopt);
      const at::TensorList onward = inputs.slice(1, split - 1), reverse = inputs.slice(split);
      const auto has_bias = [](at::TensorList x) { return x.size() > 4 && x[4].requires_grad(); };
      static const auto op = find_op<decltype(both_backward)>(qualified("_bidirectional_backward").c_str());
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const variable_list found = op.call(grads, inputs[0], onward, reverse, saved, batch_sizes,
                                          ctx->saved_data["algorithm"].toStringRef(),
                                          inputs[0].requires_grad(), has_bias(onward) || has_bias(reverse));
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (inputs[i].requires_grad()) gradients[i] = found[i < split ? i : i - split + 6];
      }
      return gradients;
    }

    static variable_list composed(const at::Tensor& input, at::TensorList direction,
                                  at::OptionalIntArrayRef batch_sizes, bool reverse) {
      variable_list inputs = {input};
      inputs.insert(inputs.end(), direction.begin(), direction.end());
      inputs.resize(6);  // without a bias, with an undefined one
      return Node::composed(inputs, batch_sizes, reverse);
    }
  };

  static variable_list both_autograd(const at::Tensor& input, at::TensorList onward, at::TensorList reverse,
                                     at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
    const auto some_need_grad = [](at::TensorList tensors) {
      return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& x) { return needs_grad(x); });
    };
    if (input.defined() && (needs_grad(input) || some_need_grad(onward) || some_need_grad(reverse))) {
      return BothNode::apply(input, onward, reverse, batch_sizes, algorithm);
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_both(input, onward, reverse, batch_sizes, algorithm);
  }

  static variable_list both_autocast(const at::Tensor& input, at::TensorList onward, at::TensorList reverse,
                                     at::OptionalIntArrayRef batch_sizes, c10::string_view algorithm) {
    const AutocastInputs cast(input);
    const auto cast_all = [&](at::TensorList direction) {
      variable_list found;
      for (size_t i = 0; i < direction.size(); ++i) {
        found.push_back(i == 1 ? direction[i] : cast(direction[i]));  // c0 stays, as below
      }
      return found;
    };
    return call_both(cast(input), cast_all(onward), cast_all(reverse), batch_sizes, algorithm);
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence_autograd(
      const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
      const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
      bool reverse, c10::string_view algorithm) {
    if (any_needs_grad(input, h0, c0, weight_ih, weight_hh, bias)) {
      const variable_list outputs =
          Node::apply(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm);
      return {outputs[0], outputs[1], outputs[2]};
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_sequence(input, h0, c0, weight_ih, weight_hh, bias, batch_sizes, reverse, algorithm);
  }

  // Everything but the cell state, which float32 serves best.
  static std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence_autocast(
      const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weight_ih,
      const at::Tensor& weight_hh, const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
      bool reverse, c10::string_view algorithm) {
    const AutocastInputs cast(input);
    return call_sequence(cast(input), cast(h0), c0, cast(weight_ih), cast(weight_hh), cast(bias), batch_sizes,
                         reverse, algorithm);
  }

  // What a call under autocast takes, which sees the tensors that it casts.
  static std::string algorithm_autocast(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                                        const at::Tensor& weight_ih, const at::Tensor& weight_hh,
                                        const OptionalTensor& bias, at::OptionalIntArrayRef batch_sizes,
                                        c10::string_view algorithm, bool backward) {
    const AutocastInputs cast(input);
    return algorithm_of(cast(input), cast(h0), c0, cast(weight_ih), cast(weight_hh), cast(bias), batch_sizes,
                        algorithm, backward);
  }

#endif

  // ---- registration
  // -------------------------------------------------------------------------------------------

  static std::string named(const char* suffix) { return std::string(Op::name) + suffix; }
  static std::string qualified(const char* suffix) { return "lltm_ext::" + named(suffix); }

  static void define(torch::Library& m) {
    const std::string inputs = "Tensor input, Tensor h0, Tensor c0, Tensor weight_ih, Tensor weight_hh, ";
    const auto def = [&](const char* suffix, const std::string& signature) {
      m.def((named(suffix) + signature).c_str(), {at::Tag::pt2_compliant_tag});
    };
    def("", "(" + inputs +
                "Tensor? bias=None, int[]? batch_sizes=None, bool reverse=False, str algorithm='auto') "
                "-> (Tensor, Tensor, Tensor)");
    def("_forward", "(" + inputs +
                        "Tensor? bias, int[]? batch_sizes, bool reverse, str algorithm) "
                        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
    def("_backward", "(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, " + inputs +
                         "Tensor output, Tensor gates, Tensor extra, int[]? batch_sizes, bool reverse, "
                         "str algorithm, bool input_needs_grad, bool bias_needs_grad) "
                         "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    def("_algorithm",
        "(" + inputs +
            "Tensor? bias=None, int[]? batch_sizes=None, str algorithm='auto', bool backward=False) "
            "-> str");
    const std::string both_inputs = "Tensor input, Tensor[] onward, Tensor[] reverse, ";
    def("_bidirectional", "(" + both_inputs + "int[]? batch_sizes=None, str algorithm='auto') -> Tensor[]");
    def("_bidirectional_forward", "(" + both_inputs + "int[]? batch_sizes, str algorithm) -> Tensor[]");
    def("_bidirectional_backward", "(Tensor?[] grad_outputs, " + both_inputs +
                                       "Tensor[] saved, int[]? batch_sizes, str algorithm, "
                                       "bool input_needs_grad, bool bias_needs_grad) -> Tensor[]");
    implement<both>(m, named("_bidirectional").c_str());
    implement<both_forward>(m, named("_bidirectional_forward").c_str());
    implement<both_backward>(m, named("_bidirectional_backward").c_str());
    implement<sequence>(m, Op::name);
    implement<sequence_forward>(m, named("_forward").c_str());
    implement<sequence_backward>(m, named("_backward").c_str());
    implement<algorithm_of>(m, named("_algorithm").c_str());
#ifndef LLTM_EXT_STABLE_ABI
    implement_autograd(m, named("_bidirectional").c_str(), both_autograd);
    implement_autocast(m, named("_bidirectional").c_str(), both_autocast);
    implement_autograd(m, Op::name, sequence_autograd);
    implement_autocast(m, Op::name, sequence_autocast);
    implement_autocast(m, named("_algorithm").c_str(), algorithm_autocast);
#endif
  }
};

}  // namespace lltm_ext
