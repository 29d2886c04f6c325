"""python examples/lltm_in_steps/6_sequence/run.py"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.cpp_extension import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from check import DEVICES, arguments, check, lltm_cell, needs_gpu, report, steps

sources = [str(Path(__file__).parent / name) for name in ("lltm.cpp", "lltm_kernel.cu")]
load("lltm_6_sequence", sources, extra_cflags=["-O2"], is_python_module=False)
ops = torch.ops.lltm_6


class Steps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, projection, weights, h, c):
        output, cells, gates = ops.forward(projection, weights, h, c)
        ctx.save_for_backward(weights, h, output, cells, gates)
        return output, cells[-1]

    @staticmethod
    def backward(ctx, grad_output, grad_c):
        weights, h, output, cells, gates = ctx.saved_tensors
        grad_gates, grad_c = ops.backward(
            grad_output.contiguous(), grad_c.contiguous(), weights, gates, cells
        )
        before = torch.cat([h.unsqueeze(0), output[:-1]])  # the h that a step multiplies
        grad_weights = grad_gates.flatten(0, 1).t() @ before.flatten(0, 1)  # the sum of all steps' products
        return grad_gates, grad_weights, grad_gates[0] @ weights, grad_c


def sequence(input, weights, bias, h, c):
    hidden = h.shape[1]
    projection = F.linear(input, weights[:, hidden:], bias)  # of all steps at once
    output, c = Steps.apply(projection, weights[:, :hidden].contiguous(), h, c)
    return output, output[-1], c


@torch.no_grad()
def in_a_graph(input, *others):
    """A function that copies its arguments into these and replays the call, which the graph has recorded."""
    recorded = [x.detach().clone() for x in (input, *others)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a first call initializes can't be recorded
        sequence(*recorded)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = sequence(*recorded)

    def replay(*arguments):
        for x, y in zip(recorded, arguments, strict=True):
            x.copy_(y)
        graph.replay()
        return results

    return replay


for device in DEVICES:
    check(sequence, device)
report("6_sequence", sequence, DEVICES[-1])
needs_gpu("6_sequence in a CUDA graph")

at = arguments(100, 16, 32, 128, "cuda", torch.float32)
replay = in_a_graph(*at)
with torch.no_grad():
    at[0].neg_()
    torch.testing.assert_close(replay(*at), steps(lltm_cell, *at), rtol=1e-3, atol=1e-3)
report("6_sequence in a CUDA graph", replay, "cuda", training=False)
