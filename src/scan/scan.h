// scan: h_t = a_t h_{t-1} + b_t over the steps, for channels that do not depend on each other, and its
// backward. What a step reads and writes, for CPU and GPU, and the launchers' contract: pointers, sizes,
// strides and a stream. No torch.
#pragma once

#include "common/types.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lltm_ext {

// ---- Arithmetic of real and of complex numbers

template <typename A>
LLTM_HOST_DEVICE A multiply_add(A a, A x, A b) {
  return a * x + b;
}
template <typename R>
LLTM_HOST_DEVICE Complex<R> multiply_add(Complex<R> a, Complex<R> x, Complex<R> b) {
  return {a.real * x.real - a.imaginary * x.imaginary + b.real,
          a.real * x.imaginary + a.imaginary * x.real + b.imaginary};
}
template <typename A>
LLTM_HOST_DEVICE A multiply(A a, A x) {
  return a * x;
}
template <typename R>
LLTM_HOST_DEVICE Complex<R> multiply(Complex<R> a, Complex<R> x) {
  return {a.real * x.real - a.imaginary * x.imaginary, a.real * x.imaginary + a.imaginary * x.real};
}
template <typename A>
LLTM_HOST_DEVICE A conjugate(A x) {
  return x;
}
template <typename R>
LLTM_HOST_DEVICE Complex<R> conjugate(Complex<R> x) {
  return {x.real, -x.imaginary};
}

// ---- Operands

constexpr int kScanDims = 4;

// The dimensions of a step. A channel is an element of a step; the last dimension is the fastest.
struct ScanChannels {
  int64_t count = 1;
  int dims = 0;
  int64_t sizes[kScanDims] = {};
};

struct ChannelIndex {
  int64_t of[kScanDims];
};

LLTM_HOST_DEVICE ChannelIndex index_of(const ScanChannels& channels, int64_t channel) {
  ChannelIndex index = {};
#pragma unroll
  for (int d = kScanDims - 1; d > 0; --d) {
    if (d >= channels.dims) continue;
    index.of[d] = channel % channels.sizes[d];
    channel /= channels.sizes[d];
  }
  index.of[0] = channel;
  return index;
}

// A tensor of all steps, or of one; strides in elements. `data` is that of the step that comes first.
template <typename P>
struct ScanOperand {
  P* data = nullptr;  // null: not given
  int64_t step = 0;
  int64_t strides[kScanDims] = {};

  LLTM_HOST_DEVICE P* at(const ChannelIndex& index) const {
    if (!data) return nullptr;
    int64_t offset = 0;
#pragma unroll
    for (int d = 0; d < kScanDims; ++d) offset += index.of[d] * strides[d];
    return data + offset;
  }
};

// ---- A step: h = a h + b, or h = b where the step forgets the state before it.

template <typename A>
struct ScanStep {
  A a, b, saved;  // saved: what storing the result needs
};

template <typename A>
LLTM_HOST_DEVICE A advance(const ScanStep<A>& step, bool forgets, A h) {
  return forgets ? step.b : multiply_add(step.a, h, step.b);
}

// A Channel points to a step of a channel, `moved` to another one. `load` and `store` are told whether it is
// the first or the last one.
//
// T: the type of b and h. C: that of a, which is T, or float where T is a half type.
template <typename T, typename C>
struct ScanForward {
  using A = acc_t<T>;
  static constexpr bool kBackward = false;

  int64_t steps;
  ScanChannels channels;
  ScanOperand<const C> a;
  ScanOperand<const T> b, initial;  // initial: of one step; null: zeros
  ScanOperand<const bool> reset;    // null: none
  ScanOperand<T> h;

  struct Channel {
    const C* a;
    const T *b, *initial;
    const bool* reset;
    T* h;
  };
  LLTM_HOST_DEVICE Channel channel(int64_t number) const {
    const ChannelIndex i = index_of(channels, number);
    return {a.at(i), b.at(i), initial.at(i), reset.at(i), h.at(i)};
  }
  bool time_is_fastest() const { return channels.dims <= 1 && (h.step == 1 || h.step == -1); }
  LLTM_HOST_DEVICE Channel moved(Channel x, int64_t by) const {
    x.a += by * a.step, x.b += by * b.step, x.h += by * h.step;
    if (x.reset) x.reset += by * reset.step;
    return x;
  }
  // The same step of another channel, where channels have one dimension.
  LLTM_HOST_DEVICE Channel beside(Channel x, int64_t by) const {
    x.a += by * a.strides[0], x.b += by * b.strides[0], x.h += by * h.strides[0];
    if (x.reset) x.reset += by * reset.strides[0];
    return x;
  }
  LLTM_HOST_DEVICE A before_first(const Channel& x) const { return x.initial ? widen(*x.initial) : A{}; }
  LLTM_HOST_DEVICE bool forgets(const Channel& x, bool) const { return x.reset && *x.reset; }
  LLTM_HOST_DEVICE ScanStep<A> load(const Channel& x, bool, bool) const {
    return {widen(*x.a), widen(*x.b), A{}};
  }
  LLTM_HOST_DEVICE void store(const Channel& x, const ScanStep<A>&, bool, bool, A value) const {
    *x.h = narrow<T>(value);
  }
};

// The gradients, of the same operands. Step s is the (steps - 1 - s)-th of forward, so `data` is that of
// forward's last step and strides between steps are the negative ones. With d for the gradient of h:
//   d_s = grad_s + conj(a_{s-1}) d_{s-1};  grad_b = d;  grad_a_s = d_s conj(h_{s+1});
//   after the last step, h is the initial state, whose gradient is conj(a_s) d_s.
// The state before a reset has no gradient, and the a of a reset has 0.
template <typename T, typename C>
struct ScanBackward {
  using A = acc_t<T>;
  static constexpr bool kBackward = true;

  int64_t steps;
  ScanChannels channels;
  ScanOperand<const C> a;
  ScanOperand<const T> grad, initial, h;  // h: null if grad_a is not wanted
  ScanOperand<const bool> reset;
  ScanOperand<C> grad_a;  // null if h is
  ScanOperand<T> grad_b;
  ScanOperand<T> grad_initial;  // of one step; null: not wanted

  struct Channel {
    const C* a;
    const T *grad, *initial, *h;
    const bool* reset;
    C* grad_a;
    T *grad_b, *grad_initial;
  };
  LLTM_HOST_DEVICE Channel channel(int64_t number) const {
    const ChannelIndex i = index_of(channels, number);
    return {a.at(i),     grad.at(i),   initial.at(i), h.at(i),
            reset.at(i), grad_a.at(i), grad_b.at(i),  grad_initial.at(i)};
  }
  bool time_is_fastest() const { return channels.dims <= 1 && (grad_b.step == 1 || grad_b.step == -1); }
  LLTM_HOST_DEVICE Channel moved(Channel x, int64_t by) const {
    x.a += by * a.step, x.grad += by * grad.step, x.grad_b += by * grad_b.step;
    if (x.h) x.h += by * h.step, x.grad_a += by * grad_a.step;
    if (x.reset) x.reset += by * reset.step;
    return x;
  }
  LLTM_HOST_DEVICE Channel beside(Channel x, int64_t by) const {
    x.a += by * a.strides[0], x.grad += by * grad.strides[0], x.grad_b += by * grad_b.strides[0];
    if (x.h) x.h += by * h.strides[0], x.grad_a += by * grad_a.strides[0];
    if (x.reset) x.reset += by * reset.strides[0];
    if (x.initial) x.initial += by * initial.strides[0];
    if (x.grad_initial) x.grad_initial += by * grad_initial.strides[0];
    return x;
  }
  LLTM_HOST_DEVICE A before_first(const Channel&) const { return A{}; }
  // x may be after the last step: whether the initial state has no gradient.
  LLTM_HOST_DEVICE bool forgets(const Channel& x, bool is_first) const {
    return is_first || (x.reset && *(x.reset - reset.step));
  }
  LLTM_HOST_DEVICE ScanStep<A> load(const Channel& x, bool is_first, bool is_last) const {
    return {is_first ? A{} : conjugate(widen(*(x.a - a.step))), widen(*x.grad),
            is_last || !x.h ? A{} : conjugate(widen(x.h[h.step]))};
  }
  LLTM_HOST_DEVICE void store(const Channel& x, const ScanStep<A>& step, bool next_forgets, bool is_last,
                              A value) const {
    *x.grad_b = narrow<T>(value);
    if (x.h) {
      A state = step.saved;
      if (is_last && x.initial) state = conjugate(widen(*x.initial));
      *x.grad_a = narrow<C>(next_forgets ? A{} : multiply(value, state));
    }
    if (is_last && x.grad_initial) {
      const A of_initial = multiply(conjugate(widen(*x.a)), value);
      *x.grad_initial = narrow<T>(next_forgets ? A{} : of_initial);
    }
  }
};

// ---- How CUDA divides the work. It does not depend on when blocks run, so the same call gives the same
// bits.

constexpr int kScanThreads = 256;

// From so many channels on, a thread has one, and all its steps. Blocks are small there, so that all
// multiprocessors have about as many threads.
constexpr int64_t kScanManyChannels = 20'000;
constexpr int kScanSerialThreads = 64;

// The steps of a thread, which it keeps in registers.
template <class Scan>
constexpr int kScanSteps = (Scan::kBackward ? 32 : 64) / sizeof(typename Scan::A);

// A block has a tile of `width` channels, a power of two, and `tile_steps` steps. Or each of its threads has
// a channel.
struct ScanPlan {
  bool serial;
  int width;
  int tile_steps, tile_bits;  // a power of two, and its exponent
  int64_t groups;             // tiles side by side: channels / width
  int64_t tiles;              // tiles one after the other: steps / tile_steps

  int64_t blocks() const { return groups * tiles; }
};

// time_is_fastest: whether adjacent steps are neighbours in memory. With fewer than kScanManyChannels it
// makes no difference to the plan, and so none to the results.
inline ScanPlan plan_scan(int64_t steps, int64_t channels, int thread_steps, bool time_is_fastest) {
  if (channels >= kScanManyChannels && !time_is_fastest) {
    return {true, kScanSerialThreads, 0, 0, ceil_div(channels, kScanSerialThreads), 1};
  }
  // A warp reads 32 adjacent channels, or adjacent steps. If there are few steps, more channels keep all
  // threads busy.
  const int64_t most = larger<int64_t>(32, kScanThreads / ceil_div(steps, thread_steps));
  int width = 1;
  while (width < channels && 2 * width <= most) width *= 2;
  const int tile_steps = kScanThreads / width * thread_steps;
  int tile_bits = 0;
  while (1 << tile_bits < tile_steps) ++tile_bits;
  return {false, width, tile_steps, tile_bits, ceil_div(channels, width), ceil_div(steps, tile_steps)};
}

// A part of the time as a function of the state before it, h -> a h + b. In double: where |a| > 1, products
// of many a overflow float although h is finite.
template <typename W>
struct Affine {
  W a, b;
};
template <typename A>
struct ScanWide {
  using type = double;
};
template <typename R>
struct ScanWide<Complex<R>> {
  using type = Complex<double>;
};
template <class Scan>
using wide_t = typename ScanWide<typename Scan::A>::type;

// What blocks tell those of later tiles. Empty if no tile follows another.
template <typename W>
struct ScanLinks {
  Affine<W>* parts;   // [groups, tiles, width]: tiles as functions
  W* states;          // [groups, tiles, width]: the states after them
  unsigned* known;    // [groups, tiles]: 0; 1: the parts; 2: the states too
  unsigned* started;  // the number of blocks that have started

  static int64_t flag_bytes(const ScanPlan& plan) { return (plan.blocks() + 1) * sizeof(unsigned); }
  static int64_t bytes(const ScanPlan& plan) {
    if (plan.tiles < 2) return 0;
    return plan.blocks() * plan.width * (sizeof(Affine<W>) + sizeof(W)) + flag_bytes(plan);
  }
  static ScanLinks in(void* memory, const ScanPlan& plan) {
    if (plan.tiles < 2) return {};
    const int64_t values = plan.blocks() * plan.width;
    auto* const parts = static_cast<Affine<W>*>(memory);
    auto* const states = reinterpret_cast<W*>(parts + values);
    auto* const known = reinterpret_cast<unsigned*>(states + values);
    return {parts, states, known, known + plan.blocks()};
  }
};

// Whether blocks can exchange elements between threads. Complex numbers would take too much shared memory.
template <class Scan>
constexpr bool kScanExchanges = sizeof(wide_t<Scan>) == 8;

template <class Scan>
ScanPlan plan_of(const Scan& scan) {
  return plan_scan(scan.steps, scan.channels.count, kScanSteps<Scan>,
                   kScanExchanges<Scan> && scan.time_is_fastest());
}

// ---- The launchers

template <class Scan>
void run_scan(const Scan& scan);
#ifdef LLTM_EXT_WITH_CUDA
// links: the memory of ScanLinks, of the plan's size.
template <class Scan>
cudaError_t run_scan(const Scan& scan, void* links, cudaStream_t stream);
#endif

}  // namespace lltm_ext
