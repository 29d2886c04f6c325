// fake_quantize on CUDA: one pass forward, one pass backward. What a backward sums, it sums in a fixed order:
// blocks or threads write partial sums, which a last small kernel adds up channel by channel.
#include <cuda_runtime.h>

#include <type_traits>

#include "common/elementwise_kernel.cuh"
#include "common/launch.cuh"
#include "fake_quantize/fake_quantize.h"

namespace lltm_ext {
// Named: what stands in an unnamed one gets a name from nvcc with the path of this file in it, so that no two
// builds were alike.
inline namespace fake_quantize_cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;
// Of the kernels without sums; as the elementwise engine's.
constexpr int kSmallBlock = 128;
// Of the kernel that adds up partial sums: often it has one channel, and so one block.
constexpr int kSumsBlock = 1024;
// A thread's, each of 16 bytes: what it needs to know of its channel serves both.
constexpr int kVectors = 2;

// A number that the host knows and a kernel divides by: by a product with 2^(63 + shift) / divisor, rounded
// up, which is exact for all of a below 2^63. The GPU's own division takes 20 instructions, of 64 bits 80.
struct Divisor {
  explicit Divisor(int64_t divisor_) : divisor(divisor_) {
    while (int64_t{1} << shift < divisor) ++shift;
    multiplier =
        static_cast<uint64_t>(((static_cast<unsigned __int128>(1) << (63 + shift)) + divisor - 1) / divisor);
  }
  __device__ __forceinline__ int64_t quotient(int64_t a) const {
    return __umul64hi(2 * static_cast<uint64_t>(a), multiplier) >> shift;
  }
  __device__ __forceinline__ int64_t remainder(int64_t a) const { return a - quotient(a) * divisor; }

  int64_t divisor;
  uint64_t multiplier;
  int shift = 0;
};

// Which channel an element is of, and the channel's grid. Of numbers there is one, which the host computes.
template <typename A>
struct Channels {
  Channels(const ChannelLayout& layout, const QuantizationScheme& scheme)
      : count(layout.channels),
        outer(layout.outer),
        by_inner(layout.inner),
        by_count(layout.channels),
        scale(scheme.scale),
        zero_point(scheme.zero_point),
        lowest(static_cast<A>(scheme.quant_min)),
        highest(static_cast<A>(scheme.quant_max)),
        known(!scale.data && !zero_point.data),
        grid{} {
    if (known) grid = quantizer_of<A>(scheme, 0);
  }
  __device__ __forceinline__ int64_t of(int64_t i) const {
    if (count == 1) return 0;
    const int64_t row = by_inner.quotient(i);
    return outer == 1 ? row : by_count.remainder(row);
  }
  __device__ __forceinline__ Quantizer<A> grid_of(int64_t channel) const {
    return known ? grid : quantizer_of(scale, zero_point, lowest, highest, channel);
  }

  int64_t count, outer;
  Divisor by_inner, by_count;
  Parameter scale, zero_point;
  A lowest, highest;
  bool known;
  Quantizer<A> grid;
};

// The grids of V elements from the i-th on.
template <int V, typename A>
__device__ __forceinline__ void load_grids(Quantizer<A> (&grids)[V], int64_t i, const Channels<A>& channels) {
  int64_t channel = channels.of(i), left = channels.by_inner.divisor - channels.by_inner.remainder(i);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    grids[j] = channels.grid_of(channel);
    if (--left > 0) continue;
    left = channels.by_inner.divisor;
    channel = channel + 1 == channels.count ? 0 : channel + 1;
  }
}

// V elements from x on, if they exist, else zeros. As words: of single elements that may be there or not the
// compiler makes registers of their own, and to fill them waits for each load before it issues the next.
template <int V, typename T>
__device__ __forceinline__ Vec<T, V> load_if(bool exist, const T* x) {
  if constexpr (sizeof(Vec<T, V>) == 16) {
    uint4 words = {};
    if (exist) words = *reinterpret_cast<const uint4*>(x);
    return *reinterpret_cast<const Vec<T, V>*>(&words);
  } else {
    static_assert(V == 1);
    return {exist ? *x : T{}};
  }
}

// Vectors end with the last whole byte of the mask. What is behind that, fewer than 8 elements, is for the
// lanes of one warp.
template <int V>
__device__ __forceinline__ int64_t end_of_vectors(int64_t n) {
  return V == 1 ? n : n / 8 * 8;
}
template <int V>
__device__ __forceinline__ bool takes_the_rest(int64_t n) {
  return V > 1 && n % 8 > 0 && blockIdx.x == 0 && threadIdx.x < kWarp;
}

// ---- Forward

// V elements on their grids; the bits of those within.
template <int V, typename T, class GridOf>
__device__ __forceinline__ Vec<T, V> quantize(const Vec<T, V>& x, GridOf grid_of, unsigned& bits) {
  Vec<T, V> y;
  bits = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const auto& grid = grid_of(j);
    const auto steps = grid.steps(widen(x.data[j]));
    y.data[j] = narrow<T>(grid.value(steps));
    bits |= static_cast<unsigned>(grid.holds(steps)) << j;
  }
  return y;
}

// The bits of V elements from the i-th on. Those of 8 / V neighbouring lanes meet in a byte; so a warp comes
// here as a whole.
template <int V>
__device__ __forceinline__ void store_bits(bool exist, unsigned char* mask, int64_t i, unsigned bits) {
  constexpr int kLanesOfByte = 8 / V;
  if (V == 1) {
    bits = __ballot_sync(kAllLanes, exist && bits) >> threadIdx.x % kWarp;
  } else if (V == 4) {
    bits |= __shfl_down_sync(kAllLanes, bits, 1) << 4;
  }
  if (exist && threadIdx.x % kLanesOfByte == 0) mask[i / 8] = static_cast<unsigned char>(bits);
}

template <typename T>
__device__ __forceinline__ void forward_of_the_rest(const T* input, T* output, unsigned char* mask,
                                                    const Channels<acc_t<T>>& channels, int64_t n) {
  const int64_t i = n / 8 * 8 + threadIdx.x;
  const bool exists = i < n;
  const auto grid = channels.grid_of(exists ? channels.of(i) : 0);
  unsigned bits;
  const auto y = quantize(load_if<1>(exists, input + i), [&](int) { return grid; }, bits);
  if (exists) output[i] = y.data[0];
  if (mask) store_bits<1>(exists, mask, i, bits);
}

// Each warp takes kVectors vectors a lane, side by side. `together`: they are of one channel, whose grid then
// serves them all.
template <int V, bool kMask, typename T>
__global__ void __launch_bounds__(kSmallBlock)
    fake_quantize_forward_kernel(const T* __restrict__ input, T* __restrict__ output,
                                 unsigned char* __restrict__ mask, const Channels<acc_t<T>> channels,
                                 int64_t n, bool together) {
  constexpr int kOfWarp = kWarp * V;
  const int64_t end = end_of_vectors<V>(n),
                thread = static_cast<int64_t>(blockIdx.x) * kSmallBlock + threadIdx.x;
  const int64_t first = thread / kWarp * (kVectors * kOfWarp) + thread % kWarp * V;
  Vec<T, V> x[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = first + v * kOfWarp;
    x[v] = load_if<V>(i < end, input + i);
  }
  Quantizer<acc_t<T>> grid;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = first + v * kOfWarp;
    if (v == 0 || !together) grid = channels.grid_of(i < end ? channels.of(i) : 0);
    unsigned bits;
    const Vec<T, V> y = quantize(x[v], [&](int) { return grid; }, bits);
    if (i < end) store(output + i, y);
    if (kMask) store_bits<V>(i < end, mask, i, bits);
  }
  if (takes_the_rest<V>(n)) forward_of_the_rest(input, output, kMask ? mask : nullptr, channels, n);
}

// Where V neighbours may be of several channels: each thread takes V elements, and again V at every `stride`
// elements behind them. The stride is a multiple of the channels' period in memory, so that the thread's
// grids stay the same; and of what a warp takes, or the grid's reach.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads, 4)
    fake_quantize_forward_columns_kernel(const T* __restrict__ input, T* __restrict__ output,
                                         unsigned char* __restrict__ mask, const Channels<acc_t<T>> channels,
                                         int64_t n, int64_t stride) {
  const int lane = threadIdx.x % kWarp;
  const int64_t end = end_of_vectors<V>(n);
  int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (takes_the_rest<V>(n)) forward_of_the_rest(input, output, mask, channels, n);
  if (i >= stride) return;
  Quantizer<acc_t<T>> grids[V];
  load_grids(grids, i < end ? i : 0, channels);
  for (; i - lane * V < end; i += stride) {
    unsigned bits;
    const Vec<T, V> y = quantize(load_if<V>(i < end, input + i), [&](int j) { return grids[j]; }, bits);
    if (i < end) store(output + i, y);
    if (mask) store_bits<V>(i < end, mask, i, bits);
  }
}

// ---- Backward to the input alone, through the mask

// Zeros are zeros in every type of a size: Bits is its integer.
template <int V, typename Bits>
__global__ void __launch_bounds__(kSmallBlock)
    fake_quantize_mask_backward_kernel(const Bits* __restrict__ grad_output,
                                       const unsigned char* __restrict__ mask, Bits* __restrict__ grad_input,
                                       int64_t n) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kSmallBlock + threadIdx.x) * V;
  if (i < end_of_vectors<V>(n)) {
    Vec<Bits, V> gradient = load_if<V>(true, grad_output + i);
    const unsigned bits = mask[i / 8] >> (i % 8);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (!(bits >> j & 1)) gradient.data[j] = 0;
    }
    store(grad_input + i, gradient);
  }
  if (takes_the_rest<V>(n)) {
    const int64_t j = n / 8 * 8 + threadIdx.x;
    if (j < n) grad_input[j] = mask[j / 8] >> (j % 8) & 1 ? grad_output[j] : Bits(0);
  }
}

// ---- Backward to the input, the scale and the zero point

// One element: its gradient, and its part in the sums.
template <typename T, typename A>
__device__ __forceinline__ T backward_of(const Quantizer<A>& grid, T grad_output, T input,
                                         ScaleAndZeroPoint<A>& sums) {
  const A gradient = widen(grad_output), x = widen(input);
  sums += grid.gradient(gradient, x);
  return narrow<T>(grid.holds(grid.steps(x)) ? gradient : A(0));
}

// The threads that share a sum: a warp's or a block's.
struct Group {
  bool of_block;
  __device__ __forceinline__ int size() const { return of_block ? blockDim.x : kWarp; }
  __device__ __forceinline__ int thread() const { return of_block ? threadIdx.x : threadIdx.x % kWarp; }
  __device__ __forceinline__ int64_t index() const {
    return of_block ? blockIdx.x : (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  }
};

template <typename A>
__device__ __forceinline__ ScaleAndZeroPoint<A> sum_of_warp(ScaleAndZeroPoint<A> x) {
#pragma unroll
  for (int other = kWarp / 2; other > 0; other /= 2) {
    x += ScaleAndZeroPoint<A>{__shfl_down_sync(kAllLanes, x.scale, other),
                              __shfl_down_sync(kAllLanes, x.zero_point, other)};
  }
  return x;
}

// The sum over a group's threads, in its first one.
template <typename A>
__device__ __forceinline__ ScaleAndZeroPoint<A> sum_of(Group group, ScaleAndZeroPoint<A> x) {
  x = sum_of_warp(x);
  if (!group.of_block) return x;
  __shared__ ScaleAndZeroPoint<A> of_warps[kWarp];
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = ScaleAndZeroPoint<A>{};
  if (threadIdx.x < blockDim.x / kWarp) x = of_warps[threadIdx.x];
  return threadIdx.x < kWarp ? sum_of_warp(x) : x;
}

// A group of threads for a partial sum: rows of one channel, or a length of them. Vectors begin where memory
// is aligned; what lies before and behind them goes element by element.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads)
    fake_quantize_backward_rows_kernel(const T* __restrict__ grad_output, const T* __restrict__ input,
                                       T* __restrict__ grad_input,
                                       ScaleAndZeroPoint<acc_t<T>>* __restrict__ partial_sums,
                                       const ChannelLayout layout, const PartialSums plan,
                                       const Divisor by_inner, const Channels<acc_t<T>> channels,
                                       const Group group) {
  using A = acc_t<T>;
  const int64_t piece = group.index();
  if (piece >= plan.outer * layout.channels * plan.inner) return;
  const int64_t row = by_inner.quotient(piece), outer = channels.by_count.quotient(row);
  const int64_t channel = row - outer * layout.channels, length = (piece - row * plan.inner) * plan.length;
  const int thread = group.thread();
  const Quantizer<A> grid = channels.grid_of(channel);
  ScaleAndZeroPoint<A> sums = {};
  const auto one = [&](int64_t i) { grad_input[i] = backward_of(grid, grad_output[i], input[i], sums); };
  const int64_t last = min((outer + 1) * plan.rows, layout.outer);
  for (int64_t o = outer * plan.rows; o < last; ++o) {
    const int64_t start = (o * layout.channels + channel) * layout.inner;
    const int64_t begin = start + length, end = start + min(length + plan.length, layout.inner);
    const int64_t first = min((begin + V - 1) / V * V, end), behind = first + (end - first) / V * V;
    if (begin + thread < first) one(begin + thread);
    for (int64_t i = first + thread * V; i < behind; i += group.size() * V) {
      const Vec<T, V> gradients = load_if<V>(true, grad_output + i), x = load_if<V>(true, input + i);
      Vec<T, V> y;
#pragma unroll
      for (int j = 0; j < V; ++j) y.data[j] = backward_of(grid, gradients.data[j], x.data[j], sums);
      store(grad_input + i, y);
    }
    if (behind + thread < end) one(behind + thread);
  }
  sums = sum_of(group, sums);
  if (thread == 0) partial_sums[piece] = sums;
}

// Rows too short for that: each thread takes V elements, and again V at every period behind them. A period
// holds whole rows of all channels, so that the thread's channels stay the same.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads, 2)
    fake_quantize_backward_columns_kernel(const T* __restrict__ grad_output, const T* __restrict__ input,
                                          T* __restrict__ grad_input,
                                          ScaleAndZeroPoint<acc_t<T>>* __restrict__ partial_sums,
                                          const Channels<acc_t<T>> channels, int64_t n, int64_t period) {
  using A = acc_t<T>;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (first >= period) return;
  Quantizer<A> grids[V];
  load_grids(grids, first, channels);
  ScaleAndZeroPoint<A> sums[V] = {};
  int64_t i = first;
  for (; i + V <= n; i += period) {
    const Vec<T, V> gradients = load_if<V>(true, grad_output + i), x = load_if<V>(true, input + i);
    Vec<T, V> y;
#pragma unroll
    for (int j = 0; j < V; ++j) y.data[j] = backward_of(grids[j], gradients.data[j], x.data[j], sums[j]);
    store(grad_input + i, y);
  }
#pragma unroll
  for (int j = 0; j < V - 1; ++j) {
    if (i + j < n) grad_input[i + j] = backward_of(grids[j], grad_output[i + j], input[i + j], sums[j]);
  }
#pragma unroll
  for (int j = 0; j < V; ++j) partial_sums[first + j] = sums[j];
}

// A group of threads a channel.
template <typename A>
__global__ void __launch_bounds__(kSumsBlock)
    fake_quantize_sums_kernel(const ScaleAndZeroPoint<A>* __restrict__ partial_sums,
                              A* __restrict__ grad_scale, A* __restrict__ grad_zero_point,
                              const ChannelLayout sums, const Divisor by_inner, A grad_factor,
                              const Group group) {
  const int64_t channel = group.index();
  if (channel >= sums.channels) return;
  ScaleAndZeroPoint<A> sum = {};
#pragma unroll 8
  for (int64_t i = group.thread(); i < sums.outer * sums.inner; i += group.size()) {
    const int64_t outer = by_inner.quotient(i);
    sum += partial_sums[(outer * sums.channels + channel) * sums.inner + i - outer * sums.inner];
  }
  sum = sum_of(group, sum);
  if (group.thread() == 0) {
    grad_scale[channel] = sum.scale * grad_factor;
    grad_zero_point[channel] = sum.zero_point * grad_factor;
  }
}

// ---- Launchers

// In float64 single elements: there it is the arithmetic that takes the time, and the code half of the space.
template <typename T>
constexpr int kWidth = sizeof(T) == 8 ? 1 : kVecWidth<T>;

template <typename... Pointers>
bool all_aligned(Pointers... pointers) {
  return (is_vec_aligned(pointers) && ...);
}

unsigned grid_of(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kThreads)); }

unsigned small_blocks(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kSmallBlock)); }

unsigned blocks_of(int64_t groups, Group group, int block) {
  return static_cast<unsigned>(group.of_block ? groups : ceil_div(groups * kWarp, block));
}

// The multiple of `unit` elements that is at least n / repeats: what the threads of a grid step over.
int64_t stride_of(int64_t n, int64_t unit, int64_t repeats) {
  return ceil_div(std::max<int64_t>(n / repeats, 1), unit) * unit;
}

template <int V, typename T>
cudaError_t forward(const T* input, T* output, unsigned char* mask, const ChannelLayout& layout,
                    const QuantizationScheme& scheme, cudaStream_t stream) {
  const int64_t n = layout.size();
  const bool together = layout.channels == 1 || layout.inner % (kVectors * kWarp * V) == 0;
  const auto kernel =
      mask ? fake_quantize_forward_kernel<V, true, T> : fake_quantize_forward_kernel<V, false, T>;
  kernel<<<small_blocks(ceil_div(n, kVectors * V)), kSmallBlock, 0, stream>>>(
      input, output, mask, Channels<acc_t<T>>(layout, scheme), n, together);
  return cudaGetLastError();
}

template <int V, typename T>
cudaError_t forward_columns(const T* input, T* output, unsigned char* mask, const ChannelLayout& layout,
                            const QuantizationScheme& scheme, cudaStream_t stream) {
  const int64_t n = layout.size(), warp = kWarp * V, unit = layout.channels * layout.inner * warp;
  // V grids cost more than V elements: have them serve 16 times, but for the grid that would be too small.
  const int64_t stride =
      std::min(ceil_div(n, warp) * warp, stride_of(n, unit, std::clamp<int64_t>(n / (1 << 20), 1, 16)));
  fake_quantize_forward_columns_kernel<V><<<grid_of(ceil_div(stride, V)), kThreads, 0, stream>>>(
      input, output, mask, Channels<acc_t<T>>(layout, scheme), n, stride);
  return cudaGetLastError();
}

template <int V, typename Bits>
cudaError_t mask_backward(const Bits* grad_output, const unsigned char* mask, Bits* grad_input, int64_t n,
                          cudaStream_t stream) {
  fake_quantize_mask_backward_kernel<V>
      <<<small_blocks(ceil_div(n, V)), kSmallBlock, 0, stream>>>(grad_output, mask, grad_input, n);
  return cudaGetLastError();
}

template <int V, typename T>
cudaError_t backward_rows(const T* grad_output, const T* input, T* grad_input,
                          ScaleAndZeroPoint<acc_t<T>>* partial_sums, const ChannelLayout& layout,
                          const PartialSums& plan, const QuantizationScheme& scheme, cudaStream_t stream) {
  const Group group = {plan.rows * plan.length >= 1024};
  const int64_t pieces = plan.outer * layout.channels * plan.inner;
  fake_quantize_backward_rows_kernel<V><<<blocks_of(pieces, group, kThreads), kThreads, 0, stream>>>(
      grad_output, input, grad_input, partial_sums, layout, plan, Divisor(plan.inner),
      Channels<acc_t<T>>(layout, scheme), group);
  return cudaGetLastError();
}

template <int V, typename T>
cudaError_t backward(const T* grad_output, const T* input, T* grad_input,
                     ScaleAndZeroPoint<acc_t<T>>* partial_sums, const ChannelLayout& layout,
                     const PartialSums& plan, const QuantizationScheme& scheme, cudaStream_t stream) {
  if (plan.period > 0) {
    fake_quantize_backward_columns_kernel<V><<<grid_of(ceil_div(plan.period, V)), kThreads, 0, stream>>>(
        grad_output, input, grad_input, partial_sums, Channels<acc_t<T>>(layout, scheme), layout.size(),
        plan.period);
    return cudaGetLastError();
  }
  return backward_rows<V>(grad_output, input, grad_input, partial_sums, layout, plan, scheme, stream);
}

template <typename A>
cudaError_t sum_partial_sums(const ScaleAndZeroPoint<A>* partial_sums, A* grad_scale, A* grad_zero_point,
                             const ChannelLayout& sums, double grad_factor, cudaStream_t stream) {
  const Group group = {sums.outer * sums.inner >= 1024};
  fake_quantize_sums_kernel<<<blocks_of(sums.channels, group, kSumsBlock), kSumsBlock, 0, stream>>>(
      partial_sums, grad_scale, grad_zero_point, sums, Divisor(sums.inner), static_cast<A>(grad_factor),
      group);
  return cudaGetLastError();
}

}  // namespace fake_quantize_cuda

PartialSums plan_partial_sums_cuda(const ChannelLayout& layout) {
  constexpr int64_t kShortRow = 256, kLeastRepeats = 32;
  const int64_t n = layout.size(), row = layout.channels * layout.inner;
  // What a block of threads takes, a multiple of every vector: about as many elements as there are such
  // pieces, so that neither the last blocks nor the sums of all of them take long.
  int64_t piece = 2048;
  while (piece * piece < n) piece *= 2;
  if (layout.inner < kShortRow && layout.outer >= 8 * kLeastRepeats) {
    // A multiple of 8 rows is one of every vector.
    const int64_t period = stride_of(n, 8 * row, std::max(kLeastRepeats, n / (1 << 21)));
    return {period / row, layout.inner, 0, 0, period};
  }
  const int64_t length = std::min(layout.inner, piece);
  const int64_t rows = std::clamp<int64_t>(piece / length, 1, layout.outer);
  return {ceil_div(layout.outer, rows), ceil_div(layout.inner, length), rows, length, 0};
}

template <typename T>
cudaError_t fake_quantize_forward(const T* input, T* output, unsigned char* mask, const ChannelLayout& layout,
                                  const QuantizationScheme& scheme, cudaStream_t stream) {
  constexpr int V = kWidth<T>;
  if constexpr (V > 1) {
    const bool one_channel = layout.channels == 1 || layout.inner % V == 0;
    if (all_aligned(input, output)) {
      return one_channel ? forward<V>(input, output, mask, layout, scheme, stream)
                         : forward_columns<V>(input, output, mask, layout, scheme, stream);
    }
  }
  return forward<1>(input, output, mask, layout, scheme, stream);
}

template <typename T>
cudaError_t fake_quantize_mask_backward(const T* grad_output, const unsigned char* mask, T* grad_input,
                                        int64_t n, cudaStream_t stream) {
  using Bits =
      std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  const auto pass =
      all_aligned(grad_output, grad_input) ? mask_backward<kWidth<T>, Bits> : mask_backward<1, Bits>;
  return pass(reinterpret_cast<const Bits*>(grad_output), mask, reinterpret_cast<Bits*>(grad_input), n,
              stream);
}

template <typename T>
cudaError_t fake_quantize_backward(const T* grad_output, const T* input, T* grad_input,
                                   ScaleAndZeroPoint<acc_t<T>>* partial_sums, acc_t<T>* grad_scale,
                                   acc_t<T>* grad_zero_point, const ChannelLayout& layout,
                                   const PartialSums& plan, const QuantizationScheme& scheme,
                                   double grad_factor, cudaStream_t stream) {
  const auto pass = all_aligned(grad_output, input, grad_input) ? backward<kWidth<T>, T> : backward<1, T>;
  const cudaError_t error = pass(grad_output, input, grad_input, partial_sums, layout, plan, scheme, stream);
  if (error != cudaSuccess) return error;
  return sum_partial_sums(partial_sums, grad_scale, grad_zero_point,
                          {plan.outer, layout.channels, plan.inner}, grad_factor, stream);
}

#define LLTM_FAKE_QUANTIZE(T)                                                                           \
  template cudaError_t fake_quantize_forward(const T*, T*, unsigned char*, const ChannelLayout&,        \
                                             const QuantizationScheme&, cudaStream_t);                  \
  template cudaError_t fake_quantize_mask_backward(const T*, const unsigned char*, T*, int64_t,         \
                                                   cudaStream_t);                                       \
  template cudaError_t fake_quantize_backward(                                                          \
      const T*, const T*, T*, ScaleAndZeroPoint<acc_t<T>>*, acc_t<T>*, acc_t<T>*, const ChannelLayout&, \
      const PartialSums&, const QuantizationScheme&, double, cudaStream_t);
LLTM_FAKE_QUANTIZE(float)
LLTM_FAKE_QUANTIZE(double)
LLTM_FAKE_QUANTIZE(__half)
LLTM_FAKE_QUANTIZE(__nv_bfloat16)

}  // namespace lltm_ext
