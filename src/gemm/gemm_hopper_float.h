// gemm in float32 by Hopper's matrix units, as the rest of the op sees it.
#pragma once

#include "gemm/gemm.h"

namespace lltm_ext {

// Whether it takes this: another precision than IEEE, on compute capability 9.0.
bool hopper_takes(const GemmArgs<float>& args);

// What it wants of workspace for that.
int64_t hopper_workspace_bytes(const GemmArgs<float>& args, int multiprocessors);

cudaError_t gemm_on_hopper(const GemmArgs<float>& args, int multiprocessors, cudaStream_t stream);

}  // namespace lltm_ext
