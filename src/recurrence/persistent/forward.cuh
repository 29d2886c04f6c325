// All steps of a sequence forward, in one kernel.
//
// Rows of the batch do not depend on each other, so the grid falls into groups of blocks that never meet: a
// group has some rows of the batch, and its blocks share out the hidden units. A block keeps the recurrent
// weights of its units on the chip for the whole sequence. In every step it multiplies them by the states of
// all units, as the group's blocks publish them (exchange.cuh), and publishes those of its own.
//
// The blocks of a group must run at the same time: the launch makes sure of it, or fails.
//
// A step takes about a microsecond, most of it instructions that wait for each other. So groups of one tile
// of rows have a loop of their own, with all that does not change from step to step in registers.
#pragma once

#include "recurrence/persistent/block.cuh"

namespace lltm_ext {

template <class Cell, class Math, class Product, Exchange kWay, int kUnitTiles, int kChunks, int kInRegisters,
          bool kGeneral>
class Forward {
  using T = typename Product::Type;
  static constexpr int kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;
  using Shape = BlockShape<T, kUnitTiles, kChunks>;
  static constexpr int kPairs = Shape::kPairsPerThread;
  static constexpr int kUnits = Shape::kUnits;
  using Exchanger =
      lltm_ext::Exchanger<kWay, T, 1, kChunks, kUnits, sharing_warps(kGeneral, kUnitTiles, kChunks, 1)>;
  using Weights = WarpWeights<kGates, kChunks, kInRegisters>;
  using Warp = WarpProduct<Product, kGates, 1, kChunks>;
  using Sums = TileSums<Shape, kGates>;
  using Ahead = Prefetcher<Shape, T, kGates + (kWay != Exchange::kCluster)>;

 public:
  using Memory = BlockMemory<Sums, Warp, Weights, Exchanger, kGeneral ? kUnits : 0>;
  static constexpr int kArchitecture = kWay == Exchange::kCluster ? 900 : 800;  // and above

  __device__ Forward(const SequenceForwardArguments<T>& sequence, const GridShape& grid, const Memory& memory)
      : s_(sequence),
        H_(sequence.hidden),
        place_(grid, sequence.steps.batch, H_),
        sums_(memory.sums()),
        scratch_(memory.scratch()),
        weights_(memory.weights()),
        cells_(memory.cells()),
        exchanger_(memory.exchanged(grid.rows), place_.in_group(grid, H_)) {
    load_weights<Product, Shape, kGates, kChunks>(
        weights_, place_, H_, static_cast<size_t>(8) * H_,
        [&](int gate, int unit) { return s_.weight + (static_cast<int64_t>(gate) * H_ + unit) * H_; });
    typename Ahead::template Adder<Place<Shape, kChunks>> adder(ahead_, place_, H_);
    adder.add(s_.gates, kGates);
    if (Exchanger::kThroughMemory) adder.add(s_.output, 1);
  }

  __device__ __forceinline__ void run() {
    if constexpr (kGeneral) {
      run_general();
    } else {
      run_dense();
    }
    exchanger_.finish();
  }

 private:
  // One tile of rows, and every step has all of the batch.
  __device__ __forceinline__ void run_dense() {
    const int batch = s_.steps.batch, length = s_.steps.length;
    const int64_t first = s_.steps.at(0).first, to_next = s_.steps.reverse ? -batch : batch;
    const int row = place_.first_row + place_.g;
    const bool has_row = row < place_.end_row;
    Source<T> source = {s_.h0 + static_cast<int64_t>(row) * H_ + place_.element, has_row ? place_.valid : 0,
                        false, place_.element, place_.g};
    const T* states = s_.output + (first + row) * H_ + place_.element;

    bool exists[kPairs];
    int64_t at[kPairs];  // of the pair in [N, 1, H]; in [N, G, H] its row counts G times
    T *gates[kPairs], *output[kPairs];
    float2 c[kPairs], h[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = place_.first_row + place_.pair_row(i), j = place_.first_unit + place_.pair_unit(i);
      exists[i] = place_.has_pair(i, H_) && b < place_.end_row;
      at[i] = static_cast<int64_t>(b) * H_ + j;
      gates[i] = s_.gates + (first + b) * kGates * H_ + j;
      output[i] = s_.output + (first + b) * H_ + j;
      c[i] = exists[i] ? read_pair(s_.c0 + at[i]).widen() : make_float2(0, 0);
      fetch(projections_[i], gates[i], exists[i] && length > 0);
    }
    for (int k = 0; k < length; ++k) {
      exchanger_.begin(source);
      float* const sums = sums_ + (k & 1) * Sums::kSize;
      float products[kGates][4] = {};
      multiply(products, source);
      Sums::write(sums, products, place_);
      __syncthreads();
      source.row = states;
      source.exchanged = true;
      states += to_next * H_;
      float saved[kPairs][2][Cell::kSaved];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (!warp_has_pair(i)) continue;
        h[i] = advance(sums, i, c[i], saved[i]);
        exchanger_.publish(output[i], h[i].x, h[i].y, exists[i], place_.pair_row(i), 0, place_.pair_unit(i));
      }
      if (k + 1 < length) exchanger_.flush();
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (!warp_has_pair(i)) continue;
        if (s_.extra && exists[i]) save(gates[i], s_.extra + (output[i] - s_.output) * kExtra, saved[i]);
        gates[i] += to_next * kGates * H_;
        output[i] += to_next * H_;
        fetch(projections_[i], gates[i], exists[i] && k + 1 < length);
      }
      ahead_.fetch(s_.steps.at(k + kStepsAhead), 0, place_.end_row);
      exchanger_.next();
      if (Exchanger::kThroughMemory) __syncthreads();  // who looks in vain is in the way of what he waits for
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!exists[i] || length == 0) continue;
      write_pair(s_.h_n + at[i], h[i].x, h[i].y);
      write_pair(s_.c_n + at[i], c[i].x, c[i].y);
    }
  }

  // Any number of tiles, and of rows in a step.
  __device__ __forceinline__ void run_general() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      for (int b = row(i, 0); b < place_.end_row && place_.has_pair(i, H_); b += kRowTile) {
        *cell(i, b) = read_pair(s_.c0 + static_cast<int64_t>(b) * H_ + unit(i)).widen();
      }
    }
    int buffer = 0;
    StepRows before = {0, 0}, now = s_.steps.at(0);
    fetch_projections(now, 0);
    Source<T> source = source_of(before, now, 0);
    exchanger_.begin(source);
    for (int k = 0; k < s_.steps.length; ++k) {
      const StepRows after = s_.steps.at(k + 1);
      for (int tile = 0; tile < place_.tiles; ++tile, buffer ^= 1) {
        float* const sums = sums_ + buffer * Sums::kSize;
        float products[kGates][4] = {};
        multiply(products, source);
        // The next tile's states are on their way while the cell is at work on this one.
        const bool last = tile + 1 == place_.tiles;
        source = last ? source_of(now, after, 0) : source_of(before, now, tile + 1);
        exchanger_.begin(source);
        Sums::write(sums, products, place_);
        __syncthreads();
        advance_rows(sums, now, after, tile);
        ahead_.fetch(s_.steps.at(k + kStepsAhead), tile, place_.end_row);
        fetch_projections(last ? after : now, last ? 0 : tile + 1);
        exchanger_.next();
      }
      before = now;
      now = after;
    }
  }

  __device__ __forceinline__ int unit(int i) const { return place_.first_unit + place_.pair_unit(i); }
  __device__ __forceinline__ int row(int i, int tile) const {
    return place_.first_row + tile * kRowTile + place_.pair_row(i);
  }
  __device__ __forceinline__ float2* cell(int i, int b) const {
    return reinterpret_cast<float2*>(cells_ + (b - place_.first_row) * kUnits + place_.pair_unit(i));
  }
  __device__ __forceinline__ static bool warp_has_pair(int i) {
    return Shape::kPairs % kBlockThreads == 0 || i * kBlockThreads + (threadIdx.x & ~31u) < Shape::kPairs;
  }

  __device__ __forceinline__ void fetch(Pair<T> (&projection)[kGates], const T* gates, bool exists) const {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      if (exists) projection[gate] = read_pair(gates + gate * H_);
    }
  }

  __device__ __forceinline__ void fetch_projections(const StepRows& rows, int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, tile);
      fetch(projections_[i], s_.gates + (rows.first + b) * kGates * H_ + unit(i),
            place_.has_pair(i, H_) && b < min(place_.end_row, rows.count));
    }
  }

  __device__ __forceinline__ Source<T> source_of(const StepRows& before, const StepRows& now,
                                                 int tile) const {
    const int b = place_.first_row + tile * kRowTile + place_.g;
    const bool exchanged = b < min(place_.end_row, before.count);
    const T* row = exchanged ? s_.output + (before.first + b) * H_ : s_.h0 + static_cast<int64_t>(b) * H_;
    return {row + place_.element, b < min(place_.end_row, now.count) ? place_.valid : 0, exchanged,
            place_.element, b - place_.first_row};
  }

  // The warp's share of the recurrent product of a tile.
  __device__ __forceinline__ void multiply(float (&products)[kGates][4], const Source<T>& source) {
    uint4 state[1][kChunks];
    exchanger_.read(state, 0, source);
    Warp::multiply(products, weights_, 0, state, scratch_);
  }

  // The cell, for a pair: its states.
  __device__ __forceinline__ float2 advance(const float* tile_sums, int i, float2& c,
                                            float (&saved)[2][Cell::kSaved]) const {
    float gates[2][kGates];
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const float2 sum = Sums::read(tile_sums, gate, place_.pair_row(i), place_.pair_unit(i));
      const float2 projection = projections_[i][gate].widen();
      gates[0][gate] = sum.x + projection.x;
      gates[1][gate] = sum.y + projection.y;
    }
    return make_float2(Cell::template forward<Math>(gates[0], c.x, saved[0]),
                       Cell::template forward<Math>(gates[1], c.y, saved[1]));
  }

  __device__ __forceinline__ void advance_rows(const float* tile_sums, const StepRows& now,
                                               const StepRows& after, int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, tile), j = unit(i);
      if (!place_.has_pair(i, H_) || b >= min(place_.end_row, now.count)) continue;
      float saved[2][Cell::kSaved];
      float2 c = *cell(i, b);
      const float2 h = advance(tile_sums, i, c, saved);
      T* const output = s_.output + (now.first + b) * H_ + j;
      exchanger_.publish(output, h.x, h.y, true, place_.pair_row(i), 0, place_.pair_unit(i));
      *cell(i, b) = c;
      if (s_.extra) {
        save(s_.gates + (now.first + b) * kGates * H_ + j, s_.extra + (output - s_.output) * kExtra, saved);
      }
      if (b >= after.count) {  // the row's last step
        write_pair(s_.h_n + static_cast<int64_t>(b) * H_ + j, h.x, h.y);
        write_pair(s_.c_n + static_cast<int64_t>(b) * H_ + j, c.x, c.y);
      }
    }
  }

  __device__ __forceinline__ void save(T* gates, T* extra, const float (&saved)[2][Cell::kSaved]) const {
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      write_pair(v < kGates ? gates + v * H_ : extra + (v - kGates) * H_, saved[0][v], saved[1][v]);
    }
  }

  const SequenceForwardArguments<T>& s_;
  const int H_;
  const Place<Shape, kChunks> place_;
  float* const sums_;     // of two tiles, in turn
  float* const scratch_;  // of the warp
  Weights weights_;
  float* const cells_;  // [rows of the group, kUnits]
  Exchanger exchanger_;
  Pair<T> projections_[kPairs][kGates];  // of the item to come
  Ahead ahead_;
};

template <class Forward, typename T, bool kOnHopperOnly>
__global__ void __launch_bounds__(kBlockThreads, 1) recurrence_persistent_forward_kernel(
    const __grid_constant__ PerDirection<SequenceForwardArguments<T>> sequences, const GridShape grid) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsCompiled<Forward, kOnHopperOnly, __CUDA_ARCH__>) {
    extern __shared__ __align__(128) float shared[];
    Forward(sequences.of[blockIdx.y], grid, typename Forward::Memory(shared)).run();
  } else {
    __trap();
  }
#endif
}

}  // namespace lltm_ext
