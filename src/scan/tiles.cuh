// The scan of few channels: time is divided too.
//
// A block takes tiles of some channels and steps, one after the other, and copies each to shared memory.
// While it waits, other blocks of the multiprocessor run theirs. Each of its threads has some successive
// steps of one channel. The thread first reduces its steps to an affine function of the state before them.
// The block combines these functions into the tile's, finds the state before the tile (look_back.cuh), and
// from it the one before each thread's steps. Then the threads run their steps.
//
// Where coefficients grow, or are not finite, a function may lose what a loop over the steps would find. In
// such a tile the threads run their steps one after the other, and later tiles see the state after it.
#pragma once

#include "scan/look_back.cuh"

namespace lltm_ext {

// The strides of a tile in shared memory, in elements of type E. A pad follows the steps of each thread, so
// that the threads of a warp read from different banks: one step of all channels, or 4 bytes where adjacent
// steps are neighbours.
template <typename E, int kSteps>
struct TileLayout {
  static constexpr int kPadding = sizeof(E) == 2 ? 2 : 1;
  LLTM_HOST_DEVICE static int elements(int threads) { return threads * (kSteps + 2 * kPadding); }

  __device__ __forceinline__ explicit TileLayout(const ScanPlan& plan) {
    step = plan.time_is_fastest ? 1 : plan.width;
    thread = kSteps * step + (plan.time_is_fastest ? kPadding : plan.width);
    channel = plan.time_is_fastest ? (plan.threads >> plan.width_bits) * thread + kPadding : 1;
  }
  __device__ __forceinline__ int at(int c, int s) const {
    return c * channel + s / kSteps * thread + s % kSteps * step;
  }

  int channel, step, thread;  // strides; a thread has kSteps steps
};

// What a tile reads. Backward, the gradient of a replaces it; the results replace b.
template <class Scan>
struct TileBuffer {
  using LayoutOfA = TileLayout<typename Scan::C, kScanSteps<Scan>>;
  using LayoutOfB = TileLayout<typename Scan::T, kScanSteps<Scan>>;  // and of h
  typename Scan::C* a;
  typename Scan::T *b, *h;

  LLTM_HOST_DEVICE static int bytes(int threads) {
    return LayoutOfA::elements(threads) * static_cast<int>(sizeof(*a)) +
           LayoutOfB::elements(threads) * static_cast<int>(sizeof(*b)) * (Scan::kBackward ? 2 : 1);
  }
  __device__ __forceinline__ TileBuffer(char* memory, int threads)
      : a(reinterpret_cast<typename Scan::C*>(memory)),
        b(reinterpret_cast<typename Scan::T*>(a + LayoutOfA::elements(threads))),
        h(b + LayoutOfB::elements(threads)) {}
};

// The shared memory of a block, besides the buffer.
template <class Scan>
struct TileShared {
  using F = Affine<wide_t<Scan>>;
  F* units;             // [units, width]: units of rows as functions
  wide_t<Scan>* state;  // [width]: where threads take turns
  LookBackShared<F> look_back;
  uint32_t* number;  // of the block's tile

  LLTM_HOST_DEVICE static int bytes(int threads) {
    const int of_all = threads * static_cast<int>(sizeof(F) + sizeof(wide_t<Scan>)) +
                       threads * LookBackShared<F>::kBytes + static_cast<int>(sizeof(*number));
    return static_cast<int>(ceil_div(of_all, 16)) * 16;
  }
  __device__ __forceinline__ TileShared(char* memory, int threads)
      : units(reinterpret_cast<F*>(memory)),
        state(reinterpret_cast<wide_t<Scan>*>(units + threads)),
        look_back(reinterpret_cast<char*>(state + threads), threads),
        number(reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(state + threads) +
                                           threads * LookBackShared<F>::kBytes)) {}
};

template <class Scan>
int tile_shared_bytes(int threads) {
  return TileShared<Scan>::bytes(threads) + TileBuffer<Scan>::bytes(threads);
}

// shared_bytes: the most that a block may have.
template <class Scan>
ScanPlan plan_of(const Scan& scan, int shared_bytes) {
  int threads = kScanThreads<Scan>;
  while (tile_shared_bytes<Scan>(threads) > shared_bytes) threads /= 2;
  return plan_scan(scan.steps, scan.channels.count, threads, kScanSteps<Scan>, time_is_fastest(scan));
}

// A warp's lanes copy adjacent channels, unless adjacent steps are neighbours in memory.
template <class Scan>
ScanVectors tile_vectors_of(const Scan& scan, const ScanPlan& plan) {
  return plan.time_is_fastest ? ScanVectors{} : vectors_of(scan, plan.width);
}

// The part of a tile that a thread has.
template <class Scan>
struct TilePlace {
  int64_t group, tile;
  int64_t first_step;              // of the tile
  int steps, channels;             // of the tile, that exist
  int own;                         // the column of `channel`: the thread's, or the last one if it has none
  typename Scan::Channel channel;  // at the tile's first step
};

template <class Scan>
class TiledScan {
  using A = typename Scan::A;
  using T = typename Scan::T;
  using C = typename Scan::C;
  using W = wide_t<Scan>;
  using F = Affine<W>;
  using Channel = typename Scan::Channel;
  using Place = TilePlace<Scan>;
  using Buffer = TileBuffer<Scan>;
  static constexpr int kSteps = kScanSteps<Scan>;
  static constexpr uint32_t kNone = ~uint32_t{0};  // plus the number of blocks, it is the first tile

 public:
  // memory: tile_shared_bytes.
  __device__ __forceinline__ TiledScan(const Scan& scan, const ScanPlan& plan, const TileLinks<F>& links,
                                       const ScanVectors& vectors, unsigned blocks, char* memory)
      : scan_(scan),
        plan_(plan),
        links_(links),
        vectors_(vectors),
        blocks_(blocks),
        tiles_(static_cast<uint32_t>(plan.blocks())),
        shared_(memory, plan.threads),
        buffer_(memory + TileShared<Scan>::bytes(plan.threads), plan.threads),
        of_a_(plan),
        of_b_(plan),
        thread_(static_cast<int>(threadIdx.x)),
        rows_(plan.threads >> plan.width_bits),
        row_(thread_ >> plan.width_bits),
        column_(thread_ & (plan.width - 1)) {
    // Of as many tiles as run at once, some segment has a known state before it, or soon has.
    const auto at_once = static_cast<int>(ceil_div(blocks, plan.groups));
    depth_ = min(static_cast<int>(ceil_div(at_once, kSegmentTiles)) + 1, rows_);
  }

  __device__ __forceinline__ void run() {
    take();
    for (;;) {
      if (thread_ == 0) *shared_.number = taken_;
      __syncthreads();  // and the results of the tile before are written
      const uint32_t number = *shared_.number;
      if (number >= tiles_) return;
      const Place place = place_of(number);
      copy(place);
      cp_async_commit_group();
      cp_async_wait_group<0>();
      __syncthreads();
      run_tile(place);
    }
  }

 private:
  // Blocks take tiles in the order in which they have to be run, so all tiles that a block waits for are
  // taken. Thread 0 knows which.
  __device__ __forceinline__ void take() {
    if (thread_ > 0) return;
    taken_ = plan_.tiles > 1   ? atomicAdd(links_.started, 1u) + 1
             : taken_ == kNone ? blockIdx.x
                               : taken_ + blocks_;
  }

  __device__ __forceinline__ Place place_of(uint32_t number) const {
    Place place;
    place.tile = number / static_cast<uint32_t>(plan_.groups);
    place.group = number - place.tile * plan_.groups;
    place.first_step = place.tile << plan_.tile_bits;
    const int64_t first_channel = place.group << plan_.width_bits,
                  channels = scan_.channels.count - first_channel;
    place.steps = static_cast<int>(min(scan_.steps - place.first_step, int64_t{plan_.tile_steps}));
    place.channels = static_cast<int>(min(channels, int64_t{plan_.width}));
    place.own = min(column_, place.channels - 1);
    place.channel = scan_.moved(scan_.channel(first_channel + place.own), place.first_step);
    return place;
  }

  // ---- Between memory and a buffer

  // Calls f(s, offset, at) for the vectors of channels, or elements, of a tile that this thread copies, at
  // step s of the tile. offset: in memory, from the tile's first step of the thread's channel. at: in the
  // buffer.
  template <int kVector, typename E, class G>
  __device__ __forceinline__ void for_each_vector(const Place& place, int64_t step, int64_t stride,
                                                  const TileLayout<E, kSteps>& layout, const G& f) const {
    if (plan_.time_is_fastest) {
      const int steps = min(plan_.threads, plan_.tile_steps), first = thread_ & (steps - 1);
      const int by = steps / kSteps * layout.thread;  // steps is a multiple of kSteps
      for (int c = thread_ / steps; c < place.channels; c += plan_.threads / steps) {
        int64_t offset = first * step + (c - place.own) * stride;
        int at = layout.at(c, first);
#pragma unroll 4
        for (int s = first; s < place.steps; s += steps, offset += steps * step, at += by) f(s, offset, at);
      }
    } else {
      constexpr int kBits = kVector == 8 ? 3 : kVector / 2;
      const int bits = plan_.width_bits - kBits, c = (thread_ & ((1 << bits) - 1)) * kVector;
      const int by = plan_.threads >> bits;
      if (c >= place.channels) return;
      int s = thread_ >> bits;
      int64_t offset = s * step + (c - place.own);  // that is 0 for single elements
#pragma unroll 2
      for (; s < place.steps; s += by, offset += by * step) f(s, offset, layout.at(c, s));
    }
  }

  __device__ __forceinline__ void copy(const Place& place) const {
    copy(place, buffer_.a, of_a_, place.channel.a, scan_.a, vectors_.a, -static_cast<int>(Scan::kBackward));
    copy(place, buffer_.b, of_b_, place.channel.b, scan_.b, vectors_.b, 0);
    if (Scan::kBackward && place.channel.h) {
      copy(place, buffer_.h, of_b_, place.channel.h, scan_.h, vectors_.h, 1);
    }
  }

  // later: how many steps later than those of the tile the elements are.
  template <typename E>
  __device__ __forceinline__ void copy(const Place& place, E* to, const TileLayout<E, kSteps>& layout,
                                       const E* from, const ScanOperand<const E>& operand, bool vectors,
                                       int later) const {
    constexpr int kVector = 16 / sizeof(E);
    from += later * operand.step;
    const int64_t steps_left = scan_.steps - place.first_step;
    const int least = place.first_step + later < 0 ? -later : 0;
    const int most = place.steps + later > steps_left ? place.steps - later : place.steps;
    if (vectors) {
      for_each_vector<kVector>(place, operand.step, 1, layout, [&](int s, int64_t offset, int at) {
        if (least <= s && s < most) copy_to_shared<16>(to + at, from + offset);
      });
    } else {
      for_each_vector<1>(place, operand.step, operand.strides[0], layout, [&](int s, int64_t offset, int at) {
        if (least <= s && s < most) copy_to_shared<sizeof(E)>(to + at, from + offset);
      });
    }
  }

  template <typename E>
  __device__ __forceinline__ void write(const Place& place, const E* from,
                                        const TileLayout<E, kSteps>& layout, E* to,
                                        const ScanOperand<E>& operand, bool vectors) const {
    constexpr int kVector = 16 / sizeof(E);
    if (vectors) {
      for_each_vector<kVector>(place, operand.step, 1, layout, [&](int, int64_t offset, int at) {
        *reinterpret_cast<uint4*>(to + offset) = *reinterpret_cast<const uint4*>(from + at);
      });
    } else {
      for_each_vector<1>(place, operand.step, operand.strides[0], layout,
                         [&](int, int64_t offset, int at) { to[offset] = from[at]; });
    }
  }

  // ---- A tile

  // A bit a step of the thread that is a reset, and before them one for the step before.
  __device__ __forceinline__ uint64_t resets_at(const Channel& x, int64_t first, int count) const {
    uint64_t resets = 0;
    if (!scan_.reset.data) return resets;
#pragma unroll 8
    for (int k = -1; k < kSteps; ++k) {
      if (k >= 0 ? k < count : Scan::kBackward && count > 0 && first > 0) {
        resets |= static_cast<uint64_t>(x.reset[k * scan_.reset.step]) << (k + 1);
      }
    }
    return resets;
  }

  // Makes those of the thread's steps that do not exist leave the state as it is.
  __device__ __forceinline__ void fill(C* a, T* b, int count) const {
    for (int k = count; k < kSteps; ++k) {
      set_one(a[k * of_a_.step]);
      b[k * of_b_.step] = T{};
    }
  }

  // The thread's steps as a function.
  template <bool kResets>
  __device__ __forceinline__ F reduced(const C* a, const T* b, uint64_t forgets) const {
    F mine = F::identity();
    const C* factors = a;
#pragma unroll 4
    for (int k = 0; k < kSteps; ++k) {
      const W factor = to_wide(kResets && (forgets >> k & 1) ? A{} : scan_.factor(*factors));
      mine = {multiply(factor, mine.a), multiply_add(factor, mine.b, to_wide(widen(*b)))};
      factors += of_a_.step, b += of_b_.step;
    }
    if (is_zero(mine.a)) mine.a = without_underflow(mine.a, (kResets && forgets) || has_zero(a));
    if (kResets && forgets) mark_reset(mine.a);
    return mine;
  }
  __device__ __forceinline__ bool has_zero(const C* a) const {
    bool found = false;
    for (int k = 0; k < kSteps; ++k) found = found || is_zero(scan_.factor(a[k * of_a_.step]));
    return found;
  }

  // Runs the thread's steps from the state h, leaves the results in the buffer, and returns the last state.
  // resets: a bit a step, which is a reset itself.
  template <bool kResets>
  __device__ __forceinline__ A run_steps(C* a, T* b, const T* before, uint64_t resets, uint64_t forgets,
                                         A h) const {
#pragma unroll 4
    for (int k = 0; k < kSteps; ++k) {
      h = advance(scan_.factor(*a), widen(*b), kResets && (forgets >> k & 1), h);
      *b = narrow<T>(h);
      if (Scan::kBackward && scan_.h.data)
        *a = scan_.gradient_of_a(h, widen(*before), kResets && (resets >> k & 1));
      a += of_a_.step, b += of_b_.step, before += of_b_.step;
    }
    return h;
  }

  __device__ __forceinline__ void run_tile(const Place& place) {
    const int width = plan_.width, in_tile = row_ * kSteps;
    const int64_t first = place.first_step + in_tile;
    const int count = column_ < place.channels ? clamped(place.steps - in_tile, 0, kSteps) : 0;
    const Channel x = scan_.moved(place.channel, in_tile);
    const uint64_t resets = resets_at(x, first, count);
    const uint64_t forgets =
        (Scan::kBackward ? resets | (first == 0) : resets >> 1) & ((uint64_t{1} << count) - 1);
    C* const a = buffer_.a + of_a_.at(column_, in_tile);
    T *const b = buffer_.b + of_b_.at(column_, in_tile), *const h = buffer_.h + of_b_.at(column_, in_tile);
    const int64_t last = scan_.steps - 1 - first;  // which of the thread's steps is the last of all
    if (count < kSteps) fill(a, b, count);
    if (Scan::kBackward && x.h && 0 <= last && last < count) h[last * of_b_.step] = scan_.before_all(x);

    F mine = forgets ? reduced<true>(a, b, forgets) : reduced<false>(a, b, 0);
    // Where a warp has several rows: the functions of the rows before this one, and with it.
    const int lane = thread_ % kScanWarp;
    F before = F::identity();
    if (width < kScanWarp) {
      for (int lanes = width; lanes < kScanWarp; lanes *= 2) {
        const F earlier = shuffle_up(mine, lanes);
        if (lane >= lanes) mine = then(earlier, mine);
      }
      const F earlier = shuffle_up(mine, width);
      if (lane >= width) before = earlier;
    }
    // A unit is the rows of a warp, or one row.
    const int unit_rows = larger(1, kScanWarp >> plan_.width_bits), units = rows_ / unit_rows,
              unit = row_ / unit_rows;
    bool reliable = is_reliable(mine);
    if (row_ % unit_rows == unit_rows - 1) shared_.units[unit * width + column_] = mine;
    __syncthreads();
    const bool is_head = row_ == 0, has_next = place.tile + 1 < plan_.tiles;
    F whole = F::identity();
    if (is_head && has_next) {
      F parts[kSegmentTiles];
#pragma unroll
      for (int i = 0; i < kSegmentTiles; ++i) {
        parts[i] = i < units ? shared_.units[i * width + column_] : F::identity();
      }
      whole = composed(parts);
      reliable = reliable && is_reliable(whole);
    }
    const bool in_turn = __syncthreads_or(!reliable);

    LookBack<F> look_back(links_, shared_.look_back, place.group, place.tile, plan_.tiles, width, row_,
                          column_);
    if (is_head && has_next && !in_turn) look_back.publish(whole);
    W state = to_wide(scan_.before_first(place.channel));
    if (place.tile > 0) state = look_back.before(state, depth_);
    take();  // while the tile's steps run
    if (!in_turn) {
      if (is_head && has_next) look_back.publish_state(whole);
#pragma unroll 1
      for (int i = 0; i < unit; ++i) state = apply(shared_.units[i * width + column_], state);
    } else if (is_head) {
      shared_.state[column_] = state;
    }
    for (int turn = 0; turn < (in_turn ? rows_ : 1); ++turn) {
      if (in_turn) __syncthreads();
      if (in_turn && turn != row_) continue;
      A now;
      from_wide(now, in_turn ? shared_.state[column_] : apply(before, state));
      now = resets | forgets ? run_steps<true>(a, b, h, resets >> 1, forgets, now)
                             : run_steps<false>(a, b, h, 0, 0, now);
      if (in_turn) shared_.state[column_] = to_wide(now);
      if (Scan::kBackward && 0 <= last && last < count) {
        scan_.store_grad_initial(scan_.moved(x, last), now, resets >> (last + 1) & 1);
      }
    }
    __syncthreads();
    if (is_head && has_next && in_turn) {
      const F whole_state = F::constant(shared_.state[column_]);
      look_back.publish(whole_state);
      look_back.publish_state(whole_state);
    }
    write(place, buffer_.b, of_b_, place.channel.result, scan_.result, vectors_.result);
    if (Scan::kBackward && place.channel.h) {
      write(place, buffer_.a, of_a_, place.channel.grad_a, scan_.grad_a, vectors_.grad_a);
    }
  }

  const Scan& scan_;
  const ScanPlan& plan_;
  const TileLinks<F>& links_;
  const ScanVectors& vectors_;
  const uint32_t blocks_, tiles_;  // how many there are
  const TileShared<Scan> shared_;
  const Buffer buffer_;
  const TileLayout<C, kSteps> of_a_;
  const TileLayout<T, kSteps> of_b_;
  const int thread_, rows_, row_, column_;
  uint32_t taken_ = kNone;
  int depth_;  // LookBack::before
};

}  // namespace lltm_ext
