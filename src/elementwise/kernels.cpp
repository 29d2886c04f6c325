#ifdef LLTM_EXT_WITH_CUDA
#include "elementwise/kernels.h"

#include <ATen/TensorIterator.h>
#include <c10/cuda/CUDAStream.h>

#include <tuple>

#include "common/dispatch.h"
#include "common/elementwise_call.h"
#include "common/runtime/kernels.h"
#include "elementwise/compile.h"

namespace lltm_ext {
namespace {

using Kernels = std::vector<cudaKernel_t>;  // indexed by KernelVariant

Kernels load(const Program& program, at::ScalarType type, GradMask mask, c10::DeviceIndex device) {
  std::vector<std::string> names;
  for (int variant = 0; variant < kKernelVariants; ++variant) {
    names.push_back(program.kernel_name(static_cast<KernelVariant>(variant), mask));
  }
  return load_kernels(compile_program(program, type, mask, architecture_of(device)), names);
}

const Kernels& kernels_of(const Program& program, at::ScalarType type, GradMask mask,
                          c10::DeviceIndex device) {
  using Key = std::tuple<const Program*, at::ScalarType, GradMask, c10::DeviceIndex>;
  static auto& loaded = *new Memo<Key, Kernels>();
  return loaded.get({&program, type, mask, device}, [&] { return load(program, type, mask, device); });
}

// A backward has the most operands: all gradients, grad_output, the tensors, the output.
constexpr int kMaxOperands = 2 * kMaxTensors + 2;

// Outputs come before inputs. A kernel with fewer operands reads only the first rows of `strides`.
struct Operands {
  Operands(const Program& program, const std::vector<at::Tensor>& outputs,
           const std::vector<at::Tensor>& inputs)
      : n(outputs[0].numel()), flat(outputs[0].is_non_overlapping_and_dense()) {
    for (const at::Tensor& x : inputs) {
      flat = flat && x.sizes() == outputs[0].sizes() && x.strides() == outputs[0].strides();
    }
    if (flat) {
      void** next = pointers;
      for (const at::Tensor& y : outputs) *next++ = y.mutable_data_ptr();
      for (const at::Tensor& x : inputs) *next++ = const_cast<void*>(x.const_data_ptr());
      return;
    }
    at::TensorIteratorConfig config;
    config.resize_outputs(false).check_all_same_dtype(false);
    for (const at::Tensor& y : outputs) config.add_output(y);
    for (const at::Tensor& x : inputs) config.add_const_input(x);
    const at::TensorIterator iterator = config.build();
    TORCH_CHECK(iterator.ndim() <= kMaxDims, program.name, ": expected operands of at most ", kMaxDims,
                " dimensions that cannot be merged, got ", iterator.ndim());
    strides.dims = iterator.ndim();
    for (int d = 0; d < iterator.ndim(); ++d) strides.sizes[d] = iterator.shape()[d];
    for (int p = 0; p < iterator.ntensors(); ++p) {
      pointers[p] = iterator.data_ptr(p);
      for (int d = 0; d < iterator.ndim(); ++d) {
        strides.of[p][d] = iterator.strides(p)[d] / iterator.element_size(p);
      }
    }
  }

  int64_t n;
  bool flat;
  void* pointers[kMaxOperands];
  Strides<kMaxOperands> strides;
};

}  // namespace

void launch_program(const Program& program, GradMask mask, const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& inputs, at::ArrayRef<double> scalars) {
  const at::Tensor& like = outputs[0];
  const at::ScalarType type = like.scalar_type();
  const Kernels& kernels = kernels_of(program, type, mask, like.get_device());
  Operands operands(program, outputs, inputs);

  // The kernel's functor holds the scalars in the accumulate type. Without scalars it is one unused byte.
  const std::vector<float> floats(scalars.begin(), scalars.end());
  const double unused = 0;
  const void* formula = scalars.empty()       ? &unused
                        : type == at::kDouble ? static_cast<const void*>(scalars.data())
                                              : floats.data();

  const int element_size = static_cast<int>(like.element_size()), vector = 16 / element_size;
  KernelVariant variant = operands.n <= UINT32_MAX ? kStrided : kStrided64;
  int64_t threads = operands.n;
  int head = 0;
  if (operands.flat) {
    head =
        elementwise_head(operands.pointers, static_cast<int>(outputs.size() + inputs.size()), element_size);
    variant = head < vector ? kFlat : kScalar;
    if (variant == kFlat) {
      threads = (operands.n + vector - 1) / vector;
    } else {
      head = 0;
    }
  }
  const void* layout = operands.flat ? static_cast<const void*>(&head) : &operands.strides;
  const void* arguments[] = {formula, operands.pointers + outputs.size(), operands.pointers, layout,
                             &operands.n};
  check_launch(program.name.c_str(),
               cudaLaunchKernel(static_cast<const void*>(kernels[variant]), elementwise_blocks(threads),
                                kElementwiseThreads, const_cast<void**>(arguments), 0,
                                c10::cuda::getCurrentCUDAStream(like.get_device())));
}

}  // namespace lltm_ext
#endif
