// scan: h_t = a_t h_{t-1} + b_t over the steps, for channels that do not depend on each other, and its
// backward. What a step reads and writes, for CPU and GPU, and the launchers' contract: pointers, sizes,
// strides and a stream. No torch.
#pragma once

#include "common/device.h"
#include "common/divisor.h"
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
  Divisor sizes[kScanDims];
};

struct ChannelIndex {
  int64_t of[kScanDims];
  bool has_more;  // than one dimension
};

LLTM_HOST_DEVICE ChannelIndex index_of(const ScanChannels& channels, int64_t channel) {
  ChannelIndex index = {{channel}, channels.dims > 1};
  if (!index.has_more) return index;
#pragma unroll
  for (int d = kScanDims - 1; d > 0; --d) {
    if (d >= channels.dims) continue;
    const int64_t rest = channels.sizes[d].quotient(index.of[0]);
    index.of[d] = index.of[0] - rest * channels.sizes[d].divisor;
    index.of[0] = rest;
  }
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
    int64_t offset = index.of[0] * strides[0];
    if (index.has_more) {
#pragma unroll
      for (int d = 1; d < kScanDims; ++d) offset += index.of[d] * strides[d];
    }
    return data + offset;
  }
  // Whether groups of `width` channels of a step consist of vectors of 16 bytes in memory.
  bool has_vectors(const ScanChannels& channels, int width) const {
    constexpr int kVector = 16 / sizeof(P);
    const int last = channels.dims > 1 ? channels.dims - 1 : 0;
    bool has = width % kVector == 0 && strides[last] == 1 && step % kVector == 0 &&
               channels.sizes[last].divisor % (last > 0 ? width : kVector) == 0 &&
               reinterpret_cast<uintptr_t>(data) % 16 == 0;
    for (int d = 0; d < last; ++d) has = has && strides[d] % kVector == 0;
    return has;
  }
};

// ---- A scan, or the gradients of one

// T: the type of b and h. C: that of a, which is T, or float where T is a half type.
//
// Backward, step s is the (steps - 1 - s)-th of forward, so `data` is that of forward's last step and strides
// between steps are the negative ones. With d for the gradient of h:
//   d_s = grad_s + conj(a_{s-1}) d_{s-1};  grad_b = d;  grad_a_s = d_s conj(h_{s+1});
//   after the last step, h is the initial state, whose gradient is conj(a_s) d_s.
// The state before a reset has no gradient, and the a of a reset has 0.
//
// So each is h_s = a h_{s-1} + b, where a is read at step s - kBackward, and h of forward at step s + 1.
template <typename T_, typename C_, bool kBackward_>
struct Scan {
  using T = T_;
  using C = C_;
  using A = acc_t<T>;
  static constexpr bool kBackward = kBackward_;

  int64_t steps;
  ScanChannels channels;
  ScanOperand<const C> a;
  ScanOperand<const T> b;         // backward: the gradient of h
  ScanOperand<const T> h;         // backward: forward's result, or null if grad_a is not wanted
  ScanOperand<const T> initial;   // of one step; null: zeros
  ScanOperand<const bool> reset;  // null: none
  ScanOperand<T> result;          // h; backward: grad_b
  ScanOperand<C> grad_a;          // null if h is
  ScanOperand<T> grad_initial;    // of one step; null: not wanted

  // Pointers to a step of a channel.
  struct Channel {
    const C* a;
    const T *b, *h, *initial;
    const bool* reset;
    T* result;
    C* grad_a;
    T* grad_initial;
  };
  LLTM_HOST_DEVICE Channel channel(int64_t number) const {
    const ChannelIndex i = index_of(channels, number);
    return {a.at(i),     b.at(i),      h.at(i),      initial.at(i),
            reset.at(i), result.at(i), grad_a.at(i), grad_initial.at(i)};
  }
  LLTM_HOST_DEVICE Channel moved(Channel x, int64_t by) const {
    x.a += by * a.step, x.b += by * b.step, x.result += by * result.step;
    if (x.reset) x.reset += by * reset.step;
    if (x.h) x.h += by * h.step, x.grad_a += by * grad_a.step;
    return x;
  }

  LLTM_HOST_DEVICE static A before_first(const Channel& x) {
    return !kBackward && x.initial ? widen(*x.initial) : A{};
  }
  LLTM_HOST_DEVICE static A factor(C of_a) { return kBackward ? conjugate(widen(of_a)) : widen(of_a); }

  // Backward: the gradient of a, from that of h, and h of the step before.
  LLTM_HOST_DEVICE static C gradient_of_a(A value, A before, bool is_reset) {
    return narrow<C>(is_reset ? A{} : multiply(value, conjugate(before)));
  }
  // Before forward's first step h is the initial state.
  LLTM_HOST_DEVICE static T before_all(const Channel& x) { return x.initial ? *x.initial : T{}; }
  // Backward, after the last step, where x is.
  LLTM_HOST_DEVICE static void store_grad_initial(const Channel& x, A value, bool is_reset) {
    if (x.grad_initial) {
      *x.grad_initial = narrow<T>(is_reset ? A{} : multiply(conjugate(widen(*x.a)), value));
    }
  }
};

template <typename A>
LLTM_HOST_DEVICE A advance(A a, A b, bool forgets, A h) {
  return forgets ? b : multiply_add(a, h, b);
}

// Which operands consist of vectors of channels.
struct ScanVectors {
  bool a, b, h, result, grad_a;
};
template <class Scan>
ScanVectors vectors_of(const Scan& scan, int width) {
  const auto has = [&](const auto& x) { return x.has_vectors(scan.channels, width); };
  return {has(scan.a), has(scan.b), has(scan.h), has(scan.result), has(scan.grad_a)};
}

// ---- How CUDA divides the work. It does not depend on when blocks run, so the same call gives the same
// bits.

constexpr int kScanWarp = 32;  // threads

// ---- Many channels. A thread runs all steps of one. A block has a ring of stages in shared memory: one is
// run, one is written, and the others are in flight.

constexpr int64_t kScanManyChannels = 2'000;
constexpr int kScanStages = 6;
constexpr int kScanSerialThreads = 3 * kScanWarp;
constexpr int kScanSerialBlocks = 5;  // of a multiprocessor, at most

template <class Scan>
constexpr int kScanChunk = 32 / sizeof(typename Scan::A);  // steps that a thread has in registers

struct SerialPlan {
  int stage_steps;
  int64_t groups, blocks;  // a block has one group of 32 channels after the other
};

// Of a group. A reset is a byte.
template <class Scan>
constexpr int kScanStepBytes = kScanWarp * (sizeof(typename Scan::C) + sizeof(bool) +
                                            sizeof(typename Scan::T) * (Scan::kBackward ? 2 : 1));

template <class Scan>
int serial_bytes(const SerialPlan& plan) {
  return kScanStages * plan.stage_steps * kScanStepBytes<Scan>;
}

// The stages of all blocks of a multiprocessor keep enough bytes in flight, and fit into its shared memory.
template <class Scan>
SerialPlan plan_serial(const Scan& scan, const DeviceInfo& device) {
  constexpr int64_t kRing = 128 << 10, kReserved = 8 << 10;
  SerialPlan plan = {};
  plan.groups = ceil_div(scan.channels.count, kScanWarp);
  const int64_t at_once = int64_t{device.multiprocessors} * kScanSerialBlocks;
  plan.blocks = ceil_div(plan.groups, ceil_div(plan.groups, at_once));
  const int64_t room = device.shared_bytes - kReserved,
                blocks = ceil_div(plan.blocks, device.multiprocessors);
  const int64_t chunks =
      (room < kRing ? room : kRing) / (blocks * kScanStages * kScanChunk<Scan> * kScanStepBytes<Scan>);
  const int64_t most =
      scan.steps /
      (2 * kScanStages * kScanChunk<Scan>);  // so that short scans do not wait long for the first stage
  plan.stage_steps = static_cast<int>(larger<int64_t>(chunks < most ? chunks : most, 1)) * kScanChunk<Scan>;
  return plan;
}

// ---- Fewer channels, or few steps. A block has tiles of `width` channels and some steps.

// The most threads of a block; the steps of a thread.
template <class Scan>
constexpr int kScanThreads = 1024 / sizeof(typename Scan::A);
constexpr int kScanBlocks = 2;  // of a multiprocessor, at most
template <class Scan>
constexpr int kScanSteps = (Scan::kBackward ? 64 : 128) / sizeof(typename Scan::A);

struct ScanPlan {
  int threads;
  int width, width_bits;      // a power of two, and its exponent
  int tile_steps, tile_bits;  // likewise
  int64_t groups;             // tiles side by side: channels / width
  int64_t tiles;              // tiles one after the other: steps / tile_steps

  LLTM_HOST_DEVICE int64_t blocks() const { return groups * tiles; }
};

inline ScanPlan plan_scan(int64_t steps, int64_t channels, int threads, int thread_steps) {
  // If there are few steps, more channels keep all threads busy.
  const int64_t most = larger<int64_t>(kScanWarp, threads / ceil_div(steps, thread_steps));
  ScanPlan plan = {threads, 1, 0, threads * thread_steps, 0, 0, 0};
  while (plan.width < channels && 2 * plan.width <= most) plan.width *= 2, ++plan.width_bits;
  plan.tile_steps >>= plan.width_bits;
  while (1 << plan.tile_bits < plan.tile_steps) ++plan.tile_bits;
  plan.groups = ceil_div(channels, plan.width), plan.tiles = ceil_div(steps, plan.tile_steps);
  return plan;
}

// The type of the states that blocks hand on.
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

// Where all steps fit into a tile of so many channels as a warp has threads, no tile waits for another.
template <class Scan>
bool runs_serially(const Scan& scan) {
  constexpr int kTileSteps = kScanThreads<Scan> / kScanWarp * kScanSteps<Scan>;
  const bool time_is_fastest = scan.channels.dims <= 1 && (scan.result.step == 1 || scan.result.step == -1);
  return scan.channels.count >= kScanManyChannels && scan.steps > kTileSteps && !time_is_fastest;
}

// ---- The launchers

template <class Scan>
void run_scan(const Scan& scan);
#ifdef LLTM_EXT_WITH_CUDA
// On the current device. workspace: of so many bytes.
template <class Scan>
cudaError_t scan_workspace_bytes(const Scan& scan, int64_t& bytes);
template <class Scan>
cudaError_t run_scan(const Scan& scan, void* workspace, cudaStream_t stream);
#endif

}  // namespace lltm_ext
