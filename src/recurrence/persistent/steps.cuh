// The loops over the steps of a sequence, for both directions. The kernels derive from PersistentSteps and
// add what a pair does in a step (forward.cuh, backward.cuh).
//
// Rows of the batch don't depend on each other, so the grid is divided into groups of blocks that never
// communicate: a group has some rows of the batch, and its blocks divide the hidden units. A block keeps the
// recurrent weights of its units on the chip for the whole sequence. In every step it multiplies them by the
// values that the group's blocks exchange (exchange.cuh), and contributes its own.
//
// The blocks of a group must be resident at the same time: the launch guarantees it or fails.
#pragma once

#include "recurrence/persistent/block.cuh"
#include "recurrence/persistent/heads.cuh"
#include "recurrence/persistent/own_heads.cuh"

namespace lltm_ext {

template <class Derived, class Config_, int kPrefetchedPlanes>
class PersistentSteps {
 public:
  using Config = Config_;
  using Storage = SharedStorage<Config>;

  __device__ __forceinline__ void run() {
    if constexpr (Config::kAnyRows) {
      run_any_rows();
    } else {
      run_one_tile();
    }
    exchange_.finish();
  }

 protected:
  using T = typename Config::T;
  using Projection = typename Config::Projection;
  using Cell = typename Config::Cell;
  using Reset = typename Config::Reset;
  using Exchange = typename Config::Exchange;
  using Sums = PartialSums<Config>;
  using Prefetcher = L2Prefetcher<Config, kPrefetchedPlanes>;
  static constexpr int kGates = Config::kGates, kSavedInGates = Config::kSavedInGates,
                       kExtra = Config::kExtra;
  static constexpr int kStates = Cell::kStates, kLiveStates = Config::kShape.cell.live_states();
  static constexpr int kStepInputs = at_least_one(Cell::kStepInputs);
  static constexpr int kPairs = Config::Tile::kPairsPerThread, kUnits = Config::Tile::kUnits;
  // A thread has pairs of the same unit, in rows kRowsApart apart. In a block of many units it has registers
  // for the addresses and sums of the first one only.
  static constexpr int kKept = Config::kWarpTiles > 1 ? 1 : kPairs, kRowsApart = 2 * kBlockThreads / kUnits;
  // Of a cell whose units read values over all units of their row, or products of other values than h.
  static constexpr bool kOverUnits = kIsOverUnits<Cell>;
  static constexpr int kCalls = own_calls<Cell, Config::kBackward>();
  using UnitsPack = Pack<kPairs, kUnits / 2, Config::kThrough>;
  using RowUnits = typename Conditional<kOverUnits, RowOfUnits<UnitsPack>, NoUnits>::type;
  static constexpr int kExchanged = Config::kShape.exchanged_call().inputs;
  using CallExchange = typename Conditional<(kExchanged > 0 && !Exchange::kThroughL2),
                                            typename Config::template ExchangeOf<kExchanged>, NoUnits>::type;
  using Heads = typename Conditional<Config::kHasWholeHeads, HeadsOfBlock<Config>, NoUnits>::type;

  __device__ PersistentSteps(const GroupGrid& grid, int batch, int hidden, const Storage& storage)
      : hidden_(hidden),
        map_(grid, batch, hidden, first_group(grid)),
        sums_(storage.sums()),
        scratch_(storage.scratch()),
        weights_(storage.weights()),
        live_states_(storage.live_states()),
        row_units_(units_of_rows(grid, storage)),
        exchange_(storage.exchange(grid.rows), map_.group(grid, hidden)),
        heads_(heads_of_block(storage, grid.rows)),
        call_memory_(storage.second_exchange(grid.rows)),
        call_exchange_(exchange_of_calls(grid)) {}

  // Elements from a row or a plane of all units to the next.
  __device__ __forceinline__ int width() const { return Config::kHeads * hidden_; }
  __device__ __forceinline__ int unit(int i) const { return map_.first_unit + map_.pair_unit(i); }
  __device__ __forceinline__ int row(int i, int tile) const {
    return map_.first_row + tile * kRowTile + map_.pair_row(i);
  }
  __device__ __forceinline__ bool has_pair(int i, int b) const {
    return map_.has_pair(i, hidden_) && b < map_.end_row;
  }
  __device__ __forceinline__ float2 total(const float* sums, int out, int i) const {
    return Sums::total(sums, out, map_.pair_row(i), map_.pair_unit(i));
  }
  __device__ __forceinline__ void exchange(T* address, float2 x, float2 sent, bool exists, int i, int input) {
    exchange_.store(address, x, sent, exists, map_.pair_row(i), input, map_.pair_unit(i));
  }

  // What a pair in row b carries, in shared memory if a group may have several tiles: the states and, if the
  // cell reads it, h; backward their gradients.
  __device__ __forceinline__ float2& live_states(int i, int b, int value) const {
    float* const row = live_states_ + ((b - map_.first_row) * kLiveStates + value) * kUnits;
    return *reinterpret_cast<float2*>(row + map_.pair_unit(i));
  }
  template <class F>
  __device__ __forceinline__ void for_all_pairs(F&& f) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      for (int b = row(i, 0); has_pair(i, b); b += kRowTile) f(i, b);
    }
  }
  // Where a state of a pair is in [S, B, H].
  __device__ __forceinline__ int64_t state_at(int state, int64_t at, int batch) const {
    return static_cast<int64_t>(state) * batch * width() + at;
  }

  // The i-th pair's addresses: the kept ones or, if only the first pair's are kept, a copy. Then move_kept()
  // moves these from step to step.
  template <class Addresses>
  __device__ __forceinline__ decltype(auto) addresses_of(int i, Addresses (&kept)[kKept]) const {
    if constexpr (kKept == kPairs) {
      return (kept[i]);
    } else {
      Addresses at = kept[0];
      at.move(i * kRowsApart, width());
      return at;
    }
  }
  template <class Addresses>
  __device__ __forceinline__ void move_kept(Addresses (&kept)[kKept], int64_t rows) const {
    if constexpr (kKept < kPairs) kept[0].move(rows, width());
  }

  // The parameters of a thread's pairs don't change.
  __device__ __forceinline__ void load_parameters(const T* parameters) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int p = 0; p < Cell::kParameters; ++p) {
        if (map_.has_pair(i, hidden_)) parameters_[i][p] = read_pair(parameters + p * width() + unit(i));
      }
    }
  }
  __device__ __forceinline__ void load_step_inputs(Pair<T> (&inputs)[kStepInputs], const T* at) const {
#pragma unroll
    for (int k = 0; k < Cell::kStepInputs; ++k) inputs[k] = read_pair(at + k * width());
  }
  // x after a reset to `initial`.
  __device__ __forceinline__ static float2 after_reset(Reset reset, float2 x, float2 initial) {
    return make_float2(reset_to(reset, x.x, initial.x), reset_to(reset, x.y, initial.y));
  }
  // What a reset leaves of x. A step's inputs keep the reset as it is in memory: a conversion where it is
  // loaded would wait for it there.
  __device__ __forceinline__ static float2 masked(Reset reset, float2 x) {
    return make_float2(scale_by_mask(mask_of(reset), x.x), scale_by_mask(mask_of(reset), x.y));
  }
  template <int N>
  __device__ __forceinline__ static void keep(Reset reset, float2 (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = masked(reset, values[i]);
  }

  // A unit's values as those of a pack.
  template <int N>
  __device__ __forceinline__ static void put(UnitsPack (&to)[N], int at, const float (&from)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) to[k].of[at] = from[k];
  }
  template <int N>
  __device__ __forceinline__ static void take(float (&to)[N], const UnitsPack (&from)[N], int at) {
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = from[k].of[at];
  }
  __device__ __forceinline__ static void put(CellInputs<Cell, UnitsPack>& to, int at,
                                             const CellInputs<Cell, float>& from) {
    put(to.x, at, from.x);
    put(to.r, at, from.r);
    put(to.parameters, at, from.parameters);
    put(to.steps, at, from.steps);
    if constexpr (kProductsOf<Cell> > 0) put(to.products, at, from.products);
    to.h.of[at] = from.h;
  }

  // Parameters and step inputs as the cell reads them, for both units of a pair.
  __device__ __forceinline__ void widen_inputs(CellInputs<Cell, float> (&in)[2], int i,
                                               const Pair<T> (&step_inputs)[kStepInputs]) const {
#pragma unroll
    for (int p = 0; p < Cell::kParameters; ++p) {
      const float2 value = parameters_[i][p].widen();
      in[0].parameters[p] = value.x, in[1].parameters[p] = value.y;
    }
#pragma unroll
    for (int k = 0; k < Cell::kStepInputs; ++k) {
      const float2 value = step_inputs[k].widen();
      in[0].steps[k] = value.x, in[1].steps[k] = value.y;
    }
  }

  __device__ __forceinline__ void multiply(float (&products)[Config::kWarpOutputs][4],
                                           const RowSource<T>& source) {
    constexpr int kPerLoad = Config::kShape.inputs_per_load(), kPerProduct = Config::kInputsPerProduct;
    // Large kernels have no registers left for other forms of the product.
    const bool many = Config::kAnyRows || (Config::kChunks > 4 && !Config::kShape.has_one_weight());
    const int rows = many ? kRowTile : map_.end_row - map_.first_row;
#pragma unroll
    for (int input = 0; input < Config::kInputs; input += kPerLoad) {
      uint4 vectors[kPerLoad][Config::kChunks];
      exchange_.load(vectors, input, source);
      if constexpr (kHeadsTakeH) {
        typename Heads::Vectors own;
        heads_.read(own, exchange_.received(), input, map_.first_unit);
        multiply_each<0>(products, vectors, own, rows);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kPerLoad; i += kPerProduct) {
        const auto& factors = reinterpret_cast<const uint4(&)[kPerProduct][Config::kChunks]>(vectors[i]);
        Config::WarpProduct::multiply(products, weights_, input + i, factors, scratch_, rows);
      }
    }
  }
  // The number of a product among those of all steps. Two buffers of partial sums alternate between them.
  __device__ static __forceinline__ int product_of(int step, int call) { return step * (1 + kCalls) + call; }
  // The block's product of a tile, as partial sums that all threads may then read.
  __device__ __forceinline__ const float* multiply_tile(int buffer, const RowSource<T>& source) {
    exchange_.start(source);
    float* const sums = sums_ + buffer * Sums::kSize;
    float products[Config::kWarpOutputs][4] = {};
    multiply(products, source);
    Sums::write(sums, products, map_);
    __syncthreads();
    return sums;
  }

  // ---- products in the middle of a step
  //
  // Units give values. Blocks exchange them as they do h, all warps multiply them, and the units go on with
  // the products.

  struct OwnProducts {
    PersistentSteps& steps;
    template <int kCall, int kInputs, int kOutputs>
    __device__ __forceinline__ void multiply(const UnitsPack (&given)[kInputs],
                                             UnitsPack (&products)[kOutputs]) const {
      steps.give<kCall>(given);
      const float* const sums = steps.multiply_given<kCall>();
#pragma unroll
      for (int i = 0; i < kPairs * kOutputs; ++i) {
        const int pair = i / kOutputs, out = i % kOutputs;
        const float2 total =
            Sums::template total<kOutputs>(sums, out, steps.map_.pair_row(pair), steps.map_.pair_unit(pair));
        products[out].of[2 * pair] = total.x, products[out].of[2 * pair + 1] = total.y;
      }
    }
  };
  // What warps without units do meanwhile.
  template <int kCall = 0>
  __device__ __forceinline__ void multiply_all_given() {
    if constexpr (kCall < kCalls) {
      multiply_given<kCall>();
      multiply_all_given<kCall + 1>();
    }
  }

  // ---- weights
  //
  // A warp's i-th weight is that of a gate or, from kGates on, of a product with the cell's own weights.
  // Calls multiply one input after the other.

  __device__ static constexpr int product_of_weight(int i) {
    if constexpr (kCalls > 0) {
      for (int c = 0; c < kCalls; ++c) {
        const OwnCall call = own_call<Cell, Config::kBackward>(c);
        const int n = i - kGates - call.first;
        if (n < 0 || n >= call.inputs * call.outputs) continue;
        return call.first + n % call.outputs * call.inputs + n / call.outputs;
      }
    }
    return i - kGates;
  }
  // Its block of weight_hh.
  __device__ static constexpr int block_of_weight(int i) {
    if constexpr (kProductsOf<Cell> > 0) {
      if (i >= kGates) return kGates + Cell::block_of(product_of_weight(i));
    }
    return i;
  }
  // Whether this thread block keeps only its own heads of the weight, and its place among the weights of
  // which it keeps as much.
  __device__ static constexpr bool is_of_heads(int i) {
    return Config::kHasWholeHeads && i >= kGates && is_block_diagonal<Cell>(product_of_weight(i));
  }
  __device__ static constexpr int place_of(int i) {
    int place = 0;
    for (int before = 0; before < i; ++before) place += is_of_heads(before) == is_of_heads(i);
    return place;
  }
  __device__ static constexpr int weight_at(int place, bool of_heads) {
    int i = 0;
    while (is_of_heads(i) != of_heads || place_of(i) != place) ++i;
    return i;
  }

  // `row(block, unit)` is a row of a block of weight_hh.
  template <class Row>
  __device__ __forceinline__ void load_all_weights(size_t to_lower, Row&& row) {
    load_weights<Config>(weights_, map_, hidden_, to_lower, [&](int place, int unit) {
      return row(block_of_weight(Config::kHasWholeHeads ? weight_at(place, false) : place), unit);
    });
    if constexpr (Config::kHasWholeHeads) {
      heads_.load(map_, hidden_, to_lower,
                  [&](int place, int unit) { return row(block_of_weight(weight_at(place, true)), unit); });
    }
  }

  // Whether block-diagonal weights multiply the previous h. Backward they are in calls.
  __device__ static constexpr bool heads_take_h() {
    for (int i = 0; !Config::kBackward && i < products_of_h<Cell>(); ++i) {
      if (is_of_heads(kGates + i)) return true;
    }
    return false;
  }
  static constexpr bool kHeadsTakeH = heads_take_h();

  // Adds the products of an input with the weights from kWeight on, of all units' vectors or the block's own.
  template <int kWeight, int kOut = 0, class Own, int kOutputs>
  __device__ __forceinline__ void multiply_each(float (&products)[kOutputs][4],
                                                const uint4 (&vectors)[1][Config::kChunks], const Own& own,
                                                int rows) {
    if constexpr (kOut < kOutputs) {
      constexpr int kPlace = place_of(kWeight + kOut);
      auto& sums = reinterpret_cast<float (&)[1][4]>(products[kOut]);
      if constexpr (is_of_heads(kWeight + kOut)) {
        WarpProduct<typename Config::Product, 1, 1, Heads::kChunks>::multiply(sums, heads_.weights, kPlace,
                                                                              own, scratch_, rows);
      } else {
        WarpProduct<typename Config::Product, 1, 1, Config::kChunks>::multiply(sums, weights_, kPlace,
                                                                               vectors, scratch_, rows);
      }
      multiply_each<kWeight, kOut + 1>(products, vectors, own, rows);
    }
  }

  const int hidden_;
  const ThreadMap<Config> map_;
  float* const sums_;     // two buffers that alternate
  float* const scratch_;  // the warp's
  typename Config::Weights weights_;
  float* const live_states_;  // [rows of the group, kLiveStates, kUnits]
  Pair<T> parameters_[kPairs][at_least_one(Cell::kParameters)];
  RowUnits row_units_;  // begins before the exchange, in which the blocks of a cluster wait for each other
  Exchange exchange_;
  Heads heads_;
  char* const call_memory_;
  CallExchange call_exchange_;
  T* given_ = nullptr;  // [rows, planes, H] what calls take, if it is in memory
  int step_;
  int64_t step_row_;  // the first row of the step in that
  Prefetcher prefetcher_;

 private:
  __device__ static int first_group(const GroupGrid& grid) {
    if constexpr (Config::kShape.cell.mixes_units()) {
      return static_cast<const GroupGridOfRows&>(grid).first_group;
    } else {
      return 0;
    }
  }
  __device__ Heads heads_of_block(const Storage& storage, int rows) const {
    if constexpr (Config::kHasWholeHeads) {
      return {storage.weights_of_heads(), storage.given_to_heads(rows), map_};
    } else {
      return {};
    }
  }
  __device__ CallExchange exchange_of_calls(const GroupGrid& grid) const {
    if constexpr (kIsSame<CallExchange, NoUnits>) {
      return {};
    } else {
      return {call_memory_, map_.group(grid, hidden_)};
    }
  }
  // Through L2 an exchange has no state, so each call has one of its number of inputs.
  template <int kInputs>
  __device__ __forceinline__ decltype(auto) exchange_of_call() {
    if constexpr (Exchange::kThroughL2) {
      return typename Config::template ExchangeOf<kInputs>(call_memory_, Group{hidden_});
    } else {
      return (call_exchange_);
    }
  }
  template <int kCall>
  __device__ __forceinline__ T* given_at(int b) const {
    constexpr int kFirst = own_call<Cell, Config::kBackward>(kCall).first;
    constexpr int kPlane = Config::kBackward ? kFirst : kCall,
                  kPlanes = Config::kBackward ? kProductsOf<Cell> : kCalls;
    return given_ + ((step_row_ + b) * kPlanes + kPlane) * width();
  }
  template <int kCall, int kInputs>
  __device__ __forceinline__ void give(const UnitsPack (&given)[kInputs]) {
    constexpr int kOutputs = own_call<Cell, Config::kBackward>(kCall).outputs;
    [[maybe_unused]] auto&& exchange = exchange_of_call<kInputs>();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int b = row(i, 0);
      const bool exists = has_pair(i, b);
      T* const to = given_at<kCall>(b) + unit(i);
#pragma unroll
      for (int input = 0; input < kInputs; ++input) {
        const float2 x = make_float2(given[input].of[2 * i], given[input].of[2 * i + 1]);
        const int row = map_.pair_row(i), unit = map_.pair_unit(i);
        if constexpr (stays_in_block<kCall>()) {
          if (exists) write_pair(heads_.given.at(row, input) + unit, x.x, x.y);
        } else {
          exchange.give(to + input * width(), x, exists, row, input, unit);
        }
        if (!Config::kBackward || !exists) continue;
        // Each product's gradient is in memory, for those of the weights.
#pragma unroll
        for (int out = Exchange::kThroughL2; out < kOutputs; ++out) {
          write_pair(to + (out * kInputs + input) * width(), x.x, x.y);
        }
      }
    }
  }
  template <int kCall>
  __device__ static constexpr bool stays_in_block() {
    return Config::kHasWholeHeads && is_block_diagonal<Cell>(own_call<Cell, Config::kBackward>(kCall));
  }
  // Partial sums that all threads may then read.
  template <int kCall>
  __device__ __forceinline__ const float* multiply_given() {
    float products[own_call<Cell, Config::kBackward>(kCall).outputs][4] = {};
    const int b = map_.first_row + map_.g;
    const RowSource<T> source = {given_at<kCall>(b) + map_.element, b < map_.end_row ? map_.vectors : 0, true,
                                 map_.element, map_.g};
    if constexpr (stays_in_block<kCall>()) {
      __syncthreads();
      multiply_heads<kCall>(products, source);
    } else if constexpr (Config::kHasWholeHeads) {
      call_exchange_.pass_on();
      multiply_heads<kCall>(products, source);
    } else {
      multiply_exchanged<kCall>(products, source);
    }
    float* const sums = sums_ + (product_of(step_, 1 + kCall) & 1) * Sums::kSize;
    Sums::write(sums, products, map_);
    __syncthreads();
    return sums;
  }
  template <int kCall, int kOutputs>
  __device__ __forceinline__ void multiply_exchanged(float (&products)[kOutputs][4],
                                                     const RowSource<T>& source) {
    constexpr OwnCall kSizes = own_call<Cell, Config::kBackward>(kCall);
    constexpr int kInputs = kSizes.inputs;
    constexpr int kPerLoad = Exchange::kThroughL2 && Config::kShape.sharing_warps() == 1 ? kInputs : 1;
    auto&& exchange = exchange_of_call<kInputs>();
    exchange.pass_on();
    exchange.start(source);
#pragma unroll
    for (int input = 0; input < kInputs; input += kPerLoad) {
      uint4 vectors[kPerLoad][Config::kChunks];
      exchange.load(vectors, input, source);
#pragma unroll
      for (int i = 0; i < kPerLoad; ++i) {
        const auto& factors = reinterpret_cast<const uint4(&)[1][Config::kChunks]>(vectors[i]);
        WarpProduct<typename Config::Product, kOutputs, 1, Config::kChunks>::multiply(
            products, weights_, kGates + kSizes.first + (input + i) * kOutputs, factors, scratch_,
            map_.end_row - map_.first_row);
      }
    }
  }
  template <int kCall, int kInput = 0, int kOutputs>
  __device__ __forceinline__ void multiply_heads(float (&products)[kOutputs][4], const RowSource<T>& source) {
    constexpr OwnCall kSizes = own_call<Cell, Config::kBackward>(kCall);
    if constexpr (kInput < kSizes.inputs) {
      uint4 vectors[1][Config::kChunks];
      typename Heads::Vectors own;
      if constexpr (stays_in_block<kCall>()) {
        heads_.read(own, heads_.given, kInput, 0);
      } else {
        call_exchange_.load(vectors, kInput, source);
        heads_.read(own, call_exchange_.received(), kInput, map_.first_unit);
      }
      multiply_each<kGates + kSizes.first + kInput * kSizes.outputs>(products, vectors, own,
                                                                     map_.end_row - map_.first_row);
      multiply_heads<kCall, kInput + 1>(products, source);
    }
  }

  __device__ RowUnits units_of_rows(const GroupGrid& grid, const Storage& storage) const {
    if constexpr (kOverUnits) {
      const int blocks = grid.group_blocks, block = static_cast<int>(blockIdx.x);
      const int64_t group = int64_t{blockIdx.y} * grid.groups + block / blocks;
      return {storage.row_parts(),
              static_cast<char*>(static_cast<const GroupGridOfRows&>(grid).row_parts) +
                  group * Config::kShape.row_parts_bytes(blocks),
              hidden_,
              blocks,
              block % blocks,
              map_.pair_row(0),
              map_.has_pair(0, hidden_)};
    } else {
      return {};
    }
  }

  __device__ __forceinline__ Derived& derived() { return static_cast<Derived&>(*this); }

  // For groups of one row tile, if every step has the whole batch. A step takes about a microsecond, most of
  // it dependent instructions. So this loop keeps all addresses and states in registers, which the loop below
  // can't.
  __device__ __forceinline__ void run_one_tile() {
    Derived& self = derived();
    const int steps = self.steps();  // in a register, since a step waits for each load
    RowSource<T> source = self.begin_one_tile();
    exchange_.begin(self.first_h(), self.first_reset());
    if constexpr (!kIsSame<CallExchange, NoUnits>) call_exchange_.begin();
    prefetcher_.begin(self.rows_of(kStepsAhead).first, map_.end_row);
    for (int n = 0; n < steps; ++n) {
      const float* const sums = multiply_tile((kCalls > 0 ? product_of(n, 0) : n) & 1, source);
      source = self.next_source(source);
      if constexpr (kCalls > 0) step_ = n, step_row_ = self.rows_of(n).first;
      if constexpr (Config::kShape.cell.mixes_units()) {
        if (map_.warp_has_pair(0)) {
          self.step_pairs(sums);
        } else {
          multiply_all_given();
        }
      } else {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          if (map_.warp_has_pair(i)) self.step_pair(i, sums);
        }
      }
      if (Derived::kSendsLastStep || n + 1 < steps) exchange_.send();
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (map_.warp_has_pair(i)) self.prepare_pair(i, steps - 1 - n);
      }
      move_kept(self.kept_, self.to_next_);
      if (n + kStepsAhead < steps) prefetcher_.fetch_next(self.to_next_, map_.end_row);
      exchange_.advance();
      // Polling before the data can be there slows the traffic that brings it.
      if (Exchange::kThroughL2) __syncthreads();
    }
    self.end_one_tile(source);
  }

  // For any number of row tiles a group, and of rows in a step.
  __device__ __forceinline__ void run_any_rows() {
    Derived& self = derived();
    self.load_carried();
    int buffer = 0;
    StepRows previous = {0, 0}, current = self.rows_of(0);
    self.load_inputs(current, 0);
    RowSource<T> source = self.source_of(previous, current, 0);
    exchange_.start(source);
    for (int n = 0; n < self.turns(); ++n) {
      const StepRows next = self.rows_of(n + 1);
      for (int tile = 0; tile < map_.tiles; ++tile, buffer ^= 1) {
        float* const sums = sums_ + buffer * Sums::kSize;
        float products[Config::kWarpOutputs][4] = {};
        multiply(products, source);
        // The loads of the next tile are in flight while the cell runs on this one.
        const bool last = tile + 1 == map_.tiles;
        source = last ? self.source_of(current, next, 0) : self.source_of(previous, current, tile + 1);
        exchange_.start(source);
        Sums::write(sums, products, map_);
        __syncthreads();
        self.step_rows(sums, previous, current, next, tile);
        prefetcher_.fetch(self.rows_of(n + kStepsAhead), tile, map_.end_row);
        self.load_inputs(last ? next : current, last ? 0 : tile + 1);
        exchange_.advance();
      }
      previous = current;
      current = next;
    }
    self.store_carried();
  }
};

// The body of a kernel, for the architectures that have it.
template <class Config, class Steps>
__device__ __forceinline__ void run_persistent(const PerDirection<typename Steps::Arguments>& sequences,
                                               const GroupGrid& grid) {
#ifdef __CUDA_ARCH__
  if constexpr (Config::is_compiled(__CUDA_ARCH__)) {
    extern __shared__ __align__(128) float shared[];
    using Storage = typename Steps::Storage;
    if constexpr (Config::kHeads == 1) {
      Steps(sequences.of[blockIdx.y], grid, Storage(in_register(shared))).run();
    } else {
      const auto& sequence = sequences.of[blockIdx.y / Config::kHeads];
      const auto head = of_head<typename Config::Cell>(sequence, blockIdx.y % Config::kHeads,
                                                       sequence.hidden / Config::kHeads);
      Steps(head, grid, Storage(in_register(shared))).run();
    }
  } else {
    __trap();
  }
#endif
}

}  // namespace lltm_ext
