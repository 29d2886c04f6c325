"""Gradients in half types: of the branch that the forward took, and of long, saturated, decaying sequences.

What the forward saves is rounded to the half type. These cells would lose their gradients if comparisons were
decided again from rounded values, or if errors of what is saved were as large as what is left of a sum.
"""

import pytest
import torch
from op_suite import BACKWARD, FORWARD, Make, assert_all_near, needs_cuda
from torch.nn import functional as F

import lltm_ext
from lltm_ext import cells
from lltm_ext._arguments import SequenceCall
from lltm_ext._formula.graph import CONSTANT, ancestors
from lltm_ext._loop import run_loop
from lltm_ext.recurrence import run

HALF = (torch.float16, torch.bfloat16)
every_type = pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)

# ---- cells with jumps where v is 1 -------------------------------------------------------------------------


def spike(v):
    soft = torch.sigmoid(4 * (v - 1))
    return soft + (torch.where(v > 1.0, 1.0, 0.0) - soft).detach()


JUMPS = {
    "where": lambda v: torch.where(v > 1.0, v * v * v, 0.25 * v * v),
    "at_least": lambda v: torch.where(v >= 1.0, 2 * v, v) * torch.where(v == 1.0, 3.0, 1.0),
    "maximum": lambda v: torch.maximum(v, 2 - v),
    "clamp": lambda v: v * torch.clamp(v, max=1),
    "hardtanh": lambda v: F.hardtanh(v) + F.leaky_relu(v - 1),
    "abs": lambda v: abs(v - 1) * v,
    "relu": lambda v: torch.relu(v - 1) + torch.relu(1 - v) * v,
    "spike": spike,
    "logic": lambda v: torch.where((v > 1) & (v < 2) | (v < 0.5), v, -v) * torch.sign(v - 1),
}


def jumping(name, recurrent):
    def cell(x, s):
        v = s.v + x[0]
        return JUMPS[name](v), (v,)

    cell.__name__ = name
    return lltm_ext.recurrence(gates=1, states=("v",), recurrent=recurrent)(cell)


JUMPING = {(name, recurrent): jumping(name, recurrent) for name in JUMPS for recurrent in (True, False)}


@needs_cuda
@every_type
@pytest.mark.parametrize("algorithm", ["stepwise", "cluster", "grid", "independent"])
@pytest.mark.parametrize("name", JUMPS)
def test_the_backward_takes_the_branch_of_the_forward(name, algorithm, dtype):
    """With v on the jump, just above and just below it, at three steps."""
    if algorithm == "cluster" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cluster needs compute capability (9, 0)")
    cell = JUMPING[name, algorithm != "independent"]
    hidden, batch, make = 64, 5, Make(dtype, "cuda")
    near = torch.tensor([0, 2.0**-20, -(2.0**-20), 2.0**-13, -(2.0**-13), 2.0**-9, -(2.0**-9), 0.7])
    v0 = (1 + near).repeat(batch, hidden // len(near)).cuda()
    zeros = torch.zeros(hidden, 8, device="cuda", dtype=dtype)
    weight_hh = torch.zeros(hidden, hidden, device="cuda", dtype=dtype) if cell.recurrent else None
    bias = torch.zeros(hidden, device="cuda", dtype=dtype)
    h0 = torch.zeros(batch, hidden, device="cuda", dtype=dtype)
    grad = make(3, batch, hidden)

    def gradients(function, to):
        leaves = [x.to(to or x.dtype).requires_grad_() for x in (v0, bias)]
        given = [make(3, batch, 8), h0, zeros, weight_hh]
        input, h, weight_ih, weight = (x if x is None or to is None else x.to(to) for x in given)
        output, _ = function(cell, SequenceCall(input, [h, leaves[0]], weight_ih, weight, leaves[1]))
        return [output, *torch.autograd.grad(output, leaves, grad.to(output.dtype))]

    chosen = "auto" if algorithm == "independent" else algorithm
    ours = gradients(lambda *arguments: run(*arguments, chosen), None)
    exact = gradients(run_loop, torch.float64)
    assert_all_near(ours[:1], exact[:1], FORWARD[dtype], "output")
    assert_all_near(ours[1:], exact[1:], BACKWARD[dtype], "gradient")


@pytest.mark.parametrize("name", JUMPS)
def test_the_backward_compares_nothing_but_what_it_has_exactly(name):
    derived = JUMPING[name, True].derived
    for node in ancestors([x for nodes in derived.gradients.values() for x in nodes], derived.saved):
        if node.boolean and node not in derived.saved:
            assert all(arg.boolean or arg.op == CONSTANT for arg in node.args), node


def test_decisions_share_a_saved_number():
    derived = JUMPING["logic", True].derived
    assert sum(x.boolean for x in derived.saved) > 1
    assert derived.struct.saved == sum(not x.boolean for x in derived.saved) + 1


# ---- long, saturated and decaying recurrences --------------------------------------------------------------


@lltm_ext.recurrence(gates=2, states=("a", "b", "m"), parameters=("w", "u"), recurrent=False)
def wkv(x, s, p):
    """RWKV's weighted mean of values x[1] by exp(x[0])."""
    k, v = x
    q = torch.maximum(s.m, p.u + k)
    old, new = torch.exp(s.m - q), torch.exp(p.u + k - q)
    mean = (old * s.a + new * v) / (old * s.b + new)
    decayed = s.m + p.w
    m = torch.maximum(decayed, k)
    old, new = torch.exp(decayed - m), torch.exp(k - m)
    return mean, (old * s.a + new * v, old * s.b + new, m)


@lltm_ext.recurrence(gates=2, states=("a", "b"), parameters=("w",), recurrent=False)
def weighted_mean(x, s, p):
    """Not scaled by the largest weight."""
    weight = torch.exp(0.5 * x[0])
    a, b = torch.sigmoid(p.w) * s.a + weight * x[1], torch.sigmoid(p.w) * s.b + weight
    return a / b, (a, b)


@lltm_ext.recurrence(gates=1, states=("c",), recurrent=False)
def softsign_of_a_sum(x, s):
    c = s.c + x[0]
    return F.softsign(c), (c,)


@lltm_ext.recurrence(gates=1, states=("z",), parameters=("a", "c"))
def plrnn(x, s, p):
    """A piecewise-linear RNN."""
    z = torch.sigmoid(p.a) * s.z + x[0] + p.c
    return torch.relu(z), (z,)


def leaky_integrate_and_fire(x, s, p):
    v = torch.sigmoid(p.beta) * s.v + x[0]
    spikes = spike(v)
    return spikes, (v - spikes.detach(),)


def spiking(recurrent):
    options = {"states": ("v",), "parameters": ("beta",), "recurrent": recurrent}
    return lltm_ext.recurrence(gates=1, **options)(leaky_integrate_and_fire)


LONG = {cell.__name__: cell for cell in (wkv, weighted_mean, softsign_of_a_sum)}
LONG |= {name: getattr(cells, name) for name in ("lstm", "lltm", "gru", "ugrnn", "janet", "slstm", "cfc")}
REGIMES = {  # the scale of the projections, their center, whether only the last output has a gradient
    "mild": (1, 0, False),
    "saturated": (4, 0, False),
    "open": (1, 4, False),
    "closed": (1, -4, False),
    "long memory": (0.3, 3, True),
    "decaying": (0.3, -3, True),
}


def sequence(cell, dtype, regime, length=200, batch=4, hidden=16, projects=False):
    """The arguments of `run` that have gradients, those of its steps, and the gradient of the output.

    Unless the sequence `projects`, the projections are the input, so that the kernels round them no more than
    the loop does.
    """
    scale, center, only_last = REGIMES[regime]
    make, rows = Make(dtype, "cuda"), cell.gates * hidden
    input, h0 = make(length, batch, rows, scale=scale) + center, make(batch, hidden, scale=0.1)
    states = [make(batch, hidden, scale=0.2).abs().float() + 0.1 for _ in cell.states]
    weight_ih = torch.eye(rows, device="cuda", dtype=dtype)
    if projects:
        weight_ih = make(rows, rows, scale=rows**-0.5)
    weight_hh = make(rows, hidden, scale=0.5 * hidden**-0.5) if cell.recurrent else None
    bias = torch.zeros(rows, device="cuda", dtype=dtype)
    parameters = [make(hidden, scale=0.5) - 1 for _ in cell.parameters]
    inputs = [torch.rand(length, batch, device="cuda").to(dtype) for _ in cell.inputs]
    grad = make(length, batch, hidden, scale=64)  # as losses are scaled, for float16
    if only_last:
        grad[:-1] = 0
    return [input, h0, *states, weight_ih, weight_hh, bias, *parameters], inputs, grad


def gradients_of(function, cell, tensors, inputs, grad, dtype=None):
    leaves = [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    input, h0, *rest = leaves
    n = len(cell.states)
    call = SequenceCall(input, [h0, *rest[:n]], *rest[n : n + 3], rest[n + 3 :], inputs)
    output, _ = function(cell, call)
    wanted = [x for x in leaves if x is not None]
    options = {"allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(output, wanted, grad.to(output.dtype), **options)


def check(function, cell, dtype, regime, **sizes):
    """The errors of all gradients, relative to each, or to a thousandth of the largest."""
    given = sequence(cell, dtype, regime, **sizes)
    ours = gradients_of(function, cell, *given)
    loop = gradients_of(run_loop, cell, *given)
    exact = gradients_of(run_loop, cell, *given, torch.float64)
    least = 1e-3 * max(x.norm() for x in exact)
    for i, (a, b, c) in enumerate(zip(ours, loop, exact, strict=True)):
        of_ours, of_loop = ((x.double() - c).norm() / c.norm().clamp(min=least) for x in (a, b))
        assert of_ours <= max(4 * of_loop, BACKWARD[dtype]), (
            f"{cell.__name__}, gradient {i}: {of_ours:.4f}, loop {of_loop:.4f}"
        )


@needs_cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", LONG)
def test_gradients_are_as_good_as_those_of_a_loop_that_keeps_float32(name, regime, dtype):
    check(lambda *arguments: run(*arguments, "auto"), LONG[name], dtype, regime)


@lltm_ext.recurrence(gates=1, parameters=("w",), recurrent=False)
def leaky_relu_rnn(x, h, p):
    return F.leaky_relu(x[0] + torch.tanh(p.w) * h)


JUMPY = {"plrnn": plrnn, "rnn_relu": cells.rnn_relu, "leaky_relu": leaky_relu_rnn}
JUMPY |= {"spiking": spiking(True), "spiking without a product": spiking(False)}


@needs_cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("hidden", [8, 64, 72])
@pytest.mark.parametrize("algorithm", ["auto", "stepwise", "grid"])
@pytest.mark.parametrize("name", JUMPY)
def test_the_forward_takes_the_branches_of_float32(name, algorithm, hidden, dtype):
    """The projections, which decide which branch a step takes, are not rounded."""

    cell = JUMPY[name]
    if algorithm == "grid" and not cell.recurrent:
        pytest.skip("without a product there is no grid")

    def of_kernels(*arguments):
        return run(*arguments, algorithm)

    check(of_kernels, cell, dtype, "mild", hidden=hidden, batch=5, projects=True)


@needs_cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("batch", [128, 300])
def test_fused_steps_take_the_branches_of_float32(batch, dtype):
    sizes = {"length": 20, "batch": batch, "hidden": 2048, "projects": True}
    check(lambda *arguments: run(*arguments, "auto"), plrnn, dtype, "mild", **sizes)


def test_cells_that_compare_have_projections_in_float32():
    for cell in (plrnn, *JUMPY.values()):
        assert cell.derived.half_struct.wide_projections and not cell.derived.struct.wide_projections
    for cell in (cells.lstm, cells.lltm, cells.gru, cells.rnn_tanh):
        assert not cell.derived.half_struct.wide_projections


def test_quotients_of_states_are_saved_in_float32():
    slstm = cells.slstm.derived
    assert {repr(x) for x in slstm.wide if x.args == ()} == {"s.c", "s.n"}
    assert slstm.half_struct.saved == slstm.struct.saved + 3  # with the quotient
    assert not cells.lstm.derived.wide and not cells.gru.derived.wide
    assert set(cells.lstm.programs.values()) == {"lstm"}


def test_cells_without_a_product_save_states_and_decisions():
    """What they compute is computed again, from states in float32 where a rounding would grow."""
    assert cells.mingru.derived.saved == cells.rg_lru.derived.saved == []
    assert cells.sru.derived.saved_names == ("s.c",) and not cells.sru.derived.wide
    assert cells.lif.derived.saved_names == ("s.v",) and len(cells.lif.derived.wide) == 1
    assert len(wkv.derived.wide) == 3
    assert wkv.derived.half_struct.saved == 3 * 2 + 1


def test_a_division_by_what_does_not_change_saves_nothing_in_float32():
    @lltm_ext.recurrence(gates=1, states=("c",), parameters=("w",))
    def scaled(x, s, p):
        c = 0.9 * s.c + x[0] / 3
        return c / (1 + p.w * p.w), (c,)

    assert scaled.derived.wide == ()
