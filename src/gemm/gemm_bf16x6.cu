// float32 by Hopper's tensor cores with float32's accuracy, precision="bf16x6": a value is the sum of three
// bfloat16 parts, each the rounded remainder of those before it, and the six largest of the nine products of
// two such sums give float32's accuracy.
//
// One kernel splits the operands into parts, another multiplies them, the smallest products first. Tensor
// cores accumulate with fewer bits than float32 has, so their sum is added to one in registers every 128 of
// K.
#ifdef LLTM_EXT_SM90A
#include <algorithm>

#include "common/hopper/launch.h"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/split.cuh"
#include "gemm/gemm_tile.cuh"

namespace lltm_ext {
namespace hopper {

// ---- Packing: operands [rows, k] of any strides become K-major [parts, batch, rows, padded k]

constexpr int kPackRows = 32, kPackColumns = 64, kPackThreads = 256;

struct PackArguments {
  const float* from;
  __nv_bfloat16* to;
  int64_t batch_stride, row_stride, k_stride;
  int64_t rows, k, padded;  // padded: the stride of rows in the packed operand
  int64_t part_stride;
  uint32_t row_blocks, column_blocks, blocks;  // blocks: of all matrices
};

__device__ __forceinline__ void store_parts(__nv_bfloat16* to, int64_t part_stride, float x, float y) {
  constexpr float kMax = 0x1.fep127f;  // bfloat16's; rounding a larger value would give infinity
  float rest[2] = {x, y};
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    Vec<__nv_bfloat16, 2> rounded;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      rounded.data[e] = __float2bfloat16_rn(p == 0 ? fminf(fmaxf(rest[e], -kMax), kMax) : rest[e]);
      rest[e] -= __bfloat162float(rounded.data[e]);
    }
    *reinterpret_cast<Vec<__nv_bfloat16, 2>*>(to + p * part_stride) = rounded;
  }
}

// Goes through shared memory, so that both loads and stores are coalesced.
__device__ __forceinline__ void pack_tile(const PackArguments& x, uint32_t block,
                                          float (&tile)[kPackRows][kPackColumns + 1]) {
  const uint32_t of_matrix = x.row_blocks * x.column_blocks;
  const uint32_t matrix = block / of_matrix, in_matrix = block - matrix * of_matrix;
  const bool along_k = x.k_stride == 1;
  // Blocks that run at the same time read neighbours in memory.
  const int64_t row = int64_t{along_k ? in_matrix / x.column_blocks : in_matrix % x.row_blocks} * kPackRows,
                column =
                    int64_t{along_k ? in_matrix % x.column_blocks : in_matrix / x.row_blocks} * kPackColumns;
  const float* from = x.from + matrix * x.batch_stride;
  constexpr int kPerThread = kPackRows * kPackColumns / kPackThreads;
  const auto place = [&](int i) {
    i = i * kPackThreads + threadIdx.x;
    return along_k ? int2{i / kPackColumns, i % kPackColumns} : int2{i % kPackRows, i / kPackRows};
  };
  float value[kPerThread];  // loaded together, to overlap their latencies
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int2 at = place(i);
    const bool inside = row + at.x < x.rows && column + at.y < x.k;
    value[i] = inside ? from[(row + at.x) * x.row_stride + (column + at.y) * x.k_stride] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) tile[place(i).x][place(i).y] = value[i];
  __syncthreads();
  __nv_bfloat16* const to = x.to + matrix * x.rows * x.padded;
  for (int i = threadIdx.x; i < kPackRows * kPackColumns / 2; i += kPackThreads) {
    const int r = i / (kPackColumns / 2), n = i % (kPackColumns / 2) * 2;
    if (row + r >= x.rows || column + n >= x.padded) continue;
    store_parts(to + (row + r) * x.padded + column + n, x.part_stride, tile[r][n], tile[r][n + 1]);
  }
}

__global__ void __launch_bounds__(kPackThreads)
    gemm_bf16x6_pack_kernel(const PackArguments a, const PackArguments b) {
  LLTM_HOPPER({
    __shared__ float tile[kPackRows][kPackColumns + 1];
    for_operands(a, b, [&](const PackArguments& x, uint32_t block) { pack_tile(x, block, tile); });
  });
}

// ---- Products

// Which parts of a and b each term multiplies, the smallest product first: 2 x 0, 0 x 2, 1 x 1, 1 x 0, 0 x 1,
// 0 x 0, two bits each.
constexpr int kTerms = 6;
__device__ __forceinline__ int2 parts_of(int term) {
  constexpr unsigned a = 2 | 0 << 2 | 1 << 4 | 1 << 6 | 0 << 8 | 0 << 10;
  constexpr unsigned b = 0 | 2 << 2 | 1 << 4 | 0 << 6 | 1 << 8 | 0 << 10;
  return {static_cast<int>(a >> 2 * term & 3), static_cast<int>(b >> 2 * term & 3)};
}

struct Bf16x6Arguments {
  Epilogue<float> epilogue;
  int tiles_of_k;
  int part_stride_a, part_stride_b;  // in matrices: 1 if one matrix serves the whole batch
};

template <class Mainloop>
struct Bf16x6Kernel {
  static constexpr int kClusterM = Mainloop::kClusterM, kN = Mainloop::kTileN;
  static constexpr int kThreads = 128 * (Mainloop::kConsumers + 1);
  static constexpr int kShared = Mainloop::kBytes + kBarrierBytes;

  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const Bf16x6Arguments& args,
                             const TileOrder& order) {
    unsigned char* shared = dynamic_shared();
    auto pipeline = pipeline_of<Mainloop>(shared, shared + Mainloop::kBytes);
    const uint32_t rank = kClusterM > 1 ? cluster_rank() : 0;
    const int64_t step = gridDim.x / kClusterM;
    int64_t i = blockIdx.x / kClusterM;
    start_pipeline(pipeline, a, b);
    TileIndex tile = first_element<Mainloop>(order, i, rank);
    const auto produce = [&] {
      for (; i < order.total; tile = first_element<Mainloop>(order, i += step, rank)) {
        for (int term = 0; term < kTerms; ++term) {
          const int2 part = parts_of(term);
          const int a_at = part.x * args.part_stride_a + (args.part_stride_a > 1 ? tile.matrix : 0),
                    b_at = part.y * args.part_stride_b + (args.part_stride_b > 1 ? tile.matrix : 0);
          for (int k = 0; k < args.tiles_of_k; ++k) {
            pipeline.load(a, b, tile.row, tile.column, k * Mainloop::kTileK, a_at, b_at, rank);
          }
        }
      }
    };
    run_warpgroups<Mainloop>(produce, [&](int warpgroup) {
      for (; i < order.total; tile = first_element<Mainloop>(order, i += step, rank)) {
        float sum[kN / 2];
        sum_terms(sum, pipeline, args.tiles_of_k * kTerms, warpgroup);
        store(sum, args, tile.row + 64 * warpgroup, tile.column, tile.matrix);
      }
    });
  }

 private:
  __device__ static __forceinline__ void sum_terms(float (&sum)[kN / 2], Pipeline<Mainloop>& pipeline,
                                                   int tiles, int warpgroup) {
    constexpr int kTiles = 2;  // that the tensor cores add
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sum[i] = 0.f;
    for (int k = 0; k < tiles; k += kTiles) {
      float d[kN / 2];
      pipeline.mma(d, tiles - k < kTiles ? tiles - k : kTiles, warpgroup);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) sum[i] += d[i];
    }
  }

  // Stores chunks of 64 columns. Shifting the accumulators, instead of indexing them, keeps the loop rolled,
  // so that the code of all activations exists once.
  __device__ static __forceinline__ void store(float (&d)[kN / 2], const Bf16x6Arguments& args, int row,
                                               int column, int matrix) {
    const Epilogue<float>& epilogue = args.epilogue;
    const auto store_chunk = [&](const float (&x)[32], float* to) {
      store_accumulators(x, to, epilogue.m, epilogue.n, row, column, matrix);
    };
#pragma unroll 1
    for (int chunk = 0; chunk < kN / 64; ++chunk, column += 64) {
      float x[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = d[i];
#pragma unroll
      for (int i = 0; i < kN / 2 - 32; ++i) d[i] = d[i + 32];
      if (epilogue.bias) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          x[i] += epilogue.bias_at(column + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2);
        }
      }
      if (epilogue.pre_activation) store_chunk(x, epilogue.pre_activation);
      activate(epilogue.activation, x);
      store_chunk(x, epilogue.c);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_bf16x6_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                       const __grid_constant__ Bf16x6Arguments args, const TileOrder order) {
  LLTM_HOPPER(Kernel::run(&a, &b, args, order));
}

// ---- Launchers

// An operand as [rows, K], and how it is packed.
struct PackedOperand {
  PackArguments pack;  // without `to`
  int64_t matrices;

  explicit PackedOperand(const Rows<float>& x) : matrices(x.matrices) {
    // Rows of whole cache lines, if they are that long; TMA needs multiples of 16 bytes.
    const int64_t multiple = x.k < 64 ? 8 : 64, padded = ceil_div(x.k, multiple) * multiple;
    pack = {x.data, nullptr, x.batch_stride, x.row_stride, x.k_stride, x.rows, x.k, padded};
    pack.part_stride = matrices * x.rows * padded;
    pack.row_blocks = static_cast<uint32_t>(ceil_div(x.rows, kPackRows));
    pack.column_blocks = static_cast<uint32_t>(ceil_div(padded, kPackColumns));
    pack.blocks = static_cast<uint32_t>(blocks());
  }
  int64_t blocks() const { return matrices * pack.row_blocks * int64_t{pack.column_blocks}; }
  int64_t bytes() const { return ceil_div(3 * pack.part_stride * int64_t{sizeof(__nv_bfloat16)}, 128) * 128; }
  GlobalTensor tensor() const {
    return {pack.to, pack.k, pack.rows, 3 * matrices, pack.padded, pack.rows * pack.padded};
  }
};

template <class Mainloop>
cudaError_t launch_products(const GlobalTensor& a, const GlobalTensor& b, const Bf16x6Arguments& args,
                            int64_t batch, const DeviceInfo& device, cudaStream_t stream) {
  using Kernel = Bf16x6Kernel<Mainloop>;
  constexpr int kClusterM = Mainloop::kClusterM;
  CUtensorMap map_a, map_b;
  cudaError_t error = encode_operands<Mainloop>(map_a, map_b, a, b);
  const auto kernel = gemm_bf16x6_kernel<Kernel>;
  if (error == cudaSuccess) error = set_max_dynamic_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  const TileOrder order(tiles_of(args.epilogue.m, Mainloop::kTileM * kClusterM),
                        tiles_of(args.epilogue.n, Mainloop::kTileN), batch);
  const int64_t clusters = std::min<int64_t>(order.total, device.multiprocessors / kClusterM);
  return launch_clusters(kernel, dim3(clusters * kClusterM), dim3(kClusterM), Kernel::kThreads,
                         Kernel::kShared,
                         /*programmatic=*/true, stream, map_a, map_b, args, order);
}

}  // namespace hopper

bool bf16x6_fits(const GemmArgs<float>& args) {
  const hopper::PackedOperand a(rows_of_a(args)), b(rows_of_b(args));
  return args.k > 0 && std::max({args.m, args.n, args.k}) <= INT32_MAX / 4 && args.batch <= INT32_MAX / 8 &&
         a.blocks() + b.blocks() <= INT32_MAX;
}

int64_t gemm_bf16x6_workspace_bytes(const GemmArgs<float>& args) {
  return hopper::PackedOperand(rows_of_a(args)).bytes() + hopper::PackedOperand(rows_of_b(args)).bytes();
}

cudaError_t gemm_bf16x6(const GemmArgs<float>& args, const DeviceInfo& device, cudaStream_t stream) {
  using namespace hopper;
  PackedOperand a(rows_of_a(args)), b(rows_of_b(args));
  a.pack.to = static_cast<__nv_bfloat16*>(args.workspace);
  b.pack.to = a.pack.to + a.bytes() / int64_t{sizeof(__nv_bfloat16)};
  const cudaError_t error =
      launch_kernel(gemm_bf16x6_pack_kernel, dim3(a.pack.blocks + b.pack.blocks), dim3(kPackThreads), 0,
                    /*programmatic=*/true, stream, a.pack, b.pack);
  if (error != cudaSuccess) return error;
  const Bf16x6Arguments arguments = {Epilogue<float>(args), tiles_of(args.k, kTileK),
                                     static_cast<int>(a.matrices), static_cast<int>(b.matrices)};
  // Its sums take as many registers as the accumulators: tiles of 256 columns do not fit.
  using Single = Mainloop<__nv_bfloat16, 128, 128, 6, false, false>;
  using Pair = Mainloop<__nv_bfloat16, 128, 128, 6, false, false, 2>;
  const int64_t rows = tiles_of(args.m, 128), tiles = rows * tiles_of(args.n, 128) * args.batch;
  const bool in_pairs = tiles > device.multiprocessors && (rows % 2 == 0 || rows >= 16);  // few lack rows
  const auto launch = in_pairs ? launch_products<Pair> : launch_products<Single>;
  return launch(a.tensor(), b.tensor(), arguments, args.batch, device, stream);
}

}  // namespace lltm_ext
#endif
