// gemm in half types on Hopper. A producer warp loads tiles by TMA, one or two consumer warpgroups multiply
// them by wgmma, 64 rows of c each, and TMA stores the results.
//
// Two kernels:
// - Persistent: a block computes many tiles of c, and loads the next one's operands during the epilogue.
//   Clusters of two or four blocks share operands by multicast. Where the tiles would leave multiprocessors
//   idle in the last round, its blocks divide K among them (gemm_hopper_stream_k.cuh). Where there are few
//   tiles, K is split: blocks leave partial sums in the workspace (gemm_split_k.cuh).
// - Cluster split-K, for few tiles: the blocks of a cluster split K, and add their partial sums in a fixed
//   order through distributed shared memory.
#pragma once

#include <algorithm>

#include "common/hopper/launch.h"
#include "common/hopper/split.cuh"
#include "gemm/gemm_hopper_epilogue.cuh"
#include "gemm/gemm_hopper_mainloop.cuh"
#include "gemm/gemm_hopper_stream_k.cuh"

namespace lltm_ext {
namespace hopper {

template <typename T>
struct KernelArguments {
  Epilogue<T> epilogue;
  int tiles_of_k;
  bool batched_a, batched_b;  // else one matrix serves the whole batch
  bool tma_store;             // whether TMA can address the results
  bool swap_ab;               // a and b are each other's transposes, so a tile is of c's transpose
  StreamK stream_k;
  int splits;       // of K, of one product: the matrices of c are their sums
  float* partials;  // [splits, m, n], if there are several
};

// ---- persistent

// kSplitsK: a kernel of its own, because the others take 0.2 us longer with the code for partial sums in
// them.
template <class Mainloop, bool kSplitsK>
struct PersistentKernel {
  using T = typename Mainloop::T;
  using Out = EpilogueStore<T, Mainloop::kTileN>;
  static constexpr int kBlocks = Mainloop::kClusterBlocks, kConsumers = Mainloop::kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Small tiles and single blocks need not.
  static constexpr bool kDividesK = !kSplitsK && kConsumers == 2 && Mainloop::kTileN >= 128 && kBlocks > 1;
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
    StreamKParts<kDividesK> parts(args.stream_k, static_cast<int>(order.total), args.tiles_of_k, cluster,
                                  clusters);
    TileIndex tile;
    const auto next = [&] {
      if (!parts.next()) return false;
      tile = first_element<Mainloop>(order, parts.tile, rank);
      if constexpr (kSplitsK) {
        const int64_t slices = args.tiles_of_k;
        parts.begin = static_cast<int>(slices * tile.matrix / args.splits);
        parts.end = static_cast<int>(slices * (tile.matrix + 1) / args.splits);
      }
      return true;
    };
    start_pipeline(pipeline, a, b);
    bool more = next();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (warpgroup == kConsumers) {
      setmaxnreg_dec<kProducerRegisters>();
      if (threadIdx.x % 128 == 0) {
        for (; more; more = next()) {
          const int matrix_a = args.batched_a ? tile.matrix : 0, matrix_b = args.batched_b ? tile.matrix : 0;
          for (int k = parts.begin; k < parts.end; ++k) {
            pipeline.load(a, b, tile.row, tile.column, k * kTileK, matrix_a, matrix_b, rank);
          }
        }
      }
      __syncwarp();
    } else {
      setmaxnreg_inc<kConsumerRegisters>();
      Out out(shared + Mainloop::kBytes, warpgroup, kConsumers);
      for (; more; more = next()) {
        float d[Mainloop::kTileN / 2];
        out.prefetch_bias(args.epilogue, tile.column);
        pipeline.mma(d, parts.end - parts.begin, warpgroup);
        if constexpr (kSplitsK) {
          store_partials(d, args, tile.row + 64 * warpgroup, tile.column, tile.matrix);
          continue;
        }
        if constexpr (kDividesK) {
          const StreamKSums<Mainloop::kTileN / 2> sums(args.stream_k, kBlocks * kConsumers,
                                                       rank * kConsumers + warpgroup);
          const int after = parts.clusters_after(cluster);
          for (int step = 1; !(after & step) && parts.is_shared_with(cluster - step); step *= 2) {
            sums.add(d, cluster - step, warpgroup);
          }
          if (after > 0) {
            sums.store(d, cluster, warpgroup);
            continue;
          }
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

// ---- split-K in clusters

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

// ---- kernels

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

// ---- launchers

// A product of TMA operands. If A and B are swapped, b^T @ a^T, whose result is c's transpose.
template <typename T>
struct Problem {
  GlobalTensor a, b;
  int m, n, k, batch;
  bool swap_ab;
  Epilogue<T> epilogue;  // of c itself

  KernelArguments<T> arguments(bool tma_store = false, const StreamK& stream_k = {}, int splits = 1,
                               float* partials = nullptr) const {
    return {epilogue, tiles_of(k, kTileK), a.batch > 1, b.batch > 1, tma_store, swap_ab, stream_k, splits,
            partials};
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

// The workspace is for partial sums if K is split, or for stream-K, or there is none.
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
  StreamK stream_k = {};
  if (workspace && !kSplitsK) {
    const StreamKShape shape = {clusters, kBlocks * Mainloop::kConsumers, Mainloop::kTileN / 2};
    stream_k = shape.arguments(order.total, workspace);
  } else {
    clusters = std::min(order.total, clusters);
  }
  return launch_clusters(kernel, dim3(clusters * kBlocks), dim3(kBlocks), Kernel::kThreads, Kernel::kShared,
                         /*programmatic=*/true, stream, a, b, c, pre_activation,
                         problem.arguments(tma_store, stream_k, splits, static_cast<float*>(workspace)),
                         order);
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

}  // namespace hopper
}  // namespace lltm_ext
