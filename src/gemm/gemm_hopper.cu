// gemm in half types on Hopper. A producer warp loads tiles by TMA, one or two consumer warpgroups multiply
// them by wgmma, 64 rows of c each, and TMA stores the results.
//
// Two kernels:
// - Persistent: a block computes many tiles of c, and loads the next one's operands during the epilogue. The
//   largest tiles are in clusters of two, which share b by multicast. Where there are few tiles, K is split:
//   blocks leave partial sums in the workspace (gemm_tile.cuh).
// - Cluster split-K, for few rows, few columns and few tiles: the blocks of a cluster split K, and add their
//   partial sums in a fixed order through distributed shared memory.
#include <algorithm>

#include "common/hopper/launch.h"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/split.cuh"
#include "gemm/gemm_tile.cuh"

namespace lltm_ext {
namespace hopper {

// ---- Epilogue

__device__ __forceinline__ uint32_t pack(float x, float y, __half) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ uint32_t pack(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Stores a warpgroup's accumulators [64, kN], in chunks of 64 columns through two buffers of shared memory.
// Of each 8 columns wgmma gives a thread two neighbours in row lane / 4, and the same two 8 rows below.
template <typename T, int kN>
class EpilogueStore {
  static constexpr int kBufferBytes = 64 * 64 * sizeof(T), kPerThread = (kN + 127) / 128;

 public:
  static constexpr int bytes(int warpgroups) {
    return warpgroups * static_cast<int>(2 * kBufferBytes + kN * sizeof(float));
  }

  // `shared`, aligned to 1,024 bytes: first the buffers of all warpgroups, then their biases.
  __device__ EpilogueStore(unsigned char* shared, int warpgroup, int warpgroups)
      : buffers_(shared + warpgroup * 2 * kBufferBytes),
        bias_(reinterpret_cast<float*>(shared + warpgroups * 2 * kBufferBytes) + warpgroup * kN),
        warpgroup_(warpgroup),
        thread_(threadIdx.x % 128) {}

  // Loads the bias of the columns from `column`, during the mainloop.
  __device__ __forceinline__ void prefetch_bias(const Epilogue<T>& epilogue, int column) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) loaded_bias_[i] = epilogue.bias_at(column + i * 128 + thread_);
  }

  // Stores from (row, column) of a matrix on; by TMA, if there are tensor maps.
  __device__ __forceinline__ void run(float (&d)[kN / 2], const Epilogue<T>& epilogue, const CUtensorMap* c,
                                      const CUtensorMap* pre_activation, int row, int column, int matrix) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (i * 128 + thread_ < kN) bias_[i * 128 + thread_] = loaded_bias_[i];
    }
    warpgroup_sync(warpgroup_);
    if (c && epilogue.activation <= Activation::kRelu) {
#pragma unroll
      for (int chunk = 0; chunk < kN / 64; ++chunk) {
        float x[32];
        add_bias(x, d, chunk);
        if (epilogue.pre_activation)
          store_chunk<true>(x, epilogue, epilogue.pre_activation, pre_activation, row, column + 64 * chunk,
                            matrix);
        if (epilogue.activation == Activation::kRelu) {
#pragma unroll
          for (int i = 0; i < 32; ++i) x[i] = relu(x[i]);
        }
        store_chunk<true>(x, epilogue, epilogue.c, c, row, column + 64 * chunk, matrix);
      }
      return;
    }
    // The rolled loop has the code of all activations and of rows of any length once, for both results.
    // Registers cannot be indexed, so a branch per chunk selects them.
    const int results = epilogue.pre_activation ? 2 : 1;
#pragma unroll 1
    for (int i = 0; i < kN / 64 * results; ++i) {
      const int chunk = i / results;
      const bool last = i % results == results - 1;
      float x[32];
#pragma unroll
      for (int j = 0; j < kN / 64; ++j) {
        if (j == chunk) add_bias(x, d, j);
      }
      if (last) activate<ActivationMath<T>>(epilogue.activation, x);
      store_chunk<false>(x, epilogue, last ? epilogue.c : epilogue.pre_activation, last ? c : pre_activation,
                         row, column + 64 * chunk, matrix);
    }
  }

  // Waits until shared memory is free again.
  __device__ __forceinline__ void wait() const {
    if (thread_ == 0) tma_store_wait_read<0>();
  }

 private:
  __device__ __forceinline__ int column_of(int i) const { return i / 4 * 8 + thread_ % 4 * 2 + i % 2; }

  // x: the accumulators of a chunk, plus their bias.
  __device__ __forceinline__ void add_bias(float (&x)[32], const float (&d)[kN / 2], int chunk) const {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float2 bias = *reinterpret_cast<const float2*>(bias_ + 64 * chunk + column_of(i));
      const float* const from = d + 32 * chunk + i;
      x[i] = from[0] + bias.x, x[i + 1] = from[1] + bias.y;
      x[i + 2] = from[2] + bias.x, x[i + 3] = from[3] + bias.y;
    }
  }

  // Stages a chunk in shared memory with TMA's 128-byte swizzle, then stores it.
  template <bool kByTma>
  __device__ __forceinline__ void store_chunk(const float (&x)[32], const Epilogue<T>& epilogue, T* to,
                                              const CUtensorMap* map, int row, int column, int matrix) {
    if (thread_ == 0) tma_store_wait_read<1>();
    warpgroup_sync(warpgroup_);
    unsigned char* buffer = buffers_ + buffer_ * kBufferBytes;
    buffer_ ^= 1;
    const int lane = thread_ % 32, line = thread_ / 32 * 16 + lane % 16;
    const uint32_t start = shared_address(buffer) + line * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int piece = (2 * j + lane / 16) ^ (line % 8);
      stmatrix(start + piece * 16, pack(x[8 * j], x[8 * j + 1], T()), pack(x[8 * j + 2], x[8 * j + 3], T()),
               pack(x[8 * j + 4], x[8 * j + 5], T()), pack(x[8 * j + 6], x[8 * j + 7], T()));
    }
    if (kByTma || map) {
      fence_proxy_async();
      warpgroup_sync(warpgroup_);
      if (thread_ == 0) tma_store(map, column, row, matrix, buffer);
      return;
    }
    warpgroup_sync(warpgroup_);
    store_rows(buffer, epilogue, to, row, column, matrix);
  }

  // For row strides that are not a multiple of 16 bytes. A warp has every fourth row, a lane two neighbours.
  // If rows start between multiples of 4 bytes, a lane stores its second value with the next lane's first,
  // and the last lane stores both ends. All rows of a warp have the same pattern, so all are loaded before
  // the first is stored, and stores need no branch.
  __device__ __forceinline__ void store_rows(const unsigned char* buffer, const Epilogue<T>& epilogue, T* to,
                                             int row, int column, int matrix) const {
    constexpr int kWarps = 4, kRows = 64 / kWarps;  // per warp
    const int lane = thread_ % 32, warp = thread_ / 32, columns = epilogue.n - column;
    to += (static_cast<int64_t>(matrix) * epilogue.m + row + warp) * epilogue.n + column;
    const bool shifted = reinterpret_cast<uintptr_t>(to) % 4 != 0;
    const int first = 2 * lane + shifted, second = (first + 1) % 64;
    const bool both = first < second && second < columns, only_first = !both && first < columns,
               only_second = !both && second < columns;
    const int64_t row_stride = static_cast<int64_t>(kWarps) * epilogue.n;
    uint32_t pairs[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = warp + i * kWarps, piece = (lane / 4) ^ (r % 8);
      pairs[i] = *reinterpret_cast<const uint32_t*>(buffer + r * 128 + piece * 16 + lane % 4 * 4);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t next = __shfl_sync(~0u, pairs[i], (lane + 1) % 32);
      if (shifted) pairs[i] = __funnelshift_r(pairs[i], next, 16);
    }
    uint16_t* bits = reinterpret_cast<uint16_t*>(to + first);
#pragma unroll
    for (int i = 0; i < kRows; ++i, bits += row_stride) {
      const bool inside = warp + i * kWarps < epilogue.m - row;
      if (inside && both) *reinterpret_cast<uint32_t*>(bits) = pairs[i];
      if (inside && only_first) bits[0] = static_cast<uint16_t>(pairs[i]);
      if (inside && only_second) bits[second - first] = static_cast<uint16_t>(pairs[i] >> 16);
    }
  }

  unsigned char* const buffers_;
  float* const bias_;
  const int warpgroup_, thread_;
  float loaded_bias_[kPerThread];
  int buffer_ = 0;
};

// ---- Kernels

template <typename T>
struct KernelArguments {
  Epilogue<T> epilogue;
  int tiles_of_k;
  bool batched_a, batched_b;  // else one matrix serves the whole batch
  bool tma_store;             // whether TMA can address the results
  bool swap_ab;               // a and b are each other's transposes, so a tile is of c's transpose
  int splits;                 // of K, of one product: the matrices of c are their sums
  float* partials;            // [splits, m, n], if there are several
};

// ---- Persistent

// kSplitsK: a kernel of its own, because the others take 0.2 us longer with the code for partial sums in
// them.
template <class Mainloop, bool kSplitsK>
struct PersistentKernel {
  using T = typename Mainloop::T;
  using Out = EpilogueStore<T, Mainloop::kTileN>;
  static constexpr int kBlocks = Mainloop::kClusterBlocks, kConsumers = Mainloop::kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kOperandsAndOut = Mainloop::kBytes + Out::bytes(kConsumers);
  static constexpr int kShared = kOperandsAndOut + kBarrierBytes;

  // The tiles of `order` are those of a cluster.
  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const CUtensorMap* c,
                             const CUtensorMap* pre_activation, const KernelArguments<T>& args,
                             const TileOrder& order) {
    unsigned char* shared = dynamic_shared();
    auto pipeline = pipeline_of<Mainloop>(shared, shared + kOperandsAndOut);
    const uint32_t rank = kBlocks > 1 ? cluster_rank() : 0;
    const int warpgroup = threadIdx.x / 128;
    const int cluster = blockIdx.x / kBlocks, clusters = gridDim.x / kBlocks;
    const int tiles = static_cast<int>(order.total);
    int i = cluster, begin = 0, end = args.tiles_of_k;  // begin, end: slices of K
    TileIndex tile;
    const auto find = [&] {
      if (i >= tiles) return false;
      tile = first_element<Mainloop>(order, i, rank);
      i += clusters;
      if constexpr (kSplitsK) {
        const int64_t slices = args.tiles_of_k;
        begin = static_cast<int>(slices * tile.matrix / args.splits);
        end = static_cast<int>(slices * (tile.matrix + 1) / args.splits);
      }
      return true;
    };
    start_pipeline(pipeline, a, b);
    bool more = find();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (warpgroup == kConsumers) {
      setmaxnreg_dec<kProducerRegisters>();
      if (threadIdx.x % 128 == 0) {
        for (; more; more = find()) {
          const int matrix_a = args.batched_a ? tile.matrix : 0, matrix_b = args.batched_b ? tile.matrix : 0;
          for (int k = begin; k < end; ++k) {
            pipeline.load(a, b, tile.row, tile.column, k * kTileK, matrix_a, matrix_b, rank);
          }
        }
      }
      __syncwarp();
    } else {
      setmaxnreg_inc<kConsumerRegisters>();
      Out out(shared + Mainloop::kBytes, warpgroup, kConsumers);
      for (; more; more = find()) {
        float d[Mainloop::kTileN / 2];
        out.prefetch_bias(args.epilogue, tile.column);
        pipeline.mma(d, end - begin, warpgroup);
        if constexpr (kSplitsK) {
          store_partials(d, args, tile.row + 64 * warpgroup, tile.column, tile.matrix);
          continue;
        }
        out.run(d, args.epilogue, args.tma_store ? c : nullptr, args.tma_store ? pre_activation : nullptr,
                tile.row + 64 * warpgroup, tile.column, tile.matrix);
      }
      out.wait();
    }
    // Other blocks of the cluster may still write to this block's shared memory.
    if constexpr (kBlocks > 1) cluster_sync();
  }

 private:
  // wgmma gives a thread two neighbours in a row and the same two 8 rows below.
  __device__ static __forceinline__ void store_partials(const float (&d)[Mainloop::kTileN / 2],
                                                        const KernelArguments<T>& args, int row, int column,
                                                        int split) {
    const int thread = threadIdx.x % 128, m = args.epilogue.m, n = args.epilogue.n;
    row += thread / 32 * 16 + thread % 32 / 4;
    column += thread % 4 * 2;
    float* to = args.partials + (int64_t{split} * m + row) * n + column;
    const bool pairs = n % 2 == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half, to += int64_t{8} * n) {
      if (row + 8 * half >= m) return;
#pragma unroll
      for (int i = 0; i < Mainloop::kTileN / 8; ++i) {
        const float left = d[4 * i + 2 * half], right = d[4 * i + 2 * half + 1];
        const int rest = n - column - 8 * i;
        if (pairs) {
          if (rest > 0) *reinterpret_cast<float2*>(to + 8 * i) = make_float2(left, right);
        } else {
          if (rest > 0) to[8 * i] = left;
          if (rest > 1) to[8 * i + 1] = right;
        }
      }
    }
  }
};

// ---- Split-K in clusters

// A block's tile and its part of K, which gridDim.z blocks split.
template <class Mainloop>
struct SplitKBlock {
  using T = typename Mainloop::T;
  static constexpr int kN = Mainloop::kTileN;
  static constexpr int kThreads = 128 * Mainloop::kConsumers + 32;
  static_assert(Mainloop::kClusterBlocks == 1, "the blocks of the cluster split K");

  int row, column, matrix, split, splits, warpgroup;

  __device__ __forceinline__ explicit SplitKBlock(const TileOrder& order)
      : split(blockIdx.z), splits(gridDim.z), warpgroup(threadIdx.x / 128) {
    const TileIndex tile = first_element<Mainloop>(order, blockIdx.x, 0);
    row = tile.row;
    column = tile.column;
    matrix = tile.matrix;
  }

  __device__ __forceinline__ bool is_consumer() const { return warpgroup < Mainloop::kConsumers; }

  // d: the partial sums, in consumer warpgroups.
  __device__ __forceinline__ void mma(float (&d)[kN / 2], unsigned char* stages, unsigned char* barriers,
                                      const CUtensorMap* a, const CUtensorMap* b,
                                      const KernelArguments<T>& args) const {
    const int begin = args.tiles_of_k * split / splits, end = args.tiles_of_k * (split + 1) / splits;
    auto pipeline = pipeline_of<Mainloop>(stages, barriers);
    start_pipeline(pipeline, a, b);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (is_consumer()) {
      pipeline.mma(d, end - begin, warpgroup);
    } else {
      if (threadIdx.x % 128 == 0) {
        const int matrix_a = args.batched_a ? matrix : 0, matrix_b = args.batched_b ? matrix : 0;
        for (int k = begin; k < end; ++k) {
          pipeline.load(a, b, row, column, k * kTileK, matrix_a, matrix_b, 0);
        }
      }
      __syncwarp();
    }
  }
};

template <class Mainloop>
struct ClusterSplitK {
  using T = typename Mainloop::T;
  static constexpr int kTileM = Mainloop::kTileM, kN = Mainloop::kTileN;
  using Partials = SplitKPartials<kTileM, kN>;
  static constexpr int kThreads = SplitKBlock<Mainloop>::kThreads;
  static constexpr int kOperandsOrPartials = std::max(Mainloop::kBytes, Partials::kBytes);
  static constexpr int kShared = kOperandsOrPartials + kBarrierBytes;

  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const KernelArguments<T>& args,
                             const TileOrder& order) {
    unsigned char* shared = dynamic_shared();
    const SplitKBlock<Mainloop> block(order);
    float d[kN / 2];
    block.mma(d, shared, shared + kOperandsOrPartials, a, b, args);
    if (block.splits == 1) {
      if (block.is_consumer()) store_tile(d, args, block);
      return;
    }
    __syncthreads();  // the partials overwrite the stages
    Partials partials(shared);
    if (block.is_consumer()) partials.store(d, block.warpgroup);
    cluster_sync();
    reduce_and_store(partials, args, block);
    cluster_sync();  // the others have read this block's partials
  }

 private:
  // Reduces and stores this block's share of the tile, in pieces of four elements.
  __device__ static __forceinline__ void reduce_and_store(const Partials& partials,
                                                          const KernelArguments<T>& args,
                                                          const SplitKBlock<Mainloop>& block) {
    const bool swap = args.swap_ab;
    constexpr int kPieces = kTileM * kN / 4, kBatch = 4;
    const int row = block.row, column = block.column, split = block.split, splits = block.splits;
    const int end = kPieces * (split + 1) / splits;
    // Neighbouring threads store neighbours in c, whose rows are the tile's columns if A and B are swapped.
    const auto row_of = [=](int piece) { return swap ? piece % kTileM : piece / (kN / 4); };
    const auto column_of = [=](int piece) { return (swap ? piece / kTileM : piece % (kN / 4)) * 4; };
    for (int first = kPieces * split / splits + threadIdx.x; first < end; first += kBatch * kThreads) {
      float4 sums[kBatch];  // loaded together, to overlap their latencies
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int piece = first + i * kThreads;
        if (piece < end) {
          sums[i] = partials.reduce(row_of(piece), column_of(piece), splits);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int piece = first + i * kThreads;
        if (piece >= end) continue;
        const int r = row_of(piece), n = column_of(piece);
        float x[4] = {sums[i].x, sums[i].y, sums[i].z, sums[i].w};
        store(x, args, block.matrix, swap ? column + n : row + r, swap ? row + r : column + n);
      }
    }
  }

  // Stores the accumulators of a block that has all of K. wgmma gives a thread two neighbours in a row and
  // the same two 8 rows below. Shifting the accumulators, instead of indexing them, keeps the loop rolled, so
  // that the code of all activations exists once.
  __device__ static __forceinline__ void store_tile(float (&d)[kN / 2], const KernelArguments<T>& args,
                                                    const SplitKBlock<Mainloop>& block) {
    const Epilogue<T>& epilogue = args.epilogue;
    const bool swap = args.swap_ab;
    const int thread = threadIdx.x % 128;
    const int row = block.row + block.warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const auto row_of = [&](int i) { return row + i % 4 / 2 * 8; };
    const auto column_of = [&](int i) { return block.column + i / 4 * 8 + thread % 4 * 2 + i % 2; };
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] += epilogue.bias_at(swap ? row_of(i) : column_of(i));
#pragma unroll 1
    for (int first = 0; first < kN / 2; first += 4) {
      float x[4] = {d[0], d[1], d[2], d[3]};
#pragma unroll
      for (int i = 0; i < kN / 2 - 4; ++i) d[i] = d[i + 4];
      epilogue.finish(x, [&](T* to) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = row_of(i), n = column_of(first + i);
          epilogue.write(to, block.matrix, swap ? n : r, swap ? r : n, x[i]);
        }
      });
    }
  }

  // Stores four values: along a row of c, or down a column if A and B are swapped.
  __device__ static __forceinline__ void store(float (&x)[4], const KernelArguments<T>& args, int matrix,
                                               int row, int column) {
    const int down = args.swap_ab, along = !args.swap_ab;
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] += args.epilogue.bias_at(column + along * e);
    args.epilogue.finish(x, [&](T* to) {
#pragma unroll
      for (int e = 0; e < 4; ++e) args.epilogue.write(to, matrix, row + down * e, column + along * e, x[e]);
    });
  }
};

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_persistent_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                           const __grid_constant__ CUtensorMap c,
                           const __grid_constant__ CUtensorMap pre_activation,
                           const __grid_constant__ KernelArguments<T> args, const TileOrder order) {
  LLTM_HOPPER(Kernel::run(&a, &b, &c, &pre_activation, args, order));
}

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads)
    gemm_cluster_split_k_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                                const __grid_constant__ KernelArguments<T> args, const TileOrder order) {
  LLTM_HOPPER(Kernel::run(&a, &b, args, order));
}

// ---- Copies of operands that TMA cannot address, and of narrow ones that are not K-major

// Copies an operand's lines: the rows of [lines, length] of each matrix.
template <typename T>
struct AlignedCopy {
  const T* from;
  T* to;
  int64_t batch_stride, line_stride, stride, to_line_stride;
  uint32_t lines, length, chunks;  // chunks of 8 elements in a line
  uint32_t total;                  // chunks of all matrices; 0 if there is nothing to copy

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

// ---- Launchers

// A product of TMA operands. If A and B are swapped, b^T @ a^T, whose result is c's transpose.
template <typename T>
struct Problem {
  GlobalTensor a, b;
  int m, n, k, batch;
  bool swap_ab;
  Epilogue<T> epilogue;  // of c itself

  KernelArguments<T> arguments(bool tma_store = false, int splits = 1, float* partials = nullptr) const {
    return {epilogue, tiles_of(k, kTileK), a.batch > 1, b.batch > 1, tma_store, swap_ab, splits, partials};
  }
  GlobalTensor result(const T* data) const {
    const int64_t rows = epilogue.m, columns = epilogue.n;
    return {data, columns, rows, batch, columns, rows * columns};
  }
  template <class Mainloop>
  TileOrder order(int splits = 1) const {
    return {tiles_of(m, Mainloop::kTileM * Mainloop::kClusterM),
            tiles_of(n, Mainloop::kTileN * Mainloop::kClusterN), int64_t{batch} * splits};
  }
};

// clusters: that the device runs at once. splits: of K, whose sums are left in the workspace if there are
// several.
template <class Mainloop, bool kSplitsK = false, typename T>
cudaError_t launch_persistent(const Problem<T>& problem, int64_t clusters, int splits, void* workspace,
                              cudaStream_t stream) {
  using Kernel = PersistentKernel<Mainloop, kSplitsK>;
  CUtensorMap a, b, c = {}, pre_activation = {};
  cudaError_t error = encode_operands<Mainloop>(a, b, problem.a, problem.b);
  const GlobalTensor results = problem.result(problem.epilogue.c),
                     inputs = problem.result(problem.epilogue.pre_activation);
  const bool tma_store = tma_supports(results, sizeof(T)) && tma_supports(inputs, sizeof(T));
  if (error == cudaSuccess && tma_store) error = encode_tensor_map<T>(c, results, 64);
  if (error == cudaSuccess && tma_store && inputs.data) {
    error = encode_tensor_map<T>(pre_activation, inputs, 64);
  }
  const auto kernel = gemm_persistent_kernel<Kernel, T>;
  if (error == cudaSuccess) error = set_max_dynamic_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  constexpr int kBlocks = Mainloop::kClusterBlocks;
  const TileOrder order = problem.template order<Mainloop>(splits);
  clusters = std::min(order.total, clusters);
  return launch_clusters(kernel, dim3(clusters * kBlocks), dim3(kBlocks), Kernel::kThreads, Kernel::kShared,
                         /*programmatic=*/true, stream, a, b, c, pre_activation,
                         problem.arguments(tma_store, splits, static_cast<float*>(workspace)), order);
}

template <class Mainloop, typename T>
cudaError_t launch_cluster_split_k(const Problem<T>& problem, int splits, cudaStream_t stream) {
  using Kernel = ClusterSplitK<Mainloop>;
  CUtensorMap a, b;
  cudaError_t error = encode_operands<Mainloop>(a, b, problem.a, problem.b);
  const auto kernel = gemm_cluster_split_k_kernel<Kernel, T>;
  if (error == cudaSuccess) error = set_max_dynamic_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  const TileOrder order = problem.template order<Mainloop>();
  return launch_clusters(kernel, dim3(order.total, 1, splits), dim3(1, 1, splits), Kernel::kThreads,
                         Kernel::kShared, /*programmatic=*/true, stream, a, b, problem.arguments(), order);
}

// How the operands are copied before the product: not at all, if TMA can address them.
template <typename T>
struct Operand {
  Lines lines;  // after the copy
  AlignedCopy<T> copy;
};

// k_major: whether the operand has to become that.
template <typename T>
Operand<T> operand(const Matrices<T>& x, Lines lines, int64_t rows, int64_t k, int64_t row_stride,
                   int64_t k_stride, int64_t batch, bool k_major) {
  if (lines.aligned && (lines.along_k || !k_major)) return {lines, {}};
  lines.along_k = lines.along_k || k_major;
  const int64_t count = lines.along_k ? rows : k, length = lines.along_k ? k : rows;
  const int64_t chunks = ceil_div(length, 8), total = chunks * count * (x.batch_stride == 0 ? 1 : batch);
  return {lines,
          {x.data, nullptr, x.batch_stride, lines.along_k ? row_stride : k_stride,
           lines.along_k ? k_stride : row_stride, length < 64 ? chunks * 8 : ceil_div(length, 64) * 64,
           static_cast<uint32_t>(count), static_cast<uint32_t>(length), static_cast<uint32_t>(chunks),
           static_cast<uint32_t>(total)}};
}

template <typename T>
struct Operands {
  bool swap;  // the transpose of c is computed
  Operand<T> a, b;

  Operands(const GemmArgs<T>& args, const Choice& choice)
      : swap(choice.kernel == Kernel::kHopperSplitK && args.m <= kFewRows) {
    const bool k_major = choice.kernel == Kernel::kHopperSplitK && kNarrowWidths[choice.tile] < kFewRows;
    a = operand(args.a, lines_of_a(args), args.m, args.k, args.a.row_stride, args.a.column_stride, args.batch,
                k_major && swap);
    b = operand(args.b, lines_of_b(args), args.n, args.k, args.b.column_stride, args.b.row_stride, args.batch,
                k_major && !swap);
  }
  int64_t bytes() const { return (a.copy.elements() + b.copy.elements()) * int64_t{sizeof(T)}; }
};

// Makes the copies at the start of the workspace, and the arguments those of their product. args.workspace
// moves behind them.
template <typename T>
cudaError_t align(GemmArgs<T>& args, Operands<T>& operands, cudaStream_t stream) {
  AlignedCopy<T>&a = operands.a.copy, &b = operands.b.copy;
  const int64_t blocks = ceil_div(a.total, kCopyThreads) + ceil_div(b.total, kCopyThreads);
  if (blocks == 0) return cudaSuccess;
  T* to = static_cast<T*>(args.workspace);
  const auto place = [&](Operand<T>& operand, Matrices<T>& x, int64_t& along_k, int64_t& across) {
    AlignedCopy<T>& copy = operand.copy;
    if (copy.total == 0) return;
    x.data = copy.to = to;
    to += copy.elements();
    if (x.batch_stride != 0) x.batch_stride = copy.lines * copy.to_line_stride;
    along_k = operand.lines.along_k ? 1 : copy.to_line_stride;
    across = operand.lines.along_k ? copy.to_line_stride : 1;
  };
  place(operands.a, args.a, args.a.column_stride, args.a.row_stride);
  place(operands.b, args.b, args.b.row_stride, args.b.column_stride);
  args.workspace = to;
  return launch_kernel(gemm_align_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kCopyThreads), 0,
                       /*programmatic=*/true, stream, a, b);
}

// The operand as TMA sees it: [rows, K], or [K, rows].
template <typename T>
GlobalTensor tensor_of(const Matrices<T>& x, bool along_k, int64_t rows, int64_t k, int64_t row_stride,
                       int64_t k_stride, int64_t batch) {
  const int64_t matrices = x.batch_stride == 0 ? 1 : batch;
  if (along_k) return {x.data, k, rows, matrices, row_stride, x.batch_stride};
  return {x.data, rows, k, matrices, k_stride, x.batch_stride};
}

// How many clusters of so many blocks run at once.
inline int64_t clusters_of(const DeviceInfo& device, int blocks) {
  return device.cluster_multiprocessors[blocks] / blocks;
}

// The place of a tile in kHopperTiles is its case here.
template <typename T, bool kMnMajorA, bool kMnMajorB>
cudaError_t launch_tiles(const Problem<T>& problem, const Choice& choice, const DeviceInfo& device,
                         void* workspace, cudaStream_t stream) {
  const auto run = [&](auto mainloop) {
    using M = decltype(mainloop);
    return launch_persistent<M>(problem, clusters_of(device, M::kClusterBlocks), 1, nullptr, stream);
  };
  switch (choice.tile) {
    case 0:
      return run(Mainloop<T, 64, 64, 8, kMnMajorA, kMnMajorB>());
    case 1: {
      using M = Mainloop<T, 64, 128, 8, kMnMajorA, kMnMajorB>;
      if (choice.splits == 1) return run(M());
      return launch_persistent<M, true>(problem, clusters_of(device, 1), choice.splits, workspace, stream);
    }
    case 2:
      return run(Mainloop<T, 128, 128, 6, kMnMajorA, kMnMajorB>());
    case 3:
      return run(Mainloop<T, 128, 192, 4, kMnMajorA, kMnMajorB>());
    default:
      return run(Mainloop<T, 128, 256, 4, kMnMajorA, kMnMajorB, 2>());
  }
}

// The few rows or columns are the tile's columns. A multiprocessor has several blocks, each with many loads
// in flight.
template <typename T, bool kMnMajorA, bool kMnMajorB>
cudaError_t launch_in_clusters(const Problem<T>& problem, const Choice& choice, cudaStream_t stream) {
  if constexpr (!kMnMajorB) {
    if (choice.tile == 0)
      return launch_cluster_split_k<Mainloop<T, 64, 16, 6, kMnMajorA, false>>(problem, choice.splits, stream);
    if (choice.tile == 1)
      return launch_cluster_split_k<Mainloop<T, 64, 32, 6, kMnMajorA, false>>(problem, choice.splits, stream);
  }
  return launch_cluster_split_k<Mainloop<T, 64, 64, 6, kMnMajorA, kMnMajorB>>(problem, choice.splits, stream);
}

}  // namespace hopper

template <typename T>
int64_t gemm_hopper_workspace_bytes(const GemmArgs<T>& args, const Choice& choice) {
  const bool leaves_sums = choice.kernel == Kernel::kHopper;
  return hopper::Operands<T>(args, choice).bytes() +
         (leaves_sums ? partial_sum_bytes(args, choice.splits) : 0);
}

template <typename T>
cudaError_t gemm_hopper(const GemmArgs<T>& given, const Choice& choice, const DeviceInfo& device,
                        cudaStream_t stream) {
  using namespace hopper;
  GemmArgs<T> args = given;
  Operands<T> operands(args, choice);
  const cudaError_t error = align(args, operands, stream);
  if (error != cudaSuccess) return error;
  GlobalTensor a = tensor_of(args.a, operands.a.lines.along_k, args.m, args.k, args.a.row_stride,
                             args.a.column_stride, args.batch),
               b = tensor_of(args.b, operands.b.lines.along_k, args.n, args.k, args.b.column_stride,
                             args.b.row_stride, args.batch);
  bool mn_major_a = !operands.a.lines.along_k, mn_major_b = !operands.b.lines.along_k;
  int m = static_cast<int>(args.m), n = static_cast<int>(args.n);
  const Epilogue<T> epilogue = {args.bias, args.bias_stride, args.c, args.pre_activation, m,
                                n,         args.activation};
  if (operands.swap) std::swap(a, b), std::swap(m, n), std::swap(mn_major_a, mn_major_b);
  const Problem<T> problem = {
      a, b, m, n, static_cast<int>(args.k), static_cast<int>(args.batch), operands.swap, epilogue};
  const auto run = [&](auto a_mn_major, auto b_mn_major) {
    constexpr bool kA = decltype(a_mn_major)::value, kB = decltype(b_mn_major)::value;
    if (choice.kernel == Kernel::kHopperSplitK) return launch_in_clusters<T, kA, kB>(problem, choice, stream);
    return launch_tiles<T, kA, kB>(problem, choice, device, args.workspace, stream);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  const cudaError_t launched = mn_major_a ? (mn_major_b ? run(Yes(), Yes()) : run(Yes(), No()))
                                          : (mn_major_b ? run(No(), Yes()) : run(No(), No()));
  if (launched != cudaSuccess || choice.kernel != Kernel::kHopper || choice.splits == 1) return launched;
  return launch_reduce(args, choice.splits, /*programmatic=*/true, stream);
}

#define INSTANTIATE(T)                                                             \
  template int64_t gemm_hopper_workspace_bytes(const GemmArgs<T>&, const Choice&); \
  template cudaError_t gemm_hopper(const GemmArgs<T>&, const Choice&, const DeviceInfo&, cudaStream_t);
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)

}  // namespace lltm_ext
