// gemm on Hopper: half types (gemm_hopper.cu), and float32 of a lower precision than IEEE
// (gemm_hopper_float.cu).
#pragma once

#include "common/device.h"
#include "gemm/gemm.h"

namespace lltm_ext {

// How to compute a product on a device of compute capability 9.0. It depends on the sizes, the strides, the
// alignment of the operands, the precision, and how many clusters the device runs at once.
struct HopperPlan {
  bool supported = false;
  double time = 0;  // estimated, in microseconds
  int64_t workspace_bytes = 0;
  int kernel = 0;  // its place among the tilings
  int splits = 1;  // of K, in float32
};

template <typename T>
HopperPlan hopper_plan(const GemmArgs<T>& args, const DeviceInfo& device);
HopperPlan hopper_plan(const GemmArgs<float>& args, const DeviceInfo& device);

template <typename T>
cudaError_t gemm_on_hopper(const GemmArgs<T>& args, const HopperPlan& plan, const DeviceInfo& device,
                           cudaStream_t stream);
cudaError_t gemm_on_hopper(const GemmArgs<float>& args, const HopperPlan& plan, const DeviceInfo& device,
                           cudaStream_t stream);

}  // namespace lltm_ext
