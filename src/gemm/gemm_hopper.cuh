// gemm in half types on Hopper. A producer warp loads tiles by TMA, one or two consumer warpgroups multiply
// them by wgmma, 64 rows of c each, and TMA stores the results.
//
// Three kernels:
// - Persistent: a block computes many tiles of c, and loads the next one's operands during the epilogue.
//   Clusters of two blocks share tiles of b by multicast.
// - Cluster split-K, for few tiles: the blocks of a cluster split K, and add their partial sums in a fixed
//   order through distributed shared memory.
// - Workspace split-K, for few tiles and a long K: more blocks than a cluster has split K. They leave partial
//   sums in global memory, and a second kernel adds them.
#pragma once

#include <algorithm>

#include "common/hopper/launch.h"
#include "common/hopper/split.cuh"
#include "gemm/gemm_hopper_epilogue.cuh"
#include "gemm/gemm_hopper_mainloop.cuh"

namespace lltm_ext {
namespace hopper {

template <typename T>
struct KernelArguments {
  Epilogue<T> epilogue;
  int tiles_of_k;
  bool batched_a, batched_b;  // else one matrix serves the whole batch
  bool tma_store;             // whether TMA can address the results
};

// ---- persistent

template <class Mainloop>
struct PersistentKernel {
  using T = typename Mainloop::T;
  using Out = EpilogueStore<T, Mainloop::kTileN>;
  static constexpr int kClusterM = Mainloop::kClusterM, kConsumers = Mainloop::kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kOperandsAndOut = Mainloop::kBytes + Out::bytes(kConsumers);
  static constexpr int kShared = kOperandsAndOut + kBarrierBytes;

  // The scheduler's rows are of kClusterM tiles.
  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const CUtensorMap* c,
                             const CUtensorMap* pre_activation, const KernelArguments<T>& args,
                             const TileScheduler& scheduler) {
    unsigned char* shared = dynamic_shared();
    auto pipeline = pipeline_of<Mainloop>(shared, shared + kOperandsAndOut);
    const uint32_t rank = kClusterM > 1 ? cluster_rank() : 0;
    const int warpgroup = threadIdx.x / 128;
    const int first = blockIdx.x / kClusterM, step = gridDim.x / kClusterM;
    const int total = static_cast<int>(scheduler.total());
    start_pipeline(pipeline, a, b);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (warpgroup == kConsumers) {
      setmaxnreg_dec<kProducerRegisters>();
      if (threadIdx.x % 128 == 0) {
        for (int i = first; i < total; i += step) {
          const TileIndex tile = scheduler.first_element<Mainloop>(i, rank);
          const int matrix_a = args.batched_a ? tile.matrix : 0, matrix_b = args.batched_b ? tile.matrix : 0;
          for (int k = 0; k < args.tiles_of_k; ++k) {
            pipeline.load(a, b, tile.row, tile.column, k * kTileK, matrix_a, matrix_b, rank);
          }
        }
      }
      __syncwarp();
    } else {
      setmaxnreg_inc<kConsumerRegisters>();
      Out out(shared + Mainloop::kBytes, warpgroup, kConsumers);
      for (int i = first; i < total; i += step) {
        const TileIndex tile = scheduler.first_element<Mainloop>(i, rank);
        float d[Mainloop::kTileN / 2];
        out.prefetch_bias(args.epilogue, tile.column);
        pipeline.mma(d, args.tiles_of_k, warpgroup);
        out.run(d, args.epilogue, args.tma_store ? c : nullptr, args.tma_store ? pre_activation : nullptr,
                tile.row + 64 * warpgroup, tile.column, tile.matrix);
      }
      out.wait();
    }
    // Other blocks of the cluster may still write to this block's shared memory.
    if constexpr (kClusterM > 1) cluster_sync();
  }
};

// ---- split-K

// A block's tile and its part of K, which gridDim.z blocks split.
template <class Mainloop>
struct SplitKBlock {
  using T = typename Mainloop::T;
  static constexpr int kClusterM = Mainloop::kClusterM, kN = Mainloop::kTileN;
  static constexpr int kThreads = 128 * Mainloop::kConsumers + 32;

  int row, column, matrix, rank, split, splits, warpgroup;

  __device__ __forceinline__ explicit SplitKBlock(const TileScheduler& scheduler)
      : rank(blockIdx.x % kClusterM), split(blockIdx.z), splits(gridDim.z), warpgroup(threadIdx.x / 128) {
    const TileIndex tile = scheduler.first_element<Mainloop>(blockIdx.x / kClusterM, rank);
    row = tile.row;
    column = tile.column;
    matrix = tile.matrix;
  }

  __device__ __forceinline__ bool is_consumer() const { return warpgroup < Mainloop::kConsumers; }

  // d: the partial sums, in consumer warpgroups.
  __device__ __forceinline__ void mma(float (&d)[kN / 2], unsigned char* stages, unsigned char* barriers,
                                      const CUtensorMap* a, const CUtensorMap* b,
                                      const KernelArguments<T>& args) const {
    auto pipeline = pipeline_of<Mainloop>(stages, barriers);
    start_pipeline(pipeline, a, b);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int begin = static_cast<int>(int64_t{args.tiles_of_k} * split / splits);
    const int end = static_cast<int>(int64_t{args.tiles_of_k} * (split + 1) / splits);
    if (is_consumer()) {
      pipeline.mma(d, end - begin, warpgroup);
    } else {
      if (threadIdx.x % 128 == 0) {
        const int matrix_a = args.batched_a ? matrix : 0, matrix_b = args.batched_b ? matrix : 0;
        for (int k = begin; k < end; ++k) {
          pipeline.load(a, b, row, column, k * kTileK, matrix_a, matrix_b, rank);
        }
      }
      __syncwarp();
    }
  }
};

// kSwapAB: a and b are each other's transposes, so the tile is of c's transpose: for an a of few rows.
template <class Mainloop, bool kSwapAB>
struct ClusterSplitK {
  using T = typename Mainloop::T;
  static constexpr int kTileM = Mainloop::kTileM, kN = Mainloop::kTileN;
  using Partials = SplitKPartials<kTileM, kN>;
  static_assert(Mainloop::kClusterM == 1, "the blocks of the cluster split K");
  static constexpr int kThreads = SplitKBlock<Mainloop>::kThreads;
  static constexpr int kOperandsOrPartials = std::max(Mainloop::kBytes, Partials::kBytes);
  static constexpr int kShared = kOperandsOrPartials + kBarrierBytes;

  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const KernelArguments<T>& args,
                             const TileScheduler& scheduler) {
    unsigned char* shared = dynamic_shared();
    const SplitKBlock<Mainloop> block(scheduler);
    float d[kN / 2];
    block.mma(d, shared, shared + kOperandsOrPartials, a, b, args);
    if (block.splits == 1) {
      if (block.is_consumer()) store_tile(d, args.epilogue, block);
      return;
    }
    __syncthreads();  // the partials overwrite the stages
    Partials partials(shared);
    if (block.is_consumer()) partials.store(d, block.warpgroup);
    cluster_sync();
    reduce_and_store(partials, args.epilogue, block);
    cluster_sync();  // the others have read this block's partials
  }

 private:
  // Reduces and stores this block's share of the tile, in pieces of four elements.
  __device__ static __forceinline__ void reduce_and_store(const Partials& partials,
                                                          const Epilogue<T>& epilogue,
                                                          const SplitKBlock<Mainloop>& block) {
    constexpr int kPieces = kTileM * kN / 4, kBatch = 4;
    const int row = block.row, column = block.column, split = block.split, splits = block.splits;
    const int end = kPieces * (split + 1) / splits;
    // Neighbouring threads store neighbours in c, whose rows are the tile's columns if kSwapAB.
    const auto row_of = [](int piece) { return kSwapAB ? piece % kTileM : piece / (kN / 4); };
    const auto column_of = [](int piece) { return (kSwapAB ? piece / kTileM : piece % (kN / 4)) * 4; };
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
        store(x, epilogue, block.matrix, kSwapAB ? column + n : row + r, kSwapAB ? row + r : column + n);
      }
    }
  }

  // Stores the accumulators of a block that has all of K. wgmma gives a thread two neighbours in a row and
  // the same two 8 rows below. Shifting the accumulators, instead of indexing them, keeps the loop rolled, so
  // that the code of all activations exists once.
  __device__ static __forceinline__ void store_tile(float (&d)[kN / 2], const Epilogue<T>& epilogue,
                                                    const SplitKBlock<Mainloop>& block) {
    const int thread = threadIdx.x % 128;
    const int row = block.row + block.warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const auto row_of = [&](int i) { return row + i % 4 / 2 * 8; };
    const auto column_of = [&](int i) { return block.column + i / 4 * 8 + thread % 4 * 2 + i % 2; };
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] += epilogue.bias_at(kSwapAB ? row_of(i) : column_of(i));
#pragma unroll 1
    for (int first = 0; first < kN / 2; first += 4) {
      float x[4] = {d[0], d[1], d[2], d[3]};
#pragma unroll
      for (int i = 0; i < kN / 2 - 4; ++i) d[i] = d[i + 4];
      epilogue.finish(x, [&](T* to) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = row_of(i), n = column_of(first + i);
          epilogue.write(to, block.matrix, kSwapAB ? n : r, kSwapAB ? r : n, x[i]);
        }
      });
    }
  }

  // Stores four values: along a row of c, or down a column if kSwapAB.
  __device__ static __forceinline__ void store(float (&x)[4], const Epilogue<T>& epilogue, int matrix,
                                               int row, int column) {
    constexpr int kDown = kSwapAB, kAlong = !kSwapAB;
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] += epilogue.bias_at(column + kAlong * e);
    epilogue.finish(x, [&](T* to) {
#pragma unroll
      for (int e = 0; e < 4; ++e) epilogue.write(to, matrix, row + kDown * e, column + kAlong * e, x[e]);
    });
  }
};

// partials [splits, tiles, pieces]: a piece is four accumulators of one thread, in the order in which threads
// hold them.
template <class Mainloop>
struct WorkspaceSplitK {
  using T = typename Mainloop::T;
  static constexpr int kN = Mainloop::kTileN, kClusterM = Mainloop::kClusterM;
  static constexpr int kThreads = SplitKBlock<Mainloop>::kThreads;
  static constexpr int kShared = Mainloop::kBytes + kBarrierBytes;
  static constexpr int kPerWarpgroup = 64 * kN / 4, kPieces = Mainloop::kConsumers * kPerWarpgroup;

  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const KernelArguments<T>& args,
                             const TileScheduler& scheduler, float4* partials) {
    unsigned char* shared = dynamic_shared();
    const SplitKBlock<Mainloop> block(scheduler);
    float d[kN / 2];
    block.mma(d, shared, shared + Mainloop::kBytes, a, b, args);
    if (block.is_consumer()) {
      float4* to = partials + (int64_t{blockIdx.z} * gridDim.x + blockIdx.x) * kPieces + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        to[block.warpgroup * kPerWarpgroup + i * 128] =
            make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
      }
    }
    // Other blocks of the cluster may still arrive at this block's barriers.
    if constexpr (kClusterM > 1) cluster_sync();
  }

  // Four lanes share the splits of a piece, and each finishes one of its four sums.
  static constexpr int kReduceThreads = 256, kSharers = 4, kPiecesPerBlock = kReduceThreads / kSharers;

  __device__ static void reduce(const float4* partials, const Epilogue<T>& epilogue,
                                const TileScheduler& scheduler, int splits) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    constexpr int kPiecesPerWarp = 32 / kSharers;
    const int lane = threadIdx.x % 32, sharer = lane / kPiecesPerWarp;
    const int64_t piece =
        int64_t{blockIdx.x} * kPiecesPerBlock + threadIdx.x / 32 * kPiecesPerWarp + lane % kPiecesPerWarp;
    const int64_t pieces = scheduler.total() * kClusterM * kPieces;
    constexpr int kBatch = 8;  // loaded together, to overlap their latencies
    float4 sum = {};
    for (int first = sharer; first < splits; first += kBatch * kSharers) {
      float4 found[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int split = first + i * kSharers;
        if (split < splits) found[i] = partials[split * pieces + piece];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        sum.x += found[i].x, sum.y += found[i].y, sum.z += found[i].z, sum.w += found[i].w;
      }
    }
#pragma unroll
    for (int distance = kPiecesPerWarp; distance < 32; distance *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, distance);
      sum.y += __shfl_xor_sync(~0u, sum.y, distance);
      sum.z += __shfl_xor_sync(~0u, sum.z, distance);
      sum.w += __shfl_xor_sync(~0u, sum.w, distance);
    }
    const int64_t block = piece / kPieces;
    const TileIndex tile = scheduler.at(block / kClusterM);
    const int in_tile = static_cast<int>(piece % kPieces), in_warpgroup = in_tile % kPerWarpgroup;
    const int thread = in_warpgroup % 128;
    // wgmma's layout: two neighbours in a row, the same two 8 rows below.
    const int row = (tile.row * kClusterM + static_cast<int>(block % kClusterM)) * Mainloop::kTileM +
                    in_tile / kPerWarpgroup * 64 + thread / 32 * 16 + thread % 32 / 4 + sharer / 2 * 8;
    const int column = tile.column * kN + in_warpgroup / 128 * 8 + thread % 4 * 2 + sharer % 2;
    float x[1] = {sharer == 0 ? sum.x : sharer == 1 ? sum.y : sharer == 2 ? sum.z : sum.w};
    x[0] += epilogue.bias_at(column);
    epilogue.finish(x, [&](T* to) { epilogue.write(to, tile.matrix, row, column, x[0]); });
  }
};

// ---- kernels

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_persistent_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                           const __grid_constant__ CUtensorMap c,
                           const __grid_constant__ CUtensorMap pre_activation,
                           const __grid_constant__ KernelArguments<T> args, const TileScheduler scheduler) {
  LLTM_HOPPER(Kernel::run(&a, &b, &c, &pre_activation, args, scheduler));
}

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads)
    gemm_cluster_split_k_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                                const __grid_constant__ KernelArguments<T> args,
                                const TileScheduler scheduler) {
  LLTM_HOPPER(Kernel::run(&a, &b, args, scheduler));
}

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads)
    gemm_workspace_split_k_kernel(const __grid_constant__ CUtensorMap a,
                                  const __grid_constant__ CUtensorMap b,
                                  const __grid_constant__ KernelArguments<T> args,
                                  const TileScheduler scheduler, float4* partials) {
  LLTM_HOPPER(Kernel::run(&a, &b, args, scheduler, partials));
}

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kReduceThreads)
    gemm_split_k_reduce_kernel(const float4* partials, const __grid_constant__ Epilogue<T> epilogue,
                               const TileScheduler scheduler, int splits) {
  LLTM_HOPPER(Kernel::reduce(partials, epilogue, scheduler, splits));
}

// ---- launchers

// A product of TMA operands. If A and B are swapped, b^T @ a^T, whose result is c's transpose.
template <typename T>
struct Problem {
  GlobalTensor a, b;
  int m, n, k, batch;
  Epilogue<T> epilogue;  // of c itself
  void* workspace;       // of workspace split-K

  KernelArguments<T> arguments(bool tma_store = false) const {
    return {epilogue, tiles_of(k, kTileK), a.batch > 1, b.batch > 1, tma_store};
  }
  GlobalTensor result(const T* data) const {
    const int64_t rows = epilogue.m, columns = epilogue.n;
    return {data, columns, rows, batch, columns, rows * columns};
  }
  template <class Mainloop>
  TileScheduler scheduler() const {
    return {tiles_of(m, Mainloop::kTileM * Mainloop::kClusterM), tiles_of(n, Mainloop::kTileN), batch};
  }
};

template <class Mainloop, typename T>
cudaError_t launch_persistent(const Problem<T>& problem, int multiprocessors, cudaStream_t stream) {
  using Kernel = PersistentKernel<Mainloop>;
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
  constexpr int kClusterM = Mainloop::kClusterM;
  const TileScheduler scheduler = problem.template scheduler<Mainloop>();
  const int64_t clusters = std::min<int64_t>(scheduler.total(), multiprocessors / kClusterM);
  return launch_clusters(kernel, dim3(clusters * kClusterM), dim3(kClusterM), Kernel::kThreads,
                         Kernel::kShared, /*programmatic=*/true, stream, a, b, c, pre_activation,
                         problem.arguments(tma_store), scheduler);
}

template <class Mainloop, bool kSwapAB, typename T>
cudaError_t launch_cluster_split_k(const Problem<T>& problem, int splits, cudaStream_t stream) {
  using Kernel = ClusterSplitK<Mainloop, kSwapAB>;
  CUtensorMap a, b;
  cudaError_t error = encode_operands<Mainloop>(a, b, problem.a, problem.b);
  const auto kernel = gemm_cluster_split_k_kernel<Kernel, T>;
  if (error == cudaSuccess) error = set_max_dynamic_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  const TileScheduler scheduler = problem.template scheduler<Mainloop>();
  return launch_clusters(kernel, dim3(scheduler.total(), 1, splits), dim3(1, 1, splits), Kernel::kThreads,
                         Kernel::kShared, /*programmatic=*/true, stream, a, b, problem.arguments(),
                         scheduler);
}

template <class Mainloop>
int64_t workspace_split_k_bytes(int64_t m, int64_t n, int64_t batch, int splits) {
  constexpr int kRows = Mainloop::kTileM * Mainloop::kClusterM, kColumns = Mainloop::kTileN;
  return int64_t{tiles_of(m, kRows)} * kRows * tiles_of(n, kColumns) * kColumns * batch * splits *
         sizeof(float);
}

template <class Mainloop, typename T>
cudaError_t launch_workspace_split_k(const Problem<T>& problem, int splits, cudaStream_t stream) {
  using Kernel = WorkspaceSplitK<Mainloop>;
  CUtensorMap a, b;
  cudaError_t error = encode_operands<Mainloop>(a, b, problem.a, problem.b);
  const auto kernel = gemm_workspace_split_k_kernel<Kernel, T>;
  if (error == cudaSuccess) error = set_max_dynamic_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  const TileScheduler scheduler = problem.template scheduler<Mainloop>();
  const int64_t tiles = scheduler.total() * Mainloop::kClusterM;
  float4* const partials = static_cast<float4*>(problem.workspace);
  error = launch_clusters(kernel, dim3(tiles, 1, splits), dim3(Mainloop::kClusterM), Kernel::kThreads,
                          Kernel::kShared, /*programmatic=*/true, stream, a, b, problem.arguments(),
                          scheduler, partials);
  if (error != cudaSuccess) return error;
  return launch_clusters(gemm_split_k_reduce_kernel<Kernel, T>,
                         dim3(tiles * Kernel::kPieces / Kernel::kPiecesPerBlock), dim3(1),
                         Kernel::kReduceThreads, 0, /*programmatic=*/true, stream,
                         static_cast<const float4*>(partials), problem.epilogue, scheduler, splits);
}

}  // namespace hopper
}  // namespace lltm_ext
