// How the blocks that have successive tiles of the same channels find the state before their tile.
//
// A block publishes its tile as a function of the state before it (F; affine.cuh has scan's). Tiles are in
// segments of eight, and the block of a segment's last tile publishes the state after it too. So a block
// starts from the nearest such state, and applies to it the segments in between and the part of its own
// segment before it. Its threads compose the functions of these segments at once.
//
// Every state is found in the same way wherever one starts, so the result does not depend on when blocks run.
// What is not published yet has all bits set in memory, so there are no flags, and no fence.
#pragma once

#include "common/portable.h"
#include "common/ptx.cuh"

namespace lltm_ext {

constexpr int kSegmentTiles = 8;

// What blocks tell each other, in memory whose bits are all set at first. Empty if no tile follows another.
template <class F>
struct TileLinks {
  F* parts;           // [groups, tiles, width]: tiles as functions
  F* after;           // [groups, segments, width]: the states after segments, as functions
  unsigned* started;  // how many tiles blocks have taken, less one

  LLTM_HOST_DEVICE static int64_t segments(int64_t tiles) { return ceil_div(tiles, kSegmentTiles); }
  static int64_t bytes(int64_t groups, int64_t tiles, int width) {
    if (tiles < 2) return 0;
    return groups * (tiles + segments(tiles)) * width * static_cast<int64_t>(sizeof(F)) + sizeof(unsigned);
  }
  LLTM_HOST_DEVICE static TileLinks in(void* memory, int64_t groups, int64_t tiles, int width) {
    if (tiles < 2) return {};
    auto* const parts = static_cast<F*>(memory);
    F* const after = parts + groups * tiles * width;
    return {parts, after, reinterpret_cast<unsigned*>(after + groups * segments(tiles) * width)};
  }
};

// A function as it is read and written.
template <class F>
union PublishedWords {
  static constexpr int kPairs = sizeof(F) / sizeof(Uint64Pair);
  static_assert(sizeof(F) % sizeof(Uint64Pair) == 0);
  Uint64Pair pairs[kPairs];
  F f;
};

// Reads f, if it is published.
template <class F>
__device__ __forceinline__ bool read_published(const F* from, F& f) {
  PublishedWords<F> read;
  bool is_there = true;
#pragma unroll
  for (int i = 0; i < PublishedWords<F>::kPairs; ++i) {
    const Uint64Pair pair = ld_relaxed_gpu_u64_pair(reinterpret_cast<const Uint64Pair*>(from) + i);
    read.pairs[i] = pair;
    is_there = is_there && pair.x != ~uint64_t{0} && pair.y != ~uint64_t{0};
  }
  if (is_there) f = read.f;
  return is_there;
}
template <class F>
__device__ __forceinline__ void publish(F* to, const F& f) {
  PublishedWords<F> written;
  written.f = f.with_plain_nans();
#pragma unroll
  for (int i = 0; i < PublishedWords<F>::kPairs; ++i) {
    st_relaxed_gpu(reinterpret_cast<Uint64Pair*>(to) + i, written.pairs[i]);
  }
}

// The tiles of a segment before the last one, composed as far as a tree of all eight does.
template <class F>
struct SegmentStart {
  F four, two, one;

  SegmentStart() = default;
  __device__ __forceinline__ explicit SegmentStart(const F (&tiles)[kSegmentTiles])
      : four(then(then(tiles[0], tiles[1]), then(tiles[2], tiles[3]))),
        two(then(tiles[4], tiles[5])),
        one(tiles[6]) {}
  __device__ __forceinline__ F with(const F& last) const { return then(four, then(two, then(one, last))); }
};
static_assert(kSegmentTiles == 8);

// The functions of a segment one after the other.
template <class F>
__device__ __forceinline__ F composed(const F (&tiles)[kSegmentTiles]) {
  return SegmentStart<F>(tiles).with(tiles[kSegmentTiles - 1]);
}

// Of a block with some number of threads: [segments, width], and [width].
template <class F>
struct LookBackShared {
  F* segments;                // as functions
  typename F::State* states;  // before the segments
  bool* is_known;             // whether the state before a segment is
  typename F::State* before;  // the tile

  static constexpr int kBytes = sizeof(F) + 2 * sizeof(typename F::State) + sizeof(bool);  // for each thread
  __device__ __forceinline__ LookBackShared(char* memory, int threads)
      : segments(reinterpret_cast<F*>(memory)),
        states(reinterpret_cast<typename F::State*>(segments + threads)),
        is_known(reinterpret_cast<bool*>(states + 2 * threads)),
        before(states + threads) {}
};

// A tile among those of its channels. All threads of a block call each function together.
template <class F>
class LookBack {
  using State = typename F::State;
  using Shared = LookBackShared<F>;

 public:
  // row, column: the thread's place among those of its channel, and its channel in the tile.
  __device__ __forceinline__ LookBack(const TileLinks<F>& links, const Shared& shared, int64_t group,
                                      int64_t tile, int64_t tiles, int width, int row, int column)
      : shared_(shared),
        parts_(links.parts + group * tiles * width + column),
        after_(links.after + group * TileLinks<F>::segments(tiles) * width + column),
        tile_(tile),
        width_(width),
        row_(row),
        column_(column) {}

  // By the threads of row 0: tells later tiles this one as a function.
  __device__ __forceinline__ void publish(const F& part) const {
    lltm_ext::publish(parts_ + tile_ * width_, part);
  }

  // The state before the tile, given that before all. depth: in how many segments, at most as many as there
  // are rows, a known state is looked for; the one before the last of them is waited for.
  __device__ __forceinline__ State before(const State& initial, int depth) {
    if (row_ < depth) read_segment(initial, row_ + 1 == depth);
    __syncthreads();
    if (row_ == 0) shared_.before[column_] = state_before();
    __syncthreads();
    return shared_.before[column_];
  }

  // By the threads of row 0, after `before`: if the tile is the last of its segment, tells the state after
  // it.
  __device__ __forceinline__ void publish_state(const F& part) {
    if (tile_ % kSegmentTiles != kSegmentTiles - 1) return;
    const F whole = start_.with(part);
    const State state = is_reliable(whole) ? apply(whole, base_) : apply(part, in_turn(0, base_));
    lltm_ext::publish(after_ + tile_ / kSegmentTiles * width_, F::constant(state));
  }

 private:
  // Waits for the parts of the row's segment before the tile, and for the state before it, if `must_know`.
  __device__ __forceinline__ void read_segment(const State& initial, bool must_know) {
    const int64_t segment = tile_ / kSegmentTiles - row_, first = segment * kSegmentTiles;
    if (segment < 0) return;  // the state before the first one is known
    F parts[kSegmentTiles], state = F::constant(initial);
    unsigned missing = 0;  // a bit a part
#pragma unroll
    for (int i = 0; i < kSegmentTiles; ++i) {
      parts[i] = F::identity();
      if (first + i < tile_) missing |= 1u << i;
    }
    bool is_known = segment == 0;
    for (;;) {
      if (!is_known) is_known = read_published(after_ + (segment - 1) * width_, state);
#pragma unroll
      for (int i = 0; i < kSegmentTiles; ++i) {
        const bool is_missing = missing >> i & 1;
        if (is_missing && read_published(parts_ + (first + i) * width_, parts[i])) missing ^= 1u << i;
      }
      if (!missing && (is_known || !must_know)) break;
      __nanosleep(100);  // what blocks poll takes bandwidth from those that copy
    }
    start_ = SegmentStart<F>(parts);
    const int at = row_ * width_ + column_;
    shared_.segments[at] = start_.with(parts[kSegmentTiles - 1]);
    shared_.states[at] = state.b;
    shared_.is_known[at] = is_known;
  }

  // From the nearest known state.
  __device__ __forceinline__ State state_before() {
    int back = 0;
    while (!shared_.is_known[back * width_ + column_]) ++back;
    State state = shared_.states[back * width_ + column_];
#pragma unroll 1
    for (; back >= 0; --back) {
      base_ = state;
      const F whole = shared_.segments[back * width_ + column_];
      state = is_reliable(whole) ? apply(whole, state) : in_turn(back, state);
    }
    return state;
  }
  // Applies the functions of the tiles of a segment before this one.
  __device__ __forceinline__ State in_turn(int back, State state) const {
    const int64_t first = (tile_ / kSegmentTiles - back) * kSegmentTiles;
#pragma unroll 1
    for (int64_t i = first; i < first + kSegmentTiles && i < tile_; ++i) {
      F part;
      read_published(parts_ + i * width_, part);
      state = apply(part, state);
    }
    return state;
  }

  const Shared& shared_;
  F *const parts_, *const after_;
  const int64_t tile_;
  const int width_, row_, column_;
  State base_ = {};        // before the tile's segment
  SegmentStart<F> start_;  // of that segment, in row 0
};

}  // namespace lltm_ext
