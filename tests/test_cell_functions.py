"""What may be a cell's function, and where pickle finds it."""

import copy
import functools
import pickle

import pytest
import torch

import lltm_ext


def weighted(scale, x, h):
    return scale * torch.tanh(x[0]) + h


class Cell(torch.nn.Module):
    def step(self, x, h):
        return torch.tanh(x[0]) + h


def declared(function):
    return lltm_ext.recurrence(gates=1)(function)


def outputs(cell):
    torch.manual_seed(0)
    return lltm_ext.Recurrent(cell, 3, 4)(torch.ones(5, 2, 3))[0]


def made(scale, offset=0.0):
    @lltm_ext.recurrence(gates=1, parameters={"shift": 0.5})
    def scaled(x, h, p):
        return scale * torch.tanh(x[0] + p.shift) + offset * h

    return scaled


def test_partials_and_methods_may_be_cells():
    cells = [
        declared(functools.partial(weighted, 1.0)),
        declared(functools.partial(weighted, scale=1.0)),
        declared(Cell().step),
    ]
    assert [cell.__name__ for cell in cells] == ["weighted", "weighted", "step"]
    first, *others = map(outputs, cells)
    assert all(torch.equal(first, other) for other in others)


def test_an_error_in_a_partial_names_the_line():
    with pytest.raises(
        RuntimeError,
        match=r"weighted_all: .*matmul(?s:.*)test_cell_functions.py:\d+: return scale \* \(h @ h\)",
    ):
        declared(functools.partial(weighted_all, 2.0))


def weighted_all(scale, x, h):
    return scale * (h @ h)


@pytest.mark.parametrize("function", [Cell(), 3, "x"], ids=["module", "number", "text"])
def test_what_is_no_function_is_refused(function):
    with pytest.raises(TypeError, match="recurrence: expected a function, got"):
        declared(function)


def test_the_decorator_needs_its_options():
    with pytest.raises(TypeError, match=r"only options, as in @lltm_ext.recurrence\(gates=1\), got weighted"):
        lltm_ext.recurrence(weighted)
    with pytest.raises(TypeError, match="missing the option gates"):
        lltm_ext.recurrence()


def test_a_cell_of_an_importable_factory_pickles():
    cell = made(2.0, offset=0.25)
    again = pickle.loads(pickle.dumps(cell))
    assert again.program == cell.program and again.parameters == {"shift": 0.5}
    layer = lltm_ext.Recurrent(cell, 3, 4)
    loaded = pickle.loads(pickle.dumps(layer))
    x = torch.randn(5, 2, 3)
    assert torch.equal(layer(x)[0], loaded(x)[0])
    assert copy.deepcopy(cell) is cell and copy.copy(cell) is cell


def test_pickle_says_why_it_cannot_find_a_factory():
    text = "def make():\n    def copied(x):\n        return x[0]\n    return copied\n"
    namespace = {"__name__": "no_module"}
    exec(text, namespace)
    with pytest.raises(
        pickle.PicklingError, match=r"no_module.make must be importable and define one function"
    ):
        pickle.dumps(declared(namespace["make"]()))
