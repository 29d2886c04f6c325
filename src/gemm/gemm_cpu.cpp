// gemm on the CPU. A task computes a block of c over all of K, so the order of additions, and with it every
// bit, does not depend on the number of threads. Slices of both operands are packed into panels of the
// accumulate type, which absorbs strides and half types; a small kernel in vector registers multiplies the
// panels.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <memory>

#include "common/elementwise_cpu.h"
#include "gemm/gemm.h"

namespace lltm_ext {
namespace {

constexpr int64_t kBlockRows = 120, kBlockColumns = 256, kBlockDepth = 256;
constexpr int kPanelRows = 6;
// A panel's columns fill 64 bytes.
template <typename A>
constexpr int kPanelColumns = 64 / sizeof(A);
// Below this many multiply-adds a second thread costs more than it saves.
constexpr int64_t kGrain = 1 << 18;

// sums[i][j] += the sum over k of a[k][i] * b[k][j], for one panel of a and one of b. BYTES is the width of
// the vector registers, in which the compiler keeps all 6 x 64 bytes of sums.
template <int BYTES, typename A>
__attribute__((always_inline)) inline void multiply_panels(const A* a, const A* b, int64_t depth, A* sums,
                                                           int64_t pitch) {
  typedef A Vector __attribute__((vector_size(BYTES), aligned(alignof(A)), may_alias));
  constexpr int kLanes = BYTES / sizeof(A), kVectors = kPanelColumns<A> / kLanes;
  Vector sum[kPanelRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k, a += kPanelRows, b += kPanelColumns<A>) {
    const Vector* row = reinterpret_cast<const Vector*>(b);
#pragma GCC unroll 6
    for (int i = 0; i < kPanelRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] += a[i] * row[v];
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kPanelRows; ++i) {
    Vector* row = reinterpret_cast<Vector*>(sums + i * pitch);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] += sum[i][v];
  }
}

template <typename A>
using Multiply = void (*)(const A*, const A*, int64_t, A*, int64_t);

template <typename A>
void multiply_any(const A* a, const A* b, int64_t depth, A* sums, int64_t pitch) {
  multiply_panels<16>(a, b, depth, sums, pitch);
}

#ifdef __x86_64__
template <typename A>
__attribute__((target("avx2,fma"))) void multiply_avx2(const A* a, const A* b, int64_t depth, A* sums,
                                                       int64_t pitch) {
  multiply_panels<32>(a, b, depth, sums, pitch);
}
template <typename A>
__attribute__((target("avx512f"))) void multiply_avx512(const A* a, const A* b, int64_t depth, A* sums,
                                                        int64_t pitch) {
  multiply_panels<64>(a, b, depth, sums, pitch);
}
#endif

template <typename A>
Multiply<A> choose_multiply() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) return multiply_avx512<A>;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return multiply_avx2<A>;
#endif
  return multiply_any<A>;
}

// Packs `extent` x `depth` elements of x into panels of WIDTH, k by k, and pads the last panel with zeros.
template <int WIDTH, typename T>
void pack(const T* x, int64_t stride, int64_t k_stride, int64_t extent, int64_t depth, acc_t<T>* panel) {
  for (int64_t first = 0; first < extent; first += WIDTH, panel += WIDTH * depth) {
    const int64_t valid = std::min<int64_t>(extent - first, WIDTH);
    const T* from = x + first * stride;
    if (valid < WIDTH) std::fill_n(panel, WIDTH * depth, acc_t<T>(0));
    if (k_stride == 1) {  // read contiguously
      for (int64_t i = 0; i < valid; ++i) {
        for (int64_t k = 0; k < depth; ++k) panel[k * WIDTH + i] = widen(from[i * stride + k]);
      }
    } else if (stride == 1 && valid == WIDTH) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t i = 0; i < WIDTH; ++i) panel[k * WIDTH + i] = widen(from[k * k_stride + i]);
      }
    } else {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t i = 0; i < valid; ++i) panel[k * WIDTH + i] = widen(from[k * k_stride + i * stride]);
      }
    }
  }
}

// Adds the bias to a block of sums, applies the activation, and rounds once.
template <typename T>
void write_block(const GemmArgs<T>& args, const acc_t<T>* sums, int64_t pitch, int64_t first_column,
                 int64_t rows, int64_t columns, int64_t at) {
  constexpr int kStep = 16;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t first = 0; first < columns; first += kStep) {
      const int64_t valid = std::min<int64_t>(columns - first, kStep);
      acc_t<T> x[kStep] = {};
      std::copy_n(sums + i * pitch + first, valid, x);
      if (args.bias != nullptr) {
        const T* bias = args.bias + (first_column + first) * args.bias_stride;
        for (int64_t j = 0; j < valid; ++j) x[j] += widen(bias[j * args.bias_stride]);
      }
      const int64_t to = at + i * args.n + first;
      for (int64_t j = 0; j < valid && args.pre_activation; ++j)
        args.pre_activation[to + j] = narrow<T>(x[j]);
      activate(args.activation, x);
      for (int64_t j = 0; j < valid; ++j) args.c[to + j] = narrow<T>(x[j]);
    }
  }
}

}  // namespace

template <typename T>
void gemm(const GemmArgs<T>& args) {
  using A = acc_t<T>;
  constexpr int kColumns = kPanelColumns<A>;
  static const Multiply<A> multiply = choose_multiply<A>();
  const int64_t block_rows = std::min(kBlockRows, args.m), block_columns = std::min(kBlockColumns, args.n);
  const int64_t block_depth = std::min(kBlockDepth, args.k);
  const int64_t blocks_across = ceil_div(args.n, block_columns), blocks_down = ceil_div(args.m, block_rows);
  // Buffers hold whole panels.
  const int64_t buffer_rows = ceil_div(block_rows, kPanelRows) * kPanelRows;
  const int64_t pitch = ceil_div(block_columns, kColumns) * kColumns;
  const int64_t work = block_rows * block_columns * std::max<int64_t>(args.k, 1);
  const int64_t grain = std::max<int64_t>(kGrain / work, 1);
  at::parallel_for(0, args.batch * blocks_down * blocks_across, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<A[]> panels_a(new A[buffer_rows * block_depth]);
    const std::unique_ptr<A[]> panels_b(new A[pitch * block_depth]);
    const std::unique_ptr<A[]> sums(new A[buffer_rows * pitch]);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t matrix = task / (blocks_down * blocks_across);
      const int64_t row = task / blocks_across % blocks_down * block_rows,
                    column = task % blocks_across * block_columns;
      const int64_t rows = std::min(block_rows, args.m - row),
                    columns = std::min(block_columns, args.n - column);
      const T* a = args.a.data + matrix * args.a.batch_stride + row * args.a.row_stride;
      const T* b = args.b.data + matrix * args.b.batch_stride + column * args.b.column_stride;
      std::fill_n(sums.get(), buffer_rows * pitch, A(0));
      for (int64_t k = 0; k < args.k; k += block_depth) {
        const int64_t depth = std::min(block_depth, args.k - k);
        pack<kPanelRows>(a + k * args.a.column_stride, args.a.row_stride, args.a.column_stride, rows, depth,
                         panels_a.get());
        pack<kColumns>(b + k * args.b.row_stride, args.b.column_stride, args.b.row_stride, columns, depth,
                       panels_b.get());
        for (int64_t j = 0; j < columns; j += kColumns) {
          for (int64_t i = 0; i < rows; i += kPanelRows) {
            multiply(panels_a.get() + i * depth, panels_b.get() + j * depth, depth,
                     sums.get() + i * pitch + j, pitch);
          }
        }
      }
      write_block(args, sums.get(), pitch, column, rows, columns, (matrix * args.m + row) * args.n + column);
    }
  });
}

#define INSTANTIATE(T) template void gemm(const GemmArgs<T>&);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(c10::Half)
INSTANTIATE(c10::BFloat16)
LLTM_ELEMENTWISE(GemmActivation, 1)
LLTM_ELEMENTWISE(GemmActivationBackward, 2)

}  // namespace lltm_ext
