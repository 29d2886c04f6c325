"""The kernel of large layers: on the CPU, where tests/emulation runs it, and whole layers on a GPU.

(Cell by cell: test_custom_cell.py.)
"""

import functools
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from op_suite import Call, Make, forward_and_gradients
from sequence_suite import OPS, relative_errors
from torch.backends import cudnn

import lltm_ext

ROOT = Path(__file__).parents[1]
EMULATION = ROOT / "tests" / "emulation"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
# As in test_persistent_kernels.py, but -O1: the program's products take longer than its compilation.
FLAGS = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")


def test_the_kernel_computes_what_a_loop_over_the_steps_does(tmp_path):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "large_layers"
    includes = [f"-I{path}" for path in (EMULATION, ROOT / "src")]  # the emulation replaces some headers
    subprocess.run([COMPILER, *FLAGS, *includes, EMULATION / "large_layers.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
HOPPER = pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs Hopper, which has the kernel")


@pytest.fixture
def tf32():
    before, cudnn.allow_tf32 = cudnn.allow_tf32, True  # torch's default, which conftest.py turns off
    yield
    cudnn.allow_tf32 = before


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("batch,hidden", [(256, 1024), (70, 1536), (1100, 512)])
def test_both_directions_are_those_of_two_layers(batch, hidden, dtype, tf32):
    options = {"device": "cuda", "dtype": dtype}
    both = lltm_ext.LSTM(24, hidden, bidirectional=True, **options)
    x = torch.randn(9, batch, 24, **options)
    output, (h, c) = both(x)
    for i, direction in enumerate(("", "_reverse")):
        alone = lltm_ext.LSTM(24, hidden, **options)
        alone.load_state_dict({name: both.state_dict()[name + direction] for name in alone.state_dict()})
        expected, states = alone(x.flip(0) if direction else x)
        expected = expected.flip(0) if direction else expected
        found = output[..., i * hidden : (i + 1) * hidden], h[i : i + 1], c[i : i + 1]
        assert all(map(torch.equal, found, (expected, *states))), direction


# ---- float32, where TF32 is allowed

SIZES = [(64, 1024), (128, 1024), (250, 1000), (520, 1024), (70, 1536), (130, 1536), (100, 2048), (600, 512)]


def float_call(op, batch, hidden, length=9):
    return OPS[op].call(Make(torch.float32, "cuda"), length, batch, hidden, input_size=24)


def scaled(call, number, factor):
    """The call with its argument of that number multiplied."""
    return Call(*(x * factor if i == number else x for i, x in enumerate(call.args)))


def errors(op, call, algorithm):
    exact, exact_gradients = forward_and_gradients(OPS[op].loop, call.map(torch.Tensor.double))
    found, gradients = forward_and_gradients(functools.partial(OPS[op], algorithm=algorithm), call)
    return relative_errors([*found, *gradients], [*exact, *exact_gradients])


def assert_no_less_exact_than_stepwise(op, call):
    ours, stepwise = errors(op, call, "auto"), errors(op, call, "stepwise")
    assert all(x <= 1.5 * y + 1e-6 for x, y in zip(ours, stepwise, strict=True)), (ours, stepwise)


@HOPPER
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("batch,hidden", SIZES)
def test_float32_is_no_less_exact_than_products_in_tf32(op, batch, hidden, tf32):
    assert_no_less_exact_than_stepwise(op, float_call(op, batch, hidden))


@HOPPER
@pytest.mark.parametrize("op", OPS)
def test_float32_starts_from_any_h0(op, tf32):
    assert_no_less_exact_than_stepwise(op, scaled(float_call(op, 64, 1024), 1, 1e5))


@HOPPER
@pytest.mark.parametrize("op", OPS)
def test_rows_of_weights_may_have_any_size_in_float32(op, tf32):
    call = float_call(op, 64, 1024, length=3)
    factors = torch.ones(call.args[4].size(0), 1, device="cuda")
    factors[::3], factors[1::5] = 1e-20, 0
    assert_no_less_exact_than_stepwise(op, scaled(call, 4, factors))


@HOPPER
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_of_weights_have_the_effect_of_stepwise_ones(op, bad, tf32):
    call = float_call(op, 64, 1024)
    call.args[4][1029, 1000] = bad
    found, expected = (call.run(functools.partial(OPS[op], algorithm=a)) for a in ("auto", "stepwise"))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.allclose(x, y, atol=0.02, equal_nan=True)


@HOPPER
@pytest.mark.parametrize("op", OPS)
def test_given_projections_of_float32_are_not_written(op, tf32):
    call = float_call(op, 64, 1024)
    _, h0, c0, _, weight_hh, _ = call.args
    given = Make(torch.float32, "cuda")(9, 64, weight_hh.size(0))
    before = given.clone()
    with torch.no_grad():
        found, expected = (
            OPS[op].function(given, (h0, c0), None, weight_hh, None, algorithm=a)
            for a in ("auto", "stepwise")
        )
    assert torch.equal(given, before)
    for x, y in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert torch.allclose(x, y, atol=0.02)


@HOPPER
@pytest.mark.parametrize("batch,hidden", [(16, 1536), (3, 2048), (64, 1024)])
def test_a_cell_of_formulas_that_is_bounded_is_no_less_exact_than_torchs_in_tf32(batch, hidden, tf32):
    options = {"device": "cuda"}
    ours, torchs = lltm_ext.RNN(24, hidden, **options), torch.nn.RNN(24, hidden, **options)
    torchs.load_state_dict(ours.state_dict())
    x, h0 = torch.randn(20, batch, 24, **options), 3 * torch.randn(1, batch, hidden, **options)
    with torch.no_grad():
        found, expected = ours(x, h0), torchs(x, h0)
        exact = torchs.double()(x.double(), h0.double())
    errors = [relative_errors(results, exact) for results in (found, expected)]
    assert all(x <= 1.5 * y for x, y in zip(*errors, strict=True)), errors
