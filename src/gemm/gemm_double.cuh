// The kernel for float64 on GPUs with fast tensor cores for it.
//
// A block computes a BM x BN tile of c, each warp WM x WN of it. cp.async copies slices of BK of K to a ring
// in shared memory, in the operands' own layout (K_MAJOR: k is contiguous). A warp multiplies 16 x 16 x 16 at
// a time, and reloads a fragment as soon as its last product is issued, across slices too, so that the tensor
// core always finds its next operands in registers.
//
// A lane loads the elements of a fragment one by one, as mma.sync's layout has them. Vector loads would give
// another order for one operand of most layouts, and shared memory is only half busy.
#pragma once

#include "gemm/gemm_tile.cuh"

namespace lltm_ext {

// HOPPER: compiled for Hopper only.
// CLUSTERS: there are kernels whose clusters split K.
template <int BM_, int BN_, int BK_, int WM_, int WN_, int STAGES, int BLOCKS, bool CLUSTERS = false,
          bool HOPPER = false>
struct DoubleTile {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, WM = WM_, WN = WN_;
  static constexpr int kStages = STAGES, kBlocksPerMultiprocessor = BLOCKS;
  static constexpr bool kClusters = CLUSTERS, kHopper = HOPPER;
  static constexpr int kWarpsAcross = BN / WN;
  static constexpr int kThreads = BM / WM * kWarpsAcross * 32;
  // The ring stages the tile of sums, one row of warps at a time.
  static_assert(WM * BN <= STAGES * (BM + BN) * BK);
  // Row blocks alternate between two fragments of a, and copy_b runs in the second row block.
  static_assert(WM % 32 == 0 && WN % 16 == 0 && BK % 16 == 0);
};

// 16 lines (rows of a, columns of b) by 16 k of an operand. For each step of 4 k and each half of the lines,
// a lane holds line lane / 4 at k = lane % 4.
using DoubleFragment = double[4][2];

template <bool K_MAJOR, int EXTENT, int BK, int THREADS>
struct DoubleSlice {
  // Rows of memory, not the fragment's lines.
  static constexpr int kRows = K_MAJOR ? EXTENT : BK, kRowLength = K_MAJOR ? BK : EXTENT;

  // The padding spreads the 4 x 4 elements that half a warp loads at once over all banks.
  static constexpr int kPitch = kRowLength + 4, kElements = kRows * kPitch;

  // The first element that this thread copies of a slice, WIDTH at once.
  template <int WIDTH>
  struct Start {
    int row = threadIdx.x / (kRowLength / WIDTH), element = threadIdx.x % (kRowLength / WIDTH) * WIDTH;
  };

  static __device__ __forceinline__ int64_t stride(const OperandTile<double>& x) {
    return K_MAJOR ? x.k_stride : x.stride;
  }
  static __device__ __forceinline__ int64_t row_stride(const OperandTile<double>& x) {
    return K_MAJOR ? x.stride : x.k_stride;
  }

  static __device__ __forceinline__ int64_t offset(const OperandTile<double>& x, bool vectors) {
    if (vectors) return Start<2>().row * row_stride(x) + Start<2>().element;
    return Start<1>().row * row_stride(x) + Start<1>().element * stride(x);
  }

  // Copies this thread's share of a slice. WHOLE: nothing is beyond the operand's end. x.data is the thread's
  // first element.
  template <int WIDTH, bool WHOLE>
  static __device__ __forceinline__ void copy(double* shared, const OperandTile<double>& x, int64_t k_left) {
    constexpr int kStep = THREADS * WIDTH / kRowLength, kBytes = WIDTH * sizeof(double);
    static_assert(THREADS * WIDTH % kRowLength == 0 && kRows % kStep == 0);
    const Start<WIDTH> start;
    const int depth = clamp_to_int(k_left, BK);
    const int rows = (K_MAJOR ? x.extent : depth) - start.row;
    const int length = (K_MAJOR ? depth : x.extent) - start.element;
    const int valid = WHOLE ? kBytes : min(max(length, 0), WIDTH) * static_cast<int>(sizeof(double));
    const double* from = x.data;
#pragma unroll
    for (int i = 0; i < kRows; i += kStep, from += kStep * row_stride(x)) {
      cp_async<kBytes>(shared + (start.row + i) * kPitch + start.element, from,
                       WHOLE || i < rows ? valid : 0);
    }
  }

  static __device__ __forceinline__ void copy(double* shared, const OperandTile<double>& x, bool vectors,
                                              int64_t k_left) {
    if (!vectors) {
      copy<1, false>(shared, x, k_left);
    } else if (x.extent == EXTENT && k_left >= BK) {
      copy<2, true>(shared, x, k_left);
    } else {
      copy<2, false>(shared, x, k_left);
    }
  }

  // Loads the fragment at line `first` and k.
  static __device__ __forceinline__ void load(DoubleFragment& x, const double* shared, int first, int k) {
    const int line = first + threadIdx.x % 32 / 4;
    k += threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[i][half] = K_MAJOR ? shared[(line + 8 * half) * kPitch + k + 4 * i]
                             : shared[(k + 4 * i) * kPitch + line + 8 * half];
      }
    }
  }
};

// Whether a compute capability (80 is 8.0) multiplies float64 faster on tensor cores.
constexpr bool has_double_tensor_cores(int capability) {
  return capability == 80 || capability == 90 || capability == 100;
}
#ifdef __CUDA_ARCH__
constexpr bool kForDoubleTensorCores = has_double_tensor_cores(__CUDA_ARCH__ / 10);
#else
constexpr bool kForDoubleTensorCores = false;
#endif

// c [16, 8] += a [16, 16] b [16, 8], where b's columns are one half of a fragment's lines. With g = lane / 4
// and t = 2 (lane % 4), c holds row g at columns t, t + 1, then row g + 8.
__device__ __forceinline__ void mma(double (&c)[4], const DoubleFragment& a, const DoubleFragment& b,
                                    int half) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0][0]), "d"(a[0][1]), "d"(a[1][0]), "d"(a[1][1]), "d"(a[2][0]), "d"(a[2][1]), "d"(a[3][0]),
        "d"(a[3][1]), "d"(b[0][half]), "d"(b[1][half]), "d"(b[2][half]), "d"(b[3][half]));
#elif __CUDA_ARCH__ >= 800
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                   : "+d"(c[2 * j]), "+d"(c[2 * j + 1])
                   : "d"(a[i][j]), "d"(b[i][half]));
    }
  }
#endif
}

// The ring of slices of a and b in shared memory.
template <class Tile, bool A_K_MAJOR, bool B_K_MAJOR>
struct DoubleRing {
  using A = DoubleSlice<A_K_MAJOR, Tile::BM, Tile::BK, Tile::kThreads>;
  using B = DoubleSlice<B_K_MAJOR, Tile::BN, Tile::BK, Tile::kThreads>;
  static constexpr int kStage = A::kElements + B::kElements;
  static constexpr int kBytes = Tile::kStages * kStage * static_cast<int>(sizeof(double));
};

// CLUSTER: the blocks that split K are a cluster, and add their sums.
template <class Tile, bool A_K_MAJOR, bool B_K_MAJOR, bool CLUSTER>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    gemm_double_kernel(const GemmArgs<double> args, const Tiles tiles, bool vectors_a, bool vectors_b) {
  if constexpr (!kForDoubleTensorCores || ((Tile::kHopper || CLUSTER) && !kForHopper)) {
    __trap();  // never launched on these architectures
    return;
  }
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, WM = Tile::WM, WN = Tile::WN;
  constexpr int kStages = Tile::kStages, kRowBlocks = WM / 16, kColumnBlocks = WN / 16;
  using Ring = DoubleRing<Tile, A_K_MAJOR, B_K_MAJOR>;
  using SliceA = typename Ring::A;
  using SliceB = typename Ring::B;
  extern __shared__ __align__(128) double ring[];  // kStages slices of a and b

  const int warp = threadIdx.x / 32;
  const int warp_row = warp / Tile::kWarpsAcross * WM, warp_column = warp % Tile::kWarpsAcross * WN;
  const TilePosition at = position(tiles, BM, BN);
  const KRange range = range_of_k(args.k, BK, tiles, at);
  OperandTile<double> a = rows_of_a(args, at, BM, range.begin), b = columns_of_b(args, at, BN, range.begin);
  a.data += SliceA::offset(a, vectors_a);
  b.data += SliceB::offset(b, vectors_b);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const auto next = [](int stage) {
    return stage == (kStages - 1) * Ring::kStage ? 0 : stage + Ring::kStage;
  };
  int64_t left = range.size;  // to copy
  int filling = 0, stage = 0;
  const auto copy_a = [&] {
    if (left > 0) SliceA::copy(ring + filling, a, vectors_a, left);
    a.data += BK * a.k_stride;
  };
  const auto copy_b = [&] {
    if (left > 0) SliceB::copy(ring + filling + SliceA::kElements, b, vectors_b, left);
    b.data += BK * b.k_stride;
    cp_async_commit_group();  // even if empty: the wait counts groups
    left -= BK;
    filling = next(filling);
  };

  DoubleFragment x[2], y[kColumnBlocks];
  const auto load_x = [&](int i, int r, int k) { SliceA::load(x[i], ring + stage, warp_row + r * 16, k); };
  const auto load_y = [&](int s, int k) {
    SliceB::load(y[s], ring + stage + SliceA::kElements, warp_column + s * 16, k);
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    copy_a();
    copy_b();
  }
  cp_async_wait_group<kStages - 2>();
  __syncthreads();
  load_x(0, 0, 0);
#pragma unroll
  for (int s = 0; s < kColumnBlocks; ++s) load_y(s, 0);

  double sum[kRowBlocks][kColumnBlocks][2][4] = {};
#pragma unroll 1
  for (int64_t k = 0; k < range.size; k += BK) {
#pragma unroll
    for (int i = 0; i < BK; i += 16) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        // While row block r is multiplied, the next is loaded; during the last, b's next 16 k too.
        const bool last = r == kRowBlocks - 1;
        const int next_k = last ? (i + 16) % BK : i;
        if (i == 0 && r == 0) copy_a();  // overwrites the previous slice, which all warps have loaded
        if (i == 0 && r == 1) copy_b();
        // The branch keeps the compiler from moving the last products before the barrier: the tensor core
        // executes them while the next slice's first fragments are loaded.
        if (last && next_k == 0 && k + BK < range.size) {
          cp_async_wait_group<kStages - 2>();
          __syncthreads();  // the next slice is here, and all warps have loaded this one
          stage = next(stage);
        }
        load_x((r + 1) % 2, (r + 1) % kRowBlocks, next_k);
#pragma unroll
        for (int s = 0; s < kColumnBlocks; ++s) {
#pragma unroll
          for (int half = 0; half < 2; ++half) mma(sum[r][s][half], x[r % 2], y[s], half);
          if (last) load_y(s, next_k);
        }
      }
    }
  }

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
  for (int part = 0; part < BM / WM; ++part) {
    if (part == 0) __syncthreads();
    if (warp / Tile::kWarpsAcross == part) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int s = 0; s < kColumnBlocks; ++s) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = r * 16 + i % 2 * 8 + g, column = warp_column + s * 16 + i / 2 * 8 + 2 * t;
            const double (&c)[4] = sum[r][s][i / 2];
            *reinterpret_cast<Vec<double, 2>*>(ring + staged_at<double, BN>(row, column)) = {
                {c[i % 2 * 2], c[i % 2 * 2 + 1]}};
          }
        }
      }
    }
    sync_sharers<CLUSTER>();
    write_staged<WM, BN, Tile::kThreads, 0, CLUSTER>(args, tiles, at, part * WM, ring);
    if (CLUSTER || part + 1 < BM / WM) sync_sharers<CLUSTER>();  // all have read what is staged
  }
}

template <int BM, int BN, int BK, int WM, int WN, int STAGES, int BLOCKS, bool CLUSTERS, bool HOPPER>
cudaError_t launch_tile(DoubleTile<BM, BN, BK, WM, WN, STAGES, BLOCKS, CLUSTERS, HOPPER> tile,
                        const GemmArgs<double>& args, const Schedule& schedule, bool, cudaStream_t stream) {
  return with_layouts(args, [&](auto a_k_major, auto b_k_major) {
    using Tile = decltype(tile);
    const auto run = [&](auto cluster) {
      return launch_tiles<Tile>(gemm_double_kernel<Tile, a_k_major, b_k_major, cluster>,
                                DoubleRing<Tile, a_k_major, b_k_major>::kBytes, args, schedule, stream,
                                has_vectors(args.a, a_k_major), has_vectors(args.b, !b_k_major));
    };
    if constexpr (CLUSTERS) {
      if (schedule.in_cluster) return run(std::true_type());
    }
    return run(std::false_type());
  });
}

}  // namespace lltm_ext
