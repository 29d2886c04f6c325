"""python examples/lltm_in_steps/2_cpp/run.py"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils.cpp_extension import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from check import DEVICES, check, report, steps

# Compiles at the first call, and later only what has changed.
lltm = load("lltm_2_cpp", [str(Path(__file__).parent / "lltm.cpp")], extra_cflags=["-O2"])


class LLTMFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, bias, h, c):
        new_h, new_c, *for_backward = lltm.forward(x, weights, bias, h, c)
        ctx.save_for_backward(weights, *for_backward)
        return new_h, new_c

    @staticmethod
    def backward(ctx, grad_h, grad_c):
        return tuple(lltm.backward(grad_h, grad_c, *ctx.saved_tensors))


sequence = partial(steps, LLTMFunction.apply)
for device in DEVICES:
    check(sequence, device)
report("2_cpp", sequence, DEVICES[-1])
