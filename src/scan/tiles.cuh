// The scan of few channels: time is divided too.
//
// A block takes tiles of some channels and steps, one after the other, and copies each to shared memory;
// while it waits, other blocks of the multiprocessor run theirs. Each of its threads first reduces some
// successive steps of one channel to an affine function of the state before them. The block combines these
// functions into the tile's, finds the state before the tile (look_back.cuh), and from it the one before each
// thread's steps. Then the threads run their steps.
//
// Where coefficients grow, or are not finite, a function may lose what a loop over the steps would find. In
// such a tile the threads run their steps one after the other, and later tiles see the state after it.
#pragma once

#include "scan/look_back.cuh"
#include "scan/tile_values.cuh"

namespace lltm_ext {

// What a tile reads. Backward, the gradient of a replaces it; the results replace b. Those that move by
// channels go to global memory at once.
template <class Scan>
struct TileBuffer {
  using OfA = TileValues<typename Scan::C, kScanSteps<Scan>>;
  using OfB = TileValues<typename Scan::T, kScanSteps<Scan>>;  // and of h
  typename Scan::C* a;
  typename Scan::T *b, *h;

  LLTM_HOST_DEVICE static int bytes(int threads) {
    return OfA::bytes(threads) + OfB::bytes(threads) * (Scan::kBackward ? 2 : 1);
  }
  __device__ __forceinline__ TileBuffer(char* memory, int threads)
      : a(reinterpret_cast<typename Scan::C*>(memory)),
        b(reinterpret_cast<typename Scan::T*>(memory + OfA::bytes(threads))),
        h(b + threads * kScanSteps<Scan>) {}
};

// The shared memory of a block, besides the buffer.
template <class Scan>
struct TileShared {
  using F = Affine<wide_t<Scan>>;
  F* units;  // [units, width]: units of rows as functions
  LookBackShared<F> look_back;
  wide_t<Scan>* state;  // [width]: where threads take turns, after the look back
  uint32_t* number;     // of the block's tile

  LLTM_HOST_DEVICE static int bytes(int threads) {
    const int of_all = threads * kThreadBytes + static_cast<int>(sizeof(*number));
    return static_cast<int>(ceil_div(of_all, 16)) * 16;
  }
  __device__ __forceinline__ TileShared(char* memory, int threads)
      : units(reinterpret_cast<F*>(memory)),
        look_back(reinterpret_cast<char*>(units + threads), threads),
        state(look_back.states),
        number(reinterpret_cast<uint32_t*>(memory + threads * kThreadBytes)) {}

 private:
  static constexpr int kThreadBytes = sizeof(F) + LookBackShared<F>::kBytes;
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
  return plan_scan(scan.steps, scan.channels.count, threads, kScanSteps<Scan>);
}

// The part of a tile that a thread has.
template <class Scan>
struct TilePlace {
  int64_t group, tile, first_channel;
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
  static constexpr int kSteps = kScanSteps<Scan>;
  static constexpr int kAtOnce = larger(kVecWidth<T>, kVecWidth<C>);  // steps
  static constexpr bool kBackward = Scan::kBackward;

 public:
  // memory: tile_shared_bytes.
  __device__ __forceinline__ TiledScan(const Scan& scan, const ScanPlan& plan, const TileLinks<F>& links,
                                       const TileMoves& moves, unsigned blocks, char* memory)
      : scan_(scan),
        plan_(plan),
        links_(links),
        moves_(moves),
        blocks_(blocks),
        tiles_(static_cast<uint32_t>(plan.blocks())),
        buffer_(memory, plan.threads),
        shared_(memory + TileBuffer<Scan>::bytes(plan.threads), plan.threads),
        thread_(static_cast<int>(threadIdx.x)),
        rows_(plan.threads >> plan.width_bits),
        row_(thread_ >> plan.width_bits),
        column_(thread_ & (plan.width - 1)),
        taken_(blockIdx.x - blocks - 1) {
    // Of as many tiles as run at once, some segment has a known state before it, or soon has.
    const auto at_once = static_cast<int>(ceil_div(blocks, plan.groups));
    depth_ = min(static_cast<int>(ceil_div(at_once, kSegmentTiles)) + 1, rows_);
  }

  __device__ __forceinline__ void run() {
    take();
    for (;;) {
      if (thread_ == 0) *shared_.number = taken_ + 1;
      __syncthreads();  // and the results of the tile before are written
      const uint32_t number = *shared_.number;
      if (number >= tiles_) return;
      const Place place = place_of(number);
      fill(place);
      run_tile(place);
    }
  }

 private:
  // Blocks take tiles in the order in which they have to be run, so all tiles that a block waits for are
  // taken. Thread 0 knows which.
  __device__ __forceinline__ void take() {
    if (thread_ > 0) return;
    taken_ = plan_.tiles > 1 ? atomicAdd(links_.started, 1u) : taken_ + blocks_;
  }

  __device__ __forceinline__ Place place_of(uint32_t number) const {
    Place place;
    place.tile = number / static_cast<uint32_t>(plan_.groups);
    place.group = number - place.tile * plan_.groups;
    place.first_channel = place.group << plan_.width_bits;
    place.first_step = place.tile << plan_.tile_bits;
    place.channels = static_cast<int>(min(scan_.channels.count - place.first_channel, int64_t{plan_.width}));
    place.steps = static_cast<int>(min(scan_.steps - place.first_step, int64_t{plan_.tile_steps}));
    place.own = min(column_, place.channels - 1);
    place.channel = scan_.moved(scan_.channel(place.first_channel + place.own), place.first_step);
    return place;
  }

  __device__ __forceinline__ TileValues<C, kSteps> of_a() const {
    return values_of(buffer_.a, scan_.a, moves_.a);
  }
  __device__ __forceinline__ TileValues<T, kSteps> of_b() const {
    return values_of(buffer_.b, scan_.b, moves_.b);
  }
  __device__ __forceinline__ TileValues<T, kSteps> of_h() const {
    return values_of(buffer_.h, scan_.h, moves_.h);
  }
  template <typename E, typename P>
  __device__ __forceinline__ TileValues<E, kSteps> values_of(E* data, const ScanOperand<P>& operand,
                                                             TileMove move) const {
    return {data, plan_.threads, is_by_steps(move), operand.step < 0};
  }

  // ---- Between global and shared memory

  __device__ __forceinline__ void fill(const Place& place) const {
    fill<kBackward ? -1 : 0>(place, of_a(), place.channel.a, scan_.a, moves_.a);
    fill<0>(place, of_b(), place.channel.b, scan_.b, moves_.b);
    if (kBackward && place.channel.h) fill<1>(place, of_h(), place.channel.h, scan_.h, moves_.h);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
  }

  // The operand, kLater steps later than those of the tile, unless it is left unshifted. x: the thread's
  // channel at the tile's first step.
  template <int kLater, typename E>
  __device__ __forceinline__ void fill(const Place& place, const TileValues<E, kSteps>& values, const E* x,
                                       const ScanOperand<const E>& operand, TileMove move) const {
    constexpr int kVector = kVecWidth<E>;
    if (move == TileMove::kStepVectors) {
      return for_each_vector<kVector>(place, operand, [&](int s, const E* y, unsigned thread) {
        copy_to_shared<16>(values.vector_at(thread, s % kSteps / kVector), y);
      });
    }
    if (move == TileMove::kStepElements) {
      return for_each_vector<1>(place, operand, [&](int s, const E* y, unsigned thread) {
        copy_to_shared<sizeof(E)>(&values.at(thread, s % kSteps), y);
      });
    }
    const bool has_last = place.first_step + place.steps == scan_.steps;
    const int least = kLater < 0 && place.first_step == 0 ? 1 : 0;
    const int most = kLater > 0 && has_last ? place.steps - 1 : place.steps;
    // By channels, a thread copies vectors of kVector threads, of the steps k, k + kVector, ...
    const bool vectors = move == TileMove::kChannelVectors;
    const int of = vectors ? thread_ * kVector & (plan_.threads - 1) : thread_, by = vectors ? kVector : 1;
    const int column = of & (plan_.width - 1), first = (of >> plan_.width_bits) * kSteps;
    if (column >= place.channels) return;
    const int end = min(most - first, kSteps);
    int k = vectors ? thread_ * kVector / plan_.threads : 0;
    if (first + k < least) k += by;
    x += (column - place.own) + (first + k + kLater) * operand.step;
    const int64_t x_by = by * operand.step;
    if (move == TileMove::kElementsBySteps) {
      for (; k < end; ++k, x += x_by) copy_to_shared<sizeof(E)>(&values.at(thread_, k), x);
      return;
    }
    E* to = values.data + k * plan_.threads + of;
    const int to_by = by * plan_.threads;
    if (vectors) {
#pragma unroll 4
      for (; k < end; k += kVector, x += x_by, to += to_by) copy_to_shared<16>(to, x);
    } else {
#pragma unroll 8
      for (; k < end; ++k, x += x_by, to += to_by) copy_to_shared<sizeof(E)>(to, x);
    }
  }

  // By steps: calls f(s, x, thread) for the vectors of kVector elements that this thread moves, at the step s
  // of the tile, which is one of `thread`. x: where the vector starts in global memory.
  template <int kVector, typename E, class G>
  __device__ __forceinline__ void for_each_vector(const Place& place, const ScanOperand<E>& operand,
                                                  const G& f) const {
    const int steps = min(plan_.threads * kVector, plan_.tile_steps);  // that the threads have of a channel
    const int threads = steps / kVector, first = (thread_ & (threads - 1)) * kVector;
    const int last = operand.step < 0 ? kVector - 1 : 0;  // where a vector starts
    const int64_t by = steps * operand.step;
    const int threads_later = steps / kSteps << plan_.width_bits;  // steps is a multiple of kSteps
    for (int c = thread_ / threads; c < place.channels; c += plan_.threads / threads) {
      E* x = operand.data + (place.first_channel + c) * operand.strides[0] +
             (place.first_step + first + last) * operand.step;
      unsigned thread = (first / kSteps << plan_.width_bits) + c;
#pragma unroll 4
      for (int s = first; s < place.steps; s += steps, x += by, thread += threads_later) f(s, x, thread);
    }
  }

  template <typename E>
  __device__ __forceinline__ void empty(const Place& place, E* data, const ScanOperand<E>& operand,
                                        TileMove move) const {
    const auto values = values_of(data, operand, move);
    if (move == TileMove::kStepVectors) {
      constexpr int kVector = kVecWidth<E>;
      using V = Vec<E, kVector>;
      for_each_vector<kVector>(place, operand, [&](int s, E* x, unsigned thread) {
        *reinterpret_cast<V*>(x) =
            *reinterpret_cast<const V*>(values.vector_at(thread, s % kSteps / kVector));
      });
    } else if (move == TileMove::kStepElements) {
      for_each_vector<1>(place, operand,
                         [&](int s, E* x, unsigned thread) { *x = values.at(thread, s % kSteps); });
    }
  }

  // ---- A tile

  // A bit a step of the thread that is a reset, and before them one for the step before.
  __device__ __forceinline__ uint64_t resets_at(const Channel& x, int64_t first, int count) const {
    uint64_t resets = 0;
    if (!scan_.reset.data) return resets;
#pragma unroll 8
    for (int k = -1; k < kSteps; ++k) {
      if (k >= 0 ? k < count : kBackward && count > 0 && first > 0) {
        resets |= static_cast<uint64_t>(x.reset[k * scan_.reset.step]) << (k + 1);
      }
    }
    return resets;
  }

  // What the first of the thread's steps reads of a, and the last one of h, where these are left unshifted.
  struct Edges {
    C a;
    T h;
  };
  // x: at the thread's first step.
  __device__ __forceinline__ Edges edges_of(const Channel& x, int64_t first, int count) const {
    Edges edges = {};
    if (!kBackward || count == 0) return edges;
    if (is_unshifted(moves_.a) && first > 0) {
      edges.a = row_ > 0 ? of_a().at(thread_ - plan_.width, kSteps - 1) : x.a[-scan_.a.step];
    }
    if (x.h && is_unshifted(moves_.h) && first + kSteps < scan_.steps) {
      edges.h = row_ < rows_ - 1 ? of_h().at(thread_ + plan_.width, 0) : x.h[kSteps * scan_.h.step];
    }
    return edges;
  }

  // Makes those of the thread's steps that do not exist leave the state as it is, and h before the first step
  // of forward the initial state.
  __device__ __forceinline__ void complete(const Channel& x, int64_t first, int count, Edges& edges) const {
    const int64_t last = scan_.steps - 1 - first;  // which of the thread's steps is the last of all
    if (kBackward && x.h && 0 <= last && last < count) {
      const int at = static_cast<int>(last) + is_unshifted(moves_.h);
      const T before_all = scan_.before_all(x);
      if (at < kSteps) of_h().at(thread_, at) = before_all;
      edges.h = before_all;
    }
    for (int k = count; k < kSteps; ++k) {
      set_one(of_a().at(thread_, k));
      of_b().at(thread_, k) = T{};
    }
  }

  // The steps from k on. before: the a of the step before them, and then that of their last step.
  __device__ __forceinline__ void read_a(int k, int count, C& before, C (&a)[kAtOnce]) const {
    of_a().read(thread_, k, a);
    if (!kBackward || !is_unshifted(moves_.a)) return;
    C one;
    set_one(one);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const C own = a[i];
      a[i] = k + i < count ? before : one;
      before = own;
    }
  }
  __device__ __forceinline__ void read_h(int k, T edge, T (&h)[kAtOnce]) const {
    of_h().read(thread_, k, h);
    if (!is_unshifted(moves_.h)) return;
#pragma unroll
    for (int i = 0; i + 1 < kAtOnce; ++i) h[i] = h[i + 1];
    h[kAtOnce - 1] = k + kAtOnce < kSteps ? of_h().at(thread_, k + kAtOnce) : edge;
  }

  // The thread's steps as a function.
  template <bool kResets>
  __device__ __forceinline__ F reduced(const Edges& edges, uint64_t forgets, int count) const {
    F mine = F::identity();
    C before = edges.a;
#pragma unroll 2
    for (int k = 0; k < kSteps; k += kAtOnce) {
      C a[kAtOnce];
      T b[kAtOnce];
      read_a(k, count, before, a);
      of_b().read(thread_, k, b);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const W factor = to_wide(kResets && (forgets >> (k + i) & 1) ? A{} : scan_.factor(a[i]));
        mine = {multiply(factor, mine.a), multiply_add(factor, mine.b, to_wide(widen(b[i])))};
      }
    }
    if (is_zero(mine.a)) mine.a = without_underflow(mine.a, (kResets && forgets) || has_zero(edges, count));
    if (kResets && forgets) mark_reset(mine.a);
    return mine;
  }
  __device__ __forceinline__ bool has_zero(const Edges& edges, int count) const {
    bool found = false;
    C before = edges.a;
    for (int k = 0; k < kSteps; k += kAtOnce) {
      C a[kAtOnce];
      read_a(k, count, before, a);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) found = found || is_zero(scan_.factor(a[i]));
    }
    return found;
  }

  // Runs the thread's `count` steps from the state h, and returns the last state. resets: a bit a step, which
  // is a reset itself. x: at the first.
  template <bool kResets>
  __device__ __forceinline__ A run_steps(const Channel& x, const Edges& edges, uint64_t resets,
                                         uint64_t forgets, int count, A h) const {
    const bool has_grad_a = kBackward && x.h;
    C a_before = edges.a;
    T* result = x.result;
    C* grad_a = x.grad_a;
#pragma unroll 2
    for (int k = 0; k < kSteps; k += kAtOnce) {
      C a[kAtOnce];
      T b[kAtOnce], before[kAtOnce];
      read_a(k, count, a_before, a);
      of_b().read(thread_, k, b);
      if (has_grad_a) read_h(k, edges.h, before);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        h = advance(scan_.factor(a[i]), widen(b[i]), kResets && (forgets >> (k + i) & 1), h);
        b[i] = narrow<T>(h);
        if (has_grad_a) {
          a[i] = scan_.gradient_of_a(h, widen(before[i]), kResets && (resets >> (k + i) & 1));
        }
      }
      write(buffer_.b, result, k, count, b, scan_.result, moves_.result);
      if (has_grad_a) write(buffer_.a, grad_a, k, count, a, scan_.grad_a, moves_.grad_a);
    }
    return h;
  }
  // The steps from k on of `count`. x: where the step k is in global memory; it is moved to the next ones.
  template <typename E>
  __device__ __forceinline__ void write(E* data, E*& x, int k, int count, const E (&values)[kAtOnce],
                                        const ScanOperand<E>& operand, TileMove move) const {
    if (is_by_steps(move)) return values_of(data, operand, move).write(thread_, k, values);
    if (k + kAtOnce <= count) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, x += operand.step) *x = values[i];
    } else {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, x += operand.step) {
        if (k + i < count) *x = values[i];
      }
    }
  }
  __device__ __forceinline__ void run_tile(const Place& place) {
    const int width = plan_.width, in_tile = row_ * kSteps;
    const int64_t first = place.first_step + in_tile;
    const int count = column_ < place.channels ? clamped(place.steps - in_tile, 0, kSteps) : 0;
    const Channel x = scan_.moved(place.channel, in_tile);
    const uint64_t resets = resets_at(x, first, count);
    const uint64_t forgets = (kBackward ? resets | (first == 0) : resets >> 1) & ((uint64_t{1} << count) - 1);
    const int64_t last = scan_.steps - 1 - first;
    Edges edges = edges_of(x, first, count);
    complete(x, first, count, edges);

    F mine = forgets ? reduced<true>(edges, forgets, count) : reduced<false>(edges, 0, count);
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
    W state = to_wide(scan_.before_first(x));
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
      now = resets | forgets ? run_steps<true>(x, edges, resets >> 1, forgets, count, now)
                             : run_steps<false>(x, edges, 0, 0, count, now);
      if (in_turn) shared_.state[column_] = to_wide(now);
      if (kBackward && 0 <= last && last < count) {
        scan_.store_grad_initial(scan_.moved(x, last), now, resets >> (last + 1) & 1);
      }
    }
    if (in_turn) {
      __syncthreads();
      if (is_head && has_next) {
        const F whole_state = F::constant(shared_.state[column_]);
        look_back.publish(whole_state);
        look_back.publish_state(whole_state);
      }
    }
    const bool has_grad_a = kBackward && x.h;
    if (!is_by_steps(moves_.result) && !(has_grad_a && is_by_steps(moves_.grad_a))) return;
    __syncthreads();
    empty(place, buffer_.b, scan_.result, moves_.result);
    if (has_grad_a) empty(place, buffer_.a, scan_.grad_a, moves_.grad_a);
  }

  const Scan& scan_;
  const ScanPlan& plan_;
  const TileLinks<F>& links_;
  const TileMoves& moves_;
  const uint32_t blocks_, tiles_;  // how many there are
  const TileBuffer<Scan> buffer_;
  const TileShared<Scan> shared_;
  const int thread_, rows_, row_, column_;
  uint32_t taken_;  // the number of the tile that the block has next, less one
  int depth_;       // LookBack::before
};

}  // namespace lltm_ext
