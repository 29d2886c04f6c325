// gemm on CUDA: which kernel takes which problem. float32 and float64 go to gemm_ffma.cuh, the half types on
// Hopper to gemm_hopper.cuh, elsewhere to the tensor cores of gemm_tensor.cuh. Every element of c is summed
// by one block in one order: same bits every run.
#include "common/elementwise.cuh"
#include "gemm/gemm_activation.h"
#include "gemm/gemm_ffma.cuh"
#include "gemm/gemm_hopper.h"
#include "gemm/gemm_hopper_float.h"
#include "gemm/gemm_tensor.cuh"

namespace lltm_ext {

struct Chip {
  int compute_capability, multiprocessors;
};

cudaError_t current_chip(Chip& chip) {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  get(major, cudaDevAttrComputeCapabilityMajor);
  get(minor, cudaDevAttrComputeCapabilityMinor);
  get(chip.multiprocessors, cudaDevAttrMultiProcessorCount);
  chip.compute_capability = 10 * major + minor;
  return error;
}

// Large tiles read each operand less often, small ones make more blocks: large where they nearly fill the
// chip.
template <typename T>
bool fills(const Chip& chip, const GemmArgs<T>& args, int tile_rows, int tile_columns) {
  return args.m > tile_rows / 2 && args.n > tile_columns / 2 &&
         tiles_of(args, tile_rows, tile_columns).total * 3 >= int64_t{chip.multiprocessors} * 2;
}

template <typename T>
cudaError_t gemm(const GemmArgs<T>& args, cudaStream_t stream) {
  Chip chip;
  const cudaError_t error = current_chip(chip);
  if (error != cudaSuccess) return error;
  const bool large = fills(chip, args, 128, 128);
  if constexpr (sizeof(T) == 2) {
#ifdef LLTM_EXT_SM90A
    if (hopper_takes(args, chip.compute_capability)) {
      return gemm_on_hopper(args, chip.multiprocessors, stream);
    }
#endif
    return large ? launch_tensor<128>(args, stream) : launch_tensor<64>(args, stream);
  } else if constexpr (sizeof(T) == 4) {
#ifdef LLTM_EXT_SM90A
    if (hopper_takes(args, chip.compute_capability)) {
      return gemm_on_hopper(args, chip.multiprocessors, stream);
    }
#endif
    return large ? launch_ffma<FfmaTile<T, 128, 128, 16, 8, 8, 2>>(args, stream)
                 : launch_ffma<FfmaTile<T, 64, 64, 16, 8, 4, 4>>(args, stream);
  } else {
    return launch_ffma<FfmaTile<T, 64, 64, 16, 8, 4, 3>>(args, stream);
  }
}

template <typename T>
int64_t gemm_workspace_bytes(const GemmArgs<T>& args) {
#ifdef LLTM_EXT_SM90A
  if constexpr (sizeof(T) == 4) {
    Chip chip;
    if (current_chip(chip) == cudaSuccess && hopper_takes(args, chip.compute_capability)) {
      return hopper_workspace_bytes(args);
    }
  }
#endif
  return 0;
}

#define INSTANTIATE(T)                                       \
  template int64_t gemm_workspace_bytes(const GemmArgs<T>&); \
  template cudaError_t gemm(const GemmArgs<T>&, cudaStream_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)
LLTM_ELEMENTWISE(GemmActivationBackward, 2)

}  // namespace lltm_ext
