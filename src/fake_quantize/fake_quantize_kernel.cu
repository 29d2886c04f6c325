// fake_quantize on CUDA: one pass forward, one pass backward. What a backward sums, it sums in a fixed order:
// blocks or threads write partial sums, which a last small kernel adds up channel by channel.
#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "fake_quantize/fake_quantize.h"

namespace lltm_ext {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;

// 32-bit division takes a third of the time of 64-bit division.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

__device__ __forceinline__ int64_t channel_of(int64_t i, const ChannelLayout& layout) {
  if (layout.channels == 1) return 0;
  const int64_t row = quotient(i, layout.inner);
  return row - quotient(row, layout.channels) * layout.channels;
}

// The grids of V elements from the i-th on: one for all, or kGrids = V of them.
template <int kGrids, typename A>
__device__ __forceinline__ void load_grids(Quantizer<A> (&grids)[kGrids], int64_t i,
                                           const ChannelLayout& layout, const QuantizationScheme& scheme) {
  int64_t channel = channel_of(i, layout);
  grids[0] = quantizer_of<A>(scheme, channel);
  if constexpr (kGrids > 1) {
    int64_t left = layout.inner - (i - quotient(i, layout.inner) * layout.inner);
#pragma unroll
    for (int j = 1; j < kGrids; ++j) {
      grids[j] = grids[j - 1];
      if (--left > 0) continue;
      left = layout.inner;
      channel = channel + 1 == layout.channels ? 0 : channel + 1;
      grids[j] = quantizer_of<A>(scheme, channel);
    }
  }
}

// Up to V elements from x on, of which `count` exist.
template <int V, typename T>
__device__ __forceinline__ Vec<T, V> load(const T* x, int64_t count) {
  if (count >= V) return *reinterpret_cast<const Vec<T, V>*>(x);
  Vec<T, V> y = {};
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (j < count) y.data[j] = x[j];
  }
  return y;
}

template <int V, typename T>
__device__ __forceinline__ void store(T* x, const Vec<T, V>& y, int64_t count) {
  if (count >= V) {
    *reinterpret_cast<Vec<T, V>*>(x) = y;
    return;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (j < count) x[j] = y.data[j];
  }
}

// ---- Forward

// Each thread takes V elements, and again V at every `stride` elements behind them. The stride is a multiple
// of the channels' period in memory, so that the thread's grids stay the same. The bits of 8 / V neighbours
// meet in a byte of the mask; so a warp stays together to the end.
template <int V, int kGrids, typename T>
__global__ void __launch_bounds__(kThreads, kGrids > 1 ? 4 : 8)
    fake_quantize_forward_kernel(const T* __restrict__ input, T* __restrict__ output,
                                 unsigned char* __restrict__ mask, const ChannelLayout layout,
                                 const QuantizationScheme scheme, int64_t n, int64_t stride) {
  using A = acc_t<T>;
  constexpr int kLanesOfByte = 8 / V;
  const int lane = threadIdx.x % kWarp;
  int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= stride) return;  // whole warps: the stride is a multiple of what a warp takes, or the grid's reach
  Quantizer<A> grids[kGrids];
  load_grids(grids, i < n ? i : 0, layout, scheme);
  for (; i - lane * V < n; i += stride) {
    const Vec<T, V> x = load<V>(input + i, n - i);
    Vec<T, V> y;
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const Quantizer<A>& grid = grids[kGrids > 1 ? j : 0];
      const A steps = grid.steps(widen(x.data[j]));
      y.data[j] = narrow<T>(grid.value(steps));
      bits |= static_cast<unsigned>(grid.holds(steps) && i + j < n) << j;
    }
    store(output + i, y, n - i);
    if (!mask) continue;
    bits <<= lane % kLanesOfByte * V;
#pragma unroll
    for (int other = 1; other < kLanesOfByte; other *= 2) {
      bits |= __shfl_xor_sync(kAllLanes, bits, other);
    }
    if (lane % kLanesOfByte == 0 && i < n) mask[i / 8] = bits;
  }
}

// ---- Backward to the input alone, through the mask

template <int V, typename T>
__global__ void __launch_bounds__(kThreads)
    fake_quantize_mask_backward_kernel(const T* __restrict__ grad_output,
                                       const unsigned char* __restrict__ mask, T* __restrict__ grad_input,
                                       int64_t n) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= n) return;
  Vec<T, V> gradient = load<V>(grad_output + i, n - i);
  const unsigned bits = mask[i / 8] >> (i % 8);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (!(bits >> j & 1)) gradient.data[j] = narrow<T>(0);
  }
  store(grad_input + i, gradient, n - i);
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

// The sum over a group of kGroup threads, in its first one.
template <int kGroup, typename A>
__device__ __forceinline__ ScaleAndZeroPoint<A> sum_of_group(ScaleAndZeroPoint<A> x) {
  const auto sum_of_warp = [](ScaleAndZeroPoint<A> y) {
#pragma unroll
    for (int other = kWarp / 2; other > 0; other /= 2) {
      y += ScaleAndZeroPoint<A>{__shfl_down_sync(kAllLanes, y.scale, other),
                                __shfl_down_sync(kAllLanes, y.zero_point, other)};
    }
    return y;
  };
  x = sum_of_warp(x);
  if constexpr (kGroup > kWarp) {
    static_assert(kGroup == kThreads);
    __shared__ ScaleAndZeroPoint<A> of_warps[kThreads / kWarp];
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = ScaleAndZeroPoint<A>{};
    if (threadIdx.x < kThreads / kWarp) x = of_warps[threadIdx.x];
    if (threadIdx.x < kWarp) x = sum_of_warp(x);
  }
  return x;
}

// A group of threads for a partial sum: rows of one channel, or a length of them. Vectors begin where memory
// is aligned; what lies before and behind them goes element by element.
template <int V, int kGroup, typename T>
__global__ void __launch_bounds__(kThreads)
    fake_quantize_backward_rows_kernel(const T* __restrict__ grad_output, const T* __restrict__ input,
                                       T* __restrict__ grad_input,
                                       ScaleAndZeroPoint<acc_t<T>>* __restrict__ partial_sums,
                                       const ChannelLayout layout, const PartialSums plan,
                                       const QuantizationScheme scheme) {
  using A = acc_t<T>;
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kGroup;
  if (group >= plan.outer * layout.channels * plan.inner) return;
  const int64_t row = quotient(group, plan.inner), outer = quotient(row, layout.channels);
  const int64_t channel = row - outer * layout.channels, length = (group - row * plan.inner) * plan.length;
  const int thread = threadIdx.x % kGroup;
  const Quantizer<A> grid = quantizer_of<A>(scheme, channel);
  ScaleAndZeroPoint<A> sums = {};
  const auto one = [&](int64_t i) { grad_input[i] = backward_of(grid, grad_output[i], input[i], sums); };
  const int64_t last = min((outer + 1) * plan.rows, layout.outer);
  for (int64_t o = outer * plan.rows; o < last; ++o) {
    const int64_t start = (o * layout.channels + channel) * layout.inner;
    const int64_t begin = start + length, end = start + min(length + plan.length, layout.inner);
    const int64_t first = min((begin + V - 1) / V * V, end), behind = first + (end - first) / V * V;
    if (begin + thread < first) one(begin + thread);
    for (int64_t i = first + thread * V; i < behind; i += kGroup * V) {
      const auto gradients = *reinterpret_cast<const Vec<T, V>*>(grad_output + i);
      const auto x = *reinterpret_cast<const Vec<T, V>*>(input + i);
      Vec<T, V> y;
#pragma unroll
      for (int j = 0; j < V; ++j) y.data[j] = backward_of(grid, gradients.data[j], x.data[j], sums);
      *reinterpret_cast<Vec<T, V>*>(grad_input + i) = y;
    }
    if (behind + thread < end) one(behind + thread);
  }
  sums = sum_of_group<kGroup>(sums);
  if (thread == 0) partial_sums[group] = sums;
}

// Rows too short for that: each thread takes V elements, and again V at every period behind them. A period
// holds whole rows of all channels, so that the thread's channels stay the same.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads, 2)
    fake_quantize_backward_columns_kernel(const T* __restrict__ grad_output, const T* __restrict__ input,
                                          T* __restrict__ grad_input,
                                          ScaleAndZeroPoint<acc_t<T>>* __restrict__ partial_sums,
                                          const ChannelLayout layout, int64_t n, int64_t period,
                                          const QuantizationScheme scheme) {
  using A = acc_t<T>;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (first >= period) return;
  Quantizer<A> grids[V];
  load_grids(grids, first, layout, scheme);
  ScaleAndZeroPoint<A> sums[V] = {};
  for (int64_t i = first; i < n; i += period) {
    const Vec<T, V> gradients = load<V>(grad_output + i, n - i), x = load<V>(input + i, n - i);
    Vec<T, V> y;
#pragma unroll
    for (int j = 0; j < V; ++j) y.data[j] = backward_of(grids[j], gradients.data[j], x.data[j], sums[j]);
    store(grad_input + i, y, n - i);
  }
#pragma unroll
  for (int j = 0; j < V; ++j) partial_sums[first + j] = sums[j];
}

// A group of threads a channel.
template <int kGroup, typename A>
__global__ void __launch_bounds__(kThreads)
    fake_quantize_sums_kernel(const ScaleAndZeroPoint<A>* __restrict__ partial_sums,
                              A* __restrict__ grad_scale, A* __restrict__ grad_zero_point,
                              const ChannelLayout sums, A grad_factor) {
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kGroup;
  if (channel >= sums.channels) return;
  const int thread = threadIdx.x % kGroup;
  ScaleAndZeroPoint<A> sum = {};
#pragma unroll 4
  for (int64_t i = thread; i < sums.outer * sums.inner; i += kGroup) {
    const int64_t outer = quotient(i, sums.inner);
    sum += partial_sums[(outer * sums.channels + channel) * sums.inner + i - outer * sums.inner];
  }
  sum = sum_of_group<kGroup>(sum);
  if (thread == 0) {
    grad_scale[channel] = sum.scale * grad_factor;
    grad_zero_point[channel] = sum.zero_point * grad_factor;
  }
}

// ---- Launchers

template <typename... Pointers>
bool all_aligned(Pointers... pointers) {
  return (is_vec_aligned(pointers) && ...);
}

unsigned grid_of(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kThreads)); }

// The multiple of `unit` elements that is at least n / repeats: what the threads of a grid step over.
int64_t stride_of(int64_t n, int64_t unit, int64_t repeats) {
  return ceil_div(std::max<int64_t>(n / repeats, 1), unit) * unit;
}

template <int V, int kGrids, typename T>
cudaError_t forward(const T* input, T* output, unsigned char* mask, const ChannelLayout& layout,
                    const QuantizationScheme& scheme, cudaStream_t stream) {
  const int64_t n = layout.size(), warp = kWarp * V;
  int64_t stride = ceil_div(n, warp) * warp;
  if (kGrids > 1) {
    // V grids cost more than V elements: have them serve 16 times, but for the grid that would be too small.
    const int64_t unit = layout.channels * layout.inner * warp;
    stride = std::min(stride, stride_of(n, unit, std::clamp<int64_t>(n / (1 << 20), 1, 16)));
  }
  fake_quantize_forward_kernel<V, kGrids>
      <<<grid_of(ceil_div(stride, V)), kThreads, 0, stream>>>(input, output, mask, layout, scheme, n, stride);
  return cudaGetLastError();
}

template <int V, int kGroup, typename T>
cudaError_t backward_rows(const T* grad_output, const T* input, T* grad_input,
                          ScaleAndZeroPoint<acc_t<T>>* partial_sums, const ChannelLayout& layout,
                          const PartialSums& plan, const QuantizationScheme& scheme, cudaStream_t stream) {
  const int64_t groups = plan.outer * layout.channels * plan.inner;
  fake_quantize_backward_rows_kernel<V, kGroup><<<grid_of(groups * kGroup), kThreads, 0, stream>>>(
      grad_output, input, grad_input, partial_sums, layout, plan, scheme);
  return cudaGetLastError();
}

template <int V, typename T>
cudaError_t backward(const T* grad_output, const T* input, T* grad_input,
                     ScaleAndZeroPoint<acc_t<T>>* partial_sums, const ChannelLayout& layout,
                     const PartialSums& plan, const QuantizationScheme& scheme, cudaStream_t stream) {
  if (plan.period > 0) {
    fake_quantize_backward_columns_kernel<V><<<grid_of(plan.period / V), kThreads, 0, stream>>>(
        grad_output, input, grad_input, partial_sums, layout, layout.size(), plan.period, scheme);
    return cudaGetLastError();
  }
  const auto rows =
      plan.rows * plan.length < 1024 ? backward_rows<V, kWarp, T> : backward_rows<V, kThreads, T>;
  return rows(grad_output, input, grad_input, partial_sums, layout, plan, scheme, stream);
}

template <int kGroup, typename A>
cudaError_t sum_partial_sums(const ScaleAndZeroPoint<A>* partial_sums, A* grad_scale, A* grad_zero_point,
                             const ChannelLayout& sums, double grad_factor, cudaStream_t stream) {
  fake_quantize_sums_kernel<kGroup><<<grid_of(sums.channels * kGroup), kThreads, 0, stream>>>(
      partial_sums, grad_scale, grad_zero_point, sums, static_cast<A>(grad_factor));
  return cudaGetLastError();
}

}  // namespace

PartialSums plan_partial_sums_cuda(const ChannelLayout& layout) {
  // What a block of threads takes, as long as there is enough for all: a multiple of every vector.
  constexpr int64_t kPiece = 8192, kShortRow = 256, kLeastRepeats = 32;
  const int64_t n = layout.size(), row = layout.channels * layout.inner;
  if (layout.inner < kShortRow && layout.outer >= 8 * kLeastRepeats) {
    // A multiple of 8 rows is one of every vector.
    const int64_t period = stride_of(n, 8 * row, std::max(kLeastRepeats, n / (1 << 21)));
    return {period / row, layout.inner, 0, 0, period};
  }
  const int64_t length = std::min(layout.inner, kPiece);
  const int64_t rows = std::clamp<int64_t>(kPiece / length, 1, layout.outer);
  return {ceil_div(layout.outer, rows), ceil_div(layout.inner, length), rows, length, 0};
}

template <typename T>
cudaError_t fake_quantize_forward(const T* input, T* output, unsigned char* mask, const ChannelLayout& layout,
                                  const QuantizationScheme& scheme, cudaStream_t stream) {
  constexpr int V = kVecWidth<T>;
  if (!all_aligned(input, output)) return forward<1, 1>(input, output, mask, layout, scheme, stream);
  const bool one_grid = layout.channels == 1 || layout.inner % V == 0;
  return one_grid ? forward<V, 1>(input, output, mask, layout, scheme, stream)
                  : forward<V, V>(input, output, mask, layout, scheme, stream);
}

template <typename T>
cudaError_t fake_quantize_mask_backward(const T* grad_output, const unsigned char* mask, T* grad_input,
                                        int64_t n, cudaStream_t stream) {
  constexpr int V = kVecWidth<T>;
  if (all_aligned(grad_output, grad_input)) {
    fake_quantize_mask_backward_kernel<V>
        <<<grid_of(ceil_div(n, V)), kThreads, 0, stream>>>(grad_output, mask, grad_input, n);
  } else {
    fake_quantize_mask_backward_kernel<1>
        <<<grid_of(n), kThreads, 0, stream>>>(grad_output, mask, grad_input, n);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t fake_quantize_backward(const T* grad_output, const T* input, T* grad_input,
                                   ScaleAndZeroPoint<acc_t<T>>* partial_sums, acc_t<T>* grad_scale,
                                   acc_t<T>* grad_zero_point, const ChannelLayout& layout,
                                   const PartialSums& plan, const QuantizationScheme& scheme,
                                   double grad_factor, cudaStream_t stream) {
  const auto pass = all_aligned(grad_output, input, grad_input) ? backward<kVecWidth<T>, T> : backward<1, T>;
  const cudaError_t error = pass(grad_output, input, grad_input, partial_sums, layout, plan, scheme, stream);
  if (error != cudaSuccess) return error;
  const auto sum = plan.outer * plan.inner < 1024 ? sum_partial_sums<kWarp, acc_t<T>>
                                                  : sum_partial_sums<kThreads, acc_t<T>>;
  return sum(partial_sums, grad_scale, grad_zero_point, {plan.outer, layout.channels, plan.inner},
             grad_factor, stream);
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
