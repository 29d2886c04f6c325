// gemm in half types on Hopper: which kernel (gemm_hopper.cuh, for few rows gemm_rows.cuh) takes which shape.
#include "gemm/gemm_hopper.h"
#include "gemm/gemm_rows.cuh"
#include "gemm/hopper_launch.cuh"

namespace lltm_ext {
namespace hopper {

// An operand [rows, K] of the tiles' problem: with K side by side in memory or, swapped, its rows.
struct Operand {
  Layout layout;
  bool swapped;
  bool readable;  // by the copy engine
};

template <typename T>
Operand operand(const Matrices<T>& x, int64_t rows, int64_t k, int64_t row_stride, int64_t k_stride,
                int64_t batch) {
  const int64_t matrices = x.batch_stride == 0 ? 1 : batch;
  const Layout straight = {x.data, k, rows, matrices, row_stride, x.batch_stride};
  const Layout swapped = {x.data, rows, k, matrices, k_stride, x.batch_stride};
  const auto readable = [](int64_t stride, int64_t size, const Layout& layout) {
    return (stride == 1 || size == 1) && engine_takes(layout, sizeof(T));
  };
  if (readable(k_stride, k, straight)) return {straight, false, true};
  return {swapped, true, readable(row_stride, rows, swapped)};
}

template <typename T>
Operand operand_a(const GemmArgs<T>& args) {
  return operand(args.a, args.m, args.k, args.a.row_stride, args.a.column_stride, args.batch);
}
template <typename T>
Operand operand_b(const GemmArgs<T>& args) {
  return operand(args.b, args.n, args.k, args.b.column_stride, args.b.row_stride, args.batch);
}

// How a problem is cut up: a tile's rows and columns, and how many blocks share out its K. `persistent` takes
// those of one part, `split` or `split_in_memory` the others.
struct Cut {
  int rows, columns, parts;
  bool in_memory = false;
};

constexpr Cut kCuts[] = {{128, 256, 1}, {128, 128, 1}, {64, 128, 1}, {128, 64, 1}, {64, 64, 1},
                         {128, 128, 2}, {128, 128, 4}, {128, 64, 2}, {128, 64, 4}, {128, 64, 8}};

// About the clocks that a cut takes, fitted to an H200: rounds of blocks, each with products, a way to start
// and a way to end. Small tiles wait for more bytes a product.
inline int64_t clocks(const Cut& cut, int64_t m, int64_t n, int64_t k, int64_t batch, int multiprocessors) {
  const int64_t blocks = int64_t{tiles_of(m, cut.rows)} * tiles_of(n, cut.columns) * batch * cut.parts;
  const int64_t rounds = (blocks + multiprocessors - 1) / multiprocessors;
  const int area = cut.rows * cut.columns;
  const int64_t a_tile = area > 128 * 128 ? 1024 : area == 128 * 128 ? 530 : area == 128 * 64 ? 400 : 300;
  const bool short_ends = cut.rows == 64 || (cut.columns == 64 && cut.parts > 1);
  const int64_t to_add = cut.in_memory ? 12000 : cut.parts > 1 ? 5500 : 0;
  const int64_t ends = (cut.columns == 256 ? 3000 : short_ends ? 1500 : 2000) + to_add;
  return rounds * (int64_t{tiles_of(k, kTileK * cut.parts)} * a_tile + ends);
}

inline Cut best_cut(int64_t m, int64_t n, int64_t k, int64_t batch, int multiprocessors) {
  const auto time = [&](const Cut& cut) { return clocks(cut, m, n, k, batch, multiprocessors); };
  Cut best = kCuts[0];
  for (const Cut& cut : kCuts) {
    if (cut.parts <= tiles_of(k, kTileK) && time(cut) < time(best)) best = cut;
  }
  // As many parts as there are multiprocessors for, but for those that would leave the longest as long.
  const int64_t tiles = int64_t{tiles_of(m, 128)} * tiles_of(n, 128) * batch;
  const int tiles_of_k = tiles_of(k, kTileK);
  int parts = static_cast<int>(std::min<int64_t>(multiprocessors / tiles, tiles_of_k));
  if (parts > 1) parts = tiles_of(tiles_of_k, tiles_of(tiles_of_k, parts));
  const Cut in_memory = {128, 128, parts, true};
  return parts > 1 && time(in_memory) < time(best) ? in_memory : best;
}

template <typename T, bool kSwapA, bool kSwapB>
cudaError_t launch_in_memory(const Call<T>& call, int parts, cudaStream_t stream) {
  // Pairs of blocks share b, if there are pairs.
  return tiles_of(call.m, 128) % 2 == 0
             ? launch_split_in_memory<Operands<T, 128, 128, 6, kSwapA, kSwapB, 2>, false>(call, parts, stream)
             : launch_split_in_memory<Operands<T, 128, 128, 6, kSwapA, kSwapB>, false>(call, parts, stream);
}

template <typename T, bool kSwapA, bool kSwapB>
cudaError_t launch(const Call<T>& call, int multiprocessors, cudaStream_t stream) {
  const Cut cut = best_cut(call.m, call.n, call.k, call.batch, multiprocessors);
  const auto persistent = [&](auto operands) {
    return launch_persistent<decltype(operands)>(call, multiprocessors, stream);
  };
  const auto split = [&](auto operands) {
    return launch_split<decltype(operands), false>(call, cut.parts, stream);
  };
  if (cut.in_memory) return launch_in_memory<T, kSwapA, kSwapB>(call, cut.parts, stream);
  if (cut.parts > 1) {
    return cut.columns == 128 ? split(Operands<T, 128, 128, 6, kSwapA, kSwapB>())
                              : split(Operands<T, 128, 64, 8, kSwapA, kSwapB>());
  }
  if (cut.rows == 64) {
    return cut.columns == 64 ? persistent(Operands<T, 64, 64, 8, kSwapA, kSwapB>())
                             : persistent(Operands<T, 64, 128, 8, kSwapA, kSwapB>());
  }
  if (cut.columns == 64) return persistent(Operands<T, 128, 64, 8, kSwapA, kSwapB>());
  if (cut.columns == 128) return persistent(Operands<T, 128, 128, 6, kSwapA, kSwapB>());
  // Blocks that share tiles of b wait for each other: it pays where they have several tiles and are all
  // needed.
  const int64_t rows = tiles_of(call.m, 128), tiles = rows * tiles_of(call.n, 256) * call.batch;
  return tiles <= multiprocessors || (rows % 2 == 1 && rows < 16)
             ? persistent(Operands<T, 128, 256, 4, kSwapA, kSwapB>())
             : persistent(Operands<T, 128, 256, 4, kSwapA, kSwapB, 2>());
}

// As many blocks share out K as leave all of them places.
template <class Operands, bool kSwap, typename T>
cudaError_t launch_few_tiles(const Call<T>& call, int multiprocessors, cudaStream_t stream) {
  const int64_t tiles =
      int64_t{tiles_of(call.m, Operands::kTileM)} * tiles_of(call.n, Operands::kTileN) * call.batch;
  int parts = 8;  // clusters lie within a GPC, of which large ones leave the last multiprocessors idle
  const auto places = [&] { return parts > 2 ? multiprocessors / 11 * 10 : multiprocessors; };
  while (parts > 1 && (tiles * parts > places() || parts > tiles_of(call.k, kTileK))) parts /= 2;
  return launch_split<Operands, kSwap>(call, parts, stream);
}

// Up to kFewRows rows are in one tile: as its columns, and above kFewColumns, if no operand is swapped, as
// its rows.
constexpr int kFewRows = 64, kFewColumns = 32;

// Few rows: of the transposes, so that they are a tile's columns. The time is that of reading the weights:
// many blocks a multiprocessor, each with much on its way.
template <typename T, bool kSwapA, bool kSwapB>
cudaError_t launch_few_columns(const Call<T>& call, int multiprocessors, cudaStream_t stream) {
  const auto run = [&](auto operands) {
    return launch_few_tiles<decltype(operands), true>(call, multiprocessors, stream);
  };
  if constexpr (!kSwapB) {
    if (call.n <= 8) return run(Operands<T, 64, 8, 6, kSwapA, false>());
    if (call.n <= 16) return run(Operands<T, 64, 16, 6, kSwapA, false>());
    if (call.n <= 32) return run(Operands<T, 64, 32, 6, kSwapA, false>());
  }
  constexpr int kMost = kSwapA || kSwapB ? kFewRows : kFewColumns;  // rows that come here
  return run(Operands<T, 64, kMost, 6, kSwapA, kSwapB>());
}

// Up to 64 rows and weights with K side by side: one tile has all rows. One block a multiprocessor, with all
// of its shared memory on the way; tiles of the width whose rounds of blocks take the least.
template <typename T>
cudaError_t launch_few_rows(const Call<T>& call, int multiprocessors, cudaStream_t stream) {
  const auto time = [&](int columns) {
    return ceil_div(int64_t{tiles_of(call.n, columns)} * call.batch, multiprocessors) * columns;
  };
  int best = 32;
  for (int columns : {88, 128}) {
    if (time(columns) <= time(best)) best = columns;
  }
  const auto run = [&](auto operands) {
    return launch_few_tiles<decltype(operands), false>(call, multiprocessors, stream);
  };
  if (best == 32) return run(Operands<T, kFewRows, 32, 16, false, false>());
  if (best == 88) return run(Operands<T, kFewRows, 88, 10, false, false>());
  return run(Operands<T, kFewRows, 128, 9, false, false>());
}

// Whether ordinary loads read the weights fastest: of up to 8 rows always, of more where all tiles are under
// way at once, and K is not so long that the copy engine's kernel, which shares it out, is ahead.
template <typename T>
bool few_rows_by_loads(const GemmArgs<T>& args, int multiprocessors) {
  if (args.k % 8 != 0) return false;  // loads of 16 bytes leave nothing over
  const int64_t tiles = int64_t{tiles_of(args.n, kRowsColumns)} * args.batch;
  const bool one_round = tiles <= multiprocessors * 2 && (tiles * 2 >= multiprocessors || args.k <= 1024);
  return args.m <= 8 || (one_round && (args.m <= 16 || (args.m <= 32 && args.k <= 4096)));
}

template <typename T>
cudaError_t launch_rows_by_loads(const Call<T>& call, int multiprocessors, cudaStream_t stream) {
  const auto stride = [&](const Layout& x) { return x.batch > 1 ? x.batch_stride : 0; };
  const FewRows<T> problem = {static_cast<const T*>(call.a.data),
                              static_cast<const T*>(call.b.data),
                              call.a.row_stride,
                              call.b.row_stride,
                              stride(call.a),
                              stride(call.b),
                              call.k,
                              tiles_of(call.n, kRowsColumns),
                              call.epilogue};
  const auto run = [&](auto kernel, int shared_bytes) {
    return launch_rows<decltype(kernel)>(problem, call.batch, shared_bytes, stream);
  };
  if (call.m > 16) return run(RowsKernel<T, 4, 2>(), 0);
  if (call.m > 8) return run(RowsKernel<T, 2, 4>(), 0);
  const int64_t tiles = int64_t{problem.tiles} * call.batch;
  if (tiles <= multiprocessors || tiles > multiprocessors * 2) return run(RowsKernel<T, 1, 8>(), 0);
  // One or two blocks a multiprocessor, which has places for three, and the next launch's blocks wait in what
  // is left. Where that is not all of them some multiprocessors would get three: two places, then.
  return run(RowsKernel<T, 1, 4>(), tiles * 2 > multiprocessors * 3 ? 72 << 10 : 0);
}

}  // namespace hopper

template <typename T>
bool hopper_takes(const GemmArgs<T>& args) {
  using namespace hopper;
  return args.m > 0 && args.n > 0 && args.k > 0 &&
         std::max({args.m, args.n, args.k, args.batch}) <= INT32_MAX / 2 &&
         // tiles, which kernels count in an int
         int64_t{tiles_of(args.n, 16)} * args.batch <= INT32_MAX / 2 / tiles_of(args.m, 64) &&
         operand_a(args).readable && operand_b(args).readable;
}

template <typename T>
int64_t hopper_workspace_bytes(const GemmArgs<T>& args, int multiprocessors) {
  using namespace hopper;
  if (args.m <= kFewRows) return 0;
  const Cut cut = best_cut(args.m, args.n, args.k, args.batch, multiprocessors);
  using Tile = Operands<T, 128, 128, 6, false, false>;
  return cut.in_memory ? split_in_memory_bytes<Tile>(args.m, args.n, args.batch, cut.parts) : 0;
}

template <typename T>
cudaError_t gemm_on_hopper(const GemmArgs<T>& args, int multiprocessors, cudaStream_t stream) {
  using namespace hopper;
  Operand a = operand_a(args), b = operand_b(args);
  const bool straight = !a.swapped && !b.swapped;
  const bool by_loads = straight && few_rows_by_loads(args, multiprocessors);
  const bool one_tile = straight && args.m > kFewColumns && args.m <= kFewRows;
  const bool transposed = args.m <= kFewRows && !by_loads && !one_tile;
  if (transposed) std::swap(a, b);
  const int m = static_cast<int>(args.m), n = static_cast<int>(args.n);
  const Call<T> call = {a.layout,
                        b.layout,
                        transposed ? n : m,
                        transposed ? m : n,
                        static_cast<int>(args.k),
                        static_cast<int>(args.batch),
                        {args.bias, args.bias_stride, args.c, args.before, m, n, args.activation},
                        args.workspace};
  if (by_loads) return launch_rows_by_loads(call, multiprocessors, stream);
  if (one_tile) return launch_few_rows(call, multiprocessors, stream);
  const auto run = [&](auto swap_a, auto swap_b) {
    return transposed ? launch_few_columns<T, swap_a, swap_b>(call, multiprocessors, stream)
                      : launch<T, swap_a, swap_b>(call, multiprocessors, stream);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  if (a.swapped) return b.swapped ? run(Yes(), Yes()) : run(Yes(), No());
  return b.swapped ? run(No(), Yes()) : run(No(), No());
}

#define INSTANTIATE(T)                                              \
  template bool hopper_takes(const GemmArgs<T>& args);              \
  template int64_t hopper_workspace_bytes(const GemmArgs<T>&, int); \
  template cudaError_t gemm_on_hopper(const GemmArgs<T>&, int, cudaStream_t);
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)

}  // namespace lltm_ext
