"""What the run.py of every step calls: it compares the step with step 1, and measures its time.

A step is given as a function sequence(input [T, B, I], weights [3H, H + I], bias [3H], h [B, H], c [B, H])
that returns the output [T, B, H], and h and c after the last step.
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).parent / "1_python"))
from lltm import lltm_cell, steps

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
if "cuda" not in DEVICES:
    # torch compiles for the GPUs that it sees. Where it sees none, the architecture has to be named: without
    # this, `load` of a .cu file ends with "IndexError: list index out of range".
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")


def needs_gpu(step):
    if "cuda" not in DEVICES:
        print(f"{step}: compiled and imported; needs a GPU to run")
        sys.exit()


def with_pointwise(pointwise):
    """The sequence function with this pointwise part of a cell. torch multiplies."""

    def cell(x, weights, bias, h, c):
        return pointwise(F.linear(torch.cat([h, x], dim=1), weights, bias), c)

    return partial(steps, cell)


def arguments(steps, batch, input_size, hidden_size, device, dtype):
    torch.manual_seed(0)
    weights = torch.randn(3 * hidden_size, hidden_size + input_size, dtype=torch.float64) / hidden_size**0.5
    sizes = (steps, batch, input_size), (3 * hidden_size,), (batch, hidden_size), (batch, hidden_size)
    input, *others = (torch.randn(size, dtype=torch.float64) for size in sizes)
    return [x.to(device, dtype).requires_grad_() for x in (input, weights, *others)]


def check(sequence, device, dtype=torch.float64, sizes=(3, 4, 2, 5)):
    """Compares values and gradients with step 1 in float64. gradcheck compares with finite differences.

    sizes: steps, rows of the batch, features, hidden units.
    """
    at, exact_at = arguments(*sizes, device, dtype), arguments(*sizes, device, torch.float64)
    found, exact = sequence(*at), steps(lltm_cell, *exact_at)
    grads = [torch.randn_like(y) for y in exact]
    found = *found, *torch.autograd.grad(found, at, [x.to(dtype) for x in grads])
    exact = *exact, *torch.autograd.grad(exact, exact_at, grads)
    bound = 1e-10 if dtype == torch.float64 else 1e-4
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=bound, atol=bound * y.abs().max().item())
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(sequence, at)


def report(step, sequence, device, training=True, sizes=(100, 16, 32, 128)):
    """Prints the time of one step of a sequence in float32.

    Timer waits for the GPU. time.time() would measure launches: a call returns before its kernels end.
    """
    at = arguments(*sizes, device, torch.float32)

    def forward():
        with torch.no_grad():
            sequence(*at)

    def forward_and_backward():
        torch.autograd.grad(sequence(*at)[0].sum(), at)

    def microseconds(call):
        timer = Timer("call()", globals={"call": call})
        return timer.blocked_autorange(min_run_time=0.5).median / sizes[0] * 1e6

    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    text = f"{step} on {name}: agrees with step 1; a step takes {microseconds(forward):.1f} us forward"
    print(text + (f", {microseconds(forward_and_backward):.1f} us in training" if training else ""))
