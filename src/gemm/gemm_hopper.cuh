// gemm in half types on Hopper: the copy engine (TMA) brings tiles to shared memory, warpgroups multiply them
// there (wgmma), the copy engine takes results out. A block has one or two warpgroups that multiply, 64 rows
// of c each, and a warp beside them that fetches.
//
// Two kernels. In `persistent`, a block works through many tiles of c, and fetches those of the next while
// the last one leaves; clusters of two blocks share b's tiles. In `split`, for a c of few tiles, the blocks
// of a cluster share out K, and sum their parts in a fixed order through each other's shared memory.
#pragma once

#include "common/hopper/pipeline.cuh"
#include "common/hopper/split.cuh"
#include "gemm/hopper_epilogue.cuh"
#include "gemm/hopper_schedule.cuh"

namespace lltm_ext {
namespace hopper {

constexpr int kFetcherRegisters = 40, kMultiplierRegisters = 232;

template <typename T>
struct Problem {
  Epilogue<T> epilogue;
  int tiles_of_k;
  bool batched_a, batched_b;  // else the one matrix serves all of the batch
  bool by_engine;             // whether results can leave that way
};

template <class Operands>
struct Persistent {
  using T = typename Operands::T;
  using Out = Store<T, Operands::kTileN>;
  static constexpr int kTileM = Operands::kTileM, kConsumers = Operands::kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kOperandsAndOut = Operands::kBytes + Out::bytes(kConsumers);
  static constexpr int kShared = kOperandsAndOut + kBarrierBytes;

  // rows of the schedule are of kShare tiles, one a block of the cluster.
  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const CUtensorMap* c,
                             const CUtensorMap* before, const Problem<T>& problem, const Schedule& schedule) {
    unsigned char* shared = aligned_shared();
    Pipeline<Operands> pipeline(
        shared, *reinterpret_cast<typename Pipeline<Operands>::Barriers*>(shared + kOperandsAndOut));
    const uint32_t rank = Operands::kShare > 1 ? cluster_rank() : 0;
    const int warpgroup = threadIdx.x / 128;
    const int64_t first = blockIdx.x / Operands::kShare, step = gridDim.x / Operands::kShare;
    if (threadIdx.x == 0) {
      pipeline.init();
      prefetch_map(a);
      prefetch_map(b);
    }
    if constexpr (Operands::kShare > 1) cluster_sync();
    __syncthreads();

    const auto place = [&](int64_t i) {
      Tile tile = schedule.at(i);
      tile.row = (tile.row * Operands::kShare + rank) * kTileM;
      tile.column *= Operands::kTileN;
      return tile;
    };
    wait_for_launch_before();
    let_next_launch_begin();
    if (warpgroup == kConsumers) {
      give_registers<kFetcherRegisters>();
      if (threadIdx.x % 128 == 0) {
        for (int64_t i = first; i < schedule.total(); i += step) {
          const Tile tile = place(i);
          const int matrix_a = problem.batched_a ? tile.matrix : 0,
                    matrix_b = problem.batched_b ? tile.matrix : 0;
          for (int k = 0; k < problem.tiles_of_k; ++k) {
            pipeline.fetch(a, b, tile.row, tile.column, k * kTileK, matrix_a, matrix_b, rank);
          }
        }
      }
      __syncwarp();
    } else {
      take_registers<kMultiplierRegisters>();
      Out out(shared + Operands::kBytes, warpgroup, kConsumers);
      for (int64_t i = first; i < schedule.total(); i += step) {
        const Tile tile = place(i);
        float d[Operands::kTileN / 2];
        out.fetch_bias(problem.epilogue, tile.column);
        pipeline.multiply(d, problem.tiles_of_k, warpgroup);
        out.run(d, problem.epilogue, problem.by_engine ? c : nullptr, problem.by_engine ? before : nullptr,
                tile.row + 64 * warpgroup, tile.column, tile.matrix);
      }
      out.end();
    }
    // Others of the cluster may still send to this block's shared memory.
    if constexpr (Operands::kShare > 1) cluster_sync();
  }
};

// Each block of a cluster of `gridDim.z` has a part of K. kSwap: a and b stand for each other's transposes,
// so that the tile is of c's transpose: for an a of few rows. One warp fetches.
template <class Operands, bool kSwap>
struct Split {
  using T = typename Operands::T;
  static constexpr int kTileM = Operands::kTileM, kN = Operands::kTileN;
  using Sums = Parts<kTileM, kN>;
  static constexpr int kThreads = 128 * Operands::kConsumers + 32;
  static constexpr int kOperandsOrSums = std::max(Operands::kBytes, Sums::kBytes);
  static constexpr int kShared = kOperandsOrSums + kBarrierBytes;

  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const Problem<T>& problem,
                             const Schedule& schedule) {
    unsigned char* shared = aligned_shared();
    Pipeline<Operands> pipeline(
        shared, *reinterpret_cast<typename Pipeline<Operands>::Barriers*>(shared + kOperandsOrSums));
    if (threadIdx.x == 0) {
      pipeline.init();
      prefetch_map(a);
      prefetch_map(b);
    }
    __syncthreads();
    wait_for_launch_before();
    let_next_launch_begin();

    const int parts = gridDim.z, part = blockIdx.z;
    const int begin = static_cast<int>(int64_t{problem.tiles_of_k} * part / parts);
    const int end = static_cast<int>(int64_t{problem.tiles_of_k} * (part + 1) / parts);
    const Tile tile = schedule.at(blockIdx.x);
    const int row = tile.row * kTileM, column = tile.column * kN, warpgroup = threadIdx.x / 128;
    float d[kN / 2];
    if (warpgroup == Operands::kConsumers) {
      if (threadIdx.x % 128 == 0) {
        const int matrix_a = problem.batched_a ? tile.matrix : 0,
                  matrix_b = problem.batched_b ? tile.matrix : 0;
        for (int k = begin; k < end; ++k) {
          pipeline.fetch(a, b, row, column, k * kTileK, matrix_a, matrix_b, 0);
        }
      }
      __syncwarp();
    } else {
      pipeline.multiply(d, end - begin, warpgroup);
    }
    __syncthreads();  // nobody multiplies from the stages any more: the parts take their place
    Sums sums(shared);
    if (warpgroup < Operands::kConsumers) sums.write(d, warpgroup);
    cluster_sync();
    finish(sums, problem.epilogue, row, column, tile.matrix, part, parts);
    cluster_sync();  // the others have read this block's part
  }

 private:
  // This block's share of the tile's pieces of four: the sums of all blocks' parts, finished.
  __device__ static __forceinline__ void finish(const Sums& sums, const Epilogue<T>& epilogue, int row,
                                                int column, int matrix, int part, int parts) {
    constexpr int kPieces = kTileM * kN / 4, kBatch = 4;
    const int end = kPieces * (part + 1) / parts;
    // Neighbours in c, whose rows are the tile's columns if it is of the transpose, go to neighbours.
    const auto row_of = [](int piece) { return kSwap ? piece % kTileM : piece / (kN / 4); };
    const auto column_of = [](int piece) { return (kSwap ? piece / kTileM : piece % (kN / 4)) * 4; };
    for (int first = kPieces * part / parts + threadIdx.x; first < end; first += kBatch * kThreads) {
      float4 found[kBatch];  // all on their way at a time
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int piece = first + i * kThreads;
        if (piece < end) found[i] = sums.sum(row_of(piece), column_of(piece), parts);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int piece = first + i * kThreads;
        if (piece >= end) continue;
        const int r = row_of(piece), n = column_of(piece);
        float x[4] = {found[i].x, found[i].y, found[i].z, found[i].w};
        leave(x, epilogue, matrix, kSwap ? column + n : row + r, kSwap ? row + r : column + n);
      }
    }
  }

  // Four values from this place of c, along it or, of the transpose, down.
  __device__ static __forceinline__ void leave(float (&x)[4], const Epilogue<T>& epilogue, int matrix,
                                               int row, int column) {
    constexpr int kDown = kSwap, kAlong = !kSwap;
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] += epilogue.bias_at(column + kAlong * e);
    const auto write = [&](T* to) {
#pragma unroll
      for (int e = 0; e < 4; ++e) epilogue.write(to, matrix, row + kDown * e, column + kAlong * e, x[e]);
    };
    if (epilogue.before) write(epilogue.before);
    activate<FastMath>(epilogue.activation, x);
    write(epilogue.c);
  }
};

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_persistent_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                           const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap before,
                           const __grid_constant__ Problem<T> problem, const Schedule schedule) {
  LLTM_HOPPER(Kernel::run(&a, &b, &c, &before, problem, schedule));
}

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads)
    gemm_split_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                      const __grid_constant__ Problem<T> problem, const Schedule schedule) {
  LLTM_HOPPER(Kernel::run(&a, &b, problem, schedule));
}

}  // namespace hopper
}  // namespace lltm_ext
