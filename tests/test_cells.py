"""lltm_ext.cells against formulas written out, and layers of such cells as modules."""

import functools
import re
from pathlib import Path

import pytest
import torch
from cell_examples import call_of
from op_suite import (
    DOUBLE,
    FORWARD,
    Call,
    Make,
    ModuleSuite,
    assert_all_near,
)
from sequence_suite import INPUT, assert_values_and_gradients

import lltm_ext
from lltm_ext import cells

# ---- formulas --------------------------------------------------------------------------------------------
# One step: the gates before their activations, the states, parameters and inputs of the step, by name.


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def lstm(i, f, g, o, c):
    c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
    return sigmoid(o) * torch.tanh(c), c


def cifg(f, g, o, c):
    return lstm(-f, f, g, o, c)  # 1 - sigmoid(f) = sigmoid(-f)


def peephole_lstm(i, f, g, o, c, w_ci, w_cf, w_co):
    new_c = sigmoid(f + w_cf * c) * c + sigmoid(i + w_ci * c) * torch.tanh(g)
    return sigmoid(o + w_co * new_c) * torch.tanh(new_c), new_c


def ugrnn(g, c, h):
    return (torch.lerp(torch.tanh(c), h, sigmoid(g)),)


def janet(f, g, c):
    c = sigmoid(f) * c + sigmoid(1 - f) * torch.tanh(g)
    return c, c


def slstm(i, f, z, o, c, n, m):
    """Without the stabiliser: exp(m) is a scale of c and n that cancels in h."""
    c, n = c * torch.exp(m), n * torch.exp(m)
    c, n = sigmoid(f) * c + torch.exp(i) * torch.tanh(z), sigmoid(f) * n + torch.exp(i)
    kept = torch.log(sigmoid(f)) + m
    new_m = torch.where(kept > i, kept, i)
    return sigmoid(o) * c / n, c / torch.exp(new_m), n / torch.exp(new_m), new_m


def indrnn(a, h, w_hh):
    return ((a + w_hh * h).clamp(min=0),)


def zoneout_lstm(i, f, g, o, h, c, keep_h, keep_c):
    new_h, new_c = lstm(i, f, g, o, c)
    return torch.lerp(new_h, h, keep_h), torch.lerp(new_c, c, keep_c)


def cfc(f, g, a, b, time):
    return (torch.lerp(torch.tanh(f), torch.tanh(g), sigmoid(a * time + b)),)


FORMULAS = {f.__name__: f for f in (cifg, peephole_lstm, ugrnn, janet, slstm, indrnn, zoneout_lstm, cfc)}


def by_formula(name, input, hx, weight_ih, weight_hh, bias, **named):
    cell, formula = getattr(cells, name), FORMULAS[name]
    reads = formula.__code__.co_varnames[: formula.__code__.co_argcount]
    values = dict(zip(("h", *cell.states), hx if cell.states else (hx,), strict=True))
    values |= {p: named[p] for p in cell.parameters}
    outputs = []
    for t, x in enumerate(input):
        gates = x @ weight_ih.t() + bias
        if weight_hh is not None:
            gates = gates + values["h"] @ weight_hh.t()
        values |= {u: named[u][t] if named[u].dim() == 3 else named[u][t, :, None] for u in cell.inputs}
        found = formula(*gates.chunk(cell.gates, 1), *(values[n] for n in reads[cell.gates :]))
        values |= zip(("h", *cell.states), found, strict=True)
        outputs.append(values["h"])
    return torch.stack(outputs), *(values[s] for s in ("h", *cell.states))


def inputs_of_steps(name, device="cpu", length=6, batch=4, hidden=5):
    make = Make(DOUBLE, device, seed=3)
    if name == "zoneout_lstm":
        return {u: make(length, batch, hidden) > 0.5 for u in ("keep_h", "keep_c")}
    return {"time": make(length, batch).abs()} if name == "cfc" else {}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_cell_is_its_formula(name, dtype, device):
    cell = getattr(cells, name)
    call, inputs = call_of(cell, Make(dtype, device), 6, 4, 5), inputs_of_steps(name, device)
    in_double = {u: x.double() for u, x in inputs.items()}
    formula = functools.partial(by_formula, name, **in_double)
    assert_values_and_gradients(functools.partial(cell, **inputs), formula, call, dtype)


@pytest.mark.parametrize("name", cells.__all__)
def test_a_cell_documents_itself_and_passes_gradcheck(name):
    cell = getattr(cells, name)
    assert cell.__name__ == name
    assert "Source: " in cell.__doc__
    assert cell.gradcheck()


def test_the_module_lists_its_cells():
    found = [name for name, value in vars(cells).items() if isinstance(value, lltm_ext.RecurrentCell)]
    assert sorted(found) == cells.__all__


def test_the_stabilised_slstm_takes_gates_that_overflow():
    """exp(200) is infinite in float32."""
    cell, make = cells.slstm, Make(torch.float32)
    zeros = torch.zeros(2, 4)
    bias = torch.cat([torch.full((4,), 200.0), make(12)])
    output, states = cell(make(5, 2, 3), (zeros,) * 4, make(16, 3), make(16, 4), bias)
    assert output.isfinite().all() and all(s.isfinite().all() for s in states)
    assert output.abs().max() > 0.01


def test_zoneout_in_evaluation_is_the_mean_of_its_masks():
    """Of one step, over all pairs of masks."""
    call = call_of(cells.zoneout_lstm, Make(DOUBLE), 1, 4)
    found = []
    for keep_h, keep_c in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
        masks = {"keep_h": torch.full((1, 4), keep_h), "keep_c": torch.full((1, 4), keep_c)}
        found.append(call.run(functools.partial(cells.zoneout_lstm, **masks)))
    half = {u: torch.full((1, 4), 0.5) for u in ("keep_h", "keep_c")}
    mean = [torch.stack(ys).mean(0) for ys in zip(*found, strict=True)]
    assert_all_near(call.run(functools.partial(cells.zoneout_lstm, **half)), mean, FORWARD[DOUBLE])


@pytest.mark.parametrize("name", cells.__all__)
def test_a_cell_has_a_source_in_cpp(name):
    cell = getattr(cells, name)
    assert f"kGates = {cell.gates}, kStates = {len(cell.states)}" in cell.source


PAGE = Path(__file__).parent.parent / "docs/own_cell.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="of a checkout")
def test_the_cells_of_the_page_are_cells():
    found = re.findall(r"^@lltm_ext\.recurrence.*?(?=^$|^```)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) >= 5
    for text in found:
        names = {"torch": torch, "lltm_ext": lltm_ext}
        exec(compile(text, PAGE, "exec"), names)
        (cell,) = (value for value in names.values() if isinstance(value, lltm_ext.RecurrentCell))
        assert cell.gradcheck()


# ---- layers ----------------------------------------------------------------------------------------------

HIDDEN = 8


class TestModules(ModuleSuite):
    modules = {
        "GRU": (
            functools.partial(lltm_ext.GRU, INPUT, HIDDEN, num_layers=2, bidirectional=True),
            lambda make: Call(make(3, 4, INPUT), make(4, 4, HIDDEN)),
        ),
        "RNN": (
            functools.partial(lltm_ext.RNN, INPUT, HIDDEN, nonlinearity="tanh", batch_first=True),
            lambda make: Call(make(4, 6, INPUT)),
        ),
        "Recurrent": (
            functools.partial(lltm_ext.Recurrent, cells.slstm, INPUT, HIDDEN, heads=2, bidirectional=True),
            lambda make: Call(make(3, 4, INPUT)),
        ),
    }
