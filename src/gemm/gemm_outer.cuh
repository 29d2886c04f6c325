// The kernel for short sums and large results, in all types: writing c takes most of the time. A block keeps
// all K of its tile's rows of a and columns of b in shared memory, and stores its sums straight from
// registers.
#pragma once

#include "gemm/gemm_tile.cuh"

namespace lltm_ext {

// A warp has kRows rows, a lane kColumns columns of them: GROUPS vectors of V neighbours if c is stored so,
// else every 32nd, so that lanes store neighbours.
template <typename A, int GROUPS>
struct OuterTile {
  static constexpr int V = 16 / sizeof(A), kColumns = GROUPS * V, kRows = 8, kWarps = 8,
                       kThreads = kWarps * 32;
  static constexpr int BM = kWarps * kRows, BN = 32 * kColumns;
  static constexpr int kPitchA = BM + V, kPitchB = BN + V;  // whole vectors, in different banks
  static constexpr int kBytesOfK = (kPitchA + kPitchB) * sizeof(A), kMostK = (48 << 10) / kBytesOfK;
};

// How to copy an operand's lines of all k. Neighbouring threads read neighbours, along K or along the lines:
// elements, or aligned vectors of 16 bytes.
struct OuterCopy {
  bool along_k, vectors;
  uint32_t reciprocal;  // of how many elements or vectors of K a line has, times 2^32; 0 if it has one
};

// Copies to shared memory, [k][line], W elements at once. A batch is loaded before its first element is
// stored.
template <int W, int LINES, int PITCH, int THREADS, typename T>
__device__ __forceinline__ void copy_pieces(acc_t<T>* shared, const OperandTile<T>& x, uint32_t k,
                                            const OuterCopy& copy) {
  constexpr uint32_t kBatch = 4, kAcross = LINES / W, kStep = THREADS / kAcross;
  static_assert(THREADS % kAcross == 0);
  using Piece = Vec<T, W>;
  const uint32_t extent = x.extent;
  Piece pieces[kBatch];
  if (!copy.along_k) {
    const uint32_t line = threadIdx.x % kAcross * W, first = threadIdx.x / kAcross;
    const T* from = x.data + line * x.stride + first * x.k_stride;
    acc_t<T>* to = shared + first * PITCH + line;
    for (uint32_t at = first; at < k; at += kBatch * kStep) {
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j, from += kStep * x.k_stride) {
        pieces[j] = at + j * kStep < k && line < extent ? *reinterpret_cast<const Piece*>(from) : Piece{};
      }
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j, to += kStep * PITCH) {
        if (at + j * kStep >= k) continue;
#pragma unroll
        for (int i = 0; i < W; ++i) to[i] = widen(pieces[j].data[i]);
      }
    }
    return;
  }
  const uint32_t per_line = k / W, count = LINES * per_line;
  for (uint32_t piece = threadIdx.x; piece < count; piece += kBatch * THREADS) {
    uint32_t places[kBatch];
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) {
      const uint32_t number = piece + j * THREADS,
                     line = copy.reciprocal == 0 ? number : __umulhi(number, copy.reciprocal),
                     at = (number - line * per_line) * W;
      places[j] = at * PITCH + line;
      pieces[j] = line < extent ? *reinterpret_cast<const Piece*>(x.data + line * x.stride + at * x.k_stride)
                                : Piece{};
    }
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) {
      if (piece + j * THREADS >= count) continue;
#pragma unroll
      for (int i = 0; i < W; ++i) shared[places[j] + i * PITCH] = widen(pieces[j].data[i]);
    }
  }
}

template <int LINES, int PITCH, int THREADS, typename T>
__device__ __forceinline__ void copy_lines(acc_t<T>* shared, const OperandTile<T>& x, uint32_t k,
                                           const OuterCopy& copy) {
  if (copy.vectors) return copy_pieces<kVecWidth<T>, LINES, PITCH, THREADS>(shared, x, k, copy);
  copy_pieces<1, LINES, PITCH, THREADS>(shared, x, k, copy);
}

// Where number `place` of a lane's columns is in the tile.
template <class Tile, bool VECTORS>
__device__ __forceinline__ int column_of(int place) {
  const int lane = threadIdx.x % 32;
  return VECTORS ? place / Tile::V * (32 * Tile::V) + lane * Tile::V + place % Tile::V : lane + 32 * place;
}

// A lane's columns of a row of b.
template <class Tile, bool VECTORS, typename A>
__device__ __forceinline__ void load_lane(A (&x)[Tile::kColumns], const A* row) {
  constexpr int V = VECTORS ? Tile::V : 1;
#pragma unroll
  for (int j = 0; j < Tile::kColumns; j += V) {
    const Vec<A, V> found = *reinterpret_cast<const Vec<A, V>*>(row + column_of<Tile, VECTORS>(j));
#pragma unroll
    for (int i = 0; i < V; ++i) x[j + i] = found.data[i];
  }
}

template <class Tile, bool VECTORS, typename T, typename A>
__device__ __forceinline__ void store_lane(T* row, const A (&x)[Tile::kColumns], int extent) {
  constexpr int V = VECTORS ? Tile::V : 1;
#pragma unroll
  for (int j = 0; j < Tile::kColumns; j += V) {
    const int column = column_of<Tile, VECTORS>(j);
    Vec<T, V> values;
#pragma unroll
    for (int i = 0; i < V; ++i) values.data[i] = narrow<T>(x[j + i]);
    if (column < extent) *reinterpret_cast<Vec<T, V>*>(row + column) = values;
  }
}

// sum += a warp's rows of a times a lane's columns of b, over all k.
template <class Tile, bool VECTORS, typename A>
__device__ __forceinline__ void multiply_lane(A (&sum)[Tile::kRows][Tile::kColumns], const A* a, const A* b,
                                              int k) {
  constexpr int V = Tile::V;
#pragma unroll 2
  for (int i = 0; i < k; ++i, a += Tile::kPitchA, b += Tile::kPitchB) {
    A x[Tile::kRows], y[Tile::kColumns];
    load_lane<Tile, VECTORS>(y, b);
#pragma unroll
    for (int r = 0; r < Tile::kRows; r += V) {
      const Vec<A, V> found = *reinterpret_cast<const Vec<A, V>*>(a + r);
#pragma unroll
      for (int j = 0; j < V; ++j) x[r + j] = found.data[j];
    }
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
      for (int j = 0; j < Tile::kColumns; ++j) sum[r][j] += x[r] * y[j];
    }
  }
}

// Stores a warp's rows from `row` of c on, with bias and activation.
template <class Tile, bool VECTORS, typename T, typename A>
__device__ __forceinline__ void store_rows(A (&sum)[Tile::kRows][Tile::kColumns], const GemmArgs<T>& args,
                                           int64_t to, int rows, int columns) {
  constexpr int R = Tile::kRows, C = Tile::kColumns;
  if (args.activation == Activation::kNone && args.pre_activation == nullptr) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r < rows) store_lane<Tile, VECTORS>(args.c + to + r * args.n, sum[r], columns);
    }
    return;
  }
  // Shifting the sums, instead of indexing them, keeps the loop rolled, so that the code of all activations
  // exists once.
#pragma unroll 1
  for (int r = 0; r < rows; ++r, to += args.n) {
    A x[C];
#pragma unroll
    for (int j = 0; j < C; ++j) x[j] = sum[0][j];
#pragma unroll
    for (int i = 0; i < R - 1; ++i) {
#pragma unroll
      for (int j = 0; j < C; ++j) sum[i][j] = sum[i + 1][j];
    }
    if (args.pre_activation != nullptr) store_lane<Tile, VECTORS>(args.pre_activation + to, x, columns);
    activate(args.activation, x);
    store_lane<Tile, VECTORS>(args.c + to, x, columns);
  }
}

// A block computes `height` tiles, one below the other, with the same columns of b.
template <typename T, class Tile, bool VECTORS>
__global__ void __launch_bounds__(Tile::kThreads)
    gemm_outer_kernel(const GemmArgs<T> args, const Tiles tiles, int height, OuterCopy copy_a,
                      OuterCopy copy_b) {
  using A = acc_t<T>;
  constexpr int R = Tile::kRows, C = Tile::kColumns;
  extern __shared__ __align__(128) unsigned char shared[];
  A* const shared_a = reinterpret_cast<A*>(shared);
  const int k = static_cast<int>(args.k), first = threadIdx.x / 32 * R;
  A* const shared_b = shared_a + k * Tile::kPitchA;
  TilePosition at = position(tiles, Tile::BM * height, Tile::BN);
  const OperandTile<T> b = columns_of_b(args, at, Tile::BN, 0);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  copy_lines<Tile::BN, Tile::kPitchB, Tile::kThreads>(shared_b, b, k, copy_b);
  A bias[C];
#pragma unroll
  for (int j = 0; j < C; ++j) {
    const int column = column_of<Tile, VECTORS>(j);
    bias[j] = args.bias != nullptr && column < b.extent
                  ? widen(args.bias[(at.column + column) * args.bias_stride])
                  : A(0);
  }
  for (int tile = 0; tile < height && at.row < args.m; ++tile, at.row += Tile::BM) {
    const OperandTile<T> a = rows_of_a(args, at, Tile::BM, 0);
    if (tile > 0) __syncthreads();  // all warps have multiplied the rows of the tile before
    copy_lines<Tile::BM, Tile::kPitchA, Tile::kThreads>(shared_a, a, k, copy_a);
    __syncthreads();
    A sum[R][C];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int j = 0; j < C; ++j) sum[r][j] = bias[j];
    }
    multiply_lane<Tile, VECTORS>(sum, shared_a + first, shared_b, k);
    store_rows<Tile, VECTORS>(sum, args, (at.matrix * args.m + at.row + first) * args.n + at.column,
                              min(R, a.extent - first), b.extent);
  }
}

// Blocks that compute several tiles read b less often: most_height of them, if there are as many blocks as a
// GPU runs at once nevertheless.
template <typename A, int GROUPS, typename T>
cudaError_t launch_outer(OuterTile<A, GROUPS>, int most_height, const GemmArgs<T>& args, int multiprocessors,
                         bool programmatic, cudaStream_t stream) {
  using Tile = OuterTile<A, GROUPS>;
  constexpr uintptr_t kBytes = sizeof(Vec<T, Tile::V>);
  const auto aligned = [](const T* data) { return reinterpret_cast<uintptr_t>(data) % kBytes == 0; };
  const auto copy = [&](const Matrices<T>& x, int64_t stride, int64_t k_stride) {
    const bool along_k = args.k > 1 && k_stride < stride;
    const bool vectors =
        along_k ? args.k % kVecWidth<T> == 0 && has_vectors(x.data, k_stride, stride, x.batch_stride)
                : (&x == &args.a ? args.m : args.n) % kVecWidth<T> == 0 &&
                      has_vectors(x.data, stride, k_stride, x.batch_stride);
    const auto per_line = static_cast<uint32_t>(vectors ? args.k / kVecWidth<T> : args.k);
    return OuterCopy{along_k, vectors, per_line > 1 ? UINT32_MAX / per_line + 1 : 0};
  };
  const bool vectors = args.n % Tile::V == 0 && aligned(args.c) && aligned(args.pre_activation);
  const int64_t tiles = Tiles(args, Tile::BM, Tile::BN).order.total, at_once = int64_t{multiprocessors} * 4;
  const int height = static_cast<int>(std::clamp<int64_t>(tiles / at_once, 1, most_height));
  const Tiles columns(args, Tile::BM * height, Tile::BN);
  return launch_kernel(vectors ? gemm_outer_kernel<T, Tile, true> : gemm_outer_kernel<T, Tile, false>,
                       dim3(static_cast<unsigned>(columns.order.total)), dim3(Tile::kThreads),
                       static_cast<int>(args.k) * Tile::kBytesOfK, programmatic, stream, args, columns,
                       height, copy(args.a, args.a.row_stride, args.a.column_stride),
                       copy(args.b, args.b.column_stride, args.b.row_stride));
}

}  // namespace lltm_ext
