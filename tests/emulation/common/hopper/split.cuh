// In place of src/common/hopper/split.cuh: what else than split-K that has.
#pragma once

#include "common/hopper/ptx.cuh"
#include "common/hopper/sizes.h"

namespace lltm_ext {
namespace hopper {

inline unsigned char* dynamic_shared() { return cuda_on_cpu::current_block().memory(); }

}  // namespace hopper
}  // namespace lltm_ext
