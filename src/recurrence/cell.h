// The contract of a recurrent cell, and a sequence of its steps as kernels see it: pointers, sizes, the order
// of the steps. No torch.
//
// A cell is a struct that computes one unit of one row, from its pre-activations to the next h and back:
//
//   struct Cell : CellDefaults {
//     static constexpr int kGates, kStates, kSaved;  // and what differs from CellDefaults
//     // Returns the new h, replaces the states by the new ones and fills `saved`.
//     template <typename Math, typename A>
//     static A forward(const CellInputs<Cell, A>& in, A (&states)[kStates], A (&saved)[kSaved]);
//     // Computes the gradients of what forward read from that of the new h, and replaces the gradients of
//     // the new states by those of the old ones. Of `in` it gets the parameters, the step inputs and, of a
//     // cell without a product, the projections and the previous h (backward_reads, kBackwardReadsH).
//     template <typename Math, typename A>
//     static void backward(const A (&saved)[kSaved], const CellInputs<Cell, A>& in, A grad_h,
//                          A (&grad_states)[kStates], CellGradients<Cell, A>& grads);
//   };
//
// An array that would have no elements has one, which is not used.
//
// In shapes, B is the batch, H the hidden size, N the rows of all steps (length * B if every step has the
// whole batch), G = kGates, S = kStates, O = kOutputsOf, P = kParameters, K = kStepInputs. The first G saved
// values overwrite the gates, unless these are wide; the other E have their own array. The backward of a cell
// without a product reads the projections and h of every step again, so all that it saves is there.
#pragma once

#include "common/types.h"

namespace lltm_ext {

// Products that a persistent kernel computes in the middle of a step. Forward: `outputs` products of one
// value. Backward: for `outputs` values, the sum of the products of the same `inputs` gradients with
// transposed blocks.
struct OwnCall {
  int first, inputs, outputs;  // the first product; the others follow it
};

// A cell's sizes and properties, as values.
struct CellShape {
  int gates;                // pre-activations of a unit: the input's projections, and products with h
  int states;               // values of a unit that a step hands on to the next, besides h
  int saved;                // values saved for backward
  int parameters;           // parameters of a unit
  int step_inputs;          // inputs of a unit in each step, which get no gradients
  bool recurrent;           // whether there are products with h
  bool separate;            // whether the cell sees projections and products apart, or their sums
  bool reads_h;             // whether a unit reads its own previous h
  int outputs;              // values of a unit that a step outputs, of h and the states
  bool outputs_h;           // whether h is the only one
  bool wide;                // whether the projections of half types are in float32
  bool resets_to_initial;   // whether a reset leads to the initial h and states, not to zeros
  bool affine;              // whether the new h, if the cell reads h, and states are affine in the old ones
  bool over_units;          // whether a unit reads values over all units of its row, such as their mean
  int blocks;               // [H, H] of further weights, in rows of weight_hh after those of the gates
  int products;             // products of a step with these
  int fed;                  // values that these products take
  int products_of_h;        // the first products, if these take the previous h
  OwnCall call, back_call;  // the most inputs and outputs of the calls of all others, and of the backward
  // Of products with block-diagonal weights:
  int head_units;                       // units of a head, or 0 if there are none
  int block_diagonal;                   // how many there are
  OwnCall dense_call, dense_back_call;  // as `call`, of the calls in which not all products are such
  bool bounded;                         // whether |h| <= 1 after every step

  // Planes of gates that forward keeps for backward: saved values or, without a product, the projections.
  constexpr int kept_gates() const { return recurrent && wide ? 0 : gates; }
  constexpr int saved_in_gates() const {
    return !recurrent ? 0 : saved < kept_gates() ? saved : kept_gates();
  }
  constexpr int extra() const { return saved - saved_in_gates(); }
  constexpr int live_states() const { return states + reads_h; }  // values that a unit keeps between steps
  constexpr int sums() const { return gates + parameters; }       // gradients that are summed over all rows
  // Values that products take besides h, one after the other in a step.
  constexpr int fed_apart() const { return fed - (products_of_h > 0); }
  // Whether units read more than their own values.
  constexpr bool mixes_units() const { return over_units || products > 0; }
  constexpr int rows_of_weight_hh() const { return gates + blocks; }  // in hidden_size rows
  // Whether a step's output is not the h that the row's next step starts from.
  constexpr bool has_output_apart() const { return !outputs_h || (resets_to_initial && recurrent); }
};

struct CellDefaults {
  static constexpr int kParameters = 0, kStepInputs = 0;
  static constexpr bool kRecurrent = true, kSeparate = false, kReadsH = false;
  static constexpr int kOutputState = -1;
  // Which projections, and whether the previous h, backward reads of `in`.
  LLTM_HOST_DEVICE static constexpr bool backward_reads(int) { return false; }
  static constexpr bool kBackwardReadsH = false;
};

// The products of a step besides that with h, and the values that they take, of a cell that has such
// products.
template <class Cell, class = void>
constexpr int kProductsOf = 0;
template <class Cell>
constexpr int kProductsOf<Cell, decltype(void(Cell::kProducts))> = Cell::kProducts;
template <class Cell, class = void>
constexpr int kFedOf = 0;
template <class Cell>
constexpr int kFedOf<Cell, decltype(void(Cell::kFed))> = Cell::kFed;
template <class Cell, class = void>
constexpr int kBlocksOf = 0;
template <class Cell>
constexpr int kBlocksOf<Cell, decltype(void(Cell::kBlocks))> = Cell::kBlocks;
template <class Cell, bool kBackward>
LLTM_HOST_DEVICE constexpr int own_calls() {
  if constexpr (kProductsOf<Cell> == 0) {
    return 0;
  } else {
    return kBackward ? Cell::kBackCalls : Cell::kCalls;
  }
}
template <class Cell, bool kBackward>
LLTM_HOST_DEVICE constexpr OwnCall own_call(int i) {
  return kBackward ? Cell::back_call(i) : Cell::call(i);
}
// The units of a head in a cell's block-diagonal weights, and which products have such weights, a bit each. A
// program that knows them specializes these.
template <class Cell>
constexpr int kHeadUnits = 0;
template <class Cell>
constexpr unsigned kBlockDiagonal = 0;

template <class Cell>
LLTM_HOST_DEVICE constexpr bool is_block_diagonal(int product) {
  return product < 32 && (kBlockDiagonal<Cell> >> product & 1) != 0;
}
template <class Cell>
LLTM_HOST_DEVICE constexpr int block_diagonal_products() {
  int count = 0;
  for (int i = 0; i < kProductsOf<Cell>; ++i) count += is_block_diagonal<Cell>(i);
  return count;
}
// Whether all products of a call have block-diagonal weights.
template <class Cell>
LLTM_HOST_DEVICE constexpr bool is_block_diagonal(const OwnCall& call) {
  for (int i = 0; i < call.inputs * call.outputs; ++i) {
    if (!is_block_diagonal<Cell>(call.first + i)) return false;
  }
  return true;
}
// The most inputs and outputs of a cell's calls, or of its dense ones.
template <class Cell, bool kBackward>
LLTM_HOST_DEVICE constexpr OwnCall largest_own_call(bool dense_only) {
  OwnCall largest = {0, 0, 0};
  if constexpr (own_calls<Cell, kBackward>() > 0) {
    for (int i = 0; i < own_calls<Cell, kBackward>(); ++i) {
      const OwnCall call = own_call<Cell, kBackward>(i);
      if (dense_only && is_block_diagonal<Cell>(call)) continue;
      if (call.inputs > largest.inputs) largest.inputs = call.inputs;
      if (call.outputs > largest.outputs) largest.outputs = call.outputs;
    }
  }
  return largest;
}
template <class Cell>
LLTM_HOST_DEVICE constexpr int products_of_h() {
  if constexpr (kProductsOf<Cell> > 0) {
    return Cell::kProductsOfH;
  } else {
    return 0;
  }
}

// The outputs of a step: the state kOutputState, or kOutputs of them, each output_at(i), of a cell that has
// several. -1 is h.
template <class Cell, class = void>
struct OutputsOf {
  static constexpr int kCount = 1;
  LLTM_HOST_DEVICE static constexpr int at(int) { return Cell::kOutputState; }
};
template <class Cell>
struct OutputsOf<Cell, decltype(void(Cell::kOutputs))> {
  static constexpr int kCount = Cell::kOutputs;
  LLTM_HOST_DEVICE static constexpr int at(int i) { return Cell::output_at(i); }
};
template <class Cell>
constexpr int kOutputsOf = OutputsOf<Cell>::kCount;
template <class Cell>
constexpr bool kOutputsH = kOutputsOf<Cell> == 1 && OutputsOf<Cell>::at(0) < 0;

// Whether a cell sets kOverUnits: its functions read values over all units of a row, by CellInputs::units.
template <class Cell, class = void>
constexpr bool kIsOverUnits = false;
template <class Cell>
constexpr bool kIsOverUnits<Cell, decltype(void(Cell::kOverUnits))> = Cell::kOverUnits;

// Whether a cell sets kWideProjections. A cell that decides by a comparison does: rounded projections would
// take other branches than those of float32.
template <class Cell, class = void>
constexpr bool kIsWide = false;
template <class Cell>
constexpr bool kIsWide<Cell, decltype(void(Cell::kWideProjections))> = Cell::kWideProjections;

// Whether a cell sets kBounded: |h| <= 1 after every step, or h is NaN, whatever the step reads.
template <class Cell, class = void>
constexpr bool kIsBounded = false;
template <class Cell>
constexpr bool kIsBounded<Cell, decltype(void(Cell::kBounded))> = Cell::kBounded;

// Whether a reset of the cell leads to the initial h and states, not to zeros; a program that says so
// specializes it. Each step of a cell with a product then hands on what the row's next step starts from: no
// step has to reset what it reads, and products see the h that a step starts from.
template <class Cell>
constexpr bool kResetsToInitial = false;

// CellShape::affine of a cell; a program that says so specializes it. Such a cell hands h on in float32 where
// it stays in registers, so that the result does not depend on how steps are grouped.
template <class Cell>
constexpr bool kIsAffine = false;

// Whether a cell has saved_state: the new h and states are affine in the old ones, and what it saves are old
// states, of these numbers.
template <class Cell, class = void>
constexpr bool kSavesStatesOnly = false;
template <class Cell>
constexpr bool kSavesStatesOnly<Cell, decltype(void(Cell::saved_state(0)))> = true;

template <class Cell>
constexpr CellShape kCellShape = {Cell::kGates,
                                  Cell::kStates,
                                  Cell::kSaved,
                                  Cell::kParameters,
                                  Cell::kStepInputs,
                                  Cell::kRecurrent,
                                  Cell::kSeparate,
                                  Cell::kReadsH,
                                  kOutputsOf<Cell>,
                                  kOutputsH<Cell>,
                                  kIsWide<Cell>,
                                  kResetsToInitial<Cell>,
                                  kIsAffine<Cell>,
                                  kIsOverUnits<Cell>,
                                  kBlocksOf<Cell>,
                                  kProductsOf<Cell>,
                                  kFedOf<Cell>,
                                  products_of_h<Cell>(),
                                  largest_own_call<Cell, false>(/*dense_only=*/false),
                                  largest_own_call<Cell, true>(/*dense_only=*/false),
                                  kHeadUnits<Cell>,
                                  block_diagonal_products<Cell>(),
                                  largest_own_call<Cell, false>(/*dense_only=*/true),
                                  largest_own_call<Cell, true>(/*dense_only=*/true),
                                  kIsBounded<Cell>};

// The type of a cell's projections in memory.
template <class Cell, typename T>
using projection_t = typename Conditional<kIsWide<Cell>, acc_t<T>, T>::type;

constexpr int at_least_one(int n) { return n > 0 ? n : 1; }

// What the units of a row compute together, in the kernels that do (stepwise/rows.cuh, persistent/units.cuh).
template <typename A>
class RowOfUnits {};
struct NoUnits {};

template <class Cell, typename A>
struct CellInputs {
  A x[at_least_one(Cell::kGates)];                        // projections, with the products unless kSeparate
  A r[at_least_one(Cell::kSeparate ? Cell::kGates : 0)];  // products, if kSeparate
  A h;                                                    // the previous h, if kReadsH
  A parameters[at_least_one(Cell::kParameters)];
  A steps[at_least_one(Cell::kStepInputs)];
  A products[at_least_one(kProductsOf<Cell>)];  // those of the stages before or, in whole steps, of h
  typename Conditional<kIsOverUnits<Cell>, RowOfUnits<A>, NoUnits>::type units;
};

// The gradients of the members of CellInputs.
template <class Cell, typename A>
struct CellGradients {
  A x[at_least_one(Cell::kGates)];
  A r[at_least_one(Cell::kSeparate ? Cell::kGates : 0)];
  A h = 0;
  A parameters[at_least_one(Cell::kParameters)];
  A fed[at_least_one(kFedOf<Cell>)];  // no gradients: what the products with the cell's own weights took

  // The gradient of a product with h.
  LLTM_HOST_DEVICE A product(int gate) const { return Cell::kSeparate ? r[gate] : x[gate]; }
};

// What the gradient of a step's i-th output is added to.
template <class Cell, typename A>
LLTM_HOST_DEVICE A& gradient_of_output(A& grad_h, A* grad_states, int i) {
  const int state = OutputsOf<Cell>::at(i);
  return state < 0 ? grad_h : grad_states[state];
}

// The i-th output of a step, given its h and states.
template <class Cell, typename A>
LLTM_HOST_DEVICE const A& output_of(const A& h, const A* states, int i) {
  const int state = OutputsOf<Cell>::at(i);
  return state < 0 ? h : states[state];
}

// The rows of a step.
struct StepRows {
  int64_t first;
  int count;
};

// Which rows belong to which step. The rows of a step are the first `count` rows of the batch. Steps are
// numbered in the order in which forward computes them.
struct StepOrder {
  int length, batch;
  bool reverse;               // from the last time step to the first
  const int64_t* first_rows;  // [length + 1] on the device for a packed sequence; null if all have `batch`

  // Steps before the first and after the last have no rows.
  LLTM_HOST_DEVICE StepRows at(int k) const {
    if (k < 0 || k >= length) return {0, 0};
    const int t = reverse ? length - 1 - k : k;
    if (!first_rows) return {static_cast<int64_t>(t) * batch, batch};
    return {first_rows[t], static_cast<int>(first_rows[t + 1] - first_rows[t])};
  }
};

// What a row keeps of h and its states at a reset: all or nothing, or a share.
LLTM_HOST_DEVICE bool mask_of(bool reset) { return !reset; }
template <typename A>
LLTM_HOST_DEVICE A mask_of(A reset) {
  return 1 - reset;
}

// x scaled by what a row keeps. Nothing of an infinity or NaN is left if that is 0.
template <typename A>
LLTM_HOST_DEVICE A scale_by_mask(bool keep, A x) {
  return keep ? x : 0;
}
template <typename A>
LLTM_HOST_DEVICE A scale_by_mask(A keep, A x) {
  return keep == 0 ? 0 : keep * x;
}

// x after a reset to `initial`: all of one of them, or a share of both.
template <typename Reset, typename A>
LLTM_HOST_DEVICE A reset_to(Reset reset, A x, A initial) {
  return scale_by_mask(mask_of(reset), x) + scale_by_mask(reset, initial);
}

// The share of h and its states that each row loses before a step.
template <typename A>
struct Resets {
  const void* rows;  // bools or As; null: no row loses anything
  bool are_bools;

  LLTM_HOST_DEVICE Resets from(int64_t row) const {
    if (!rows) return *this;
    return {are_bools ? static_cast<const void*>(as<bool>() + row) : as<A>() + row, are_bools};
  }
  // The shares that the row loses, and keeps.
  LLTM_HOST_DEVICE A share(int64_t row) const {
    if (!rows) return 0;
    return are_bools ? A(as<bool>()[row]) : as<A>()[row];
  }
  LLTM_HOST_DEVICE A mask(int64_t row) const { return mask_of(share(row)); }

 private:
  template <typename Row>
  LLTM_HOST_DEVICE const Row* as() const {
    return static_cast<const Row*>(rows);
  }
};

// The arguments of kernels that run all steps forward. Blocks exchange h through `output`, also if it is not
// the output (has_output_apart). With 128 bytes, a power of two, a direction's address is cheap.
template <typename T>
struct SequenceForwardArguments {
  using A = acc_t<T>;
  StepOrder steps;
  int hidden;
  bool save;           // whether to leave in `gates` and `extra` what backward needs
  bool narrow_states;  // whether states0 and states_n have values of T, not of A
  bool reset_is_bool;
  bool has_bias;         // whether the gates' biases follow the parameters, as the projections lack them
  const T* weight;       // [G * H, H]; of a cell without a product, the projections, if not in `gates`
  const T* parameters;   // [P, H], or [P + G, H]
  const T* step_inputs;  // [N, K, H]
  const void* reset;     // [N] of bool or A: what a row loses of h and its states before a step; or null
  const T* h0;           // [B, H], or null for zeros
  const void* states0;   // [S, B, H], or null for zeros
  T* gates;              // [N, G, H] the input's projections (projections()); if `save`, replaced by saved
                         // values (CellShape::saved_in_gates)
  T* extra;              // [N, E, H] the other saved values
  T* output;             // [N, H] h of every step or, with a product and resets to h0, what its row's next
                         // step starts from
  T* output_apart;       // [N, O, H] the outputs of every step, if they are not that; else null
  T* h_n;                // [B, H]
  void* states_n;        // [S, B, H]

  template <class Cell>
  LLTM_HOST_DEVICE projection_t<Cell, T>* projections() const {
    return reinterpret_cast<projection_t<Cell, T>*>(gates);
  }
  template <class Cell>
  LLTM_HOST_DEVICE const projection_t<Cell, T>* projections_without_product() const {
    return weight ? reinterpret_cast<const projection_t<Cell, T>*>(weight) : projections<Cell>();
  }
  LLTM_HOST_DEVICE Resets<A> resets() const { return {reset, reset_is_bool}; }
};
static_assert(sizeof(SequenceForwardArguments<float>) == 128);

// The arguments of kernels that run steps [begin, end) backward. The gradient of h after these steps is the
// sum of grad_h and, if the cell reads h, grad_own_h: what reached it through weights and without them.
// The gradients after the last step can be zeros that are not in memory.
template <typename T>
struct SequenceBackwardArguments {
  using A = acc_t<T>;
  StepOrder steps;
  int begin, end;
  int64_t first_row, rows;  // the rows of these steps
  int hidden;
  bool from_zeros;  // whether grad_h, grad_own_h and grad_states start as zeros that are not in memory
  bool reset_is_bool;
  bool has_bias;         // as forward's
  const T* weight_t;     // [H, G * H]
  const T* parameters;   // [P, H], or [P + G, H]
  const T* step_inputs;  // [N, K, H]
  const void* reset;     // [N] of bool or A, or null
  const T* gates;        // [N, G, H] as forward left them; without a product, projection_t
  const T* extra;        // [N, E, H]
  const T* grad_output;  // [N, O, H] of the outputs, or null for zeros
  T* grad_gates;         // [rows, G, H]; if the cell sees projections and products apart, of the products
  T* grad_projections;   // [rows, G, H] of the projections, in that case; else not written
  T* grad_h;             // [B, H] after these steps; replaced by that before them
  A* grad_own_h;         // [B, H] likewise, or null
  A* grad_states;        // [S, B, H] likewise
  A* grad_initial;       // [1 + S, B, H] += gradients of h0 and states0 through resets to them; or null.
                         // Each thread of a unit has its own (without_product/tiles.cuh)
  A* grad_sums;          // [B, G + P, H] += gradients of the projections and the parameters; a group adds
                         // those of all its tiles to the first tile's rows; or null. Each tile has its
                         // own, too
  const T* output;       // [N, H] h of every step, for a cell without a product
  const T* h0;           // [B, H], or null for zeros, for such a cell
  T* grad_products;      // [rows, products, H] of the products with the cell's own weights, if it has such
  T* fed;                // [rows, fed, H] what these took

  LLTM_HOST_DEVICE Resets<A> resets() const { return {reset, reset_is_bool}; }
};

// The steps that a launch runs.
template <typename T>
int64_t steps_of(const SequenceForwardArguments<T>& sequence) {
  return sequence.steps.length;
}
template <typename T>
int64_t steps_of(const SequenceBackwardArguments<T>& sequence) {
  return sequence.end - sequence.begin;
}

// The sequences of a layer's directions, which one launch runs side by side (blockIdx.y). All sizes agree.
constexpr int kMaxDirections = 2;
template <class Arguments>
struct PerDirection {
  Arguments of[kMaxDirections];
  int count;
  int64_t rows;  // N, for the launch of kernels forward
};

}  // namespace lltm_ext
