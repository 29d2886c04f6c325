// A cell whose kernels are compiled with the package: the table of their launchers. Other cells' kernels are
// compiled at run time (custom_cell/kernels.h).
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#ifdef LLTM_EXT_WITH_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <string>
#include <tuple>

#include "common/python.h"
#include "recurrence/persistent/launch.h"
#include "recurrence/plan.h"
#include "recurrence/stepwise/single_step.h"
#include "recurrence/stepwise/step.h"

namespace lltm_ext {

template <typename T>
struct CpuLaunchers {
  using Element = T;
  void (*step_forward)(const StepForwardArguments<T>&);
  void (*step_backward)(const StepBackwardArguments<T>&);
};

#ifdef LLTM_EXT_WITH_CUDA
// float64 has only the launchers of steps.
template <typename T>
struct CudaLaunchers {
  using Element = T;
  cudaError_t (*step_forward)(const StepForwardArguments<T>&, cudaStream_t);
  cudaError_t (*step_backward)(const StepBackwardArguments<T>&, cudaStream_t);
  cudaError_t (*plan)(const Problem&, Algorithm, Plan&);
  cudaError_t (*forward)(const PerDirection<SequenceForwardArguments<T>>&, const Plan&, void* links,
                         cudaStream_t);
  cudaError_t (*backward)(const PerDirection<SequenceBackwardArguments<T>>&, const Plan&, void* links,
                          cudaStream_t);
  cudaError_t (*single_step)(const SingleStepArguments<T>&, cudaStream_t);
};
#endif

struct CompiledCell {
  CellShape shape;
  const char* header;  // the text of the header that declares the cell, for what is compiled at run time
  const char* type;    // the cell's name in that header
  std::tuple<CpuLaunchers<float>, CpuLaunchers<double>, CpuLaunchers<c10::Half>, CpuLaunchers<c10::BFloat16>>
      cpu;
#ifdef LLTM_EXT_WITH_CUDA
  std::tuple<CudaLaunchers<float>, CudaLaunchers<double>, CudaLaunchers<__half>, CudaLaunchers<__nv_bfloat16>>
      cuda;
#endif
};

template <class Cell, typename T>
void set_launchers(CpuLaunchers<T>& launchers) {
  launchers = {recurrence_step<Cell>, recurrence_step<Cell>};
}
#ifdef LLTM_EXT_WITH_CUDA
template <class Cell, typename T>
void set_launchers(CudaLaunchers<T>& launchers) {
  launchers.step_forward = recurrence_step<Cell>;
  launchers.step_backward = recurrence_step<Cell>;
  if constexpr (!std::is_same_v<T, double>) {
    launchers.plan = plan_sequence<Cell, T>;
    launchers.forward = launch_sequence_forward<Cell, T>;
    launchers.backward = launch_sequence_backward<Cell, T>;
    launchers.single_step = launch_single_step<Cell, T>;
  }
}
#endif

template <class Cell>
CompiledCell compiled_cell(const char* header, const char* type) {
  CompiledCell cell = {kCellShape<Cell>, header, type};
  const auto set = [](auto&... launchers) { (set_launchers<Cell>(launchers), ...); };
  std::apply(set, cell.cpu);
#ifdef LLTM_EXT_WITH_CUDA
  std::apply(set, cell.cuda);
#endif
  return cell;
}

// Registers a cell under a name, which then is its program. The cell must not move.
#ifdef TORCH_EXTENSION_NAME
inline void share_compiled_cell(const char* name, const CompiledCell& cell) {
  py::module_::import("lltm_ext._C.custom_cell")
      .attr("add_compiled_cell")(name, reinterpret_cast<intptr_t>(&cell));
}
#endif
bool add_compiled_cell(const std::string& name, const CompiledCell& cell);  // defined where cells run

}  // namespace lltm_ext
