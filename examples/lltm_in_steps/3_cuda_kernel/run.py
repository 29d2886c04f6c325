"""python examples/lltm_in_steps/3_cuda_kernel/run.py"""

import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from check import check, needs_gpu, report, with_pointwise

sources = [str(Path(__file__).parent / name) for name in ("lltm.cpp", "lltm_kernel.cu")]
lltm = load("lltm_3_cuda_kernel", sources, extra_cflags=["-O2"])
needs_gpu("3_cuda_kernel")


class PointwiseFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates, c):
        new_h, new_c = lltm.forward(gates, c)
        ctx.save_for_backward(gates, new_c)
        return new_h, new_c

    @staticmethod
    def backward(ctx, grad_h, grad_c):
        return lltm.backward(grad_h.contiguous(), grad_c.contiguous(), *ctx.saved_tensors)


sequence = with_pointwise(PointwiseFunction.apply)
check(sequence, "cuda")
report("3_cuda_kernel", sequence, "cuda")
