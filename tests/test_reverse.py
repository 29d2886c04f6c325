"""Sequences from the last step to the first: reverse= of every cell's call and of Recurrent."""

import functools

import cell_examples
import pytest
import torch
from cell_examples import WITH_OUTPUT, everything, without_product
from op_suite import BACKWARD, DOUBLE, FORWARD, Call, Make, assert_all_near, sum_of_squares
from sequence_suite import INPUT, assert_values_and_gradients
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lltm_ext
from lltm_ext import cells
from lltm_ext.lltm import lltm_reference
from lltm_ext.lstm import lstm_reference

HIDDEN = 6
CELLS = {cell.__name__: cell for cell in (everything, without_product, cells.slstm, *WITH_OUTPUT.values())}
FUNCTIONS = {"lltm": lltm_ext.lltm, "lstm": lltm_ext.lstm} | CELLS
REFERENCES = {"lltm": lltm_reference, "lstm": lstm_reference}
every_function = pytest.mark.parametrize("name", FUNCTIONS)
some_cells = pytest.mark.parametrize("cell", [cells.lstm, cells.gru, cells.indrnn], ids=lambda c: c.__name__)
resets = pytest.mark.parametrize("kind", [None, "bool", "numbers"], ids=str)


def call_and_steps(name, device="cpu", length=7, batch=4, hidden=16):
    """A call's tensors, and the inputs of its steps, which have no gradients."""
    cell, make = CELLS.get(name) or getattr(cells, name), Make(DOUBLE, device, seed=3)
    call = cell_examples.call_of(cell, Make(DOUBLE, device), length, batch, hidden, 5)
    return call, {u: make(length, batch).abs() for u in cell.inputs}


def reset_of(kind, device="cpu", length=7, batch=4):
    if kind is None:
        return None
    numbers = torch.rand(length, batch, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    return (numbers < 0.4 if kind == "bool" else numbers).to(device)


def by_flipping(function, reset=None, reset_to="zeros", **steps):
    """A function of the flipped sequence. The first step of an episode is the last one there."""
    flipped = {name: x.flip(0) for name, x in steps.items()}
    if reset is not None:
        flipped["reset"] = torch.cat([torch.zeros_like(reset[:1]), reset.flip(0)[:-1]])

    def run(input, *args, **named):
        output, final = function(input.flip(0), *args, reset_to=reset_to, **named, **flipped)
        return output.flip(0), final

    return run


@every_function
@resets
@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
def test_a_call_equals_one_of_the_flipped_sequence(name, kind, reset_to, device):
    call, steps = call_and_steps(name, device)
    how = {"reset": reset_of(kind, device), "reset_to": reset_to} | steps
    ours = functools.partial(FUNCTIONS[name], reverse=True, **how)
    assert_values_and_gradients(ours, by_flipping(FUNCTIONS[name], **how), call)


@pytest.mark.parametrize("name", REFERENCES)
@resets
def test_the_references_run_in_reverse(name, kind, device):
    call, _ = call_and_steps(name, device)
    how = {"reset": reset_of(kind, device), "reverse": True}
    ours, loop = (functools.partial(f, **how) for f in (FUNCTIONS[name], REFERENCES[name]))
    assert_values_and_gradients(ours, loop, call)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_call_in_lower_precision(dtype, device):
    call = call_and_steps("slstm", device)[0].map(lambda x: x.to(dtype))
    ours = functools.partial(cells.slstm, reverse=True)
    assert_all_near(call.run(ours), call.run(by_flipping(cells.slstm)), FORWARD[dtype])


def test_the_algorithm_of_a_call_takes_its_arguments():
    call, _ = call_and_steps("slstm")
    assert cells.slstm.algorithm(*call.args, **call.kwargs, reverse=True) == "stepwise"


# ---- layers ----------------------------------------------------------------------------------------------


def layers(cell=cells.slstm, device="cpu", **options):
    """A bidirectional layer, and one with the weights of its reverse direction."""
    torch.manual_seed(0)
    both = lltm_ext.Recurrent(cell, INPUT, HIDDEN, bidirectional=True, dtype=DOUBLE, device=device, **options)
    one = lltm_ext.Recurrent(cell, INPUT, HIDDEN, reverse=True, dtype=DOUBLE, device=device, **options)
    weights = {name: both.state_dict()[f"{name}_reverse"] for name in one.state_dict()}
    one.load_state_dict(weights)
    return both, one


def reverse_half(layer, input, hx=None, **how):
    """The output and the final states of a bidirectional layer's reverse direction."""
    hx = hx and tuple(torch.cat([torch.zeros_like(x), x]) for x in hx)
    output, final = layer(input, hx, **how)
    return output[..., HIDDEN:], tuple(x[1:] for x in final)


def inputs_of_layer(device, length=7, batch=4):
    make = Make(DOUBLE, device, seed=5)
    return make(length, batch, INPUT), tuple(make(1, batch, HIDDEN).abs() for _ in cells.slstm.state_names)


@resets
@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from hx"])
def test_a_layer_is_the_reverse_direction_of_a_bidirectional_one(kind, given, device):
    both, one = layers(device=device)
    input, hx = inputs_of_layer(device)
    call = Call(input, hx if given else None)
    how = {"reset": reset_of(kind, device)}
    if given:
        how["reset_to"] = "initial"
    ours = functools.partial(one, **how)
    assert_values_and_gradients(ours, functools.partial(reverse_half, both, **how), call)


@pytest.mark.parametrize("lengths", [[7, 7, 4, 2], [2, 7, 1, 5]], ids=["sorted", "in any order"])
@pytest.mark.parametrize("kind", [None, "bool"], ids=str)
def test_packed_sequences_start_at_their_own_last_steps(lengths, kind, device):
    _, one = layers(device=device)
    input, hx = inputs_of_layer(device)
    reset = reset_of(kind, device)
    pack = functools.partial(pack_padded_sequence, lengths=lengths, enforce_sorted=lengths[0] == 7)
    output, final = one(pack(input), hx, reset=None if reset is None else pack(reset))
    padded, _ = pad_packed_sequence(output)
    for b, length in enumerate(lengths):
        of_row = None if reset is None else reset[:length, b]
        expected, last = one(input[:length, b], tuple(x[:, b] for x in hx), reset=of_row)
        found = [padded[:length, b], *(x[:, b] for x in final)]
        assert_all_near(found, [expected, *last], FORWARD[DOUBLE])


def test_every_layer_of_a_stack_runs_in_reverse(device):
    stack = lltm_ext.Recurrent(everything, INPUT, HIDDEN, 3, reverse=True, dtype=DOUBLE, device=device)
    forward = lltm_ext.Recurrent(everything, INPUT, HIDDEN, 3, dtype=DOUBLE, device=device)
    forward.load_state_dict(stack.state_dict())
    input, make = inputs_of_layer(device)[0], Make(DOUBLE, device)
    how = {u: make(7, 4).abs() for u in everything.inputs} | {"reset": reset_of("bool", device)}
    ours = functools.partial(stack, **how)
    assert_values_and_gradients(ours, by_flipping(forward, **how), Call(input))


def test_batch_first_and_unbatched_input(device):
    _, one = layers(device=device)
    input, hx = inputs_of_layer(device)
    output, final = one(input, hx)
    alone, last = one(input[:, 1], tuple(x[:, 1] for x in hx))
    assert_all_near([alone, *last], [output[:, 1], *(x[:, 1] for x in final)], FORWARD[DOUBLE])
    one.batch_first = True
    swapped, last = one(input.transpose(0, 1), hx)
    assert_all_near([swapped.transpose(0, 1), *last], [output, *final], FORWARD[DOUBLE])


# ---- with other parts of torch ---------------------------------------------------------------------------


@some_cells
def test_derivatives_of_any_order_and_transforms(cell):
    """Second derivatives and torch.func's run the loop over the steps."""
    call = cell_examples.call_of(cell, Make(DOUBLE), 3, 2, 2, 2)
    ours, flipped = functools.partial(cell, reverse=True), by_flipping(cell)

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

    assert_all_near(derivatives(ours), derivatives(flipped), BACKWARD[DOUBLE])


def test_it_compiles_into_one_graph(fresh_dynamo):
    _, one = layers()
    call = Call(inputs_of_layer("cpu")[0], reset=reset_of("bool"))
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    assert_all_near(call.run(compiled), call.run(one), FORWARD[DOUBLE])
    call, _ = call_and_steps("slstm")
    function = functools.partial(cells.slstm, reverse=True, reset=reset_of("bool"))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_all_near(call.run(compiled), call.run(function), FORWARD[DOUBLE])


def test_it_exports_and_scripts():
    _, one = layers()
    call = Call(inputs_of_layer("cpu")[0])
    exported = torch.export.export(one, call.args).module()
    scripted = torch.jit.script(one)
    expected = call.run(one)
    assert_all_near(call.run(exported), expected, FORWARD[DOUBLE])
    assert_all_near(call.run(scripted), expected, FORWARD[DOUBLE])
    with_resets = Call(*call.args, None, reset_of("bool"))
    assert_all_near(with_resets.run(scripted), with_resets.run(one), FORWARD[DOUBLE])


def test_autocast_lowers_it():
    call = Call(inputs_of_layer("cpu")[0].float())
    both, one = (layer.float() for layer in layers())
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = call.run(one), call.run(functools.partial(reverse_half, both))
    assert found[0].dtype == torch.bfloat16
    assert_all_near(found, expected, FORWARD[torch.bfloat16])


# ---- what does not fit -----------------------------------------------------------------------------------


def test_a_bidirectional_layer_has_no_single_direction():
    with pytest.raises(ValueError, match="Recurrent: expected reverse=False with bidirectional=True"):
        lltm_ext.Recurrent(cells.gru, 3, 4, bidirectional=True, reverse=True)


def test_a_layer_prints_that_it_is_reversed():
    assert repr(lltm_ext.Recurrent(cells.gru, 3, 4, reverse=True)) == "Recurrent(gru, 3, 4, reverse=True)"


def test_resets_that_do_not_fit_are_named():
    call, _ = call_and_steps("slstm")
    for reset, error, message in (
        (1, TypeError, "reset to be a Tensor, got int"),
        (torch.tensor(True), RuntimeError, r"reset of shape \[length, batch\] = \[7, 4\], got \[\]"),
        (torch.zeros(7, 4, 16), RuntimeError, r"reset of shape \[length, batch\] = \[7, 4\], got"),
    ):
        with pytest.raises(error, match=f"^slstm: expected {message}"):
            call.run(functools.partial(cells.slstm, reverse=True, reset=reset))


def test_no_value_of_a_cell_may_have_its_name():
    with pytest.raises(ValueError, match="expected parameters without the name 'reverse', which is taken"):
        lltm_ext.recurrence(gates=1, parameters=("reverse",))(lambda x, p: x[0] * p.reverse)
