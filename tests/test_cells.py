"""lltm_ext.cells against formulas written out, and the layers GRU and RNN against torch's."""

import functools
import io
import re
from pathlib import Path

import pytest
import torch
from op_suite import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    Call,
    Make,
    ModuleSuite,
    assert_all_near,
    assert_same_bits,
    cotangents,
    forward_and_gradients,
)
from sequence_suite import INPUT, KINDS, kinds, sequence_arguments
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

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


def arguments(cell, make, length=6, batch=4, input_size=3, hidden=5):
    rows = cell.gates * hidden
    states = [make(batch, hidden, scale=0.5).abs() for _ in cell.state_names]
    return Call(
        make(length, batch, input_size),
        tuple(states) if cell.states else states[0],
        make(rows, input_size, scale=0.5),
        make(rows, hidden, scale=0.5) if cell.recurrent else None,
        make(rows),
        **{p: make(hidden) for p in cell.parameters},
    )


def inputs_of_steps(name, device="cpu", length=6, batch=4, hidden=5):
    make = Make(DOUBLE, device, seed=3)
    if name == "zoneout_lstm":
        return {u: make(length, batch, hidden) > 0.5 for u in ("keep_h", "keep_c")}
    return {"time": make(length, batch).abs()} if name == "cfc" else {}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_cell_is_its_formula(name, dtype, device):
    cell = getattr(cells, name)
    call, inputs = arguments(cell, Make(dtype, device)), inputs_of_steps(name, device)
    in_double = {u: x.double() for u, x in inputs.items()}
    outputs, gradients = forward_and_gradients(functools.partial(cell, **inputs), call)
    exact, exact_gradients = forward_and_gradients(
        functools.partial(by_formula, name, **in_double), call.map(torch.Tensor.double), cotangents(outputs)
    )
    assert_all_near(outputs, exact, FORWARD[dtype], "output")
    assert_all_near(gradients, exact_gradients, BACKWARD[dtype], "gradient")


@pytest.mark.parametrize("name", cells.__all__)
def test_a_cell_documents_itself_and_passes_gradcheck(name):
    cell = getattr(cells, name)
    assert cell.__name__ == name
    assert "Source: " in cell.__doc__
    assert cell.gradcheck()


def test_the_module_lists_its_cells():
    found = [name for name, value in vars(cells).items() if isinstance(value, lltm_ext.RecurrentCell)]
    assert sorted(found) == cells.__all__


@pytest.mark.parametrize("name", ["lstm", "lltm"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_derived_cells_equal_the_built_in_ones(name, bias, dtype, device):
    cell = getattr(cells, name)
    input, h0, c0, *weights = sequence_arguments(Make(dtype, device), cell.gates, 7, 5, 9, 24, bias).values()
    call = Call(input, (h0, c0), *weights)
    outputs, gradients = forward_and_gradients(cell, call)
    expected, expected_gradients = forward_and_gradients(getattr(lltm_ext, name), call)
    assert [y.dtype for y in outputs] == [y.dtype for y in expected]
    assert_all_near(outputs, expected, 2 * FORWARD[dtype], "output")
    assert_all_near(gradients, expected_gradients, 2 * BACKWARD[dtype], "gradient")


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
    call = arguments(cells.zoneout_lstm, Make(DOUBLE), length=1)
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


def test_a_derived_gradient_equals_that_of_the_function():
    """By the nodes that the source is written from."""
    make = Make(DOUBLE)
    for name in cells.__all__:
        cell = getattr(cells, name)
        derived = cell.derived
        planes = {"x": cell.gates, "r": cell.gates * cell.separate, "h": 1}
        planes |= {"s": len(cell.states), "p": len(cell.parameters), "u": len(cell.inputs)}
        values = {key: [make(50).abs().requires_grad_() for _ in range(n)] for key, n in planes.items()}
        x, r, (h,), s, p, u = values.values()
        new_h, new_states = cell.step(x, r, h, s, p, u)
        expected = (new_h, *new_states)
        outputs, saved = derived.forward(values)
        assert_all_near(outputs, expected, FORWARD[DOUBLE], name)
        wanted = [v for key in "xrhsp" for v in values[key]]
        exact = torch.autograd.grad(expected, wanted, cotangents(expected), materialize_grads=True)
        found = derived.backward(saved, values, cotangents(expected))
        gradients = [torch.as_tensor(g).expand(50) for key in "xrhsp" for g in found[key]]
        assert_all_near(gradients, exact, BACKWARD[DOUBLE], name)


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


# ---- GRU and RNN -----------------------------------------------------------------------------------------

HIDDEN = 8
LAYERS = {
    "GRU": (lltm_ext.GRU, nn.GRU, {}),
    "RNN": (lltm_ext.RNN, nn.RNN, {}),
    "RNN of relu": (lltm_ext.RNN, nn.RNN, {"nonlinearity": "relu"}),
}
layers = pytest.mark.parametrize("which", LAYERS)
FORMS = {
    "batched": lambda layer, x: x.transpose(0, 1).contiguous() if layer.batch_first else x,
    "unbatched": lambda layer, x: x[:, 0],
    "packed": lambda layer, x: pack_padded_sequence(x, [6, 4, 4, 1]),
    "packed in any order": lambda layer, x: pack_padded_sequence(x, [2, 6, 1, 4], enforce_sorted=False),
}


def build_both(which, kind="plain", device="cpu", dtype=DOUBLE, **options):
    """Our layer, and torch's with the same parameters in float64."""
    Layer, Peer, more = LAYERS[which]
    options = {**KINDS[kind], **more, **options, "device": device}
    torch.manual_seed(0)
    layer, peer = Layer(INPUT, HIDDEN, **options, dtype=dtype), Peer(INPUT, HIDDEN, **options, dtype=DOUBLE)
    peer.load_state_dict(layer.state_dict())
    return layer, peer


def h0_of(layer, make, *batch):
    return make(layer.num_layers * (1 + layer.bidirectional), *batch, HIDDEN)


def run_layer(layer, form, values, h0):
    leaves = [x.detach().requires_grad_() for x in (values, *([] if h0 is None else [h0]))]
    output, h_n = layer(FORMS[form](layer, leaves[0]), *leaves[1:])
    outputs = (output.data if isinstance(output, PackedSequence) else output, h_n)
    return output, outputs, torch.autograd.grad(outputs, [*leaves, *layer.parameters()], cotangents(outputs))


@layers
@kinds
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
@pytest.mark.parametrize("given", [False, True], ids=["no h0", "h0"])
def test_values_and_gradients_equal_those_of_torch(which, kind, form, batch_first, given, device):
    layer, peer = build_both(which, kind, device, batch_first=batch_first)
    make = Make(DOUBLE, device)
    values, h0 = make(6, 4, INPUT), h0_of(layer, make, *([] if form == "unbatched" else [4]))
    ours, outputs, gradients = run_layer(layer, form, values, h0 if given else None)
    theirs, expected, exact = run_layer(peer, form, values, h0 if given else None)
    assert_all_near(outputs, expected, 1e-10, "output")
    assert_all_near(gradients, exact, 1e-10, "gradient")
    if isinstance(theirs, PackedSequence):
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@layers
@kinds
def test_values_in_every_dtype(which, kind, dtype, device):
    layer, peer = build_both(which, kind, device, dtype)
    make = Make(dtype, device)
    call = Call(make(6, 4, INPUT), h0_of(layer, make, 4))
    outputs = call.run(layer)
    assert all(y.dtype == dtype for y in outputs)
    assert_all_near(outputs, call.map(torch.Tensor.double).run(peer), FORWARD[dtype])


@layers
@kinds
def test_parameters_state_dicts_and_text_are_those_of_torch(which, kind):
    Layer, Peer, more = LAYERS[which]
    both = []
    for Each in (Layer, Peer):
        torch.manual_seed(0)
        both.append(Each(INPUT, HIDDEN, **KINDS[kind], **more))
    layer, peer = both
    assert repr(layer) == repr(peer)
    assert list(layer.state_dict()) == list(peer.state_dict())
    assert_same_bits(list(layer.parameters()), list(peer.parameters()))
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(1.5)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    peer.load_state_dict(torch.load(file, weights_only=True))
    input = Make()(6, 4, INPUT)
    assert_all_near(Call(input).run(layer), Call(input).run(peer), FORWARD[torch.float32])


@layers
def test_dropout_is_torchs_and_only_in_training(which):
    layer, peer = build_both(which, "two layers", dropout=0.5)
    call = Call(Make(DOUBLE)(6, 4, INPUT))
    torch.manual_seed(1)
    output, _ = call.run(layer)
    torch.manual_seed(1)
    assert_same_bits([call.run(layer)[0]], [output])
    assert not torch.equal(call.run(layer)[0], output)
    assert_all_near(call.run(layer.eval()), call.run(peer.eval()), 1e-10)


@layers
def test_a_reset_splits_the_sequence(which):
    layer, peer = build_both(which, "bidirectional")
    input, reset = Make(DOUBLE)(7, 4, INPUT), torch.zeros(7, 4, dtype=torch.bool)
    reset[3] = True
    output, _ = layer(input, reset=reset)
    expected = torch.cat([peer(input[:3])[0], peer(input[3:])[0]])
    assert_all_near([output], [expected], 1e-10)


@layers
def test_bad_input_is_named(which):
    layer, _ = build_both(which, dtype=torch.float32)
    name, input = type(layer).__name__, torch.zeros(6, 4, INPUT)
    for arguments, exception, message in (
        ((torch.zeros(INPUT),), ValueError, rf"{name}: expected input of 2 or 3 dimensions, got \[7\]"),
        ((torch.zeros(6, 4, 6),), RuntimeError, f"{name}: expected input of input_size = 7 features"),
        (
            (input, (torch.zeros(1, 4, 8),)),
            TypeError,
            f"{name}: expected hx to be a Tensor, h0, got tuple of 1",
        ),
        (
            (input, torch.zeros(4, 8)),
            RuntimeError,
            rf"{name}: expected h0 of shape \[1, 4, 8\], got \[4, 8\]",
        ),
        (
            (input.double(),),
            TypeError,
            f"{name}: expected input of dtype float32, as the weights have, got float64",
        ),
    ):
        with pytest.raises(exception, match=f"^{message}"):
            layer(*arguments)
    with pytest.raises(ValueError, match="proj_size"):
        type(layer)(INPUT, HIDDEN, proj_size=3)


class TestModules(ModuleSuite):
    modules = {
        "GRU": (
            functools.partial(lltm_ext.GRU, INPUT, HIDDEN, num_layers=2, bidirectional=True),
            lambda make: Call(make(6, 4, INPUT), make(4, 4, HIDDEN)),
        ),
        "RNN": (
            functools.partial(lltm_ext.RNN, INPUT, HIDDEN, nonlinearity="tanh", batch_first=True),
            lambda make: Call(make(4, 6, INPUT)),
        ),
        "Recurrent": (
            functools.partial(lltm_ext.Recurrent, cells.slstm, INPUT, HIDDEN, heads=2, bidirectional=True),
            lambda make: Call(make(6, 4, INPUT)),
        ),
    }

    def test_modules_compile_and_export(self, module, device, fresh_dynamo):
        with torch._dynamo.config.patch(allow_rnn=True):
            super().test_modules_compile_and_export(module, device, fresh_dynamo)
