"""The formulas of own cells on the CPU (src/custom_cell/formula.h): each op, and how the lists are read."""

import math

import pytest
import torch
from torch.nn import functional as F

import lltm_ext
from lltm_ext._formula.graph import OPS, OVER_UNITS
from lltm_ext._formula.text import SEPARATOR

COMPARING = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "where")
# As a cell's function of two numbers; what is not here has the name of torch's function.
FUNCTIONS = {
    "neg": lambda a, b: -a,
    "where": lambda a, b: torch.where(a > b, a, b),
    "elu": lambda a, b: F.elu(a),
    "silu": lambda a, b: F.silu(a),
    "gelu": lambda a, b: F.gelu(a),
    "gelu_tanh": lambda a, b: F.gelu(a, approximate="tanh"),
    "softplus": lambda a, b: -F.logsigmoid(-a),
    "and": lambda a, b: torch.where((a > 0) & (b > 0), 1.0, 0.0),
    "or": lambda a, b: torch.where((a > 0) | (b > 0), 1.0, 0.0),
    "not": lambda a, b: torch.where(~(a > 0), 1.0, 0.0),
    "abs": lambda a, b: torch.abs(a),
    **{
        name: lambda a, b, name=name: torch.where(getattr(torch, name)(a, b), 1.0, 0.0)
        for name in COMPARING[:6]
    },
}
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "logaddexp", "pow", "fmod")
INTERNAL = ("gelu_derivative", "detach", "straight_through")  # no function of a user's is one alone
INTERNAL += (*OVER_UNITS, "product", "product_back")  # test_units.py and test_own_weights.py have these
ORDINARY = [*(x / 8 for x in range(-200, 201)), 1e-3, 1e-6, 0.1, 0.9, 1.1, 30.5, 87.5, -87.5]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, 1e-40, -1e-40, 88.6, 104.0, -104.0, 3e38, -3e38]


def function_of(op):
    if op in FUNCTIONS:
        return FUNCTIONS[op]
    torch_function = getattr(torch, op)
    return torch_function if op in BINARY else lambda a, b: torch_function(a)


def applied(op, a, b):
    """torch's function of the op by a cell without states, in a sequence of one step."""
    function = function_of(op)

    def binary(x):
        return function(x[0], x[1])

    def unary(x):
        return function(x[0], x[0])

    values = [a, b] if op in BINARY or op in COMPARING else [a]
    cell = lltm_ext.recurrence(gates=len(values), recurrent=False)(binary if len(values) == 2 else unary)
    # Gate 0 of unit j is a[j], gate 1 is b[j]: the biases. The projections are 0.
    bias, count = torch.cat(values), len(a)
    output, _ = cell(a.new_zeros(1, 1, 1), a.new_zeros(1, count), a.new_zeros(len(bias), 1), None, bias)
    return output.flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", [op for op in OPS if op not in INTERNAL])
def test_an_op_equals_torchs(op, dtype):
    values = torch.tensor(ORDINARY, dtype=dtype)
    others = values.flip(0).roll(3)
    found, expected = applied(op, values, others), function_of(op)(values, others).to(dtype)
    tolerance = 4e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 4, equal_nan=True)


@pytest.mark.parametrize("op", [op for op in OPS if op not in (*INTERNAL, "pow", "sin", "cos")])
def test_an_op_of_special_values_equals_torchs(op):
    a, b = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL)).unbind(1)
    found, expected = applied(op, a, b), function_of(op)(a, b)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("hidden", [1, 7, 255, 256, 257, 1030])
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_any_size_and_number_of_rows(hidden, threads, restore_threads):
    torch.set_num_threads(threads)
    cell, rows = lltm_ext.cells.gru, 9
    torch.manual_seed(0)
    tensors = [torch.randn(*s, dtype=torch.float64) for s in ((3, rows, 2), (rows, hidden), (3 * hidden, 2))]
    input, h0, weight_ih = tensors
    weight_hh, b_hn = torch.randn(3 * hidden, hidden, dtype=torch.float64) / 8, torch.randn(hidden).double()
    together, _ = cell(input, h0, weight_ih, weight_hh, b_hn=b_hn)
    for row in range(rows):
        part, _ = cell(input[:, row, None], h0[row, None], weight_ih, weight_hh, b_hn=b_hn)
        torch.testing.assert_close(part, together[:, row, None], rtol=1e-12, atol=1e-12)


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_more_decisions_than_one_saved_number_has():
    @lltm_ext.recurrence(gates=12, recurrent=False)
    def chooser(x):
        return sum(torch.where(value > 0, (k + 1) * value, 0.0) for k, value in enumerate(x))

    bias = torch.randn(12 * 5, dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(1, 5, dtype=torch.float64)
    output, _ = chooser(zeros.new_zeros(1, 1, 1), zeros, zeros.new_zeros(60, 1), None, bias)
    (found,) = torch.autograd.grad(output.sum(), bias)
    factors = torch.arange(1.0, 13, dtype=torch.float64).repeat_interleave(5)
    assert torch.equal(found, torch.where(bias > 0, factors, 0.0))


BAD_LISTS = {
    "an unknown op": ("x0 twice,0 > h0,1", "expected one of xrhspuq, got 'twice'"),
    "an argument that is none": ("x0 neg,7 > h0,1", "got '7'"),
    "an argument of a later op": ("x0 neg,2 neg,0 > h0,1", "expected arguments before neg"),
    "a result without a value": ("x0 > h0", "expected a result, got 'h0'"),
    "a leaf that the cell lacks": ("x1 > h0,0", "got '1'"),
    "a leaf of the backward": ("d0 > h0,0", "expected one of xrhspuq, got 'd0'"),
    "a result that it lacks": ("x0 > s0,0", "got '0'"),
    "a product that the cell lacks": ("x0 q0 > h0,1", "got '0'"),
    "a stage that it lacks": ("x0 > h0,0 | x0 > h0,0", "expected the instructions of 0 stages"),
}


@pytest.mark.parametrize("bad", BAD_LISTS)
def test_a_list_that_is_none_is_refused(bad):
    text, message = BAD_LISTS[bad]
    name, numbers, source, _, backward = lltm_ext.cells.rnn_tanh.program.split(SEPARATOR)
    program = SEPARATOR.join((name, numbers, source, text, backward))
    tensors = (torch.zeros(2, 1, 3), None, None, torch.zeros(4, 3), torch.zeros(4, 4), None, None, None, None)
    with pytest.raises(ValueError, match=f"rnn_tanh: .*{message}"):
        torch.ops.lltm_ext.custom_cell(*tensors, None, False, "auto", program)
