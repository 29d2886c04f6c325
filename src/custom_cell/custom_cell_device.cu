// What a user's cell needs of CUDA besides torch's headers: the current device for its planner, and for its
// compiler the headers of the engine. They are embedded in this file because nvcc can include them, so that a
// change of one of them compiles this file again.
#include "common/device.cuh"
#include "common/runtime/compiler.h"
#include "custom_cell/headers.h"
#include "recurrence/persistent/backward.cuh"
#include "recurrence/persistent/forward.cuh"
#include "recurrence/step/pointwise.cuh"

#ifndef __CUDA_ARCH__
LLTM_EMBED(portable_h, "common/portable.h");
LLTM_EMBED(types_h, "common/types.h");
LLTM_EMBED(math_h, "common/math.h");
LLTM_EMBED(fast_math_cuh, "common/fast_math.cuh");
LLTM_EMBED(launch_cuh, "common/launch.cuh");
LLTM_EMBED(ptx_cuh, "common/hopper/ptx.cuh");
LLTM_EMBED(cell_h, "recurrence/cell.h");
LLTM_EMBED(variants_h, "recurrence/persistent/variants.h");
LLTM_EMBED(shape_h, "recurrence/persistent/shape.h");
LLTM_EMBED(pair_cuh, "recurrence/persistent/pair.cuh");
LLTM_EMBED(product_cuh, "recurrence/persistent/product.cuh");
LLTM_EMBED(exchange_cuh, "recurrence/persistent/exchange.cuh");
LLTM_EMBED(block_cuh, "recurrence/persistent/block.cuh");
LLTM_EMBED(steps_cuh, "recurrence/persistent/steps.cuh");
LLTM_EMBED(forward_cuh, "recurrence/persistent/forward.cuh");
LLTM_EMBED(backward_cuh, "recurrence/persistent/backward.cuh");
LLTM_EMBED(step_h, "recurrence/step/step.h");
LLTM_EMBED(pointwise_cuh, "recurrence/step/pointwise.cuh");
#endif

namespace lltm_ext {

cudaError_t device_info(DeviceInfo& info) { return current_device_info(info); }

#ifndef __CUDA_ARCH__
std::vector<Header> cell_headers() {
  return {portable_h, types_h,    math_h,      fast_math_cuh, launch_cuh,  ptx_cuh,
          cell_h,     variants_h, shape_h,     pair_cuh,      product_cuh, exchange_cuh,
          block_cuh,  steps_cuh,  forward_cuh, backward_cuh,  step_h,      pointwise_cuh};
}
#endif

}  // namespace lltm_ext
