"""Errors name the function or class, and the argument, whatever is given."""

import pytest
import torch

import lltm_ext
from lltm_ext import cells

X = torch.ones(3, 4)
SPARSE = X.to_sparse()
NESTED = torch.nested.nested_tensor([torch.ones(4)] * 3)
STATE = torch.ones(2, 3)
HX = (STATE, STATE)


def fake_quantize(**changes):
    arguments = {"input": X, "scale": 0.1, "zero_point": 0, "quant_min": -8, "quant_max": 7}
    return lltm_ext.fake_quantize(**(arguments | changes))


def layer(**changes):
    return lltm_ext.LLTM(**({"input_size": 3, "hidden_size": 3} | changes))


def formula(**changes):
    return lltm_ext.elementwise(**({"signature": "T f(T x)", "forward": "return x;"} | changes))


def cell(**changes):
    return lltm_ext.recurrence(**({"gates": 1} | changes))(lambda x: x[0])


CALLS = {
    "a scale beyond float32": (
        lambda: fake_quantize(scale=10**76),
        ValueError,
        "fake_quantize: expected scale within the range of float32, got 1000",
    ),
    "no integer range": (
        lambda: fake_quantize(quant_min=[1]),
        TypeError,
        "fake_quantize: expected quant_min to be an int, got list",
    ),
    "a range of tensors": (
        lambda: fake_quantize(quant_max=X),
        TypeError,
        "fake_quantize: expected quant_max to be an int, got Tensor",
    ),
    "FakeQuantize without a number": (
        lambda: lltm_ext.FakeQuantize(-8, 7, zero_point=None),
        TypeError,
        "FakeQuantize: expected zero_point to be a number, got NoneType",
    ),
    "FakeQuantize of text channels": (
        lambda: lltm_ext.FakeQuantize(-8, 7, num_channels="a"),
        TypeError,
        "FakeQuantize: expected num_channels to be an int or None, got str",
    ),
    "dropout that is no number": (
        lambda: layer(num_layers=2, dropout="a"),
        ValueError,
        "LLTM: expected dropout to be a probability in",
    ),
    "a hidden size beyond 2^31": (
        lambda: layer(hidden_size=10**76),
        ValueError,
        "LLTM: expected hidden_size to be below 2\\^31, got 1000",
    ),
    "a list as input": (
        lambda: layer()([1.0]),
        TypeError,
        "LLTM: expected input to be a Tensor, got list",
    ),
    "a nested sequence": (
        lambda: layer()(NESTED),
        RuntimeError,
        "LLTM: expected input of layout torch.strided, got a nested tensor",
    ),
    "a nested weight": (
        lambda: lltm_ext.lltm(torch.ones(5, 2, 4), HX, torch.ones(9, 4), NESTED),
        RuntimeError,
        "lltm: expected weight_hh of layout torch.strided, got a nested tensor",
    ),
    "empty directions": (
        lambda: torch.ops.lltm_ext.lltm_bidirectional(X, [], []),
        RuntimeError,
        "lltm_bidirectional: expected a direction to be .*, got 0 tensors",
    ),
    "a sparse input of Linear": (
        lambda: lltm_ext.Linear(4, 3)(SPARSE),
        RuntimeError,
        "Linear: expected input of layout torch.strided, got torch.sparse_coo",
    ),
    "Linear of negative size": (
        lambda: lltm_ext.Linear(-1, 3),
        ValueError,
        "Linear: expected in_features from 0 to below 2\\^31, got -1",
    ),
    "Linear of text size": (
        lambda: lltm_ext.Linear(4, "a"),
        TypeError,
        "Linear: expected out_features to be an int, got str",
    ),
    "Linear with a list of activations": (
        lambda: lltm_ext.Linear(4, 3, activation=["relu"]),
        ValueError,
        "Linear: expected activation None or one of",
    ),
    "a number for a dtype": (
        lambda: lltm_ext.stochastic_round(X, 3),
        TypeError,
        "stochastic_round: expected dtype to be a torch.dtype, got int",
    ),
    "a nested tensor": (
        lambda: lltm_ext.stochastic_round(NESTED, torch.float16),
        RuntimeError,
        "stochastic_round: expected input of layout torch.strided, got a nested tensor",
    ),
    "a signature that is no text": (
        lambda: formula(signature=None),
        TypeError,
        "elementwise: expected signature to be a str, got NoneType",
    ),
    "a formula that is no text": (
        lambda: formula(forward=3),
        TypeError,
        "f: expected forward to be C\\+\\+ text, got 3",
    ),
    "a backward that is no mapping": (
        lambda: formula(backward=["return grad;"]),
        TypeError,
        "elementwise: expected backward to be a mapping, got list",
    ),
    "a default that is no number": (
        lambda: formula(signature="T f(T x, T a)", scalars={"a": "b"}),
        TypeError,
        "elementwise: expected the default of a to be a number, got str",
    ),
    "a formula of a megabyte": (
        lambda: formula(forward="return x;" + " " * 2**20),
        ValueError,
        "f: expected forward of at most 65536 characters, got 1048585",
    ),
    "a backward of a megabyte": (
        lambda: formula(backward={"x": " " * 2**20}),
        ValueError,
        "f: expected backward of x of at most 65536 characters, got 1048576",
    ),
    "a number that is none": (
        lambda: formula(signature="T f(T x, T a)", scalars={"a": 1.0}, cpu=torch.mul)(X, a="b"),
        ValueError,
        "<lambda>|f: expected a number for each of a",
    ),
    "states that are no names": (
        lambda: cell(states=3),
        TypeError,
        "expected states to be a sequence of names, got 3",
    ),
    "many gates": (lambda: cell(gates=10**76), ValueError, "expected at most 1024 gates, got 1000"),
    "a nested state": (
        lambda: cells.gru(
            torch.ones(5, 2, 4), NESTED, torch.ones(9, 4), torch.ones(9, 3), b_hn=torch.ones(3)
        ),
        RuntimeError,
        "gru: expected h0 of layout torch.strided, got a nested tensor",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_message_names_function_and_argument(call):
    function, exception, message = CALLS[call]
    with pytest.raises(exception, match=message):
        function()
