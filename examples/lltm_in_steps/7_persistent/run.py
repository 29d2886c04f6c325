"""python examples/lltm_in_steps/7_persistent/run.py"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.cpp_extension import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from check import arguments, check, needs_gpu, report

sources = [str(Path(__file__).parent / name) for name in ("lltm.cpp", "lltm_kernel.cu")]
load("lltm_7_persistent", sources, extra_cflags=["-O2"], is_python_module=False)
ops = torch.ops.lltm_7


class Steps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, projection, weights, h, c):
        output, cells, gates = ops.forward(projection, weights, h, c)
        ctx.save_for_backward(weights, h, output, cells, gates)
        return output, cells[-1]

    @staticmethod
    def backward(ctx, grad_output, grad_c):
        """A loop in torch's ops. In lltm_ext it is a persistent kernel, too, which exchanges grad_gates."""
        weights, h0, output, cells, gates = ctx.saved_tensors
        i, o, z = gates.chunk(3, dim=2)
        i, o, z, tanh_c = i.sigmoid(), o.sigmoid(), F.elu(z), cells.tanh()
        # What the gradients of h and c are multiplied by, for all steps at once.
        by_h = o * (1 - tanh_c * tanh_c), tanh_c * o * (1 - o)
        by_c = z * i * (1 - i), i * (1 + z.clamp(max=0))
        grad_gates, grad_h = torch.empty_like(gates), torch.zeros_like(h0)
        for t in reversed(range(len(gates))):
            grad_h = grad_h + grad_output[t]
            grad_c = grad_c + grad_h * by_h[0][t]
            torch.cat([grad_c * by_c[0][t], grad_h * by_h[1][t], grad_c * by_c[1][t]], 1, out=grad_gates[t])
            grad_h = grad_gates[t] @ weights
        before = torch.cat([h0.unsqueeze(0), output[:-1]])
        return grad_gates, grad_gates.flatten(0, 1).t() @ before.flatten(0, 1), grad_h, grad_c


def sequence(input, weights, bias, h, c):
    hidden = h.shape[1]
    projection = F.linear(input, weights[:, hidden:], bias)
    output, c = Steps.apply(projection, weights[:, :hidden].contiguous(), h, c)
    return output, output[-1], c


needs_gpu("7_persistent")
for sizes in ((7, 19, 3, 256), (5, 1, 2, 128), (40, 17, 8, 512)):
    check(sequence, "cuda", torch.float32, sizes)
report("7_persistent", sequence, "cuda")

many_rows = arguments(1, 1 << 14, 1, 128, "cuda", torch.float32)
try:
    sequence(*many_rows)
    raise AssertionError("16,384 blocks ran at once")
except RuntimeError as error:
    assert "too many blocks in cooperative launch" in str(error), error
