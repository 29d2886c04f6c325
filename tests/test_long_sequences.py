"""Sequences in chunks, as docs/scaling.md recommends: exact by recomputation, or truncated."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_suite import BACKWARD, DOUBLE, Make, assert_all_near
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import lltm_ext
from lltm_ext.cells import ugrnn

LAYERS = {
    "LSTM": lambda **options: lltm_ext.LSTM(3, 5, num_layers=2, **options),
    "LLTM": lambda **options: lltm_ext.LLTM(3, 5, num_layers=2, **options),
    "GRU": lambda **options: lltm_ext.GRU(3, 5, num_layers=2, **options),
    "RNN": lambda **options: lltm_ext.RNN(3, 5, num_layers=2, **options),
    "own cell": lambda **options: lltm_ext.Recurrent(ugrnn, 3, 5, num_layers=2, **options),
}
of_each_layer = pytest.mark.parametrize("name", LAYERS)
CHUNK = 7  # of 23 steps: the last chunk is shorter


def states_of(layer, make):
    _, hx = layer(make(1, 4, 3))
    return pytree.tree_map(lambda x: make(*x.shape).requires_grad_(), hx)


def gradients(layer, input, hx, loss):
    wanted = [input, *pytree.tree_leaves(hx), *layer.parameters()]
    return torch.autograd.grad(loss, wanted)


def in_chunks(run, input, hx, between=lambda hx: hx):
    total = 0.0
    for x in input.split(CHUNK):
        loss, hx = run(x, hx)
        total, hx = total + loss, between(hx)
    return total


@pytest.fixture
def sequence(name, device):
    layer, make = LAYERS[name](device=device, dtype=DOUBLE), Make(DOUBLE, device)
    return layer, make(23, 4, 3).requires_grad_(), states_of(layer, make)


def run_of(layer):
    def run(x, hx):
        output, hx = layer(x, hx)
        return output.square().sum(), hx

    return run


@of_each_layer
def test_recomputed_chunks_have_the_gradients_of_the_whole_sequence(sequence):
    layer, input, hx = sequence
    run = run_of(layer)

    def recomputed(x, hx):
        return checkpoint(run, x, hx, use_reentrant=False)

    whole = gradients(*sequence, run(input, hx)[0])
    assert_all_near(
        gradients(*sequence, in_chunks(recomputed, input, hx)), whole, BACKWARD[DOUBLE], "gradient"
    )


@of_each_layer
def test_detached_states_stop_the_gradient_between_chunks(sequence):
    layer, input, hx = sequence
    run = run_of(layer)

    def detached(hx):
        return pytree.tree_map(torch.Tensor.detach, hx)

    (truncated,) = torch.autograd.grad(in_chunks(run, input, hx, detached), input)
    alone = torch.autograd.grad(run(input[:CHUNK], hx)[0], input)[0][:CHUNK]
    (whole,) = torch.autograd.grad(run(input, hx)[0], input)
    assert_all_near([truncated[:CHUNK], truncated[-2:]], [alone, whole[-2:]], BACKWARD[DOUBLE], "gradient")
    assert not torch.allclose(truncated[:CHUNK], whole[:CHUNK])


# In a process of its own, which grows by what it needs, whatever earlier tests freed.
MEMORY = """
import re
import torch
from pathlib import Path
from torch.utils.checkpoint import checkpoint
import lltm_ext

layer, input = lltm_ext.LSTM(8, 64), torch.randn(2048, 16, 8)

def run(x, hx):
    output, hx = layer(x, hx)
    return output.square().sum(), hx

def whole():
    run(input, None)[0].backward()

def exact():
    total, hx = 0.0, None
    for x in input.split(64):
        loss, hx = checkpoint(run, x, hx, use_reentrant=False)
        total = total + loss
    total.backward()

def size(key):
    return int(re.search(rf"{key}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

def growth(function):
    Path("/proc/self/clear_refs").write_text("5")  # forget the largest size so far
    before = size("VmRSS")
    function()
    return size("VmHWM") - before

exact()  # loads libraries
print(growth(exact), growth(whole))
"""


def test_recomputed_chunks_take_a_tenth_of_the_memory():
    elsewhere = Path(__file__).parent  # here it imports the installed package, not the sources
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, cwd=elsewhere, check=True, capture_output=True, text=True)
    in_chunks, whole = map(int, done.stdout.split())
    assert whole > 64 << 20
    assert in_chunks < whole / 10
