// The kernels of an op made at run time, on CUDA tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "elementwise/program.h"

namespace lltm_ext {

// Computes the forward or the gradients in `mask` on the current stream of the outputs' device. All tensors
// have one dtype; inputs are broadcast to the outputs, whose sizes and strides are equal.
void launch_program(const Program& program, GradMask mask, const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& inputs, at::ArrayRef<double> scalars);

}  // namespace lltm_ext
