"""Gradients of the inputs of the steps, against those of the loop, which is differentiable in them."""

import functools

import pytest
import torch
from cell_examples import CELLS, TEXTS, Example, everything, without_gates, without_product
from op_suite import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    Call,
    Make,
    assert_all_near,
    assert_same_bits,
    pairwise,
    sum_of_squares,
)
from sequence_suite import KINDS, assert_values_and_gradients
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lltm_ext
from lltm_ext import _layers
from lltm_ext._arguments import SequenceCall
from lltm_ext._custom_cell import expand_gates
from lltm_ext._loop import run_loop
from lltm_ext.recurrence import run, with_states


@lltm_ext.recurrence(gates=1, inputs=("rate",), recurrent=False)
def selective(x, h, u):
    return torch.exp(-u.rate) * h + u.rate * x[0]


@lltm_ext.recurrence(gates=2, separate=True, inputs=("gap",))
def star(x, r, h, u):
    """Only gate 1 sees h, besides the gate of the input."""
    keep = torch.sigmoid(x[1] + r[1] - u.gap)
    return (1 - keep) * h + keep * torch.tanh(x[0])


TIMED = {name: cell for name, cell in CELLS.items() if cell.inputs} | {"everything": everything}
TIMED |= {"selective": selective, "star": star}
some_cells = pytest.mark.parametrize(
    "cell", [without_product, without_gates, everything, star], ids=lambda cell: cell.__name__
)


def by_loop(cell, call, reset_to):
    if cell.recurrent:
        call = call._replace(weight_hh=expand_gates(call.weight_hh, cell.recurrent_gates, cell.gates))
    return run_loop(cell, with_states(cell, call), to_initial=reset_to == "initial")


class Timed(Example):
    """An Example whose inputs of the steps are tensors of the call, the last ones."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.call = Call(*self.call.args, [u.to(self.dtype) for u in self.inputs])

    def ours(self, *args, reverse=False):
        output, final = run(self.cell, self.sequence(args, reverse), "auto", self.reset_to)
        return [output, *final]

    def loop(self, *args, reverse=False):
        output, final = by_loop(self.cell, self.sequence(args, reverse), self.reset_to)
        return [output, *final]

    def sequence(self, args, reverse):
        return SequenceCall(*args, self.reset, self.sizes, reverse)

    def check(self, call=None, reverse=False):
        functions = (functools.partial(f, reverse=reverse) for f in (self.ours, self.loop))
        assert_values_and_gradients(*functions, call or self.call, self.dtype, zeros_for_unused=True)


# ---- calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TIMED)
def test_values_and_gradients_equal_the_loop(name, dtype, device):
    Timed(TIMED[name], dtype, device=device).check()


@pairwise(
    cell={cell.__name__: cell for cell in (without_product, everything)},
    resets={
        "no resets": (None, "zeros"),
        "to zeros": (torch.bool, "zeros"),
        "to initial states": (torch.bool, "initial"),
        "numbers": (DOUBLE, "initial"),
    },
    bias={"no bias": False, "bias": True},
    sizes={"padded": None, "packed": [4, 3, 3, 1]},
    reverse={"forward": False, "reverse": True},
)
def test_options(cell, resets, bias, sizes, reverse, device):
    reset, reset_to = resets
    how = {"bias": bias, "reset": reset, "reset_to": reset_to, "sizes": sizes, "device": device}
    Timed(cell, **how).check(reverse=reverse)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("hidden", [8, 9], ids=str)
def test_an_input_without_weights(hidden, bias, device):
    example = Timed(without_product, hidden=hidden, input_size=2 * hidden, bias=bias, device=device)
    input, states, _, *rest = example.call.args
    example.check(Call(input, states, None, *rest))


@pytest.mark.parametrize("shape", [(0, 3), (5, 0)], ids=["no steps", "no rows"])
@some_cells
def test_no_steps_or_rows(cell, shape, device):
    make, rows = Make(DOUBLE, device), cell.gates * 6
    product = make(len(cell.recurrent_gates) * 6, 6) if cell.recurrent else None
    weights = (make(*shape, 4), make(rows, 4), product) if cell.gates else (None, None, None)
    states = [make(shape[1], 6) for _ in cell.state_names]
    named = {p: make(6) for p in cell.parameters} | {u: make(*shape).requires_grad_() for u in cell.inputs}
    hx = tuple(states) if cell.states else states[0]
    output, _ = cell(weights[0], hx, *weights[1:], **named)
    output.sum().backward()
    assert all(named[u].grad.shape == shape for u in cell.inputs)


def test_only_some_inputs_require_a_gradient(device):
    make = Make(DOUBLE, device)
    named = {"a": make(6), "b": make(6), "gap": make(5, 3), "mask": make(5, 3, 6) > 0}
    hx = (make(3, 6), make(3, 6), make(3, 6))
    weights = make(5, 3, 4), hx, make(12, 4), make(12, 6)
    expected, _ = everything(*weights, **named)
    output, _ = everything(*weights, **named | {"gap": named["gap"].requires_grad_()})
    assert_all_near([output], [expected], FORWARD[DOUBLE])
    output.sum().backward()
    assert named["gap"].grad.shape == (5, 3)


def test_without_gradients_the_cell_is_as_it_was(device):
    example = Timed(without_product, device=device)
    needed = example.call.leaves()
    with torch.no_grad():
        assert_same_bits(needed.run(example.ours), example.call.run(example.ours))
    assert not any(y.requires_grad for y in example.call.run(example.ours))


def test_the_function_is_not_called_again():
    """A global number keeps the value that it had when the cell was declared."""
    factor = 2.0

    @lltm_ext.recurrence(gates=0, inputs=("value",), recurrent=False)
    def cell(h, u):
        return 0.5 * h + factor * u.value

    factor = 3.0
    value = torch.ones(1, 1, requires_grad=True)
    cell(None, torch.zeros(1, 1), value=value)[0].sum().backward()
    assert value.grad.item() == 2.0


@some_cells
def test_derivatives_of_any_order_and_transforms(cell):
    example = Timed(cell, length=3, batch=2, hidden=2)
    call = example.call

    def loss(function, *tensors):
        return sum_of_squares(call.with_tensors(tensors).run(function))

    def derivatives(function):
        tensors = [x.detach().requires_grad_() for x in call.tensors]
        of_loss = functools.partial(loss, function)
        how = {"create_graph": True, "materialize_grads": True}
        first = torch.autograd.grad(of_loss(*tensors), tensors, **how)
        second = torch.autograd.grad(sum_of_squares(first), tensors, materialize_grads=True)
        along = torch.func.jvp(of_loss, tuple(call.tensors), tuple(call.tensors))
        samples = [torch.stack([x, 2 * x]) for x in call.tensors]
        every = tuple(range(len(samples)))
        per_sample = torch.vmap(torch.func.grad(of_loss, every))(*samples)
        of_samples = torch.func.grad(lambda *x: torch.vmap(of_loss)(*x).sum(), every)(*samples)
        return [*first, *second, *along, *per_sample, *of_samples]

    assert_all_near(derivatives(example.ours), derivatives(example.loop), BACKWARD[DOUBLE])


def test_a_tangent_of_an_input_of_the_steps():
    example = Timed(selective)
    inputs, tangent = example.call.args[-1], torch.randn(5, 3, 6, dtype=DOUBLE)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0], tangent)
        outputs = [f(*example.call.args[:-1], [dual])[0] for f in (example.ours, example.loop)]
        found, expected = (torch.autograd.forward_ad.unpack_dual(y).tangent for y in outputs)
    assert_all_near([found], [expected], BACKWARD[DOUBLE])


def test_gradcheck_checks_them():
    assert selective.gradcheck(device="cpu")

    @lltm_ext.recurrence(gates=1, inputs=("rate",), recurrent=False)
    def wrong(x, h, u):
        return h * u.rate.detach() + x[0]

    with pytest.raises(RuntimeError, match=r"^wrong: the gradient with respect to rate is wrong"):
        wrong.gradcheck(device="cpu")


def test_autocast(device):
    example = Timed(without_product, torch.float32, device=device)
    with torch.autocast(device, torch.bfloat16):
        call = example.call.leaves()
        output, *_ = call.run(example.ours)
    assert output.dtype == torch.bfloat16
    found = torch.autograd.grad(sum_of_squares([output.double()]), call.tensors)
    expected = example.call.map(torch.Tensor.double).leaves()
    exact = torch.autograd.grad(sum_of_squares(expected.run(example.loop)[:1]), expected.tensors)
    assert [x.dtype for x in found] == [torch.float32] * len(found)
    assert_all_near(found, exact, BACKWARD[torch.bfloat16])


@pytest.mark.parametrize("name", ["cfc", "gru_with_recurrent_dropout"])
def test_a_cell_given_as_text_has_none(name):
    cell = TEXTS[name]
    example = Timed(cell, torch.float32)
    *args, inputs = example.call.args
    message = (
        f"^{name}: expected {cell.inputs[0]} without a gradient, which no input of a step of a cell given"
    )
    with pytest.raises(RuntimeError, match=message):
        example.ours(*args, [inputs[0].requires_grad_()])


# ---- layers ----------------------------------------------------------------------------------------------


class ByLoop:
    """A layer whose cells run by the loop."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, *args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_layers, "run", lambda cell, call, _, to: by_loop(cell, call, to))
            patch.setattr(_layers, "run_both", lambda cell, calls, to: [by_loop(cell, x, to) for x in calls])
            return self.layer(*args, **kwargs)


def layer_of(cell, device="cpu", size=4, **options):
    return lltm_ext.Recurrent(cell, size, 6, **options, dtype=DOUBLE, device=device)


def call_of_layer(layer, device="cpu"):
    make = Make(DOUBLE, device)
    steps = (4, 5) if layer.batch_first else (5, 4)
    shapes = (*steps, layer.hidden_size), steps
    inputs = {u: make(*shapes[i % 2]).abs() for i, u in enumerate(layer.cell.inputs)}
    return Call(*[make(*steps, layer.input_size)] if layer.cell.gates > 0 else (), **inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", [without_product, everything, star], ids=lambda cell: cell.__name__)
def test_a_layer(kind, cell, device):
    layer = layer_of(cell, device, **KINDS[kind])
    assert_values_and_gradients(layer, ByLoop(layer), call_of_layer(layer, device))


@pytest.mark.parametrize(
    "options", [{"batch_first": True}, {"reverse": True}, {"bidirectional": True}], ids=str
)
@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
def test_a_layer_with_resets(options, reset_to, device):
    layer = layer_of(without_product, device, **options)
    call = call_of_layer(layer, device)
    reset = torch.rand(call.args[0].shape[:2], generator=torch.Generator().manual_seed(0)).to(device) < 0.3
    hx = tuple(Make(DOUBLE, device, seed=2)(1 + layer.bidirectional, 4, 6) for _ in range(3))
    how = {"hx": hx, "reset": reset, "reset_to": reset_to}
    ours, loop = (functools.partial(f, **how) for f in (layer, ByLoop(layer)))
    assert_values_and_gradients(ours, loop, call)


@some_cells
def test_packed_sequences(cell, device):
    pack = functools.partial(pack_padded_sequence, lengths=[2, 5, 3, 1], enforce_sorted=False)
    layer = layer_of(cell, device, 4 if cell.gates else None, bidirectional=True)

    def packed(function, *input, **inputs):
        output, h_n = function(*map(pack, input), **{name: pack(u) for name, u in inputs.items()})
        assert isinstance(output, PackedSequence)
        return output.data, h_n

    both = (functools.partial(packed, f) for f in (layer, ByLoop(layer)))
    assert_values_and_gradients(*both, call_of_layer(layer, device))


@some_cells
def test_a_layer_compiles_and_exports(cell, fresh_dynamo):
    layer = layer_of(cell, size=4 if cell.gates else None)
    call = call_of_layer(layer).leaves()

    def gradients(function):
        outputs = call.run(function)
        return [*outputs, *torch.autograd.grad(sum_of_squares(outputs), call.tensors)]

    expected = gradients(layer)
    cell._of_gates = None  # as if this were the first call
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_all_near(gradients(compiled), expected, BACKWARD[DOUBLE])
    exported = torch.export.export(layer, call.args, call.kwargs).module()
    assert_all_near(gradients(exported), expected, BACKWARD[DOUBLE])


@pytest.mark.parametrize("argument", [0, 1], ids=["of the input", "of an input of the steps"])
def test_transforms_compile(argument, fresh_dynamo):
    layer = layer_of(without_product)
    x, gap = Make(DOUBLE)(5, 3, 4), Make(DOUBLE)(5, 3, 6)
    gradient = torch.func.grad(lambda x, gap: sum_of_squares([layer(x, gap=gap)[0]]), argument)
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    assert_all_near([compiled(x, gap)], [gradient(x, gap)], BACKWARD[DOUBLE])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_script_refuses_them():
    layer = layer_of(without_product)
    call = call_of_layer(layer)
    with pytest.raises(torch.jit.Error, match="a script has no gradients of the inputs of the steps"):
        call.leaves().run(torch.jit.script(layer))
    assert_all_near(call.run(torch.jit.script(layer)), call.run(layer), FORWARD[DOUBLE])


class WithGap(torch.nn.Module):
    """A layer with its input of the steps as an argument by position."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input, gap):
        return self.layer(input, gap=gap)[0]


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_a_trace_has_them():
    model = WithGap(layer_of(without_product, bidirectional=True))
    tensors = call_of_layer(model.layer).leaves().tensors
    traced = torch.jit.trace(model, tuple(tensors), check_trace=False)
    found, expected = (torch.autograd.grad(sum_of_squares([f(*tensors)]), tensors) for f in (traced, model))
    assert_all_near(found, expected, BACKWARD[DOUBLE])


def test_a_selective_scan_equals_a_loop_in_float64():
    make = Make(DOUBLE)
    x, rate, h0 = (y.requires_grad_() for y in (make(40, 3, 6), make(40, 3, 6).exp().detach(), make(3, 6)))
    found, _ = selective(x, h0, rate=rate)
    h, states = h0, []
    for t in range(40):
        h = torch.exp(-rate[t]) * h + rate[t] * x[t]
        states.append(h)
    results = [
        [y, *torch.autograd.grad(y.square().sum(), (x, rate, h0))] for y in (found, torch.stack(states))
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
