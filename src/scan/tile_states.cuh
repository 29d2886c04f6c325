// From the functions of the steps of a tile's threads to the states before them.
//
// The threads of a block are in rows, of one thread for each channel of the tile; a row has some successive
// steps. The block combines the functions of its rows, finds the state before the tile (look_back.cuh), and
// from it the one before each row. Where a function may lose what a loop over the steps would find, the rows
// run one after the other, and later tiles see the state after them.
#pragma once

#include "scan/look_back.cuh"

namespace lltm_ext {

// Of a block with some number of threads.
template <class F>
struct TileStatesShared {
  F* units;                  // [units, width]: units of rows as functions
  typename F::State* state;  // [width]: where rows take turns
  LookBackShared<F> look_back;

  // For each thread.
  static constexpr int kBytes = sizeof(F) + sizeof(typename F::State) + LookBackShared<F>::kBytes;
  __device__ __forceinline__ TileStatesShared(char* memory, int threads)
      : units(reinterpret_cast<F*>(memory)),
        state(reinterpret_cast<typename F::State*>(units + threads)),
        look_back(reinterpret_cast<char*>(state + threads), threads) {}
};

// A thread's place in its tile, and the tile's among those of its channels.
struct TileThread {
  int64_t group, tile, tiles;
  int width, width_bits, rows;  // a power of two, and its exponent
  int row, column;
  int depth;  // LookBack::before
};

// Calls run(state) with the state before the thread's steps; run returns the one after them. mine: the
// thread's steps as a function. initial: the state before all steps. All threads of the block call this
// together, and `meanwhile` when the state before the tile is known.
template <class F, class Run, class Meanwhile>
__device__ __forceinline__ void run_tile_from_states(const TileLinks<F>& links,
                                                     const TileStatesShared<F>& shared, const TileThread& at,
                                                     F mine, typename F::State initial, Run&& run,
                                                     Meanwhile&& meanwhile) {
  // Where a warp has several rows: the functions of the rows before this one, and with it.
  constexpr int kWarp = 32;
  const int width = at.width, lane = static_cast<int>(threadIdx.x) % kWarp;
  F before = F::identity();
  if (width < kWarp) {
    for (int lanes = width; lanes < kWarp; lanes *= 2) {
      const F earlier = shuffle_up(mine, lanes);
      if (lane >= lanes) mine = then(earlier, mine);
    }
    const F earlier = shuffle_up(mine, width);
    if (lane >= width) before = earlier;
  }
  // A unit is the rows of a warp, or one row.
  const int unit_rows = larger(1, kWarp >> at.width_bits), units = at.rows / unit_rows,
            unit = at.row / unit_rows;
  bool reliable = is_reliable(mine);
  if (at.row % unit_rows == unit_rows - 1) shared.units[unit * width + at.column] = mine;
  __syncthreads();
  const bool is_head = at.row == 0, has_next = at.tile + 1 < at.tiles;
  F whole = F::identity();
  if (is_head && has_next) {
    F parts[kSegmentTiles];
#pragma unroll
    for (int i = 0; i < kSegmentTiles; ++i) {
      parts[i] = i < units ? shared.units[i * width + at.column] : F::identity();
    }
    whole = composed(parts);
    reliable = reliable && is_reliable(whole);
  }
  const bool in_turn = __syncthreads_or(!reliable);

  LookBack<F> look_back(links, shared.look_back, at.group, at.tile, at.tiles, width, at.row, at.column);
  if (is_head && has_next && !in_turn) look_back.publish(whole);
  typename F::State state = initial;
  if (at.tile > 0) state = look_back.before(state, at.depth);
  meanwhile();
  if (!in_turn) {
    if (is_head && has_next) look_back.publish_state(whole);
#pragma unroll 1
    for (int i = 0; i < unit; ++i) state = apply(shared.units[i * width + at.column], state);
  } else if (is_head) {
    shared.state[at.column] = state;
  }
  for (int turn = 0; turn < (in_turn ? at.rows : 1); ++turn) {
    if (in_turn) __syncthreads();
    if (in_turn && turn != at.row) continue;
    state = run(in_turn ? shared.state[at.column] : apply(before, state));
    if (in_turn) shared.state[at.column] = state;
  }
  if (!in_turn) return;
  __syncthreads();
  if (is_head && has_next) {
    const F whole_state = F::constant(shared.state[at.column]);
    look_back.publish(whole_state);
    look_back.publish_state(whole_state);
  }
}

}  // namespace lltm_ext
