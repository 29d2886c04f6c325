"""A one-step LLTM extension with the structure of PyTorch's C++ extension tutorial, compiled at run time.

Forward: a cat, an addmm and one pointwise kernel, which writes into five tensors of zeros. Backward: one
pointwise kernel, two products and a sum. The code is our own. It runs on CUDA, in float32 and float64.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lltm_ext._install import toolchain

DECLARATIONS = """
using Tensors = std::vector<torch::Tensor>;
Tensors forward(torch::Tensor, torch::Tensor, torch::Tensor, torch::Tensor, torch::Tensor);
Tensors backward(torch::Tensor, torch::Tensor, torch::Tensor, torch::Tensor, torch::Tensor, torch::Tensor,
                 torch::Tensor, torch::Tensor, torch::Tensor);
"""

SOURCE = r"""
#define CHECK_INPUT(x) TORCH_CHECK(x.is_cuda() && x.is_contiguous(), #x " must be contiguous and on CUDA")

using Tensors = std::vector<torch::Tensor>;
constexpr int kThreads = 1024;

template <typename T>
__device__ T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}

// A thread computes unit `unit` of row `blockIdx.y`. Its three gates are `state` elements apart.
template <typename T>
__global__ void forward_kernel(const T* gates, const T* old_cell, T* new_h, T* new_cell, T* input_gate,
                               T* output_gate, T* candidate, int state) {
  const int unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= state) return;
  const T* gate = gates + blockIdx.y * 3 * state + unit;
  const int at = blockIdx.y * state + unit;
  const T z = gate[2 * state];
  input_gate[at] = sigmoid(gate[0]);
  output_gate[at] = sigmoid(gate[state]);
  candidate[at] = z > 0 ? z : expm1(z);
  new_cell[at] = old_cell[at] + candidate[at] * input_gate[at];
  new_h[at] = tanh(new_cell[at]) * output_gate[at];
}

template <typename T>
__global__ void backward_kernel(const T* grad_h, const T* grad_cell, const T* new_cell, const T* input_gate,
                                const T* output_gate, const T* candidate, const T* gates, T* d_old_cell,
                                T* d_gates, int state) {
  const int unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= state) return;
  const int first = blockIdx.y * 3 * state + unit, at = blockIdx.y * state + unit;
  const T i = input_gate[at], o = output_gate[at], z = gates[first + 2 * state], t = tanh(new_cell[at]);
  const T d_cell = grad_cell[at] + grad_h[at] * o * (1 - t * t);
  d_old_cell[at] = d_cell;
  d_gates[first] = d_cell * candidate[at] * i * (1 - i);
  d_gates[first + state] = grad_h[at] * t * o * (1 - o);
  d_gates[first + 2 * state] = d_cell * i * (z > 0 ? T(1) : exp(z));
}

dim3 blocks_for(const torch::Tensor& cell) {
  return dim3((cell.size(1) + kThreads - 1) / kThreads, cell.size(0));
}

Tensors forward(torch::Tensor input, torch::Tensor weights, torch::Tensor bias, torch::Tensor old_h,
                torch::Tensor old_cell) {
  for (const auto& x : {input, weights, bias, old_h, old_cell}) CHECK_INPUT(x);
  auto X = torch::cat({old_h, input}, 1);
  auto gates = torch::addmm(bias, X, weights.transpose(0, 1));
  auto new_h = torch::zeros_like(old_cell), new_cell = torch::zeros_like(old_cell);
  auto input_gate = torch::zeros_like(old_cell), output_gate = torch::zeros_like(old_cell);
  auto candidate = torch::zeros_like(old_cell);
  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "lltm_forward", [&] {
    forward_kernel<<<blocks_for(old_cell), kThreads>>>(
        gates.data_ptr<scalar_t>(), old_cell.data_ptr<scalar_t>(), new_h.data_ptr<scalar_t>(),
        new_cell.data_ptr<scalar_t>(), input_gate.data_ptr<scalar_t>(), output_gate.data_ptr<scalar_t>(),
        candidate.data_ptr<scalar_t>(), old_cell.size(1));
  });
  return {new_h, new_cell, input_gate, output_gate, candidate, X, gates};
}

Tensors backward(torch::Tensor grad_h, torch::Tensor grad_cell, torch::Tensor new_cell,
                 torch::Tensor input_gate, torch::Tensor output_gate, torch::Tensor candidate,
                 torch::Tensor X, torch::Tensor gates, torch::Tensor weights) {
  for (const auto& x : {grad_h, grad_cell, new_cell, input_gate, output_gate, candidate, X, gates, weights}) {
    CHECK_INPUT(x);
  }
  auto d_old_cell = torch::zeros_like(new_cell), d_gates = torch::zeros_like(gates);
  const auto state = new_cell.size(1);
  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "lltm_backward", [&] {
    backward_kernel<<<blocks_for(new_cell), kThreads>>>(
        grad_h.data_ptr<scalar_t>(), grad_cell.data_ptr<scalar_t>(), new_cell.data_ptr<scalar_t>(),
        input_gate.data_ptr<scalar_t>(), output_gate.data_ptr<scalar_t>(), candidate.data_ptr<scalar_t>(),
        gates.data_ptr<scalar_t>(), d_old_cell.data_ptr<scalar_t>(), d_gates.data_ptr<scalar_t>(), state);
  });
  auto d_weights = d_gates.t().mm(X), d_bias = d_gates.sum(0, /*keepdim=*/true), d_X = d_gates.mm(weights);
  return {d_X.slice(1, 0, state), d_X.slice(1, state), d_weights, d_bias, d_old_cell};
}
"""


def build(device: torch.device) -> Any:
    """The compiled module, for the architecture of `device` only. RuntimeError where it can't be compiled."""
    if device.type != "cuda":
        raise RuntimeError("it needs a CUDA device")
    cuda = toolchain.find_cuda(str(torch.version.cuda))
    toolchain.check_host()
    os.environ |= {"CUDA_HOME": str(cuda.home), "PATH": toolchain.search_path()}
    from torch.utils import cpp_extension  # reads CUDA_HOME

    cpp_extension.CUDA_HOME = str(cuda.home)  # if it was imported before
    folder = Path(cpp_extension.get_default_build_root(), "lltm_ext_cudart")
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcudart.so"  # which -lcudart needs, and PyPI's runtime lacks
    link.unlink(missing_ok=True)
    for library in [*cuda.home.glob("lib*/libcudart.so.*")][:1]:
        link.symlink_to(library)
    architecture = "{}{}".format(*torch.cuda.get_device_capability(device))
    return cpp_extension.load_inline(
        "lltm_tutorial_extension",
        DECLARATIONS,
        SOURCE,
        functions=["forward", "backward"],
        extra_cflags=["-O2"],
        extra_cuda_cflags=["-O2", f"-gencode=arch=compute_{architecture},code=sm_{architecture}"],
        extra_ldflags=[f"-L{folder}"],
    )
