// The kernel for float32: products on the ordinary FMA units.
//
// A block holds a BM x BN tile of c in registers, TM x TN per thread. For every BK of K it copies a slice of
// a and one of b to shared memory by cp.async, k by k, some slices ahead of the products. Where lines are not
// whole 16-byte vectors it copies single elements, so that any strides and any alignment take the same path,
// the copy transposes, and no registers hold data in flight.
//
// Two limits: one instruction per clock, and register reads. The even and the odd bank each deliver one value
// per clock, and an FMA needs three, less what the reuse cache keeps from the one before. So a thread
// computes many elements, and its sums are in the other bank than their columns: see swap_pairs.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/ptx.cuh"
#include "common/shared_memory.h"
#include "gemm/gemm_tile.cuh"

namespace lltm_ext {

// ---- Tiles of c. A block computes one, or one of several parts of its K (split-K).

struct Tiles {
  TileOrder order;
  Divisor by_splits;
};

// What a block computes: a tile, from an element of c on, and the slices of K from `begin` on, `size` of K.
struct TilePart {
  int64_t matrix, row, column, begin, size;

  __device__ __forceinline__ TilePart(const Tiles& tiles, int rows, int columns, int depth, int64_t k) {
    const TileOrder::Tile tile = tiles.order.at(blockIdx.x);
    matrix = tile.matrix, row = tile.row * rows, column = tile.column * columns, begin = 0, size = k;
    if (gridDim.y == 1) return;
    const int64_t slices = ceil_div(k, depth);
    begin = tiles.by_splits.quotient(slices * blockIdx.y) * depth;
    size = min(tiles.by_splits.quotient(slices * (blockIdx.y + 1)) * depth, k) - begin;
  }
  TilePart() = default;
};

// ---- Operands. Both look alike: a line of `extent` elements (rows of a, columns of b) for every k.

struct OperandTile {
  const float* data;
  int64_t stride;  // along the rows of a, the columns of b
  int64_t k_stride;
  int extent;  // how many rows or columns the tile has
};

// From its `first` row or column on.
__device__ __forceinline__ OperandTile operand_tile(const Rows<float>& x, const TilePart& at, int64_t first,
                                                    int size) {
  return {x.data + at.matrix * x.batch_stride + first * x.row_stride + at.begin * x.k_stride, x.row_stride,
          x.k_stride, clamp_to_int(x.rows - first, size)};
}

// ---- Copies to shared memory

// How an operand is loaded: in vectors along its extent, or in elements, with neighbouring threads along the
// smaller stride. kAlongDenseK: the stride of K is 1.
enum class Access : int32_t { kVectors, kAlongExtent, kAlongK, kAlongDenseK, kAtRunTime };

// GROUPS of threads hold the tile, and each sums its part of every slice.
template <int BM_, int BN_, int BK_, int TM_, int TN_, int GROUPS, int STAGES, int BLOCKS>
struct FfmaTile {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, TM = TM_, TN = TN_;
  static constexpr int V = kVecWidth<float>;
  static constexpr int kGroups = GROUPS, kStages = STAGES;
  static constexpr int kBlocksPerMultiprocessor = BLOCKS;
  static constexpr int kGroupThreads = BM / TM * (BN / TN);
  static constexpr int kThreads = GROUPS * kGroupThreads;
  // In how many parts Hopper's specialised kernels copy a slice, spread over the FMAs; small tiles have none.
  static constexpr int kParts = BLOCKS == 1 ? 4 : 1;
  // The padding keeps rows aligned to vectors, and lets 8 k by 4 elements hit every bank once.
  static constexpr int kPitchA = BM + V, kPitchB = BN + V;
  static constexpr int kStage = BK * (kPitchA + kPitchB);
  // A thread's rows are in groups of V, each in another part of the tile. So are its columns.
  static constexpr int kPartRows = BM / (TM / V), kPartColumns = BN / (TN / V);
  // Staged at the end: a part of the result, or a group's sums.
  static constexpr int kStagedSums = GROUPS > 1 ? BM * BN : kPartRows * BN;
  static constexpr int kBytes = static_cast<int>(sizeof(float)) * std::max(STAGES * kStage, kStagedSums);
  static_assert(BK % (8 * GROUPS) == 0 && BK / GROUPS % 2 == 0);
};

// Copies a thread's share of an operand's slices, one slice after the other.
template <int EXTENT, int PITCH, typename Tile>
class SliceCopy {
  static constexpr int THREADS = Tile::kThreads, BK = Tile::BK, V = Tile::V;

 public:
  __device__ __forceinline__ SliceCopy(const OperandTile& x, Access access) : x_(x), access_(access) {
    const int thread = threadIdx.x;
    e_ = thread / 8;
    k_ = thread % 8;
    if (access == Access::kVectors) {
      e_ = thread % (EXTENT / V) * V;
      k_ = thread / (EXTENT / V);
    } else if (access == Access::kAlongExtent) {
      e_ = thread % EXTENT;
      k_ = thread / EXTENT;
    }
    x_.data += e_ * x.stride + k_ * x.k_stride;
    x_.extent -= e_;
    if (access == Access::kAlongDenseK) x_.k_stride = 1;  // tells the compiler
  }

  // If `when`, copies part `part` of `parts` of the next slice. Shared memory beyond the extent keeps its
  // values; its sums are never stored.
  __device__ __forceinline__ void copy(bool when, float* slice, int part, int parts) {
    copy<false>(when, slice, part, parts, BK);
  }

  // Copies a slice of which only the first `depth` of K exist, and zeros.
  __device__ __forceinline__ void copy_first(float* slice, int depth) {
    copy<true>(true, slice, 0, 1, depth);
    x_.data -= (BK - depth) * x_.k_stride;
  }

 private:
  template <bool SHORT>
  __device__ __forceinline__ void copy(bool when, float* slice, int part, int parts, int depth) {
    float* const to = slice + k_ * PITCH + e_;
    // The bytes of `count` elements at k, relative to this thread's first.
    const auto bytes = [&](int k, int count) {
      return (SHORT && k_ + k >= depth ? 0 : count) * static_cast<int>(sizeof(float));
    };
    if (access_ == Access::kVectors) {
      constexpr int kStep = THREADS / (EXTENT / V), kCopies = BK / kStep;
      static_assert(THREADS % (EXTENT / V) == 0 && BK % kStep == 0);
      const int valid = min(max(x_.extent, 0), V);
#pragma unroll
      for (int i = kCopies * part / parts; i < kCopies * (part + 1) / parts; ++i) {
        cp_async_if<16>(when, to + i * kStep * PITCH, x_.data, bytes(i * kStep, valid));
        x_.data += kStep * x_.k_stride;
      }
    } else if (access_ == Access::kAlongExtent) {
      constexpr int kStep = THREADS / EXTENT, kCopies = BK / kStep;
      static_assert(THREADS % EXTENT == 0 && BK % kStep == 0);
#pragma unroll
      for (int i = kCopies * part / parts; i < kCopies * (part + 1) / parts; ++i) {
        cp_async_if<sizeof(float)>(when && x_.extent > 0, to + i * kStep * PITCH, x_.data,
                                   bytes(i * kStep, 1));
        x_.data += kStep * x_.k_stride;
      }
    } else {
      constexpr int kStep = THREADS / 8, kCopies = EXTENT / kStep;
      static_assert(EXTENT % kStep == 0 && BK % 8 == 0);
#pragma unroll
      for (int i = kCopies * part / parts; i < kCopies * (part + 1) / parts; ++i) {
#pragma unroll
        for (int k = 0; k < BK; k += 8) {
          cp_async_if<sizeof(float)>(when && i * kStep < x_.extent, to + i * kStep + k * PITCH,
                                     x_.data + k * x_.k_stride, bytes(k, 1));
        }
        x_.data += kStep * x_.stride;
      }
      if (part == parts - 1) x_.data += BK * x_.k_stride - EXTENT * x_.stride;
    }
  }

  OperandTile x_;  // at this thread's next element
  Access access_;
  int e_, k_;
};

// ---- Products in registers

// A thread's rows of a and columns of b at one k.
template <typename Tile>
struct Fragment {
  static constexpr int TM = Tile::TM, TN = Tile::TN, V = Tile::V, kStages = Tile::kStages;
  using Vector = Vec<float, V>;
  Vector x[TM / V], y[TN / V];

  __device__ __forceinline__ void load(const float* slice_a, const float* slice_b, int k) {
#pragma unroll
    for (int p = 0; p < TM / V; ++p) {
      x[p] = *reinterpret_cast<const Vector*>(slice_a + k * Tile::kPitchA + p * Tile::kPartRows);
    }
#pragma unroll
    for (int q = 0; q < TN / V; ++q) {
      y[q] = *reinterpret_cast<const Vector*>(slice_b + k * Tile::kPitchB + q * Tile::kPartColumns);
    }
  }

  // A serpentine through the tile: each FMA has its row or its column in common with the one before.
  __device__ __forceinline__ void multiply(float (&sum)[TM][TN]) const {
#pragma unroll
    for (int r = 0; r < TM; ++r) {
#pragma unroll
      for (int i = 0; i < TN; ++i) {
        const int s = r % 2 ? TN - 1 - i : i;
        sum[r][s] += x[r / V].data[r % V] * y[s / V].data[s % V];
      }
    }
  }
};

// V of a row's sums, with neighbours swapped. A vector to load or store is in consecutive registers, so a sum
// and its column of b would be in the same bank; with neighbours swapped they are not.
template <int V, int TN>
__device__ __forceinline__ Vec<float, V> swap_pairs(const float (&row)[TN], int first) {
  Vec<float, V> y;
#pragma unroll
  for (int s = 0; s < V; ++s) y.data[s ^ 1] = row[first + s];
  return y;
}

// Adds the other groups' sums to the first group's, in order.
template <typename Tile>
__device__ __forceinline__ void add_groups(float (&sum)[Tile::TM][Tile::TN], float* shared, int group,
                                           int thread) {
  constexpr int V = Tile::V;
  using Vector = Vec<float, V>;
  Vector* const vectors = reinterpret_cast<Vector*>(shared) + thread;
#pragma unroll 1
  for (int from = 1; from < Tile::kGroups; ++from) {
    __syncthreads();
    if (group == from) {
#pragma unroll
      for (int i = 0; i < Tile::TM * Tile::TN; i += V) {
        vectors[i / V * Tile::kGroupThreads] = swap_pairs<V>(sum[i / Tile::TN], i % Tile::TN);
      }
    }
    __syncthreads();
    if (group > 0) continue;
#pragma unroll
    for (int i = 0; i < Tile::TM * Tile::TN; i += V) {
      const Vector y = vectors[i / V * Tile::kGroupThreads];
#pragma unroll
      for (int s = 0; s < V; ++s) sum[i / Tile::TN][i % Tile::TN + s] += y.data[s ^ 1];
    }
  }
}

// ---- The epilogue. Sums are staged in shared memory, so that the code of bias and activation exists once
// and c is written in 16-byte stores.

// Where the sum of (row, column) is staged. The row's number permutes the vectors of a row, which spreads the
// rows that a warp writes at once over the banks.
template <int COLUMNS>
__device__ __forceinline__ int staged_at(int row, int column) {
  constexpr int V = kVecWidth<float>, kVectors = COLUMNS / V < 8 ? COLUMNS / V : 8;
  static_assert(COLUMNS % (kVectors * V) == 0);
  return row * COLUMNS + (column / V ^ (row & (kVectors - 1))) * V + column % V;
}

// Not inlined: all activations together are as much code as a kernel without them.
template <int N>
__device__ __noinline__ Vec<float, N> activated(Activation activation, Vec<float, N> values) {
  activate(activation, values.data);
  return values;
}

// Writes ROWS x COLUMNS staged sums to c, from row first_row of the tile on; with split-K to the workspace,
// [splits, batch, m, n]. Called by all THREADS. Neighbours were staged in each other's place: see swap_pairs.
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void write_staged(const GemmArgs<float>& args, const TilePart& at, int first_row,
                                             const float* staged) {
  constexpr int V = kVecWidth<float>, kAcross = COLUMNS / V;
  const bool aligned = is_vec_aligned(args.c) && is_vec_aligned(args.pre_activation);
  const bool vectors = args.n % V == 0 && (aligned || gridDim.y > 1);
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * kAcross; i += THREADS) {
    const int tile_row = i / kAcross, tile_column = i % kAcross * V;
    const int64_t row = at.row + first_row + tile_row, column = at.column + tile_column;
    if (row >= args.m || column >= args.n) continue;
    const int valid = clamp_to_int(args.n - column, V), place = staged_at<COLUMNS>(tile_row, tile_column);
    const auto found = *reinterpret_cast<const Vec<float, V>*>(staged + place);
    Vec<float, V> x;
#pragma unroll
    for (int j = 0; j < V; ++j) x.data[j ^ 1] = found.data[j];
    const int64_t to = (at.matrix * args.m + row) * args.n + column;
    if (gridDim.y > 1) {
      float* const part = static_cast<float*>(args.workspace) + blockIdx.y * args.batch * args.m * args.n;
      write_vector(part + to, x.data, valid, vectors);
      continue;
    }
    finish_row(args, x.data, column, to, valid, vectors, [&] {
      if (args.activation != Activation::kNone) x = activated(args.activation, x);
    });
  }
}

// ---- The kernel

// What a block does. ACCESS_A and ACCESS_B: kAtRunTime, or the values of access_a and access_b. at: in shared
// memory, because the mainloop needs all registers.
template <typename Tile, Access ACCESS_A, Access ACCESS_B>
__device__ __forceinline__ void run_ffma(const GemmArgs<float>& args, const Tiles& tiles, Access access_a,
                                         Access access_b, float* shared, TilePart& at) {
  constexpr int BK = Tile::BK, TM = Tile::TM, TN = Tile::TN, V = Tile::V, kStages = Tile::kStages;
  constexpr int kDepth = BK / Tile::kGroups;  // of K in a slice, per group
  constexpr int kParts = ACCESS_A == Access::kAtRunTime ? 1 : Tile::kParts, kEvery = kDepth / kParts;
  if (ACCESS_A != Access::kAtRunTime) access_a = ACCESS_A;
  if (ACCESS_B != Access::kAtRunTime) access_b = ACCESS_B;

  // A warp is 4 threads down and 8 across, so that it loads few different vectors of both slices.
  const int group = threadIdx.x / Tile::kGroupThreads, thread = threadIdx.x % Tile::kGroupThreads;
  const int warp = thread / 32, lane = thread % 32;
  constexpr int kWarpsAcross = Tile::BN / TN / 8;
  const int row = (warp / kWarpsAcross * 4 + lane / 8) * V;
  const int column = (warp % kWarpsAcross * 8 + lane % 8) * V;

  if (threadIdx.x == 0) at = TilePart(tiles, Tile::BM, Tile::BN, BK, args.k);
  __syncthreads();
  const int64_t size = at.size;
  SliceCopy<Tile::BM, Tile::kPitchA, Tile> a(operand_tile(rows_of_a(args), at, at.row, Tile::BM), access_a);
  SliceCopy<Tile::BN, Tile::kPitchB, Tile> b(operand_tile(rows_of_b(args), at, at.column, Tile::BN),
                                             access_b);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const auto slice_a = [&](int stage) { return shared + stage * Tile::kStage; };
  const auto slice_b = [&](int stage) { return slice_a(stage) + BK * Tile::kPitchA; };
  // Waits until the next slice is here for all threads, and all threads are done with the one before it.
  const auto wait = [] {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();
  };

  // Only the first slice may be short.
  const int64_t slices = ceil_div(size, BK);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < slices) {
      if (i == 0) {
        const int depth = static_cast<int>(size - (slices - 1) * BK);
        a.copy_first(slice_a(i), depth);
        b.copy_first(slice_b(i), depth);
      } else {
        a.copy(true, slice_a(i), 0, 1);
        b.copy(true, slice_b(i), 0, 1);
      }
    }
    cp_async_commit_group();
  }
  wait();

  const int first_a = group * kDepth * Tile::kPitchA + row, first_b = group * kDepth * Tile::kPitchB + column;
  float sum[TM][TN] = {};
  Fragment<Tile> fragment[2];  // one is multiplied while the other is loaded
  fragment[0].load(slice_a(0) + first_a, slice_b(0) + first_b, 0);
  int stage = 0;
#pragma unroll 1
  for (int64_t slice = 0; slice < slices; ++slice) {
    const bool has_next = slice + kStages - 1 < slices;
    const int free = stage == 0 ? kStages - 1 : stage - 1;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (i % kEvery == 0) {
        a.copy(has_next, slice_a(free), i / kEvery, kParts);
        b.copy(has_next, slice_b(free), i / kEvery, kParts);
      }
      if (i == kDepth - 1) {
        cp_async_commit_group();
        stage = stage == kStages - 1 ? 0 : stage + 1;
        wait();
      }
      fragment[(i + 1) % 2].load(slice_a(stage) + first_a, slice_b(stage) + first_b, (i + 1) % kDepth);
      fragment[i % 2].multiply(sum);
    }
  }

  if constexpr (Tile::kGroups > 1) add_groups<Tile>(sum, shared, group, thread);
  // Stages the tile's rows part by part. The loop is rolled, so that the code of the epilogue exists once;
  // comparisons select the sums, because registers cannot be indexed.
#pragma unroll 1
  for (int part = 0; part < TM / V; ++part) {
    __syncthreads();
#pragma unroll
    for (int p = 0; p < TM / V; ++p) {
      if (p != part || group > 0) continue;
#pragma unroll
      for (int r = 0; r < V; ++r) {
#pragma unroll
        for (int q = 0; q < TN / V; ++q) {
          const int to = staged_at<Tile::BN>(row + r, q * Tile::kPartColumns + column);
          *reinterpret_cast<Vec<float, V>*>(shared + to) = swap_pairs<V>(sum[p * V + r], q * V);
        }
      }
    }
    __syncthreads();
    write_staged<Tile::kPartRows, Tile::BN, Tile::kThreads>(args, at, part * Tile::kPartRows, shared);
  }
}

template <typename Tile, Access ACCESS_A, Access ACCESS_B>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    gemm_ffma_kernel(const GemmArgs<float> args, const Tiles tiles, Access access_a, Access access_b) {
  if constexpr (!kForHopper && ACCESS_A != Access::kAtRunTime) {
    __trap();  // launched on Hopper only
  } else {
    __shared__ TilePart at;
    run_ffma<Tile, ACCESS_A, ACCESS_B>(args, tiles, access_a, access_b, dynamic_shared_floats(), at);
  }
}

// ---- The launcher

inline Access access_of(const Rows<float>& x) {
  constexpr int V = kVecWidth<float>;
  const bool aligned = is_vec_aligned(x.data) && x.k_stride % V == 0 && x.batch_stride % V == 0;
  if (x.row_stride == 1 && aligned) return Access::kVectors;
  if (x.k_stride >= x.row_stride) return Access::kAlongExtent;
  return x.k_stride == 1 ? Access::kAlongDenseK : Access::kAlongK;
}

// early: whether blocks may start while the previous kernel still runs. hopper: that has kernels of its own
// for some tiles, specialised by access: vectors, or dense along K.
template <class Tile>
cudaError_t launch_ffma(const GemmArgs<float>& args, int splits, bool early, bool hopper,
                        cudaStream_t stream) {
  const Access a = access_of(rows_of_a(args)), b = access_of(rows_of_b(args));
  const Tiles tiles = {TileOrder(ceil_div(args.m, Tile::BM), ceil_div(args.n, Tile::BN), args.batch),
                       Divisor(splits)};
  // A block that is to have a multiprocessor to itself takes more than half of its shared memory. Else two
  // can start on one, where the previous kernel leaves room first.
  constexpr int kMoreThanHalf = 116 << 10;
  const int bytes = hopper && Tile::kBlocksPerMultiprocessor == 1 ? kMoreThanHalf : Tile::kBytes;
  const auto run = [&](auto x, auto y) {
    const auto kernel = gemm_ffma_kernel<Tile, x, y>;
    cudaError_t error = cudaSuccess;
    if (bytes > (48 << 10) - 64) error = set_max_dynamic_shared(kernel, bytes);
    if (error != cudaSuccess) return error;
    return launch_kernel(kernel, dim3(static_cast<unsigned>(tiles.order.total), splits), dim3(Tile::kThreads),
                         bytes, early, stream, args, tiles, a, b);
  };
  if constexpr (Tile::kParts > 1) {
    constexpr Access kVectors = Access::kVectors, kDenseK = Access::kAlongDenseK;
    const auto is = [&](Access x, Access y) { return hopper && a == x && b == y; };
    constexpr std::integral_constant<Access, kVectors> vectors;
    constexpr std::integral_constant<Access, kDenseK> dense_k;
    if (is(kVectors, kVectors)) return run(vectors, vectors);
    if (is(kVectors, kDenseK)) return run(vectors, dense_k);
    if (is(kDenseK, kVectors)) return run(dense_k, vectors);
    if (is(kDenseK, kDenseK)) return run(dense_k, dense_k);
  }
  constexpr std::integral_constant<Access, Access::kAtRunTime> at_run_time;
  return run(at_run_time, at_run_time);
}

}  // namespace lltm_ext
