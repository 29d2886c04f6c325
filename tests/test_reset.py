"""Episodes that start within a sequence: reset= of lltm, lstm and their layers, reset_to= of all."""

import functools
import itertools

import pytest
import torch
from cell_examples import CELLS, TEXTS, arguments_of
from op_suite import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    Call,
    Make,
    assert_all_near,
    assert_same_bits,
    cotangents,
    forward_and_gradients,
    needs_cuda,
)
from sequence_suite import KINDS, kinds, sequence_arguments
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import lltm_ext
from lltm_ext import cells
from lltm_ext._arguments import at_next_step
from lltm_ext.lltm import lltm_reference
from lltm_ext.lstm import lstm_reference

FUNCTIONS = {"lltm": (lltm_ext.lltm, 3), "lstm": (lltm_ext.lstm, 4)}
LAYERS = {"LLTM": lltm_ext.LLTM, "LSTM": lltm_ext.LSTM}
functions = pytest.mark.parametrize("name", FUNCTIONS)
layers = pytest.mark.parametrize("name", LAYERS)


def call_of(name, make, length=7, batch=4, hidden=16):
    _, gates = FUNCTIONS[name]
    input, h0, c0, *weights = sequence_arguments(make, gates, length, batch, 5, hidden).values()
    return Call(input, (h0, c0), *weights)


def kept(states, reset):
    """By another way than the code under test: where() for bool."""
    if reset.dtype == torch.bool:
        return tuple(torch.where(reset[:, None], torch.zeros_like(x), x) for x in states)
    return tuple((x * (1 - reset)[:, None]).to(x.dtype) for x in states)


def step_by_step(function, reset):
    """A call for each step, with the states reset in between."""

    def run(input, hx, *weights):
        outputs = []
        for x, now in zip(input, reset, strict=True):
            output, hx = function(x[None], kept(hx, now), *weights)
            outputs.append(output)
        return torch.cat(outputs), hx

    return run


def resets(device, kind):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(7, 4, generator=generator)
    return (numbers < 0.4 if kind == "bool" else numbers).to(device)


@functions
@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_a_reset_is_a_call_with_other_states(name, kind, dtype, device):
    function, _ = FUNCTIONS[name]
    reset = resets(device, kind)
    call = call_of(name, Make(dtype, device))
    outputs, gradients = forward_and_gradients(lambda *args: function(*args, reset=reset), call)
    exact, exact_gradients = forward_and_gradients(
        step_by_step(function, reset), call.map(torch.Tensor.double), cotangents(outputs)
    )
    assert_all_near(outputs, exact, FORWARD[dtype], "output")
    assert_all_near(gradients, exact_gradients, BACKWARD[dtype], "gradient")


@functions
def test_second_derivatives(name, device):
    function, _ = FUNCTIONS[name]
    reset = resets(device, "numbers")[:3, :2]
    call = call_of(name, Make(DOUBLE, device), length=3, batch=2, hidden=3).leaves()
    of_tensors = call.bind(lambda *args: function(*args, reset=reset))
    assert torch.autograd.gradgradcheck(of_tensors, call.tensors)


@functions
def test_a_reset_removes_nan(name, device):
    function, _ = FUNCTIONS[name]
    input, (h0, c0), *weights = call_of(name, Make(torch.float32, device)).args
    h0[1] = torch.nan
    reset = torch.zeros(7, 4, dtype=torch.bool, device=device)
    reset[0, 1] = True
    output, states = function(input, (h0, c0), *weights, reset=reset)
    assert output.isfinite().all()
    assert all(x.isfinite().all() for x in states)


@functions
def test_vmap_over_inputs_and_resets(name, device):
    function, _ = FUNCTIONS[name]
    calls = [call_of(name, Make(DOUBLE, device, seed=i)) for i in range(3)]
    flags = torch.stack([resets(device, "bool").roll(i, 0) for i in range(3)])
    inputs = torch.stack([call.args[0] for call in calls])
    _, *rest = calls[0].args
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
    function, _ = FUNCTIONS[name]
    with pytest.raises(exception, match=f"^{name}: {message}"):
        function(*call_of(name, Make()).args, reset=change(resets("cpu", "bool")))


@layers
@pytest.mark.parametrize("bidirectional", [False, True], ids=["", "bidirectional"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
def test_a_layer_is_cut_where_all_rows_are_reset(name, bidirectional, batch_first, device):
    torch.manual_seed(0)
    options = {"num_layers": 2, "bidirectional": bidirectional, "batch_first": batch_first}
    layer = LAYERS[name](5, 16, **options, device=device, dtype=DOUBLE)
    input = Make(DOUBLE, device)(4, 7, 5) if batch_first else Make(DOUBLE, device)(7, 4, 5)
    reset = torch.zeros(input.shape[:2], dtype=torch.bool, device=device)
    dim = int(batch_first)
    reset.select(dim, 3).fill_(True)
    output, _ = layer(input, reset=reset)
    parts = [layer(part)[0] for part in input.split([3, 4], dim)]
    assert_all_near([output], [torch.cat(parts, dim)], FORWARD[DOUBLE])


@layers
def test_packed_and_unbatched_input(name, device):
    torch.manual_seed(0)
    layer = LAYERS[name](5, 16, device=device, dtype=DOUBLE)
    input, lengths = Make(DOUBLE, device)(7, 4, 5), [7, 7, 4, 2]
    reset = resets(device, "bool")
    packed, _ = layer(pack_padded_sequence(input, lengths), reset=pack_padded_sequence(reset, lengths))
    padded, _ = torch.nn.utils.rnn.pad_packed_sequence(packed)
    output, _ = layer(input, reset=reset)
    for row, length in enumerate(lengths):
        assert_all_near([padded[:length, row]], [output[:length, row]], FORWARD[DOUBLE])
    alone, _ = layer(input[:, 1], reset=reset[:, 1])
    assert_all_near([alone], [output[:, 1]], FORWARD[DOUBLE])


@layers
def test_every_algorithm_of_every_dtype_takes_resets(name, dtype, device):
    """By the function with the layer's parameters."""
    function, _ = FUNCTIONS[name.lower()]
    reset = resets(device, "bool")
    for algorithm, hidden in itertools.product(("auto", "stepwise"), (16, 24)):
        call = call_of(name.lower(), Make(dtype, device), hidden=hidden)
        found = call.run(lambda *args, a=algorithm: function(*args, reset=reset, algorithm=a))
        exact = call.map(torch.Tensor.double).run(step_by_step(function, reset))
        assert_all_near(found, exact, FORWARD[dtype])


# ---- reset_to="initial" ----------------------------------------------------------------------------------

EVERY_LAYER = LAYERS | {
    "GRU": lltm_ext.GRU,
    "RNN": lltm_ext.RNN,
    "Recurrent": functools.partial(lltm_ext.Recurrent, cells.slstm),
}
every_layer = pytest.mark.parametrize("name", EVERY_LAYER)
# One or several states, products apart, parameters, and no product.
of_cells = pytest.mark.parametrize("name", ["rnn_tanh", "gru", "peephole_lstm", "slstm", "indrnn"])


def to_initial(function, reset, **options):
    return functools.partial(function, reset=reset, reset_to="initial", **options)


def cell_call(name, make, length=7, batch=4, hidden=6):
    """A call of a cell with its arguments."""
    cell = CELLS[name]
    input, states, *weights, parameters = arguments_of(cell, make, (length, batch), batch, hidden, 5).args
    hx = tuple(states) if cell.states else states[0]
    return Call(input, hx, *weights, **dict(zip(cell.parameters, parameters, strict=True)))


def each(f, *states):
    """`f` of one state, or of each of several."""
    return f(*states) if isinstance(states[0], torch.Tensor) else tuple(map(f, *states))


def episodes_of(function, reset):
    """Every episode of every row by a call of its own, from the row's initial state."""

    def run(input, hx, *weights, **named):
        rows, final = [], []
        for b in range(input.shape[1]):
            starts = [0, *(t for t in range(1, len(input)) if reset[t, b]), len(input)]
            outputs = []
            for start, end in itertools.pairwise(starts):
                of_row = each(lambda x, b=b: x[b : b + 1], hx)
                output, last = function(input[start:end, b : b + 1], of_row, *weights, **named)
                outputs.append(output)
            rows.append(torch.cat(outputs))
            final.append(last)
        return torch.cat(rows, 1), each(lambda *x: torch.cat(x), *final)

    return run


def mixed_step_by_step(function, reset):
    """A call for each step, with a share of the initial states in between."""

    def run(input, hx, *weights, **named):
        states, outputs = hx, []
        for x, now in zip(input, reset[..., None], strict=True):
            states = each(lambda s, s0, r=now: (s + r * (s0 - s)).to(s.dtype), states, hx)
            output, states = function(x[None], states, *weights, **named)
            outputs.append(output)
        return torch.cat(outputs), states

    return run


def assert_values_and_gradients(ours, exact, call, dtype=DOUBLE):
    outputs, gradients = forward_and_gradients(ours, call)
    expected, expected_gradients = forward_and_gradients(
        exact, call.map(torch.Tensor.double), cotangents(outputs)
    )
    assert_all_near(outputs, expected, FORWARD[dtype], "output")
    assert_all_near(gradients, expected_gradients, BACKWARD[dtype], "gradient")


@functions
@pytest.mark.parametrize("kind,exact", [("bool", episodes_of), ("numbers", mixed_step_by_step)])
def test_episodes_start_from_the_initial_states(name, kind, exact, dtype, device):
    function, _ = FUNCTIONS[name]
    reset, call = resets(device, kind), call_of(name, Make(dtype, device))
    assert_values_and_gradients(to_initial(function, reset), exact(function, reset), call, dtype)


@of_cells
@pytest.mark.parametrize("kind,exact", [("bool", episodes_of), ("numbers", mixed_step_by_step)])
def test_episodes_of_a_cell_start_from_the_initial_states(name, kind, exact, device):
    reset, call = resets(device, kind), cell_call(name, Make(DOUBLE, device))
    assert_values_and_gradients(to_initial(CELLS[name], reset), exact(CELLS[name], reset), call)


@functions
def test_the_reference_starts_them_there_too(name):
    references = {"lltm": lltm_reference, "lstm": lstm_reference}
    reference, reset = references[name], resets("cpu", "numbers")
    exact = mixed_step_by_step(reference, reset)
    assert_values_and_gradients(to_initial(reference, reset), exact, call_of(name, Make(DOUBLE)))


def initial_states(name, layer, device):
    make = Make(DOUBLE, device, seed=2)
    shape = (layer.num_layers * (1 + layer.bidirectional), 4, 6)
    count = {"GRU": 1, "RNN": 1, "Recurrent": len(cells.slstm.state_names)}.get(name, 2)
    hx = tuple(make(*shape, scale=0.5).abs() + 0.1 for _ in range(count))
    return hx if count > 1 else hx[0]


def episodes_of_layer(layer, reset, lengths):
    """Every episode of every row by a call of its own, from the row's initial states of all slices."""

    def final_states(*episodes):
        """Those of the reverse direction are the first episode's."""
        final = episodes[-1].clone()
        if layer.bidirectional:
            final[1::2] = episodes[0][1::2]
        return final

    def run(input, hx):
        rows, final = [], []
        for b, length in enumerate(lengths):
            starts = [0, *(t for t in range(1, length) if reset[t, b]), length]
            of_row = each(lambda x, b=b: x[:, b], hx)
            outputs, states = zip(
                *(layer(input[start:end, b], of_row) for start, end in itertools.pairwise(starts)),
                strict=True,
            )
            rows.append(torch.cat(outputs))
            final.append(each(final_states, *states))
        return pad_sequence(rows), each(lambda *x: torch.stack(x, 1), *final)

    return run


@every_layer
@kinds
@pytest.mark.parametrize("numbers", [False, True], ids=["bool", "numbers"])
def test_episodes_of_a_layer_start_from_its_initial_states(name, kind, numbers, device):
    layer = EVERY_LAYER[name](5, 6, **KINDS[kind], device=device, dtype=DOUBLE)
    reset = resets(device, "bool")
    call = Call(Make(DOUBLE, device)(7, 4, 5), initial_states(name, layer, device))
    ours = to_initial(layer, reset.double() if numbers else reset)
    assert_values_and_gradients(ours, episodes_of_layer(layer, reset, [7] * 4), call)


@every_layer
@pytest.mark.parametrize("lengths", [[7, 7, 4, 2], [2, 7, 1, 5]], ids=["sorted", "in any order"])
def test_packed_episodes_start_from_the_initial_states(name, lengths, device):
    layer = EVERY_LAYER[name](5, 6, 2, bidirectional=True, device=device, dtype=DOUBLE)
    reset = resets(device, "bool")
    call = Call(Make(DOUBLE, device)(7, 4, 5), initial_states(name, layer, device))
    pack = functools.partial(pack_padded_sequence, lengths=lengths, enforce_sorted=lengths[0] == 7)

    def packed(input, hx):
        output, states = layer(pack(input), hx, reset=pack(reset), reset_to="initial")
        return pad_packed_sequence(output)[0], states

    assert_values_and_gradients(packed, episodes_of_layer(layer, reset, lengths), call)


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


@functions
def test_second_derivatives_of_initial_states(name, device):
    function, _ = FUNCTIONS[name]
    reset = resets(device, "numbers")[:3, :2]
    call = call_of(name, Make(DOUBLE, device), length=3, batch=2, hidden=3).leaves()
    assert torch.autograd.gradgradcheck(call.bind(to_initial(function, reset)), call.tensors)


@functions
def test_vmap_over_inputs_and_resets_to_initial_states(name, device):
    function, _ = FUNCTIONS[name]
    flags = torch.stack([resets(device, "bool").roll(i, 0) for i in range(3)])
    inputs = Make(DOUBLE, device)(3, 7, 4, 5)
    _, *rest = call_of(name, Make(DOUBLE, device)).args
    found, _ = torch.func.vmap(lambda x, reset: to_initial(function, reset)(x, *rest))(inputs, flags)
    expected = [to_initial(function, reset)(x, *rest)[0] for x, reset in zip(inputs, flags, strict=True)]
    assert_all_near([found], [torch.stack(expected)], FORWARD[DOUBLE])


@every_layer
def test_it_compiles_with_resets_to_initial_states(name, fresh_dynamo, device):
    layer = EVERY_LAYER[name](5, 6, bidirectional=True, device=device, dtype=DOUBLE)
    call = Call(Make(DOUBLE, device)(7, 4, 5), initial_states(name, layer, device))
    ours = to_initial(layer, resets(device, "bool"))
    assert_all_near(call.run(torch.compile(ours, backend="aot_eager")), call.run(ours), FORWARD[DOUBLE])


@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_a_reset_to_initial_states_removes_nan(kind, device):
    input, hx, *weights = call_of("lstm", Make(DOUBLE, device)).args
    input[2, 1] = torch.nan
    reset = torch.zeros(7, 4, dtype=torch.bool, device=device)
    reset[3, 1] = True
    output, _ = lltm_ext.lstm(
        input, hx, *weights, reset=reset if kind == "bool" else reset.double(), reset_to="initial"
    )
    assert output[2, 1].isnan().all()
    from_here, _ = lltm_ext.lstm(input[3:], hx, *weights)
    assert_all_near([output[3:, 1]], [from_here[:, 1]], FORWARD[DOUBLE])


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
    found = call.run(to_initial(maximum, reset if kind == "bool" else reset.double()))
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
    for name, (function, _) in FUNCTIONS.items():
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            function(*call_of(name, Make()).args, reset=reset, reset_to="ones")
    call = cell_call("gru", Make())
    for function in (CELLS["gru"], CELLS["gru"].algorithm):
        with pytest.raises(ValueError, match=f"^gru: {message}"):
            function(*call.args, **call.kwargs, reset=reset, reset_to="ones")
    for name, Layer in EVERY_LAYER.items():
        kind = "Recurrent" if name == "Recurrent" else Layer.__name__
        with pytest.raises(ValueError, match=f"^{kind}: {message}"):
            Layer(5, 6)(torch.zeros(7, 4, 5), reset=reset, reset_to="ones")


@needs_cuda
def test_a_text_resets_to_the_initial_states():
    call, reset = cell_call("gru", Make(DOUBLE, "cuda")), resets("cuda", "numbers")
    assert_values_and_gradients(
        to_initial(TEXTS["gru"], reset), mixed_step_by_step(CELLS["gru"], reset), call
    )


class OwnOps(TorchDispatchMode):
    """Records the package's ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lltm_ext":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@every_layer
def test_kernels_run_resets_to_the_initial_states_on_cuda(name):
    """An op for each direction."""
    with FakeTensorMode(), torch.no_grad():
        layer = EVERY_LAYER[name](5, 16, bidirectional=True, device="cuda")
        input, reset = torch.empty(7, 4, 5, device="cuda"), torch.empty(7, 4, device="cuda").bool()
        with OwnOps() as ran:
            output, _ = layer(input, reset=reset, reset_to="initial")
        assert ran.names == ["custom_cell"] * 2
        assert output.shape == (7, 4, 32)


@pytest.mark.parametrize("sizes", [None, [3, 3, 2, 1, 1]], ids=["padded", "packed"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_what_comes_at_the_next_step(sizes, reverse):
    """Of each row in the order of computation; zeros at its last step."""
    rows = torch.arange(1, 11) if sizes else torch.arange(1, 16).view(5, 3)
    steps = rows.split(sizes) if sizes else rows.unbind(0)
    order = list(steps)[::-1] if reverse else list(steps)
    found = {0: 0}
    for step, following in itertools.pairwise([*order, rows[:0]]):
        for b, value in enumerate(step.flatten().tolist()):
            found[value] = int(following.flatten()[b]) if b < following.numel() else 0
    expected = rows.clone().apply_(found.get)
    assert torch.equal(at_next_step(rows, sizes, reverse), expected)


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
