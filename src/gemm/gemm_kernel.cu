// gemm on CUDA: the launch of the kernel that gemm_choice.h chooses, and the backward of activation and bias.
// The order of additions is fixed, so the same call twice gives the same bits.
#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

#include "common/device.cuh"
#include "common/elementwise.cuh"
#include "gemm/gemm_direct.cuh"
#include "gemm/gemm_few_rows.cuh"
#include "gemm/gemm_ffma.cuh"

namespace lltm_ext {

// ---- Backward of activation and bias in one pass: a thread computes the gradients of some columns of some
// rows, and keeps their sums. Each block writes its sums, and the kernel that adds the parts of a split K
// adds them.

constexpr int kWarpLanes = 32;
// Minimum rows per block, so that a block writes far fewer sums than it reads values.
constexpr int64_t kBiasRows = 64;

// blockDim.x threads along a row, blockDim.y rows at a time.
struct BiasGrid {
  dim3 blocks, threads;
  int64_t rows;  // per block

  BiasGrid(int64_t all_rows, int64_t columns, int width) {
    threads = dim3(1, kThreads);
    while (threads.x < kWarpLanes && threads.x * width < columns)
      threads = dim3(threads.x * 2, threads.y / 2);
    const int64_t across = ceil_div(columns, threads.x * width);
    const int64_t down = std::clamp<int64_t>(2048 / across, 1, ceil_div(all_rows, kBiasRows));
    rows = ceil_div(all_rows, down);
    blocks = dim3(across, ceil_div(all_rows, rows));
  }
};

// Calls f with the functor of an activation known at compile time; except on Hopper, with one functor for
// all.
template <typename T, class F>
__device__ __forceinline__ void with_activation(Activation activation, F&& f) {
  if constexpr (!kForHopper) return f(GemmActivationBackward<T>{activation});
  switch (activation) {
    case Activation::kNone:
      return f(GemmActivationBackward<T>{Activation::kNone});
#define LLTM_CASE(ID, ...) \
  case Activation::k##ID:  \
    return f(GemmActivationBackward<T>{Activation::k##ID});
      LLTM_ACTIVATIONS(LLTM_CASE)
#undef LLTM_CASE
  }
}

// Per multiprocessor: some wait for memory while others store.
constexpr int kBiasBlocksPerMultiprocessor = 4;

// V columns per thread. sums [gridDim.y, columns]: the blocks' sums.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads, kBiasBlocksPerMultiprocessor)
    gemm_bias_backward_kernel(const T* grad_output, const T* saved, T* grad_input, acc_t<T>* sums,
                              const Activation activation, int64_t all_rows, int64_t columns, int64_t rows) {
  using Pack = Vec<T, V>;
  constexpr int kRows = kForHopper ? 2 : 1;  // of a thread at a time, to overlap their loads
  const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * V;
  const int64_t begin = blockIdx.y * rows, end = begin + rows < all_rows ? begin + rows : all_rows;
  const int64_t step = blockDim.y;
  acc_t<T> sum[V] = {};
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (column < columns) {
    with_activation<T>(activation, [&](const auto& backward) {
      for (int64_t row = begin + threadIdx.y; row < end; row += kRows * step) {
        Pack grad[kRows], saved_values[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (row + i * step >= end) continue;
          const int64_t at = (row + i * step) * columns + column;
          grad[i] = *reinterpret_cast<const Pack*>(grad_output + at);
          saved_values[i] = *reinterpret_cast<const Pack*>(saved + at);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (row + i * step >= end) continue;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            const acc_t<T> x = backward(widen(grad[i].data[v]), widen(saved_values[i].data[v]));
            sum[v] += x;
            grad[i].data[v] = narrow<T>(x);
          }
          *reinterpret_cast<Pack*>(grad_input + (row + i * step) * columns + column) = grad[i];
        }
      }
    });
  }
  __shared__ acc_t<T> thread_sums[kThreads * V];
  const int width = blockDim.x * V, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int v = 0; v < V; ++v) thread_sums[thread * V + v] = sum[v];
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * width;
  for (int i = thread; i < width && first + i < columns; i += kThreads) {
    acc_t<T> total = thread_sums[i];
    for (int y = 1; y < static_cast<int>(blockDim.y); ++y) total += thread_sums[y * width + i];
    sums[blockIdx.y * columns + first + i] = total;
  }
}

template <typename T>
int width_of(const BiasBackwardArgs<T>& args) {
  const bool aligned = args.columns % kVecWidth<T> == 0 && is_vec_aligned(args.grad_output) &&
                       is_vec_aligned(args.saved) && is_vec_aligned(args.grad_input);
  return aligned ? kVecWidth<T> : 1;
}

// programmatic: for both kernels, to hide their launch latency.
template <int V, typename T>
cudaError_t launch_bias_backward(const BiasBackwardArgs<T>& args, bool programmatic, cudaStream_t stream) {
  const BiasGrid grid(args.rows, args.columns, V);
  acc_t<T>* const sums = static_cast<acc_t<T>*>(args.workspace);
  const cudaError_t error =
      launch_kernel(gemm_bias_backward_kernel<V, T>, grid.blocks, grid.threads,
                    /*shared_bytes=*/0, programmatic, stream, args.grad_output, args.saved, args.grad_input,
                    sums, args.activation, args.rows, args.columns, grid.rows);
  if (error != cudaSuccess) return error;
  GemmArgs<T> parts = {};
  parts.c = args.grad_bias, parts.workspace = args.workspace;
  parts.batch = parts.m = 1, parts.n = args.columns;
  return launch_reduce(parts, static_cast<int>(grid.blocks.y), programmatic, stream);
}

// ---- The choice

// The current device, with the compute capability of this file's code: less than the device's own where that
// runs older PTX.
cudaError_t query_device(DeviceInfo& device) {
  const cudaError_t error = current_device_info(device);
  if (error != cudaSuccess) return error;
  return compute_capability<gemm_reduce_kernel<float, 1>>(device.compute_capability);
}

template <typename T>
Product product_of(const GemmArgs<T>& args) {
  const Rows<T> a = rows_of_a(args), b = rows_of_b(args);
  const auto elements = [](const Rows<T>& x) {
    return static_cast<double>(x.matrices) * static_cast<double>(x.rows) * static_cast<double>(x.k);
  };
  Product p = {args.batch, args.m, args.n, args.k, sizeof(T)};
  p.tf32 = sizeof(T) == 4 && args.precision == Precision::kTf32;
  p.bfloat16 = std::is_same_v<T, __nv_bfloat16>;
  p.a = lines_of(a), p.b = lines_of(b);
  p.operands = elements(a) + elements(b);
  const bool adds_bias = sizeof(T) < 8 && args.batch == 1;  // as cuBLASLt does
  p.library_passes = args.activation != Activation::kNone || (args.bias != nullptr && !adds_bias);
  return p;
}

template <typename T>
Choice choose_for(const GemmArgs<T>& args, const DeviceInfo& device) {
#ifdef LLTM_EXT_SM90A
  if constexpr (sizeof(T) == 4) {
    if (args.precision == Precision::kBf16x6 && device.has_sm90a && bf16x6_fits(args))
      return {Kernel::kBf16x6};
  }
#endif
  return choose(product_of(args), device);
}

// Choosing takes the host some microseconds, so choices are kept.
template <typename T>
cudaError_t gemm_choice(const GemmArgs<T>& args, Choice& choice) {
  DeviceInfo device;
  if (const cudaError_t error = query_device(device); error != cudaSuccess) return error;
  using Key = std::array<int64_t, 19>;
  struct Kept {
    Key key;
    Choice choice;
  };
  thread_local std::array<Kept, 64> kept = {};
  const auto misalignment = [](const void* data) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % 16);
  };
  const Matrices<T>&a = args.a, &b = args.b;
  const Key key = {args.batch, args.m, args.n, args.k, a.batch_stride, a.row_stride, a.column_stride,
                   b.batch_stride, b.row_stride, b.column_stride, misalignment(a.data), misalignment(b.data),
                   static_cast<int64_t>(args.precision), args.activation != Activation::kNone,
                   args.bias != nullptr, device.compute_capability, device.multiprocessors,
                   // of equal chips, too, different multiprocessors are switched off
                   device.shared_bytes, device.cluster_multiprocessors[2]};
  uint64_t hash = 0;
  for (const int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 0x9e3779b97f4a7c15u;
  Kept& place = kept[hash >> 58];
  if (place.key != key) place = {key, choose_for(args, device)};
  choice = place.choice;
  return cudaSuccess;
}

// ---- The launch

// Whether blocks may start while the previous kernel still runs, wherever it leaves room (PDL). Some
// multiprocessors then get more blocks than others, which costs more than the early start gains if the blocks
// take long. In more than one round they would take the places of the previous kernel's last round.
inline bool starts_early(const TileShape& tile, int64_t blocks, double time, const DeviceInfo& device) {
  constexpr double kLong = 10, kVeryLong = 30;  // microseconds
  const int64_t multiprocessors = device.multiprocessors;
  const bool one_round = blocks <= multiprocessors * tile.blocks;
  const bool evenly = blocks > multiprocessors * (tile.blocks - 1);
  return one_round && (time < kLong || (evenly && (tile.blocks == 1 || time < kVeryLong)));
}

// Calls f with the i-th of constants 0, 1, ...
template <int... I, class F>
cudaError_t with_constant(int i, std::integer_sequence<int, I...>, const F& f) {
  cudaError_t error = cudaErrorInvalidValue;
  (void)((i == I && (error = f(std::integral_constant<int, I>()), true)) || ...);
  return error;
}

// Those of kFfmaTiles.
using FfmaTiles = std::tuple<FfmaTile<16, 128, 32, 4, 4, 1, 3, 3>, FfmaTile<32, 64, 32, 8, 4, 4, 6, 1>,
                             FfmaTile<128, 64, 32, 16, 8, 4, 3, 1>>;

cudaError_t launch_ffma(const GemmArgs<float>& args, const Choice& choice, const DeviceInfo& device,
                        cudaStream_t stream) {
  constexpr int kCount = std::tuple_size_v<FfmaTiles>;
  const TileShape& shape = kFfmaTiles[choice.tile];
  const int64_t tiles = args.batch * ceil_div(args.m, shape.rows) * ceil_div(args.n, shape.columns);
  const bool has_early = device.compute_capability >= kHopperCapability;
  const bool early = has_early && starts_early(shape, tiles * choice.splits, choice.time, device);
  const auto launch = [&](auto place) {
    using Tile = std::tuple_element_t<decltype(place)::value, FfmaTiles>;
    constexpr TileShape kShape = kFfmaTiles[decltype(place)::value];
    static_assert(kShape.rows == Tile::BM && kShape.columns == Tile::BN && kShape.depth == Tile::BK &&
                  kShape.blocks == Tile::kBlocksPerMultiprocessor &&
                  kFfmaShared[decltype(place)::value] == Tile::kBytes);
    return launch_ffma<Tile>(args, choice.splits, early, device.compute_capability == kHopperCapability,
                             stream);
  };
  const cudaError_t error = with_constant(choice.tile, std::make_integer_sequence<int, kCount>(), launch);
  if (error != cudaSuccess || choice.splits == 1) return error;
  return launch_reduce(args, choice.splits, has_early, stream);
}

template <typename T>
cudaError_t gemm(const GemmArgs<T>& args, const Choice& choice, cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t error = query_device(device); error != cudaSuccess) return error;
  const bool early = device.compute_capability >= kHopperCapability;
  if (choice.kernel == Kernel::kDirect) {
    const auto launch = [&](auto shape) {
      return launch_direct<decltype(shape)::value>(args, early, stream);
    };
    return with_constant(choice.tile, std::make_integer_sequence<int, std::size(kDirectShapes)>(), launch);
  }
  if constexpr (sizeof(T) == 2) {
    if (choice.kernel == Kernel::kFewRows) return launch_few_rows(args, device, early, stream);
#ifdef LLTM_EXT_SM90A
    if (choice.kernel == Kernel::kHopper) return gemm_hopper(args, choice, device, stream);
#endif
  }
  if constexpr (sizeof(T) == 4) {
    if (choice.kernel == Kernel::kFfma) return launch_ffma(args, choice, device, stream);
#ifdef LLTM_EXT_SM90A
    if (choice.kernel == Kernel::kBf16x6) return gemm_bf16x6(args, device, stream);
#endif
  }
  return cudaErrorInvalidValue;
}

template <typename T>
int64_t gemm_workspace_bytes(const GemmArgs<T>& args, const Choice& choice) {
  if (choice.kernel == Kernel::kFfma) return partial_sum_bytes(args, choice.splits);
#ifdef LLTM_EXT_SM90A
  if constexpr (sizeof(T) == 2) {
    if (choice.kernel == Kernel::kHopper) return gemm_hopper_workspace_bytes(args, choice);
  }
  if constexpr (sizeof(T) == 4) {
    if (choice.kernel == Kernel::kBf16x6) return gemm_bf16x6_workspace_bytes(args);
  }
#endif
  return 0;
}

// ---- The backward's launchers

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
  template cudaError_t gemm_choice(const GemmArgs<T>&, Choice&);                   \
  template int64_t gemm_workspace_bytes(const GemmArgs<T>&, const Choice&);        \
  template cudaError_t gemm(const GemmArgs<T>&, const Choice&, cudaStream_t);      \
  template int64_t gemm_bias_backward_workspace_bytes(const BiasBackwardArgs<T>&); \
  template cudaError_t gemm_bias_backward(const BiasBackwardArgs<T>&, cudaStream_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)
LLTM_ELEMENTWISE(GemmActivation, 1)
LLTM_ELEMENTWISE(GemmActivationBackward, 2)

}  // namespace lltm_ext
