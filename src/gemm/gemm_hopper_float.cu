// gemm in float32 by Hopper's matrix units: from a problem to launches of gemm_hopper_float.cuh's kernels.
#ifdef LLTM_EXT_SM90A
#include "common/hopper/launch.cuh"
#include "gemm/gemm_hopper_float.cuh"
#include "gemm/gemm_hopper_float.h"

namespace lltm_ext {
namespace hopper {

// An operand [rows, K] of a problem.
struct FloatOperand {
  Matrices<float> x;
  int64_t rows, k, row_stride, k_stride, matrices;

  static FloatOperand a(const GemmArgs<float>& args) {
    return {args.a, args.m, args.k, args.a.row_stride, args.a.column_stride, matrices_of(args.a, args)};
  }
  static FloatOperand b(const GemmArgs<float>& args) {
    return {args.b, args.n, args.k, args.b.column_stride, args.b.row_stride, matrices_of(args.b, args)};
  }
  static int64_t matrices_of(const Matrices<float>& x, const GemmArgs<float>& args) {
    return x.batch_stride == 0 ? 1 : args.batch;
  }

  Layout straight() const { return {x.data, k, rows, matrices, row_stride, x.batch_stride}; }
  bool readable() const { return (k_stride == 1 || k == 1) && engine_takes(straight(), sizeof(float)); }
};

// How an operand is copied before the products.
struct Copies {
  int parts, element_size;
  int64_t padded;

  int64_t bytes(const FloatOperand& x) const {
    return (parts * x.matrices * x.rows * padded * element_size + 127) / 128 * 128;
  }
};

inline int terms_of(Precision precision) {
  return precision == Precision::kBf16x9 ? 9 : precision == Precision::kBf16x6 ? 6 : 1;
}

// No parts: it is read as it lies.
inline Copies copies_of(const FloatOperand& x, Precision precision) {
  if (terms_of(precision) > 1) return {3, sizeof(__nv_bfloat16), (x.k + 7) / 8 * 8};
  return {x.readable() ? 0 : 1, sizeof(float), (x.k + 3) / 4 * 4};
}

// Copies an operand to `to`, if need be; the layout in which it is read.
template <typename T>
cudaError_t prepare(const FloatOperand& x, const Copies& copies, void* to, cudaStream_t stream,
                    Layout& layout) {
  if (copies.parts == 0) {
    layout = x.straight();
    return cudaSuccess;
  }
  layout = {to, x.k, x.rows, copies.parts * x.matrices, copies.padded, x.rows * copies.padded};
  const Apart apart = {x.x.data,      x.x.batch_stride,
                       x.row_stride,  x.k_stride,
                       x.rows,        x.k,
                       copies.padded, x.matrices * x.rows * copies.padded};
  const dim3 grid(tiles_of(x.rows, kPartRows), tiles_of(copies.padded, kPartColumns), x.matrices);
  take_apart_kernel<<<grid, kPartThreads, 0, stream>>>(apart, static_cast<T*>(to));
  return cudaGetLastError();
}

template <class Operands, int kTerms>
cudaError_t launch_products(const Layout& a, const Layout& b, const FloatProblem& problem, int batch,
                            int multiprocessors, cudaStream_t stream) {
  using Kernel = FloatPersistent<Operands, kTerms>;
  using T = typename Operands::T;
  constexpr int kShare = Operands::kShare;
  CUtensorMap map_a, map_b;
  cudaError_t error = describe<T>(map_a, a, Operands::kTileM);
  if (error == cudaSuccess) error = describe<T>(map_b, b, Operands::kTileN / kShare);
  const auto kernel = gemm_float_kernel<Kernel>;
  if (error == cudaSuccess) error = allow_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  const Schedule schedule = {tiles_of(problem.m, Operands::kTileM * kShare),
                             tiles_of(problem.n, Operands::kTileN), batch};
  const int64_t clusters = std::min<int64_t>(schedule.total(), multiprocessors / kShare);
  return launch_clusters(kernel, dim3(clusters * kShare), dim3(kShare), Kernel::kThreads, Kernel::kShared,
                         /*early=*/true, stream, map_a, map_b, problem, schedule);
}

template <typename T, int kTerms>
cudaError_t run(const GemmArgs<float>& args, int multiprocessors, cudaStream_t stream) {
  const FloatOperand a = FloatOperand::a(args), b = FloatOperand::b(args);
  const Copies copies_a = copies_of(a, args.precision), copies_b = copies_of(b, args.precision);
  char* const workspace = static_cast<char*>(args.workspace);
  Layout layout_a, layout_b;
  cudaError_t error = prepare<T>(a, copies_a, workspace, stream, layout_a);
  if (error == cudaSuccess) error = prepare<T>(b, copies_b, workspace + copies_a.bytes(a), stream, layout_b);
  if (error != cudaSuccess) return error;
  const auto pairs = [](const float* p) { return reinterpret_cast<uintptr_t>(p) % 8 == 0; };
  const FloatProblem problem = {args.bias,
                                args.bias_stride,
                                args.c,
                                args.before,
                                static_cast<int>(args.m),
                                static_cast<int>(args.n),
                                tiles_of(args.k, kTileKOf<T>),
                                static_cast<int>(a.matrices),
                                static_cast<int>(b.matrices),
                                a.matrices > 1,
                                b.matrices > 1,
                                args.n % 2 == 0 && pairs(args.c) && pairs(args.before),
                                args.activation};
  const int batch = static_cast<int>(args.batch);
  const auto launch = [&](auto operands) {
    return launch_products<decltype(operands), kTerms>(layout_a, layout_b, problem, batch, multiprocessors,
                                                       stream);
  };
  const auto tiles = [&](int columns) { return tiles_of(args.m, 128) * tiles_of(args.n, columns) * batch; };
  const int64_t rows = tiles_of(args.m, 128);
  const bool alone = rows % 2 == 1 && rows < 16;  // too many clusters would have a block without rows
  if constexpr (kTerms == 1) {
    if (tiles(256) > multiprocessors && !alone) return launch(Operands<T, 128, 256, 4, false, false, 2>());
    if (3 * tiles(256) > 2 * multiprocessors) return launch(Operands<T, 128, 256, 4, false, false>());
    return launch(Operands<T, 128, 128, 6, false, false>());
  } else {
    // Sums are promoted into as many registers as they take themselves: no room for tiles of 256 columns.
    if (tiles(128) > multiprocessors && !alone) return launch(Operands<T, 128, 128, 6, false, false, 2>());
    return launch(Operands<T, 128, 128, 6, false, false>());
  }
}

}  // namespace hopper

bool hopper_takes(const GemmArgs<float>& args) {
  return args.precision != Precision::kIeee && args.m > 0 && args.n > 0 && args.k > 0 &&
         std::max({args.m, args.n, args.k}) <= INT32_MAX / 4 && args.batch <= 65535 &&
         args.k <= 65535 * 64;  // copies of the operands have a row of blocks for each 64 of K
}

int64_t hopper_workspace_bytes(const GemmArgs<float>& args, int) {
  using namespace hopper;
  int64_t bytes = 0;
  for (const FloatOperand& x : {FloatOperand::a(args), FloatOperand::b(args)}) {
    bytes += copies_of(x, args.precision).bytes(x);
  }
  return bytes;
}

cudaError_t gemm_on_hopper(const GemmArgs<float>& args, int multiprocessors, cudaStream_t stream) {
  switch (args.precision) {
    case Precision::kBf16x6:
      return hopper::run<__nv_bfloat16, 6>(args, multiprocessors, stream);
    case Precision::kBf16x9:
      return hopper::run<__nv_bfloat16, 9>(args, multiprocessors, stream);
    default:
      return hopper::run<float, 1>(args, multiprocessors, stream);
  }
}

}  // namespace lltm_ext
#endif
