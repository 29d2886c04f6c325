// gemm in half types on Hopper: which kernel of gemm_hopper.cuh or gemm_hopper_few_rows.cuh computes which
// shape.
#include "gemm/gemm_hopper.cuh"
#include "gemm/gemm_hopper.h"
#include "gemm/gemm_hopper_few_rows.cuh"

namespace lltm_ext {
namespace hopper {

// An operand as [rows, K] for TMA.
struct TmaOperand {
  GlobalTensor tensor;
  bool mn_major;
  bool supported;
};

template <typename T>
TmaOperand tma_operand(const Matrices<T>& x, int64_t rows, int64_t k, int64_t row_stride, int64_t k_stride,
                       int64_t batch) {
  const int64_t matrices = x.batch_stride == 0 ? 1 : batch;
  const GlobalTensor k_major = {x.data, k, rows, matrices, row_stride, x.batch_stride};
  const GlobalTensor mn_major = {x.data, rows, k, matrices, k_stride, x.batch_stride};
  const auto supported = [](int64_t stride, int64_t size, const GlobalTensor& tensor) {
    return (stride == 1 || size == 1) && tma_supports(tensor, sizeof(T));
  };
  if (supported(k_stride, k, k_major)) return {k_major, false, true};
  return {mn_major, true, supported(row_stride, rows, mn_major)};
}

template <typename T>
TmaOperand operand_a(const GemmArgs<T>& args) {
  return tma_operand(args.a, args.m, args.k, args.a.row_stride, args.a.column_stride, args.batch);
}
template <typename T>
TmaOperand operand_b(const GemmArgs<T>& args) {
  return tma_operand(args.b, args.n, args.k, args.b.column_stride, args.b.row_stride, args.batch);
}

// A tile shape, and how many blocks split K: one for the persistent kernel, more for a split-K kernel.
struct Tiling {
  int rows, columns, splits;
  bool workspace = false;  // workspace split-K instead of cluster split-K
};

constexpr Tiling kTilings[] = {{128, 256, 1}, {128, 128, 1}, {64, 128, 1}, {128, 64, 1}, {64, 64, 1},
                               {128, 128, 2}, {128, 128, 4}, {128, 64, 2}, {128, 64, 4}, {128, 64, 8}};

// Estimated clocks, fitted to an H200: rounds of blocks, each with a mainloop, a prologue and an epilogue.
// Small tiles wait for more bytes per product.
inline int64_t estimated_clocks(const Tiling& tiling, int64_t m, int64_t n, int64_t k, int64_t batch,
                                int multiprocessors) {
  const int64_t blocks =
      int64_t{tiles_of(m, tiling.rows)} * tiles_of(n, tiling.columns) * batch * tiling.splits;
  const int64_t rounds = (blocks + multiprocessors - 1) / multiprocessors;
  const int area = tiling.rows * tiling.columns;
  const int64_t mainloop_tile = area > 128 * 128    ? 1024
                                : area == 128 * 128 ? 530
                                : area == 128 * 64  ? 400
                                                    : 300;
  const bool short_ends = tiling.rows == 64 || (tiling.columns == 64 && tiling.splits > 1);
  const int64_t reduction = tiling.workspace ? 12000 : tiling.splits > 1 ? 5500 : 0;
  const int64_t ends = (tiling.columns == 256 ? 3000 : short_ends ? 1500 : 2000) + reduction;
  return rounds * (int64_t{tiles_of(k, kTileK * tiling.splits)} * mainloop_tile + ends);
}

inline Tiling best_tiling(int64_t m, int64_t n, int64_t k, int64_t batch, int multiprocessors) {
  const auto clocks = [&](const Tiling& tiling) {
    return estimated_clocks(tiling, m, n, k, batch, multiprocessors);
  };
  Tiling best = kTilings[0];
  for (const Tiling& tiling : kTilings) {
    if (tiling.splits <= tiles_of(k, kTileK) && clocks(tiling) < clocks(best)) best = tiling;
  }
  // As many splits as there are multiprocessors for, less those that would not shorten the longest split.
  const int64_t tiles = int64_t{tiles_of(m, 128)} * tiles_of(n, 128) * batch;
  const int tiles_of_k = tiles_of(k, kTileK);
  int splits = static_cast<int>(std::min<int64_t>(multiprocessors / tiles, tiles_of_k));
  if (splits > 1) splits = tiles_of(tiles_of_k, tiles_of(tiles_of_k, splits));
  const Tiling workspace = {128, 128, splits, true};
  return splits > 1 && clocks(workspace) < clocks(best) ? workspace : best;
}

template <typename T, bool kMnMajorA, bool kMnMajorB>
cudaError_t launch(const Problem<T>& problem, const DeviceInfo& device, cudaStream_t stream) {
  const Tiling tiling = best_tiling(problem.m, problem.n, problem.k, problem.batch, device.multiprocessors);
  const int64_t rows = tiles_of(problem.m, 128);
  const auto persistent = [&](auto mainloop) {
    return launch_persistent<decltype(mainloop)>(problem, device.multiprocessors, stream);
  };
  const auto split_k = [&](auto mainloop) {
    return launch_cluster_split_k<decltype(mainloop), false>(problem, tiling.splits, stream);
  };
  const auto workspace_split_k = [&](auto mainloop) {
    return launch_workspace_split_k<decltype(mainloop)>(problem, tiling.splits, stream);
  };
  if (tiling.workspace) {
    return rows % 2 == 0 ? workspace_split_k(Mainloop<T, 128, 128, 6, kMnMajorA, kMnMajorB, 2>())
                         : workspace_split_k(Mainloop<T, 128, 128, 6, kMnMajorA, kMnMajorB>());
  }
  if (tiling.splits > 1) {
    return tiling.columns == 128 ? split_k(Mainloop<T, 128, 128, 6, kMnMajorA, kMnMajorB>())
                                 : split_k(Mainloop<T, 128, 64, 8, kMnMajorA, kMnMajorB>());
  }
  if (tiling.rows == 64) {
    return tiling.columns == 64 ? persistent(Mainloop<T, 64, 64, 8, kMnMajorA, kMnMajorB>())
                                : persistent(Mainloop<T, 64, 128, 8, kMnMajorA, kMnMajorB>());
  }
  if (tiling.columns == 64) return persistent(Mainloop<T, 128, 64, 8, kMnMajorA, kMnMajorB>());
  if (tiling.columns == 128) return persistent(Mainloop<T, 128, 128, 6, kMnMajorA, kMnMajorB>());
  // Blocks that share tiles of b wait for each other. This pays if blocks have several tiles each and few
  // clusters have a block without rows.
  const int64_t tiles = rows * tiles_of(problem.n, 256) * problem.batch;
  return tiles <= device.multiprocessors || (rows % 2 == 1 && rows < 16)
             ? persistent(Mainloop<T, 128, 256, 4, kMnMajorA, kMnMajorB>())
             : persistent(Mainloop<T, 128, 256, 4, kMnMajorA, kMnMajorB, 2>());
}

// As many splits as still run all blocks at once.
template <class Mainloop, bool kSwapAB, typename T>
cudaError_t launch_few_tiles(const Problem<T>& problem, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t tiles = problem.template scheduler<Mainloop>().total();
  int splits = 8;
  const auto room = [&] { return splits > 2 ? device.cluster_multiprocessors : device.multiprocessors; };
  while (splits > 1 && (tiles * splits > room() || splits > tiles_of(problem.k, kTileK))) splits /= 2;
  return launch_cluster_split_k<Mainloop, kSwapAB>(problem, splits, stream);
}

// Up to kFewRows rows of a fit one tile: as its columns with A and B swapped, or, above kFewColumns if both
// operands are K-major, as its rows.
constexpr int kFewRows = 64, kFewColumns = 32;

// With A and B swapped, the rows of a are the tile's columns. Reading the weights bounds the time, so a
// multiprocessor has several blocks, each with many loads in flight.
template <typename T, bool kMnMajorA, bool kMnMajorB>
cudaError_t launch_swap_ab(const Problem<T>& problem, const DeviceInfo& device, cudaStream_t stream) {
  const auto run = [&](auto mainloop) {
    return launch_few_tiles<decltype(mainloop), true>(problem, device, stream);
  };
  if constexpr (!kMnMajorB) {
    if (problem.n <= 8) return run(Mainloop<T, 64, 8, 6, kMnMajorA, false>());
    if (problem.n <= 16) return run(Mainloop<T, 64, 16, 6, kMnMajorA, false>());
    if (problem.n <= 32) return run(Mainloop<T, 64, 32, 6, kMnMajorA, false>());
  }
  constexpr int kColumns = kMnMajorA || kMnMajorB ? kFewRows : kFewColumns;
  return run(Mainloop<T, 64, kColumns, 6, kMnMajorA, kMnMajorB>());
}

// One tile has all rows. One block a multiprocessor fills all of its shared memory with stages; the tile has
// the width whose rounds of blocks take the least time.
template <typename T>
cudaError_t launch_one_tile_row(const Problem<T>& problem, const DeviceInfo& device, cudaStream_t stream) {
  const auto time = [&](int columns) {
    return ceil_div(int64_t{tiles_of(problem.n, columns)} * problem.batch, device.multiprocessors) * columns;
  };
  int best = 32;
  for (int columns : {88, 128}) {
    if (time(columns) <= time(best)) best = columns;
  }
  const auto run = [&](auto mainloop) {
    return launch_few_tiles<decltype(mainloop), false>(problem, device, stream);
  };
  if (best == 32) return run(Mainloop<T, kFewRows, 32, 16, false, false>());
  if (best == 88) return run(Mainloop<T, kFewRows, 88, 10, false, false>());
  return run(Mainloop<T, kFewRows, 128, 9, false, false>());
}

// Whether gemm_hopper_few_rows.cuh is the fastest: always for up to 8 rows; for more if all tiles run at once
// and K is not so long that splitting it is faster.
template <typename T>
bool use_few_rows_kernel(const GemmArgs<T>& args, const DeviceInfo& device) {
  if (args.k % 8 != 0) return false;  // it loads 16 bytes at a time
  const int64_t tiles = int64_t{tiles_of(args.n, kFewRowsColumns)} * args.batch;
  const bool one_round =
      tiles <= device.multiprocessors * 2 && (tiles * 2 >= device.multiprocessors || args.k <= 1024);
  return args.m <= 8 || (one_round && (args.m <= 16 || (args.m <= 32 && args.k <= 4096)));
}

template <typename T>
cudaError_t launch_few_rows(const Problem<T>& problem, const DeviceInfo& device, cudaStream_t stream) {
  const auto batch_stride = [&](const GlobalTensor& x) { return x.batch > 1 ? x.batch_stride : 0; };
  const FewRowsArguments<T> args = {static_cast<const T*>(problem.a.data),
                                    static_cast<const T*>(problem.b.data),
                                    problem.a.row_stride,
                                    problem.b.row_stride,
                                    batch_stride(problem.a),
                                    batch_stride(problem.b),
                                    problem.k,
                                    tiles_of(problem.n, kFewRowsColumns),
                                    problem.epilogue};
  const auto run = [&](auto kernel, int shared_bytes) {
    return launch_few_rows_kernel<decltype(kernel)>(args, problem.batch, shared_bytes, stream);
  };
  if (problem.m > 16) return run(FewRowsKernel<T, 4, 2>(), 0);
  if (problem.m > 8) return run(FewRowsKernel<T, 2, 4>(), 0);
  const int64_t tiles = int64_t{args.tiles} * problem.batch;
  if (tiles <= device.multiprocessors || tiles > device.multiprocessors * 2)
    return run(FewRowsKernel<T, 1, 8>(), 0);
  // A multiprocessor has room for three blocks and gets one or two; the next launch's blocks take the rest.
  // With more than 1.5 blocks per multiprocessor some would get three, so unused shared memory limits it to
  // two.
  return run(FewRowsKernel<T, 1, 4>(), tiles * 2 > device.multiprocessors * 3 ? 72 << 10 : 0);
}

}  // namespace hopper

template <typename T>
bool hopper_supports(const GemmArgs<T>& args) {
  using namespace hopper;
  return args.m > 0 && args.n > 0 && args.k > 0 &&
         std::max({args.m, args.n, args.k, args.batch}) <= INT32_MAX / 2 &&
         // kernels count tiles in an int
         int64_t{tiles_of(args.n, 16)} * args.batch <= INT32_MAX / 2 / tiles_of(args.m, 64) &&
         operand_a(args).supported && operand_b(args).supported;
}

template <typename T>
int64_t hopper_workspace_bytes(const GemmArgs<T>& args, const DeviceInfo& device) {
  using namespace hopper;
  if (args.m <= kFewRows) return 0;
  const Tiling tiling = best_tiling(args.m, args.n, args.k, args.batch, device.multiprocessors);
  using Tile = Mainloop<T, 128, 128, 6, false, false>;
  return tiling.workspace ? workspace_split_k_bytes<Tile>(args.m, args.n, args.batch, tiling.splits) : 0;
}

template <typename T>
cudaError_t gemm_on_hopper(const GemmArgs<T>& args, const DeviceInfo& device, cudaStream_t stream) {
  using namespace hopper;
  TmaOperand a = operand_a(args), b = operand_b(args);
  const bool k_major = !a.mn_major && !b.mn_major;
  const bool few_rows = k_major && use_few_rows_kernel(args, device);
  const bool one_tile_row = k_major && args.m > kFewColumns && args.m <= kFewRows;
  const bool swap_ab = args.m <= kFewRows && !few_rows && !one_tile_row;
  if (swap_ab) std::swap(a, b);
  const int m = static_cast<int>(args.m), n = static_cast<int>(args.n);
  const Problem<T> problem = {
      a.tensor,
      b.tensor,
      swap_ab ? n : m,
      swap_ab ? m : n,
      static_cast<int>(args.k),
      static_cast<int>(args.batch),
      {args.bias, args.bias_stride, args.c, args.pre_activation, m, n, args.activation},
      args.workspace};
  if (few_rows) return launch_few_rows(problem, device, stream);
  if (one_tile_row) return launch_one_tile_row(problem, device, stream);
  const auto run = [&](auto mn_major_a, auto mn_major_b) {
    return swap_ab ? launch_swap_ab<T, mn_major_a, mn_major_b>(problem, device, stream)
                   : launch<T, mn_major_a, mn_major_b>(problem, device, stream);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  if (a.mn_major) return b.mn_major ? run(Yes(), Yes()) : run(Yes(), No());
  return b.mn_major ? run(No(), Yes()) : run(No(), No());
}

#define INSTANTIATE(T)                                                            \
  template bool hopper_supports(const GemmArgs<T>& args);                         \
  template int64_t hopper_workspace_bytes(const GemmArgs<T>&, const DeviceInfo&); \
  template cudaError_t gemm_on_hopper(const GemmArgs<T>&, const DeviceInfo&, cudaStream_t);
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)

}  // namespace lltm_ext
