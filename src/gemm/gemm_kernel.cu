// gemm on CUDA: which kernel computes what. Short sums: gemm_direct.cuh, gemm_outer.cuh. float32:
// gemm_ffma.cuh. float64: gemm_double.cuh, or gemm_ffma.cuh without tensor cores for it. Half types:
// gemm_hopper.cuh on Hopper, else gemm_tensor.cuh. The order of additions is fixed, so the same call twice
// gives the same bits.
#include <array>
#include <iterator>

#include "common/device.cuh"
#include "common/elementwise.cuh"
#include "gemm/gemm_bias.cuh"
#include "gemm/gemm_direct.cuh"
#include "gemm/gemm_double.cuh"
#include "gemm/gemm_ffma.cuh"
#include "gemm/gemm_hopper.h"
#include "gemm/gemm_outer.cuh"
#include "gemm/gemm_schedule.h"
#include "gemm/gemm_split_k.cuh"
#include "gemm/gemm_tensor.cuh"

namespace lltm_ext {

// The current device, with the compute capability of this file's code: less than the device's own where that
// runs older PTX.
cudaError_t query_device(DeviceInfo& device) {
  const cudaError_t error = current_device_info(device);
  if (error != cudaSuccess) return error;
  return compute_capability<gemm_bias_sum_kernel<float>>(device.compute_capability);
}

constexpr int kAmpere = 80;

// ---- Tiles. Large ones read each operand less often, small ones make more blocks. In tiles of few elements
// groups of threads split K. Flat and tall ones are for few rows or columns, where reading an operand takes
// the time.

template <class... Tile>
struct TileList {};

// Calls f with the tile at place i of a list.
template <class... Tile, class F>
cudaError_t with_tile(TileList<Tile...>, int i, const F& f) {
  cudaError_t error = cudaErrorInvalidValue;
  int place = 0;
  (void)((place++ == i && (error = f(Tile()), true)) || ...);
  return error;
}

template <class Tile>
constexpr TileCost cost(double wait, double work, double ends, double store, double pieces = 1,
                        double latency = 0) {
  return {Tile::BM, Tile::BN, Tile::BK, Tile::kBlocksPerMultiprocessor, wait, work, ends,
          store,    pieces,   latency};
}

constexpr TileCost for_batches(TileCost cost) {
  cost.batches_only = true;
  return cost;
}

constexpr TileCost in_clusters(TileCost cost) {
  cost.in_clusters = true;
  return cost;
}

using Small32 = FfmaTile<float, 64, 64, 16, 8, 4, 1, 3, 4>;
using Flat32 = FfmaTile<float, 16, 128, 32, 4, 4, 1, 3, 3>;
using Tall32 = FfmaTile<float, 128, 32, 16, 8, 4, 1, 3, 5>;
using Medium32 = FfmaTile<float, 128, 64, 32, 16, 8, 4, 3, 1>;
using Large32 = FfmaTile<float, 256, 128, 16, 16, 8, 1, 3, 1>;
using Overlapped32 = FfmaTile<float, 128, 64, 16, 8, 8, 1, 3, 4>;  // short K: a block starts while others end
using Tiny32 = FfmaTile<float, 32, 32, 16, 8, 4, 1, 2, 16>;
using Narrow32 = FfmaTile<float, 32, 64, 32, 8, 4, 4, 6, 1, true>;
using Tiles32 = TileList<Small32, Flat32, Medium32, Large32, Overlapped32, Tiny32, Tall32, Narrow32>;
template <class Tile>
constexpr TileCost cost32(double wait, double work, double ends, double store) {
  constexpr double kPieces = 1.06;
  return cost<Tile>(wait, work, ends, store, kPieces);
}
constexpr TileCost kCostSmall32 = cost32<Small32>(0.5, 0.38, 1.99, 0.738),
                   kCostFlat32 = cost32<Flat32>(0.577, 0.597, 1.69, 0.613),
                   kCostTiny32 = for_batches(cost32<Tiny32>(0.735, 0.0957, 2.25, 0.133));
constexpr TileCost kCosts32[] = {kCostSmall32,
                                 kCostFlat32,
                                 cost32<Medium32>(0.958, 0.958, 5.58, 0),
                                 cost32<Large32>(1.86, 1.86, 7.16, 0),
                                 cost32<Overlapped32>(0.644, 0.708, 4.55, 0.305),
                                 kCostTiny32,
                                 cost32<Tall32>(0.503, 0.404, 2.02, 0.796),
                                 cost32<Narrow32>(0.345, 0.345, 2.3, 0)};
constexpr int kMostSharedBytes = 98 << 10;  // of shared memory, that a block of 8.6, 8.9 and 12.0 may have
static_assert(std::max({Small32::kBytes, Flat32::kBytes, Medium32::kBytes, Large32::kBytes,
                        Overlapped32::kBytes, Tiny32::kBytes, Tall32::kBytes}) < kMostSharedBytes);

// Before Ampere there is less shared memory and no cp.async.
using Square32 = FfmaTile<float, 128, 128, 16, 8, 8, 1, 2, 2>;
using OlderTiles32 = TileList<Small32, Square32>;
constexpr TileCost kOlderCosts32[] = {kCostSmall32, cost<Square32>(0.98, 1.63, 7, 0)};

using Small64 = DoubleTile<64, 64, 16, 32, 32, 3, 3, true>;
using Deep64 = DoubleTile<64, 64, 16, 32, 32, 4, 2>;  // more stages instead of room for a third block
using Large64 = DoubleTile<128, 64, 16, 64, 32, 3, 2>;
using Flat64 = DoubleTile<32, 64, 16, 32, 16, 4, 3, true>;
using Tall64 = DoubleTile<64, 32, 32, 32, 16, 3, 2, true>;
using Narrow64 = DoubleTile<32, 64, 32, 32, 16, 5, 1, false, true>;
using Tiles64 = TileList<Small64, Deep64, Large64, Flat64, Tall64, Narrow64>;
template <class Tile>
constexpr TileCost cost64(double wait, double work, double ends, double store) {
  constexpr double kPieces = 1.07;
  return cost<Tile>(wait, work, ends, store, kPieces);
}
constexpr TileCost kCosts64[] = {in_clusters(cost64<Small64>(0.521, 0.226, 2.96, 0.607)),
                                 cost64<Deep64>(0.424, 0.213, 2.91, 0.74),
                                 cost64<Large64>(0.593, 0.505, 5.22, 0),
                                 in_clusters(cost64<Flat64>(0.301, 0.144, 1.84, 0.581)),
                                 in_clusters(cost64<Tall64>(0.505, 0.254, 2.04, 0.864)),
                                 cost64<Narrow64>(0.351, 0.351, 2.38, 0)};

// Without tensor cores for float64.
using Plain64 = FfmaTile<double, 64, 64, 16, 8, 4, 1, 2, 3>;
constexpr TileCost kPlainCosts64[] = {cost<Plain64>(1, 10, 3, 0)};

// Half is for bfloat16 too.
using Half = __half;
using SmallHalf = TensorTile<Half, 64, 64, 32, 32, 4, 3>;
using MediumHalf = TensorTile<Half, 128, 128, 32, 64, 3, 2>;
using LargeHalf = TensorTile<Half, 128, 256, 32, 64, 4, 1, true>;
using TinyHalf = TensorTile<Half, 32, 32, 32, 32, 3, 16, true>;
using TilesHalf = TileList<SmallHalf, MediumHalf, LargeHalf, TinyHalf>;
constexpr double kNever = 1e9;
constexpr TileCost kCostsHalf[] = {cost<SmallHalf>(0.186, 0.124, 1.81, 0.792, 1.38, 1.3),
                                   cost<MediumHalf>(0.399, 0.221, 3.32, 1.84, 1.47, 2.39),
                                   cost<LargeHalf>(0.308, 0.308, 5.38, 0, kNever, kNever),
                                   for_batches(cost<TinyHalf>(0.277, 0.0577, 1.95, 0.117, kNever, kNever))};
static_assert(LargeHalf::kBytes < kMostSharedBytes);

using OlderSmallHalf = TensorTile<Half, 64, 64, 32, 32, 2, 3>;
using OlderMediumHalf = TensorTile<Half, 128, 128, 32, 64, 2, 2>;
using OlderTilesHalf = TileList<OlderSmallHalf, OlderMediumHalf>;
constexpr TileCost kOlderCostsHalf[] = {cost<OlderSmallHalf>(0.3, 0.21, 2.7, 1.0),
                                        cost<OlderMediumHalf>(0.576, 0.407, 3.8, 2.8)};

using SmallTf32 = TensorTile<float, 64, 64, 16, 32, 4, 3>;
using MediumTf32 = TensorTile<float, 128, 128, 16, 64, 3, 2>;
using FlatTf32 = TensorTile<float, 32, 64, 32, 32, 4, 4>;
using TallTf32 = TensorTile<float, 64, 32, 32, 32, 4, 4>;
// Few rows, or small matrices, are faster in float32.
using TilesTf32 = TileList<SmallTf32, MediumTf32, FlatTf32, TallTf32, Flat32, Tiny32>;
constexpr TileCost kCostsTf32[] = {cost<SmallTf32>(0.249, 0.152, 2.08, 0.623, 1.36),
                                   cost<MediumTf32>(0.566, 0.357, 5, 0.54, 1.27),
                                   cost<FlatTf32>(0.39, 0.135, 2.35, 0.333, 1.54),
                                   cost<TallTf32>(0.45, 0.132, 2.5, 0.394, 1.52),
                                   kCostFlat32,
                                   kCostTiny32};

using DirectTiles =
    TileList<DirectTile<1, 1, 1>, DirectTile<1, 1, 4>, DirectTile<1, 1, 32>, DirectTile<1, 1, 128>,
             DirectTile<1, 4, 1>, DirectTile<4, 1, 1>, DirectTile<4, 4, 1>>;
constexpr DirectCost kDirectCosts[] = {
    {1, 1, 1, 8, 0.7, 0.316, 1.01, 1.16},   {1, 1, 4, 8, 0.553, 0.462, 0.658, 6.28},
    {1, 1, 32, 8, 0.571, 0.482, 1.01, 41},  {1, 1, 128, 8, 0.691, 0.462, 1.62, 54},
    {1, 4, 1, 4, 0.782, 0.328, 1.1, 0.763}, {4, 1, 1, 4, 0.929, 0.42, 1.03, 0.664},
    {4, 4, 1, 4, 1.18, 0.603, 1.31, 0.425}};
constexpr DirectCost kDirectCostsHalf[] = {
    {1, 1, 1, 8, 0.641, 0.543, 0.906, 1.66}, {1, 1, 4, 8, 0.493, 0.582, 0.496, 7.77},
    {1, 1, 32, 8, 0.519, 0.594, 0.892, 54},  {1, 1, 128, 8, 0.725, 0.501, 1.8, 54},
    {1, 4, 1, 4, 0.749, 0.546, 1.04, 0.821}, {4, 1, 1, 4, 1.05, 0.603, 0.973, 0.816},
    {4, 4, 1, 4, 1.03, 1.01, 1.85, 0.408}};
constexpr int kDirectCount = std::size(kDirectCosts);
static_assert(std::size(kDirectCostsHalf) == kDirectCount);

// For results of any size, and for large ones.
template <typename T>
using OuterTiles = TileList<OuterTile<acc_t<T>, 1>, OuterTile<acc_t<T>, 2>>;
constexpr int kOuterCount = 2, kOuterHeights[] = {1, 16};
template <class Tile>
constexpr OuterCost outer_cost(double ends, double depth, double work, double store) {
  return {Tile::BM, Tile::BN, Tile::kMostK, ends, depth, work, store};
}
constexpr OuterCost kOuterCosts32[] = {outer_cost<OuterTile<float, 1>>(2.01, 0.0572, 45.7, 0.31),
                                       outer_cost<OuterTile<float, 2>>(2.27, 0.0944, 39, 0.304)};
constexpr OuterCost kOuterCosts64[] = {outer_cost<OuterTile<double, 1>>(1.97, 0.0601, 93.7, 0.289),
                                       outer_cost<OuterTile<double, 2>>(2.15, 0.0917, 72.8, 0.273)};
constexpr OuterCost kOuterCostsHalf[] = {outer_cost<OuterTile<float, 1>>(1.91, 0.0657, 69.7, 0.425),
                                         outer_cost<OuterTile<float, 2>>(2.21, 0.114, 53.2, 0.472)};
template <typename T>
constexpr const OuterCost* kOuterCosts = sizeof(T) == 2   ? kOuterCostsHalf
                                         : sizeof(T) == 4 ? kOuterCosts32
                                                          : kOuterCosts64;

// What multiplies T on a device by the kernels for all architectures: calls f(the list of tiles, the table of
// their costs, how many of them are for this device).
template <typename T, class F>
auto with_tiles_for(const DeviceInfo& device, const GemmArgs<T>& args, const F& f) {
  const int capability = device.compute_capability;
  if constexpr (std::is_same_v<T, float>) {
    if (args.precision == Precision::kTf32 && capability >= kAmpere)
      return f(TilesTf32(), kCostsTf32, std::size(kCostsTf32));
  }
  if constexpr (sizeof(T) == 2) {
    return capability < kAmpere ? f(OlderTilesHalf(), kOlderCostsHalf, std::size(kOlderCostsHalf))
                                : f(TilesHalf(), kCostsHalf, std::size(kCostsHalf));
  } else if constexpr (sizeof(T) == 4) {
    return capability < kAmpere ? f(OlderTiles32(), kOlderCosts32, std::size(kOlderCosts32))
                                : f(Tiles32(), kCosts32,
                                    std::size(kCosts32) - (capability != kHopper));  // the last is for Hopper
  } else {
    if (!has_double_tensor_cores(capability)) return f(TileList<Plain64>(), kPlainCosts64, 1);
    return f(Tiles64(), kCosts64, std::size(kCosts64) - (capability != kHopper));  // the last is for Hopper
  }
}

struct Choice {
  Schedule schedule;
  bool on_hopper = false;  // by gemm_hopper.cu or gemm_hopper_float.cu instead
  HopperPlan plan = {};
};

template <typename T>
GemmSizes sizes_of(const GemmArgs<T>& args) {
  const bool a_along_k = args.a.column_stride <= args.a.row_stride,
             b_along_k = args.b.row_stride < args.b.column_stride;
  const bool vectors = has_vectors(args.a, a_along_k) && has_vectors(args.b, !b_along_k);
  int width = vectors ? kVecWidth<T> : 1;
  if constexpr (sizeof(T) == 2) {
    width = std::min(access_of(args.a, a_along_k, args.batch, args.m, args.k).width,
                     access_of(args.b, !b_along_k, args.batch, args.k, args.n).width);
  }
  const auto elements = [&](const Matrices<T>& x, int64_t of_matrix) {
    return static_cast<double>((x.batch_stride == 0 ? 1 : args.batch) * of_matrix);
  };
  const double operands = elements(args.a, args.m * args.k) + elements(args.b, args.k * args.n);
  return {args.batch,       args.m,   args.n,    args.k,    sizeof(T),
          sizeof(acc_t<T>), operands, a_along_k, b_along_k, width};
}

template <typename T>
Choice choose(const GemmArgs<T>& args, const DeviceInfo& device) {
  const GemmSizes sizes = sizes_of(args);
  HopperPlan plan;
#ifdef LLTM_EXT_SM90A
  if constexpr (sizeof(T) <= 4) {
    if (device.has_sm90a) plan = hopper_plan(args, device);
  }
#endif
  // Of half types, Hopper's tiles are more often the faster ones where two estimates differ by less than
  // their errors.
  const double slower = sizeof(T) == 2 && plan.supported ? 1.05 : 1;
  const Schedule schedule = with_tiles_for<T>(device, args, [&](auto, const TileCost* costs, int count) {
    return best_schedule(costs, count, slower, sizeof(T) == 2 ? kDirectCostsHalf : kDirectCosts, kDirectCount,
                         kOuterCosts<T>, kOuterCount, sizes, device);
  });
  return {schedule, plan.supported && plan.time < schedule.time, plan};
}

// If a has one row, or b one column, the stride between its rows or columns is never used. It becomes a whole
// number of vectors, so that kernels load vectors along K.
template <typename T>
GemmArgs<T> with_vectors_along_k(GemmArgs<T> args) {
  const auto line_stride = [&](int64_t k_stride) {
    return ceil_div(std::max<int64_t>(args.k * k_stride, 1), kVecWidth<T>) * kVecWidth<T>;
  };
  if (args.m == 1) args.a.row_stride = line_stride(args.a.column_stride);
  if (args.n == 1) args.b.column_stride = line_stride(args.b.row_stride);
  return args;
}

// Choosing takes the host some microseconds, so choices are kept.
template <typename T>
Choice choice_for(const GemmArgs<T>& args, const DeviceInfo& device) {
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
                   static_cast<int64_t>(args.precision), device.compute_capability, device.multiprocessors,
                   device.shared_bytes,
                   // of equal chips, too, different multiprocessors are switched off
                   device.cluster_multiprocessors[2], device.cluster_multiprocessors[4],
                   device.cluster_multiprocessors[8]};
  uint64_t hash = 0;
  for (const int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 0x9e3779b97f4a7c15u;
  Kept& place = kept[hash >> 58];
  if (place.key != key) place = {key, choose(args, device)};
  return place.choice;
}

template <typename T>
cudaError_t launch_schedule(const GemmArgs<T>& args, Schedule schedule, const DeviceInfo& device,
                            cudaStream_t stream) {
  const bool hopper = device.compute_capability == kHopper;
  schedule.programmatic = schedule.programmatic && device.compute_capability >= kHopper;
  const cudaError_t error = with_tiles_for<T>(device, args, [&](auto tiles, const TileCost*, int count) {
    const int outer = schedule.tile - count - kDirectCount;
    if (outer >= 0) {
      return with_tile(OuterTiles<T>(), outer, [&](auto tile) {
        return launch_outer(tile, kOuterHeights[outer], args, device.multiprocessors, schedule.programmatic,
                            stream);
      });
    }
    if (schedule.tile >= count) {
      return with_tile(DirectTiles(), schedule.tile - count, [&](auto tile) {
        return launch_direct(tile, args, schedule.splits, schedule.programmatic, stream);
      });
    }
    return with_tile(tiles, schedule.tile,
                     [&](auto tile) { return launch_tile(tile, args, schedule, hopper, stream); });
  });
  if (error != cudaSuccess || schedule.splits == 1 || schedule.in_cluster) return error;
  return launch_reduce(args, schedule.splits, schedule.programmatic, stream);
}

template <typename T>
cudaError_t gemm(const GemmArgs<T>& any_strides, cudaStream_t stream) {
  const GemmArgs<T> args = with_vectors_along_k(any_strides);
  DeviceInfo device;
  const cudaError_t error = query_device(device);
  if (error != cudaSuccess) return error;
  const Choice choice = choice_for(args, device);
#ifdef LLTM_EXT_SM90A
  if constexpr (sizeof(T) <= 4) {
    if (choice.on_hopper) return gemm_on_hopper(args, choice.plan, device, stream);
  }
#endif
  return launch_schedule(args, choice.schedule, device, stream);
}

template <typename T>
int64_t gemm_workspace_bytes(const GemmArgs<T>& any_strides) {
  const GemmArgs<T> args = with_vectors_along_k(any_strides);
  DeviceInfo device;
  if (query_device(device) != cudaSuccess) return 0;
  const Choice choice = choice_for(args, device);
#ifdef LLTM_EXT_SM90A
  if constexpr (sizeof(T) <= 4) {
    if (choice.on_hopper) return choice.plan.workspace_bytes;
  }
#endif
  return choice.schedule.in_cluster ? 0 : partial_sum_bytes(args, choice.schedule.splits);
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
