// The persistent kernels as the bindings see them.
#pragma once

#include "recurrence/cell.h"
#include "recurrence/plan.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

#ifndef LLTM_EXT_WITH_CUDA
// Stand-ins, so that code which is generic over the device reads the same. Nothing calls what names them.
using cudaError_t = int;
using cudaStream_t = void*;
#endif

// What a block of a variant takes of shared memory, for these groups.
template <class Cell, typename T>
size_t persistent_shared_bytes(const Variant& variant, const GridShape& grid, int hidden, bool backward);

// Of the code in use on the current device (common/launch.cuh).
template <class Cell, typename T>
cudaError_t persistent_compute_capability(int& capability);

// Runs a plan that is is_fused(), for as many sequences. Fills the memory through which blocks exchange
// values first. Fails with cudaErrorCooperativeLaunchTooLarge and the like, and has run nothing, if the GPU
// has no room for it.
template <class Cell, typename T>
cudaError_t launch_sequence_forward(const PerDirection<SequenceForwardArguments<T>>& sequences,
                                    const Plan& plan, cudaStream_t stream);
template <class Cell, typename T>
cudaError_t launch_sequence_backward(const PerDirection<SequenceBackwardArguments<T>>& sequences,
                                     const Plan& plan, cudaStream_t stream);

// Those of a plan that is stepwise: step_hopper.cuh.
template <class Cell, typename T>
cudaError_t launch_fused_steps_forward(const SequenceForwardArguments<T>& sequence, const StepTile& tile,
                                       cudaStream_t stream);
template <class Cell, typename T>
cudaError_t launch_fused_steps_backward(const SequenceBackwardArguments<T>& sequence, const StepTile& tile,
                                        cudaStream_t stream);

#ifdef LLTM_EXT_SM90A
constexpr bool kHasFusedSteps = true;
#else
constexpr bool kHasFusedSteps = false;
#endif

}  // namespace lltm_ext
