// gemm in float32 on Hopper's tensor cores, for precisions other than IEEE.
//
// bf16x6, bf16x9: a value is the sum of three bfloat16 parts, each the rounded remainder of those before it.
// The six largest of the nine products of two such sums give float32's accuracy, all nine a little more. One
// kernel splits the operands into parts, another multiplies them, the smallest products first. Tensor cores
// accumulate with fewer bits than float32 has, so their sum is added to one in registers every 128 of K. In
// bf16x9 the product of the first parts dominates: it is added every 64 of K. The rounding errors of these
// additions join the sum of the other eight products, which is added last.
//
// tf32: TMA rounds operands to nearest as it loads them; tensor cores would ignore the last 13 bits. wgmma
// reads K-major operands from shared memory. The other one of a product goes through registers: b too, by
// computing the transpose of c. Of two such operands the smaller is copied first, and so is what TMA cannot
// address.
#ifdef LLTM_EXT_SM90A
#include "common/hopper/launch.h"
#include "common/hopper/split.cuh"
#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "common/vec.cuh"
#include "gemm/gemm_hopper.h"
#include "gemm/gemm_hopper_mainloop.cuh"
#include "gemm/gemm_schedule.h"
#include "gemm/gemm_split_k.cuh"

namespace lltm_ext {
namespace hopper {

// ---- packing: operands [rows, k] of any strides become K-major [parts, batch, rows, padded k]

constexpr int kPackRows = 32, kPackColumns = 64, kPackThreads = 256;

struct PackArguments {
  const float* from;
  void* to;
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
__device__ __forceinline__ void store_parts(float* to, int64_t, float x, float y) {
  *reinterpret_cast<Vec<float, 2>*>(to) = {x, y};
}

// Goes through shared memory, so that both loads and stores are coalesced.
template <typename T>
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
  T* const to = static_cast<T*>(x.to) + matrix * x.rows * x.padded;
  for (int i = threadIdx.x; i < kPackRows * kPackColumns / 2; i += kPackThreads) {
    const int r = i / (kPackColumns / 2), n = i % (kPackColumns / 2) * 2;
    if (row + r >= x.rows || column + n >= x.padded) continue;
    store_parts(to + (row + r) * x.padded + column + n, x.part_stride, tile[r][n], tile[r][n + 1]);
  }
}

// A pointer to the arguments of either operand would put them in local memory.
template <typename T>
__device__ __forceinline__ void pack_operands(const PackArguments& a, const PackArguments& b) {
  __shared__ float tile[kPackRows][kPackColumns + 1];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (blockIdx.x < a.blocks) {
    pack_tile<T>(a, blockIdx.x, tile);
  } else {
    pack_tile<T>(b, blockIdx.x - a.blocks, tile);
  }
}

template <typename T>
__global__ void __launch_bounds__(kPackThreads)
    gemm_float_pack_kernel(const PackArguments a, const PackArguments b) {
  LLTM_HOPPER(pack_operands<T>(a, b));
}

// ---- products

// Which parts of a and b each term multiplies, the smallest product first.
template <int kTerms>
struct Terms;
template <>
struct Terms<1> {
  __device__ static int2 at(int) { return {0, 0}; }
};
template <>
struct Terms<9> {
  // 2 x 2, 2 x 1, 1 x 2, 2 x 0, 0 x 2, 1 x 1, 1 x 0, 0 x 1, 0 x 0: two bits each.
  __device__ static int2 at(int term) {
    constexpr unsigned a = 2 | 2 << 2 | 1 << 4 | 2 << 6 | 0 << 8 | 1 << 10 | 1 << 12 | 0 << 14 | 0 << 16;
    constexpr unsigned b = 2 | 1 << 2 | 2 << 4 | 0 << 6 | 2 << 8 | 1 << 10 | 0 << 12 | 1 << 14 | 0 << 16;
    return {static_cast<int>(a >> 2 * term & 3), static_cast<int>(b >> 2 * term & 3)};
  }
};
template <>
struct Terms<6> {
  __device__ static int2 at(int term) { return Terms<9>::at(term + 3); }
};

// The product left @ right^T of [rows, K] and [columns, K] is c, or the transpose of c.
struct FloatArguments {
  const float* bias;  // [N], or null
  int64_t bias_stride;
  float *c, *pre_activation;  // [batch, M, N], contiguous; pre_activation may be null
  int rows, columns, tiles_of_k;
  Divisor by_splits, by_batch;  // with several splits of K, c is [splits, batch, M, N], and so are the tiles
  int part_stride_left, part_stride_right;  // in matrices
  bool batched_left, batched_right;         // else one matrix serves the whole batch
  bool transposed;
  bool pairs;  // whether two neighbours can be stored at a time
  Activation activation;

  __device__ __forceinline__ int split_of(const TileIndex& tile) const {
    return static_cast<int>(by_batch.quotient(tile.matrix));
  }
  __device__ __forceinline__ int first_of_k(int split) const {
    return static_cast<int>(by_splits.quotient(int64_t{tiles_of_k} * split));
  }
};

template <class Mainloop, int kTerms>
struct FloatKernel {
  // A tile of c, and the slices of K that are multiplied for it.
  struct Part {
    TileIndex tile;
    int matrix, first_of_k, tiles_of_k;  // matrix: of the batch; tile.matrix counts splits too
  };

  static constexpr int kClusterM = Mainloop::kClusterM, kN = Mainloop::kTileN;
  static constexpr int kConsumers = Mainloop::kConsumers, kRowStep = Pipeline<Mainloop>::kRowStep;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kShared = Mainloop::kBytes + kBarrierBytes;

  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const FloatArguments& args,
                             const TileOrder& order) {
    unsigned char* shared = dynamic_shared();
    auto pipeline = pipeline_of<Mainloop>(shared, shared + Mainloop::kBytes);
    const uint32_t rank = kClusterM > 1 ? cluster_rank() : 0;
    const int warpgroup = threadIdx.x / 128;
    const int64_t step = gridDim.x / kClusterM;
    int64_t i = blockIdx.x / kClusterM;
    const auto part_at = [&](int64_t i) {
      const TileIndex tile = first_element<Mainloop>(order, i, rank);
      const int split = args.split_of(tile), first_of_k = args.first_of_k(split);
      return Part{tile, tile.matrix - split * static_cast<int>(args.by_batch.divisor), first_of_k,
                  args.first_of_k(split + 1) - first_of_k};
    };
    start_pipeline(pipeline, a, b);
    Part part = part_at(i);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (warpgroup == kConsumers) {
      setmaxnreg_dec<kProducerRegisters>();
      if (threadIdx.x % 128 == 0) {
        for (; i < order.total; part = part_at(i += step)) {
          for (int term = 0; term < kTerms; ++term) {
            const int2 factors = Terms<kTerms>::at(term);
            const int a_at = factors.x * args.part_stride_left + (args.batched_left ? part.matrix : 0),
                      b_at = factors.y * args.part_stride_right + (args.batched_right ? part.matrix : 0);
            for (int k = part.first_of_k; k < part.first_of_k + part.tiles_of_k; ++k) {
              pipeline.load(a, b, part.tile.row, part.tile.column, k * Mainloop::kTileK, a_at, b_at, rank);
            }
          }
        }
      }
      __syncwarp();
    } else {
      setmaxnreg_inc<kConsumerRegisters>();
      for (; i < order.total; part = part_at(i += step)) {
        float sum[kN / 2];
        if constexpr (kTerms == 1) {
          pipeline.mma(sum, part.tiles_of_k, warpgroup);
        } else {
          sum_terms(sum, pipeline, part.tiles_of_k, warpgroup);
        }
        store(sum, args, part.tile.row + 64 * warpgroup, part.tile.column, part.tile.matrix);
      }
    }
    // Other blocks of the cluster may still write to this block's shared memory.
    if constexpr (kClusterM > 1) cluster_sync();
  }

 private:
  __device__ static __forceinline__ void sum_terms(float (&sum)[kN / 2], Pipeline<Mainloop>& pipeline,
                                                   int tiles_of_k, int warpgroup) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sum[i] = 0.f;
    if constexpr (kTerms < 9) {
      promote<2>(pipeline, tiles_of_k * kTerms, warpgroup, [&](int i, float x) { sum[i] += x; });
    } else {
      float rest[kN / 2] = {};
      promote<2>(pipeline, tiles_of_k * (kTerms - 1), warpgroup, [&](int i, float x) { rest[i] += x; });
      promote<1>(pipeline, tiles_of_k, warpgroup, [&](int i, float x) {
        const float both = sum[i] + x;
        rest[i] += x - (both - sum[i]);  // the rounding error of `both`
        sum[i] = both;
      });
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        if (isfinite(sum[i])) sum[i] += rest[i];  // after an overflow `rest` is NaN
      }
    }
  }

  // Calls add(i, x) with the thread's i-th product of every kTiles tiles of K.
  template <int kTiles, class Add>
  __device__ static __forceinline__ void promote(Pipeline<Mainloop>& pipeline, int tiles, int warpgroup,
                                                 const Add& add) {
    for (int k = 0; k < tiles; k += kTiles) {
      float d[kN / 2];
      pipeline.mma(d, tiles - k < kTiles ? tiles - k : kTiles, warpgroup);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) add(i, d[i]);
    }
  }

  // Stores chunks of 64 columns. Of each 8 columns wgmma gives a thread two neighbours in its first row and
  // the same two kRowStep below. Shifting the accumulators, instead of indexing them, keeps the loop rolled,
  // so that the code of all activations exists once.
  __device__ static __forceinline__ void store(float (&d)[kN / 2], const FloatArguments& args, int row,
                                               int column, int matrix) {
    row += Pipeline<Mainloop>::first_row();
    column += threadIdx.x % 4 * 2;
#pragma unroll 1
    for (int chunk = 0; chunk < kN / 64; ++chunk, column += 64) {
      float x[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = d[i];
#pragma unroll
      for (int i = 0; i < kN / 2 - 32; ++i) d[i] = d[i + 32];
      if (args.bias) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int r = row + i / 2 % 2 * kRowStep, s = column + i / 4 * 8 + i % 2;
          if (r < args.rows && s < args.columns)
            x[i] += args.bias[(args.transposed ? r : s) * args.bias_stride];
        }
      }
      if (args.pre_activation) store_chunk(x, args, args.pre_activation, row, column, matrix);
      activate(args.activation, x);
      store_chunk(x, args, args.c, row, column, matrix);
    }
  }

  __device__ static __forceinline__ void store_chunk(const float (&x)[32], const FloatArguments& args,
                                                     float* to, int row, int column, int matrix) {
    const int64_t row_stride = args.transposed ? 1 : args.columns,
                  column_stride = args.transposed ? args.rows : 1;
    to += int64_t{matrix} * args.rows * args.columns + row * row_stride + column * column_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half, to += kRowStep * row_stride) {
      if (row + half * kRowStep >= args.rows) return;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float first = x[4 * i + 2 * half], second = x[4 * i + 2 * half + 1];
        const int left = args.columns - column - 8 * i;
        if (args.pairs) {
          if (left > 0) *reinterpret_cast<Vec<float, 2>*>(to + 8 * i) = {first, second};
        } else {
          if (left > 0) to[8 * i * column_stride] = first;
          if (left > 1) to[(8 * i + 1) * column_stride] = second;
        }
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_float_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                      const __grid_constant__ FloatArguments args, const TileOrder order) {
  LLTM_HOPPER(Kernel::run(&a, &b, args, order));
}

// ---- launchers

// How a kernel gets an operand.
enum class Reading { kInPlace, kThroughRegisters, kPacked };

// An operand as [rows, K].
struct FloatOperand {
  Matrices<float> x;
  int64_t rows, k, row_stride, k_stride, matrices;
  Reading reading;

  // The operand in memory as TMA sees it if it is not packed: [rows, K], or [K, rows].
  GlobalTensor tensor() const {
    if (k_stride == 1) return {x.data, k, rows, matrices, row_stride, x.batch_stride};
    return {x.data, rows, k, matrices, k_stride, x.batch_stride};
  }
  bool is_smaller_than(const FloatOperand& other) const {
    return rows * matrices < other.rows * other.matrices;
  }
};

inline FloatOperand float_operand(const Matrices<float>& x, int64_t rows, int64_t k, int64_t row_stride,
                                  int64_t k_stride, const GemmArgs<float>& args) {
  FloatOperand found = {
      x, rows, k, row_stride, k_stride, x.batch_stride == 0 ? 1 : args.batch, Reading::kPacked};
  const bool readable = args.precision == Precision::kTf32 && tma_supports(found.tensor(), sizeof(float));
  if (readable && k_stride == 1) {
    found.reading = Reading::kInPlace;
  } else if (readable && row_stride == 1) {
    found.reading = Reading::kThroughRegisters;
  }
  return found;
}

struct FloatProduct {
  FloatOperand left, right;
  bool transposed;  // left is b
};

inline FloatProduct float_product(const GemmArgs<float>& args) {
  FloatOperand a = float_operand(args.a, args.m, args.k, args.a.row_stride, args.a.column_stride, args),
               b = float_operand(args.b, args.n, args.k, args.b.column_stride, args.b.row_stride, args);
  if (a.reading == Reading::kThroughRegisters && b.reading == Reading::kThroughRegisters) {
    (a.is_smaller_than(b) ? a : b).reading = Reading::kPacked;
  }
  // The transpose of c is stored in larger pieces than c, if c's rows are not pairs.
  const bool is_a_through_registers = a.reading == Reading::kThroughRegisters;
  const bool transposed = b.reading == Reading::kThroughRegisters ||
                          (args.precision == Precision::kTf32 && !is_a_through_registers && args.n % 2 != 0);
  return transposed ? FloatProduct{b, a, true} : FloatProduct{a, b, false};
}

// How an operand is packed. 0 parts: it is not.
struct Packing {
  int parts, element_size;
  int64_t padded;

  int64_t bytes(const FloatOperand& x) const {
    return (parts * x.matrices * x.rows * padded * element_size + 127) / 128 * 128;
  }
};

inline Packing packing_of(const FloatOperand& x, Precision precision) {
  const bool tf32 = precision == Precision::kTf32;
  const int element_size = tf32 ? sizeof(float) : sizeof(__nv_bfloat16);
  // Rows of whole cache lines, if they are that long; TMA needs multiples of 16 bytes.
  const int64_t multiple = (x.k * element_size < 128 ? 16 : 128) / element_size;
  const int parts = x.reading != Reading::kPacked ? 0 : tf32 ? 1 : 3;
  return {parts, element_size, ceil_div(x.k, multiple) * multiple};
}

inline int64_t pack_blocks(const FloatOperand& x, const Packing& packing) {
  if (packing.parts == 0) return 0;
  return x.matrices * ceil_div(x.rows, kPackRows) * ceil_div(packing.padded, kPackColumns);
}

inline PackArguments pack_arguments(const FloatOperand& x, const Packing& packing, void* to) {
  return {x.x.data,
          to,
          x.x.batch_stride,
          x.row_stride,
          x.k_stride,
          x.rows,
          x.k,
          packing.padded,
          x.matrices * x.rows * packing.padded,
          static_cast<uint32_t>(ceil_div(x.rows, kPackRows)),
          static_cast<uint32_t>(ceil_div(packing.padded, kPackColumns)),
          static_cast<uint32_t>(pack_blocks(x, packing))};
}

inline GlobalTensor packed(const FloatOperand& x, const Packing& packing, void* data) {
  if (packing.parts == 0) return x.tensor();
  return {data, x.k, x.rows, packing.parts * x.matrices, packing.padded, x.rows * packing.padded};
}

template <class Mainloop, int kTerms>
cudaError_t launch_products(const GlobalTensor& a, const GlobalTensor& b, const FloatArguments& args,
                            int multiprocessors, cudaStream_t stream) {
  using Kernel = FloatKernel<Mainloop, kTerms>;
  constexpr int kClusterM = Mainloop::kClusterM;
  CUtensorMap map_a, map_b;
  cudaError_t error = encode_operands<Mainloop>(map_a, map_b, a, b);
  const auto kernel = gemm_float_kernel<Kernel>;
  if (error == cudaSuccess) error = set_max_dynamic_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  const TileOrder order(tiles_of(args.rows, Mainloop::kTileM * kClusterM),
                        tiles_of(args.columns, Mainloop::kTileN),
                        args.by_batch.divisor * args.by_splits.divisor);
  const int64_t clusters = std::min<int64_t>(order.total, multiprocessors / kClusterM);
  return launch_clusters(kernel, dim3(clusters * kClusterM), dim3(kClusterM), Kernel::kThreads,
                         Kernel::kShared, /*programmatic=*/true, stream, map_a, map_b, args, order);
}

// The partial sums are at the start of the workspace, packed operands after them.
inline int64_t sum_bytes(const GemmArgs<float>& args, int splits) {
  return (partial_sum_bytes(args, splits) + 127) / 128 * 128;
}

template <typename T, int kTerms>
cudaError_t run(const GemmArgs<float>& args, const HopperPlan& plan, int multiprocessors,
                cudaStream_t stream) {
  const FloatProduct product = float_product(args);
  const FloatOperand &left = product.left, &right = product.right;
  const Packing packing_left = packing_of(left, args.precision),
                packing_right = packing_of(right, args.precision);
  char* const to_left = static_cast<char*>(args.workspace) + sum_bytes(args, plan.splits);
  char* const to_right = to_left + packing_left.bytes(left);
  const PackArguments pack_left = pack_arguments(left, packing_left, to_left),
                      pack_right = pack_arguments(right, packing_right, to_right);
  if (const uint32_t blocks = pack_left.blocks + pack_right.blocks; blocks > 0) {
    const cudaError_t error = launch_kernel(gemm_float_pack_kernel<T>, dim3(blocks), dim3(kPackThreads), 0,
                                            /*programmatic=*/true, stream, pack_left, pack_right);
    if (error != cudaSuccess) return error;
  }
  const GlobalTensor tensor_left = packed(left, packing_left, to_left),
                     tensor_right = packed(right, packing_right, to_right);
  const bool in_parts = plan.splits > 1;
  const auto pairs = [](const float* p) { return reinterpret_cast<uintptr_t>(p) % 8 == 0; };
  const FloatArguments arguments = {
      in_parts ? nullptr : args.bias,
      args.bias_stride,
      in_parts ? static_cast<float*>(args.workspace) : args.c,
      in_parts ? nullptr : args.pre_activation,
      static_cast<int>(left.rows),
      static_cast<int>(right.rows),
      tiles_of(args.k, kTileKOf<T>),
      Divisor(plan.splits),
      Divisor(args.batch),
      static_cast<int>(left.matrices),
      static_cast<int>(right.matrices),
      left.matrices > 1,
      right.matrices > 1,
      product.transposed,
      !product.transposed && args.n % 2 == 0 && (in_parts || (pairs(args.c) && pairs(args.pre_activation))),
      in_parts ? Activation::kNone : args.activation};
  const auto launch = [&](auto mainloop) {
    return launch_products<decltype(mainloop), kTerms>(tensor_left, tensor_right, arguments, multiprocessors,
                                                       stream);
  };
  cudaError_t error;
  if constexpr (kTerms == 1) {
    const auto launch_tiling = [&](auto through_registers) {
      constexpr bool kMnMajor = decltype(through_registers)::value;
      return plan.kernel == 0   ? launch(Mainloop<T, 128, 128, 6, kMnMajor, false>())
             : plan.kernel == 1 ? launch(Mainloop<T, 128, 256, 4, kMnMajor, false>())
                                : launch(Mainloop<T, 128, 256, 4, kMnMajor, false, 2>());
    };
    error = left.reading == Reading::kThroughRegisters ? launch_tiling(std::true_type())
                                                       : launch_tiling(std::false_type());
  } else {
    error = plan.kernel == 0 ? launch(Mainloop<T, 128, 128, 6, false, false>())
                             : launch(Mainloop<T, 128, 128, 6, false, false, 2>());
  }
  if (error != cudaSuccess || plan.splits == 1) return error;
  return launch_reduce(args, plan.splits, /*programmatic=*/true, stream);
}

bool float_supported(const GemmArgs<float>& args) {
  if (args.precision == Precision::kIeee || args.m <= 0 || args.n <= 0 || args.k <= 0) return false;
  const FloatProduct product = float_product(args);
  int64_t blocks = 0;
  for (const FloatOperand& x : {product.left, product.right}) {
    blocks += pack_blocks(x, packing_of(x, args.precision));
  }
  return std::max({args.m, args.n, args.k}) <= INT32_MAX / 4 && args.batch <= INT32_MAX / 8 &&
         blocks <= INT32_MAX;
}

// The tiles of TF32, and what they take in microseconds: 32 of K while few blocks run, or all of them, which
// share L2's bandwidth; the rest of a round of tiles. Fitted to 650 random products on an H200.
struct FloatTiling {
  int columns, cluster;
  double slice, slice_of_all, ends;
};
constexpr FloatTiling kFloatTilings[] = {
    {128, 1, 0.304, 0.636, 1.38}, {256, 1, 0.557, 0.927, 3.2}, {256, 2, 0.566, 0.754, 3.64}};

// Which tiles of TF32, and how many parts of K, take the least time.
HopperPlan tf32_plan(const GemmArgs<float>& args, const FloatProduct& product, int64_t packed_bytes,
                     const DeviceInfo& device) {
  constexpr double kLaunch = 1.96, kPack = 2.53, kPackBytesPerMicrosecond = 3.1e6, kOddElement = 1.9e-6;
  const double pack =
      packed_bytes > 0 ? kPack + 2 * static_cast<double>(packed_bytes) / kPackBytesPerMicrosecond : 0;
  const int64_t slices = tiles_of(args.k, kTileKOf<float>);
  const GemmSizes sizes = {args.batch, args.m, args.n, args.k, sizeof(float), sizeof(float)};
  HopperPlan best = {};
  for (int i = 0; i < 3; ++i) {
    const FloatTiling& tiling = kFloatTilings[i];
    const int64_t at_once = device.multiprocessors / tiling.cluster;
    const int64_t tiles = args.batch * tiles_of(product.left.rows, 128 * tiling.cluster) *
                          tiles_of(product.right.rows, tiling.columns);
    for (int64_t filled = 0; filled <= 2; ++filled) {
      const int64_t splits = filled == 0 ? 1 : std::min(at_once * filled / tiles, slices);
      if (splits < 1 || (filled > 0 && splits < 2) || partial_sum_bytes(args, splits) > kMostSumBytes)
        continue;
      const auto round = [&](double busy) {
        return static_cast<double>(ceil_div(slices, splits)) *
                   std::hypot(tiling.slice, tiling.slice_of_all * busy) +
               tiling.ends;
      };
      const int64_t blocks = tiles * splits;
      // Rows of c that are not pairs take longer to store.
      const double odd =
          args.n % 2 == 0 ? 0 : kOddElement * static_cast<double>(args.batch * args.m * args.n * splits);
      double time = kLaunch + pack + odd + time_of_result(sizes) + time_of_sums(sizes, splits) +
                    static_cast<double>(blocks / at_once) * round(1);
      if (const int64_t rest = blocks % at_once; rest > 0) {
        time += round(static_cast<double>(rest) / static_cast<double>(at_once));
      }
      if (best.supported && time >= best.time) continue;
      best = {true, time, sum_bytes(args, static_cast<int>(splits)) + packed_bytes, i,
              static_cast<int>(splits)};
    }
  }
  return best;
}

// The parts of bfloat16 are asked for because they are more exact, or to save time in large products. Their
// sums take as many registers as the accumulators: tiles of 256 columns do not fit.
HopperPlan bf16_plan(const GemmArgs<float>& args, int64_t packed_bytes, const DeviceInfo& device) {
  const int64_t rows = tiles_of(args.m, 128), tiles = rows * tiles_of(args.n, 128) * args.batch;
  const bool in_pairs = tiles > device.multiprocessors && (rows % 2 == 0 || rows >= 16);  // few lack rows
  return {true, 0, packed_bytes, in_pairs};
}

}  // namespace hopper

HopperPlan hopper_plan(const GemmArgs<float>& args, const DeviceInfo& device) {
  using namespace hopper;
  if (!float_supported(args)) return {};
  int64_t bytes = 0;
  const FloatProduct product = float_product(args);
  for (const FloatOperand& x : {product.left, product.right}) {
    bytes += packing_of(x, args.precision).bytes(x);
  }
  return args.precision == Precision::kTf32 ? tf32_plan(args, product, bytes, device)
                                            : bf16_plan(args, bytes, device);
}

cudaError_t gemm_on_hopper(const GemmArgs<float>& args, const HopperPlan& plan, const DeviceInfo& device,
                           cudaStream_t stream) {
  switch (args.precision) {
    case Precision::kBf16x6:
      return hopper::run<__nv_bfloat16, 6>(args, plan, device.multiprocessors, stream);
    case Precision::kBf16x9:
      return hopper::run<__nv_bfloat16, 9>(args, plan, device.multiprocessors, stream);
    default:
      return hopper::run<float, 1>(args, plan, device.multiprocessors, stream);
  }
}

}  // namespace lltm_ext
#endif
