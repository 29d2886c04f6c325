// A cell in the text form that the dispatcher carries, so that it can be traced and exported: the name of one
// that is compiled with the package, or the text of another one. The text has three fields
// (common/runtime/text.h): the cell's name; numbers, separated by commas; the C++ of its struct `Cell`
// (recurrence/cell.h). The numbers are those of its CellShape except `wide`, with the numbers of the states
// that are outputs, separated by spaces, -1 being h; then 1 if a unit of zeros stays so, forward and
// backward, else 0; then `wide`, `resets_to_initial`, `affine`, `over_units` and `bounded`, which programs of
// version 0.3 lack. If the cell has weights of its own, there follow `blocks`, `products_of_h`, the most
// outputs of a call forward, the most inputs and outputs of one backward, `head_units`, these sizes of dense
// calls, and the numbers of each product. Two more fields have the formulas forward and backward for the CPU
// (formula.h); programs of version 0.3 and cells in C++ lack them.
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>
#include <string>
#include <string_view>
#include <tuple>

#include "custom_cell/formula.h"
#include "recurrence/cell.h"
#include "recurrence/compiled_cell.h"

namespace lltm_ext {

// Which kernel of a cell: a persistent variant, a large layer's, fused steps with tiles of some rows, fused
// steps of few rows, independent units, a sequence of one step, or else a pointwise step.
struct CellKernel {
  at::ScalarType type;
  bool backward;
  int variant = -1;           // a persistent kernel's
  int fused_rows = 0;         // rows of a fused step's tile
  std::string reset = {};     // the resets' type, bool or float; only the first three kinds have it
  int independent_units = 0;  // units of a thread
  int small_batch = 0;        // most rows of a step
  int single_step_rows = 0;   // rows of a tile of a sequence of one step
  bool on_tensor_cores = false;
  bool dense = false;     // of independent units: all rows at every step, without resets
  int block_threads = 0;  // of independent units (IndependentUnits::kBlockThreads)
  int stage = 0;          // of a pointwise step: those that end in products, and the one after them
  int heads = 1;          // of a persistent kernel
  int large_tile = -1;    // a large layer's, in kLargeTiles or kLargeBackwardTiles
  bool narrow = false;    // whether it reads projections of half types that other kernels have in float32

  bool is_persistent() const { return variant >= 0; }
  bool is_large() const { return large_tile >= 0; }
  bool needs_wgmma() const { return is_fused_step() || is_large(); }
  bool is_fused_step() const { return fused_rows > 0; }
  bool is_small_batch() const { return small_batch > 0; }
  bool is_independent() const { return independent_units > 0; }
  bool is_single_step() const { return single_step_rows > 0; }
  auto key() const {
    return std::make_tuple(type, backward, variant, fused_rows, reset, independent_units, small_batch,
                           single_step_rows, on_tensor_cores, dense, block_threads, stage, heads, large_tile,
                           narrow);
  }
};

// A product of a step besides that with h.
struct CellProduct {
  int block;              // of the cell's own weights
  int fed;                // the number of the value that it takes
  int stage, back_stage;  // of the step forward and backward that it, or its gradient, ends
  bool block_diagonal;    // whether its weight is
};

struct CellProgram {
  explicit CellProgram(std::string_view text);

  // The program of a text. Each text is parsed once per process, and references stay valid.
  static const CellProgram& get(std::string_view text);

  std::string text, name, code;
  CellShape shape;
  std::vector<int> outputs = {-1};  // the states that are outputs; -1: h
  bool zeros_stay;
  std::vector<CellProduct> products = {};  // those of the previous h first, others by what they take
  const CompiledCell* compiled = nullptr;
  std::unique_ptr<const CellFormulas> formulas = {};  // for the CPU, or null

  // How many stages of a step end in products, before the one of the results.
  int stages(bool backward) const;

  // The CUDA C++ of one kernel, for NVRTC, under the name kCellKernelName.
  std::string source(const CellKernel& kernel) const;

 private:
  static const CellProgram& known(std::string_view text);
  std::string heads_text() const;
  std::vector<Formula> formulas_of(bool backward, std::string_view text) const;
};
constexpr const char* kCellKernelName = "custom_cell_kernel";

}  // namespace lltm_ext
