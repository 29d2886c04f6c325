// gemm on CUDA: which kernel takes which problem. float32 goes to gemm_ffma.cuh, float64 to gemm_double.cuh
// (without a matrix unit for it to gemm_ffma.cuh), the half types on Hopper to gemm_hopper.cuh, elsewhere to
// the tensor cores of gemm_tensor.cuh. Every element of c is summed by one block in one order: same bits
// every run.
#include "common/elementwise.cuh"
#include "gemm/gemm_activation.h"
#include "gemm/gemm_bias.cuh"
#include "gemm/gemm_double.cuh"
#include "gemm/gemm_ffma.cuh"
#include "gemm/gemm_hopper.h"
#include "gemm/gemm_hopper_float.h"
#include "gemm/gemm_tensor.cuh"

namespace lltm_ext {

struct Chip {
  int compute_capability;  // of the code in use
  int multiprocessors;
  bool hopper;  // and the device is one: code for it alone is in use too
};

cudaError_t current_chip(Chip& chip) {
  int device = 0;
  cudaError_t error = compute_capability<gemm_bias_sum_kernel<float>>(chip.compute_capability);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&chip.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  int major = 0;  // PTX of 9.0 serves later devices too, which lack wgmma
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  chip.hopper = chip.compute_capability == 90 && major == 9;
  return error;
}

// Large tiles read each operand less often, small ones make more blocks: large where they nearly fill the
// chip.
template <typename T>
bool fills(const Chip& chip, const GemmArgs<T>& args, int tile_rows, int tile_columns) {
  return args.m > tile_rows / 2 && args.n > tile_columns / 2 &&
         tiles_of(args, tile_rows, tile_columns).total * 3 >= int64_t{chip.multiprocessors} * 2;
}

// How long tiles of this size take: rounds of all multiprocessors times elements a round, if an element of
// the largest tiles takes 1 and one of these `slower`.
template <typename T>
double cost_of(const GemmArgs<T>& args, const Chip& chip, int rows, int columns, double slower) {
  const int64_t rounds = ceil_div(tiles_of(args, rows, columns).total, chip.multiprocessors);
  return static_cast<double>(rounds) * rows * columns * slower;
}

constexpr int kAmpere = 80;  // before it: less shared memory, and no asynchronous copies to fill it

// The larger the tiles, the fewer of the instructions load; the smaller, the more even the multiprocessors'
// shares. In tiles of few elements groups of threads share K.
cudaError_t launch_float32(const GemmArgs<float>& args, const Chip& chip, cudaStream_t stream) {
  using Small = FfmaTile<float, 64, 64, 16, 8, 4, 1, 3, 4>;
  if (chip.compute_capability < kAmpere) {
    return fills(chip, args, 128, 128)
               ? launch_ffma<FfmaTile<float, 128, 128, 16, 8, 8, 1, 2, 2>>(args, stream)
               : launch_ffma<Small>(args, stream);
  }
  constexpr int kParts = 4;
  // As many blocks as multiprocessors, and threads enough in each.
  using Narrow = FfmaTile<float, 32, 64, 32, 8, 4, 4, 6, 1, true>;
  if (chip.compute_capability == 90 && tiles_of(args, Narrow::BM, Narrow::BN).total <= chip.multiprocessors) {
    return launch_ffma<Narrow, kParts>(args, stream);
  }
  const double large = cost_of(args, chip, 256, 128, 1.0), medium = cost_of(args, chip, 128, 64, 1.1),
               small = cost_of(args, chip, 64, 64, 1.35);
  if (small < std::min(medium, large)) return launch_ffma<Small>(args, stream);
  using Medium = FfmaTile<float, 128, 64, 32, 16, 8, 4, 3, 1>;
  using Large = FfmaTile<float, 256, 128, 16, 16, 8, 1, 3, 1>;
  if (chip.compute_capability != 90) {
    return medium < large ? launch_ffma<Medium>(args, stream) : launch_ffma<Large>(args, stream);
  }
  return medium < large ? launch_ffma<Medium, kParts>(args, stream)
                        : launch_ffma<Large, kParts>(args, stream);
}

cudaError_t launch_float64(const GemmArgs<double>& args, const Chip& chip, cudaStream_t stream) {
  if (!has_double_unit(chip.compute_capability)) {
    return launch_ffma<FfmaTile<double, 64, 64, 16, 8, 4, 1, 2, 3>>(args, stream);
  }
  // Where all blocks run at once, the launch begins early: a next launch would take the places of a round to
  // come, which is then longer.
  const bool early = chip.compute_capability >= 90;
  // A warp for each part of nearly all multiprocessors, and as much of K on its way as they need.
  using Narrow = DoubleTile<32, 64, 32, 32, 16, 5, 1, true>;
  if (chip.compute_capability == 90 && tiles_of(args, Narrow::BM, Narrow::BN).total <= chip.multiprocessors) {
    return launch_double<Narrow>(args, early, stream);
  }
  using Tall = DoubleTile<128, 64, 16, 64, 32, 3, 2>;
  using Small = DoubleTile<64, 64, 16, 32, 32, 3, 3>;
  using SmallAndDeep = DoubleTile<64, 64, 16, 32, 32, 4, 2>;  // where a third block a multiprocessor is idle
  if (tiles_of(args, Tall::BM, Tall::BN).total >= int64_t{chip.multiprocessors} * 32) {
    return launch_double<Tall>(args, /*early=*/false, stream);
  }
  return tiles_of(args, Small::BM, Small::BN).total <= int64_t{chip.multiprocessors} * 2
             ? launch_double<SmallAndDeep>(args, early, stream)
             : launch_double<Small>(args, /*early=*/false, stream);
}

template <typename T>
cudaError_t gemm(const GemmArgs<T>& args, cudaStream_t stream) {
  Chip chip;
  const cudaError_t error = current_chip(chip);
  if (error != cudaSuccess) return error;
  if constexpr (sizeof(T) == 2) {
    const bool large = fills(chip, args, 128, 128);
#ifdef LLTM_EXT_SM90A
    if (chip.hopper && hopper_takes(args)) {
      return gemm_on_hopper(args, chip.multiprocessors, stream);
    }
#endif
    return large ? launch_tensor<128>(args, stream) : launch_tensor<64>(args, stream);
  } else if constexpr (sizeof(T) == 4) {
#ifdef LLTM_EXT_SM90A
    if (chip.hopper && hopper_takes(args)) {
      return gemm_on_hopper(args, chip.multiprocessors, stream);
    }
#endif
    return launch_float32(args, chip, stream);
  } else {
    return launch_float64(args, chip, stream);
  }
}

template <typename T>
int64_t gemm_workspace_bytes(const GemmArgs<T>& args) {
#ifdef LLTM_EXT_SM90A
  Chip chip;
  if constexpr (sizeof(T) <= 4) {
    if (current_chip(chip) == cudaSuccess && chip.hopper && hopper_takes(args)) {
      return hopper_workspace_bytes(args, chip.multiprocessors);
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
  Chip chip;
  const cudaError_t error = current_chip(chip);
  if (error != cudaSuccess) return error;
  const bool early = chip.compute_capability >= 90;
  return width_of(args) > 1 ? launch_bias_backward<kVecWidth<T>>(args, early, stream)
                            : launch_bias_backward<1>(args, early, stream);
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
