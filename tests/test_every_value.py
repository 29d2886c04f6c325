"""Every elementwise op on every value of a dtype: 65,536 of a half type; on a GPU 2^32 of float32."""

import pytest
import torch
from op_suite import needs_cuda

import lltm_ext

# The exponent of the smallest normal number (as frexp counts), and the bits of a significand.
FORMATS = {torch.float16: (-13, 11), torch.bfloat16: (-125, 8), torch.float32: (-125, 24)}
# Bit for bit equal to torch's.
EXACT = {
    "relu": (lltm_ext.relu, torch.relu),
    "round": (lltm_ext.round, torch.round),
    "floor": (lltm_ext.floor, torch.floor),
    "ceil": (lltm_ext.ceil, torch.ceil),
    "trunc": (lltm_ext.trunc, torch.trunc),
    "binarize": (lltm_ext.binarize, lambda x: (x > 0.5).to(x.dtype)),
}
exact = pytest.mark.parametrize("op", EXACT)
half_types = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def every_half(dtype, device):
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(device)


def every_float32():
    """All 2^32 values, in pieces."""
    for start in range(-(2**31), 2**31, 2**28):
        values = torch.arange(start, start + 2**28, device="cuda")
        yield values.to(torch.int32).view(torch.float32)


def assert_equal(actual, expected):
    """Bit for bit, but any NaN equals any other."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert torch.equal(actual == expected, ~nan)
    assert torch.equal(actual.signbit()[~nan], expected.signbit()[~nan])


def units_in_the_last_place(actual, exact):
    """The error of `actual` against float64's `exact`, in units in the last place; 0 where both are NaN."""
    smallest, bits = FORMATS[actual.dtype]
    exponent = torch.frexp(exact).exponent.clamp(min=smallest) - bits
    error = torch.ldexp((actual.double() - exact).abs(), -exponent)
    return torch.where(actual.isnan() & exact.isnan(), 0, error).max().item()


@exact
@half_types
def test_every_half_value_equals_torchs(op, dtype, device):
    ours, torchs = EXACT[op]
    x = every_half(dtype, device)
    assert_equal(ours(x), torchs(x))


@half_types
def test_every_half_value_of_sigmoid_is_within_2_ulp(dtype, device):
    x = every_half(dtype, device)
    assert units_in_the_last_place(lltm_ext.sigmoid(x), torch.sigmoid(x.double())) <= 2


@needs_cuda
@exact
def test_every_float32_value_equals_torchs(op):
    ours, torchs = EXACT[op]
    for x in every_float32():
        assert_equal(ours(x), torchs(x))


@needs_cuda
def test_every_float32_value_of_sigmoid_is_within_2_ulp():
    for x in every_float32():
        assert units_in_the_last_place(lltm_ext.sigmoid(x), torch.sigmoid(x.double())) <= 2


def test_float32_sigmoid_on_the_cpu_is_within_3_ulp():
    """On 2^20 values, evenly spread over all bit patterns."""
    x = torch.arange(-(2**31), 2**31, 2**12, dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert units_in_the_last_place(lltm_ext.sigmoid(x), torch.sigmoid(x.double())) <= 3
