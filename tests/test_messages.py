"""Errors name the function or class, and the argument, whatever is given."""

import pytest
import torch

import lltm_ext
from lltm_ext import cells

X = torch.ones(3, 4)
SPARSE = X.to_sparse()
NESTED = torch.nested.nested_tensor([torch.ones(4)] * 3)
STATE = torch.ones(2, 3)
LONG = " " * 2**20


def fake_quantize(**changes):
    arguments = {"input": X, "scale": 0.1, "zero_point": 0, "quant_min": -8, "quant_max": 7}
    return lltm_ext.fake_quantize(**(arguments | changes))


def fake_quantize_layer(**how):
    return lltm_ext.FakeQuantize(-8, 7, **how)


def layer(**changes):
    return lltm_ext.LLTM(**({"input_size": 3, "hidden_size": 3} | changes))


def formula(**changes):
    return lltm_ext.elementwise(**({"signature": "T f(T x)", "forward": "return x;"} | changes))


def call_formula(a):
    return formula(signature="T f(T x, T a)", scalars={"a": 1.0}, cpu=torch.mul)(X, a=a)


def cell(**changes):
    return lltm_ext.recurrence(**({"gates": 1} | changes))(lambda x: x[0])


def gru(h0):
    return cells.gru(torch.ones(5, 2, 4), h0, torch.ones(9, 4), torch.ones(9, 3), b_hn=torch.ones(3))


def lltm(weight_hh):
    return lltm_ext.lltm(torch.ones(5, 2, 4), (STATE, STATE), torch.ones(9, 4), weight_hh)


def bidirectional(input, forward, backward):
    return torch.ops.lltm_ext.lltm_bidirectional(input, forward, backward)


WRONG_TYPE = [
    (fake_quantize, {"quant_min": [1]}, "fake_quantize: expected quant_min to be an int, got list"),
    (fake_quantize, {"quant_max": X}, "fake_quantize: expected quant_max to be an int, got Tensor"),
    (
        fake_quantize_layer,
        {"zero_point": None},
        "FakeQuantize: expected zero_point to be a number, got NoneType",
    ),
    (
        fake_quantize_layer,
        {"num_channels": "a"},
        "FakeQuantize: expected num_channels to be an int or None, got str",
    ),
    (layer(), {"input": [1.0]}, "LLTM: expected input to be a Tensor, got list"),
    (
        lltm_ext.Linear,
        {"in_features": 4, "out_features": "a"},
        "Linear: expected out_features to be an int, got str",
    ),
    (
        lltm_ext.stochastic_round,
        {"input": X, "dtype": 3},
        "stochastic_round: expected dtype to be a torch.dtype, got int",
    ),
    (formula, {"signature": None}, "elementwise: expected signature to be a str, got NoneType"),
    (formula, {"forward": 3}, r"f: expected forward to be C\+\+ text, got 3"),
    (formula, {"backward": ["return grad;"]}, "elementwise: expected backward to be a mapping, got list"),
    (
        formula,
        {"signature": "T f(T x, T a)", "scalars": {"a": "b"}},
        "elementwise: expected the default of a to be a number, got str",
    ),
    (cell, {"states": 3}, "expected states to be a sequence of names, got 3"),
]
WRONG_VALUE = [
    (fake_quantize, {"scale": 10**76}, "fake_quantize: expected scale within the range of float32, got 1000"),
    (layer, {"num_layers": 2, "dropout": "a"}, "LLTM: expected dropout to be a probability in"),
    (layer, {"hidden_size": 10**76}, r"LLTM: expected hidden_size to be below 2\^31, got 1000"),
    (
        lltm_ext.Linear,
        {"in_features": -1, "out_features": 3},
        r"Linear: expected in_features from 0 to below 2\^31, got -1",
    ),
    (
        lltm_ext.Linear,
        {"in_features": 4, "out_features": 3, "activation": ["relu"]},
        "Linear: expected activation None or one of",
    ),
    (
        formula,
        {"forward": "return x;" + LONG},
        "f: expected forward of at most 65536 characters, got 1048585",
    ),
    (
        formula,
        {"backward": {"x": LONG}},
        "f: expected backward of x of at most 65536 characters, got 1048576",
    ),
    (call_formula, {"a": "b"}, "<lambda>|f: expected a number for each of a"),
    (cell, {"gates": 10**76}, "expected at most 1024 gates, got 1000"),
]
WRONG_LAYOUT = [
    (layer(), {"input": NESTED}, "LLTM: expected input of layout torch.strided, got a nested tensor"),
    (lltm, {"weight_hh": NESTED}, "lltm: expected weight_hh of layout torch.strided, got a nested tensor"),
    (gru, {"h0": NESTED}, "gru: expected h0 of layout torch.strided, got a nested tensor"),
    (
        lltm_ext.Linear(4, 3),
        {"input": SPARSE},
        "Linear: expected input of layout torch.strided, got torch.sparse_coo",
    ),
    (
        lltm_ext.stochastic_round,
        {"input": NESTED, "dtype": torch.float16},
        "stochastic_round: expected input of layout torch.strided, got a nested tensor",
    ),
    (
        bidirectional,
        {"input": X, "forward": [], "backward": []},
        "lltm_bidirectional: expected a direction to be .*, got 0 tensors",
    ),
]
CALLS = [
    pytest.param(function, arguments, exception, message, id=message)
    for exception, calls in ((TypeError, WRONG_TYPE), (ValueError, WRONG_VALUE), (RuntimeError, WRONG_LAYOUT))
    for function, arguments, message in calls
]


@pytest.mark.parametrize("function,arguments,exception,message", CALLS)
def test_the_message_names_function_and_argument(function, arguments, exception, message):
    with pytest.raises(exception, match=message):
        function(**arguments)
