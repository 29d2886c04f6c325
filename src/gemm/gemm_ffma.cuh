// The kernel for float32 and float64: every product on the ordinary multiply-add units.
//
// A block holds a BM x BN tile of c in registers, TM x TN a thread. For every BK of K it copies a slice of a
// and one of b to shared memory, k by k, while it multiplies the slices before. The copies are asynchronous
// and, where a row is not 16-byte vectors along the tile, of single elements: so any strides and any
// alignment take the same path, a transpose happens on the way, and no thread holds what is under way in
// registers.
#pragma once

#include "gemm/gemm_tile.cuh"

namespace lltm_ext {

// How an operand is read from memory: in vectors along its extent, or in elements, with neighbouring threads
// along whichever side has the smaller stride.
enum class Access : int32_t { kVectors, kAlongExtent, kAlongK };

template <typename T_, int BM_, int BN_, int BK_, int TM_, int TN_, int RESIDENT>
struct FfmaTile {
  using T = T_;
  static constexpr int BM = BM_, BN = BN_, BK = BK_, TM = TM_, TN = TN_;
  static constexpr int V = kVecWidth<T>;
  static constexpr int kResident = RESIDENT;  // blocks that share a multiprocessor
  static constexpr int kThreads = BM / TM * (BN / TN);
  // The pad keeps rows aligned to vectors and lets 8 k by 4 elements (8 by 2 of float64) hit all banks once.
  static constexpr int kPitchA = BM + V, kPitchB = BN + V;
  static constexpr int kStage = BK * (kPitchA + kPitchB);
  // A thread's rows come in groups of V, each group from another part of the tile, and its columns too.
  static constexpr int kPartRows = BM / (TM / V), kPartColumns = BN / (TN / V);
  static constexpr int kShared = 2 * kStage > kPartRows* BN ? 2 * kStage : kPartRows * BN;
};

// The first element of a slice that this thread copies.
struct Start {
  int e, k;
};

template <int EXTENT, int V>
__device__ __forceinline__ Start start_of(Access access) {
  const int thread = threadIdx.x;
  if (access == Access::kVectors) return {thread % (EXTENT / V) * V, thread / (EXTENT / V)};
  if (access == Access::kAlongExtent) return {thread % EXTENT, thread / EXTENT};
  return {thread / 8, thread % 8};
}

// Copies this thread's share of a slice; x.data is its own first element.
template <int EXTENT, int PITCH, typename Tile, typename T>
__device__ __forceinline__ void copy_slice(T* shared, const Operand<T>& x, Access access, int64_t k_left) {
  constexpr int THREADS = Tile::kThreads, BK = Tile::BK, V = Tile::V;
  const Start start = start_of<EXTENT, V>(access);
  const int depth = clamp_to_int(k_left, BK) - start.k, extent = x.extent - start.e;
  const T* from = x.data;
  T* to = shared + start.k * PITCH + start.e;
  if (access == Access::kVectors) {
    constexpr int kStep = THREADS / (EXTENT / V);
    static_assert(THREADS % (EXTENT / V) == 0 && BK % kStep == 0);
    const int valid = min(max(extent, 0), V) * static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < BK; i += kStep, from += kStep * x.k_stride) {
      copy_async<16>(to + i * PITCH, from, i < depth ? valid : 0);
    }
  } else if (access == Access::kAlongExtent) {
    constexpr int kStep = THREADS / EXTENT;
    static_assert(THREADS % EXTENT == 0 && BK % kStep == 0);
    const int valid = extent > 0 ? sizeof(T) : 0;
#pragma unroll
    for (int i = 0; i < BK; i += kStep, from += kStep * x.k_stride) {
      copy_async<sizeof(T)>(to + i * PITCH, from, i < depth ? valid : 0);
    }
  } else {
    constexpr int kStep = THREADS / 8;
    static_assert(EXTENT % kStep == 0 && BK == 16);
#pragma unroll
    for (int i = 0; i < EXTENT; i += kStep, from += kStep * x.stride) {
      const int valid = i < extent ? sizeof(T) : 0;
      copy_async<sizeof(T)>(to + i, from, depth > 0 ? valid : 0);
      copy_async<sizeof(T)>(to + i + 8 * PITCH, from + 8 * x.k_stride, depth > 8 ? valid : 0);
    }
  }
}

template <typename Tile, typename T = typename Tile::T>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    gemm_ffma_kernel(const GemmArgs<T> args, const Tiles tiles, Access access_a, Access access_b) {
  constexpr int BK = Tile::BK, TM = Tile::TM, TN = Tile::TN, V = Tile::V;
  using Vector = Vec<T, V>;
  __shared__ __align__(16) T shared[Tile::kShared];

  // A warp is 4 threads down and 8 across, so that it reads few different vectors of both slices.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kWarpsAcross = Tile::BN / TN / 8;
  const int row = (warp / kWarpsAcross * 4 + lane / 8) * V;
  const int column = (warp % kWarpsAcross * 8 + lane % 8) * V;

  // Kept in shared memory, because the registers are full while the tile is summed.
  __shared__ TilePosition at;
  if (threadIdx.x == 0) at = position(tiles, Tile::BM, Tile::BN);
  __syncthreads();
  Operand<T> a = rows_of_a(args, at, Tile::BM), b = columns_of_b(args, at, Tile::BN);
  const Start start_a = start_of<Tile::BM, V>(access_a), start_b = start_of<Tile::BN, V>(access_b);
  a.data += start_a.e * a.stride + start_a.k * a.k_stride;
  b.data += start_b.e * b.stride + start_b.k * b.k_stride;
  T sum[TM][TN] = {};
  int stage = 0;
  // Multiplies the slice at k and copies the next; the first round, at -BK, only copies.
  for (int64_t k = -BK; k < args.k; k += BK) {
    copy_async_wait<0>();
    __syncthreads();  // the slice at k has come, and nobody reads the one that the next copy overwrites
    if (k + BK < args.k) {
      T* slice = shared + Tile::kStage - stage;
      copy_slice<Tile::BM, Tile::kPitchA, Tile>(slice, a, access_a, args.k - (k + BK));
      copy_slice<Tile::BN, Tile::kPitchB, Tile>(slice + BK * Tile::kPitchA, b, access_b, args.k - (k + BK));
      copy_async_commit();
      a.data += BK * a.k_stride;
      b.data += BK * b.k_stride;
    }
    if (k >= 0) {
      const T* slice_a = shared + stage + row;
      const T* slice_b = shared + stage + BK * Tile::kPitchA + column;
#pragma unroll
      for (int i = 0; i < BK; ++i) {
        Vector x[TM / V], y[TN / V];
#pragma unroll
        for (int p = 0; p < TM / V; ++p) {
          x[p] = *reinterpret_cast<const Vector*>(slice_a + i * Tile::kPitchA + p * Tile::kPartRows);
        }
#pragma unroll
        for (int q = 0; q < TN / V; ++q) {
          y[q] = *reinterpret_cast<const Vector*>(slice_b + i * Tile::kPitchB + q * Tile::kPartColumns);
        }
#pragma unroll
        for (int r = 0; r < TM; ++r) {
#pragma unroll
          for (int s = 0; s < TN; ++s) sum[r][s] += x[r / V].data[r % V] * y[s / V].data[s % V];
        }
      }
    }
    stage = Tile::kStage - stage;
  }

  // Part after part of the tile's rows goes through shared memory. The loop is rolled, so that the epilogue
  // is there once; the sums, which live in registers, are picked by comparing.
#pragma unroll 1
  for (int part = 0; part < TM / V; ++part) {
    __syncthreads();
#pragma unroll
    for (int p = 0; p < TM / V; ++p) {
      if (p != part) continue;
#pragma unroll
      for (int r = 0; r < V; ++r) {
#pragma unroll
        for (int q = 0; q < TN / V; ++q) {
          Vector y;
#pragma unroll
          for (int s = 0; s < V; ++s) y.data[s] = sum[p * V + r][q * V + s];
          *reinterpret_cast<Vector*>(shared +
                                     staged_at<T, Tile::BN>(row + r, q * Tile::kPartColumns + column)) = y;
        }
      }
    }
    __syncthreads();
    write_staged<Tile::kPartRows, Tile::BN, Tile::kThreads>(args, at, part * Tile::kPartRows, shared);
  }
}

// `stride` along the extent, k_stride and batch_stride of an operand.
template <typename T>
Access access_of(const T* data, int64_t stride, int64_t k_stride, int64_t batch_stride) {
  constexpr int V = kVecWidth<T>;
  if (stride == 1 && is_vec_aligned(data) && k_stride % V == 0 && batch_stride % V == 0)
    return Access::kVectors;
  return k_stride < stride ? Access::kAlongK : Access::kAlongExtent;
}

template <typename Tile, typename T = typename Tile::T>
cudaError_t launch_ffma(const GemmArgs<T>& args, cudaStream_t stream) {
  return launch_tiles(tiles_of(args, Tile::BM, Tile::BN), [&](unsigned blocks, const Tiles& tiles) {
    gemm_ffma_kernel<Tile><<<blocks, Tile::kThreads, 0, stream>>>(
        args, tiles, access_of(args.a.data, args.a.row_stride, args.a.column_stride, args.a.batch_stride),
        access_of(args.b.data, args.b.column_stride, args.b.row_stride, args.b.batch_stride));
  });
}

}  // namespace lltm_ext
