#ifdef LLTM_EXT_WITH_CUDA
#include "custom_cell/kernels.h"

#include <c10/cuda/CUDAFunctions.h>

#include "custom_cell/compile.h"

namespace lltm_ext {

cudaKernel_t load_cell_kernel(const CellProgram& program, const CellKernel& kernel) {
  using Key = std::tuple<const CellProgram*, decltype(kernel.key()), c10::DeviceIndex>;
  static auto& loaded = *new Memo<Key, cudaKernel_t>();
  const c10::DeviceIndex device = c10::cuda::current_device();
  return loaded.get({&program, kernel.key(), device}, [&] {
    // sm_90 does not have wgmma, sm_90a does.
    const std::string architecture = architecture_of(device) + (kernel.needs_wgmma() ? "a" : "");
    return load_kernels(compile_cell(program, kernel, architecture), {kCellKernelName})[0];
  });
}

}  // namespace lltm_ext
#endif
