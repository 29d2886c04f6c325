"""lltm_ext.cells against formulas written out, and layers of such cells as modules."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from cell_examples import call_of
from op_suite import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    Call,
    Make,
    ModuleSuite,
    assert_all_near,
    cotangents,
    needs_cuda,
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


def mingru(z, n, h):
    return (torch.lerp(h, n, sigmoid(z)),)


def minlstm(f, i, n, h):
    f, i = sigmoid(f), sigmoid(i)
    return ((f * h + i * n) / (f + i),)


def sru(n, f, r, y, c):
    c = torch.lerp(n, c, sigmoid(f))
    return torch.lerp(y, c, sigmoid(r)), c


def rg_lru(r, i, v, h, decay):
    a = sigmoid(decay) ** (8 * sigmoid(r))
    return (a * h + (1 - a * a).sqrt() * sigmoid(i) * v,)


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, above):
        ctx.save_for_backward(above)
        return (above > 0).to(above)

    @staticmethod
    def backward(ctx, grad):
        (above,) = ctx.saved_tensors
        return grad / (1 + 25 * above.abs()) ** 2


def lif(a, h, v, beta):
    v = beta * v + a - h
    return Spike.apply(v - 1), v


def zoneout_lstm(i, f, g, o, h, c, keep_h, keep_c):
    new_h, new_c = lstm(i, f, g, o, c)
    return torch.lerp(new_h, h, keep_h), torch.lerp(new_c, c, keep_c)


def cfc(f, g, a, b, time):
    return (torch.lerp(torch.tanh(f), torch.tanh(g), sigmoid(a * time + b)),)


FORMULAS = {f.__name__: f for f in (cifg, peephole_lstm, ugrnn, janet, slstm, indrnn, zoneout_lstm, cfc)}
FORMULAS |= {f.__name__: f for f in (mingru, minlstm, sru, rg_lru, lif)}


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
    has_unused = not cell.recurrent and not cell.derived.reads_h
    ours = functools.partial(cell, **inputs)
    assert_values_and_gradients(ours, formula, call, dtype, zeros_for_unused=has_unused)


@pytest.mark.parametrize("name", cells.__all__)
def test_a_cell_documents_itself_and_passes_gradcheck(name):
    cell = getattr(cells, name)
    assert cell.__name__ == name
    assert "Source: " in cell.__doc__
    if name == "lif":  # its surrogate is not the derivative
        with pytest.raises(RuntimeError, match="lif: the gradient with respect to input is wrong"):
            cell.gradcheck()
    else:
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


@pytest.mark.parametrize("gate", [-200.0, 200.0])
def test_a_gate_that_saturates_leaves_finite_values_and_gradients(gate, device):
    """sigmoid(-200) is 0 in float32, and so is the sum of two such gates."""
    for cell in (cells.minlstm, cells.mingru, cells.sru):
        planes = torch.full((3, 2, cell.gates * 4), gate, device=device, requires_grad=True)
        hx = torch.ones(2, 4, device=device)
        output, _ = cell(planes, (hx, hx) if cell.states else hx)
        (gradient,) = torch.autograd.grad(output.sum(), planes)
        assert output.isfinite().all() and gradient.isfinite().all()


def test_rg_lru_keeps_the_variance_of_an_a_near_1(device):
    """1 - a^2 of an a that float32 rounds to 1."""
    planes = torch.tensor([-10.0, 20.0, 1.0], device=device).expand(1, 1, 3)
    output, _ = cells.rg_lru(
        planes, torch.zeros(1, 1, device=device), decay=torch.full((1,), 9.0, device=device)
    )
    log_a = -8 * math.log1p(math.exp(-9.0)) / (1 + math.exp(10.0))
    torch.testing.assert_close(output.item(), math.sqrt(-math.expm1(2 * log_a)), rtol=1e-5, atol=0)


def test_spikes_are_0_or_1_and_lower_the_potential(dtype, device):
    planes = torch.full((40, 3, 5), 0.3, dtype=dtype, device=device)
    h0, v0 = torch.zeros(2, 3, 5, dtype=dtype, device=device)
    output, (_, v_n) = cells.lif(planes, (h0, v0), beta=torch.full_like(h0[0], 0.9))
    assert output.unique().tolist() == [0, 1]
    assert 0.1 < output.float().mean() < 0.5 and v_n.max() < 1.3


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
        if cell.__name__ != "spiking":  # whose gradient is that of another curve
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


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch,hidden", [(300, 256), (1024, 200), (1060, 136)])
def test_rnn_of_many_rows_is_torchs_in_float64(batch, hidden, bidirectional, dtype):
    """In half types a block then has all units."""
    torch.manual_seed(0)
    options = {"bidirectional": bidirectional, "device": "cuda"}
    ours = lltm_ext.RNN(INPUT, hidden, dtype=dtype, **options)
    exact = torch.nn.RNN(INPUT, hidden, dtype=DOUBLE, **options)
    exact.load_state_dict(ours.state_dict())
    make = Make(dtype, "cuda")
    x, h0 = make(9, batch, INPUT), make(1 + bidirectional, batch, hidden, scale=0.5)
    grad_outputs = cotangents((make(9, batch, hidden * (1 + bidirectional)), h0))

    def forward_and_gradients_of(layer, x, h0):
        x, h0 = x.requires_grad_(), h0.requires_grad_()
        outputs = layer(x, h0)
        grads = [g.to(y.dtype) for g, y in zip(grad_outputs, outputs, strict=True)]
        return outputs, torch.autograd.grad(outputs, [x, h0, *layer.parameters()], grads)

    with torch.no_grad():
        alone = ours(x, h0)
    found, gradients = forward_and_gradients_of(ours, x, h0)
    expected, exact_gradients = forward_and_gradients_of(exact, x.detach().double(), h0.detach().double())
    assert_all_near(alone, expected, FORWARD[dtype])
    assert_all_near(found, expected, FORWARD[dtype])
    assert_all_near(gradients, exact_gradients, BACKWARD[dtype])
