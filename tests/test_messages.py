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


stochastic_round, bidirectional = lltm_ext.stochastic_round, torch.ops.lltm_ext.lltm_bidirectional
STRIDED = "of layout torch.strided"
CALLS = {
    TypeError: {
        "fake_quantize: expected quant_min to be an int, got list": lambda: fake_quantize(quant_min=[1]),
        "fake_quantize: expected quant_max to be an int, got Tensor": lambda: fake_quantize(quant_max=X),
        "FakeQuantize: expected zero_point to be a number, got NoneType": lambda: lltm_ext.FakeQuantize(
            -8, 7, zero_point=None
        ),
        "FakeQuantize: expected num_channels to be an int or None, got str": lambda: lltm_ext.FakeQuantize(
            -8, 7, num_channels="a"
        ),
        "LLTM: expected input to be a Tensor, got list": lambda: layer()([1.0]),
        "Linear: expected out_features to be an int, got str": lambda: lltm_ext.Linear(4, "a"),
        "stochastic_round: expected dtype to be a torch.dtype, got int": lambda: stochastic_round(X, 3),
        "elementwise: expected signature to be a str, got NoneType": lambda: formula(signature=None),
        r"f: expected forward to be C\+\+ text, got 3": lambda: formula(forward=3),
        "elementwise: expected backward to be a mapping, got list": lambda: formula(
            backward=["return grad;"]
        ),
        "elementwise: expected the default of a to be a number, got str": lambda: formula(
            signature="T f(T x, T a)", scalars={"a": "b"}
        ),
        "expected states to be a sequence of names, got 3": lambda: cell(states=3),
    },
    ValueError: {
        "fake_quantize: expected scale within .* float32, got 1000": lambda: fake_quantize(scale=10**76),
        "LLTM: expected dropout to be a probability in": lambda: layer(num_layers=2, dropout="a"),
        r"LLTM: expected hidden_size to be below 2\^31, got 1000": lambda: layer(hidden_size=10**76),
        r"Linear: expected in_features from 0 to below 2\^31, got -1": lambda: lltm_ext.Linear(-1, 3),
        "Linear: expected activation None or one of": lambda: lltm_ext.Linear(4, 3, activation=["relu"]),
        "f: expected forward of at most 65536 characters, got 1048585": lambda: formula(
            forward="return x;" + LONG
        ),
        "f: expected backward of x of at most 65536 characters, got 1048576": lambda: formula(
            backward={"x": LONG}
        ),
        "<lambda>|f: expected a number for each of a": lambda: call_formula("b"),
        "expected at most 1024 gates, got 1000": lambda: cell(gates=10**76),
    },
    RuntimeError: {
        f"LLTM: expected input {STRIDED}, got a nested tensor": lambda: layer()(NESTED),
        f"lltm: expected weight_hh {STRIDED}, got a nested tensor": lambda: lltm(NESTED),
        f"gru: expected h0 {STRIDED}, got a nested tensor": lambda: gru(NESTED),
        f"Linear: expected input {STRIDED}, got torch.sparse_coo": lambda: lltm_ext.Linear(4, 3)(SPARSE),
        f"stochastic_round: expected input {STRIDED}, got a nested": lambda: stochastic_round(
            NESTED, torch.half
        ),
        "lltm_bidirectional: expected a direction to be .*, got 0 tensors": lambda: bidirectional(X, [], []),
    },
}


@pytest.mark.parametrize(
    "call,exception,message",
    [(call, exception, message) for exception in CALLS for message, call in CALLS[exception].items()],
    ids=[message for calls in CALLS.values() for message in calls],
)
def test_the_message_names_function_and_argument(call, exception, message):
    with pytest.raises(exception, match=message):
        call()
