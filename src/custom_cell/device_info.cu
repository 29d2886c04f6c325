// The current device for the planner of a user's cell. Asking takes a kernel (common/device.cuh), so nvcc
// compiles it.
#include "common/device.cuh"

namespace lltm_ext {

cudaError_t device_info(DeviceInfo& info) { return current_device_info(info); }

}  // namespace lltm_ext
