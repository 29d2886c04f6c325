// Steps of a sequence backward, in one kernel: the gradients of the gates, from which those of input and
// weights follow by matrix products outside. Laid out as the forward is (forward.cuh); the group's blocks
// exchange the gradients of the gates, of which every unit's h needs all of the step after.
#pragma once

#include "recurrence/persistent/block.cuh"

namespace lltm_ext {

template <class Cell, class Math, class Product, Exchange kWay, int kUnitTiles, int kChunks, int kInRegisters,
          bool kGeneral>
class Backward {
  using T = typename Product::Type;
  static constexpr int kGates = Cell::kGates, kExtra = Cell::kSaved - kGates;
  using Shape = BlockShape<T, kUnitTiles, kChunks>;
  static constexpr int kPairs = Shape::kPairsPerThread;
  static constexpr int kUnits = Shape::kUnits;
  using Exchanger = lltm_ext::Exchanger<kWay, T, kGates, kChunks, kUnits,
                                        sharing_warps(kGeneral, kUnitTiles, kChunks, kGates)>;
  static constexpr int kInputs = Exchanger::kInputsAtOnce;                // that are read at once,
  static constexpr int kTogether = Product::kNeedsScratch ? 1 : kInputs;  // and multiplied
  using Weights = WarpWeights<kGates, kChunks, kInRegisters>;
  using Warp = WarpProduct<Product, 1, kTogether, kChunks>;
  using Sums = TileSums<Shape, 1>;
  using Ahead = Prefetcher<Shape, T, kGates + kExtra + 1 + (kWay != Exchange::kCluster ? kGates : 0)>;

 public:
  using Memory = BlockMemory<Sums, Warp, Weights, Exchanger, kGeneral ? kUnits : 0>;
  static constexpr int kArchitecture = kWay == Exchange::kCluster ? 900 : 800;  // and above

  __device__ Backward(const SequenceBackwardArguments<T>& sequence, const GridShape& grid,
                      const Memory& memory)
      : s_(sequence),
        H_(sequence.hidden),
        place_(grid, sequence.steps.batch, H_),
        sums_(memory.sums()),
        scratch_(memory.scratch()),
        weights_(memory.weights()),
        grad_cells_(memory.cells()),
        exchanger_(memory.exchanged(grid.rows), place_.in_group(grid, H_)) {
    load_weights<Product, Shape, kGates, kChunks>(
        weights_, place_, H_, static_cast<size_t>(8) * kGates * H_,
        [&](int gate, int unit) { return s_.weight_t + (static_cast<int64_t>(unit) * kGates + gate) * H_; });
    typename Ahead::template Adder<Place<Shape, kChunks>> adder(ahead_, place_, H_);
    adder.add(s_.gates, kGates);
    adder.add(s_.extra, kExtra);
    adder.add(s_.grad_output, 1);
    if (Exchanger::kThroughMemory) adder.add(s_.grad_gates - s_.first_row * kGates * H_, kGates);
  }

  __device__ __forceinline__ void run() {
    if constexpr (kGeneral) {
      run_general();
    } else {
      run_dense();
    }
    if (s_.grad_bias) store_grad_bias();
    exchanger_.finish();
  }

 private:
  // What a pair's step needs of the forward.
  struct Saved {
    Pair<T> values[Cell::kSaved], grad_output;
  };

  // One tile of rows, and every step has all of the batch.
  __device__ __forceinline__ void run_dense() {
    const int batch = s_.steps.batch;
    const int64_t first = s_.steps.at(s_.end - 1).first, to_next = s_.steps.reverse ? batch : -batch;
    const int row = place_.first_row + place_.g;
    const bool has_row = row < place_.end_row;
    Source<T> source = {nullptr, 0, false, place_.element, place_.g};
    const T* gradients = grad_gates(first + row) + place_.element;

    bool exists[kPairs];
    int64_t at[kPairs];  // of the pair in [B, H]
    T* grad_gates_at[kPairs];
    float2 grad_c[kPairs], carried[kPairs];
    SavedAt from[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = place_.first_row + place_.pair_row(i), j = place_.first_unit + place_.pair_unit(i);
      exists[i] = place_.has_pair(i, H_) && b < place_.end_row;
      at[i] = static_cast<int64_t>(b) * H_ + j;
      from[i] = saved_at(first + b, j);
      grad_gates_at[i] = grad_gates(first + b) + j;
      grad_c[i] = carried[i] = make_float2(0, 0);
      if (exists[i]) {
        grad_c[i] = read_pair(s_.grad_c + at[i]).widen();
        carried[i] = read_pair(s_.grad_h + at[i]).widen();
        fetch(saved_[i], from[i]);
      }
    }
    for (int k = s_.end - 1; k >= s_.begin; --k) {
      exchanger_.begin(source);
      float* const sums = sums_ + (k & 1) * Sums::kSize;
      float products[1][4] = {};
      multiply(products, source);
      Sums::write(sums, products, place_);
      __syncthreads();
      source = {gradients, has_row ? place_.valid : 0, true, place_.element, place_.g};
      gradients += to_next * kGates * H_;
      float grads[kPairs][2][kGates];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (!warp_has_pair(i)) continue;
        const float2 sum = Sums::read(sums, 0, place_.pair_row(i), place_.pair_unit(i));
        retreat(i, make_float2(sum.x + carried[i].x, sum.y + carried[i].y), grad_c[i], grads[i]);
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          exchanger_.publish(grad_gates_at[i] + gate * H_, grads[i][0][gate], grads[i][1][gate], exists[i],
                             place_.pair_row(i), gate, place_.pair_unit(i));
        }
      }
      exchanger_.flush();
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (!warp_has_pair(i)) continue;
        carried[i] = make_float2(0, 0);
        add_grad_bias(i, grads[i]);
        grad_gates_at[i] += to_next * kGates * H_;
        from[i].move(to_next * H_);
        if (exists[i] && k > s_.begin) fetch(saved_[i], from[i]);
      }
      if (k - kStepsAhead >= s_.begin) ahead_.fetch(s_.steps.at(k - kStepsAhead), 0, place_.end_row);
      exchanger_.next();
      if (Exchanger::kThroughMemory) __syncthreads();  // who looks in vain is in the way of what he waits for
    }
    // The gradient of h before the first of these steps.
    exchanger_.begin(source);
    float* const sums = sums_ + ((s_.begin - 1) & 1) * Sums::kSize;
    float products[1][4] = {};
    multiply(products, source);
    Sums::write(sums, products, place_);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!exists[i]) continue;
      const float2 sum = Sums::read(sums, 0, place_.pair_row(i), place_.pair_unit(i));
      write_pair(s_.grad_h + at[i], sum.x, sum.y);
      write_pair(s_.grad_c + at[i], grad_c[i].x, grad_c[i].y);
    }
  }

  // Any number of tiles, and of rows in a step.
  __device__ __forceinline__ void run_general() {
    for_own_cells([&](int i, int b) { *grad_cell(i, b) = read_pair(grad_c(i, b)).widen(); });
    int buffer = 0;
    StepRows after = {0, 0}, now = s_.steps.at(s_.end - 1);
    fetch_saved(now, 0);
    Source<T> source = source_of(after, 0);
    exchanger_.begin(source);
    // One turn more than there are steps: the last only carries the gradient of h to before the first of
    // them.
    for (int k = s_.end - 1; k >= s_.begin - 1; --k) {
      const StepRows before = k > s_.begin ? s_.steps.at(k - 1) : StepRows{0, 0};
      for (int tile = 0; tile < place_.tiles; ++tile, buffer ^= 1) {
        float* const sums = sums_ + buffer * Sums::kSize;
        float products[1][4] = {};
        multiply(products, source);
        // The next tile's gradients are on their way while the cell is at work on this one.
        const bool last = tile + 1 == place_.tiles;
        source = last ? source_of(now, 0) : source_of(after, tile + 1);
        exchanger_.begin(source);
        Sums::write(sums, products, place_);
        __syncthreads();
        retreat_rows(sums, now, after, tile);
        if (k - kStepsAhead >= s_.begin) ahead_.fetch(s_.steps.at(k - kStepsAhead), tile, place_.end_row);
        fetch_saved(last ? before : now, last ? 0 : tile + 1);
        exchanger_.next();
      }
      after = now;
      now = before;
    }
    for_own_cells([&](int i, int b) {
      const float2 c = *grad_cell(i, b);
      write_pair(grad_c(i, b), c.x, c.y);
    });
  }

  __device__ __forceinline__ int unit(int i) const { return place_.first_unit + place_.pair_unit(i); }
  __device__ __forceinline__ int row(int i, int tile) const {
    return place_.first_row + tile * kRowTile + place_.pair_row(i);
  }
  __device__ __forceinline__ float* grad_c(int i, int b) const {
    return s_.grad_c + static_cast<int64_t>(b) * H_ + unit(i);
  }
  __device__ __forceinline__ float2* grad_cell(int i, int b) const {
    return reinterpret_cast<float2*>(grad_cells_ + (b - place_.first_row) * kUnits + place_.pair_unit(i));
  }
  template <class F>
  __device__ __forceinline__ void for_own_cells(F&& f) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      for (int b = row(i, 0); b < place_.end_row && place_.has_pair(i, H_); b += kRowTile) f(i, b);
    }
  }
  __device__ __forceinline__ static bool warp_has_pair(int i) {
    return Shape::kPairs % kBlockThreads == 0 || i * kBlockThreads + (threadIdx.x & ~31u) < Shape::kPairs;
  }
  __device__ __forceinline__ T* grad_gates(int64_t row) const {
    return s_.grad_gates + (row - s_.first_row) * kGates * H_;
  }

  // Where a pair's saved values lie.
  struct SavedAt {
    const T *gates, *extra, *grad_output;
    __device__ __forceinline__ void move(int64_t elements) {
      gates += elements * kGates;
      extra += elements * kExtra;
      grad_output += elements;
    }
  };
  __device__ __forceinline__ SavedAt saved_at(int64_t row, int j) const {
    return {s_.gates + row * kGates * H_ + j, s_.extra + row * kExtra * H_ + j,
            s_.grad_output + row * H_ + j};
  }
  __device__ __forceinline__ void fetch(Saved& saved, const SavedAt& at) const {
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      saved.values[v] = read_pair(v < kGates ? at.gates + v * H_ : at.extra + (v - kGates) * H_);
    }
    saved.grad_output = s_.grad_output ? read_pair(at.grad_output) : Pair<T>::of(0, 0);
  }

  __device__ __forceinline__ void fetch_saved(const StepRows& rows, int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, tile);
      if (place_.has_pair(i, H_) && b < min(place_.end_row, rows.count)) {
        fetch(saved_[i], saved_at(rows.first + b, unit(i)));
      }
    }
  }

  __device__ __forceinline__ Source<T> source_of(const StepRows& after, int tile) const {
    const int b = place_.first_row + tile * kRowTile + place_.g;
    const bool exchanged = b < min(place_.end_row, after.count);
    return {grad_gates(after.first + b) + place_.element, exchanged ? place_.valid : 0, exchanged,
            place_.element, b - place_.first_row};
  }

  // The warp's share of the gradient of h that comes from the step after, of a tile.
  __device__ __forceinline__ void multiply(float (&products)[1][4], const Source<T>& source) {
#pragma unroll
    for (int input = 0; input < kGates; input += kInputs) {
      uint4 gradients[kInputs][kChunks];
      exchanger_.read(gradients, input, source);
#pragma unroll
      for (int i = 0; i < kInputs; i += kTogether) {
        const auto& some = reinterpret_cast<const uint4(&)[kTogether][kChunks]>(gradients[i]);
        Warp::multiply(products, weights_, input + i, some, scratch_);
      }
    }
  }

  // The cell backward, for a pair: the gradients of its gates.
  __device__ __forceinline__ void retreat(int i, float2 grad_h, float2& grad_c, float (&grads)[2][kGates]) {
    float saved[2][Cell::kSaved];
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) {
      const float2 value = saved_[i].values[v].widen();
      saved[0][v] = value.x;
      saved[1][v] = value.y;
    }
    const float2 grad_output = saved_[i].grad_output.widen();
    Cell::template backward<Math>(saved[0], grad_h.x + grad_output.x, grad_c.x, grads[0]);
    Cell::template backward<Math>(saved[1], grad_h.y + grad_output.y, grad_c.y, grads[1]);
  }

  __device__ __forceinline__ void add_grad_bias(int i, const float (&grads)[2][kGates]) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      grad_bias_[i][gate].x += grads[0][gate];
      grad_bias_[i][gate].y += grads[1][gate];
    }
  }

  __device__ __forceinline__ void retreat_rows(const float* tile_sums, const StepRows& now,
                                               const StepRows& after, int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, tile), j = unit(i);
      if (!place_.has_pair(i, H_) || b >= place_.end_row) continue;
      T* const carried = s_.grad_h + static_cast<int64_t>(b) * H_ + j;
      const float2 grad_h = b < after.count
                                ? Sums::read(tile_sums, 0, place_.pair_row(i), place_.pair_unit(i))
                                : read_pair(carried).widen();
      if (b >= now.count) {
        if (b < after.count) write_pair(carried, grad_h.x, grad_h.y);
        continue;
      }
      float grads[2][kGates];
      float2 c = *grad_cell(i, b);
      retreat(i, grad_h, c, grads);
      *grad_cell(i, b) = c;
      T* const gradients = grad_gates(now.first + b) + j;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        exchanger_.publish(gradients + gate * H_, grads[0][gate], grads[1][gate], true, place_.pair_row(i),
                           gate, place_.pair_unit(i));
      }
      add_grad_bias(i, grads);
    }
  }

  __device__ void store_grad_bias() const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, 0);
      if (!place_.has_pair(i, H_) || b >= place_.end_row) continue;
      float* const sums = s_.grad_bias + static_cast<int64_t>(b) * kGates * H_ + unit(i);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        float2* sum = reinterpret_cast<float2*>(sums + gate * H_);
        sum->x += grad_bias_[i][gate].x;
        sum->y += grad_bias_[i][gate].y;
      }
    }
  }

  const SequenceBackwardArguments<T>& s_;
  const int H_;
  const Place<Shape, kChunks> place_;
  float* const sums_;     // of two tiles, in turn
  float* const scratch_;  // of the warp
  Weights weights_;
  float* const grad_cells_;  // [rows of the group, kUnits]
  Exchanger exchanger_;
  Saved saved_[kPairs];  // of the item to come
  Ahead ahead_;
  float2 grad_bias_[kPairs][kGates] = {};
};

template <class Backward, typename T, bool kOnHopperOnly>
__global__ void __launch_bounds__(kBlockThreads, 1) recurrence_persistent_backward_kernel(
    const __grid_constant__ PerDirection<SequenceBackwardArguments<T>> sequences, const GridShape grid) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsCompiled<Backward, kOnHopperOnly, __CUDA_ARCH__>) {
    extern __shared__ __align__(128) float shared[];
    Backward(sequences.of[blockIdx.y], grid, typename Backward::Memory(shared)).run();
  } else {
    __trap();
  }
#endif
}

}  // namespace lltm_ext
