// The launches of a cell, whose kernels are compiled with the package or at run time.
#pragma once

#include "common/dispatch.h"
#include "custom_cell/program.h"
#include "recurrence/persistent/launch.h"
#include "recurrence/plan.h"
#include "recurrence/stepwise/rows.h"
#include "recurrence/stepwise/single_step.h"
#include "recurrence/stepwise/step.h"

#ifdef LLTM_EXT_WITH_CUDA
#include "common/device.h"
#include "common/runtime/kernels.h"
#include "recurrence/large/launch.h"
#include "recurrence/stepwise/fused_launch.h"
#include "recurrence/stepwise/small_batch_launch.h"
#include "recurrence/without_product/launch.h"
#endif

namespace lltm_ext {

#ifdef LLTM_EXT_WITH_CUDA
// Describes the current device (common/device.cuh).
cudaError_t device_info(DeviceInfo& info);

// The kernel on the current device. It is compiled at its first use.
cudaKernel_t load_cell_kernel(const CellProgram& program, const CellKernel& kernel);

template <typename T>
constexpr at::ScalarType scalar_type_of() {
  if constexpr (std::is_same_v<T, double>) return at::kDouble;
  if constexpr (std::is_same_v<T, float>) return at::kFloat;
  return std::is_same_v<T, __half> ? at::kHalf : at::kBFloat16;
}
#endif

class CellOp {
 public:
  // Kernels that are compiled with the package take no resets. `reads_input`: whether kernels read the input
  // in place of its projections, in its own type.
  CellOp(const CellProgram& program, bool resets_on_cuda, bool reads_input)
      : program_(program),
        compiled_(resets_on_cuda ? nullptr : program.compiled),
        narrow_(reads_input && program.shape.wide) {}

  std::string name() const { return program_.name; }
  CellShape shape() const {
    CellShape shape = program_.shape;
    shape.wide = shape.wide && !narrow_;
    return shape;
  }
  const char* states_name() const { return program_.compiled ? "c0" : "states"; }
  bool is_compiled(const char* name) const { return program_.compiled && program_.name == name; }
  // Half types are only storage on the CPU: products in float32 are faster, and more exact.
  static bool runs_in_float32(const at::Tensor& input) { return input.is_cpu() && input.element_size() == 2; }
  static bool needs_multiple_of_8(const at::Tensor& input) { return input.is_cuda(); }
  bool zeros_stay() const { return program_.zeros_stay; }
  // The products of a step besides that with h.
  const std::vector<CellProduct>& products() const { return program_.products; }
  int stages(bool backward) const { return program_.stages(backward); }

  void check_device(const at::Tensor& input) const {
    TORCH_CHECK(program_.compiled || program_.formulas || !input.is_cpu(), name(),
                ": expected input on a CUDA device, got cpu");
  }

#ifdef LLTM_EXT_WITH_CUDA
  template <typename T>
  cudaError_t plan(Type<T>, const Problem& problem, Algorithm requested, Plan& plan) const {
    if (compiled_) {
      if (problem.heads > 1) return cudaSuccess;  // its persistent kernels take dense weights
      using Fused = std::conditional_t<std::is_same_v<T, double>, float, T>;  // float64 has steps only
      return launchers<Fused>().plan(problem, requested, plan);
    }
    DeviceInfo device;
    const cudaError_t error = device_info(device);
    if (error != cudaSuccess) return error;
    device.has_sm90a = device.compute_capability == 90;  // the code is compiled for the device
    plan = plan_recurrence(problem, device, requested);
    return cudaSuccess;
  }

  // `links`: memory through which the threads of the plan exchange values besides states
  // (SequenceSizes::links).
  template <template <typename> class Arguments, typename T>
  cudaError_t launch(const PerDirection<Arguments<T>>& sequences, const Plan& plan, void* links,
                     cudaStream_t stream) const {
    constexpr bool kBackward = std::is_same_v<Arguments<T>, SequenceBackwardArguments<T>>;
    if (compiled_) {
      if constexpr (kBackward) {
        return launchers<T>().backward(sequences, plan, links, stream);
      } else {
        return launchers<T>().forward(sequences, plan, links, stream);
      }
    }
    CellKernel which = {scalar_type_of<T>(), kBackward};
    if (plan.independent) {
      UnitTiles linked = plan.tiles;
      linked.links = links;
      return launch_independent(which, sequences.of[0], linked, stream);
    }
    if constexpr (std::is_same_v<T, float>) {
      if (plan.small_batch.rows > 0) {
        which.small_batch = plan.small_batch.rows;
        return launch_small_batch(which, sequences.of[0], plan.small_batch, stream);
      }
    }
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorNotSupported;  // no other plan is fused
    } else {
      const FusedStepTile& tile = plan.fused_step;
      which.variant = plan.variant;
      which.heads = plan.heads;
      which.fused_rows = tile.rows;
      if (sequences.of[0].reset) which.reset = sequences.of[0].reset_is_bool ? "bool" : "float";
      which.large_tile = plan.large.tile;
      const cudaKernel_t kernel = load(which);
      if (plan.large.tile >= 0) {
        return run_large_layers(kernel, shape(), sequences, plan.large, links, stream);
      }
      if (tile.rows > 0) return run_fused_steps(kernel, shape().gates, sequences.of[0], tile, stream);
      return launch_persistent(kernel, shape(), sequences, plan, stream, links);
    }
  }

  template <typename T>
  cudaError_t launch(const SingleStepArguments<T>& step, cudaStream_t stream) const {
    if (compiled_) return launchers<T>().single_step(step, stream);
    CellKernel which = {scalar_type_of<T>(), /*backward=*/false};
    which.on_tensor_cores = step.on_tensor_cores && step.has_vectors();
    const SingleStepTile tile =
        single_step_tile(step.batch, products_of_single_step(shape()), which.on_tensor_cores);
    which.single_step_rows = tile.rows;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(tile.blocks(step.batch, step.hidden)));
    config.blockDim = dim3(kSingleStepThreads);
    config.stream = stream;
    const void* arguments[] = {&step};
    return cudaLaunchKernelExC(&config, load(which), const_cast<void**>(arguments));
  }

  template <typename T>
  cudaError_t step(const StepForwardArguments<T>& step, int stage, cudaStream_t stream) const {
    if (compiled_) return launchers<T>().step_forward(step, stream);
    CellKernel which = {scalar_type_of<T>(), /*backward=*/false};
    which.stage = stage;
    return launch_step(which, step, stream);
  }
  template <typename T>
  cudaError_t step(const StepBackwardArguments<T>& step, int stage, cudaStream_t stream) const {
    if (compiled_) return launchers<T>().step_backward(step, stream);
    CellKernel which = {scalar_type_of<T>(), /*backward=*/true};
    which.stage = stage;
    return launch_step(which, step, stream);
  }
#else
  // Never called; code that is generic over the device names it.
  template <class Sequences>
  cudaError_t launch(const Sequences& sequences, const Plan& plan, void* links, cudaStream_t stream) const;
#endif

  // A stage of a step: of those that end in products, or the one after them. Without a stream, steps run on
  // the CPU.
  template <typename T>
  void step(const StepForwardArguments<T>& step, int stage) const {
    if (compiled_) return std::get<CpuLaunchers<T>>(compiled_->cpu).step_forward(step);
    if constexpr (std::is_same_v<T, acc_t<T>>) run_formula(program_.formulas->forward[stage], shape(), step);
  }
  template <typename T>
  void step(const StepBackwardArguments<T>& step, int stage) const {
    if (compiled_) return std::get<CpuLaunchers<T>>(compiled_->cpu).step_backward(step);
    if constexpr (std::is_same_v<T, acc_t<T>>) run_formula(program_.formulas->backward[stage], shape(), step);
  }

 private:
#ifdef LLTM_EXT_WITH_CUDA
  template <typename T>
  const CudaLaunchers<T>& launchers() const {
    return std::get<CudaLaunchers<T>>(compiled_->cuda);
  }

  template <class Arguments>
  cudaError_t launch_independent(CellKernel which, const Arguments& sequence, UnitTiles tiles,
                                 cudaStream_t stream) const {
    constexpr int kValueBytes = sizeof(*sequence.gates);
    const int64_t batch = sequence.steps.batch, hidden = sequence.hidden;
    const bool in_tiles = tiles.threads > 0;
    const int units = in_tiles ? tiles.units : independent_units(batch, hidden, kValueBytes);
    const int64_t threads = batch * (hidden / units);
    which.independent_units = units;
    which.dense = !sequence.steps.first_rows && !sequence.reset;
    which.block_threads = in_tiles ? tiles.threads : kIndependentThreads;
    const cudaKernel_t kernel = load(which);
    if (in_tiles) {
      tiles.input_bytes = tile_input_bytes(shape(), kValueBytes, which.backward, which.dense, tiles);
      return run_unit_tiles(kernel, sequence, tiles, shape(), stream);
    }
    DeviceInfo device;
    if (const cudaError_t error = device_info(device); error != cudaSuccess) return error;
    return run_independent_units(
        kernel, sequence, threads,
        independent_step_bytes(shape(), units, kValueBytes, which.backward, which.dense), device, stream);
  }

  template <class Arguments>
  cudaError_t launch_small_batch(const CellKernel& which, const Arguments& sequence,
                                 const SmallBatchTile& tile, cudaStream_t stream) const {
    DeviceInfo device;
    const cudaError_t error = device_info(device);
    if (error != cudaSuccess) return error;
    return run_small_batch_steps(load(which), shape().gates, sequence, tile,
                                 /*programmatic=*/device.compute_capability >= 90, stream);
  }

  // The kernel may begin before the matrix product that it reads has ended.
  template <class Step>
  cudaError_t launch_step(const CellKernel& which, const Step& step, cudaStream_t stream) const {
    if (step.batch * step.hidden == 0) return cudaSuccess;
    const cudaKernel_t kernel = load(which);
    DeviceInfo device;
    const cudaError_t error = device_info(device);
    if (error != cudaSuccess) return error;
    const bool is_hopper = device.compute_capability >= 90;
    RowOfThreads row = {};
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(pointwise_blocks(step.batch, step.hidden));
    config.blockDim = dim3(kPointwiseThreads);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = is_hopper ? 1 : 0;
    if (shape().over_units) {
      row = row_of_threads(step.hidden, is_hopper);
      TORCH_CHECK(row.blocks > 0, name(), ": expected a hidden_size that is at most ", kMostRowThreads,
                  is_hopper ? ", or a multiple of 2 to 8 that is at most so many times that" : "",
                  " on this GPU, because units read values over all units of their row, got ", step.hidden);
      config.gridDim = dim3(static_cast<unsigned>(step.batch * row.blocks));
      config.blockDim = dim3(row.threads);
      if (row.blocks > 1) {
        attributes[1].id = cudaLaunchAttributeClusterDimension;
        attributes[1].val.clusterDim = {static_cast<unsigned>(row.blocks), 1, 1};
        config.numAttrs = 2;
      }
    }
    const void* arguments[] = {&step, &row};  // only the kernel of rows takes the second
    return cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments));
  }
#endif

#ifdef LLTM_EXT_WITH_CUDA
  cudaKernel_t load(CellKernel which) const {
    which.narrow = narrow_;
    return load_cell_kernel(program_, which);
  }
#endif

  const CellProgram& program_;
  const CompiledCell* const compiled_;  // null: the call's kernels are compiled at run time
  const bool narrow_;  // whether kernels read projections of half types where the cell's are in float32
};

}  // namespace lltm_ext
