// The scan of few channels, or of few steps: time is divided too.
//
// A block takes tiles of some channels and steps, one after the other; while it waits, other blocks of the
// multiprocessor run theirs. Each of its threads reads some successive steps of one channel to registers and
// reduces them to an affine function of the state before them. The block combines these functions into the
// tile's, finds the state before the tile (look_back.cuh), and from it the one before each thread's steps.
// Then the threads run their steps.
//
// Where coefficients grow, or are not finite, a function may lose what a loop over the steps would find. In
// such a tile the threads run their steps one after the other, and later tiles see the state after it.
#pragma once

#include "common/vec.cuh"
#include "scan/affine.cuh"
#include "scan/tile_states.cuh"

namespace lltm_ext {

// How a tile's values of an operand move between memory and registers. The lanes of a warp have the same step
// of adjacent channels, so where adjacent steps are neighbours in memory, values go through shared memory.
enum class TileMove : int8_t { kDirect, kStagedElements, kStagedVectors };

template <class Scan>
struct TileMoves {
  TileMove a, b, h, result, grad_a;

  explicit TileMoves(const Scan& scan)
      : a(of(scan, scan.a)),
        b(of(scan, scan.b)),
        h(of(scan, scan.h)),
        result(of(scan, scan.result)),
        grad_a(of(scan, scan.grad_a)) {}

  LLTM_HOST_DEVICE bool has_stages() const {
    return a != TileMove::kDirect || b != TileMove::kDirect || h != TileMove::kDirect ||
           result != TileMove::kDirect || grad_a != TileMove::kDirect;
  }

 private:
  template <typename E>
  static TileMove of(const Scan& scan, const ScanOperand<E>& x) {
    constexpr int kVector = kVecWidth<E>;
    const bool forward = x.step == 1, backward = x.step == -1;
    if (!x.data || scan.channels.dims > 1 || scan.steps == 1 || !(forward || backward))
      return TileMove::kDirect;
    const auto* first = x.data - (backward ? kVector - 1 : 0);
    const bool has_vectors =
        scan.steps % kVector == 0 && x.strides[0] % kVector == 0 && is_vec_aligned(first);
    return has_vectors ? TileMove::kStagedVectors : TileMove::kStagedElements;
  }
};

// What of a tile is in shared memory: kSteps of type E a thread, of which 16 bytes are a vector. Each thread
// has its vectors in an order of its own, so that the threads of a warp use all banks at once.
template <typename E, int kSteps>
struct TileStage {
  static constexpr int kVector = kVecWidth<E>, kVectors = kSteps / kVector;
  static constexpr int kOrders = kVectors < 8 ? kVectors : 8;  // 8 vectors are all banks

  LLTM_HOST_DEVICE static int bytes(int threads) { return threads * kSteps * static_cast<int>(sizeof(E)); }
  // The place of a thread's vector, and of the step k.
  __device__ __forceinline__ static unsigned vector_at(unsigned thread, unsigned vector) {
    return thread * kSteps + (vector ^ (thread * kVectors / 8 & (kOrders - 1))) * kVector;
  }
  __device__ __forceinline__ static unsigned at(unsigned thread, unsigned k, bool reversed) {
    const unsigned i = k % kVector;
    return vector_at(thread, k / kVector) + (reversed ? kVector - 1 - i : i);
  }
  // `reversed`: later steps come first in memory.
  __device__ __forceinline__ static void read(const E* stage, int thread, bool reversed,
                                              E (&values)[kSteps]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const auto x = *reinterpret_cast<const Vec<E, kVector>*>(stage + vector_at(thread, v));
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const E first = x.data[i], last = x.data[kVector - 1 - i];
        values[v * kVector + i] = reversed ? last : first;
      }
    }
  }
  __device__ __forceinline__ static void write(E* stage, int thread, bool reversed,
                                               const E (&values)[kSteps]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Vec<E, kVector> x;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const E first = values[v * kVector + i], last = values[v * kVector + kVector - 1 - i];
        x.data[i] = reversed ? last : first;
      }
      *reinterpret_cast<Vec<E, kVector>*>(stage + vector_at(thread, v)) = x;
    }
  }
};

// The stages of a block. Backward, the gradient of a replaces it; the results replace b.
template <class Scan>
struct TileStages {
  using OfA = TileStage<typename Scan::C, kScanSteps<Scan>>;
  using OfB = TileStage<typename Scan::T, kScanSteps<Scan>>;  // and of h
  typename Scan::C* a;
  typename Scan::T *b, *h;

  LLTM_HOST_DEVICE static int bytes(int threads) {
    return OfA::bytes(threads) + OfB::bytes(threads) * (Scan::kBackward ? 2 : 1);
  }
  __device__ __forceinline__ TileStages(char* memory, int threads)
      : a(reinterpret_cast<typename Scan::C*>(memory)),
        b(reinterpret_cast<typename Scan::T*>(memory + OfA::bytes(threads))),
        h(b + threads * kScanSteps<Scan>) {}
};

// The shared memory of a block, besides the stages.
template <class Scan>
struct TileShared {
  using OfStates = TileStatesShared<Affine<wide_t<Scan>>>;
  OfStates states;
  uint32_t* number;  // of the block's tile

  LLTM_HOST_DEVICE static int bytes(int threads) {
    const int of_all = threads * OfStates::kBytes + static_cast<int>(sizeof(*number));
    return static_cast<int>(ceil_div(of_all, 16)) * 16;
  }
  __device__ __forceinline__ TileShared(char* memory, int threads)
      : states(memory, threads), number(reinterpret_cast<uint32_t*>(memory + threads * OfStates::kBytes)) {}
};

template <class Scan>
int tile_shared_bytes(int threads, const TileMoves<Scan>& moves) {
  return TileShared<Scan>::bytes(threads) + (moves.has_stages() ? TileStages<Scan>::bytes(threads) : 0);
}

// shared_bytes: the most that a block may have.
template <class Scan>
ScanPlan plan_of(const Scan& scan, const TileMoves<Scan>& moves, int shared_bytes) {
  int threads = kScanThreads<Scan>;
  while (tile_shared_bytes(threads, moves) > shared_bytes) threads /= 2;
  return plan_scan(scan.steps, scan.channels.count, threads, kScanSteps<Scan>);
}

// A tile, and what of it exists.
struct TilePlace {
  int64_t group, tile, first_channel, first_step;
  int steps, channels;
};

template <class Scan>
class TiledScan {
  using A = typename Scan::A;
  using T = typename Scan::T;
  using C = typename Scan::C;
  using W = wide_t<Scan>;
  using F = Affine<W>;
  using Channel = typename Scan::Channel;
  using Stages = TileStages<Scan>;
  static constexpr int kSteps = kScanSteps<Scan>;
  static constexpr bool kBackward = Scan::kBackward;

 public:
  // memory: tile_shared_bytes.
  __device__ __forceinline__ TiledScan(const Scan& scan, const ScanPlan& plan, const TileLinks<F>& links,
                                       const TileMoves<Scan>& moves, unsigned blocks, char* memory)
      : scan_(scan),
        plan_(plan),
        links_(links),
        moves_(moves),
        blocks_(blocks),
        tiles_(static_cast<uint32_t>(plan.blocks())),
        shared_(memory, plan.threads),
        stages_(memory + TileShared<Scan>::bytes(plan.threads), plan.threads),
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
      __syncthreads();  // and what the threads have in stages is written to memory
      const uint32_t number = *shared_.number;
      if (number >= tiles_) return;
      const TilePlace place = place_of(number);
      if (moves_.has_stages()) fill_stages(place);
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

  __device__ __forceinline__ TilePlace place_of(uint32_t number) const {
    TilePlace place;
    place.tile = number / static_cast<uint32_t>(plan_.groups);
    place.group = number - place.tile * plan_.groups;
    place.first_channel = place.group << plan_.width_bits;
    place.first_step = place.tile << plan_.tile_bits;
    place.channels = static_cast<int>(min(scan_.channels.count - place.first_channel, int64_t{plan_.width}));
    place.steps = static_cast<int>(min(scan_.steps - place.first_step, int64_t{plan_.tile_steps}));
    return place;
  }

  // ---- Between memory and stages

  // Calls f(x, at) for the vectors of kVector elements of a tile that this thread moves: at x in memory, and
  // in the stage.
  template <int kVector, typename E, class G>
  __device__ __forceinline__ void for_each_vector(const TilePlace& place, const ScanOperand<E>& operand,
                                                  const G& f) const {
    using Stage = TileStage<std::remove_const_t<E>, kSteps>;
    const bool reversed = operand.step < 0;
    const int bits = plan_.tile_bits - kBits<kVector>, of_all = place.channels << bits;
    E* const data = operand.data + place.first_channel * operand.strides[0] +
                    place.first_step * operand.step - (reversed ? kVector - 1 : 0);
    // The stage's vector starts where its last step is, if steps are reversed.
    const int within = reversed ? kVector - 1 : 0;
#pragma unroll 4
    for (int i = thread_; i < of_all; i += plan_.threads) {
      const unsigned c = i >> bits, s = (i & ((1 << bits) - 1)) * kVector;
      if (s >= place.steps) continue;
      const unsigned thread = (s / kSteps << plan_.width_bits) + c;
      f(data + c * operand.strides[0] + s * operand.step, Stage::at(thread, s % kSteps + within, reversed));
    }
  }
  template <int kVector>
  static constexpr int kBits = kVector == 8 ? 3 : kVector / 2;

  __device__ __forceinline__ void fill_stages(const TilePlace& place) const {
    fill(place, stages_.a, scan_.a, moves_.a);
    fill(place, stages_.b, scan_.b, moves_.b);
    if (kBackward) fill(place, stages_.h, scan_.h, moves_.h);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
  }
  template <typename E>
  __device__ __forceinline__ void fill(const TilePlace& place, E* to, const ScanOperand<const E>& operand,
                                       TileMove move) const {
    if (move == TileMove::kStagedVectors) {
      for_each_vector<kVecWidth<E>>(place, operand,
                                    [&](const E* x, int at) { copy_to_shared<16>(to + at, x); });
    } else if (move == TileMove::kStagedElements) {
      for_each_vector<1>(place, operand, [&](const E* x, int at) { copy_to_shared<sizeof(E)>(to + at, x); });
    }
  }
  template <typename E>
  __device__ __forceinline__ void empty(const TilePlace& place, const E* from, const ScanOperand<E>& operand,
                                        TileMove move) const {
    if (move == TileMove::kStagedVectors) {
      using V = Vec<E, kVecWidth<E>>;
      for_each_vector<kVecWidth<E>>(place, operand, [&](E* x, int at) {
        *reinterpret_cast<V*>(x) = *reinterpret_cast<const V*>(from + at);
      });
    } else if (move == TileMove::kStagedElements) {
      for_each_vector<1>(place, operand, [&](E* x, int at) { *x = from[at]; });
    }
  }

  // ---- Between memory, or stages, and registers

  // What the thread's steps read. Backward, the results replace a and b.
  struct Steps {
    C a[kSteps];
    T b[kSteps], h[kBackward ? kSteps : 1];
  };

  // The operand at the steps [begin, end) of the thread, each one read kLater steps later; `other` for those
  // that do not exist. x: at the thread's first.
  template <int kLater, typename E>
  __device__ __forceinline__ void read(const E* x, const ScanOperand<const E>& operand, TileMove move,
                                       const E* stage, int begin, int end, E other,
                                       E (&values)[kSteps]) const {
    x += kLater * operand.step;
    if (move != TileMove::kDirect) {
      E own[kSteps];
      TileStage<E, kSteps>::read(stage, thread_, operand.step < 0, own);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        E value = other;
        if (begin <= k && k < end) {
          const bool is_own = 0 <= k + kLater && k + kLater < kSteps;
          value = is_own ? own[(k + kLater + kSteps) % kSteps] : x[k * operand.step];
        }
        values[k] = value;
      }
    } else if (begin == 0 && end == kSteps) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k, x += operand.step) values[k] = *x;
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k, x += operand.step) {
        E value = other;
        if (begin <= k && k < end) value = *x;
        values[k] = value;
      }
    }
  }
  template <typename E>
  __device__ __forceinline__ void write(E* x, const ScanOperand<E>& operand, TileMove move, E* stage,
                                        int count, const E (&values)[kSteps]) const {
    if (move != TileMove::kDirect) {
      TileStage<E, kSteps>::write(stage, thread_, operand.step < 0, values);
    } else if (count == kSteps) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k, x += operand.step) *x = values[k];
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k, x += operand.step) {
        if (k < count) *x = values[k];
      }
    }
  }

  // x: at the first of the thread's `count` steps. Those after them leave the state as it is. last: which of
  // them is the last of all; before it, h is the initial state.
  __device__ __forceinline__ void read(const Channel& x, int64_t first, int count, int64_t last,
                                       Steps& steps) const {
    C one;
    set_one(one);
    read<kBackward ? -1 : 0>(x.a, scan_.a, moves_.a, stages_.a, kBackward && first == 0, count, one, steps.a);
    read<0>(x.b, scan_.b, moves_.b, stages_.b, 0, count, T{}, steps.b);
    if constexpr (kBackward) {
      if (!x.h) return;
      const int end = static_cast<int>(min(last, int64_t{count}));
      read<1>(x.h, scan_.h, moves_.h, stages_.h, 0, end, last < count ? scan_.before_all(x) : T{}, steps.h);
    }
  }

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

  // ---- A tile

  // The thread's steps as a function.
  template <bool kResets>
  __device__ __forceinline__ F reduced(const Steps& steps, uint64_t forgets) const {
    F mine = F::identity();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const W factor = to_wide(kResets && (forgets >> k & 1) ? A{} : scan_.factor(steps.a[k]));
      mine = {multiply(factor, mine.a), multiply_add(factor, mine.b, to_wide(widen(steps.b[k])))};
    }
    if (is_zero(mine.a)) {
      bool any_zero = kResets && forgets;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) any_zero = any_zero || is_zero(scan_.factor(steps.a[k]));
      mine.a = without_underflow(mine.a, any_zero);
    }
    if (kResets && forgets) mark_reset(mine.a);
    return mine;
  }

  // Runs the thread's steps from the state h, and returns the last state. resets: a bit a step, which is a
  // reset itself.
  template <bool kResets>
  __device__ __forceinline__ A run_steps(Steps& steps, uint64_t resets, uint64_t forgets, A h) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      h = advance(scan_.factor(steps.a[k]), widen(steps.b[k]), kResets && (forgets >> k & 1), h);
      steps.b[k] = narrow<T>(h);
      if constexpr (kBackward) {
        steps.a[k] = scan_.gradient_of_a(h, widen(steps.h[k]), kResets && (resets >> k & 1));
      }
    }
    return h;
  }

  __device__ __forceinline__ void run_tile(const TilePlace& place) {
    const int width = plan_.width, in_tile = row_ * kSteps;
    const int64_t first = place.first_step + in_tile;
    const int count = column_ < place.channels ? clamped(place.steps - in_tile, 0, kSteps) : 0;
    const Channel x =
        scan_.moved(scan_.channel(place.first_channel + min(column_, place.channels - 1)), first);
    const uint64_t resets = resets_at(x, first, count);
    const uint64_t forgets = (kBackward ? resets | (first == 0) : resets >> 1) & ((uint64_t{1} << count) - 1);
    const int64_t last = scan_.steps - 1 - first;
    Steps steps;
    read(x, first, count, last, steps);

    const F mine = forgets ? reduced<true>(steps, forgets) : reduced<false>(steps, 0);
    const TileThread at = {place.group, place.tile, plan_.tiles, width, plan_.width_bits,
                           rows_,       row_,       column_,     depth_};
    const auto run_from = [&](W state) {
      A now;
      from_wide(now, state);
      now = resets | forgets ? run_steps<true>(steps, resets >> 1, forgets, now)
                             : run_steps<false>(steps, 0, 0, now);
      if (kBackward && 0 <= last && last < count) {
        scan_.store_grad_initial(scan_.moved(x, last), now, resets >> (last + 1) & 1);
      }
      return to_wide(now);
    };
    // The next tile is taken while this one's steps run.
    run_tile_from_states(links_, shared_.states, at, mine, to_wide(scan_.before_first(x)), run_from,
                         [&] { take(); });
    write(x.result, scan_.result, moves_.result, stages_.b, count, steps.b);
    if constexpr (kBackward) {
      if (x.h) write(x.grad_a, scan_.grad_a, moves_.grad_a, stages_.a, count, steps.a);
    }
    if (!moves_.has_stages()) return;
    __syncthreads();
    empty(place, stages_.b, scan_.result, moves_.result);
    if (kBackward) empty(place, stages_.a, scan_.grad_a, moves_.grad_a);
  }

  const Scan& scan_;
  const ScanPlan& plan_;
  const TileLinks<F>& links_;
  const TileMoves<Scan>& moves_;
  const uint32_t blocks_, tiles_;  // how many there are
  const TileShared<Scan> shared_;
  const Stages stages_;
  const int thread_, rows_, row_, column_;
  uint32_t taken_;  // the number of the tile that the block has next, less one
  int depth_;       // LookBack::before
};

}  // namespace lltm_ext
