"""spike: on whole tensors, and in cells."""

import math

import pytest
import torch

import lltm_ext
from lltm_ext import cells

SLOPES = {
    "atan": lambda x, k: k / 2 / (1 + (math.pi / 2 * k * x) ** 2),
    "sigmoid": lambda x, k: k * math.exp(-k * x) / (1 + math.exp(-k * x)) ** 2,
    "fast_sigmoid": lambda x, k: 1 / (1 + k * abs(x)) ** 2,
    "triangle": lambda x, k: max(1 - k * abs(x), 0),
}
VALUES = [-2.5, -0.6, -0.01, 0.0, 1e-3, 0.4, 3.0]


@pytest.mark.parametrize("k", [None, 1.5])
@pytest.mark.parametrize("surrogate", SLOPES)
def test_values_and_slopes(surrogate, k, device):
    defaults = {"atan": 2, "sigmoid": 4, "fast_sigmoid": 25, "triangle": 1}
    x = torch.tensor(VALUES, dtype=torch.float64, device=device, requires_grad=True)
    y = lltm_ext.spike(x, surrogate, k)
    (slope,) = torch.autograd.grad(y.sum(), x)
    expected = [SLOPES[surrogate](value, k or defaults[surrogate]) for value in VALUES]
    assert y.tolist() == [float(value > 0) for value in VALUES]
    torch.testing.assert_close(slope, x.new_tensor(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_dtype_stays_and_infinities_are_spikes(dtype, device):
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0], dtype=dtype, device=device)
    y = lltm_ext.spike(x)
    assert y.dtype == dtype and y.tolist() == [1, 0, 0, 1]


def test_transforms_and_compile_take_it():
    x = torch.tensor(VALUES, dtype=torch.float64)
    expected = [SLOPES["atan"](value, 2.0) for value in VALUES]
    torch.testing.assert_close(torch.vmap(torch.func.grad(lltm_ext.spike))(x), x.new_tensor(expected))
    compiled = torch.compile(lltm_ext.spike, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), lltm_ext.spike(x))


def test_other_arguments_are_refused():
    with pytest.raises(
        TypeError, match=r"spike: expected input to be.*floating-point dtype, got torch.int64"
    ):
        lltm_ext.spike(torch.tensor([1, 2]))
    with pytest.raises(TypeError, match="got float"):
        lltm_ext.spike(0.5)
    with pytest.raises(ValueError, match=r"surrogate to be one of 'atan', 'sigmoid', .*got 'relu'"):
        lltm_ext.spike(torch.ones(2), "relu")


@lltm_ext.recurrence(gates=1, states=("v",), parameters=("beta",))
def recurrent_lif(x, s, p):
    v = p.beta * s.v + x[0]
    spikes = lltm_ext.spike(v - 1, "sigmoid", k=2)
    return spikes, (v - spikes.detach(),)


@lltm_ext.recurrence(gates=2, recurrent=False)
def quantized(x, h):
    level = lltm_ext.round(4 * torch.tanh(h * x[0] + x[1])) / 4
    return 0.5 * h + level * lltm_ext.binarize(x[1], 0.0, -1.0, 1.0, "clipped")


@pytest.mark.parametrize("cell", [recurrent_lif, quantized, cells.lif], ids=lambda cell: cell.__name__)
def test_cells_with_steps_equal_their_loops(cell, device):
    """In values and gradients, of the function that the user wrote."""
    torch.manual_seed(0)
    steps, batch, hidden = 12, 3, 4
    like = {"dtype": torch.float64, "device": device, "requires_grad": True}
    x = torch.randn(steps, batch, cell.gates * hidden, **like)
    first = [torch.rand(batch, hidden, **like) for _ in range(1 + len(cell.states))]
    weight_hh = torch.randn(cell.gates * hidden, hidden, **like) if cell.recurrent else None
    named = {name: torch.rand(hidden, **like) for name in cell.parameters}
    output, _ = cell(x, tuple(first) if cell.states else first[0], None, weight_hh, **named)

    h, *states = first
    found = []
    for step in x:
        gates = step if weight_hh is None else step + h @ weight_hh.t()
        values = {"x": gates.chunk(cell.gates, 1), "h": h, "s": states, "p": list(named.values())}
        h, states = by_names(cell, values)
        found.append(h)
    expected = torch.stack(found)
    leaves = [x, *first, *named.values(), *([] if weight_hh is None else [weight_hh])]
    grad = torch.randn_like(expected)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(y, leaves, grad, allow_unused=True) for y in (output, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def by_names(cell, values):
    from lltm_ext._formula.declaration import call

    return call(cell.function, cell.declared, cell.arguments, values)


def test_a_cell_that_no_gradient_passes_warns():
    with pytest.warns(UserWarning, match=r"steps: no gradient passes.*lltm_ext.spike"):

        @lltm_ext.recurrence(gates=1)
        def steps(x, h):
            return torch.floor(x[0]) + torch.sign(h)
