"""Which cells are affine in their states (lltm_ext/_formula/affine.py), and their coefficients."""

import pytest
import torch
from op_suite import DOUBLE, Make

import lltm_ext
from lltm_ext import cells
from lltm_ext._formula.graph import Tape

recurrence = lltm_ext.recurrence


@recurrence(gates=1, recurrent=False)
def average(x, h):
    return torch.lerp(h, x[0], 0.1)


@recurrence(gates=0, inputs=("delta", "decay", "done"), recurrent=False)
def gae(h, u):
    return torch.where(u.done > 0.5, u.delta, u.delta + u.decay * h)


@recurrence(gates=1, states=("s1", "s2"), parameters=("b0", "b1", "b2", "a1", "a2"), recurrent=False)
def biquad(x, s, p):
    """In the transposed direct form II."""
    y = p.b0 * x[0] + s.s1
    return y, (p.b1 * x[0] - p.a1 * y + s.s2, p.b2 * x[0] - p.a2 * y)


@recurrence(gates=2, states=("im",), parameters=("angle", "radius"), recurrent=False)
def rotation(x, h, s, p):
    real, imaginary = torch.cos(p.angle), torch.sin(p.angle)
    new_h = (real * h - imaginary * s.im) / p.radius + x[0]
    return new_h, ((imaginary * h + real * s.im) / p.radius - -x[1],)


@recurrence(gates=2, states=("slow", "fast"), recurrent=False)
def levels(x, s):
    """fast reads slow as it likes, because slow reads no other state."""
    slow = torch.sigmoid(x[0]) * s.slow + x[1]
    return torch.tanh(s.fast) * slow, (slow, torch.tanh(s.slow) * s.fast + torch.exp(slow))


@recurrence(gates=1, states=("a", "b", "c"), recurrent=False)
def four_states(x, h, s):
    return s.c + x[0], (h - s.c, s.a * 0.5, s.b + torch.relu(x[0]) * h)


def cascade(sections, x):
    """x [T, B] through sections [S, 6], as scipy.signal.sosfilt has them."""
    y, zeros = x.unsqueeze(-1), x.new_zeros(x.shape[1], 1)
    for b0, b1, b2, _, a1, a2 in sections.unsqueeze(-1):
        y, _ = biquad(y, (zeros, zeros, zeros), b0=b0, b1=b1, b2=b2, a1=a1, a2=a2)
    return y.squeeze(-1)


AFFINE = {
    "mingru": (cells.mingru, [(0,)]),
    "minlstm": (cells.minlstm, [(0,)]),
    "sru": (cells.sru, [(1,)]),
    "rg_lru": (cells.rg_lru, [(0,)]),
    "average": (average, [(0,)]),
    "gae": (gae, [(0,)]),
    "biquad": (biquad, [(1, 2)]),
    "rotation": (rotation, [(0, 1)]),
    "levels": (levels, [(1,), (2,)]),
    "four_states": (four_states, [(0, 1, 2, 3)]),
}


def values_of(cell):
    make = Make(DOUBLE)
    return {argument: [make(7) for _ in nodes] for argument, nodes in cell.derived.leaves.items()}


def evaluated(cell, nodes, values):
    leaves = cell.derived.leaves
    known = {node: x for k in leaves for node, x in zip(leaves[k], values[k], strict=True)}
    tape = Tape(nodes, list(known))
    found = tape.run(known.values(), tape.constants(values["h"][0]))
    return [x.expand(7) for x in found]


@pytest.mark.parametrize("name", AFFINE)
def test_a_step_is_the_coefficients_times_the_states_plus_the_rest(name):
    cell, states = AFFINE[name]
    values = values_of(cell)
    assert [component.states for component in cell.derived.affine] == states
    old, new = [*values["h"], *values["s"]], evaluated(cell, cell.derived.outputs, values)
    for component in cell.derived.affine:
        for i, row, rest in zip(component.states, component.coefficients, component.rests, strict=True):
            factors, (offset,) = evaluated(cell, row, values), evaluated(cell, [rest], values)
            expected = offset + sum(a * old[j] for a, j in zip(factors, component.states, strict=True))
            torch.testing.assert_close(new[i], expected)


@pytest.mark.parametrize("name", AFFINE)
def test_coefficients_and_rests_read_no_state_of_their_component(name):
    cell, _ = AFFINE[name]
    values = values_of(cell)
    for component in cell.derived.affine:
        nodes = [*(x for row in component.coefficients for x in row), *component.rests]
        before = evaluated(cell, nodes, values)
        others = {"h": list(values["h"]), "s": list(values["s"])}
        for i in component.states:
            others["h" if i == 0 else "s"][max(i - 1, 0)] = torch.full((7,), 3.0, dtype=DOUBLE)
        after = evaluated(cell, nodes, values | others)
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_condition_chooses_coefficients():
    (component,) = gae.derived.affine
    assert repr(component.coefficients[0][0]) == "(u.done > 0.5) ? 0 : u.decay"
    assert repr(component.rests[0]) == "u.delta"


NOT_AFFINE = {
    "a product with h": cells.ugrnn,
    "a product of a cell that is affine but for it": recurrence(gates=1)(lambda x: x[0]),
    "a function of the state": cells.indrnn,
    "a spike": cells.lif,
    "a square": recurrence(gates=1, recurrent=False)(lambda x, h: x[0] + h * h),
    "a division by the state": recurrence(gates=1, recurrent=False)(lambda x, h: x[0] / (2 + h)),
    "a condition on the state": recurrence(gates=1, recurrent=False)(
        lambda x, h: torch.where(h > 1, x[0], 0.5 * h)
    ),
    "the larger of the state and a value": recurrence(gates=1, recurrent=False)(
        lambda x, h: torch.maximum(x[0], h)
    ),
    "a square by way of another state": recurrence(gates=1, states=("c",), recurrent=False)(
        lambda x, h, s: (x[0] + s.c, (h * h,))
    ),
    "a state without a gradient": recurrence(gates=1, recurrent=False)(lambda x, h: x[0] + 0.5 * h.detach()),
    "five states that mix": recurrence(gates=1, states=("a", "b", "c", "d"), recurrent=False)(
        lambda x, h, s: (x[0] + s.d, (h, s.a, s.b, s.c))
    ),
    "no state": recurrence(gates=1, recurrent=False)(lambda x: torch.tanh(x[0])),
}


@pytest.mark.parametrize("why", NOT_AFFINE)
def test_other_cells_are_not_affine(why):
    cell = NOT_AFFINE[why]
    assert cell.derived.affine == ()
    assert "affine" not in repr(cell)


def test_cells_whose_states_are_affine_together_run_in_parallel():
    """In levels, fast reads slow by tanh."""
    found = {name for name, (cell, _) in AFFINE.items() if cell.derived.runs_in_parallel}
    assert found == {
        "mingru",
        "minlstm",
        "sru",
        "rg_lru",
        "average",
        "gae",
        "biquad",
        "rotation",
        "four_states",
    }


def test_the_ready_cells_that_are_affine():
    found = [name for name in cells.__all__ if getattr(cells, name).derived.affine]
    assert found == ["mingru", "minlstm", "rg_lru", "sru"]


def test_a_cell_says_that_it_is_affine():
    assert repr(cells.mingru).endswith(", affine in its states>")
    assert repr(biquad).endswith(", affine in its states>")


def test_the_ready_cells_whose_h_is_at_most_1():
    found = {name for name in cells.__all__ if getattr(cells, name).derived.bounded}
    assert found == {"cifg", "layer_norm_lstm", "lif", "lltm", "lstm", "peephole_lstm", "rnn_tanh"}


def test_a_bound_holds_for_products_of_bounded_values_and_for_choices_between_them():
    def share(x, h):
        gate = torch.sigmoid(x[0])
        return torch.where(x[1] > h, (1 - gate) * torch.tanh(x[2]), -gate)

    def double(x, h):
        return 2 * torch.tanh(x[0] + h)

    def mixture(x, h):
        gate = torch.sigmoid(x[0])
        return gate * h + (1 - gate) * torch.tanh(x[1])

    bounded = [recurrence(gates=n)(f).derived.bounded for f, n in ((share, 3), (double, 1), (mixture, 2))]
    assert bounded == [True, False, False]


# ---- filters ---------------------------------------------------------------------------------------------


def test_cascaded_biquads_equal_scipys_filter(device):
    signal = pytest.importorskip("scipy.signal")
    sections, x = signal.butter(6, 0.3, output="sos"), Make(DOUBLE)(500, 3)
    found = cascade(torch.tensor(sections, device=device), x.to(device))
    torch.testing.assert_close(found.cpu(), torch.from_numpy(signal.sosfilt(sections, x.numpy(), axis=0)))


def test_cascaded_biquads_equal_torchaudios_filter_and_its_gradient(device):
    signal = pytest.importorskip("scipy.signal")
    functional = pytest.importorskip("torchaudio.functional")
    sections = torch.tensor(signal.butter(4, 0.3, output="sos"), device=device)
    b, a = (torch.tensor(c, device=device) for c in signal.butter(4, 0.3))
    both = [Make(DOUBLE, device)(500, 3).requires_grad_() for _ in range(2)]
    found, expected = cascade(sections, both[0]), functional.lfilter(both[1].mT, a, b, clamp=False).mT
    torch.testing.assert_close(found, expected)
    for y in (found, expected):
        y.square().sum().backward()
    torch.testing.assert_close(both[0].grad, both[1].grad)
