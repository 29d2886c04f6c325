// gemm in half types on Hopper: the copy engine (TMA) brings tiles to shared memory, warpgroups multiply them
// there (wgmma), the copy engine takes results out. A block has one or two warpgroups that multiply, 64 rows
// of c each, and a warp beside them that fetches.
//
// Three kernels. In `persistent`, a block works through many tiles of c, and fetches those of the next while
// the last one leaves; clusters of two blocks share b's tiles. In `split`, for a c of few tiles, the blocks
// of a cluster share out K, and sum their parts in a fixed order through each other's shared memory. In
// `split_in_memory`, for a c of few tiles and a long K, more blocks than a cluster has do so through memory,
// and a kernel of its own sums.
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
  bool is_fused;              // whether results can leave that way
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
    const int first = blockIdx.x / Operands::kShare, step = gridDim.x / Operands::kShare;
    const int total = static_cast<int>(schedule.total());
    if (threadIdx.x == 0) {
      pipeline.init();
      prefetch_map(a);
      prefetch_map(b);
    }
    if constexpr (Operands::kShare > 1) cluster_sync();
    __syncthreads();

    const auto place = [&](int i) {
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
        for (int i = first; i < total; i += step) {
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
      for (int i = first; i < total; i += step) {
        const Tile tile = place(i);
        float d[Operands::kTileN / 2];
        out.fetch_bias(problem.epilogue, tile.column);
        pipeline.multiply(d, problem.tiles_of_k, warpgroup);
        out.run(d, problem.epilogue, problem.is_fused ? c : nullptr, problem.is_fused ? before : nullptr,
                tile.row + 64 * warpgroup, tile.column, tile.matrix);
      }
      out.end();
    }
    // Others of the cluster may still send to this block's shared memory.
    if constexpr (Operands::kShare > 1) cluster_sync();
  }
};

// A block's tile, of whose K the blocks of gridDim.z share out parts. One warp fetches.
template <class Operands>
struct PartOfK {
  using T = typename Operands::T;
  static constexpr int kShare = Operands::kShare, kN = Operands::kTileN;
  static constexpr int kThreads = 128 * Operands::kConsumers + 32;

  int row, column, matrix, rank, part, parts, warpgroup;

  __device__ __forceinline__ explicit PartOfK(const Schedule& schedule)
      : rank(blockIdx.x % kShare), part(blockIdx.z), parts(gridDim.z), warpgroup(threadIdx.x / 128) {
    const Tile tile = schedule.at(blockIdx.x / kShare);
    row = (tile.row * kShare + rank) * Operands::kTileM;
    column = tile.column * kN;
    matrix = tile.matrix;
  }

  __device__ __forceinline__ bool multiplies() const { return warpgroup < Operands::kConsumers; }

  // d: the part's products, for the warpgroups that multiply.
  __device__ __forceinline__ void multiply(float (&d)[kN / 2], unsigned char* stages, unsigned char* barriers,
                                           const CUtensorMap* a, const CUtensorMap* b,
                                           const Problem<T>& problem) const {
    Pipeline<Operands> pipeline(stages, *reinterpret_cast<typename Pipeline<Operands>::Barriers*>(barriers));
    if (threadIdx.x == 0) {
      pipeline.init();
      prefetch_map(a);
      prefetch_map(b);
    }
    if constexpr (kShare > 1) cluster_sync();
    __syncthreads();
    wait_for_launch_before();
    let_next_launch_begin();
    const int begin = static_cast<int>(int64_t{problem.tiles_of_k} * part / parts);
    const int end = static_cast<int>(int64_t{problem.tiles_of_k} * (part + 1) / parts);
    if (multiplies()) {
      pipeline.multiply(d, end - begin, warpgroup);
    } else {
      if (threadIdx.x % 128 == 0) {
        const int matrix_a = problem.batched_a ? matrix : 0, matrix_b = problem.batched_b ? matrix : 0;
        for (int k = begin; k < end; ++k) {
          pipeline.fetch(a, b, row, column, k * kTileK, matrix_a, matrix_b, rank);
        }
      }
      __syncwarp();
    }
  }
};

// The parts of K are those of a cluster's blocks. kSwap: a and b stand for each other's transposes, so that
// the tile is of c's transpose: for an a of few rows.
template <class Operands, bool kSwap>
struct Split {
  using T = typename Operands::T;
  static constexpr int kTileM = Operands::kTileM, kN = Operands::kTileN;
  using Sums = Parts<kTileM, kN>;
  static_assert(Operands::kShare == 1, "the cluster is of parts");
  static constexpr int kThreads = PartOfK<Operands>::kThreads;
  static constexpr int kOperandsOrSums = std::max(Operands::kBytes, Sums::kBytes);
  static constexpr int kShared = kOperandsOrSums + kBarrierBytes;

  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const Problem<T>& problem,
                             const Schedule& schedule) {
    unsigned char* shared = aligned_shared();
    const PartOfK<Operands> here(schedule);
    float d[kN / 2];
    here.multiply(d, shared, shared + kOperandsOrSums, a, b, problem);
    if (here.parts == 1) {
      if (here.multiplies()) finish_alone(d, problem.epilogue, here);
      return;
    }
    __syncthreads();  // nobody multiplies from the stages any more: the parts take their place
    Sums sums(shared);
    if (here.multiplies()) sums.write(d, here.warpgroup);
    cluster_sync();
    finish(sums, problem.epilogue, here);
    cluster_sync();  // the others have read this block's part
  }

 private:
  // This block's share of the tile's pieces of four: the sums of all blocks' parts, finished.
  __device__ static __forceinline__ void finish(const Sums& sums, const Epilogue<T>& epilogue,
                                                const PartOfK<Operands>& here) {
    constexpr int kPieces = kTileM * kN / 4, kBatch = 4;
    const int row = here.row, column = here.column, part = here.part, parts = here.parts;
    const int end = kPieces * (part + 1) / parts;
    // Neighbours in c, whose rows are the tile's columns if it is of the transpose, go to neighbours.
    const auto row_of = [](int piece) { return kSwap ? piece % kTileM : piece / (kN / 4); };
    const auto column_of = [](int piece) { return (kSwap ? piece / kTileM : piece % (kN / 4)) * 4; };
    for (int first = kPieces * part / parts + threadIdx.x; first < end; first += kBatch * kThreads) {
      float4 found[kBatch];  // all on their way at a time
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int piece = first + i * kThreads;
        if (piece < end) {
          found[i] = sums.sum(row_of(piece), column_of(piece), parts);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int piece = first + i * kThreads;
        if (piece >= end) continue;
        const int r = row_of(piece), n = column_of(piece);
        float x[4] = {found[i].x, found[i].y, found[i].z, found[i].w};
        leave(x, epilogue, here.matrix, kSwap ? column + n : row + r, kSwap ? row + r : column + n);
      }
    }
  }

  // All of K: results leave as wgmma shares them out, two neighbours in a row and the same two in the row 8
  // below. The accumulators move up, so that the code of all activations is there once.
  __device__ static __forceinline__ void finish_alone(float (&d)[kN / 2], const Epilogue<T>& epilogue,
                                                      const PartOfK<Operands>& here) {
    const int thread = threadIdx.x % 128;
    const int row = here.row + here.warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const auto row_of = [&](int i) { return row + i % 4 / 2 * 8; };
    const auto column_of = [&](int i) { return here.column + i / 4 * 8 + thread % 4 * 2 + i % 2; };
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] += epilogue.bias_at(kSwap ? row_of(i) : column_of(i));
#pragma unroll 1
    for (int first = 0; first < kN / 2; first += 4) {
      float x[4] = {d[0], d[1], d[2], d[3]};
#pragma unroll
      for (int i = 0; i < kN / 2 - 4; ++i) d[i] = d[i + 4];
      const auto write = [&](T* to) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = row_of(i), n = column_of(first + i);
          epilogue.write(to, here.matrix, kSwap ? n : r, kSwap ? r : n, x[i]);
        }
      };
      if (epilogue.before) write(epilogue.before);
      activate<ActivationMath<T>>(epilogue.activation, x);
      write(epilogue.c);
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
    activate<ActivationMath<T>>(epilogue.activation, x);
    write(epilogue.c);
  }
};

// The parts of K are those of any blocks, and leave as threads have them: `products` [parts, tiles, pieces],
// whose piece is four products of a thread.
template <class Operands, bool kSwap>
struct SplitInMemory {
  using T = typename Operands::T;
  static constexpr int kN = Operands::kTileN, kShare = Operands::kShare;
  static constexpr int kThreads = PartOfK<Operands>::kThreads;
  static constexpr int kShared = Operands::kBytes + kBarrierBytes;
  static constexpr int kOfWarpgroup = 64 * kN / 4, kPieces = Operands::kConsumers * kOfWarpgroup;

  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const Problem<T>& problem,
                             const Schedule& schedule, float4* products) {
    unsigned char* shared = aligned_shared();
    const PartOfK<Operands> here(schedule);
    float d[kN / 2];
    here.multiply(d, shared, shared + Operands::kBytes, a, b, problem);
    if (here.multiplies()) {
      float4* to = products + (int64_t{blockIdx.z} * gridDim.x + blockIdx.x) * kPieces + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        to[here.warpgroup * kOfWarpgroup + i * 128] =
            make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
      }
    }
    // Others of the cluster may still tell this block's barriers.
    if constexpr (kShare > 1) cluster_sync();
  }

  // Four lanes share out the parts of a piece, and each finishes one of its sums.
  static constexpr int kSumThreads = 256, kSharers = 4, kPiecesOfBlock = kSumThreads / kSharers;

  __device__ static void sum(const float4* products, const Epilogue<T>& epilogue, const Schedule& schedule,
                             int parts) {
    wait_for_launch_before();
    let_next_launch_begin();
    constexpr int kPiecesOfWarp = 32 / kSharers;
    const int lane = threadIdx.x % 32, sharer = lane / kPiecesOfWarp;
    const int64_t piece =
        int64_t{blockIdx.x} * kPiecesOfBlock + threadIdx.x / 32 * kPiecesOfWarp + lane % kPiecesOfWarp;
    const int64_t pieces = schedule.total() * kShare * kPieces;
    constexpr int kBatch = 8;  // all on their way at a time
    float4 sum = {};
    for (int first = sharer; first < parts; first += kBatch * kSharers) {
      float4 found[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int part = first + i * kSharers;
        if (part < parts) found[i] = products[part * pieces + piece];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        sum.x += found[i].x, sum.y += found[i].y, sum.z += found[i].z, sum.w += found[i].w;
      }
    }
#pragma unroll
    for (int distance = kPiecesOfWarp; distance < 32; distance *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, distance);
      sum.y += __shfl_xor_sync(~0u, sum.y, distance);
      sum.z += __shfl_xor_sync(~0u, sum.z, distance);
      sum.w += __shfl_xor_sync(~0u, sum.w, distance);
    }
    const int64_t block = piece / kPieces;
    const Tile tile = schedule.at(block / kShare);
    const int in_tile = static_cast<int>(piece % kPieces), in_warpgroup = in_tile % kOfWarpgroup;
    const int thread = in_warpgroup % 128;
    // As wgmma shares out its results: two neighbours in a row, the same two in the row 8 below.
    const int row = (tile.row * kShare + static_cast<int>(block % kShare)) * Operands::kTileM +
                    in_tile / kOfWarpgroup * 64 + thread / 32 * 16 + thread % 32 / 4 + sharer / 2 * 8;
    const int column = tile.column * kN + in_warpgroup / 128 * 8 + thread % 4 * 2 + sharer % 2;
    float x[1] = {sharer == 0 ? sum.x : sharer == 1 ? sum.y : sharer == 2 ? sum.z : sum.w};
    const int row_of_c = kSwap ? column : row, column_of_c = kSwap ? row : column;
    x[0] += epilogue.bias_at(column_of_c);
    if (epilogue.before) epilogue.write(epilogue.before, tile.matrix, row_of_c, column_of_c, x[0]);
    activate<ActivationMath<T>>(epilogue.activation, x);
    epilogue.write(epilogue.c, tile.matrix, row_of_c, column_of_c, x[0]);
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

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads)
    gemm_split_in_memory_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                                const __grid_constant__ Problem<T> problem, const Schedule schedule,
                                float4* products) {
  LLTM_HOPPER(Kernel::run(&a, &b, problem, schedule, products));
}

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kSumThreads)
    gemm_split_sum_kernel(const float4* products, const __grid_constant__ Epilogue<T> epilogue,
                          const Schedule schedule, int parts) {
  LLTM_HOPPER(Kernel::sum(products, epilogue, schedule, parts));
}

}  // namespace hopper
}  // namespace lltm_ext
