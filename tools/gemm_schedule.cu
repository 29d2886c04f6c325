// Times the kernels among which gemm_schedule.h chooses, at random products, for tools/gemm_schedule.py.
//
// Prints how many multiprocessors there are, and a line for each kernel, with each number of splits of K, of
// each product: the type; batch, m, n, k, the elements of both operands, the bytes of an element and of a
// sum, whether a and b are along K, and the width of copies; the kind of kernel (0: of tiles, 1: direct, 2:
// outer), its place in its list, four numbers of its tile, and splits; microseconds.
#include "gemm/gemm_kernel.cu"
#include "gemm_times.cuh"

using namespace lltm_ext;

constexpr int64_t kMostBytes = int64_t{1} << 30;
constexpr double kMostOperations = 1e11;

struct Product {
  int64_t batch, m, n, k;
  bool transposed_a, transposed_b;

  bool fits(int64_t elements) const {
    return 2.0 * batch * m * n * k < kMostOperations &&
           batch * std::max({m * n, m * k, n * k}) < elements / 4;
  }
};

// A quarter of the products are batches of small matrices. Half have multiples of 8 as sizes.
Product random_product(std::mt19937& random, int64_t elements) {
  constexpr double kLargest = 16'384;
  Product x = {};
  do {
    const int64_t multiple = random() % 2 ? 8 : 1;
    const auto size = [&](double from, double to) {
      return ceil_div(random_size(random, from, to), multiple) * multiple;
    };
    x = {1, size(1, kLargest), size(1, kLargest), size(1, kLargest)};
    if (random() % 4 == 0) x = {random_size(random, 32, 20'000), size(8, 96), size(8, 96), size(8, 512)};
    x.transposed_a = random() % 2, x.transposed_b = random() % 2;
  } while (!x.fits(elements));
  return x;
}

template <typename T>
class Timer {
 public:
  Timer(const char* name, const Operands<T>& operands, cudaStream_t stream)
      : name_(name), operands_(operands), stream_(stream) {
    check(current_device_info(device_));
  }

  void time_all(const GemmArgs<T>& args) {
    const GemmSizes sizes = sizes_of(args);
    args_ = args, sizes_ = sizes, least_ = choose(args, device_).schedule.time;
    with_tiles_for<T>(device_, args, [&](auto, const TileCost* costs, int count) {
      for (int i = 0; i < count; ++i) {
        const TileCost& cost = costs[i];
        const int64_t tiles = sizes.batch * ceil_div(sizes.m, cost.rows) * ceil_div(sizes.n, cost.columns);
        const int64_t slices = ceil_div(sizes.k, cost.depth);
        for (const int64_t splits : {1, 2, 4, 8, 16, 32, 64}) {
          const int64_t most_blocks = device_.multiprocessors * cost.blocks * kMostRounds;
          if (splits > 1 && (splits > slices || tiles * splits > most_blocks)) break;
          const double time = time_of(sizes, cost, tiles, splits, false, device_);
          show(0, i, {cost.rows, cost.columns, cost.depth, cost.blocks}, static_cast<int>(splits), i, time,
               starts_early(cost, tiles * splits, device_, time));
        }
      }
      for (int i = 0; i < kDirectCount; ++i) {
        const DirectCost& cost = (sizeof(T) == 2 ? kDirectCostsHalf : kDirectCosts)[i];
        show(1, i, {cost.rows, cost.columns, cost.sharers, cost.batch}, 1, count + i, time_of(sizes, cost, 1),
             true);
      }
      for (int i = 0; i < kOuterCount; ++i) {
        const OuterCost& cost = kOuterCosts<T>[i];
        const int64_t tiles = sizes.batch * ceil_div(sizes.m, cost.rows) * ceil_div(sizes.n, cost.columns);
        if (sizes.k > cost.most_k) continue;
        show(2, i, {cost.rows, cost.columns, cost.most_k, 0}, 1, count + kDirectCount + i,
             time_of(sizes, cost, tiles), tiles <= int64_t{device_.multiprocessors} * 2);
      }
      return cudaSuccess;
    });
  }

 private:
  // Kernels whose estimates are more than twice the least are not timed.
  void show(int kind, int place, std::array<int, 4> tile, int splits, int number, double estimate,
            bool programmatic) {
    const int64_t elements = sizes_.batch * sizes_.m * sizes_.n;
    if (estimate > 2 * least_ || elements >= int64_t{1} << 26) return;
    const double time =
        operands_.time(stream_, args_, sizes_.batch * sizes_.m * sizes_.k, sizes_.batch * sizes_.n * sizes_.k,
                       [&](const GemmArgs<T>& args) {
                         return launch_schedule(args, {number, splits, 0, programmatic}, device_, stream_);
                       });
    std::printf("%s %ld %ld %ld %ld %.0f %d %d %d %d %d %d %d %d %d %d %d %d %.3f\n", name_, sizes_.batch,
                sizes_.m, sizes_.n, sizes_.k, sizes_.operands, sizes_.bytes, sizes_.sum_bytes,
                sizes_.a_along_k, sizes_.b_along_k, sizes_.width, kind, place, tile[0], tile[1], tile[2],
                tile[3], splits, time);
  }

  const char* name_;
  const Operands<T>& operands_;
  cudaStream_t stream_;
  DeviceInfo device_;
  GemmArgs<T> args_ = {};
  GemmSizes sizes_ = {};
  double least_ = 0;  // of the estimates
};

template <typename T>
void time_type(const char* name, Precision precision, int products, int seed) {
  const Operands<T> operands(kMostBytes / sizeof(T));
  void* workspace;
  check(cudaMalloc(&workspace, kMostBytes));
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  Timer<T> timer(name, operands, stream);
  std::mt19937 random(seed);
  for (int i = 0; i < products; ++i) {
    const Product x = random_product(random, operands.elements);
    GemmArgs<T> args = {};
    args.a = {operands.memory[0], x.batch > 1 ? x.m * x.k : 0, x.transposed_a ? 1 : x.k,
              x.transposed_a ? x.m : 1};
    args.b = {operands.memory[1], x.batch > 1 ? x.n * x.k : 0, x.transposed_b ? 1 : x.n,
              x.transposed_b ? x.k : 1};
    args.c = operands.memory[2];
    args.batch = x.batch, args.m = x.m, args.n = x.n, args.k = x.k;
    args.workspace = workspace, args.precision = precision;
    args = with_vectors_along_k(args);
    timer.time_all(args);
  }
  check(cudaStreamDestroy(stream));
  check(cudaFree(workspace));
}

int main(int count, char** arguments) {
  if (count != 3) return std::fprintf(stderr, "usage: gemm_schedule PRODUCTS SEED\n"), 1;
  const int products = std::atoi(arguments[1]), seed = std::atoi(arguments[2]);
  DeviceInfo device;
  check(current_device_info(device));
  std::printf("multiprocessors %d\n", device.multiprocessors);
  time_type<float>("float32", Precision::kIeee, products, seed);
  time_type<float>("tf32", Precision::kTf32, products, seed);
  time_type<double>("float64", Precision::kIeee, products, seed);
  time_type<__nv_bfloat16>("bfloat16", Precision::kIeee, products, seed);
}
