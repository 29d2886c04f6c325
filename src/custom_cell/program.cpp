#include "custom_cell/program.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "common/runtime/text.h"

namespace lltm_ext {
namespace {

constexpr int kMaxValues = 1024;  // gates, states, ... of a unit

int number(const std::string& cell, const std::string& text, int least) {
  int value = least - 1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK_VALUE(
      error == std::errc() && end == text.data() + text.size() && value >= least && value <= kMaxValues, cell,
      ": expected a number from ", least, " to ", kMaxValues, ", got '", text, "'");
  return value;
}

std::map<std::string, const CompiledCell*>& compiled_cells() {
  static auto& cells = *new std::map<std::string, const CompiledCell*>();
  return cells;
}

// What differs between the sources of kernels. `call` is the kernel's body.
struct KernelText {
  std::string header, parameters, bounds, call;
};

KernelText text_of(const CellKernel& kernel, const CellShape& shape, bool ends_in_products) {
  const char* const direction = kernel.backward ? "Backward" : "Forward";
  if (kernel.is_fused_step()) {
    const std::string body = c10::str("hopper::FusedStepKernel<hopper::Fused", direction, "Step<Cell, T, ",
                                      kernel.fused_rows, ", ", kernel.reset.empty() ? "false" : "true", ">>");
    return {"stepwise/fused_hopper.cuh",
            c10::str("const __grid_constant__ Fused", direction, "Arguments<T> args, int step"),
            c10::str(body, "::kThreads, ", body, "::kBlocks"), c10::str(body, "::run(args, step)")};
  }
  if (kernel.is_large()) {
    const char* const name = kernel.backward ? "backward" : "forward";
    const std::string config =
        c10::str("hopper::Large", kernel.backward ? direction : "", "Config<Cell, T, ", kernel.large_tile,
                 ", ", kernel.reset.empty() ? "false" : "true", ">");
    return {c10::str("large/", name, ".cuh"),
            c10::str("const __grid_constant__ Large", direction, "Arguments<T> args"),
            "LargeShape::kThreads, 1", c10::str("hopper::run_large_", name, "<", config, ">(args)")};
  }
  if (kernel.is_small_batch()) {
    return {"stepwise/small_batch.cuh",
            c10::str("const __grid_constant__ Sequence", direction,
                     "Arguments<T> args, int step, const SmallBatchTile tile"),
            "SmallBatchShape::kMostThreads, 2",
            c10::str("run_small_batch<SmallBatchKernel<SmallBatch", direction, "<Cell>, ", kernel.small_batch,
                     ">>(args, step, tile)")};
  }
  if (kernel.is_persistent()) {
    const std::string reset = kernel.reset.empty() && kernel.heads > 1 ? "NoReset" : kernel.reset,
                      heads = kernel.heads > 1 ? c10::str(", ", kernel.heads) : "";
    const std::string config =
        c10::str("PersistentConfig<Cell, T, ", kernel.variant, ", ", kernel.backward ? "true" : "false",
                 reset.empty() ? "" : ", ", reset, heads, ">");
    return {
        kernel.backward ? "persistent/backward.cuh" : "persistent/forward.cuh",
        c10::str("const __grid_constant__ PerDirection<Sequence", direction,
                 "Arguments<T>> sequences, const GroupGrid", shape.mixes_units() ? "OfRows" : "", " grid"),
        c10::str(config, "::kShape.threads(), ", config, "::kShape.blocks()"),
        c10::str("run_persistent<", config, ", ", direction, "Steps<", config, ">>(sequences, grid)")};
  }
  if (kernel.is_independent()) {
    const int threads = kernel.block_threads;
    const std::string of_cell = c10::str("<Cell, T, ", kernel.independent_units,
                                         kernel.dense ? ", true, " : ", false, ", threads, ">");
    const std::string parameters = c10::str("const __grid_constant__ Sequence", direction,
                                            "Arguments<T> sequence, const __grid_constant__ UnitTiles tiles");
    if (threads == kIndependentThreads) {
      return {kernel.backward ? "without_product/backward.cuh" : "without_product/forward.cuh", parameters,
              c10::str(threads),
              c10::str("Independent", direction, of_cell, "(sequence, independent_thread()).run(tiles)")};
    }
    // Registers for so many threads of a multiprocessor. Maps of pairs or of several states take more, and
    // shared memory has room for fewer such threads.
    const int resident = shape.live_states() > 1 ? 384 : kernel.independent_units > 1 ? 512 : 768;
    return {"without_product/tiles.cuh", parameters, c10::str(threads, ", ", resident / threads),
            c10::str("run_tile_of_units<", direction, "Map", of_cell, ">(sequence, tiles)")};
  }
  if (kernel.is_single_step()) {
    const std::string step =
        kernel.on_tensor_cores
            ? c10::str("SingleStepOnTensorCores<Cell, T, ", kernel.single_step_rows, " / kRowTile>")
            : c10::str("SingleStepByThreads<Cell, T, ", kernel.single_step_rows, ">");
    return {"stepwise/single_step.cuh", "const __grid_constant__ SingleStepArguments<T> arguments",
            "kSingleStepThreads", c10::str("run_single_step<", step, ">(arguments)")};
  }
  const std::string step = c10::str("const Step", direction, "Arguments<T> step");
  if (shape.over_units) {
    return {"stepwise/rows.cuh", step + ", const RowOfThreads row", "kMostRowThreads",
            c10::str("__shared__ RowOfUnits<acc_t<T>>::Memory memory;\n  run_rows<Cell, T",
                     ends_in_products ? c10::str(", ", kernel.stage) : "", ">(step, row, memory)")};
  }
  return {"stepwise/pointwise.cuh", step, "kPointwiseThreads",
          ends_in_products ? c10::str("run_pointwise_stage<Cell, T, ", kernel.stage, ">(step)")
                           : "run_pointwise<Cell>(step)"};
}

}  // namespace

bool add_compiled_cell(const std::string& name, const CompiledCell& cell) {
  compiled_cells()[name] = &cell;
  return true;
}

CellProgram::CellProgram(std::string_view text_) : text(text_) {
  if (const auto found = compiled_cells().find(text); found != compiled_cells().end()) {
    compiled = found->second;
    name = text;
    shape = compiled->shape;
    zeros_stay = true;
    // The code is inside the namespace, which the header opens itself.
    code = c10::str("}  // namespace lltm_ext\n", compiled->header,
                    "\nnamespace lltm_ext {\nusing Cell = ", compiled->type, ";\n");
    return;
  }
  const Strings fields = fields_of(text);
  const bool has_formulas = fields.size() == 5;
  const Strings numbers = fields.size() == 3 || has_formulas ? split(fields[1], ',') : Strings();
  TORCH_CHECK_VALUE(numbers.size() >= 10 && (numbers.size() <= 15 || numbers.size() % 5 == 4),
                    "custom_cell: expected a program as lltm_ext.recurrence writes it, got ", fields.size(),
                    " fields");
  name = fields[0];
  code = fields[2];
  TORCH_CHECK_VALUE(is_identifier(name), "custom_cell: expected the cell's name, got '", name, "'");
  const auto n = [&](int i, int least = 0) { return number(name, numbers[i], least); };
  outputs.clear();
  for (const std::string& x : split(numbers[8], ' ')) outputs.push_back(number(name, x, /*least=*/-1));
  shape = {n(0),
           n(1),
           n(2),
           n(3),
           n(4),
           n(5) != 0,
           n(6) != 0,
           n(7) != 0,
           static_cast<int>(outputs.size()),
           outputs == std::vector<int>{-1},
           numbers.size() > 10 && n(10) != 0,
           numbers.size() > 11 && n(11) != 0,
           numbers.size() > 12 && n(12) != 0,
           numbers.size() > 13 && n(13) != 0,
           numbers.size() > 15 ? n(15) : 0};
  shape.bounded = numbers.size() > 14 && n(14) != 0;
  zeros_stay = n(9) != 0;
  for (int i = 24; i < static_cast<int>(numbers.size()); i += 5) {
    products.push_back({n(i), n(i + 1), n(i + 2), n(i + 3), n(i + 4) != 0});
    const CellProduct& product = products.back();
    TORCH_CHECK_VALUE(product.block < shape.blocks, name, ": expected a block of ", shape.blocks, ", got ",
                      product.block);
    shape.fed = std::max(shape.fed, product.fed + 1);
  }
  if (!products.empty()) {
    shape.products_of_h = n(16);
    shape.call = {0, n(17) > 0, n(17)};
    shape.back_call = {0, n(18), n(19)};
    shape.head_units = n(20);
    shape.dense_call = {0, n(21) > 0, n(21)};
    shape.dense_back_call = {0, n(22), n(23)};
    for (const CellProduct& x : products) shape.block_diagonal += x.block_diagonal;
  }
  shape.products = static_cast<int>(products.size());
  if (has_formulas) {
    formulas = std::make_unique<const CellFormulas>(
        CellFormulas{formulas_of(/*backward=*/false, fields[3]), formulas_of(/*backward=*/true, fields[4])});
  }
  TORCH_CHECK_VALUE(shape.gates > 0 || !shape.recurrent, name, ": expected at least one gate");
  for (const int state : outputs) {
    TORCH_CHECK_VALUE(state < shape.states, name, ": expected the output to be one of ", shape.states,
                      " states, got ", state);
  }
}

int CellProgram::stages(bool backward) const {
  int count = 0;
  for (const CellProduct& x : products) count = std::max(count, (backward ? x.back_stage : x.stage) + 1);
  return count;
}

std::vector<Formula> CellProgram::formulas_of(bool backward, std::string_view text) const {
  std::vector<Formula> found;
  for (std::string_view rest = text;;) {
    const size_t end = rest.find(" | ");
    found.emplace_back(name, shape, outputs, backward, rest.substr(0, end));
    if (end == std::string_view::npos) break;
    rest.remove_prefix(end + 3);
  }
  TORCH_CHECK_VALUE(static_cast<int>(found.size()) == stages(backward) + 1, name,
                    ": expected the instructions of ", stages(backward), " stages and of the results, got ",
                    found.size(), " lists");
  return found;
}

const CellProgram& CellProgram::get(std::string_view text) {
  // A comparison takes less time than a hash, and a model's layers mostly have one cell.
  static thread_local const CellProgram* last = nullptr;
  if (last && last->text == text) return *last;
  return *(last = &known(text));
}

const CellProgram& CellProgram::known(std::string_view text) {
  static std::mutex mutex;
  static auto& programs = *new std::unordered_map<std::string_view, std::unique_ptr<const CellProgram>>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = programs.find(text); found != programs.end()) return *found->second;
  auto program = std::make_unique<const CellProgram>(text);
  const std::string_view key = program->text;
  return *(programs[key] = std::move(program));
}

std::string CellProgram::heads_text() const {
  if (shape.head_units == 0) return {};
  unsigned block_diagonal = 0;
  for (size_t i = 0; i < products.size(); ++i) block_diagonal |= unsigned{products[i].block_diagonal} << i;
  return c10::str("\ntemplate <>\nconstexpr int kHeadUnits<Cell> = ", shape.head_units,
                  ";\ntemplate <>\nconstexpr unsigned kBlockDiagonal<Cell> = ", block_diagonal, ";\n");
}

std::string CellProgram::source(const CellKernel& kernel) const {
  const std::string& reset = kernel.reset;
  TORCH_CHECK_VALUE(reset.empty() || reset == "bool" || reset == "float", name,
                    ": expected reset to be '', 'bool' or 'float', got '", reset, "'");
  const KernelText text = text_of(kernel, shape, kernel.stage < stages(kernel.backward));
  return c10::str(
      "#include \"recurrence/", text.header, "\"\n\nnamespace lltm_ext {\n\n", code,
      shape.resets_to_initial ? "\ntemplate <>\nconstexpr bool kResetsToInitial<Cell> = true;\n" : "",
      kernel.narrow ? "\ntemplate <>\nconstexpr bool kIsWide<Cell> = false;\n" : "",
      shape.affine ? "\ntemplate <>\nconstexpr bool kIsAffine<Cell> = true;\n" : "",
      shape.bounded ? "\ntemplate <>\nconstexpr bool kIsBounded<Cell> = true;\n" : "", heads_text(),
      "\nusing T = ", element_name(name.c_str(), kernel.type),
      ";\n\nextern \"C\" __global__ void __launch_bounds__(", text.bounds, ")\n    ", kCellKernelName, "(",
      text.parameters, ") {\n  ", text.call, ";\n}\n\n}  // namespace lltm_ext\n");
}

}  // namespace lltm_ext
