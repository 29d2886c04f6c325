// The kernels of scan and of its backward: one pass over the data.
//
// With many channels, a thread runs the steps of one channel. With fewer, time is divided too:
//
// A block has a tile of channels and steps, and each of its threads some successive steps of one channel, in
// registers. The thread first reduces its steps to an affine function of the state before them. The block
// combines these functions into the tile's, finds the state before the tile, and from it the one before each
// thread's steps. Then the threads run their steps.
//
// The state before a tile comes from the tiles before it: from the nearest whose final state is known,
// through the functions of those in between, one after the other. A tile's final state is computed in the
// same way wherever one starts, so the result does not depend on when blocks run.
//
// Where coefficients grow, or are not finite, a function may lose what a loop over the steps would find. In
// such a tile the threads run their steps one after the other, and later tiles wait for its final state.
#pragma once

#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "scan/scan.h"

namespace lltm_ext {

constexpr int kScanWarp = 32, kScanWarps = kScanThreads / kScanWarp;

// ---- Affine functions in double

__device__ __forceinline__ double to_wide(float x) { return x; }
__device__ __forceinline__ double to_wide(double x) { return x; }
template <typename R>
__device__ __forceinline__ Complex<double> to_wide(Complex<R> x) {
  return {x.real, x.imaginary};
}
__device__ __forceinline__ void from_wide(float& to, double x) { to = static_cast<float>(x); }
__device__ __forceinline__ void from_wide(double& to, double x) { to = x; }
template <typename R>
__device__ __forceinline__ void from_wide(Complex<R>& to, Complex<double> x) {
  to = {static_cast<R>(x.real), static_cast<R>(x.imaginary)};
}

// Whether |x| is below 2^kExponent. NaN is not.
template <int kExponent>
__device__ __forceinline__ bool is_below(double x) {
  return (__double2hiint(x) & 0x7ff00000) < (1023 + kExponent) << 20;
}
template <int kExponent>
__device__ __forceinline__ bool is_below(Complex<double> x) {
  return is_below<kExponent>(x.real) && is_below<kExponent>(x.imaginary);
}

__device__ __forceinline__ void set_one(double& x) { x = 1; }
__device__ __forceinline__ void set_one(Complex<double>& x) { x = {1, 0}; }

template <typename W>
__device__ __forceinline__ Affine<W> identity() {
  Affine<W> f = {};
  set_one(f.a);
  return f;
}

// A reset makes the state b, whatever it was before. Its mark is the factor -0, which no product gives.
__device__ __forceinline__ void mark_reset(double& a) { a = -0.; }
__device__ __forceinline__ void mark_reset(Complex<double>& a) { a = {-0., 0}; }
__device__ __forceinline__ bool is_reset(double a) { return __double2hiint(a) == INT32_MIN && a == 0; }
__device__ __forceinline__ bool is_reset(Complex<double> a) { return is_reset(a.real) && a.imaginary == 0; }

template <typename A>
__device__ __forceinline__ bool is_zero(A x) {
  return x == 0;
}
template <typename R>
__device__ __forceinline__ bool is_zero(Complex<R> x) {
  return x.real == 0 && x.imaginary == 0;
}

// A product of factors of which none is 0 is not 0 either: an infinite state stays infinite. A 0 is +0.
__device__ __forceinline__ double without_underflow(double product, bool any_zero) {
  return product != 0 ? product : any_zero ? 0. : copysign(5e-324, product);
}
__device__ __forceinline__ Complex<double> without_underflow(Complex<double> product, bool any_zero) {
  if (!is_zero(product)) return product;
  return {any_zero ? 0. : 5e-324, 0};
}

template <typename W>
__device__ __forceinline__ W apply(const Affine<W>& f, W h) {
  return is_reset(f.a) ? f.b : multiply_add(f.a, h, f.b);
}

// f, then g.
template <typename W>
__device__ __forceinline__ Affine<W> then(const Affine<W>& f, const Affine<W>& g) {
  const bool any_zero = is_zero(f.a) || is_zero(g.a);
  Affine<W> both = {without_underflow(multiply(g.a, f.a), any_zero), apply(g, f.b)};
  if (is_reset(f.a) || is_reset(g.a)) mark_reset(both.a);
  return both;
}

// Whether the function finds the state that the steps find. If a is large, a h and b may cancel or overflow
// although no state on the way is large.
template <typename W>
__device__ __forceinline__ bool is_reliable(const Affine<W>& f) {
  return is_below<32>(f.a) && is_below<1024>(f.b);
}

__device__ __forceinline__ double shuffle_up(double x, int lanes) { return __shfl_up_sync(~0u, x, lanes); }
__device__ __forceinline__ Complex<double> shuffle_up(Complex<double> x, int lanes) {
  return {shuffle_up(x.real, lanes), shuffle_up(x.imaginary, lanes)};
}
template <typename W>
__device__ __forceinline__ Affine<W> shuffle_up(const Affine<W>& f, int lanes) {
  return {shuffle_up(f.a, lanes), shuffle_up(f.b, lanes)};
}

// ---- A block

// Functions of earlier tiles that a thread reads at once.
template <class Scan>
constexpr int kScanReads = sizeof(wide_t<Scan>) == 8 ? 4 : 1;

template <class Scan>
struct ScanShared {
  using A = typename Scan::A;
  // An element of padding for each 128 bytes, so that the threads of a warp use all banks.
  static constexpr int kPadding = 128 / sizeof(A);
  __device__ __forceinline__ A& at(int i) { return exchanged[i + i / kPadding]; }

  Affine<wide_t<Scan>> units[kScanThreads];  // [units, width]: units of rows as functions
  wide_t<Scan> states[kScanThreads];         // [units, width]: the states before them
  union {
    Affine<wide_t<Scan>>
        parts[kScanReads<Scan> * kScanThreads];  // [tiles, width]: earlier tiles as functions
    A exchanged[kScanExchanges<Scan> ? kScanThreads * kScanSteps<Scan> * (kPadding + 1) / kPadding : 1];
  };
  int states_at[kScanWarps], missing_at[kScanWarps];  // the nearest of each warp
  unsigned number;
};

__device__ __forceinline__ int least_of_warp(int x) {
#pragma unroll
  for (int mask = kScanWarp / 2; mask > 0; mask /= 2) {
    const int other = __shfl_xor_sync(~0u, x, mask);
    x = other < x ? other : x;
  }
  return x;
}

// kExchange: time is the fastest dimension in memory. Adjacent threads read and write adjacent steps, and
// exchange them with the threads that run them.
template <class Scan, bool kExchange>
struct ScanBlock {
  using A = typename Scan::A;
  using W = wide_t<Scan>;
  using Channel = typename Scan::Channel;
  static constexpr int kSteps = kScanSteps<Scan>;

  const Scan& scan;
  const ScanPlan& plan;
  const ScanLinks<W>& links;
  ScanShared<Scan>& shared;
  int64_t tile;                  // which of its channels' tiles the block has
  int64_t slot;                  // its place in the links, where the tiles of the same channels are adjacent
  int column, row;               // the thread's channel in the tile, and which of its steps
  bool is_head;                  // one thread of each channel
  int64_t first_channel, first;  // of the block's channels; of the thread's steps
  int left;  // how many steps there are from `first` on, at most kSteps + 1; none if there is no such channel
  int own;   // the column of `channel`: the thread's, or that of the last channel if it has none
  Channel channel;  // at its first step
  Channel start;    // at `first`

  // Blocks take tiles in the order in which they start, so those that a block waits for have started.
  __device__ __forceinline__ static int64_t take_number(const ScanPlan& plan, const ScanLinks<W>& links,
                                                        ScanShared<Scan>& shared) {
    if (plan.tiles == 1) return blockIdx.x;
    if (threadIdx.x == 0) shared.number = atomicAdd(links.started, 1u);
    __syncthreads();
    return shared.number;
  }

  __device__ __forceinline__ bool has_next() const { return tile + 1 < plan.tiles; }

  // Tells later tiles that what this block has written is complete.
  __device__ __forceinline__ void publish(unsigned known) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    fence_gpu();
    st_relaxed_gpu(links.known + slot, known);
  }

  // Waits for the tiles before this one. Returns how many tiles back the nearest is whose state is known.
  // The functions of those in between are known then.
  __device__ __forceinline__ int wait_for_state() const {
    constexpr int kFar = 1 << 30;
    const int back = 1 + static_cast<int>(threadIdx.x);
    const bool exists = back <= tile;
    const unsigned* const known = links.known + (slot - back);
    for (;;) {
      const unsigned found = exists ? ld_relaxed_gpu_u32(known) : 1;
      const int state_at = least_of_warp(found == 2 ? back : kFar);
      const int missing_at = least_of_warp(found == 0 ? back : kFar);
      if (threadIdx.x % kScanWarp == 0) {
        shared.states_at[threadIdx.x / kScanWarp] = state_at;
        shared.missing_at[threadIdx.x / kScanWarp] = missing_at;
      }
      __syncthreads();
      int nearest_state = kFar, nearest_missing = kFar;
#pragma unroll
      for (int i = 0; i < kScanWarps; ++i) {
        nearest_state = min(nearest_state, shared.states_at[i]);
        nearest_missing = min(nearest_missing, shared.missing_at[i]);
      }
      const bool found_all = nearest_state < nearest_missing;
      if (found_all) fence_gpu();
      __syncthreads();  // all have read before anyone writes again
      if (found_all) return nearest_state;
    }
  }

  // The state before the tile, for the head of each channel.
  __device__ __forceinline__ W state_before_tile() const {
    if (tile == 0) return is_head ? to_wide(scan.before_first(channel)) : W{};
    const int back = wait_for_state(), rows = kScanThreads / plan.width;
    W state = is_head ? links.states[(slot - back) * plan.width + column] : W{};
    constexpr int kReads = kScanReads<Scan>;
    for (int left = back - 1; left > 0; left -= kReads * rows) {  // tiles that the state has yet to pass
      const Affine<W>* const parts = links.parts + (slot - left) * plan.width;
      const int count = min(left, kReads * rows) * plan.width;
      Affine<W> read[kReads];
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int at = i * kScanThreads + static_cast<int>(threadIdx.x);
        if (at < count) read[i] = parts[at];
      }
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int at = i * kScanThreads + static_cast<int>(threadIdx.x);
        if (at < count) shared.parts[at] = read[i];
      }
      __syncthreads();
      if (is_head) {
        for (int at = column; at < count; at += plan.width) state = apply(shared.parts[at], state);
      }
      __syncthreads();
    }
    return state;
  }

  // ---- The steps of the thread

  // Whether all threads have all steps.
  __device__ __forceinline__ bool is_full() const {
    return (tile + 1) * plan.tile_steps <= scan.steps && first_channel + plan.width <= scan.channels.count;
  }

  // Calls f(k, x, is_first, is_last) for the elements that this thread reads and writes.
  template <bool kFull, class F>
  __device__ __forceinline__ void for_each_element(const F& f) const {
    if constexpr (kExchange) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int at = k * kScanThreads + static_cast<int>(threadIdx.x), c = at >> plan.tile_bits;
        const int64_t s = tile * plan.tile_steps + (at & (plan.tile_steps - 1));
        if (!kFull && (s >= scan.steps || first_channel + c >= scan.channels.count)) continue;
        f(k, scan.moved(scan.beside(channel, c - own), s), s == 0, s + 1 == scan.steps);
      }
    } else {
      Channel x = start;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (kFull || k < left) f(k, x, k == 0 && first == 0, k + 1 == left);
        x = scan.moved(x, 1);
      }
    }
  }

  // Passes values from the threads that read them to those that run them.
  __device__ __forceinline__ void to_rows(ScanStep<A> (&steps)[kSteps], A ScanStep<A>::* value) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) shared.at(k * kScanThreads + threadIdx.x) = steps[k].*value;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) steps[k].*value = shared.at(own_place() + k);
    __syncthreads();
  }
  // Passes results, in b, to the threads that write them.
  __device__ __forceinline__ void from_rows(ScanStep<A> (&steps)[kSteps]) const {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) shared.at(own_place() + k) = steps[k].b;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) steps[k].b = shared.at(k * kScanThreads + threadIdx.x);
  }
  __device__ __forceinline__ int own_place() const { return column * plan.tile_steps + row * kSteps; }

  // A bit a step that forgets the state before it, and one for the step after these.
  __device__ __forceinline__ unsigned load_resets() const {
    unsigned forgets = Scan::kBackward && first == 0;
    if (!scan.reset.data) return forgets;
    Channel x = start;
#pragma unroll
    for (int k = 0; k <= kSteps; ++k) {
      if (Scan::kBackward ? 0 < left && k <= left : k < left) {
        forgets |= static_cast<unsigned>(scan.forgets(x, k == 0 && first == 0)) << k;
      }
      x = scan.moved(x, 1);
    }
    return forgets;
  }

  // The thread's steps as a function.
  template <bool kFull>
  __device__ __forceinline__ Affine<W> reduced(const ScanStep<A> (&steps)[kSteps], unsigned forgets) const {
    Affine<W> mine = identity<W>();
    bool any_zero = false;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (!kFull && k >= left) continue;
      const A a = forgets >> k & 1 ? A{} : steps[k].a;
      any_zero = any_zero || is_zero(a);
      mine = {multiply(to_wide(a), mine.a), multiply_add(to_wide(a), mine.b, to_wide(steps[k].b))};
    }
    mine.a = without_underflow(mine.a, any_zero);
    if (forgets & ((1u << clamped<int>(left, 0, kSteps)) - 1)) mark_reset(mine.a);
    return mine;
  }

  // Runs the steps from the state h, and returns the last one. The results are in b, if threads exchange
  // them, else they are stored.
  template <bool kFull>
  __device__ __forceinline__ A run_steps(ScanStep<A> (&steps)[kSteps], unsigned forgets, A h) const {
    Channel x = start;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (kFull || k < left) {
        h = advance(steps[k], forgets >> k & 1, h);
        if constexpr (kExchange) {
          steps[k].b = h;
        } else {
          scan.store(x, steps[k], forgets >> (k + 1) & 1, k + 1 == left, h);
        }
      }
      if constexpr (!kExchange) x = scan.moved(x, 1);
    }
    return h;
  }

  // kFull: is_full().
  template <bool kFull>
  __device__ __forceinline__ void run() const {
    ScanStep<A> steps[kSteps];
    if constexpr (kExchange && !kFull) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) steps[k] = {};
    }
    for_each_element<kFull>([&](int k, const Channel& x, bool is_first, bool is_last) {
      steps[k] = scan.load(x, is_first, is_last);
    });
    if constexpr (kExchange) {
      to_rows(steps, &ScanStep<A>::a);
      to_rows(steps, &ScanStep<A>::b);
    }
    const unsigned forgets = load_resets();
    Affine<W> mine = reduced<kFull>(steps, forgets);

    // Where a warp has several rows: the functions of the rows before this one, and with it.
    const int lane = threadIdx.x % kScanWarp;
    Affine<W> before = identity<W>();
    if (plan.width < kScanWarp) {
      for (int lanes = plan.width; lanes < kScanWarp; lanes *= 2) {
        const Affine<W> earlier = shuffle_up(mine, lanes);
        if (lane >= lanes) mine = then(earlier, mine);
      }
      const Affine<W> earlier = shuffle_up(mine, plan.width);
      if (lane >= plan.width) before = earlier;
    }
    // A unit is the rows of a warp, or one row.
    const int rows = kScanThreads / plan.width, unit_rows = larger(1, kScanWarp / plan.width);
    const int units = rows / unit_rows, unit = row / unit_rows;
    if (row % unit_rows == unit_rows - 1) shared.units[unit * plan.width + column] = mine;
    bool in_turn = __syncthreads_or(!is_reliable(mine));
    Affine<W> whole = identity<W>();
    if (has_next()) {
      if (is_head) {
        for (int i = 0; i < units; ++i) whole = then(whole, shared.units[i * plan.width + column]);
        links.parts[slot * plan.width + column] = whole;
      }
      in_turn = __syncthreads_or(in_turn || !is_reliable(whole));
      if (!in_turn) publish(1);
    }

    W state = state_before_tile();
    if (has_next() && !in_turn) {
      if (is_head) links.states[slot * plan.width + column] = apply(whole, state);
      publish(2);
    }
    if (is_head) {
      for (int i = 0; i < units; ++i) {
        shared.states[i * plan.width + column] = state;
        state = apply(shared.units[i * plan.width + column], state);
      }
    }
    __syncthreads();
    for (int turn = 0; turn < (in_turn ? rows : 1); ++turn) {
      if (!in_turn || turn == row) {
        A h;
        from_wide(h,
                  in_turn ? shared.states[column] : apply(before, shared.states[unit * plan.width + column]));
        h = run_steps<kFull>(steps, forgets, h);
        if (in_turn) shared.states[column] = to_wide(h);
      }
      if (in_turn) __syncthreads();
    }
    if (has_next() && in_turn) {
      if (is_head) links.states[slot * plan.width + column] = shared.states[column];
      publish(2);
    }

    if constexpr (kExchange) {
      from_rows(steps);
      for_each_element<kFull>([&](int k, const Channel& x, bool, bool is_last) {
        scan.store(x, steps[k], Scan::kBackward && scan.forgets(scan.moved(x, 1), false), is_last,
                   steps[k].b);
      });
    }
  }
};

template <bool kExchange, class Scan>
__device__ __forceinline__ void scan_block(const Scan& scan, const ScanPlan& plan,
                                           const ScanLinks<wide_t<Scan>>& links, ScanShared<Scan>& shared) {
  using Block = ScanBlock<Scan, kExchange>;
  const int64_t number = Block::take_number(plan, links, shared);
  const int64_t tile = static_cast<uint32_t>(number) / static_cast<uint32_t>(plan.groups);
  const int64_t group = number - tile * plan.groups;
  const int column = static_cast<int>(threadIdx.x) & (plan.width - 1);
  const int row = static_cast<int>(threadIdx.x) / plan.width;
  const int64_t first_channel = group * plan.width, channel = first_channel + column;
  const int64_t last = scan.channels.count - 1;
  const int64_t first = tile * plan.tile_steps + static_cast<int64_t>(row) * Block::kSteps;
  const int64_t left = channel <= last ? scan.steps - first : 0;
  const int64_t own = channel < last ? channel : last;
  const typename Scan::Channel at_first_step = scan.channel(own);
  const Block block = {scan,
                       plan,
                       links,
                       shared,
                       tile,
                       group * plan.tiles + tile,
                       column,
                       row,
                       row == 0,
                       first_channel,
                       first,
                       static_cast<int>(clamped<int64_t>(left, 0, Block::kSteps + 1)),
                       static_cast<int>(own - first_channel),
                       at_first_step,
                       scan.moved(at_first_step, first)};
  block.is_full() ? block.template run<true>() : block.template run<false>();
}

// ---- Many channels: one thread each

template <class Scan>
struct ScanSerial {
  using A = typename Scan::A;
  using Channel = typename Scan::Channel;
  static constexpr int kAhead = kScanSteps<Scan>;  // that a thread loads while it runs those before

  struct Steps {
    ScanStep<A> of[kAhead];
    unsigned forgets;  // a bit a step, and one for the step after these
  };

  const Scan& scan;

  // Loads the steps from `first` on, where x is. kFull: whether there are kAhead, not fewer.
  template <bool kFull>
  __device__ __forceinline__ void load(Steps& steps, Channel x, int64_t first) const {
    steps.forgets = 0;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (!kFull && first + k >= scan.steps) break;
      const bool is_first = k == 0 && first == 0;
      steps.of[k] = scan.load(x, is_first, first + k + 1 == scan.steps);
      steps.forgets |= static_cast<unsigned>(scan.forgets(x, is_first)) << k;
      x = scan.moved(x, 1);
    }
    const int count = kFull ? kAhead : static_cast<int>(scan.steps - first);
    if (Scan::kBackward) steps.forgets |= static_cast<unsigned>(scan.forgets(x, false)) << count;
  }

  template <bool kFull>
  __device__ __forceinline__ void run(const Steps& steps, Channel& x, int64_t first, A& h) const {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (!kFull && first + k >= scan.steps) break;
      h = advance(steps.of[k], steps.forgets >> k & 1, h);
      scan.store(x, steps.of[k], steps.forgets >> (k + 1) & 1, first + k + 1 == scan.steps, h);
      x = scan.moved(x, 1);
    }
  }

  __device__ __forceinline__ void run(int64_t channel) const {
    Channel x = scan.channel(channel);
    A h = scan.before_first(x);
    Steps now, next;
    int64_t first = 0;
    if (scan.steps >= kAhead) load<true>(now, x, 0);
    for (; first + 2 * kAhead <= scan.steps; first += kAhead) {
      load<true>(next, scan.moved(x, kAhead), first + kAhead);
      run<true>(now, x, first, h);
      now = next;
    }
    if (first + kAhead <= scan.steps) {
      run<true>(now, x, first, h);
      first += kAhead;
    }
    load<false>(now, x, first);
    run<false>(now, x, first, h);
  }
};

template <class Scan>
__device__ __forceinline__ void scan_channel(const Scan& scan) {
  const int64_t channel = int64_t{blockIdx.x} * kScanSerialThreads + threadIdx.x;
  if (channel < scan.channels.count) ScanSerial<Scan>{scan}.run(channel);
}

}  // namespace lltm_ext
