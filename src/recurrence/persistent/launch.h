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
size_t recurrence_shared_bytes(const Variant& variant, const GridShape& grid, int hidden, bool backward);

// Of the code in use on the current device (common/launch.cuh).
template <class Cell, typename T>
cudaError_t recurrence_compute_capability(int& capability);

// Runs a plan that is by_engine(), for as many sequences. Fills the memory through which blocks exchange
// values first. Fails with cudaErrorCooperativeLaunchTooLarge and the like, and has run nothing, if the GPU
// has no room for it.
template <class Cell, typename T>
cudaError_t recurrence_forward(const Sequences<ForwardSequence<T>>& sequences, const Plan& plan,
                               cudaStream_t stream);
template <class Cell, typename T>
cudaError_t recurrence_backward(const Sequences<BackwardSequence<T>>& sequences, const Plan& plan,
                                cudaStream_t stream);

// Those of a plan that is stepwise: step_hopper.cuh.
template <class Cell, typename T>
cudaError_t recurrence_steps_forward(const ForwardSequence<T>& sequence, const StepTile& tile,
                                     cudaStream_t stream);
template <class Cell, typename T>
cudaError_t recurrence_steps_backward(const BackwardSequence<T>& sequence, const StepTile& tile,
                                      cudaStream_t stream);

#ifdef LLTM_EXT_SM90A
constexpr bool kHasStepsForHopper = true;
#else
constexpr bool kHasStepsForHopper = false;
#endif

}  // namespace lltm_ext
