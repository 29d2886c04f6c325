// Runs the kernels of gemm that need no GPU's own instructions on the CPU (cuda_on_cpu.h): direct, FFMA, few
// rows and the sums of split-K, at sizes and strides that cut tiles, and compares them with a loop in double.
// It prints a line for each product that differs. The exit status is 0 if none does.
#define __CUDA_ARCH__ 900        // with Hopper's own kernels
#define __shared__ thread_local  // of the block that runs

#include <cstdio>
#include <random>
#include <string>

#include "cuda_on_cpu.h"
#include "gemm/gemm_direct.cuh"
#include "gemm/gemm_few_rows.cuh"
#include "gemm/gemm_ffma.cuh"

namespace lltm_ext {

namespace {

int failures = 0;

// Small integers, so that sums are exact in every order.
template <typename T>
struct Product {
  std::vector<T> a, b, bias, c, pre_activation;
  GemmArgs<T> args = {};
  std::vector<float> workspace;

  // Strides are of a dense matrix, in steps, plus `padding` between lines.
  Product(int64_t batch, int64_t m, int64_t k, int64_t n, bool transposed_a, bool transposed_b, int step,
          int padding, bool with_bias, Activation activation) {
    const auto strides = [&](int64_t rows, int64_t columns, bool transposed) {
      const int64_t line = (transposed ? rows : columns) * step + padding;
      const int64_t matrix = (transposed ? columns : rows) * line;
      return Matrices<T>{nullptr, batch > 1 ? matrix : 0, transposed ? step : line, transposed ? line : step};
    };
    args.a = strides(m, k, transposed_a), args.b = strides(k, n, transposed_b);
    args.batch = batch, args.m = m, args.n = n, args.k = k, args.activation = activation;
    fill(a, batch * std::max<int64_t>(args.a.batch_stride, (m + k) * 8 + m * k * (step + padding)));
    fill(b, batch * std::max<int64_t>(args.b.batch_stride, (k + n) * 8 + k * n * (step + padding)));
    fill(bias, 2 * n);
    c.resize(batch * m * n), pre_activation.resize(batch * m * n);
    args.a.data = a.data(), args.b.data = b.data(), args.c = c.data();
    if (with_bias) args.bias = bias.data(), args.bias_stride = 2, args.pre_activation = pre_activation.data();
    workspace.resize(64 * batch * m * n);
    args.workspace = workspace.data();
  }

  void check(const std::string& name) const {
    for (int64_t z = 0; z < args.batch; ++z) {
      for (int64_t i = 0; i < args.m; ++i) {
        for (int64_t j = 0; j < args.n; ++j) {
          double sum = args.bias ? static_cast<double>(widen(args.bias[j * args.bias_stride])) : 0;
          for (int64_t p = 0; p < args.k; ++p) {
            sum += static_cast<double>(widen(element(args.a, z, i, p))) * widen(element(args.b, z, p, j));
          }
          const int64_t at = (z * args.m + i) * args.n + j;
          const double before = args.pre_activation ? widen(pre_activation[at]) : sum;
          const double after = args.activation == Activation::kRelu ? std::max(sum, 0.) : sum;
          if (before == sum && widen(c[at]) == after) continue;
          std::printf("%s: %ld x %ld x %ld x %ld: at %ld, %ld, %ld: %f is not %f\n", name.c_str(),
                      long(args.batch), long(args.m), long(args.k), long(args.n), long(z), long(i), long(j),
                      double(widen(c[at])), after);
          ++failures;
          return;
        }
      }
    }
  }

 private:
  static T element(const Matrices<T>& x, int64_t z, int64_t i, int64_t j) {
    return x.data[z * x.batch_stride + i * x.row_stride + j * x.column_stride];
  }
  static void fill(std::vector<T>& x, int64_t count) {
    static std::mt19937 random;
    x.resize(count);
    for (T& value : x) value = narrow<T>(static_cast<acc_t<T>>(static_cast<int>(random() % 5) - 2));
  }
};

struct Sizes {
  int batch, m, k, n;
};

// Calls f with products of these sizes in every layout: dense, in lines of whole vectors or not, and strided.
template <typename T, class F>
void in_every_layout(const Sizes& s, const F& f) {
  for (int layout = 0; layout < 4; ++layout) {
    for (const auto& [step, padding] : {std::pair{1, 0}, {1, 4}, {2, 1}}) {
      const bool with_bias = layout % 2 == 0;
      f(Product<T>(s.batch, s.m, s.k, s.n, layout & 1, layout & 2, step, padding, with_bias,
                   with_bias ? Activation::kRelu : Activation::kNone));
    }
  }
}

template <typename T, int kShape>
void check_direct(const char* type) {
  for (const Sizes& s : {Sizes{1, 7, 9, 13}, {3, 5, 130, 6}, {1, 8, 0, 8}, {1, 1, 33, 1}}) {
    in_every_layout<T>(s, [&](Product<T> product) {
      launch_direct<kShape>(product.args, false, nullptr);
      product.check("direct " + std::to_string(kShape) + " " + type);
    });
  }
}

template <class Tile>
void check_ffma() {
  for (const Sizes& s :
       {Sizes{1, Tile::BM + 3, 77, Tile::BN + 5}, {2, Tile::BM, 2 * Tile::BK, Tile::BN}, {1, 3, 200, 4}}) {
    in_every_layout<float>(s, [&](Product<float> product) {
      for (const bool hopper : {false, true}) {
        for (const int splits : {1, 2}) {
          launch_ffma<Tile>(product.args, splits, false, hopper, nullptr);
          if (splits > 1) launch_reduce(product.args, splits, false, nullptr);
          product.check("ffma " + std::to_string(Tile::BM) + " x " + std::to_string(Tile::BN));
        }
      }
    });
  }
}

template <typename T>
void check_few_rows(const char* type) {
  DeviceInfo device = {80, 2};
  for (const int m : {1, 8, 11, 16, 17, 32}) {
    for (const Sizes& s : {Sizes{1, m, 264, 19}, {2, m, 1000, 32}, {1, m, 8, 100}}) {
      Product<T> product(s.batch, s.m, s.k, s.n, false, true, 1, 8, m % 2 == 0, Activation::kRelu);
      launch_few_rows(product.args, device, false, nullptr);
      product.check(std::string("few rows ") + type);
    }
  }
}

template <typename T>
void check_reduce() {
  Product<T> product(1, 5, 1, 7, false, false, 1, 0, true, Activation::kRelu);
  for (const int splits : {2, 9, 40}) {
    const int64_t elements = 35;
    for (int64_t i = 0; i < splits * elements; ++i) product.workspace[i] = 0;
    for (int64_t i = 0; i < elements; ++i) {
      const double exact = widen(product.a[i / 7]) * widen(product.b[i % 7]);
      product.workspace[(splits - 1) * elements + i] = static_cast<float>(exact - 3);
      product.workspace[i] += 3;
    }
    launch_reduce(product.args, splits, false, nullptr);
    product.check("reduce");
  }
}

template <typename T>
void check_direct_shapes(const char* type) {
  check_direct<T, 0>(type), check_direct<T, 1>(type), check_direct<T, 2>(type);
  check_direct<T, 3>(type), check_direct<T, 4>(type);
}

}  // namespace
}  // namespace lltm_ext

int main() {
  using namespace lltm_ext;
  check_direct_shapes<float>("float32");
  check_direct_shapes<double>("float64");
  check_direct_shapes<__half>("float16");
  check_reduce<float>();
  check_few_rows<__half>("float16");
  check_few_rows<__nv_bfloat16>("bfloat16");
  check_ffma<FfmaTile<16, 128, 32, 4, 4, 1, 3, 3>>();
  check_ffma<FfmaTile<32, 64, 32, 8, 4, 4, 6, 1>>();
  check_ffma<FfmaTile<128, 64, 32, 16, 8, 4, 3, 1>>();
  return failures > 0;
}
