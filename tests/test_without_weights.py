"""Cells without needless weights: an input that is taken as it is, and cells that read no such input."""

import functools

import pytest
import torch
from cell_examples import CELLS, arguments_of, everything, named_parameters
from op_suite import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    Call,
    Make,
    assert_all_near,
    assert_same_bits,
    needs_cuda,
    pairwise,
    sum_of_squares,
)
from sequence_suite import KINDS, assert_values_and_gradients
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lltm_ext
from lltm_ext import cells

HIDDEN = 6
WITH_GATES = {name: cell for name, cell in CELLS.items() if cell.gates > 0 and not cell.weights}
some_cells = pytest.mark.parametrize("cell", [cells.lstm, cells.gru, cells.indrnn], ids=lambda c: c.__name__)


def projected_call(cell, make, length=5, batch=3, hidden=HIDDEN, bias=True):
    """A Call with the input in the place of its product with weight_ih."""
    rows = cell.gates * hidden
    call = arguments_of(cell, make, (length, batch), batch, hidden, rows, bias)
    input, states, _, *weights, parameters = call.args
    hx = tuple(states) if cell.states else states[0]
    return Call(input, hx, None, *weights, **named_parameters(cell, parameters))


def by_identity(cell, **how):
    """The cell with a weight_ih that changes nothing."""

    def run(input, hx, _, *weights, **named):
        eye = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
        return cell(input, hx, eye, *weights, **how, **named)

    return run


def steps_of(cell, device="cpu", length=5, batch=3):
    make = Make(DOUBLE, device, seed=3)
    return {u: make(length, batch).abs() for u in cell.inputs}


# ---- an input that is taken as it is ---------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_GATES)
def test_a_call_equals_one_with_the_identity(name, dtype, device):
    cell = WITH_GATES[name]
    call, steps = projected_call(cell, Make(dtype, device)), steps_of(cell, device)
    ours, identity = functools.partial(cell, **steps), by_identity(cell, **steps)
    found, expected = call.leaves(), call.leaves()
    outputs = [c.run(f) for c, f in ((found, ours), (expected, identity))]
    assert_all_near(*outputs, FORWARD[dtype])
    gradients = [
        torch.autograd.grad(sum_of_squares([y.double() for y in ys]), c.tensors)
        for ys, c in zip(outputs, (found, expected), strict=True)
    ]
    assert_all_near(*gradients, BACKWARD[dtype])


@needs_cuda
def test_a_cell_that_decides_reads_an_input_of_half_types_as_it_is():
    """Projections are in float32 there, but the input needs no copy in float32."""
    x, h0 = (
        torch.randn(64, 8, 512, dtype=torch.float16, device="cuda"),
        torch.zeros(8, 512, device="cuda").half(),
    )
    call = functools.partial(cells.lif, x, (h0, h0), None, beta=torch.ones(512, device="cuda").half())
    with torch.no_grad():
        call()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * x.nbytes


@pairwise(
    cell={cell.__name__: cell for cell in (cells.lstm, cells.gru, cells.indrnn)},
    reset=[None, "zeros", "initial"],
    bias={"no bias": False, "bias": True},
    hidden=[8, 9],  # on CUDA, 9 are padded
    reverse={"forward": False, "reverse": True},
)
def test_options_of_a_call(cell, bias, hidden, reverse, reset, device):
    call = projected_call(cell, Make(DOUBLE, device), 12, hidden=hidden, bias=bias)
    how = {"reverse": reverse}
    if reset:
        starts = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)) < 0.3
        how |= {"reset": starts.to(device), "reset_to": reset}
    assert_values_and_gradients(functools.partial(cell, **how), by_identity(cell, **how), call)


def test_the_input_is_left_as_it_came(device):
    """Kernels write what backward needs over the projections, in memory of their own."""
    for cell in (cells.lstm, cells.gru, cells.indrnn, cells.cifg):
        for grad in (False, True):
            call = projected_call(cell, Make(torch.float32, device))
            before = call.map(torch.clone)
            call = call.leaves() if grad else call
            output = call.run(cell)[0]
            if grad:
                output.sum().backward()
            assert all(torch.equal(x, y) for x, y in zip(call.tensors, before.tensors, strict=True))


@pytest.mark.parametrize("shape", [(0, 3), (5, 0)], ids=["no steps", "no rows"])
def test_no_steps_or_rows(shape, device):
    call = projected_call(cells.lstm, Make(DOUBLE, device), *shape).leaves()
    output, (h_n, c_n) = cells.lstm(*call.args)
    assert output.shape == (*shape, HIDDEN)
    (output.sum() + h_n.sum() + c_n.sum()).backward()
    assert all(x.grad.shape == x.shape for x in call.tensors)


def test_the_built_in_functions_take_it(device):
    for function, cell in ((lltm_ext.lstm, cells.lstm), (lltm_ext.lltm, cells.lltm)):
        call = projected_call(cell, Make(DOUBLE, device))
        assert_all_near(call.run(function), call.run(by_identity(cell)), FORWARD[DOUBLE])


@some_cells
def test_derivatives_of_any_order_and_transforms(cell):
    call = projected_call(cell, Make(DOUBLE), 3, 2, 2)

    def loss(function, *tensors):
        return sum_of_squares(call.with_tensors(tensors).run(function))

    def derivatives(function):
        tensors = [x.detach().requires_grad_() for x in call.tensors]
        first = torch.autograd.grad(loss(function, *tensors), tensors, create_graph=True)
        second = torch.autograd.grad(sum_of_squares(first), tensors)
        along = torch.func.jvp(functools.partial(loss, function), tuple(call.tensors), tuple(call.tensors))
        samples = [torch.stack([x, 2 * x]) for x in call.tensors]
        per_sample = torch.vmap(torch.func.grad(functools.partial(loss, function)))(*samples)
        return [*first, *second, *along, per_sample]

    assert_all_near(derivatives(cell), derivatives(by_identity(cell)), BACKWARD[DOUBLE])


def test_autocast_lowers_the_input():
    call = projected_call(cells.gru, Make(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = call.run(cells.gru), call.run(by_identity(cells.gru))
    assert found[0].dtype == torch.bfloat16
    assert_all_near(found, expected, FORWARD[torch.bfloat16])


@some_cells
def test_opcheck(cell):
    call = projected_call(cell, Make(DOUBLE)).leaves()
    input, hx, _, weight_hh, bias = call.args
    h0, c0 = hx if cell.states else (hx, None)
    parameters = torch.stack(list(call.kwargs.values())) if cell.parameters else None
    how = (None, None, None, False, "auto", cell.programs[torch.float64])
    op = torch.ops.lltm_ext.custom_cell.default
    torch.library.opcheck(op, (input, h0, c0, None, weight_hh, bias, parameters, *how))


# ---- layers ----------------------------------------------------------------------------------------------


def layers(kind="plain", cell=everything, device="cpu", **options):
    """A layer without input_size, and one whose first weights are the identity."""
    options = KINDS[kind] | options
    ours = lltm_ext.Recurrent(cell, None, HIDDEN, **options, dtype=DOUBLE, device=device)
    rows = cell.gates * HIDDEN
    other = lltm_ext.Recurrent(cell, rows, HIDDEN, **options, dtype=DOUBLE, device=device)
    eyes = {name: torch.eye(rows) for name in other.state_dict() if name.startswith("weight_ih_l0")}
    other.load_state_dict(ours.state_dict() | eyes)
    return ours, other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", [everything, cells.indrnn], ids=lambda c: c.__name__)
def test_a_layer_without_input_size_takes_the_input_as_it_is(kind, cell, device):
    ours, other = layers(kind, cell, device)
    assert not any(name.startswith("weight_ih_l0") for name in ours.state_dict())
    steps = steps_of(cell, device, 5, 4)
    if ours.batch_first:
        steps = {u: x.t() for u, x in steps.items()}
    sizes = (4, 5) if ours.batch_first else (5, 4)
    call = Call(Make(DOUBLE, device)(*sizes, cell.gates * HIDDEN))
    assert_values_and_gradients(functools.partial(ours, **steps), functools.partial(other, **steps), call)


def test_packed_and_unbatched_input_and_autocast(device):
    ours, other = layers("bidirectional", cells.slstm, device)
    input = Make(DOUBLE, device)(5, 3, 4 * HIDDEN)
    pack = functools.partial(pack_padded_sequence, lengths=[2, 5, 3], enforce_sorted=False)
    (found, *states), (expected, *others) = (layer(pack(input)) for layer in (ours, other))
    pairs = [pad_packed_sequence(found)[0], *states[0]], [pad_packed_sequence(expected)[0], *others[0]]
    assert_all_near(*pairs, FORWARD[DOUBLE])
    alone = Call(input[:, 1])
    assert_all_near(alone.run(ours), alone.run(other), FORWARD[DOUBLE])
    with torch.autocast(device, torch.bfloat16):
        of_float = Call(input.float())
        assert_all_near(of_float.run(ours.float()), of_float.run(other.float()), FORWARD[torch.bfloat16])


def test_a_layer_compiles_exports_and_scripts(fresh_dynamo):
    ours, _ = layers("two layers", cells.slstm)
    call = Call(Make(DOUBLE)(3, 2, 4 * HIDDEN))
    expected = call.run(ours)
    for other in (
        torch.compile(ours, fullgraph=True, backend="aot_eager"),
        torch.export.export(ours, call.args).module(),
        torch.jit.script(ours),
    ):
        assert_all_near(call.run(other), expected, FORWARD[DOUBLE])


# ---- gates that only the input feeds ---------------------------------------------------------------------


@lltm_ext.recurrence(gates=3, separate=True, inputs=("gap",))
def star(x, r, h, u):
    """Only gate 1 of 3 sees h."""
    keep = torch.sigmoid(x[1] + r[1] - u.gap)
    return torch.tanh((1 - keep) * h + keep * torch.tanh(x[0]) * x[2])


@lltm_ext.recurrence(gates=3, separate=True, inputs=("gap",))
def star_of_all_rows(x, r, h, u):
    return star.function(x, r, h, u) + 0 * (r[0] + r[2])


def by_all_rows(**how):
    def run(input, hx, weight_ih, weight_hh, bias, **named):
        other = torch.ones_like(weight_hh)
        return star_of_all_rows(
            input, hx, weight_ih, torch.cat([other, weight_hh, other]), bias, **how, **named
        )

    return run


@pytest.mark.parametrize("heads", [1, 2], ids=["one head", "two heads"])
def test_a_gate_whose_product_with_h_nothing_reads_has_no_rows(heads, dtype, device):
    assert star.recurrent_gates == [1] and star_of_all_rows.recurrent_gates == [0, 1, 2]
    assert "a product with h of gates 1," in repr(star)
    make = Make(dtype, device)
    weights = (make(3 * HIDDEN, 4), make(HIDDEN, HIDDEN // heads, scale=0.4), make(3 * HIDDEN))
    call, how = Call(make(5, 3, 4), make(3, HIDDEN), *weights), steps_of(star, device)
    assert_values_and_gradients(functools.partial(star, **how), by_all_rows(**how), call, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_no_weights_of_such_gates(kind, device):
    options = KINDS[kind] | {"dtype": DOUBLE, "device": device}
    ours, other = (lltm_ext.Recurrent(cell, 4, HIDDEN, **options) for cell in (star, star_of_all_rows))
    state = ours.state_dict()
    assert state["weight_hh_l0"].shape == (HIDDEN, HIDDEN)
    with_rows = {k: torch.cat([x, x, x]) if k.startswith("weight_hh") else x for k, x in state.items()}
    other.load_state_dict(with_rows)
    gap = Make(DOUBLE, device)(5, 4)
    ours, other = (functools.partial(layer, gap=gap) for layer in (ours, other))
    assert_values_and_gradients(ours, other, Call(Make(DOUBLE, device)(5, 4, 4)))


@pytest.mark.parametrize("heads", [1, 2], ids=["one head", "two heads"])
def test_a_layer_with_such_gates_compiles_exports_and_scripts(heads, fresh_dynamo):
    layer = lltm_ext.Recurrent(star, 4, HIDDEN, heads=heads, dtype=DOUBLE)
    assert star.gradcheck(device="cpu")
    call = Call(Make(DOUBLE)(5, 3, 4), gap=Make(DOUBLE)(5, 3))
    expected = call.run(layer)
    for other in (
        torch.compile(layer, fullgraph=True, backend="aot_eager"),
        torch.export.export(layer, call.args, call.kwargs).module(),
        torch.jit.script(layer),
    ):
        assert_all_near(call.run(other), expected, FORWARD[DOUBLE])


# ---- cells without gates ---------------------------------------------------------------------------------


@lltm_ext.recurrence(gates=0, inputs=("delta", "decay"), recurrent=False)
def gae(h, u):
    return u.delta + u.decay * h


@lltm_ext.recurrence(gates=0, inputs=("value",), parameters={"rate": 0.5}, recurrent=False)
def average(h, p, u):
    return h + p.rate * (u.value - h)


def advantages(h, delta, decay, reset=None):
    """A loop from the last step to the first over [T, B, H]."""
    found = []
    for t in reversed(range(len(delta))):
        h = delta[t] + decay[t] * h
        found.append(h)
        if reset is not None:
            h = torch.where(reset[t, :, None], 0.0, h)
    return torch.stack(found[::-1])


@pytest.mark.parametrize("has_resets", [False, True], ids=["", "resets"])
def test_advantages_equal_a_loop(has_resets, dtype, device):
    make = Make(dtype, device)
    h0, delta, decay = make(4, 3), make(7, 4), make(7, 4).sigmoid()
    starts = torch.rand(7, 4, generator=torch.Generator().manual_seed(1)) < 0.3
    reset = starts.to(device) if has_resets else None
    how = {"delta": delta, "decay": decay, "reset": reset}
    output, final = gae(None, h0, reverse=True, **how)
    wide = [x.double().unsqueeze(-1) for x in (delta, decay)]
    expected = advantages(h0.double(), *wide, reset)
    assert_all_near([output], [expected], FORWARD[dtype])
    layer = lltm_ext.Recurrent(gae, None, 3, reverse=True, device=device)
    assert list(layer.parameters()) == []
    of_layer, final_of_layer = layer(hx=h0[None], **how)
    assert_same_bits([of_layer, final_of_layer[0]], [output, final])


def test_every_layout_of_the_steps(device):
    layer = lltm_ext.Recurrent(average, None, 3, bidirectional=True, device=device, dtype=DOUBLE)
    value = Make(DOUBLE, device)(5, 4, 3)
    output, h_n = layer(value=value)
    assert output.shape == (5, 4, 6) and h_n.shape == (2, 4, 3)
    alone, _ = layer(value=value[:, 1, 0])
    expected, _ = layer(value=value[:, 1:2, :1].expand(5, 1, 3))
    assert_all_near([alone], [expected[:, 0]], FORWARD[DOUBLE])
    lengths = [2, 5, 3, 1]
    packed, last = layer(value=pack_padded_sequence(value, lengths, enforce_sorted=False))
    padded, _ = pad_packed_sequence(packed)
    for b, n in enumerate(lengths):
        of_row, states = layer(value=value[:n, b : b + 1])
        assert_all_near([padded[:n, b], last[:, b]], [of_row[:, 0], states[:, 0]], FORWARD[DOUBLE])
    layer.batch_first = True
    swapped, _ = layer(value=value.transpose(0, 1))
    assert_all_near([swapped.transpose(0, 1)], [output], FORWARD[DOUBLE])


def test_gradients_go_to_states_and_parameters(device):
    assert average.gradcheck(device=device) and gae.gradcheck(device=device)
    layer = lltm_ext.Recurrent(average, None, 3, device=device)
    assert [(name, tuple(p.shape)) for name, p in layer.named_parameters()] == [("rate_l0", (3,))]
    layer(value=torch.ones(5, 4, device=device))[0].sum().backward()
    assert (layer.rate_l0.grad > 0).all()


def test_the_dtype_is_that_of_states_parameters_or_steps(device):
    value = torch.ones(5, 4, dtype=torch.bool, device=device)
    given = {"delta": value, "decay": value}
    layer = lltm_ext.Recurrent(gae, None, 3)
    assert layer(**given)[0].dtype == torch.float32
    assert layer(**(given | {"delta": value.bfloat16()}))[0].dtype == torch.bfloat16
    assert layer(hx=torch.zeros(1, 4, 3, dtype=DOUBLE, device=device), **given)[0].dtype == DOUBLE
    half = lltm_ext.Recurrent(average, None, 3, device=device, dtype=torch.float16)
    assert half(value=value)[0].dtype == torch.float16


def test_a_layer_without_gates_compiles_and_exports(fresh_dynamo):
    layer = lltm_ext.Recurrent(average, None, 3, dtype=DOUBLE)
    call = Call(value=Make(DOUBLE)(5, 4))
    expected = call.run(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_all_near(call.run(compiled), expected, FORWARD[DOUBLE])
    exported = torch.export.export(layer, (), call.kwargs).module()
    assert_all_near(call.run(exported), expected, FORWARD[DOUBLE])


# ---- what does not fit -----------------------------------------------------------------------------------

X, H0 = torch.zeros(5, 2, 12), torch.zeros(2, 6)
VALUE = {"value": torch.zeros(5, 2)}
BAD_CALLS = {
    "features": (
        lambda: cells.ugrnn(X[..., :5], H0, None, torch.zeros(12, 6)),
        TypeError,
        r"ugrnn: expected weight_ih to be a Tensor, got None, or input of 2\*hidden_size = 12 features",
    ),
    "features of a compiled cell": (
        lambda: lltm_ext.lstm(X, (H0, H0), None, torch.zeros(24, 6)),
        TypeError,
        r"lstm: expected weight_ih to be a Tensor, got None, or input of 4\*hidden_size = 24 features",
    ),
    "no weight_hh": (
        lambda: cells.ugrnn(X, H0),
        TypeError,
        "ugrnn: expected weight_hh to be a Tensor, got NoneType",
    ),
    "features of a layer": (
        lambda: lltm_ext.Recurrent(cells.ugrnn, None, 6)(X[..., :5]),
        RuntimeError,
        r"Recurrent: expected input of shape \[length, batch, 2\*hidden_size\] .* 2\*hidden_size = 12, got",
    ),
    "an input without gates": (
        lambda: average(X, H0, rate=torch.zeros(6), **VALUE),
        TypeError,
        "average: expected input to be None, because average has no gates, got Tensor",
    ),
    "weight_ih without gates": (
        lambda: average(None, H0, torch.zeros(0, 3), rate=torch.zeros(6), **VALUE),
        TypeError,
        "average: expected weight_ih to be None, because the cell has no gates",
    ),
    "value of 1-D": (
        lambda: average(None, H0, rate=torch.zeros(6), value=torch.zeros(5)),
        RuntimeError,
        r"average: expected value of shape \[length, batch\] or, for each unit, .*, got \[5\]",
    ),
    "value of another batch": (
        lambda: average(None, H0, rate=torch.zeros(6), value=torch.zeros(5, 3)),
        RuntimeError,
        r"average: expected h0 of shape \[batch, hidden_size\] = \[3, 6\], got \[2, 6\]",
    ),
    "an input of a layer without gates": (
        lambda: lltm_ext.Recurrent(average, None, 6)(X, **VALUE),
        TypeError,
        "Recurrent: expected input to be None, because average has no gates, got Tensor",
    ),
    "no input": (
        lambda: lltm_ext.Recurrent(cells.ugrnn, 12, 6)(),
        TypeError,
        "Recurrent: expected input to be a Tensor, got NoneType",
    ),
    "input_size without gates": (
        lambda: lltm_ext.Recurrent(average, 3, 6),
        ValueError,
        "Recurrent: expected input_size=None for average, which has no gates, got 3",
    ),
    "layers without gates": (
        lambda: lltm_ext.Recurrent(average, None, 6, num_layers=2),
        ValueError,
        "Recurrent: expected num_layers=1 for average, which has no gates, got 2",
    ),
    "a script": (
        lambda: torch.jit.script(lltm_ext.Recurrent(average, None, 6)),
        NotImplementedError,
        "Recurrent: expected a cell with gates for torch.jit.script, got average",
    ),
    "no gates but a product": (
        lambda: lltm_ext.recurrence(gates=0, inputs=("value",))(lambda h, u: h + u.value),
        ValueError,
        r"<lambda>: expected gates to be a positive int, got 0 \(0 needs inputs= and recurrent=False\)",
    ),
    "weight_hh of all gates": (
        lambda: star(X, H0, torch.zeros(18, 12), torch.zeros(18, 6), gap=torch.zeros(5, 2)),
        RuntimeError,
        r"star: expected weight_hh of shape \[1\*hidden_size, hidden_size .*\] = \[6, 6\], got \[18, 6\]",
    ),
    "weight_hh of too few columns": (
        lambda: star(X, H0, torch.zeros(18, 12), torch.zeros(6, 4), gap=torch.zeros(5, 2)),
        RuntimeError,
        r"star: expected weight_hh of shape \[1\*hidden_size, hidden_size .*\] = \[6, 6\], got \[6, 4\]",
    ),
    "no weight_hh of one gate": (
        lambda: star(X, H0, torch.zeros(18, 12), gap=torch.zeros(5, 2)),
        TypeError,
        "star: expected weight_hh to be a Tensor, got NoneType",
    ),
    "a product that nothing reads": (
        lambda: lltm_ext.recurrence(gates=1, separate=True)(lambda x: x[0]),
        ValueError,
        "<lambda>: expected the function to read r of a gate, but it reads none .recurrent=False",
    ),
    "no gates and no inputs": (
        lambda: lltm_ext.recurrence(gates=0, recurrent=False)(lambda h: 0.5 * h),
        ValueError,
        r"<lambda>: expected gates to be a positive int, got 0 \(0 needs inputs= and recurrent=False\)",
    ),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_is_missing_is_named(bad):
    call, error, message = BAD_CALLS[bad]
    with pytest.raises(error, match=f"^{message}"):
        call()
