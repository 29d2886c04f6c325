// gemm on CUDA: which kernel computes what. float32: gemm_ffma.cuh. float64: gemm_double.cuh, or
// gemm_ffma.cuh without tensor cores for it. Half types: gemm_hopper.cuh on Hopper, else gemm_tensor.cuh. The
// order of additions is fixed, so the same call twice gives the same bits.
#include "common/device.cuh"
#include "common/elementwise.cuh"
#include "gemm/gemm_bias.cuh"
#include "gemm/gemm_double.cuh"
#include "gemm/gemm_ffma.cuh"
#include "gemm/gemm_hopper.h"
#include "gemm/gemm_tensor.cuh"

namespace lltm_ext {

// The current device, with the compute capability of this file's code: less than the device's own where that
// runs older PTX.
cudaError_t query_device(DeviceInfo& device) {
  const cudaError_t error = current_device_info(device);
  if (error != cudaSuccess) return error;
  return compute_capability<gemm_bias_sum_kernel<float>>(device.compute_capability);
}

// Large tiles read each operand less often, small ones make more blocks. So large ones are used where they
// nearly fill the device.
template <typename T>
bool fills(const DeviceInfo& device, const GemmArgs<T>& args, int tile_rows, int tile_columns) {
  return args.m > tile_rows / 2 && args.n > tile_columns / 2 &&
         tiles_of(args, tile_rows, tile_columns).total * 3 >= int64_t{device.multiprocessors} * 2;
}

// The relative time of tiles of this size: rounds of blocks times elements per round, times `slower`: how
// much longer an element takes than in the largest tiles.
template <typename T>
double cost_of(const GemmArgs<T>& args, const DeviceInfo& device, int rows, int columns, double slower) {
  const int64_t rounds = ceil_div(tiles_of(args, rows, columns).total, device.multiprocessors);
  return static_cast<double>(rounds) * rows * columns * slower;
}

constexpr int kAmpere = 80;  // before it: less shared memory and no cp.async

// Larger tiles spend fewer instructions on loads; smaller ones balance the multiprocessors better. In tiles
// of few elements groups of threads split K.
cudaError_t launch_float32(const GemmArgs<float>& args, const DeviceInfo& device, cudaStream_t stream) {
  using Small = FfmaTile<float, 64, 64, 16, 8, 4, 1, 3, 4>;
  if (device.compute_capability < kAmpere) {
    return fills(device, args, 128, 128)
               ? launch_ffma<FfmaTile<float, 128, 128, 16, 8, 8, 1, 2, 2>>(args, stream)
               : launch_ffma<Small>(args, stream);
  }
  constexpr int kParts = 4;
  // One block per multiprocessor at most, each with enough threads.
  using Narrow = FfmaTile<float, 32, 64, 32, 8, 4, 4, 6, 1, true>;
  if (device.compute_capability == 90 &&
      tiles_of(args, Narrow::BM, Narrow::BN).total <= device.multiprocessors) {
    return launch_ffma<Narrow, kParts>(args, stream);
  }
  const double large = cost_of(args, device, 256, 128, 1.0), medium = cost_of(args, device, 128, 64, 1.1),
               small = cost_of(args, device, 64, 64, 1.35);
  if (small < std::min(medium, large)) return launch_ffma<Small>(args, stream);
  using Medium = FfmaTile<float, 128, 64, 32, 16, 8, 4, 3, 1>;
  using Large = FfmaTile<float, 256, 128, 16, 16, 8, 1, 3, 1>;
  if (device.compute_capability != 90) {
    return medium < large ? launch_ffma<Medium>(args, stream) : launch_ffma<Large>(args, stream);
  }
  return medium < large ? launch_ffma<Medium, kParts>(args, stream)
                        : launch_ffma<Large, kParts>(args, stream);
}

cudaError_t launch_float64(const GemmArgs<double>& args, const DeviceInfo& device, cudaStream_t stream) {
  if (!has_double_tensor_cores(device.compute_capability)) {
    return launch_ffma<FfmaTile<double, 64, 64, 16, 8, 4, 1, 2, 3>>(args, stream);
  }
  // Launches are programmatic only if all blocks run at once: else the next launch's blocks would take the
  // place of this one's last round.
  const bool programmatic = device.compute_capability >= 90;
  // One warp for each quarter of a multiprocessor, and as many loads in flight as it needs.
  using Narrow = DoubleTile<32, 64, 32, 32, 16, 5, 1, true>;
  if (device.compute_capability == 90 &&
      tiles_of(args, Narrow::BM, Narrow::BN).total <= device.multiprocessors) {
    return launch_double<Narrow>(args, programmatic, stream);
  }
  using Tall = DoubleTile<128, 64, 16, 64, 32, 3, 2>;
  using Small = DoubleTile<64, 64, 16, 32, 32, 3, 3>;
  // For at most two blocks per multiprocessor: more stages instead of room for a third.
  using SmallAndDeep = DoubleTile<64, 64, 16, 32, 32, 4, 2>;
  if (tiles_of(args, Tall::BM, Tall::BN).total >= int64_t{device.multiprocessors} * 32) {
    return launch_double<Tall>(args, /*programmatic=*/false, stream);
  }
  return tiles_of(args, Small::BM, Small::BN).total <= int64_t{device.multiprocessors} * 2
             ? launch_double<SmallAndDeep>(args, programmatic, stream)
             : launch_double<Small>(args, /*programmatic=*/false, stream);
}

template <typename T>
cudaError_t gemm(const GemmArgs<T>& args, cudaStream_t stream) {
  DeviceInfo device;
  const cudaError_t error = query_device(device);
  if (error != cudaSuccess) return error;
#ifdef LLTM_EXT_SM90A
  if constexpr (sizeof(T) <= 4) {
    if (device.has_sm90a && hopper_supports(args)) return gemm_on_hopper(args, device, stream);
  }
#endif
  if constexpr (sizeof(T) == 2) {
    return fills(device, args, 128, 128) ? launch_tensor<128>(args, stream) : launch_tensor<64>(args, stream);
  } else if constexpr (sizeof(T) == 4) {
    return launch_float32(args, device, stream);
  } else {
    return launch_float64(args, device, stream);
  }
}

template <typename T>
int64_t gemm_workspace_bytes(const GemmArgs<T>& args) {
#ifdef LLTM_EXT_SM90A
  DeviceInfo device;
  if constexpr (sizeof(T) <= 4) {
    if (current_device_info(device) == cudaSuccess && device.has_sm90a && hopper_supports(args)) {
      return hopper_workspace_bytes(args, device);
    }
  }
#endif
  return 0;
}

template <typename T>
int64_t gemm_bias_backward_workspace_bytes(const BiasBackwardArgs<T>& args) {
  const BiasGrid grid(args.rows, args.columns, width_of(args));
  return int64_t{grid.blocks.y} * args.columns * sizeof(acc_t<T>);
}

template <typename T>
cudaError_t gemm_bias_backward(const BiasBackwardArgs<T>& args, cudaStream_t stream) {
  DeviceInfo device;
  const cudaError_t error = query_device(device);
  if (error != cudaSuccess) return error;
  const bool programmatic = device.compute_capability >= 90;
  return width_of(args) > 1 ? launch_bias_backward<kVecWidth<T>>(args, programmatic, stream)
                            : launch_bias_backward<1>(args, programmatic, stream);
}

#define INSTANTIATE(T)                                                             \
  template int64_t gemm_workspace_bytes(const GemmArgs<T>&);                       \
  template cudaError_t gemm(const GemmArgs<T>&, cudaStream_t);                     \
  template int64_t gemm_bias_backward_workspace_bytes(const BiasBackwardArgs<T>&); \
  template cudaError_t gemm_bias_backward(const BiasBackwardArgs<T>&, cudaStream_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)
LLTM_ELEMENTWISE(GemmActivationBackward, 2)

}  // namespace lltm_ext
