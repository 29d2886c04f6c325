// A cell in the text form that the dispatcher carries, so that it can be traced and exported: the name of one
// that is compiled with the package, or the text of another one. The text's fields (common/runtime/text.h):
// the cell's name; numbers, separated by commas; the C++ of its struct `Cell` (recurrence/cell.h); and for the
// CPU its formulas forward and backward (formula.h), which programs of version 0.3 and cells in C++ lack. The
// numbers are those of its CellShape but `wide`; 1 if a unit of zeros stays so, forward and backward, else 0;
// `wide`, which programs of version 0.3 lack.
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

// A kernel of a cell: a persistent one of a variant, that of fused steps with tiles of some rows, that of
// fused steps of few rows, that of independent units, or that of a pointwise step.
struct CellKernel {
  at::ScalarType type;
  bool backward;
  int variant = -1;           // of a persistent kernel
  int fused_rows = 0;         // of fused steps
  std::string reset = {};     // of a call with resets, their type: bool or float; the first two kinds ask
  int independent_units = 0;  // of a thread
  int small_batch = 0;        // most rows of a step

  bool is_persistent() const { return variant >= 0; }
  bool is_fused_step() const { return fused_rows > 0; }
  bool is_small_batch() const { return small_batch > 0; }
  bool is_independent() const { return independent_units > 0; }
  auto key() const {
    return std::make_tuple(type, backward, variant, fused_rows, reset, independent_units, small_batch);
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
};
constexpr const char* kCellKernelName = "custom_cell_kernel";

}  // namespace lltm_ext
