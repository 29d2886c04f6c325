// Times every tiling of gemm_hopper.cu at random products in bfloat16, for tools/gemm_tilings.py.
//
// Prints a line for each tiling (rows, columns, height, width, splits, stream_k, clusters at once), an empty
// line, and a line for each product: batch, m, n, k, the operands' row strides, whether each is MN-major, and
// microseconds by each tiling, or -1 where it does not apply.
#include "common/device.cuh"
#include "gemm/gemm_hopper.cu"
#include "gemm_times.cuh"

using namespace lltm_ext;
using namespace lltm_ext::hopper;
using T = __nv_bfloat16;

constexpr int64_t kMostElements = 96 << 20;
constexpr double kMostOperations = 3e11;

struct Product {
  int64_t batch, m, n, k, stride_a, stride_b;
  bool mn_major_a, mn_major_b;

  int64_t elements_of_a() const { return stride_a * (mn_major_a ? k : m); }
  int64_t elements_of_b() const { return stride_b * (mn_major_b ? k : n); }
  bool fits() const {
    return 2.0 * batch * m * n * k < kMostOperations && batch * m * n < kMostElements / 2 &&
           batch * std::max(elements_of_a(), elements_of_b()) < kMostElements;
  }
};

// A quarter of the products have a narrow b, an eighth are square, an eighth are batches of small ones. TMA
// can store the rows of c of half of them. Strides are whole cache lines, sectors, or neither.
Product random_product(std::mt19937& random) {
  const auto uniform = [&](double from, double to) {
    return std::uniform_real_distribution(from, to)(random);
  };
  const auto size = [&](double from, double to) { return random_size(random, from, to); };
  const auto stride = [&](int64_t length) {
    const int64_t multiple = std::array{64, 16, 8}[random() % 3];
    const int64_t found = ceil_div(length, multiple) * multiple, larger = multiple == 16 ? 64 : 16;
    return multiple < 64 && found % larger == 0 ? found + multiple : found;
  };
  Product x = {};
  do {
    const double kind = uniform(0, 1);
    x.batch = 1;
    x.m = size(17, 16'384);
    x.n = kind < 0.25 ? size(1, 64) : size(33, 16'384);
    x.k = size(2, 16'384);
    if (kind > 0.875) x.n = x.k = x.m = size(65, 8'192);
    if (kind > 0.25 && kind < 0.375) {
      x.batch = size(16, 8'192);
      x.m = size(8, 256), x.n = size(8, 256), x.k = size(8, 512);
    }
    if (random() % 2) x.n = ceil_div(x.n, 8) * 8;
    x.mn_major_a = random() % 2, x.mn_major_b = random() % 2;
    x.stride_a = stride(x.mn_major_a ? x.m : x.k);
    x.stride_b = stride(x.mn_major_b ? x.n : x.k);
  } while (!x.fits());
  return x;
}

int main(int count, char** arguments) {
  if (count != 3) return std::fprintf(stderr, "usage: gemm_tilings PRODUCTS_AT_MOST SEED\n"), 1;
  const Operands<T> operands(kMostElements);
  void* workspace;
  check(cudaMalloc(&workspace, int64_t{512} << 20));
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  DeviceInfo device;
  check(current_device_info(device));
  for (const Tiling& tiling : kTilings) {
    std::printf("%d %d %d %d %d %d %d\n", tiling.rows, tiling.columns, tiling.height, tiling.width,
                tiling.splits, tiling.stream_k,
                static_cast<int>(clusters_of(device, tiling.cluster_blocks())));
  }
  std::printf("\n");
  std::mt19937 random(std::atoi(arguments[2]));
  for (int i = 0; i < std::atoi(arguments[1]); ++i) {
    const Product x = random_product(random);
    GemmArgs<T> args = {};
    args.a = {operands.memory[0], x.elements_of_a(), x.mn_major_a ? 1 : x.stride_a,
              x.mn_major_a ? x.stride_a : 1};
    args.b = {operands.memory[1], x.elements_of_b(), x.mn_major_b ? x.stride_b : 1,
              x.mn_major_b ? 1 : x.stride_b};
    args.c = operands.memory[2];
    args.batch = x.batch, args.m = x.m, args.n = x.n, args.k = x.k;
    args.workspace = workspace;
    if (copy_of_a(args).total > 0 || copy_of_b(args).total > 0) continue;  // the copies would count
    std::printf("%ld %ld %ld %ld %ld %ld %d %d", x.batch, x.m, x.n, x.k, x.stride_a, x.stride_b, x.mn_major_a,
                x.mn_major_b);
    for (int kernel = 0; kernel < kTilingCount; ++kernel) {
      const Tiling& tiling = kTilings[kernel];
      const bool applies = tiling.splits <= tiles_of(x.k, kTileK) &&
                           (!tiling.stream_k || TilingShape(tiling, shape_of(args), device).stream_k_helps());
      const auto launch = [&](const GemmArgs<T>& args) {
        return gemm_on_hopper(args, {true, 0, 0, kernel}, device, stream);
      };
      std::printf(" %.2f", applies ? operands.time(stream, args, x.batch * x.elements_of_a(),
                                                   x.batch * x.elements_of_b(), launch)
                                   : -1.0);
    }
    std::printf("\n");
  }
}
