// gemm on Hopper: half types (gemm_hopper.cu), and float32 of a lower precision than IEEE
// (gemm_hopper_float.cu).
#pragma once

#include "common/device.h"
#include "gemm/gemm.h"

namespace lltm_ext {

// Whether these kernels can compute it, on a device of compute capability 9.0.
template <typename T>
bool hopper_supports(const GemmArgs<T>& args);
bool hopper_supports(const GemmArgs<float>& args);

template <typename T>
int64_t hopper_workspace_bytes(const GemmArgs<T>& args, const DeviceInfo& device);
int64_t hopper_workspace_bytes(const GemmArgs<float>& args, const DeviceInfo& device);

// Estimated, in microseconds.
template <typename T>
double hopper_time(const GemmArgs<T>& args, const DeviceInfo& device);
double hopper_time(const GemmArgs<float>& args, const DeviceInfo& device);

template <typename T>
cudaError_t gemm_on_hopper(const GemmArgs<T>& args, const DeviceInfo& device, cudaStream_t stream);
cudaError_t gemm_on_hopper(const GemmArgs<float>& args, const DeviceInfo& device, cudaStream_t stream);

}  // namespace lltm_ext
