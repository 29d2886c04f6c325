// From tensors to the fused kernels: the plan, the sizes, the launch.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/matmul.h"
#include "common/side_by_side.h"
#include "custom_cell/kernels.h"
#include "custom_cell/rows.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace lltm_ext {

inline Algorithm algorithm_named(const char* op, c10::string_view name) {
  if (name == "auto") return Algorithm::kAuto;
  if (name == "stepwise") return Algorithm::kStepwise;
  if (name == "cluster") return Algorithm::kCluster;
  if (name == "grid") return Algorithm::kGrid;
  TORCH_CHECK_VALUE(false, op, ": expected algorithm to be 'auto', 'stepwise', 'cluster' or 'grid', got '",
                    name, "'");
}

#ifdef LLTM_EXT_WITH_CUDA
// Calls f(Type<T>{}).
template <typename F>
auto with_type(at::ScalarType type, F&& f) {
  if (type == at::kHalf) return f(Type<__half>{});
  if (type == at::kBFloat16) return f(Type<__nv_bfloat16>{});
  if (type == at::kDouble) return f(Type<double>{});
  return f(Type<float>{});
}
#endif

// Plans one launch of `sequences` sequences of `steps` steps. An algorithm that can't run a single one is an
// error; several can still run one after the other.
inline Plan plan_for(const CellOp& of, const at::Tensor& input, int64_t batch, int64_t hidden, bool dense,
                     bool backward, c10::string_view algorithm, int64_t steps, size_t sequences = 1,
                     bool side_by_side = false, int64_t heads = 1) {
  const std::string name = of.name();
  const char* const op = name.c_str();
  const Algorithm wanted = algorithm_named(op, algorithm);
  Plan plan;
  if (!input.is_cuda()) {
    if (wanted == Algorithm::kCluster || wanted == Algorithm::kGrid) plan.why_not = "needs a CUDA device";
  } else {
#ifdef LLTM_EXT_WITH_CUDA
    const Problem problem = {.cell = of.shape(),
                             .hidden = hidden / heads,
                             .batch = batch,
                             .dense = dense,
                             .backward = backward,
                             .element_size = static_cast<int>(input.element_size()),
                             .sequences = static_cast<int>(sequences),
                             .tf32 = allows_tf32(input),
                             .side_by_side = side_by_side,
                             .steps = steps,
                             .heads = static_cast<int>(heads)};
    check_launch(
        op, with_type(input.scalar_type(), [&](auto type) { return of.plan(type, problem, wanted, plan); }));
    // The table of a packed sequence's rows is copied from the host, which a captured graph would not repeat.
    if (!dense && c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
      if (wanted != Algorithm::kAuto && wanted != Algorithm::kStepwise) {
        plan.why_not = "can't be captured in a graph with a packed sequence";
      }
      plan.algorithm = Algorithm::kStepwise;
      plan.small_batch = {};
      plan.independent = false;
    }
#endif
  }
  TORCH_CHECK(plan.why_not.empty() || sequences > 1 || heads > 1, op, ": algorithm '", algorithm, "' ",
              plan.why_not, " (algorithm 'auto' runs everything)");
  return plan;
}

// [G * H, H] of block-diagonal [G * H, H / heads], with zeros between the blocks.
inline at::Tensor dense_of_heads(const at::Tensor& weight, int64_t hidden) {
  if (!weight.defined() || weight.size(1) == hidden) return weight;
  const int64_t size = weight.size(1), heads = hidden / size, gates = weight.size(0) / hidden;
  const at::Tensor dense = at::zeros({weight.size(0), hidden}, weight.options()),
                   blocks = dense.as_strided({gates, heads, size, size},
                                             {hidden * hidden, size * (hidden + 1), hidden, 1});
  blocks.copy_(weight.view({gates, heads, size, size}));
  return dense;
}

// The sizes of a sequence, the same for all directions of a layer.
struct SequenceSizes {
  int64_t length, batch, hidden, heads;
  at::OptionalIntArrayRef batch_sizes;

  SequenceSizes(const CellShape& shape, const CellCall& call)
      : length(length_of(call.input, call.batch_sizes)),
        batch(call.batch_sizes ? packed_batch_of(call.directions[0], *call.batch_sizes) : call.input.size(1)),
        hidden(hidden_of(shape, call.input, call.directions[0])),
        heads(shape.recurrent && hidden > 0 ? hidden / call.directions[0].weight_hh.size(1) : 1),
        batch_sizes(call.batch_sizes) {}
  // Heads run side by side in persistent kernels. All other kernels take dense weights (dense_of_heads).
  Plan plan(const CellOp& op, const at::Tensor& like, bool backward, c10::string_view algorithm,
            size_t sequences, bool side_by_side, int64_t steps) const {
    if (heads > 1 && like.is_cuda()) {
      const Plan of_heads = plan_for(op, like, batch, hidden, !batch_sizes, backward, algorithm, steps,
                                     sequences, side_by_side, heads);
      if (of_heads.runs_all_steps()) return of_heads;
    }
    return plan_for(op, like, batch, hidden, !batch_sizes, backward, algorithm, steps, sequences,
                    side_by_side);
  }
  // What a plan takes of weight_hh.
  at::Tensor weight_hh(const Plan& plan, const Direction& d) const {
    return plan.heads > 1 ? d.weight_hh : dense_of_heads(d.weight_hh, hidden);
  }
  // Memory for the links of a plan's tiles, for the parts of rows, or that a large layer's blocks share;
  // undefined if there is none.
  at::Tensor links(const Plan& plan, const CellShape& shape, const at::Tensor& like) const {
    int64_t bytes = plan.row_parts_bytes + plan.given_bytes + plan.large.bytes;
    if (plan.tiles.threads > 0) bytes = plan.tiles.link_bytes(shape.live_states());
    if (bytes == 0) return {};
    return at::empty({ceil_div(bytes, int64_t{4})}, like.options().dtype(at::kFloat));
  }
  static int64_t hidden_of(const CellShape& shape, const at::Tensor& input, const Direction& d) {
    if (d.h0.defined()) return d.h0.size(1);
    return (d.weight_ih.defined() ? d.weight_ih.size(0) : input.size(-1)) / shape.gates;
  }
  RowsOfSteps steps(bool reverse) const { return {batch_sizes, length, batch, reverse}; }
  StepOrder order(bool reverse, const at::Tensor& first_rows) const {
    return {static_cast<int>(length), static_cast<int>(batch), reverse,
            first_rows.defined() ? first_rows.const_data_ptr<int64_t>() : nullptr};
  }
};

// The first row of each step of a packed sequence, on the device of `like`.
inline at::Tensor first_rows_on(const at::Tensor& like, at::OptionalIntArrayRef batch_sizes) {
  if (!batch_sizes) return {};
  const int64_t length = static_cast<int64_t>(batch_sizes->size());
  at::Tensor rows = at::empty({length + 1}, at::TensorOptions(at::kLong).pinned_memory(true));
  int64_t* row = rows.mutable_data_ptr<int64_t>();
  row[0] = 0;
  for (int64_t t = 0; t < length; ++t) row[t + 1] = row[t] + (*batch_sizes)[t];
  return rows.to(like.device(), /*non_blocking=*/true);
}

// Rows of a dense [rows, H], or of resets, from `first` on. A view would take the host as long as a launch.
struct Rows {
  const at::Tensor& of;
  int64_t first = 0;
};

// `count` rows of y become what those of x keep after their resets. y may be x. What they lose is added to
// `lost`, if that is defined.
inline void mask_rows(const Rows& y, const Rows& x, const Rows& resets, int64_t count,
                      const at::Tensor& lost = {}) {
  const int64_t hidden = x.of.size(1);
  launch("mask_rows", x.of, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    const MaskRowsArguments<T> arguments = {count,
                                            hidden,
                                            pointer<T>(x.of) + x.first * hidden,
                                            resets_from<T>(resets.of, resets.first),
                                            mutable_pointer<T>(y.of) + y.first * hidden,
                                            mutable_pointer<acc_t<T>>(lost)};
    return mask_rows(arguments, stream...);
  });
}

// The sum of the rows of x [rows, columns], in the type T of `like`. Torch's sum divides many rows among more
// blocks, but takes the host longer, and half types a second kernel.
inline at::Tensor sum_of_rows(const at::Tensor& x, const at::Tensor& like) {
#ifdef LLTM_EXT_WITH_CUDA
  constexpr int64_t kMostRows = 256;
  if (x.is_cuda() && x.size(0) <= kMostRows) {
    const at::Tensor sum = at::empty({x.size(1)}, like.options());
    launch("sum_rows", sum, [&](auto type, auto... stream) {
      using T = typename decltype(type)::type;
      if constexpr (sizeof...(stream) > 0) {
        const SumRowsArguments<T> arguments = {x.size(0), x.size(1), x.stride(0), pointer<acc_t<T>>(x),
                                               mutable_pointer<T>(sum)};
        return sum_rows(arguments, stream...);
      }
    });
    return sum;
  }
#endif
  return x.sum(0).to(like.scalar_type());
}

// Collects arguments_of(type, i) of each direction i.
template <typename Type, typename F>
auto per_direction(Type type, size_t count, F&& arguments_of) {
  PerDirection<decltype(arguments_of(type, 0))> sequences = {};
  TORCH_INTERNAL_ASSERT(count <= kMaxDirections);
  sequences.count = static_cast<int>(count);
  for (size_t i = 0; i < count; ++i) sequences.of[i] = arguments_of(type, i);
  return sequences;
}

#ifdef LLTM_EXT_WITH_CUDA
// Whether a launch failed because the GPU has no room for its blocks. All other errors are raised.
inline bool does_not_fit(cudaError_t error) {
  return error == cudaErrorCooperativeLaunchTooLarge || error == cudaErrorLaunchOutOfResources ||
         error == cudaErrorInvalidClusterSize;
}
#endif

// Launches a fused plan by f(Type<T>{}, stream). Returns false, having run nothing, if it does not fit and
// there is a fallback: fewer sequences at once, or unfused steps.
template <typename F>
bool try_launch_fused(const char* kernel, const at::Tensor& like, const Plan& plan,
                      c10::string_view algorithm, size_t sequences, F&& f) {
#ifdef LLTM_EXT_WITH_CUDA
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(like.get_device());
  const cudaError_t error = with_type(like.scalar_type(), [&](auto type) { return f(type, stream); });
  const bool has_other_way = algorithm == "auto" || sequences > 1 || plan.algorithm == Algorithm::kStepwise;
  if (does_not_fit(error) && has_other_way) {
    cudaGetLastError();  // clears the error, which the next launch would else report
    return false;
  }
  check_launch(kernel, error);
#endif
  return true;
}

}  // namespace lltm_ext
