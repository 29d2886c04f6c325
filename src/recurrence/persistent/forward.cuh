// The persistent kernel forward: all steps of a sequence in one launch (steps.cuh). Blocks exchange the
// states.
#pragma once

#include "recurrence/persistent/steps.cuh"

namespace lltm_ext {

template <class Config>
constexpr int kForwardPlanes = Config::kGates + (Config::kThrough == ExchangeThrough::kL2);

template <class Config>
class PersistentForward : public PersistentSteps<PersistentForward<Config>, Config, kForwardPlanes<Config>> {
  using Base = PersistentSteps<PersistentForward, Config, kForwardPlanes<Config>>;
  friend Base;
  using Base::hidden_, Base::map_, Base::row, Base::unit, Base::cell, Base::has_pair, Base::kExtra,
      Base::kGates, Base::kPairs;
  using typename Base::Cell, typename Base::Exchange, typename Base::T;

 public:
  using Arguments = SequenceForwardArguments<T>;

  __device__ PersistentForward(const Arguments& arguments, const GroupGrid& grid,
                               const typename Base::Storage& storage)
      : Base(grid, arguments.steps.batch, arguments.hidden, storage), args_(arguments) {
    load_weights<Config>(Base::weights_, map_, hidden_, static_cast<size_t>(8) * hidden_,
                         [&](int gate, int unit) {
                           return args_.weight + (static_cast<int64_t>(gate) * hidden_ + unit) * hidden_;
                         });
    typename Base::Prefetcher::Arrays arrays(Base::prefetcher_, map_, hidden_);
    arrays.add(args_.gates, kGates);
    if (Exchange::kThroughL2) arrays.add(args_.output, 1);
  }

 private:
  static constexpr bool kSendsLastStep = false;

  __device__ __forceinline__ int steps() const { return args_.steps.length; }
  __device__ __forceinline__ int turns() const { return args_.steps.length; }
  __device__ __forceinline__ StepRows rows_of(int n) const { return args_.steps.at(n); }

  // ---- one row tile

  struct OneTilePair {
    bool exists;
    int64_t at;  // in [B, H]
    T *gates, *output;
    float2 c, h;
    float saved[2][Cell::kSaved];
  };

  __device__ __forceinline__ RowSource<T> begin_one_tile() {
    const int64_t first = args_.steps.at(0).first;
    to_next_ = args_.steps.reverse ? -args_.steps.batch : args_.steps.batch;
    const int lane_row = map_.first_row + map_.g;
    states_ = args_.output + (first + lane_row) * hidden_ + map_.element;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      OneTilePair& p = pairs_[i];
      const int b = row(i, 0), j = unit(i);
      p.exists = has_pair(i, b);
      p.at = static_cast<int64_t>(b) * hidden_ + j;
      p.gates = args_.gates + (first + b) * kGates * hidden_ + j;
      p.output = args_.output + (first + b) * hidden_ + j;
      p.c = p.exists ? read_pair(args_.c0 + p.at).widen() : make_float2(0, 0);
      load_projections(i, p.gates, p.exists && steps() > 0);
    }
    return {args_.h0 + static_cast<int64_t>(lane_row) * hidden_ + map_.element,
            lane_row < map_.end_row ? map_.vectors : 0, false, map_.element, map_.g};
  }

  __device__ __forceinline__ RowSource<T> next_source(RowSource<T> source) {
    source.row = states_;
    source.exchanged = true;
    states_ += to_next_ * hidden_;
    return source;
  }

  __device__ __forceinline__ void step_pair(int i, const float* sums) {
    OneTilePair& p = pairs_[i];
    p.h = run_cell(sums, i, p.c, p.saved);
    Base::exchange(p.output, p.h.x, p.h.y, p.exists, i, 0);
  }

  // Saves the step's values and moves on to step n.
  __device__ __forceinline__ void prepare_pair(int i, int n) {
    OneTilePair& p = pairs_[i];
    if (args_.extra && p.exists) save(p.gates, p.output, p.saved);
    p.gates += to_next_ * kGates * hidden_;
    p.output += to_next_ * hidden_;
    load_projections(i, p.gates, p.exists && n < steps());
  }

  __device__ __forceinline__ void end_one_tile(const RowSource<T>&) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const OneTilePair& p = pairs_[i];
      if (!p.exists || steps() == 0) continue;
      write_pair(args_.h_n + p.at, p.h.x, p.h.y);
      write_pair(args_.c_n + p.at, p.c.x, p.c.y);
    }
  }

  // ---- any number of rows

  __device__ __forceinline__ void load_cells() {
    Base::for_all_cells([&](int i, int b) {
      *cell(i, b) = read_pair(args_.c0 + static_cast<int64_t>(b) * hidden_ + unit(i)).widen();
    });
  }
  __device__ __forceinline__ void store_cells() {}  // step_rows has stored each row's last

  __device__ __forceinline__ void load_inputs(const StepRows& rows, int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, tile);
      load_projections(i, args_.gates + (rows.first + b) * kGates * hidden_ + unit(i),
                       map_.has_pair(i, hidden_) && b < min(map_.end_row, rows.count));
    }
  }

  __device__ __forceinline__ RowSource<T> source_of(const StepRows& previous, const StepRows& current,
                                                    int tile) const {
    const int b = map_.first_row + tile * kRowTile + map_.g;
    const bool exchanged = b < min(map_.end_row, previous.count);
    const T* row = exchanged ? args_.output + (previous.first + b) * hidden_
                             : args_.h0 + static_cast<int64_t>(b) * hidden_;
    return {row + map_.element, b < min(map_.end_row, current.count) ? map_.vectors : 0, exchanged,
            map_.element, b - map_.first_row};
  }

  __device__ __forceinline__ void step_rows(const float* sums, const StepRows&, const StepRows& current,
                                            const StepRows& next, int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, tile), j = unit(i);
      if (!map_.has_pair(i, hidden_) || b >= min(map_.end_row, current.count)) continue;
      float saved[2][Cell::kSaved];
      float2 c = *cell(i, b);
      const float2 h = run_cell(sums, i, c, saved);
      T* const output = args_.output + (current.first + b) * hidden_ + j;
      Base::exchange(output, h.x, h.y, true, i, 0);
      *cell(i, b) = c;
      if (args_.extra) save(args_.gates + (current.first + b) * kGates * hidden_ + j, output, saved);
      if (b >= next.count) {  // the row's last step
        write_pair(args_.h_n + static_cast<int64_t>(b) * hidden_ + j, h.x, h.y);
        write_pair(args_.c_n + static_cast<int64_t>(b) * hidden_ + j, c.x, c.y);
      }
    }
  }

  // ---- a pair

  __device__ __forceinline__ void load_projections(int i, const T* gates, bool exists) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      if (exists) projections_[i][gate] = read_pair(gates + gate * hidden_);
    }
  }

  // Updates c and returns h.
  __device__ __forceinline__ float2 run_cell(const float* sums, int i, float2& c,
                                             float (&saved)[2][Cell::kSaved]) const {
    float gates[2][kGates];
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const float2 sum = Base::total(sums, gate, i), projection = projections_[i][gate].widen();
      gates[0][gate] = sum.x + projection.x;
      gates[1][gate] = sum.y + projection.y;
    }
    using Math = typename Config::Math;
    return make_float2(Cell::template forward<Math>(gates[0], c.x, saved[0]),
                       Cell::template forward<Math>(gates[1], c.y, saved[1]));
  }

  __device__ __forceinline__ void save(T* gates, const T* output,
                                       const float (&saved)[2][Cell::kSaved]) const {
    T* const extra = args_.extra + (output - args_.output) * kExtra;
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      write_pair(v < kGates ? gates + v * hidden_ : extra + (v - kGates) * hidden_, saved[0][v], saved[1][v]);
    }
  }

  const Arguments& args_;
  int64_t to_next_;  // rows to the next step's
  const T* states_;  // the lane's row of the exchanged states
  OneTilePair pairs_[kPairs];
  Pair<T> projections_[kPairs][kGates];  // of the tile to come
};

template <class Config>
__global__ void __launch_bounds__(kBlockThreads, 1) recurrence_persistent_forward_kernel(
    const __grid_constant__ PerDirection<SequenceForwardArguments<typename Config::T>> sequences,
    const GroupGrid grid) {
  run_persistent<PersistentForward<Config>>(sequences, grid);
}

}  // namespace lltm_ext
