"""python examples/lltm_in_steps/4_autograd/run.py"""

import sys
from pathlib import Path

import torch
from torch.library import opcheck, register_autograd, register_fake
from torch.utils.cpp_extension import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from check import DEVICES, check, report, with_pointwise

load(
    "lltm_4_autograd", [str(Path(__file__).parent / "lltm.cpp")], extra_cflags=["-O2"], is_python_module=False
)
ops = torch.ops.lltm_4


# What torch.compile calls: the shapes of the results, without computing them.
@register_fake("lltm_4::pointwise")
def _(gates, c):
    return torch.empty_like(c), torch.empty_like(c)


@register_fake("lltm_4::pointwise_backward")
def _(grad_h, grad_c, gates, new_c):
    return torch.empty_like(gates), torch.empty_like(new_c)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1])  # the gates and the new c


def backward(ctx, grad_h, grad_c):
    return ops.pointwise_backward(grad_h, grad_c, *ctx.saved_tensors)


register_autograd("lltm_4::pointwise", backward, setup_context=setup_context)

sequence = with_pointwise(ops.pointwise)
for device in DEVICES:
    gates, c = torch.randn(4, 15, device=device), torch.randn(4, 5, device=device)
    opcheck(ops.pointwise_backward.default, (c, c, gates, c))
    # Schema, autograd, fake tensors, and torch.compile's tracing of both directions.
    opcheck(ops.pointwise.default, (gates.requires_grad_(), c.requires_grad_()))
    check(sequence, device)
report("4_autograd", sequence, DEVICES[-1])
