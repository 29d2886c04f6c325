// From a program to its loaded kernels, and their launches.
#include "elementwise/kernels.h"

#include <ATen/TensorIterator.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "common/dispatch.h"
#include "common/elementwise_call.h"
#include "elementwise/compiler.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace lltm_ext {

const Program& program_of(std::string_view text) {
  // Never removed: an entry is a few hundred bytes, and calls keep references. The keys are the entries' own.
  // Calls in a row are mostly of one op: to compare costs less than to hash.
  static thread_local const Program* last = nullptr;
  if (last && last->text == text) return *last;
  static std::mutex mutex;
  static auto& programs = *new std::unordered_map<std::string_view, std::unique_ptr<const Program>>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = programs.find(text); found != programs.end()) return *(last = found->second.get());
  auto program = std::make_unique<const Program>(text);
  const std::string_view key = program->text;
  return *(last = (programs[key] = std::move(program)).get());
}

std::string description(const Program& program, Wanted wanted) {
  if (!wanted) return program.name;
  std::string names;
  for (int i = 0; i < program.output(); ++i) {
    if (wanted >> i & 1) names += (names.empty() ? "" : ", ") + program.tensors[i];
  }
  return program.name + ": backward of " + names;
}

namespace {

const char* element_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float";
    case at::kDouble:
      return "double";
    case at::kHalf:
      return "__half";
    case at::kBFloat16:
      return "__nv_bfloat16";
    default:
      TORCH_CHECK_TYPE(false, "elementwise: expected dtype float16, bfloat16, float32 or float64, got ",
                       c10::getDtypeNames(type).first);
  }
}

}  // namespace

std::string source_for(const Program& program, at::ScalarType type, Wanted wanted) {
  return program.source(element_of(type), wanted);
}

std::string binary_for(const Program& program, at::ScalarType type, Wanted wanted,
                       const std::string& architecture) {
  return compile(description(program, wanted), source_for(program, type, wanted), architecture);
}

#ifdef LLTM_EXT_WITH_CUDA

namespace {

struct Kernels {
  cudaKernel_t flat, scalar, strided, strided64;
};

std::string architecture_of(c10::DeviceIndex device) {
  int major, minor;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return "sm_" + std::to_string(major) + std::to_string(minor);
}

// For the current device. The library stays, as the kernels of this package do.
Kernels load(const Program& program, at::ScalarType type, Wanted wanted, c10::DeviceIndex device) {
  const std::string binary = binary_for(program, type, wanted, architecture_of(device));
  const c10::cuda::CUDAStreamCaptureModeGuard also_while_capturing(cudaStreamCaptureModeRelaxed);
  cudaLibrary_t library;
  C10_CUDA_CHECK(cudaLibraryLoadData(&library, binary.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  Kernels kernels;
  cudaKernel_t* const handles[] = {&kernels.flat, &kernels.scalar, &kernels.strided, &kernels.strided64};
  for (int form = 0; form < 4; ++form) {
    C10_CUDA_CHECK(
        cudaLibraryGetKernel(handles[form], library, program.kernel(kForms[form], wanted).c_str()));
  }
  return kernels;
}

const Kernels& kernels_of(const Program& program, at::ScalarType type, Wanted wanted,
                          c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto& loaded =
      *new std::map<std::tuple<const Program*, at::ScalarType, Wanted, c10::DeviceIndex>, Kernels>();
  const auto key = std::make_tuple(&program, type, wanted, device);
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = loaded.find(key); found != loaded.end()) return found->second;
  return loaded.emplace(key, load(program, type, wanted, device)).first->second;
}

constexpr int kMaxOperands = 2 * kMaxTensors + 2;  // gradients, and what they follow from

// The operands of a launch. A kernel of fewer operands reads the beginning of `strides` alone.
struct Operands {
  int64_t n;
  const void* outputs[kMaxTensors];
  const void* inputs[kMaxTensors + 2];
  bool flat = true;
  Strides<kMaxOperands> strides;
};

void take_strides(Operands& operands, const Program& program, const std::vector<at::Tensor>& outputs,
                  const std::vector<at::Tensor>& inputs) {
  at::TensorIteratorConfig config;
  config.resize_outputs(false).check_all_same_dtype(false);
  for (const at::Tensor& y : outputs) config.add_output(y);
  for (const at::Tensor& x : inputs) config.add_const_input(x);
  const at::TensorIterator iterator = config.build();
  TORCH_CHECK(iterator.ndim() <= kMaxDims, program.name, ": expected operands of at most ", kMaxDims,
              " dimensions that cannot be merged, got ", iterator.ndim());
  operands.flat = false;
  operands.strides.dims = iterator.ndim();
  for (int p = 0; p < iterator.ntensors(); ++p) {
    const int k = p - static_cast<int>(outputs.size());
    (k < 0 ? operands.outputs[p] : operands.inputs[k]) = iterator.data_ptr(p);
  }
  for (int d = 0; d < iterator.ndim(); ++d) {
    operands.strides.sizes[d] = iterator.shape()[d];
    for (int p = 0; p < iterator.ntensors(); ++p) {
      operands.strides.of[p][d] = iterator.strides(p)[d] / iterator.element_size(p);
    }
  }
}

void take_operands(Operands& operands, const Program& program, const std::vector<at::Tensor>& outputs,
                   const std::vector<at::Tensor>& inputs) {
  const at::Tensor& like = outputs[0];
  operands.n = like.numel();
  bool flat = like.is_non_overlapping_and_dense();
  for (const at::Tensor& x : inputs) {
    flat = flat && x.sizes() == like.sizes() && x.strides() == like.strides();
  }
  if (!flat) return take_strides(operands, program, outputs, inputs);
  for (size_t m = 0; m < outputs.size(); ++m) operands.outputs[m] = outputs[m].mutable_data_ptr();
  for (size_t k = 0; k < inputs.size(); ++k) operands.inputs[k] = inputs[k].const_data_ptr();
}

}  // namespace

void launch_program(const Program& program, Wanted wanted, const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& inputs, at::ArrayRef<double> scalars) {
  const at::Tensor& like = outputs[0];
  const at::ScalarType type = like.scalar_type();
  const Kernels& kernels = kernels_of(program, type, wanted, like.get_device());
  Operands operands;
  take_operands(operands, program, outputs, inputs);

  // The formula's scalars, as its kernel has them: of the type that arithmetic runs in.
  const std::vector<float> floats(scalars.begin(), scalars.end());
  const double none = 0;
  const void* formula = &none;
  if (!scalars.empty())
    formula = type == at::kDouble ? static_cast<const void*>(scalars.data()) : floats.data();

  int head = 0;
  cudaKernel_t kernel;
  int64_t threads = operands.n;
  if (!operands.flat) {
    kernel = operands.n <= UINT32_MAX ? kernels.strided : kernels.strided64;
  } else {
    const void* pointers[kMaxOperands];
    const int count = static_cast<int>(outputs.size() + inputs.size());
    std::copy_n(operands.outputs, outputs.size(), pointers);
    std::copy_n(operands.inputs, inputs.size(), pointers + outputs.size());
    const int size = static_cast<int>(like.element_size()), vector = 16 / size;
    head = elementwise_head(pointers, count, size);
    if (head < vector) {
      kernel = kernels.flat;
      threads = (operands.n + vector - 1) / vector;
    } else {
      kernel = kernels.scalar;
      head = 0;
    }
  }
  const void* const where = operands.flat ? static_cast<const void*>(&head) : &operands.strides;
  const void* arguments[] = {formula, operands.inputs, operands.outputs, where, &operands.n};
  check_launch(
      program.name.c_str(),
      cudaLaunchKernel(static_cast<const void*>(kernel), elementwise_blocks(threads), kElementwiseThreads,
                       const_cast<void**>(arguments), 0, c10::cuda::getCurrentCUDAStream(like.get_device())));
}

#endif

}  // namespace lltm_ext
