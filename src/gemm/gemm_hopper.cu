// gemm in half types on Hopper: which kernel of gemm_hopper.cuh or gemm_hopper_few_rows.cuh computes which
// shape.
#include <cmath>
#include <optional>

#include "common/vec.cuh"
#include "gemm/gemm_hopper.cuh"
#include "gemm/gemm_hopper.h"
#include "gemm/gemm_hopper_few_rows.cuh"
#include "gemm/gemm_schedule.h"
#include "gemm/gemm_split_k.cuh"

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

// A product as the choice of a tiling sees it.
struct Shape {
  int64_t m, n, k, batch;
  double traffic_a, traffic_b;  // of a tile's row: see row_traffic
};

// How much more of the L2 cache's bandwidth the 128 bytes of a tile's row take than their size: lines and
// sectors that they do not fill are read too. If an operand has few rows, which share lines, all blocks read
// the same few lines. rows: of a or columns of b; lines: that are `stride` apart, a stride that is never used
// if there is one. Fitted with kTilings.
inline double row_traffic(int64_t rows, int64_t lines, int64_t stride) {
  if (lines == 1) return 1;
  const double unaligned = stride % 64 == 0 ? 1 : stride % 16 == 0 ? 1.6 : 2.63;
  return rows <= 64 && stride < 64 ? std::max(unaligned, 189.0 / static_cast<double>(stride)) : unaligned;
}

// A tile shape and its times in microseconds, fitted to an H200 by tools/gemm_tilings.py. A cluster has
// height x width tiles, which share operands, or one, whose K its blocks split. stream_k: all clusters divide
// the last rounds' slices of K.
struct Tiling {
  int rows, columns, height, width, splits;
  bool stream_k;
  double slice, launch, ends, store;  // slice: a tile of K; store: 10^6 bytes of c

  // Whether there is a kernel that splits K and leaves sums in the workspace. More would hardly be faster.
  bool splits_k() const {
    return splits == 1 && ((columns == 64 && height == 1) || (rows == 64 && columns == 128 && height == 4));
  }
  int cluster_blocks() const { return height * width * splits; }
};

constexpr Tiling kTilings[] = {
    {64, 64, 1, 1, 1, false, 0.181, 1.02, 0.566, 0.354},
    {64, 64, 4, 1, 1, false, 0.17, 1.21, 0.574, 0.327},
    {64, 128, 1, 1, 1, false, 0.226, 1.18, 0.885, 0.274},
    {64, 128, 4, 1, 1, false, 0.194, 1.41, 0.869, 0.227},
    {128, 128, 1, 1, 1, false, 0.32, 1.56, 0.988, 0.162},
    {128, 128, 1, 4, 1, false, 0.298, 1.93, 1.01, 0.18},
    {128, 192, 1, 1, 1, false, 0.428, 1.78, 1.43, 0.127},
    {128, 192, 2, 1, 1, false, 0.441, 2.29, 1.37, 0.144},
    {128, 192, 2, 2, 1, false, 0.446, 2.14, 1.57, 0.124},
    {128, 256, 2, 1, 1, false, 0.569, 2.49, 1.83, 0.142},
    {64, 64, 1, 1, 4, false, 0.219, 2.09, 1.26, 2.56},
    {64, 64, 1, 1, 8, false, 0.215, 1.8, 1.36, 5.57},
    {128, 128, 1, 4, 1, true, 0.298, 3.48, 1.42, 0},
    {128, 192, 2, 1, 1, true, 0.441, 6.25, 1.74, 0},
    {128, 192, 2, 2, 1, true, 0.446, 5.77, 1.81, 0},
    {128, 256, 2, 1, 1, true, 0.569, 9.58, 2.14, 0},
};

constexpr int kTilingCount = sizeof(kTilings) / sizeof(kTilings[0]);

// How many clusters of so many blocks run at once.
inline int64_t clusters_of(const DeviceInfo& device, int blocks) {
  return device.cluster_multiprocessors[blocks] / blocks;
}

// The tiles of c, in units of a cluster's, and the clusters that compute them.
struct TilingShape {
  int64_t tiles, clusters, slices;

  TilingShape(const Tiling& tiling, const Shape& shape, const DeviceInfo& device)
      : tiles(int64_t{tiles_of(shape.m, tiling.rows * tiling.height)} *
              tiles_of(shape.n, tiling.columns * tiling.width) * shape.batch),
        clusters(clusters_of(device, tiling.cluster_blocks())),
        slices(tiles_of(shape.k, kTileK * tiling.splits)) {}

  // Whether the last round of tiles leaves multiprocessors idle, and every cluster gets some of K.
  bool stream_k_helps() const {
    return tiles % clusters > 0 && tiles * slices >= 4 * clusters && tiles * slices <= INT32_MAX;
  }
};

// A slice takes the longer, the more of the L2 cache's bandwidth the blocks that run at once need.
inline double time_of(const Tiling& tiling, const Shape& shape, const DeviceInfo& device) {
  constexpr double kBytesPerMicrosecond = 21.9e6;
  constexpr double kAddSums = 2.57;                               // a level of stream-K's tree
  constexpr double kUnalignedEnds = 0.4, kUnalignedStore = 0.34;  // more for rows that TMA cannot store
  const TilingShape counts(tiling, shape, device);
  const int64_t at_once = tiling.stream_k ? counts.clusters : std::min(counts.tiles, counts.clusters);
  const double rows =
      tiling.height * tiling.rows * shape.traffic_a + tiling.width * tiling.columns * shape.traffic_b;
  const double filled =  // of the slices, which K's end leaves partly empty
      static_cast<double>(shape.k) / static_cast<double>(counts.slices * kTileK * tiling.splits);
  const double bytes = filled * static_cast<double>(at_once * tiling.splits * kSwizzleBytes) * rows;
  const double of_tile =
      static_cast<double>(counts.slices) * std::hypot(tiling.slice, bytes / kBytesPerMicrosecond);
  const double rounds = static_cast<double>(counts.tiles) / static_cast<double>(counts.clusters);
  const double full_rounds = std::ceil(rounds);
  const double result = static_cast<double>(shape.batch * shape.m * shape.n) * 2e-6;
  const double unaligned = shape.n % 8 == 0 ? 0 : kUnalignedEnds + kUnalignedStore * result;
  const double time = tiling.launch + full_rounds * tiling.ends + tiling.store * result + unaligned;
  if (tiling.stream_k) return time + rounds * of_tile + kAddSums * std::log2(1 + 1 / rounds);
  return time + full_rounds * of_tile;
}

// With several splits of K, whose products are a batch, and whose sums a second kernel adds. Its blocks are
// still there when the next product's clusters start early: the more clusters, the more of them start late.
inline double time_of(const Tiling& tiling, const Shape& shape, int splits, const DeviceInfo& device) {
  if (splits == 1) return time_of(tiling, shape, device);
  constexpr double kSecondKernel = 1.5, kBytesPerMicrosecond = 5e6, kFewClusters = 0.88, kLate = 0.28;
  Shape parts = shape;
  parts.batch = splits;
  parts.k = ceil_div(ceil_div(shape.k, kTileK), splits) * kTileK;
  const double sum_bytes = static_cast<double>(shape.m * shape.n * splits) * sizeof(float);
  const TilingShape counts(tiling, parts, device);
  const double filled = static_cast<double>(counts.tiles) / static_cast<double>(counts.clusters);
  return (kFewClusters + kLate * std::min(1.0, filled)) *
         (time_of(tiling, parts, device) + kSecondKernel + sum_bytes / kBytesPerMicrosecond);
}

struct TilingChoice {
  int tiling = -1;  // its place in kTilings
  int splits = 1;   // of K, whose sums are in the workspace
  double time = 0;
};

// The fastest. Where two estimates differ by less than their errors, whole tiles are more often the faster
// ones than stream-K. Splits are such that clusters take a quarter of a round, a half, and so on.
inline TilingChoice best_tiling(const Shape& shape, const DeviceInfo& device) {
  constexpr double kStreamKMargin = 1.04;
  constexpr int64_t kMostQuarters = 12;
  TilingChoice best;
  const auto consider = [&](const TilingChoice& choice) {
    if (best.tiling < 0 || choice.time < best.time) best = choice;
  };
  for (int i = 0; i < kTilingCount; ++i) {
    const Tiling& tiling = kTilings[i];
    if (tiling.splits > tiles_of(shape.k, kTileK)) continue;
    if (clusters_of(device, tiling.cluster_blocks()) == 0) continue;
    const TilingShape counts(tiling, shape, device);
    if (tiling.stream_k && !counts.stream_k_helps()) continue;
    consider({i, 1, time_of(tiling, shape, device) * (tiling.stream_k ? kStreamKMargin : 1)});
    if (!tiling.splits_k() || shape.batch > 1) continue;
    const int64_t most =
        std::min(counts.slices / 2, kMostSumBytes / (shape.m * shape.n * int64_t{sizeof(float)}));
    for (int64_t quarters = 1; quarters <= kMostQuarters; ++quarters) {
      const int splits = static_cast<int>(std::min(counts.clusters * quarters / (4 * counts.tiles), most));
      if (splits > 1) consider({i, splits, time_of(tiling, shape, splits, device)});
    }
  }
  return best;
}

// Of the clusters of a tiling with stream-K.
inline StreamKShape stream_k_shape(const Tiling& tiling, const DeviceInfo& device) {
  const int blocks = tiling.cluster_blocks();
  return {clusters_of(device, blocks), blocks * tiling.rows / 64, tiling.columns / 2};
}

// splits: of K, whose sums a second kernel adds.
template <typename T, bool kMnMajorA, bool kMnMajorB>
cudaError_t launch_tiling(const Problem<T>& problem, const Tiling& tiling, int splits,
                          const DeviceInfo& device, void* workspace, cudaStream_t stream) {
  if (tiling.splits > 1) {
    return launch_cluster_split_k<Mainloop<T, 64, 64, 6, kMnMajorA, kMnMajorB>>(problem, tiling.splits,
                                                                                stream);
  }
  const int64_t clusters = clusters_of(device, tiling.cluster_blocks());
  if (splits > 1) {
    const auto run = [&](auto mainloop) {
      return launch_persistent<decltype(mainloop), true>(problem, clusters, splits, workspace, stream);
    };
    return tiling.height == 1 ? run(Mainloop<T, 64, 64, 8, kMnMajorA, kMnMajorB>())
                              : run(Mainloop<T, 64, 128, 8, kMnMajorA, kMnMajorB, 4>());
  }
  cudaError_t error = cudaErrorInvalidValue;
  const auto try_shape = [&](auto mainloop) {
    using M = decltype(mainloop);
    if (tiling.rows != M::kTileM || tiling.columns != M::kTileN || tiling.height != M::kClusterM ||
        tiling.width != M::kClusterN) {
      return false;
    }
    error = launch_persistent<M>(problem, clusters, 1, tiling.stream_k ? workspace : nullptr, stream);
    return true;
  };
  (void)(try_shape(Mainloop<T, 64, 64, 8, kMnMajorA, kMnMajorB>()) ||
         try_shape(Mainloop<T, 64, 64, 8, kMnMajorA, kMnMajorB, 4>()) ||
         try_shape(Mainloop<T, 64, 128, 8, kMnMajorA, kMnMajorB>()) ||
         try_shape(Mainloop<T, 64, 128, 8, kMnMajorA, kMnMajorB, 4>()) ||
         try_shape(Mainloop<T, 128, 128, 6, kMnMajorA, kMnMajorB>()) ||
         try_shape(Mainloop<T, 128, 128, 6, kMnMajorA, kMnMajorB, 1, 4>()) ||
         try_shape(Mainloop<T, 128, 192, 4, kMnMajorA, kMnMajorB>()) ||
         try_shape(Mainloop<T, 128, 192, 4, kMnMajorA, kMnMajorB, 2>()) ||
         try_shape(Mainloop<T, 128, 192, 4, kMnMajorA, kMnMajorB, 2, 2>()) ||
         try_shape(Mainloop<T, 128, 256, 4, kMnMajorA, kMnMajorB, 2>()));
  return error;
}

// How many blocks split K of few tiles: as many as still run all at once, if that pays. Adding their sums
// takes as long as some slices of K.
inline int splits_of(int64_t tiles, int64_t slices, const DeviceInfo& device) {
  constexpr int64_t kSlicesOfSum = 10;
  int splits = kMostClusterBlocks;
  while (splits > 1 && (tiles > clusters_of(device, splits) || slices - slices / splits < kSlicesOfSum)) {
    splits /= 2;
  }
  return splits;
}

template <class Mainloop, typename T>
cudaError_t launch_few_tiles(const Problem<T>& problem, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t tiles = problem.template order<Mainloop>().total;
  const int splits = splits_of(tiles, tiles_of(problem.k, kTileK), device);
  return launch_cluster_split_k<Mainloop>(problem, splits, stream);
}

// Few rows or columns of c fit one tile: up to kNarrow columns of a K-major b as its columns, up to kFewRows
// rows of a as its columns with A and B swapped, or, above kNarrow if both operands are K-major, as its rows.
constexpr int kFewRows = 64, kNarrow = 32;

// The few rows or columns are the tile's columns. Reading the other operand bounds the time, so a
// multiprocessor has several blocks, each with many loads in flight.
template <typename T, bool kMnMajorA, bool kMnMajorB>
cudaError_t launch_narrow(const Problem<T>& problem, const DeviceInfo& device, cudaStream_t stream) {
  const auto run = [&](auto mainloop) {
    return launch_few_tiles<decltype(mainloop)>(problem, device, stream);
  };
  if constexpr (!kMnMajorB) {
    if (problem.n <= 8) return run(Mainloop<T, 64, 8, 6, kMnMajorA, false>());
    if (problem.n <= 16) return run(Mainloop<T, 64, 16, 6, kMnMajorA, false>());
    if (problem.n <= kNarrow) return run(Mainloop<T, 64, kNarrow, 6, kMnMajorA, false>());
  }
  return run(Mainloop<T, 64, kFewRows, 6, kMnMajorA, kMnMajorB>());
}

// One tile has all rows. One block a multiprocessor fills all of its shared memory with stages; the tile has
// the width whose rounds of blocks take the least time.
struct OneTileRow {
  int columns = 32;
  int64_t rounds;

  OneTileRow(int64_t n, int64_t batch, const DeviceInfo& device) {
    const auto rounds_of = [&](int columns) {
      return ceil_div(int64_t{tiles_of(n, columns)} * batch, device.multiprocessors);
    };
    for (int wider : {88, 128}) {
      if (rounds_of(wider) * wider <= rounds_of(columns) * columns) columns = wider;
    }
    rounds = rounds_of(columns);
  }
};

template <typename T>
cudaError_t launch_one_tile_row(const Problem<T>& problem, const DeviceInfo& device, cudaStream_t stream) {
  const auto run = [&](auto mainloop) {
    return launch_few_tiles<decltype(mainloop)>(problem, device, stream);
  };
  const int columns = OneTileRow(problem.n, problem.batch, device).columns;
  if (columns == 32) return run(Mainloop<T, kFewRows, 32, 16, false, false>());
  if (columns == 88) return run(Mainloop<T, kFewRows, 88, 10, false, false>());
  return run(Mainloop<T, kFewRows, 128, 9, false, false>());
}

// Whether gemm_hopper_few_rows.cuh is the fastest of the kernels for few rows: always up to 8 rows; for more
// if all tiles run at once and K is not so long that splitting it is faster.
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

// ---- Copies of operands that TMA cannot address, and of narrow ones that are not K-major.

// Copies an operand's lines: the rows of [lines, length] of each matrix.
template <typename T>
struct AlignedCopy {
  const T* from;
  T* to;
  int64_t batch_stride, line_stride, stride, to_line_stride;
  uint32_t lines, length, chunks;  // chunks of 8 elements in a line
  uint32_t total;                  // chunks of all matrices; 0 if there is nothing to copy
  bool along_k;                    // whether lines are along K

  int64_t written_bytes() const { return int64_t{total} * 16; }
  int64_t elements() const { return total == 0 ? 0 : int64_t{total / chunks} * to_line_stride; }
};

constexpr int kCopyThreads = 256;

template <typename T>
__device__ __forceinline__ void copy_chunk(const AlignedCopy<T>& x, uint32_t block) {
  const uint32_t i = block * kCopyThreads + threadIdx.x;
  if (i >= x.total) return;
  const uint32_t line = i / x.chunks, matrix = line / x.lines, element = i % x.chunks * 8;
  const T* from =
      x.from + matrix * x.batch_stride + (line - matrix * x.lines) * x.line_stride + element * x.stride;
  Vec<T, 8> values;
#pragma unroll
  for (int j = 0; j < 8; ++j) values.data[j] = element + j < x.length ? from[j * x.stride] : narrow<T>(0.f);
  *reinterpret_cast<Vec<T, 8>*>(x.to + line * x.to_line_stride + element) = values;
}

// A pointer to the arguments of either operand would put them in local memory.
template <typename T>
__device__ __forceinline__ void copy_operands(const AlignedCopy<T>& a, const AlignedCopy<T>& b) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const uint32_t blocks_of_a = (a.total + kCopyThreads - 1) / kCopyThreads;
  if (blockIdx.x < blocks_of_a) {
    copy_chunk(a, blockIdx.x);
  } else {
    copy_chunk(b, blockIdx.x - blocks_of_a);
  }
}

template <typename T>
__global__ void __launch_bounds__(kCopyThreads)
    gemm_align_kernel(const AlignedCopy<T> a, const AlignedCopy<T> b) {
  LLTM_HOPPER(copy_operands(a, b));
}

// Of an operand [rows, k]: a copy of nothing if TMA can address it and it need not become K-major.
template <typename T>
AlignedCopy<T> aligned_copy(const Matrices<T>& x, const TmaOperand& operand, int64_t rows, int64_t k,
                            int64_t row_stride, int64_t k_stride, int64_t batch, bool k_major) {
  if (operand.supported && !(k_major && operand.mn_major)) return {};
  const bool along_k = k_major || rows == 1 || (k > 1 && k_stride <= row_stride);
  const int64_t lines = along_k ? rows : k, length = along_k ? k : rows, chunks = ceil_div(length, 8);
  const int64_t total = std::min<int64_t>(chunks * lines * (x.batch_stride == 0 ? 1 : batch), UINT32_MAX);
  const auto narrow = [](int64_t i) { return static_cast<uint32_t>(i); };
  return {x.data,
          nullptr,
          x.batch_stride,
          along_k ? row_stride : k_stride,
          along_k ? k_stride : row_stride,
          length < 64 ? chunks * 8 : ceil_div(length, 64) * 64,
          narrow(lines),
          narrow(length),
          narrow(chunks),
          narrow(total),
          along_k};
}

// Of few rows or columns of c: the rows of the other operand, the weights, and its elements. Expanded ones
// may have more than an integer holds.
template <typename T>
int64_t weight_rows(const GemmArgs<T>& args) {
  return args.m <= kFewRows ? args.n : args.m;
}
template <typename T>
double weight_elements(const GemmArgs<T>& args) {
  return static_cast<double>(weight_rows(args)) * static_cast<double>(args.k) *
         static_cast<double>(args.batch);
}

// Whether a narrow operand should be K-major, for which there are faster kernels. A copy only for that pays
// if the other operand has many elements.
inline bool should_be_k_major(const TmaOperand& operand, double others) {
  constexpr double kMany = 1 << 22;
  return !operand.supported || others >= kMany;
}

template <typename T>
AlignedCopy<T> copy_of_b(const GemmArgs<T>& args) {
  const TmaOperand b = operand_b(args);
  const bool k_major = args.m > kFewRows && args.n <= kNarrow && should_be_k_major(b, weight_elements(args));
  return aligned_copy(args.b, b, args.n, args.k, args.b.column_stride, args.b.row_stride, args.batch,
                      k_major);
}

// Whether TMA will find an operand, or its copy, K-major.
template <typename T>
bool is_k_major(const TmaOperand& operand, const AlignedCopy<T>& copy) {
  return copy.total > 0 ? copy.along_k : !operand.mn_major;
}
template <typename T>
bool b_is_k_major(const GemmArgs<T>& args) {
  return is_k_major(operand_b(args), copy_of_b(args));
}

template <typename T>
AlignedCopy<T> copy_of_a(const GemmArgs<T>& args) {
  const TmaOperand a = operand_a(args);
  const bool k_major = (args.m <= kNarrow || (args.m <= kFewRows && b_is_k_major(args))) &&
                       should_be_k_major(a, weight_elements(args));
  return aligned_copy(args.a, a, args.m, args.k, args.a.row_stride, args.a.column_stride, args.batch,
                      k_major);
}

// Makes the copies at the start of the workspace, and the arguments those of their product. args.workspace
// moves behind them.
template <typename T>
cudaError_t align(GemmArgs<T>& args, cudaStream_t stream) {
  AlignedCopy<T> a = copy_of_a(args), b = copy_of_b(args);
  const int64_t blocks = ceil_div(a.total, kCopyThreads) + ceil_div(b.total, kCopyThreads);
  if (blocks == 0) return cudaSuccess;
  T* to = static_cast<T*>(args.workspace);
  const auto place = [&](AlignedCopy<T>& copy, Matrices<T>& x, int64_t& along_k, int64_t& across) {
    if (copy.total == 0) return;
    x.data = copy.to = to;
    to += copy.elements();
    if (x.batch_stride != 0) x.batch_stride = copy.lines * copy.to_line_stride;
    along_k = copy.along_k ? 1 : copy.to_line_stride;
    across = copy.along_k ? copy.to_line_stride : 1;
  };
  place(a, args.a, args.a.column_stride, args.a.row_stride);
  place(b, args.b, args.b.row_stride, args.b.column_stride);
  args.workspace = to;
  return launch_kernel(gemm_align_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kCopyThreads), 0,
                       /*programmatic=*/true, stream, a, b);
}

// Of the product of the copies, before they have been made.
template <typename T>
Shape shape_of(const GemmArgs<T>& args) {
  const auto traffic = [](int64_t rows, const TmaOperand& operand, const AlignedCopy<T>& copy) {
    return copy.total > 0 ? row_traffic(rows, copy.lines, copy.to_line_stride)
                          : row_traffic(rows, operand.tensor.rows, operand.tensor.row_stride);
  };
  return {args.m,
          args.n,
          args.k,
          args.batch,
          traffic(args.m, operand_a(args), copy_of_a(args)),
          traffic(args.n, operand_b(args), copy_of_b(args))};
}

// ---- The choice of a kernel: a place in kTilings, or one of these for few rows or columns.

constexpr int kFewRowsKernel = kTilingCount, kOneTileRow = kTilingCount + 1, kNarrowTiles = kTilingCount + 2;

template <typename T>
bool supports(const GemmArgs<T>& args) {
  const auto fits = [](const AlignedCopy<T>& copy) { return copy.total < INT32_MAX / 2; };
  return args.m > 0 && args.n > 0 && args.k > 0 &&
         std::max({args.m, args.n, args.k, args.batch}) <= INT32_MAX / 2 &&
         // kernels count tiles in an int
         int64_t{tiles_of(args.n, 16)} * args.batch <= INT32_MAX / 2 / tiles_of(args.m, 64) &&
         fits(copy_of_a(args)) && fits(copy_of_b(args));
}

template <typename T>
bool a_is_k_major(const GemmArgs<T>& args) {
  return is_k_major(operand_a(args), copy_of_a(args));
}

// That for few rows or columns; none if there are many of both.
template <typename T>
std::optional<int> narrow_kernel(const GemmArgs<T>& args, const DeviceInfo& device) {
  if (args.m > kFewRows) {
    if (args.n <= kNarrow && b_is_k_major(args)) return kNarrowTiles;
    return {};
  }
  const bool k_major = a_is_k_major(args) && b_is_k_major(args);
  if (k_major && use_few_rows_kernel(args, device)) return kFewRowsKernel;
  return k_major && args.m > kNarrow ? kOneTileRow : kNarrowTiles;
}

// Without copies, in microseconds.
template <typename T>
double time_of_narrow(int kernel, const GemmArgs<T>& args, const DeviceInfo& device) {
  const bool few_rows = args.m <= kFewRows;
  const int64_t rows = weight_rows(args);
  const double weights = weight_elements(args) * sizeof(T) / 1e6;
  const double result = static_cast<double>(args.m * args.n * args.batch) * sizeof(T) / 1e6;
  const int slices = tiles_of(args.k, kTileK);
  const auto rounds = [&](int tile_rows) {
    return static_cast<double>(tiles_of(rows, tile_rows) * args.batch) / (2 * device.multiprocessors);
  };
  if (kernel == kFewRowsKernel) {
    return 1.6 + result + std::max({0.32 * weights, 0.033 * slices, 1.45 * (rounds(kFewRowsColumns) - 1)});
  }
  if (kernel == kOneTileRow) {
    const auto more_rounds = static_cast<double>(OneTileRow(args.n, args.batch, device).rounds - 1);
    const double read = std::min(0.42 * weights, 8 + 0.25 * weights);  // many at the copy's rate
    return 3.5 + result + read + 0.01 * slices + 2.9 * more_rounds;
  }
  const int64_t narrow = few_rows ? args.m : args.n;
  const bool wide = narrow > kNarrow || (few_rows && !a_is_k_major(args));
  const double columns = wide ? kFewRows : narrow > 16 ? kNarrow : narrow > 8 ? 16 : 8;
  const int splits = splits_of(tiles_of(rows, 64) * args.batch, slices, device);
  const double sums = splits > 1 ? 1.67 : 0, filled = std::min(1.0, rounds(64)) * (wide ? 2.8 : 1.74);
  const double round = 0.159 * slices / splits + 0.56 + 0.045 * columns;
  const double more_rounds = std::max(0.0, rounds(64) - 1) * (round + (wide ? 1.46 : 0));
  return 0.56 + 0.7 * result + 0.155 * weights + sums + round + filled + more_rounds;
}

}  // namespace hopper

template <typename T>
HopperPlan hopper_plan(const GemmArgs<T>& args, const DeviceInfo& device) {
  using namespace hopper;
  if (!supports(args)) return {};
  const AlignedCopy<T> a = copy_of_a(args), b = copy_of_b(args);
  const Shape shape = shape_of(args);
  const TilingChoice choice = best_tiling(shape, device);
  const Tiling& tiling = kTilings[choice.tiling];
  HopperPlan plan = {true, choice.time, (a.elements() + b.elements()) * int64_t{sizeof(T)}, choice.tiling,
                     choice.splits};
  const std::optional<int> narrow = narrow_kernel(args, device);
  const double narrow_time = narrow ? time_of_narrow(*narrow, args, device) : 0;
  // Narrow kernels read many weights faster than tilings do, which the estimates do not show.
  constexpr int64_t kManyWeights = 1 << 20, kLongK = 256;
  const bool reads_weights = weight_elements(args) >= kManyWeights && args.k >= kLongK;
  if (narrow && (reads_weights || narrow_time < plan.time)) {
    plan.kernel = *narrow;
    plan.splits = 1;
    plan.time = narrow_time;
  } else if (tiling.stream_k) {
    plan.workspace_bytes += stream_k_shape(tiling, device).bytes();
  } else {
    plan.workspace_bytes += partial_sum_bytes(args, plan.splits);
  }
  if (const int64_t copied = a.written_bytes() + b.written_bytes(); copied > 0) {
    plan.time += 0.85 + 0.65 * static_cast<double>(copied) / 1e6;
  }
  return plan;
}

template <typename T>
cudaError_t gemm_on_hopper(const GemmArgs<T>& given, const HopperPlan& plan, const DeviceInfo& device,
                           cudaStream_t stream) {
  using namespace hopper;
  GemmArgs<T> args = given;
  const cudaError_t error = align(args, stream);
  if (error != cudaSuccess) return error;
  TmaOperand a = operand_a(args), b = operand_b(args);
  const bool swap_ab = plan.kernel == kNarrowTiles && args.m <= kFewRows;
  if (swap_ab) std::swap(a, b);
  const int m = static_cast<int>(args.m), n = static_cast<int>(args.n);
  const Problem<T> problem = {
      a.tensor,
      b.tensor,
      swap_ab ? n : m,
      swap_ab ? m : n,
      static_cast<int>(args.k),
      static_cast<int>(args.batch),
      swap_ab,
      {args.bias, args.bias_stride, args.c, args.pre_activation, m, n, args.activation}};
  if (plan.kernel == kFewRowsKernel) return launch_few_rows(problem, device, stream);
  if (plan.kernel == kOneTileRow) return launch_one_tile_row(problem, device, stream);
  const auto run = [&](auto mn_major_a, auto mn_major_b) {
    if (plan.kernel == kNarrowTiles) {
      return launch_narrow<T, mn_major_a, mn_major_b>(problem, device, stream);
    }
    return launch_tiling<T, mn_major_a, mn_major_b>(problem, kTilings[plan.kernel], plan.splits, device,
                                                    args.workspace, stream);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  cudaError_t launched;
  if (a.mn_major) {
    launched = b.mn_major ? run(Yes(), Yes()) : run(Yes(), No());
  } else {
    launched = b.mn_major ? run(No(), Yes()) : run(No(), No());
  }
  if (launched != cudaSuccess || plan.splits == 1) return launched;
  return launch_reduce(args, plan.splits, /*programmatic=*/true, stream);
}

#define INSTANTIATE(T)                                                    \
  template HopperPlan hopper_plan(const GemmArgs<T>&, const DeviceInfo&); \
  template cudaError_t gemm_on_hopper(const GemmArgs<T>&, const HopperPlan&, const DeviceInfo&, cudaStream_t);
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)

}  // namespace lltm_ext
