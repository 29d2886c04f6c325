// fake_quantize on CUDA: one pass forward, one pass backward. The backward's sums are deterministic: blocks
// or threads write partial sums, which a second kernel adds for each channel.
#include <cuda_runtime.h>

#include <type_traits>

#include "common/divisor.h"
#include "common/elementwise_kernel.cuh"
#include "common/launch.cuh"
#include "fake_quantize/fake_quantize.h"

namespace lltm_ext {
// The namespace has a name, because nvcc puts the file's path into the names of an unnamed one, and builds
// would not be reproducible.
inline namespace fake_quantize_cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;
// The reduction kernel often has one channel and so one block.
constexpr int kReductionThreads = 1024;
// 16-byte vectors per thread, which share a quantizer.
constexpr int kVectors = 2;

// Maps elements to channels and channels to quantizers. If scale and zero point are numbers, the host
// computes the only quantizer.
template <typename A>
struct Channels {
  Channels(const ChannelLayout& layout, const QuantizationScheme& scheme)
      : count(layout.channels),
        outer(layout.outer),
        by_inner(layout.inner),
        by_count(layout.channels),
        scale(scheme.scale),
        zero_point(scheme.zero_point),
        quant_min(static_cast<A>(scheme.quant_min)),
        quant_max(static_cast<A>(scheme.quant_max)),
        is_number(!scale.data && !zero_point.data),
        quantizer{} {
    if (is_number) quantizer = make_quantizer<A>(scheme, 0);
  }
  __device__ __forceinline__ int64_t channel_of(int64_t i) const {
    if (count == 1) return 0;
    const int64_t row = by_inner.quotient(i);
    return outer == 1 ? row : by_count.remainder(row);
  }
  __device__ __forceinline__ Quantizer<A> quantizer_of(int64_t channel) const {
    return is_number ? quantizer : make_quantizer(scale, zero_point, quant_min, quant_max, channel);
  }

  int64_t count, outer;
  Divisor by_inner, by_count;
  Parameter scale, zero_point;
  A quant_min, quant_max;
  bool is_number;
  Quantizer<A> quantizer;
};

// The quantizers of elements i to i + V - 1.
template <int V, typename A>
__device__ __forceinline__ void load_quantizers(Quantizer<A> (&quantizers)[V], int64_t i,
                                                const Channels<A>& channels) {
  int64_t channel = channels.channel_of(i), left = channels.by_inner.divisor - channels.by_inner.remainder(i);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    quantizers[j] = channels.quantizer_of(channel);
    if (--left > 0) continue;
    left = channels.by_inner.divisor;
    channel = channel + 1 == channels.count ? 0 : channel + 1;
  }
}

// Returns V elements, or zeros if they do not exist. It loads words: for conditional loads of single
// elements, the compiler would wait for each load before it issues the next.
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

// Vectors cover the whole bytes of the mask. One warp computes the tail of fewer than 8 elements.
template <int V>
__device__ __forceinline__ int64_t end_of_vectors(int64_t n) {
  return V == 1 ? n : n / 8 * 8;
}
template <int V>
__device__ __forceinline__ bool computes_tail(int64_t n) {
  return V > 1 && n % 8 > 0 && blockIdx.x == 0 && threadIdx.x < kWarp;
}

// ---- Forward

// Quantizes V elements, and sets the mask bits of those in range.
template <int V, typename T, class QuantizerOf>
__device__ __forceinline__ Vec<T, V> quantize(const Vec<T, V>& x, QuantizerOf quantizer_of, unsigned& bits) {
  Vec<T, V> y;
  bits = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const auto& quantizer = quantizer_of(j);
    const auto level = quantizer.level(widen(x.data[j]));
    y.data[j] = narrow<T>(quantizer.dequantize(level));
    bits |= static_cast<unsigned>(quantizer.in_range(level)) << j;
  }
  return y;
}

// Stores the mask bits of elements i to i + V - 1. 8 / V neighbouring lanes share a byte, so the whole warp
// must call this.
template <int V>
__device__ __forceinline__ void store_bits(bool exist, unsigned char* mask, int64_t i, unsigned bits) {
  constexpr int kLanesPerByte = 8 / V;
  if (V == 1) {
    bits = __ballot_sync(kAllLanes, exist && bits) >> threadIdx.x % kWarp;
  } else if (V == 4) {
    bits |= __shfl_down_sync(kAllLanes, bits, 1) << 4;
  }
  if (exist && threadIdx.x % kLanesPerByte == 0) mask[i / 8] = static_cast<unsigned char>(bits);
}

template <typename T>
__device__ __forceinline__ void forward_tail(const T* input, T* output, unsigned char* mask,
                                             const Channels<acc_t<T>>& channels, int64_t n) {
  const int64_t i = n / 8 * 8 + threadIdx.x;
  const bool exists = i < n;
  const auto quantizer = channels.quantizer_of(exists ? channels.channel_of(i) : 0);
  unsigned bits;
  const auto y = quantize(load_if<1>(exists, input + i), [&](int) { return quantizer; }, bits);
  if (exists) output[i] = y.data[0];
  if (mask) store_bits<1>(exists, mask, i, bits);
}

// Each lane quantizes kVectors vectors that are kWarp vectors apart. `same_channel` says whether all vectors
// of a warp belong to one channel.
template <int V, bool kMask, typename T>
__global__ void __launch_bounds__(kElementwiseThreads)
    fake_quantize_forward_kernel(const T* __restrict__ input, T* __restrict__ output,
                                 unsigned char* __restrict__ mask, const Channels<acc_t<T>> channels,
                                 int64_t n, bool same_channel) {
  constexpr int kWarpElements = kWarp * V;
  const int64_t end = end_of_vectors<V>(n),
                thread = static_cast<int64_t>(blockIdx.x) * kElementwiseThreads + threadIdx.x;
  const int64_t first = thread / kWarp * (kVectors * kWarpElements) + thread % kWarp * V;
  Vec<T, V> x[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = first + v * kWarpElements;
    x[v] = load_if<V>(i < end, input + i);
  }
  Quantizer<acc_t<T>> quantizer;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = first + v * kWarpElements;
    if (v == 0 || !same_channel) quantizer = channels.quantizer_of(i < end ? channels.channel_of(i) : 0);
    unsigned bits;
    const Vec<T, V> y = quantize(x[v], [&](int) { return quantizer; }, bits);
    if (i < end) store(output + i, y);
    if (kMask) store_bits<V>(i < end, mask, i, bits);
  }
  if (computes_tail<V>(n)) forward_tail(input, output, kMask ? mask : nullptr, channels, n);
}

// Takes vectors whose elements may belong to several channels. Each thread steps by `stride` elements, a
// multiple of channels * inner, so that its quantizers stay the same. The stride is also a multiple of a
// warp's elements.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads, 4)
    fake_quantize_forward_columns_kernel(const T* __restrict__ input, T* __restrict__ output,
                                         unsigned char* __restrict__ mask, const Channels<acc_t<T>> channels,
                                         int64_t n, int64_t stride) {
  const int lane = threadIdx.x % kWarp;
  const int64_t end = end_of_vectors<V>(n);
  int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (computes_tail<V>(n)) forward_tail(input, output, mask, channels, n);
  if (i >= stride) return;
  Quantizer<acc_t<T>> quantizers[V];
  load_quantizers(quantizers, i < end ? i : 0, channels);
  for (; i - lane * V < end; i += stride) {
    unsigned bits;
    const Vec<T, V> y = quantize(load_if<V>(i < end, input + i), [&](int j) { return quantizers[j]; }, bits);
    if (i < end) store(output + i, y);
    if (mask) store_bits<V>(i < end, mask, i, bits);
  }
}

// ---- Backward with respect to the input only, from the mask

// Bits is the unsigned integer of the element's size: zero has the same bits in every type.
template <int V, typename Bits>
__global__ void __launch_bounds__(kElementwiseThreads)
    fake_quantize_mask_backward_kernel(const Bits* __restrict__ grad_output,
                                       const unsigned char* __restrict__ mask, Bits* __restrict__ grad_input,
                                       int64_t n) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kElementwiseThreads + threadIdx.x) * V;
  if (i < end_of_vectors<V>(n)) {
    Vec<Bits, V> gradient = load_if<V>(true, grad_output + i);
    const unsigned bits = mask[i / 8] >> (i % 8);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (!(bits >> j & 1)) gradient.data[j] = 0;
    }
    store(grad_input + i, gradient);
  }
  if (computes_tail<V>(n)) {
    const int64_t j = n / 8 * 8 + threadIdx.x;
    if (j < n) grad_input[j] = mask[j / 8] >> (j % 8) & 1 ? grad_output[j] : Bits(0);
  }
}

// ---- Backward with respect to the input, the scale and the zero point

// Returns the gradient of one element's input, and adds its parameter gradients to `sums`.
template <typename T, typename A>
__device__ __forceinline__ T backward_element(const Quantizer<A>& quantizer, T grad_output, T input,
                                              ParameterGradients<A>& sums) {
  const A gradient = widen(grad_output), x = widen(input);
  sums += quantizer.gradients(gradient, x);
  return narrow<T>(quantizer.in_range(quantizer.level(x)) ? gradient : A(0));
}

// The threads that compute one sum: a warp or a block.
struct Group {
  bool is_block;
  __device__ __forceinline__ int size() const { return is_block ? blockDim.x : kWarp; }
  __device__ __forceinline__ int thread() const { return is_block ? threadIdx.x : threadIdx.x % kWarp; }
  __device__ __forceinline__ int64_t index() const {
    return is_block ? blockIdx.x : (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  }
};

template <typename A>
__device__ __forceinline__ ParameterGradients<A> warp_sum(ParameterGradients<A> x) {
#pragma unroll
  for (int other = kWarp / 2; other > 0; other /= 2) {
    x += ParameterGradients<A>{__shfl_down_sync(kAllLanes, x.scale, other),
                               __shfl_down_sync(kAllLanes, x.zero_point, other)};
  }
  return x;
}

// Returns the sum over a group's threads to its first thread.
template <typename A>
__device__ __forceinline__ ParameterGradients<A> group_sum(Group group, ParameterGradients<A> x) {
  x = warp_sum(x);
  if (!group.is_block) return x;
  __shared__ ParameterGradients<A> warp_sums[kWarp];
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = ParameterGradients<A>{};
  if (threadIdx.x < blockDim.x / kWarp) x = warp_sums[threadIdx.x];
  return threadIdx.x < kWarp ? warp_sum(x) : x;
}

// Each group of threads has one partial sum, which covers rows of a channel or a part of a row. Vectors begin
// at aligned addresses; the elements before the first and after the last vector are computed one by one.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads)
    fake_quantize_backward_rows_kernel(const T* __restrict__ grad_output, const T* __restrict__ input,
                                       T* __restrict__ grad_input,
                                       ParameterGradients<acc_t<T>>* __restrict__ partial_sums,
                                       const ChannelLayout layout, const ReductionPlan plan,
                                       const Divisor by_inner, const Channels<acc_t<T>> channels,
                                       const Group group) {
  using A = acc_t<T>;
  const int64_t part = group.index();
  if (part >= plan.outer * layout.channels * plan.inner) return;
  const int64_t row = by_inner.quotient(part), outer = channels.by_count.quotient(row);
  const int64_t channel = row - outer * layout.channels, offset = (part - row * plan.inner) * plan.length;
  const int thread = group.thread();
  const Quantizer<A> quantizer = channels.quantizer_of(channel);
  ParameterGradients<A> sums = {};
  const auto backward_one = [&](int64_t i) {
    grad_input[i] = backward_element(quantizer, grad_output[i], input[i], sums);
  };
  const int64_t last = min((outer + 1) * plan.rows, layout.outer);
  for (int64_t o = outer * plan.rows; o < last; ++o) {
    const int64_t start = (o * layout.channels + channel) * layout.inner;
    const int64_t begin = start + offset, end = start + min(offset + plan.length, layout.inner);
    const int64_t first = min((begin + V - 1) / V * V, end), vectors_end = first + (end - first) / V * V;
    if (begin + thread < first) backward_one(begin + thread);
    for (int64_t i = first + thread * V; i < vectors_end; i += group.size() * V) {
      const Vec<T, V> gradients = load_if<V>(true, grad_output + i), x = load_if<V>(true, input + i);
      Vec<T, V> y;
#pragma unroll
      for (int j = 0; j < V; ++j) y.data[j] = backward_element(quantizer, gradients.data[j], x.data[j], sums);
      store(grad_input + i, y);
    }
    if (vectors_end + thread < end) backward_one(vectors_end + thread);
  }
  sums = group_sum(group, sums);
  if (thread == 0) partial_sums[part] = sums;
}

// Takes short rows. Each thread steps by `period` elements, a multiple of channels * inner, so that its
// channels stay the same.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads, 2)
    fake_quantize_backward_columns_kernel(const T* __restrict__ grad_output, const T* __restrict__ input,
                                          T* __restrict__ grad_input,
                                          ParameterGradients<acc_t<T>>* __restrict__ partial_sums,
                                          const Channels<acc_t<T>> channels, int64_t n, int64_t period) {
  using A = acc_t<T>;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (first >= period) return;
  Quantizer<A> quantizers[V];
  load_quantizers(quantizers, first, channels);
  ParameterGradients<A> sums[V] = {};
  int64_t i = first;
  for (; i + V <= n; i += period) {
    const Vec<T, V> gradients = load_if<V>(true, grad_output + i), x = load_if<V>(true, input + i);
    Vec<T, V> y;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      y.data[j] = backward_element(quantizers[j], gradients.data[j], x.data[j], sums[j]);
    }
    store(grad_input + i, y);
  }
#pragma unroll
  for (int j = 0; j < V - 1; ++j) {
    if (i + j < n) {
      grad_input[i + j] = backward_element(quantizers[j], grad_output[i + j], input[i + j], sums[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < V; ++j) partial_sums[first + j] = sums[j];
}

// Each group of threads has one channel.
template <typename A>
__global__ void __launch_bounds__(kReductionThreads)
    fake_quantize_reduction_kernel(const ParameterGradients<A>* __restrict__ partial_sums,
                                   A* __restrict__ grad_scale, A* __restrict__ grad_zero_point,
                                   const ChannelLayout sums, const Divisor by_inner, A grad_factor,
                                   const Group group) {
  const int64_t channel = group.index();
  if (channel >= sums.channels) return;
  ParameterGradients<A> sum = {};
#pragma unroll 8
  for (int64_t i = group.thread(); i < sums.outer * sums.inner; i += group.size()) {
    const int64_t outer = by_inner.quotient(i);
    sum += partial_sums[(outer * sums.channels + channel) * sums.inner + i - outer * sums.inner];
  }
  sum = group_sum(group, sum);
  if (group.thread() == 0) {
    grad_scale[channel] = sum.scale * grad_factor;
    grad_zero_point[channel] = sum.zero_point * grad_factor;
  }
}

// ---- Launchers

// float64 is limited by arithmetic, so it uses single elements, which halves the code.
template <typename T>
constexpr int kWidth = sizeof(T) == 8 ? 1 : kVecWidth<T>;

template <typename... Pointers>
bool all_aligned(Pointers... pointers) {
  return (is_vec_aligned(pointers) && ...);
}

unsigned blocks_of(int64_t threads, int block) { return static_cast<unsigned>(ceil_div(threads, block)); }
unsigned blocks_of(int64_t groups, Group group, int block) {
  return group.is_block ? static_cast<unsigned>(groups) : blocks_of(groups * kWarp, block);
}

// The smallest multiple of `unit` that is not below n / repeats.
int64_t stride_of(int64_t n, int64_t unit, int64_t repeats) {
  return ceil_div(std::max<int64_t>(n / repeats, 1), unit) * unit;
}

template <int V, typename T>
cudaError_t launch_forward(const FakeQuantizeForwardArguments<T>& args, cudaStream_t stream) {
  const ChannelLayout& layout = args.layout;
  const int64_t n = layout.size();
  const bool same_channel = layout.channels == 1 || layout.inner % (kVectors * kWarp * V) == 0;
  const auto kernel =
      args.mask ? fake_quantize_forward_kernel<V, true, T> : fake_quantize_forward_kernel<V, false, T>;
  kernel<<<blocks_of(ceil_div(n, kVectors * V), kElementwiseThreads), kElementwiseThreads, 0, stream>>>(
      args.input, args.output, args.mask, Channels<acc_t<T>>(layout, args.scheme), n, same_channel);
  return cudaGetLastError();
}

template <int V, typename T>
cudaError_t launch_forward_columns(const FakeQuantizeForwardArguments<T>& args, cudaStream_t stream) {
  const ChannelLayout& layout = args.layout;
  const int64_t n = layout.size(), warp = kWarp * V, unit = layout.channels * layout.inner * warp;
  // Loading V quantizers costs more than V elements, so up to 16 vectors share them if the grid stays large.
  const int64_t stride =
      std::min(ceil_div(n, warp) * warp, stride_of(n, unit, std::clamp<int64_t>(n / (1 << 20), 1, 16)));
  fake_quantize_forward_columns_kernel<V><<<blocks_of(ceil_div(stride, V), kThreads), kThreads, 0, stream>>>(
      args.input, args.output, args.mask, Channels<acc_t<T>>(layout, args.scheme), n, stride);
  return cudaGetLastError();
}

template <int V, typename T>
cudaError_t launch_mask_backward(const FakeQuantizeMaskBackwardArguments<T>& args, cudaStream_t stream) {
  using Bits =
      std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  fake_quantize_mask_backward_kernel<V>
      <<<blocks_of(ceil_div(args.n, V), kElementwiseThreads), kElementwiseThreads, 0, stream>>>(
          reinterpret_cast<const Bits*>(args.grad_output), args.mask,
          reinterpret_cast<Bits*>(args.grad_input), args.n);
  return cudaGetLastError();
}

template <int V, typename T>
cudaError_t launch_backward(const FakeQuantizeBackwardArguments<T>& args, cudaStream_t stream) {
  const ReductionPlan& plan = args.plan;
  const Channels<acc_t<T>> channels(args.layout, args.scheme);
  if (plan.period > 0) {
    fake_quantize_backward_columns_kernel<V>
        <<<blocks_of(ceil_div(plan.period, V), kThreads), kThreads, 0, stream>>>(
            args.grad_output, args.input, args.grad_input, args.partial_sums, channels, args.layout.size(),
            plan.period);
  } else {
    const Group group = {plan.rows * plan.length >= 1024};
    const int64_t parts = plan.outer * args.layout.channels * plan.inner;
    fake_quantize_backward_rows_kernel<V><<<blocks_of(parts, group, kThreads), kThreads, 0, stream>>>(
        args.grad_output, args.input, args.grad_input, args.partial_sums, args.layout, plan,
        Divisor(plan.inner), channels, group);
  }
  return cudaGetLastError();
}

}  // namespace fake_quantize_cuda

ReductionPlan plan_reduction_cuda(const ChannelLayout& layout) {
  constexpr int64_t kShortRow = 256, kMinRepeats = 32;
  const int64_t n = layout.size(), row = layout.channels * layout.inner;
  if (layout.inner < kShortRow && layout.outer >= 8 * kMinRepeats) {
    // 8 rows are a multiple of every vector.
    const int64_t period = stride_of(n, 8 * row, std::max(kMinRepeats, n / (1 << 21)));
    return {period / row, layout.inner, 0, 0, period};
  }
  // The elements per block, a multiple of every vector. About sqrt(n) keeps both the last wave of blocks and
  // the second reduction short.
  int64_t part = 2048;
  while (part * part < n) part *= 2;
  const int64_t length = std::min(layout.inner, part);
  const int64_t rows = std::clamp<int64_t>(part / length, 1, layout.outer);
  return {ceil_div(layout.outer, rows), ceil_div(layout.inner, length), rows, length, 0};
}

template <typename T>
cudaError_t fake_quantize_forward(const FakeQuantizeForwardArguments<T>& args, cudaStream_t stream) {
  constexpr int V = kWidth<T>;
  if constexpr (V > 1) {
    if (all_aligned(args.input, args.output)) {
      const bool vector_in_channel = args.layout.channels == 1 || args.layout.inner % V == 0;
      return vector_in_channel ? launch_forward<V>(args, stream) : launch_forward_columns<V>(args, stream);
    }
  }
  return launch_forward<1>(args, stream);
}

template <typename T>
cudaError_t fake_quantize_mask_backward(const FakeQuantizeMaskBackwardArguments<T>& args,
                                        cudaStream_t stream) {
  return all_aligned(args.grad_output, args.grad_input) ? launch_mask_backward<kWidth<T>>(args, stream)
                                                        : launch_mask_backward<1>(args, stream);
}

template <typename T>
cudaError_t fake_quantize_backward(const FakeQuantizeBackwardArguments<T>& args, cudaStream_t stream) {
  const cudaError_t error = all_aligned(args.grad_output, args.input, args.grad_input)
                                ? launch_backward<kWidth<T>>(args, stream)
                                : launch_backward<1>(args, stream);
  if (error != cudaSuccess) return error;
  const ChannelLayout sums = {args.plan.outer, args.layout.channels, args.plan.inner};
  const Group group = {sums.outer * sums.inner >= 1024};
  fake_quantize_reduction_kernel<<<blocks_of(sums.channels, group, kReductionThreads), kReductionThreads, 0,
                                   stream>>>(args.partial_sums, args.grad_scale, args.grad_zero_point, sums,
                                             Divisor(sums.inner), static_cast<acc_t<T>>(args.grad_factor),
                                             group);
  return cudaGetLastError();
}

#define LLTM_FAKE_QUANTIZE(T)                                                                       \
  template cudaError_t fake_quantize_forward(const FakeQuantizeForwardArguments<T>&, cudaStream_t); \
  template cudaError_t fake_quantize_mask_backward(const FakeQuantizeMaskBackwardArguments<T>&,     \
                                                   cudaStream_t);                                   \
  template cudaError_t fake_quantize_backward(const FakeQuantizeBackwardArguments<T>&, cudaStream_t);
LLTM_FAKE_QUANTIZE(float)
LLTM_FAKE_QUANTIZE(double)
LLTM_FAKE_QUANTIZE(__half)
LLTM_FAKE_QUANTIZE(__nv_bfloat16)

}  // namespace lltm_ext
