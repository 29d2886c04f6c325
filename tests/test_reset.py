"""reset= of lltm, lstm and their layers: episodes that start in the middle of a sequence."""

import itertools

import pytest
import torch
from op_suite import BACKWARD, DOUBLE, FORWARD, Call, Make, assert_all_near, cotangents, forward_and_gradients
from sequence_suite import sequence_arguments
from torch.nn.utils.rnn import pack_padded_sequence

import lltm_ext

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
