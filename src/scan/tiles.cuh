// The scan of few channels: time is divided too.
//
// A block takes tiles of some channels and steps, one after the other, and has three in shared memory: one
// that is copied, one that is reduced, and one that is run. Each of its threads has some successive steps of
// one channel. The thread first reduces its steps to an affine function of the state before them, and the
// block combines these functions into the tile's. It has the next tile reduced before it asks for the state
// before this one (look_back.cuh), so that other blocks rarely wait for it. Then the threads run their steps.
//
// Where coefficients grow, or are not finite, a function may lose what a loop over the steps would find. In
// such a tile the threads run their steps one after the other, and later tiles see the state after it.
#pragma once

#include "scan/look_back.cuh"

namespace lltm_ext {

// How a tile lies in a buffer, in elements of one type. After a thread's steps there is room for one more, or
// for four bytes, so that the threads of a warp use all banks.
template <typename E, int kSteps>
struct TileLayout {
  static constexpr int kPadding = sizeof(E) == 2 ? 2 : 1;
  LLTM_HOST_DEVICE static int elements(const ScanPlan& plan) {
    return plan.threads * (kSteps + kPadding) + plan.width * kPadding;
  }

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

LLTM_HOST_DEVICE int whole_vectors(int bytes) { return (bytes + 15) / 16 * 16; }

// What a tile reads. Backward, the gradient of a replaces it; the results replace b.
template <class Scan>
struct TileBuffer {
  using LayoutOfA = TileLayout<typename Scan::C, kScanSteps<Scan>>;
  using LayoutOfB = TileLayout<typename Scan::T, kScanSteps<Scan>>;  // and of h
  typename Scan::C* a;
  typename Scan::T *b, *h;

  LLTM_HOST_DEVICE static int bytes(const ScanPlan& plan) {
    return bytes_of_a(plan) + bytes_of_b(plan) * (Scan::kBackward ? 2 : 1);
  }
  __device__ __forceinline__ TileBuffer(char* memory, const ScanPlan& plan)
      : a(reinterpret_cast<typename Scan::C*>(memory)),
        b(reinterpret_cast<typename Scan::T*>(memory + bytes_of_a(plan))),
        h(reinterpret_cast<typename Scan::T*>(memory + bytes_of_a(plan) + bytes_of_b(plan))) {}

 private:
  LLTM_HOST_DEVICE static int bytes_of_a(const ScanPlan& plan) {
    return whole_vectors(LayoutOfA::elements(plan) * static_cast<int>(sizeof(*a)));
  }
  LLTM_HOST_DEVICE static int bytes_of_b(const ScanPlan& plan) {
    return whole_vectors(LayoutOfB::elements(plan) * static_cast<int>(sizeof(*b)));
  }
};

constexpr int kTileBuffers = 3;

// The shared memory of a block, besides the buffers.
template <class Scan>
struct TileShared {
  using F = Affine<wide_t<Scan>>;
  F* units;             // [2, units, width]: units of rows as functions, of two tiles
  wide_t<Scan>* state;  // [width]: where threads take turns
  LookBackShared<F> look_back;
  unsigned* taken;  // [kTileBuffers]: the tiles in the buffers

  LLTM_HOST_DEVICE static int bytes(int threads) {
    return whole_vectors(threads * kThreadBytes + kTileBuffers * static_cast<int>(sizeof(unsigned)));
  }
  __device__ __forceinline__ TileShared(char* memory, int threads)
      : units(reinterpret_cast<F*>(memory)),
        state(reinterpret_cast<wide_t<Scan>*>(units + 2 * threads)),
        look_back(reinterpret_cast<char*>(state + threads), threads),
        taken(reinterpret_cast<unsigned*>(memory + threads * kThreadBytes)) {}

 private:
  static constexpr int kThreadBytes = 2 * sizeof(F) + sizeof(wide_t<Scan>) + LookBackShared<F>::kBytes;
};

template <class Scan>
int tile_shared_bytes(const ScanPlan& plan) {
  return TileShared<Scan>::bytes(plan.threads) + kTileBuffers * TileBuffer<Scan>::bytes(plan);
}

// shared_bytes: the most that a block may have.
template <class Scan>
ScanPlan plan_of(const Scan& scan, int shared_bytes) {
  for (int threads = kScanThreads<Scan>;; threads /= 2) {
    const ScanPlan plan =
        plan_scan(scan.steps, scan.channels.count, threads, kScanSteps<Scan>, time_is_fastest(scan));
    if (threads == kScanWarp || tile_shared_bytes<Scan>(plan) <= shared_bytes) return plan;
  }
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
        buffers_(memory + TileShared<Scan>::bytes(plan.threads)),
        of_a_(plan),
        of_b_(plan),
        thread_(static_cast<int>(threadIdx.x)),
        rows_(plan.threads >> plan.width_bits),
        row_(thread_ >> plan.width_bits),
        column_(thread_ & (plan.width - 1)) {
    // Of the segments of tiles that run at once, some has a known state before it, or soon has.
    const auto at_once = static_cast<int>(ceil_div(blocks, plan.groups));
    depth_ = min(static_cast<int>(ceil_div(at_once, kSegmentTiles)) + 1, rows_);
  }

  __device__ __forceinline__ void run() {
    uint32_t ahead = take(0);
    Reduced reduced = {};
    for (uint32_t i = 0;; ++i) {
      if (thread_ == 0) shared_.taken[i % kTileBuffers] = ahead;
      ahead = take(i + 1);
      cp_async_wait_group<0>();
      __syncthreads();  // the tile before this one is here, and that before it was written
      copy(i % kTileBuffers);
      const Reduced next = i < 1 ? Reduced{} : reduced_tile((i - 1) % kTileBuffers, i % 2);
      if (i >= 2) {
        if (!reduced.exists) return;
        run_tile(reduced, (i - 2) % kTileBuffers);
      }
      reduced = next;
    }
  }

 private:
  // Blocks take tiles in the order in which they have to be run, so all tiles that a block waits for are
  // taken.
  __device__ __forceinline__ uint32_t take(uint32_t i) const {
    if (plan_.tiles == 1) return blockIdx.x + i * blocks_;
    return thread_ == 0 ? atomicAdd(links_.started, 1u) + 1 : 0;
  }

  __device__ __forceinline__ Buffer buffer_at(int i) const {
    return {buffers_ + i * Buffer::bytes(plan_), plan_};
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

  // Calls f(c, s, offset) for the vectors of channels, or elements, of a tile that this thread copies.
  // offset: in memory, from the tile's first step of the thread's channel.
  template <int kVector, class G>
  __device__ __forceinline__ void for_each_vector(const Place& place, int64_t step, int64_t stride,
                                                  const G& f) const {
    if (plan_.time_is_fastest) {
#pragma unroll 2
      for (int i = thread_; i < kSteps * plan_.threads; i += plan_.threads) {
        const int c = i >> plan_.tile_bits, s = i & (plan_.tile_steps - 1);
        if (c < place.channels && s < place.steps) f(c, s, s * step + (c - place.own) * stride);
      }
    } else {
      constexpr int kBits = kVector == 8 ? 3 : kVector / 2;
      const int bits = plan_.width_bits - kBits, c = (thread_ & ((1 << bits) - 1)) * kVector;
      const int by = plan_.threads >> bits;
      if (c >= place.channels) return;
      int s = thread_ >> bits;
      int64_t offset = s * step + (c - place.own);  // that is 0 for single elements
#pragma unroll 2
      for (; s < place.steps; s += by, offset += by * step) f(c, s, offset);
    }
  }

  // Starts to copy the tile of a buffer, if there is one.
  __device__ __forceinline__ void copy(int buffer) const {
    const uint32_t number = shared_.taken[buffer];
    if (number < tiles_) {
      const Place place = place_of(number);
      const Buffer to = buffer_at(buffer);
      copy(place, to.a, of_a_, place.channel.a, scan_.a, vectors_.a, -static_cast<int>(Scan::kBackward));
      copy(place, to.b, of_b_, place.channel.b, scan_.b, vectors_.b, 0);
      if (Scan::kBackward && place.channel.h) {
        copy(place, to.h, of_b_, place.channel.h, scan_.h, vectors_.h, 1);
      }
    }
    cp_async_commit_group();
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
      for_each_vector<kVector>(place, operand.step, 1, [&](int c, int s, int64_t offset) {
        if (least <= s && s < most) copy_to_shared<16>(to + layout.at(c, s), from + offset);
      });
    } else {
      for_each_vector<1>(place, operand.step, operand.strides[0], [&](int c, int s, int64_t offset) {
        if (least <= s && s < most) copy_to_shared<sizeof(E)>(to + layout.at(c, s), from + offset);
      });
    }
  }

  template <typename E>
  __device__ __forceinline__ void write(const Place& place, const E* from,
                                        const TileLayout<E, kSteps>& layout, E* to,
                                        const ScanOperand<E>& operand, bool vectors) const {
    constexpr int kVector = 16 / sizeof(E);
    if (vectors) {
      for_each_vector<kVector>(place, operand.step, 1, [&](int c, int s, int64_t offset) {
        *reinterpret_cast<uint4*>(to + offset) = *reinterpret_cast<const uint4*>(from + layout.at(c, s));
      });
    } else {
      for_each_vector<1>(place, operand.step, operand.strides[0],
                         [&](int c, int s, int64_t offset) { to[offset] = from[layout.at(c, s)]; });
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
    bool any_zero = false;
#pragma unroll 4
    for (int k = 0; k < kSteps; ++k) {
      const A factor = kResets && (forgets >> k & 1) ? A{} : scan_.factor(*a);
      any_zero = any_zero || is_zero(factor);
      const W wide = to_wide(factor);
      mine = {multiply(wide, mine.a), multiply_add(wide, mine.b, to_wide(widen(*b)))};
      a += of_a_.step, b += of_b_.step;
    }
    mine.a = without_underflow(mine.a, any_zero);
    if (kResets && forgets) mark_reset(mine.a);
    return mine;
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

  // Where a warp has several rows: makes `mine` the function of the rows up to the thread's own, and returns
  // that of the rows before it.
  __device__ __forceinline__ F scan_of_warp(F& mine) const {
    const int lane = thread_ % kScanWarp;
    if (plan_.width >= kScanWarp) return F::identity();
#pragma unroll 1
    for (int lanes = plan_.width; lanes < kScanWarp; lanes *= 2) {
      const F earlier = shuffle_up(mine, lanes);
      if (lane >= lanes) mine = then(earlier, mine);
    }
    const F before = shuffle_up(mine, plan_.width);
    return lane >= plan_.width ? before : F::identity();
  }
  __device__ __forceinline__ F composed_units(const F* units) const {
    constexpr int kMost = kScanThreads<Scan> / kScanWarp;
    F parts[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      parts[i] = i < rows_ / unit_rows() ? units[i * plan_.width + column_] : F::identity();
    }
    return composed(parts);
  }

  // The thread's part of a tile that is reduced.
  struct Reduced {
    bool exists, in_turn;  // in_turn: whether the threads have to run their steps one after the other
    uint64_t resets, forgets;
    F before, whole;  // the functions of the rows before this one in a warp, and of the tile, in row 0
    const F* units;
  };
  // What a thread has of a tile.
  struct Part {
    int count;      // its steps
    int64_t first;  // the number of the first of them
    int64_t last;   // which of them is the last of all
    C* a;
    T *b, *h;
    Channel x;  // at the first of them
  };
  __device__ __forceinline__ Part part_of(const Place& place, const Buffer& buffer) const {
    const int in_tile = row_ * kSteps, at_b = of_b_.at(column_, in_tile);
    const int64_t first = place.first_step + in_tile;
    const int count = column_ < place.channels ? clamped(place.steps - in_tile, 0, kSteps) : 0;
    return {count,
            first,
            scan_.steps - 1 - first,
            buffer.a + of_a_.at(column_, in_tile),
            buffer.b + at_b,
            buffer.h + at_b,
            scan_.moved(place.channel, in_tile)};
  }

  // Reduces the tile of a buffer, and tells later tiles its function.
  __device__ __forceinline__ Reduced reduced_tile(int buffer, int parity) const {
    const uint32_t number = shared_.taken[buffer];
    if (number >= tiles_) return {};
    const Place place = place_of(number);
    const Part part = part_of(place, buffer_at(buffer));
    Reduced found = {true};
    found.resets = resets_at(part.x, part.first, part.count);
    found.forgets = (Scan::kBackward ? found.resets | (part.first == 0) : found.resets >> 1) &
                    ((uint64_t{1} << part.count) - 1);
    if (part.count < kSteps) fill(part.a, part.b, part.count);
    F mine = found.forgets ? reduced<true>(part.a, part.b, found.forgets) : reduced<false>(part.a, part.b, 0);
    found.before = scan_of_warp(mine);
    F* const units = shared_.units + parity * plan_.threads;
    found.units = units;
    if (row_ % unit_rows() == unit_rows() - 1) units[row_ / unit_rows() * plan_.width + column_] = mine;
    __syncthreads();
    const bool publishes = row_ == 0 && place.tile + 1 < plan_.tiles;
    found.whole = publishes ? composed_units(units) : F::identity();
    found.in_turn = __syncthreads_or(!is_reliable(mine) || !is_reliable(found.whole));
    if (publishes && !found.in_turn) look_back_of(place).publish(found.whole);
    return found;
  }
  // A unit is the rows of a warp, or one row.
  __device__ __forceinline__ int unit_rows() const { return larger(1, kScanWarp >> plan_.width_bits); }
  __device__ __forceinline__ LookBack<F> look_back_of(const Place& place) const {
    return {links_, shared_.look_back, place.group, place.tile, plan_.tiles, plan_.width, row_, column_};
  }

  // Runs the steps of a reduced tile, and writes the results.
  __device__ __forceinline__ void run_tile(const Reduced& reduced, int in_buffer) const {
    const Place place = place_of(shared_.taken[in_buffer]);
    const Buffer buffer = buffer_at(in_buffer);
    const Part part = part_of(place, buffer);
    const bool is_last = 0 <= part.last && part.last < part.count;
    if (Scan::kBackward && part.x.h && is_last) part.h[part.last * of_b_.step] = scan_.before_all(part.x);

    const bool publishes = row_ == 0 && place.tile + 1 < plan_.tiles;
    LookBack<F> look_back = look_back_of(place);
    W state = to_wide(scan_.before_first(place.channel));
    if (place.tile > 0) state = look_back.before(state, depth_);
    if (publishes && !reduced.in_turn) look_back.publish_state(reduced.whole);
    const auto run_from = [&](W from) {
      A now;
      from_wide(now, from);
      now = reduced.resets | reduced.forgets
                ? run_steps<true>(part.a, part.b, part.h, reduced.resets >> 1, reduced.forgets, now)
                : run_steps<false>(part.a, part.b, part.h, 0, 0, now);
      if (Scan::kBackward && is_last) {
        scan_.store_grad_initial(scan_.moved(part.x, part.last), now, reduced.resets >> (part.last + 1) & 1);
      }
      return to_wide(now);
    };
    if (!reduced.in_turn) {
#pragma unroll 1
      for (int i = 0; i < row_ / unit_rows(); ++i) {
        state = apply(reduced.units[i * plan_.width + column_], state);
      }
      run_from(apply(reduced.before, state));
      __syncthreads();
    } else {
      if (row_ == 0) shared_.state[column_] = state;
#pragma unroll 1
      for (int turn = 0; turn < rows_; ++turn) {
        __syncthreads();
        if (turn == row_) shared_.state[column_] = run_from(shared_.state[column_]);
      }
      __syncthreads();
      if (publishes) {
        const F after = F::constant(shared_.state[column_]);
        look_back.publish(after);
        look_back.publish_state(after);
      }
    }
    write(place, buffer.b, of_b_, place.channel.result, scan_.result, vectors_.result);
    if (Scan::kBackward && place.channel.h) {
      write(place, buffer.a, of_a_, place.channel.grad_a, scan_.grad_a, vectors_.grad_a);
    }
  }

  const Scan& scan_;
  const ScanPlan& plan_;
  const TileLinks<F>& links_;
  const ScanVectors& vectors_;
  const uint32_t blocks_, tiles_;  // how many there are
  const TileShared<Scan> shared_;
  char* const buffers_;
  const TileLayout<C, kSteps> of_a_;
  const TileLayout<T, kSteps> of_b_;
  const int thread_, rows_, row_, column_;
  int depth_;  // LookBack::before
};

}  // namespace lltm_ext
