// gemm in half types on Hopper, as the rest of the op sees it.
#pragma once

#include "gemm/gemm.h"

namespace lltm_ext {

// Whether it takes this: what the copy engine reads, on compute capability 9.0.
template <typename T>
bool hopper_takes(const GemmArgs<T>& args);

// What it wants of workspace for that.
template <typename T>
int64_t hopper_workspace_bytes(const GemmArgs<T>& args, int multiprocessors);

template <typename T>
cudaError_t gemm_on_hopper(const GemmArgs<T>& args, int multiprocessors, cudaStream_t stream);

}  // namespace lltm_ext
