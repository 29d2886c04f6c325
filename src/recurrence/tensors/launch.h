// How sequences of tensors (sequence.h) come to the engine (engine.h): their plan, their sizes, one launch.
#pragma once

#include <ATen/ops/empty.h>

#include <vector>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/matmul.h"
#include "recurrence/persistent/launch.h"
#include "recurrence/plan.h"
#include "recurrence/tensors/inputs.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace lltm_ext {

#ifdef LLTM_EXT_WITH_CUDA
// Calls f(Type<T>{}) for the types that the engine takes, of which float64 is none.
template <typename F>
auto with_engine_type(at::ScalarType type, F&& f) {
  if (type == at::kHalf) return f(Type<__half>{});
  if (type == at::kBFloat16) return f(Type<__nv_bfloat16>{});
  return f(Type<float>{});
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
    const Problem problem = {hidden,
                             batch,
                             dense,
                             backward,
                             static_cast<int>(input.element_size()),
                             Cell::kGates,
                             static_cast<int>(sequences),
                             allows_tf32(input)};
    check_launch(op, with_engine_type(input.scalar_type(), [&](auto type) {
                   return plan_sequence<Cell, typename decltype(type)::type>(problem, wanted, plan);
                 }));
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

// The rows of the input, as all directions take them.
struct Rows {
  int64_t length, batch, hidden;
  at::OptionalIntArrayRef batch_sizes;

  Rows(const at::Tensor& input, Directions directions, at::OptionalIntArrayRef batch_sizes)
      : length(length_of(input, batch_sizes)),
        batch(directions[0].h0.size(0)),
        hidden(directions[0].h0.size(1)),
        batch_sizes(batch_sizes) {}
  template <class Op>
  Plan plan(const at::Tensor& like, bool backward, c10::string_view algorithm, size_t sequences) const {
    return plan_for<typename Op::Cell>(Op::name, like, batch, hidden, !batch_sizes, backward, algorithm,
                                       sequences);
  }
  std::vector<Steps::Step> steps(bool reverse) const {
    return Steps(batch_sizes, length, batch, reverse).steps;
  }
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

// sequence_of(type, 0), (type, 1), ... as one launch takes them.
template <typename Type, typename F>
auto together(Type type, size_t count, F&& sequence_of) {
  PerDirection<decltype(sequence_of(type, 0))> sequences = {};
  TORCH_INTERNAL_ASSERT(count <= kMaxDirections);
  sequences.count = static_cast<int>(count);
  for (size_t i = 0; i < count; ++i) sequences.of[i] = sequence_of(type, i);
  return sequences;
}

// Calls f(Type<T>{}, stream), which launches what was planned. False if there is no room for it, and a way
// without.
template <typename F>
bool launch_at_once(const char* kernel, const at::Tensor& like, const Plan& plan, c10::string_view algorithm,
                    size_t sequences, F&& f) {
#ifdef LLTM_EXT_WITH_CUDA
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(like.get_device());
  const cudaError_t error = with_engine_type(like.scalar_type(), [&](auto type) { return f(type, stream); });
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

}  // namespace lltm_ext
