// gemm in half types on Hopper. A producer warp loads tiles by TMA, one or two consumer warpgroups multiply
// them by wgmma, 64 rows of c each, and TMA stores the results.
//
// The kernel is persistent: a block computes many tiles of c, and loads the next one's operands during the
// epilogue. The largest tiles are in clusters of two, which share b by multicast. Where there are few tiles,
// K is split: blocks leave partial sums in the workspace (gemm_tile.cuh). What TMA cannot address is copied
// first.
#include <algorithm>

#include "common/hopper/launch.h"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/split.cuh"
#include "gemm/gemm_tile.cuh"

namespace lltm_ext {
namespace hopper {

// ---- Epilogue

__device__ __forceinline__ uint32_t pack(float x, float y, __half) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ uint32_t pack(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Stores a warpgroup's accumulators [64, kN], in chunks of 64 columns through two buffers of shared memory.
// Of each 8 columns wgmma gives a thread two neighbours in row lane / 4, and the same two 8 rows below.
template <typename T, int kN>
class EpilogueStore {
  static constexpr int kBufferBytes = 64 * 64 * sizeof(T), kPerThread = (kN + 127) / 128;

 public:
  static constexpr int bytes(int warpgroups) {
    return warpgroups * static_cast<int>(2 * kBufferBytes + kN * sizeof(float));
  }

  // `shared`, aligned to 1,024 bytes: first the buffers of all warpgroups, then their biases.
  __device__ EpilogueStore(unsigned char* shared, int warpgroup, int warpgroups)
      : buffers_(shared + warpgroup * 2 * kBufferBytes),
        bias_(reinterpret_cast<float*>(shared + warpgroups * 2 * kBufferBytes) + warpgroup * kN),
        warpgroup_(warpgroup),
        thread_(threadIdx.x % 128) {}

  // Loads the bias of the columns from `column`, during the mainloop.
  __device__ __forceinline__ void prefetch_bias(const Epilogue<T>& epilogue, int column) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) loaded_bias_[i] = epilogue.bias_at(column + i * 128 + thread_);
  }

  // Stores from (row, column) of a matrix on; by TMA, if there are tensor maps.
  __device__ __forceinline__ void run(float (&d)[kN / 2], const Epilogue<T>& epilogue, const CUtensorMap* c,
                                      const CUtensorMap* pre_activation, int row, int column, int matrix) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (i * 128 + thread_ < kN) bias_[i * 128 + thread_] = loaded_bias_[i];
    }
    warpgroup_sync(warpgroup_);
    if (c && epilogue.activation <= Activation::kRelu) {
#pragma unroll
      for (int chunk = 0; chunk < kN / 64; ++chunk) {
        float x[32];
        add_bias(x, d, chunk);
        if (epilogue.pre_activation)
          store_chunk<true>(x, epilogue, epilogue.pre_activation, pre_activation, row, column + 64 * chunk,
                            matrix);
        if (epilogue.activation == Activation::kRelu) {
#pragma unroll
          for (int i = 0; i < 32; ++i) x[i] = relu(x[i]);
        }
        store_chunk<true>(x, epilogue, epilogue.c, c, row, column + 64 * chunk, matrix);
      }
      return;
    }
    // The rolled loop has the code of all activations and of rows of any length once, for both results.
    // Registers cannot be indexed, so a branch per chunk selects them.
    const int results = epilogue.pre_activation ? 2 : 1;
#pragma unroll 1
    for (int i = 0; i < kN / 64 * results; ++i) {
      const int chunk = i / results;
      const bool last = i % results == results - 1;
      float x[32];
#pragma unroll
      for (int j = 0; j < kN / 64; ++j) {
        if (j == chunk) add_bias(x, d, j);
      }
      if (last) activate<ActivationMath<T>>(epilogue.activation, x);
      store_chunk<false>(x, epilogue, last ? epilogue.c : epilogue.pre_activation, last ? c : pre_activation,
                         row, column + 64 * chunk, matrix);
    }
  }

  // Waits until shared memory is free again.
  __device__ __forceinline__ void wait() const {
    if (thread_ == 0) tma_store_wait_read<0>();
  }

 private:
  __device__ __forceinline__ int column_of(int i) const { return i / 4 * 8 + thread_ % 4 * 2 + i % 2; }

  // x: the accumulators of a chunk, plus their bias.
  __device__ __forceinline__ void add_bias(float (&x)[32], const float (&d)[kN / 2], int chunk) const {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float2 bias = *reinterpret_cast<const float2*>(bias_ + 64 * chunk + column_of(i));
      const float* const from = d + 32 * chunk + i;
      x[i] = from[0] + bias.x, x[i + 1] = from[1] + bias.y;
      x[i + 2] = from[2] + bias.x, x[i + 3] = from[3] + bias.y;
    }
  }

  // Stages a chunk in shared memory with TMA's 128-byte swizzle, then stores it.
  template <bool kByTma>
  __device__ __forceinline__ void store_chunk(const float (&x)[32], const Epilogue<T>& epilogue, T* to,
                                              const CUtensorMap* map, int row, int column, int matrix) {
    if (thread_ == 0) tma_store_wait_read<1>();
    warpgroup_sync(warpgroup_);
    unsigned char* buffer = buffers_ + buffer_ * kBufferBytes;
    buffer_ ^= 1;
    const int lane = thread_ % 32, line = thread_ / 32 * 16 + lane % 16;
    const uint32_t start = shared_address(buffer) + line * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int piece = (2 * j + lane / 16) ^ (line % 8);
      stmatrix(start + piece * 16, pack(x[8 * j], x[8 * j + 1], T()), pack(x[8 * j + 2], x[8 * j + 3], T()),
               pack(x[8 * j + 4], x[8 * j + 5], T()), pack(x[8 * j + 6], x[8 * j + 7], T()));
    }
    if (kByTma || map) {
      fence_proxy_async();
      warpgroup_sync(warpgroup_);
      if (thread_ == 0) tma_store(map, column, row, matrix, buffer);
      return;
    }
    warpgroup_sync(warpgroup_);
    store_rows(buffer, epilogue, to, row, column, matrix);
  }

  // For row strides that are not a multiple of 16 bytes. A warp has every fourth row, a lane two neighbours.
  // If rows start between multiples of 4 bytes, a lane stores its second value with the next lane's first,
  // and the last lane stores both ends. All rows of a warp have the same pattern, so all are loaded before
  // the first is stored, and stores need no branch.
  __device__ __forceinline__ void store_rows(const unsigned char* buffer, const Epilogue<T>& epilogue, T* to,
                                             int row, int column, int matrix) const {
    constexpr int kWarps = 4, kRows = 64 / kWarps;  // per warp
    const int lane = thread_ % 32, warp = thread_ / 32, columns = epilogue.n - column;
    to += (static_cast<int64_t>(matrix) * epilogue.m + row + warp) * epilogue.n + column;
    const bool shifted = reinterpret_cast<uintptr_t>(to) % 4 != 0;
    const int first = 2 * lane + shifted, second = (first + 1) % 64;
    const bool both = first < second && second < columns, only_first = !both && first < columns,
               only_second = !both && second < columns;
    const int64_t row_stride = static_cast<int64_t>(kWarps) * epilogue.n;
    uint32_t pairs[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = warp + i * kWarps, piece = (lane / 4) ^ (r % 8);
      pairs[i] = *reinterpret_cast<const uint32_t*>(buffer + r * 128 + piece * 16 + lane % 4 * 4);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t next = __shfl_sync(~0u, pairs[i], (lane + 1) % 32);
      if (shifted) pairs[i] = __funnelshift_r(pairs[i], next, 16);
    }
    uint16_t* bits = reinterpret_cast<uint16_t*>(to + first);
#pragma unroll
    for (int i = 0; i < kRows; ++i, bits += row_stride) {
      const bool inside = warp + i * kWarps < epilogue.m - row;
      if (inside && both) *reinterpret_cast<uint32_t*>(bits) = pairs[i];
      if (inside && only_first) bits[0] = static_cast<uint16_t>(pairs[i]);
      if (inside && only_second) bits[second - first] = static_cast<uint16_t>(pairs[i] >> 16);
    }
  }

  unsigned char* const buffers_;
  float* const bias_;
  const int warpgroup_, thread_;
  float loaded_bias_[kPerThread];
  int buffer_ = 0;
};

// ---- Kernel

template <typename T>
struct KernelArguments {
  Epilogue<T> epilogue;
  int tiles_of_k;
  bool batched_a, batched_b;  // else one matrix serves the whole batch
  bool tma_store;             // whether TMA can address the results
  int splits;                 // of K, of one product: the matrices of c are their sums
  float* partials;            // [splits, m, n], if there are several
};

// kSplitsK: a kernel of its own, because the others take 0.2 us longer with the code for partial sums in
// them.
template <class Mainloop, bool kSplitsK>
struct PersistentKernel {
  using T = typename Mainloop::T;
  using Out = EpilogueStore<T, Mainloop::kTileN>;
  static constexpr int kBlocks = Mainloop::kClusterM, kConsumers = Mainloop::kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kOperandsAndOut = Mainloop::kBytes + Out::bytes(kConsumers);
  static constexpr int kShared = kOperandsAndOut + kBarrierBytes;

  // The tiles of `order` are those of a cluster.
  __device__ static void run(const CUtensorMap* a, const CUtensorMap* b, const CUtensorMap* c,
                             const CUtensorMap* pre_activation, const KernelArguments<T>& args,
                             const TileOrder& order) {
    unsigned char* shared = dynamic_shared();
    auto pipeline = pipeline_of<Mainloop>(shared, shared + kOperandsAndOut);
    const uint32_t rank = kBlocks > 1 ? cluster_rank() : 0;
    const int tiles = static_cast<int>(order.total), clusters = gridDim.x / kBlocks;
    int i = blockIdx.x / kBlocks, begin = 0, end = args.tiles_of_k;  // begin, end: slices of K
    TileIndex tile;
    const auto find = [&] {
      if (i >= tiles) return false;
      tile = first_element<Mainloop>(order, i, rank);
      i += clusters;
      if constexpr (kSplitsK) {
        const int64_t slices = args.tiles_of_k;
        begin = static_cast<int>(slices * tile.matrix / args.splits);
        end = static_cast<int>(slices * (tile.matrix + 1) / args.splits);
      }
      return true;
    };
    start_pipeline(pipeline, a, b);
    bool more = find();
    const auto produce = [&] {
      for (; more; more = find()) {
        const int matrix_a = args.batched_a ? tile.matrix : 0, matrix_b = args.batched_b ? tile.matrix : 0;
        for (int k = begin; k < end; ++k) {
          pipeline.load(a, b, tile.row, tile.column, k * kTileK, matrix_a, matrix_b, rank);
        }
      }
    };
    run_warpgroups<Mainloop>(produce, [&](int warpgroup) {
      Out out(shared + Mainloop::kBytes, warpgroup, kConsumers);
      for (; more; more = find()) {
        float d[Mainloop::kTileN / 2];
        out.prefetch_bias(args.epilogue, tile.column);
        pipeline.mma(d, end - begin, warpgroup);
        if constexpr (kSplitsK) {
          store_accumulators(d, args.partials, args.epilogue.m, args.epilogue.n, tile.row + 64 * warpgroup,
                             tile.column, tile.matrix);
          continue;
        }
        out.run(d, args.epilogue, args.tma_store ? c : nullptr, args.tma_store ? pre_activation : nullptr,
                tile.row + 64 * warpgroup, tile.column, tile.matrix);
      }
      out.wait();
    });
  }
};

template <class Kernel, typename T>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_persistent_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                           const __grid_constant__ CUtensorMap c,
                           const __grid_constant__ CUtensorMap pre_activation,
                           const __grid_constant__ KernelArguments<T> args, const TileOrder order) {
  LLTM_HOPPER(Kernel::run(&a, &b, &c, &pre_activation, args, order));
}

// ---- Copies of operands that TMA cannot address

constexpr int kCopyThreads = 256;

// Copies an operand's lines: the rows of [lines, length] of each matrix.
template <typename T>
struct AlignedCopy {
  const T* from;
  T* to;
  int64_t batch_stride, line_stride, stride, to_line_stride;
  uint32_t lines, length, chunks;  // chunks of 8 elements in a line
  uint32_t total, blocks;          // chunks of all matrices, 0 if there is nothing to copy; blocks for them

  int64_t elements() const { return total == 0 ? 0 : int64_t{total / chunks} * to_line_stride; }
};

template <typename T>
__device__ __forceinline__ void copy_chunk(const AlignedCopy<T>& x, uint32_t block) {
  const uint32_t i = block * kCopyThreads + threadIdx.x;
  if (i >= x.total) return;
  const uint32_t line = i / x.chunks, matrix = line / x.lines, element = i % x.chunks * 8;
  const T* from =
      x.from + matrix * x.batch_stride + (line - matrix * x.lines) * x.line_stride + element * x.stride;
  Vec<T, 8> values;
#pragma unroll
  for (int j = 0; j < 8; ++j) values.data[j] = element + j < x.length ? from[j * x.stride] : narrow<T>(0.f);
  *reinterpret_cast<Vec<T, 8>*>(x.to + line * x.to_line_stride + element) = values;
}

template <typename T>
__global__ void __launch_bounds__(kCopyThreads)
    gemm_align_kernel(const AlignedCopy<T> a, const AlignedCopy<T> b) {
  LLTM_HOPPER(for_operands(a, b, [](const auto& x, uint32_t block) { copy_chunk(x, block); }));
}

// ---- Launchers

// A product of operands that TMA can address.
template <typename T>
struct Problem {
  GlobalTensor a, b;
  const GemmArgs<T>& args;
  const DeviceInfo& device;
};

// splits: of K, whose sums are left in the workspace if there are several.
template <class Mainloop, bool kSplitsK = false, typename T>
cudaError_t launch_persistent(const Problem<T>& problem, int splits, cudaStream_t stream) {
  using Kernel = PersistentKernel<Mainloop, kSplitsK>;
  constexpr int kBlocks = Mainloop::kClusterM;
  const GemmArgs<T>& product = problem.args;
  const auto result = [&](const T* data) {
    return GlobalTensor{data, product.n, product.m, product.batch, product.n, product.m * product.n};
  };
  const GlobalTensor results = result(product.c), inputs = result(product.pre_activation);
  const bool tma_store = tma_supports(results, sizeof(T)) && tma_supports(inputs, sizeof(T));
  CUtensorMap a, b, c = {}, pre_activation = {};
  cudaError_t error = encode_operands<Mainloop>(a, b, problem.a, problem.b);
  if (error == cudaSuccess && tma_store) error = encode_tensor_map<T>(c, results, 64);
  if (error == cudaSuccess && tma_store && inputs.data) {
    error = encode_tensor_map<T>(pre_activation, inputs, 64);
  }
  const auto kernel = gemm_persistent_kernel<Kernel, T>;
  if (error == cudaSuccess) error = set_max_dynamic_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  const TileOrder order(tiles_of(product.m, Mainloop::kTileM * kBlocks),
                        tiles_of(product.n, Mainloop::kTileN), product.batch * splits);
  const int64_t clusters =
      std::min<int64_t>(order.total, problem.device.cluster_multiprocessors[kBlocks] / kBlocks);
  KernelArguments<T> args = {Epilogue<T>(product), tiles_of(product.k, kTileK)};
  args.batched_a = problem.a.batch > 1, args.batched_b = problem.b.batch > 1;
  args.tma_store = tma_store, args.splits = splits, args.partials = static_cast<float*>(product.workspace);
  return launch_clusters(kernel, dim3(clusters * kBlocks), dim3(kBlocks), Kernel::kThreads, Kernel::kShared,
                         /*programmatic=*/true, stream, a, b, c, pre_activation, args, order);
}

// The place of a tile in kHopperTiles is its case here.
template <typename T, bool kMnMajorA, bool kMnMajorB>
cudaError_t launch_tiles(const Problem<T>& problem, const Choice& choice, cudaStream_t stream) {
  const auto run = [&](auto mainloop) { return launch_persistent<decltype(mainloop)>(problem, 1, stream); };
  switch (choice.tile) {
    case 0:
      return run(Mainloop<T, 64, 64, 8, kMnMajorA, kMnMajorB>());
    case 1: {
      using M = Mainloop<T, 64, 128, 8, kMnMajorA, kMnMajorB>;
      if (choice.splits == 1) return run(M());
      return launch_persistent<M, true>(problem, choice.splits, stream);
    }
    case 2:
      return run(Mainloop<T, 128, 128, 6, kMnMajorA, kMnMajorB>());
    case 3:
      return run(Mainloop<T, 128, 192, 4, kMnMajorA, kMnMajorB>());
    default:
      return run(Mainloop<T, 128, 256, 4, kMnMajorA, kMnMajorB, 2>());
  }
}

// An operand [rows, k] as TMA sees it, and the copy that it is of, if it needs one.
template <typename T>
struct Operand {
  bool along_k;
  GlobalTensor tensor;
  AlignedCopy<T> copy = {};

  explicit Operand(const Rows<T>& x) {
    const Lines lines = lines_of(x);
    along_k = lines.along_k;
    const int64_t count = along_k ? x.rows : x.k, length = along_k ? x.k : x.rows;
    tensor = {x.data, length, count, x.matrices, along_k ? x.row_stride : x.k_stride, x.batch_stride};
    if (lines.aligned) return;
    const int64_t chunks = ceil_div(length, 8);
    copy = {x.data, nullptr, x.batch_stride, tensor.row_stride, along_k ? x.k_stride : x.row_stride};
    copy.to_line_stride = length < 64 ? chunks * 8 : ceil_div(length, 64) * 64;
    copy.lines = static_cast<uint32_t>(count);
    copy.length = static_cast<uint32_t>(length);
    copy.chunks = static_cast<uint32_t>(chunks);
    copy.total = static_cast<uint32_t>(chunks * count * x.matrices);
    copy.blocks = static_cast<uint32_t>(ceil_div(copy.total, kCopyThreads));
    tensor.row_stride = copy.to_line_stride;
    tensor.batch_stride = count * copy.to_line_stride;
  }
  // The memory behind the copy.
  T* place(T* memory) {
    copy.to = memory;
    if (copy.total > 0) tensor.data = memory;
    return memory + copy.elements();
  }
};

}  // namespace hopper

// The copies are at the start of the workspace, partial sums behind them.
template <typename T>
int64_t gemm_hopper_workspace_bytes(const GemmArgs<T>& args, const Choice& choice) {
  const hopper::Operand a(rows_of_a(args)), b(rows_of_b(args));
  return (a.copy.elements() + b.copy.elements()) * int64_t{sizeof(T)} +
         partial_sum_bytes(args, choice.splits);
}

template <typename T>
cudaError_t gemm_hopper(GemmArgs<T> args, const Choice& choice, const DeviceInfo& device,
                        cudaStream_t stream) {
  using namespace hopper;
  Operand a(rows_of_a(args)), b(rows_of_b(args));
  args.workspace = b.place(a.place(static_cast<T*>(args.workspace)));
  const cudaError_t error =
      launch_kernel(gemm_align_kernel<T>, dim3(a.copy.blocks + b.copy.blocks), dim3(kCopyThreads), 0,
                    /*programmatic=*/true, stream, a.copy, b.copy);
  if (error != cudaSuccess) return error;
  const Problem<T> problem = {a.tensor, b.tensor, args, device};
  const auto run = [&](auto mn_major_a, auto mn_major_b) {
    return launch_tiles<T, mn_major_a, mn_major_b>(problem, choice, stream);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  const cudaError_t launched = a.along_k ? (b.along_k ? run(No(), No()) : run(No(), Yes()))
                                         : (b.along_k ? run(Yes(), No()) : run(Yes(), Yes()));
  if (launched != cudaSuccess || choice.splits == 1) return launched;
  return launch_reduce(args, choice.splits, /*programmatic=*/true, stream);
}

#define INSTANTIATE(T)                                                             \
  template int64_t gemm_hopper_workspace_bytes(const GemmArgs<T>&, const Choice&); \
  template cudaError_t gemm_hopper(GemmArgs<T>, const Choice&, const DeviceInfo&, cudaStream_t);
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)

}  // namespace lltm_ext
