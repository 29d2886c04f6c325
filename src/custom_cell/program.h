// A cell in the text form that the dispatcher carries, so that it can be traced and exported: the name of one
// that is compiled with the package, or the text of another one. The text has three fields
// (common/runtime/text.h): the cell's name; numbers, separated by commas; the C++ of its struct `Cell`
// (recurrence/cell.h). The numbers are those of its CellShape except `wide`; then 1 if a unit of zeros stays
// so, forward and backward, else 0; then `wide`, `resets_to_initial`, `affine` and `over_units`, which
// programs of version 0.3 lack.
// Two more fields have the formulas forward and backward for the CPU (formula.h); programs of version 0.3 and
// cells in C++ lack them.
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

// Which kernel of a cell: a persistent variant, fused steps with tiles of some rows, fused steps of few rows,
// independent units, a sequence of one step, or else a pointwise step.
struct CellKernel {
  at::ScalarType type;
  bool backward;
  int variant = -1;           // a persistent kernel's
  int fused_rows = 0;         // rows of a fused step's tile
  std::string reset = {};     // the resets' type, bool or float; only the first two kinds have it
  int independent_units = 0;  // units of a thread
  int small_batch = 0;        // most rows of a step
  int single_step_rows = 0;   // rows of a tile of a sequence of one step
  bool on_tensor_cores = false;
  bool dense = false;     // of independent units: all rows at every step, without resets
  int block_threads = 0;  // of independent units (IndependentUnits::kBlockThreads)

  bool is_persistent() const { return variant >= 0; }
  bool is_fused_step() const { return fused_rows > 0; }
  bool is_small_batch() const { return small_batch > 0; }
  bool is_independent() const { return independent_units > 0; }
  bool is_single_step() const { return single_step_rows > 0; }
  auto key() const {
    return std::make_tuple(type, backward, variant, fused_rows, reset, independent_units, small_batch,
                           single_step_rows, on_tensor_cores, dense, block_threads);
  }
};

struct CellProgram {
  explicit CellProgram(std::string_view text);

  // The program of a text. Each text is parsed once per process, and references stay valid.
  static const CellProgram& get(std::string_view text);

  std::string text, name, code;
  CellShape shape;
  bool zeros_stay;
  const CompiledCell* compiled = nullptr;
  std::unique_ptr<const CellFormulas> formulas = {};  // for the CPU, or null

  // The CUDA C++ of one kernel, for NVRTC, under the name kCellKernelName.
  std::string source(const CellKernel& kernel) const;

 private:
  static const CellProgram& known(std::string_view text);
};
constexpr const char* kCellKernelName = "custom_cell_kernel";

}  // namespace lltm_ext
