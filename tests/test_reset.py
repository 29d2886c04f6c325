"""Episodes that start within a sequence: reset= of lltm, lstm and their layers, reset_to= of all."""

import functools
import itertools

import cell_examples
import pytest
import torch
from cell_examples import CELLS, TEXTS, WITH_OUTPUT, everything, without_product
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
)
from sequence_suite import KINDS, Recorder, assert_values_and_gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import lltm_ext
from lltm_ext import cells
from lltm_ext._arguments import at_next_step
from lltm_ext.lltm import lltm_reference
from lltm_ext.lstm import lstm_reference

# One or several states, products apart, parameters, inputs of the steps, and no product.
OF_CELLS = {name: CELLS[name] for name in ("rnn_tanh", "gru", "peephole_lstm", "slstm", "indrnn")}
OF_CELLS |= {cell.__name__: cell for cell in (everything, without_product, *WITH_OUTPUT.values())}
FUNCTIONS = {"lltm": lltm_ext.lltm, "lstm": lltm_ext.lstm} | OF_CELLS
EVERY_LAYER = {
    "LLTM": lltm_ext.LLTM,
    "LSTM": lltm_ext.LSTM,
    "GRU": lltm_ext.GRU,
    "RNN": lltm_ext.RNN,
    "RNN of relu": functools.partial(lltm_ext.RNN, nonlinearity="relu"),
    "Recurrent": functools.partial(lltm_ext.Recurrent, cells.slstm),
}
functions = pytest.mark.parametrize("name", ["lltm", "lstm"])
every_layer = pytest.mark.parametrize("name", EVERY_LAYER)
both_resets = pytest.mark.parametrize("reset_to", ["zeros", "initial"])


def call_of(name, make, length=7, batch=4, hidden=16):
    return cell_examples.call_of((CELLS | OF_CELLS)[name], make, length, batch, hidden, 5)


def inputs_of(name, device, length=7, batch=4):
    """Of the steps, which have no gradients."""
    make, cell = Make(DOUBLE, device, seed=3), OF_CELLS.get(name)
    return {u: make(length, batch).abs() for u in (cell.inputs if cell else ())}


def resets(device, kind):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(7, 4, generator=generator)
    return (numbers < 0.4 if kind == "bool" else numbers).to(device)


def each(f, *states):
    """`f` of one state, or of each of several."""
    return f(*states) if isinstance(states[0], torch.Tensor) else tuple(map(f, *states))


def episodes_of(function, reset, reset_to="initial", **inputs):
    """Every episode of every row by a call of its own."""

    def run(input, hx, *weights, **named):
        rows, final = [], []
        target = hx if reset_to == "initial" else each(torch.zeros_like, hx)
        for b in range(input.shape[1]):
            starts = [0, *(t for t in range(1, len(input)) if reset[t, b]), len(input)]
            outputs = []
            for start, end in itertools.pairwise(starts):
                of_row = each(lambda x, b=b: x[b : b + 1], target if reset[start, b] else hx)
                steps = {u: x[start:end, b : b + 1] for u, x in inputs.items()}
                output, last = function(input[start:end, b : b + 1], of_row, *weights, **named, **steps)
                outputs.append(output)
            rows.append(torch.cat(outputs))
            final.append(last)
        return torch.cat(rows, 1), each(lambda *x: torch.cat(x), *final)

    return run


def step_by_step(function, reset, reset_to="initial", **inputs):
    """A call for each step, with a share of the initial states or zeros in between."""

    def run(input, hx, *weights, **named):
        states, outputs = hx, []
        target = hx if reset_to == "initial" else each(torch.zeros_like, hx)
        for t, now in enumerate(reset[..., None]):
            states = each(lambda s, s0, r=now: (s + r * (s0 - s)).to(s.dtype), states, target)
            steps = {u: x[t : t + 1] for u, x in inputs.items()}
            output, states = function(input[t : t + 1], states, *weights, **named, **steps)
            outputs.append(output)
        return torch.cat(outputs), states

    return run


# ---- functions and cells ---------------------------------------------------------------------------------

IN_DTYPES = [(name, dtype) for name in ("lltm", "lstm") for dtype in FORWARD] + [
    (n, DOUBLE) for n in OF_CELLS
]


@pairwise(
    name_dtype=IN_DTYPES,
    reset_to=["zeros", "initial"],
    kind_exact={"bool": ("bool", episodes_of), "numbers": ("numbers", step_by_step)},
)
def test_an_episode_is_a_call_of_its_own(name_dtype, reset_to, kind_exact, device):
    (name, dtype), (kind, exact) = name_dtype, kind_exact
    function, inputs = FUNCTIONS[name], inputs_of(name, device)
    reset, call = resets(device, kind), call_of(name, Make(dtype, device))
    ours = functools.partial(function, reset=reset, reset_to=reset_to, **inputs)
    assert_values_and_gradients(ours, exact(function, reset, reset_to, **inputs), call, dtype)


@functions
@both_resets
def test_every_algorithm_of_every_dtype_takes_resets(name, reset_to, dtype, device):
    function, reset = FUNCTIONS[name], resets(device, "bool")
    for algorithm, hidden in itertools.product(("auto", "stepwise"), (16, 24)):
        call = call_of(name, Make(dtype, device), hidden=hidden)
        ours = functools.partial(function, reset=reset, reset_to=reset_to, algorithm=algorithm)
        exact = call.map(torch.Tensor.double).run(episodes_of(function, reset, reset_to))
        assert_all_near(call.run(ours), exact, FORWARD[dtype])


@functions
@both_resets
def test_second_derivatives(name, reset_to, device):
    reset = resets(device, "numbers")[:3, :2]
    call = call_of(name, Make(DOUBLE, device), length=3, batch=2, hidden=3).leaves()
    ours = call.bind(functools.partial(FUNCTIONS[name], reset=reset, reset_to=reset_to))
    assert torch.autograd.gradgradcheck(ours, call.tensors)


@pytest.mark.parametrize("name", ["lltm", "lstm", "gru", "lltm_reference"])
@both_resets
@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_a_reset_removes_nan(name, reset_to, kind, device):
    """Of an input, and of the initial state where zeros take its place."""
    function = lltm_reference if name == "lltm_reference" else FUNCTIONS[name]
    call = call_of(name.removesuffix("_reference"), Make(DOUBLE, device))
    (input, hx, *weights), named = call.args, call.kwargs
    start = hx if reset_to == "initial" else each(torch.zeros_like, hx)
    from_here, _ = function(input[3:], start, *weights, **named)
    input[2, 1] = torch.nan
    reset = torch.zeros(7, 4, dtype=torch.bool, device=device)
    reset[3, 1] = True
    if reset_to == "zeros":
        each(lambda x: x[2].fill_(torch.nan), hx)
        reset[0, 2] = True
    reset = reset if kind == "bool" else reset.double()
    output, final = function(input, hx, *weights, **named, reset=reset, reset_to=reset_to)
    assert output[2, 1].isnan().all()
    assert output[:, 2].isfinite().all()
    assert all(x.isfinite().all() for x in (final if isinstance(final, tuple) else (final,)))
    assert_all_near([output[3:, 1]], [from_here[:, 1]], FORWARD[DOUBLE])


@functions
@both_resets
def test_vmap_over_inputs_and_resets(name, reset_to, device):
    function = functools.partial(FUNCTIONS[name], reset_to=reset_to)
    flags = torch.stack([resets(device, "bool").roll(i, 0) for i in range(3)])
    inputs = Make(DOUBLE, device)(3, 7, 4, 5)
    _, *rest = call_of(name, Make(DOUBLE, device)).args
    found, _ = torch.func.vmap(lambda x, reset: function(x, *rest, reset=reset))(inputs, flags)
    expected = [function(x, *rest, reset=reset)[0] for x, reset in zip(inputs, flags, strict=True)]
    assert_all_near([found], [torch.stack(expected)], FORWARD[DOUBLE])


@functions
@pytest.mark.parametrize(
    "change,exception,message",
    [
        (lambda reset: 3, TypeError, "expected reset to be a Tensor, got int"),
        (lambda reset: reset[:, :2], RuntimeError, r"expected reset of shape \[length, batch\] = \[7, 4\]"),
        (lambda reset: reset.float().requires_grad_(), RuntimeError, "expected reset without a gradient"),
    ],
)
def test_bad_resets_are_named(name, change, exception, message):
    with pytest.raises(exception, match=f"^{name}: {message}"):
        FUNCTIONS[name](*call_of(name, Make()).args, reset=change(resets("cpu", "bool")))


@functions
def test_the_reference_starts_episodes_there_too(name):
    references = {"lltm": lltm_reference, "lstm": lstm_reference}
    reference, reset = references[name], resets("cpu", "numbers")
    ours = functools.partial(reference, reset=reset, reset_to="initial")
    assert_values_and_gradients(ours, step_by_step(reference, reset), call_of(name, Make(DOUBLE)))


# ---- layers ----------------------------------------------------------------------------------------------


def initial_states(name, layer, device):
    make = Make(DOUBLE, device, seed=2)
    shape = (layer.num_layers * (1 + layer.bidirectional), 4, 6)
    count = {"LLTM": 2, "LSTM": 2, "Recurrent": len(cells.slstm.state_names)}.get(name, 1)
    hx = tuple(make(*shape, scale=0.5).abs() + 0.1 for _ in range(count))
    return hx if count > 1 else hx[0]


def episodes_of_layer(layer, reset, lengths, reset_to):
    """Every episode of every row by a call of its own. In the reverse direction the last one comes first."""

    forward, reverse = (
        (slice(0, None, 2), slice(1, None, 2)) if layer.bidirectional else (slice(None), slice(0))
    )

    def initial(x, is_reset, is_last):
        x = x.clone()
        if reset_to == "zeros":
            x[forward] *= not is_reset
            x[reverse] *= is_last
        return x

    def run(input, hx):
        rows, final = [], []
        for b, length in enumerate(lengths):
            of_row = each(lambda x, b=b: x[:, b], hx)
            outputs, states = [], []
            starts = [0, *(t for t in range(1, length) if reset[t, b]), length]
            for start, end in itertools.pairwise(starts):
                begin = functools.partial(initial, is_reset=bool(reset[start, b]), is_last=end == length)
                output, last = layer(input[start:end, b], each(begin, of_row))
                outputs.append(output)
                states.append(last)
            rows.append(torch.cat(outputs))
            last = each(torch.clone, states[-1])
            each(lambda x, first: x[reverse].copy_(first[reverse]), last, states[0])
            final.append(last)
        return pad_sequence(rows), each(lambda *x: torch.stack(x, 1), *final)

    return run


@pairwise(
    name=[*EVERY_LAYER],
    kind=[*KINDS],
    reset_to=["zeros", "initial"],
    numbers={"bool": False, "numbers": True},
)
def test_an_episode_is_a_call_of_the_layer_of_its_own(name, kind, reset_to, numbers, device):
    layer = EVERY_LAYER[name](5, 6, **KINDS[kind], device=device, dtype=DOUBLE)
    reset = resets(device, "bool")
    call = Call(Make(DOUBLE, device)(7, 4, 5), initial_states(name, layer, device))
    ours = functools.partial(layer, reset=reset.double() if numbers else reset, reset_to=reset_to)
    assert_values_and_gradients(ours, episodes_of_layer(layer, reset, [7] * 4, reset_to), call)


@every_layer
@both_resets
@pytest.mark.parametrize("lengths", [[7, 7, 4, 2], [2, 7, 1, 5]], ids=["sorted", "in any order"])
def test_episodes_of_packed_input(name, reset_to, lengths, device):
    layer = EVERY_LAYER[name](5, 6, 2, bidirectional=True, device=device, dtype=DOUBLE)
    reset = resets(device, "bool")
    call = Call(Make(DOUBLE, device)(7, 4, 5), initial_states(name, layer, device))
    pack = functools.partial(pack_padded_sequence, lengths=lengths, enforce_sorted=lengths[0] == 7)

    def packed(input, hx):
        output, states = layer(pack(input), hx, reset=pack(reset), reset_to=reset_to)
        return pad_packed_sequence(output)[0], states

    assert_values_and_gradients(packed, episodes_of_layer(layer, reset, lengths, reset_to), call)


@every_layer
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
def test_resets_of_batch_first_and_unbatched_input(name, batch_first, device):
    layer = EVERY_LAYER[name](5, 6, 2, bidirectional=True, device=device, dtype=DOUBLE)
    input, reset = Make(DOUBLE, device)(7, 4, 5), resets(device, "bool")
    output, _ = layer(input, reset=reset)
    layer.batch_first = batch_first
    alone, _ = layer(input[:, 1], reset=reset[:, 1])
    swap = (lambda x: x.transpose(0, 1)) if batch_first else lambda x: x
    again, _ = layer(swap(input), reset=swap(reset))
    assert_all_near([alone, swap(again)], [output[:, 1], output], FORWARD[DOUBLE])


@every_layer
def test_learnt_initial_states_get_the_gradients_of_all_episodes(name, device):
    """Here every step of every row is an episode of the same input."""
    layer = EVERY_LAYER[name](5, 6, device=device, dtype=DOUBLE)
    reset = torch.ones(7, 4, dtype=torch.bool, device=device)
    hx = each(lambda x: x[:, :1].requires_grad_(), initial_states(name, layer, device))
    output, _ = layer(
        Make(DOUBLE, device)(1, 1, 5).expand(7, 4, 5),
        each(lambda x: x.expand(1, 4, 6), hx),
        reset=reset,
        reset_to="initial",
    )
    of_all = torch.autograd.grad(output.sum(), hx, retain_graph=True)
    of_one = torch.autograd.grad(output[0, 0].sum(), hx)
    assert_all_near(of_all, [28 * g for g in of_one], BACKWARD[DOUBLE])


@every_layer
def test_it_compiles_with_resets_to_initial_states(name, fresh_dynamo, device):
    layer = EVERY_LAYER[name](5, 6, bidirectional=True, device=device, dtype=DOUBLE)
    call = Call(Make(DOUBLE, device)(3, 4, 5), initial_states(name, layer, device))
    ours = functools.partial(layer, reset=resets(device, "bool")[:3], reset_to="initial")
    assert_all_near(call.run(torch.compile(ours, backend="aot_eager")), call.run(ours), FORWARD[DOUBLE])


@lltm_ext.recurrence(gates=1, states=("largest",))
def maximum(x, s):
    largest = torch.maximum(s.largest, x[0])
    return torch.tanh(largest), (largest,)


@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_infinite_initial_states_reach_only_the_steps_of_resets(kind, device):
    make = Make(DOUBLE, device)
    hx = make(4, 6), torch.full((4, 6), -torch.inf, dtype=DOUBLE, device=device)
    call = Call(make(7, 4, 5), hx, make(6, 5), make(6, 6))
    reset = resets(device, "bool")
    given = reset if kind == "bool" else reset.double()
    found = call.run(functools.partial(maximum, reset=given, reset_to="initial"))
    assert_all_near(found, call.run(episodes_of(maximum, reset)), FORWARD[DOUBLE])


@every_layer
def test_without_a_reset_it_does_nothing(name, device):
    layer = EVERY_LAYER[name](5, 6, device=device, dtype=DOUBLE)
    call = Call(Make(DOUBLE, device)(7, 4, 5), initial_states(name, layer, device))
    assert_same_bits(call.run(functools.partial(layer, reset_to="initial")), call.run(layer))


@pytest.mark.parametrize("with_reset", [False, True], ids=["", "with resets"])
def test_another_reset_to_is_named(with_reset):
    reset = resets("cpu", "bool") if with_reset else None
    message = "expected reset_to to be 'zeros' or 'initial', got 'ones'"
    for name in ("lltm", "lstm", "gru"):
        call = call_of(name, Make())
        for function in (FUNCTIONS[name], CELLS[name].algorithm):
            with pytest.raises(ValueError, match=f"^{name}: {message}"):
                function(*call.args, **call.kwargs, reset=reset, reset_to="ones")
    for name, Layer in EVERY_LAYER.items():
        with pytest.raises(ValueError, match=f"^{name.split()[0]}: {message}"):
            Layer(5, 6)(torch.zeros(7, 4, 5), reset=reset, reset_to="ones")


@needs_cuda
def test_a_text_resets_to_the_initial_states():
    call, reset = call_of("gru", Make(DOUBLE, "cuda")), resets("cuda", "numbers")
    ours = functools.partial(TEXTS["gru"], reset=reset, reset_to="initial")
    assert_values_and_gradients(ours, step_by_step(CELLS["gru"], reset), call)


@every_layer
def test_one_op_resets_both_directions_to_the_initial_states_on_cuda(name):
    with FakeTensorMode(), torch.no_grad():
        layer = EVERY_LAYER[name](5, 16, bidirectional=True, device="cuda")
        input, reset = torch.empty(7, 4, 5, device="cuda"), torch.empty(7, 4, device="cuda").bool()
        h = torch.empty(2, 4, 16, device="cuda")
        hx = (h,) * len(layer._cell.state_names) if len(layer._cell.state_names) > 1 else h
        with Recorder() as ran:
            output, _ = layer(input, hx, reset=reset, reset_to="initial")
        assert ran.ours == ["custom_cell_bidirectional"]
        assert output.shape == (7, 4, 32)


@pytest.mark.parametrize("sizes", [None, [3, 3, 2, 1, 1]], ids=["padded", "packed"])
def test_what_comes_at_the_next_step(sizes):
    """Of each row; zeros at its last step."""
    rows = torch.arange(1, 11) if sizes else torch.arange(1, 16).view(5, 3)
    steps = rows.split(sizes) if sizes else rows.unbind(0)
    found = {0: 0}
    for step, following in itertools.pairwise([*steps, rows[:0]]):
        for b, value in enumerate(step.flatten().tolist()):
            found[value] = int(following.flatten()[b]) if b < following.numel() else 0
    expected = rows.clone().apply_(found.get)
    assert torch.equal(at_next_step(rows, sizes), expected)


@pytest.mark.parametrize("name", ["LSTM", "LLTM", "GRU"])
def test_gradients_from_no_states_equal_those_from_zeros(name, device):
    """Of both directions. Memory that nobody has written is NaN here."""
    layer = getattr(lltm_ext, name)(5, 8, bidirectional=True, device=device)
    input, reset = torch.randn(7, 3, 5, device=device), torch.rand(7, 3, device=device) < 0.3
    zeros = torch.zeros(2, 3, 8, device=device)
    gradients = []
    for hx in (None, zeros if name == "GRU" else (zeros, zeros)):
        freed = [
            torch.full((n,), torch.nan, device=device) for n in (24, 168, 192, 504, 4096) for _ in range(9)
        ]
        del freed
        output, _ = layer(input, hx, reset=reset)
        gradients.append(torch.autograd.grad(output.square().sum(), list(layer.parameters())))
    assert_all_near(*gradients, BACKWARD[torch.float32])
