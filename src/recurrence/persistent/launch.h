// Launches of a planned sequence, as the bindings see them.
#pragma once

#include "recurrence/cell.h"
#include "recurrence/plan.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

#ifndef LLTM_EXT_WITH_CUDA
// Stand-ins, so that code which is generic over the device compiles. Nothing calls functions of these types.
using cudaError_t = int;
using cudaStream_t = void*;
#endif

// Plans a sequence of T on the current device (plan.h).
template <class Cell, typename T>
cudaError_t plan_sequence(const Problem& problem, Algorithm requested, Plan& plan);

// Runs a fused plan: a persistent kernel for all directions, or fused steps for one sequence. First fills the
// memory through which blocks exchange values. If the kernel does not fit (does_not_fit in tensors/launch.h),
// nothing has run.
template <class Cell, typename T>
cudaError_t launch_sequence_forward(const PerDirection<SequenceForwardArguments<T>>& sequences,
                                    const Plan& plan, cudaStream_t stream);
template <class Cell, typename T>
cudaError_t launch_sequence_backward(const PerDirection<SequenceBackwardArguments<T>>& sequences,
                                     const Plan& plan, cudaStream_t stream);

// The fused steps (step/fused_hopper.cuh).
template <class Cell, typename T>
cudaError_t launch_fused_steps(const SequenceForwardArguments<T>& sequence, const FusedStepTile& tile,
                               cudaStream_t stream);
template <class Cell, typename T>
cudaError_t launch_fused_steps(const SequenceBackwardArguments<T>& sequence, const FusedStepTile& tile,
                               cudaStream_t stream);

}  // namespace lltm_ext
