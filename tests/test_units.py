"""Cells that read values over all units of a row: units.mean, units.layer_norm and so on."""

import functools

import pytest
import torch
import torch.nn.functional as F
from cell_examples import Example, many_levels, mogrified
from op_suite import DOUBLE, Call, assert_near, needs_cuda
from sequence_suite import assert_values_and_gradients

import lltm_ext
from lltm_ext import cells

TYPES = (torch.float16, torch.bfloat16, torch.float32)

# A function of a cell, of two values and units, and the same by torch's functions of whole tensors.
OPERATIONS = {
    "sum": (lambda a, b, units: units.sum(a), lambda a, b: a.sum(-1, keepdim=True)),
    "mean": (lambda a, b, units: units.mean(a), lambda a, b: a.mean(-1, keepdim=True)),
    "mean_of_both": (
        lambda a, b, units: units.mean([a, b]),
        lambda a, b: torch.cat([a, b], -1).mean(-1, keepdim=True),
    ),
    "var": (lambda a, b, units: units.var(a), lambda a, b: a.var(-1, correction=0, keepdim=True)),
    "max": (lambda a, b, units: units.max(a), lambda a, b: a.amax(-1, keepdim=True)),
    "max_of_both": (
        lambda a, b, units: units.max((a, b)),
        lambda a, b: torch.cat([a, b], -1).amax(-1, keepdim=True),
    ),
    "min": (lambda a, b, units: units.min(a), lambda a, b: a.amin(-1, keepdim=True)),
    "cumsum": (lambda a, b, units: units.cumsum(a), lambda a, b: a.cumsum(-1)),
    "softmax": (lambda a, b, units: units.softmax(a), lambda a, b: a.softmax(-1)),
    "softmax_of_both": (
        lambda a, b, units: units.softmax([a, b])[1],
        lambda a, b: torch.cat([a, b], -1).softmax(-1)[..., a.shape[-1] :],
    ),
    "cumax": (
        lambda a, b, units: units.cumsum(units.softmax(a)),
        lambda a, b: a.softmax(-1).cumsum(-1),
    ),
    "layer_norm": (
        lambda a, b, units: units.layer_norm(a, b, 0.5),
        lambda a, b: F.layer_norm(a, a.shape[-1:]) * b + 0.5,
    ),
    "layer_norm_of_both": (
        lambda a, b, units: units.layer_norm((a, b), eps=1e-3)[0],
        lambda a, b: F.layer_norm(torch.cat([a, b], -1), (2 * a.shape[-1],), eps=1e-3)[..., : a.shape[-1]],
    ),
    "rms_norm": (
        lambda a, b, units: units.rms_norm(a, weight=b, eps=1e-4),
        lambda a, b: F.rms_norm(a, a.shape[-1:], eps=1e-4) * b,
    ),
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)


@pytest.mark.filterwarnings("ignore:cell. the function reads no gate 1")
@pytest.mark.parametrize("hidden", [1, 33, 300])
@every_operation
def test_an_operation_has_the_values_and_gradients_of_torchs(name, hidden):
    operation, of_tensors = OPERATIONS[name]

    @lltm_ext.recurrence(gates=2, recurrent=False)
    def cell(x, units):
        return operation(x[0], x[1], units)

    torch.manual_seed(0)
    planes = torch.randn(3, 4, 2 * hidden, dtype=DOUBLE, requires_grad=True)
    weights = torch.randn(3, 4, hidden, dtype=DOUBLE)
    found, _ = cell(planes, planes.new_zeros(4, hidden))
    expected = of_tensors(*planes.chunk(2, -1)).expand(3, 4, hidden)
    assert_near(found, expected, 1e-12)
    gradients = [torch.autograd.grad((y * weights).sum(), planes)[0] for y in (found, expected)]
    # A variance, or a norm, of one unit is 0: so is the gradient, up to rounding.
    assert (gradients[0] - gradients[1]).norm() <= 1e-12 * max(gradients[1].norm(), 1)


def has_clusters():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def norm(x, weight, bias=None, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def layer_norm_lstm(input, h, c, w, u, bias, scale_ih, scale_hh, shift, scale_c, shift_c):
    outputs = []
    for x in input:
        gates = norm(x @ w.t() + bias, scale_ih, shift) + norm(h @ u.t(), scale_hh)
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * norm(c, scale_c, shift_c).tanh()
        outputs.append(h)
    return torch.stack(outputs), h, c


def dreamer_gru(input, h, w, u, bias, scale, shift):
    outputs = []
    for x in input:
        r, n, z = norm(x @ w.t() + h @ u.t() + bias, scale, shift, 1e-3).chunk(3, -1)
        z = (z - 1).sigmoid()
        h = z * (r.sigmoid() * n).tanh() + (1 - z) * h
        outputs.append(h)
    return torch.stack(outputs), h


@pytest.mark.parametrize(
    "cell,loop", [(cells.layer_norm_lstm, layer_norm_lstm), (cells.dreamer_gru, dreamer_gru)]
)
def test_a_ready_cell_has_the_values_and_gradients_of_a_loop_over_torchs_norms(cell, loop):
    torch.manual_seed(0)
    length, batch, size, hidden = 6, 3, 5, 24
    rows = cell.gates * hidden
    states = [torch.randn(batch, hidden, dtype=DOUBLE) for _ in cell.state_names]
    shapes = ((rows, size), (rows, hidden), (rows,), *((n * hidden,) for n in cell.widths().values()))
    weights = [torch.randn(shape, dtype=DOUBLE) for shape in shapes]

    def ours(input, *tensors):
        states, (w, u, bias, *own) = tensors[: len(cell.state_names)], tensors[len(cell.state_names) :]
        named = dict(zip(cell.parameters, own, strict=True))
        return cell(input, states if cell.states else states[0], w, u, bias, **named)

    call = Call(torch.randn(length, batch, size, dtype=DOUBLE), *states, *weights)
    assert_values_and_gradients(ours, loop, call)


EXAMPLES = (cells.layer_norm_lstm, cells.dreamer_gru, many_levels)
every_example = pytest.mark.parametrize("cell", EXAMPLES, ids=lambda cell: cell.__name__)


@pytest.mark.parametrize("dtype", [*TYPES, DOUBLE])
@every_example
def test_values_and_gradients_equal_the_loop(cell, dtype):
    Example(cell, dtype, length=7, batch=5, hidden=40).check()


@pytest.mark.parametrize("reverse", [False, True])
@every_example
def test_packed_rows(cell, reverse):
    Example(cell, hidden=9, sizes=[5, 5, 4, 2, 1]).check(reverse=reverse)


@pytest.mark.parametrize("reset", [torch.bool, torch.float64])
@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
@every_example
def test_resets(cell, reset_to, reset):
    Example(cell, length=8, batch=4, hidden=9, reset=reset, reset_to=reset_to).check()


# The norm of a single value has no gradient to compare in half types, and of many values some round to the
# other side of a jump.
@needs_cuda
@pytest.mark.parametrize("cell", [cells.dreamer_gru, mogrified], ids=repr)
def test_rows_that_do_not_fit_a_grid_at_once_are_launched_in_parts(cell):
    """On an H200 14 of 25 groups of nine blocks run at once."""
    Example(cell, torch.float32, length=3, batch=200, hidden=136, reset=True, device="cuda").check(
        algorithm="grid"
    )


@needs_cuda
@pytest.mark.parametrize(
    "dtype,hidden",
    [(dtype, hidden) for dtype in (*TYPES, DOUBLE) for hidden in (24, 33, 250, 1024)]
    + [(dtype, hidden) for dtype in (torch.float32, DOUBLE) for hidden in (1, 1100, 2048)],
    ids=str,
)
@every_example
def test_values_and_gradients_equal_the_loop_on_a_gpu(cell, dtype, hidden):
    if hidden > 1024 and not has_clusters():
        pytest.skip("needs clusters for so many units")
    Example(cell, dtype, length=4, batch=3, hidden=hidden, device="cuda").check()


@needs_cuda
@pytest.mark.skipif(not has_clusters(), reason="needs a GPU with clusters")
@pytest.mark.parametrize(
    "algorithm,dtype,hidden",
    [("cluster", dtype, hidden) for dtype in TYPES for hidden in (24, 104)]
    + [("cluster", dtype, hidden) for dtype in TYPES[:2] for hidden in (136, 256)]
    + [("grid", dtype, hidden) for dtype in TYPES for hidden in (24, 136, 504)]
    + [("grid", torch.float16, 1000)],
    ids=str,
)
@every_example
def test_values_and_gradients_in_one_kernel_equal_the_loop(cell, algorithm, dtype, hidden):
    Example(cell, dtype, length=6, batch=11, hidden=hidden, device="cuda").check(algorithm=algorithm)


@needs_cuda
@pytest.mark.skipif(not has_clusters(), reason="needs a GPU with clusters")
@pytest.mark.parametrize("reset", [torch.bool, torch.float32])
@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
@pytest.mark.parametrize("algorithm", ["cluster", "grid"])
def test_resets_in_one_kernel(algorithm, reset_to, reset):
    how = {"reset": reset, "reset_to": reset_to, "device": "cuda"}
    Example(cells.dreamer_gru, torch.float32, length=8, batch=4, hidden=40, **how).check(algorithm=algorithm)


@needs_cuda
@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
@every_example
def test_resets_and_packed_rows_on_a_gpu(cell, reset_to):
    example = functools.partial(Example, cell, hidden=36, reset=True, reset_to=reset_to, device="cuda")
    example(length=8, batch=4).check()
    example(sizes=[5, 5, 4, 2, 1]).check(reverse=True)


@needs_cuda
def test_a_row_without_room_is_refused_on_a_gpu():
    hidden = 1031  # a prime number
    input, h0 = (torch.zeros(*shape, device="cuda") for shape in ((2, 1, 3 * hidden), (1, hidden)))
    weight, scale = torch.zeros(3 * hidden, hidden, device="cuda"), torch.zeros(3 * hidden, device="cuda")
    with pytest.raises(RuntimeError, match=r"^dreamer_gru: expected a hidden_size that .*, got 1031"):
        cells.dreamer_gru(input, h0, None, weight, scale=scale, shift=scale)


@every_example
def test_second_derivatives_equal_finite_differences(cell):
    example = Example(cell, length=2, batch=2, hidden=3, input_size=2)
    call = example.call.leaves()
    assert torch.autograd.gradgradcheck(call.bind(lambda *args: example.ours(*args)[0]), call.tensors)


@pytest.mark.parametrize(
    "function,message",
    {
        "number": (
            lambda x, units: x[0] + units.sum(torch.zeros_like(x[0])),
            r"calls units.sum on the number 0",
        ),
        "weights": (
            lambda x, units: units.layer_norm(x, (1.0, 2.0, 3.0))[0],
            "expected weight to have 2 values, as the norm does, got 3",
        ),
        "none": (lambda x, units: x[0] + units.mean([]), "expected a value or several of units, got none"),
        "int": (lambda x, units: x[0] + units.sum(3), "expected a value or several of units, got 3"),
        "name": (
            lambda x, units: units.std(x[0]),
            "units.std does not exist: there are units.linear, units.sum",
        ),
        "several": (lambda x, units: units.cumsum(x), "expected one value for units.cumsum"),
        "no_grad": (torch.no_grad()(lambda x, units: units.sum(x[0])), "calls units.sum under torch.no_grad"),
        "mean": (lambda x, units: x[0].mean(), "write units.mean"),
        "softmax": (lambda x, units: torch.softmax(x[0], -1), "write units.mean"),
    }.values(),
    ids=lambda x: "",
)
def test_what_units_do_not_take_is_refused_with_the_line(function, message):
    with pytest.raises(
        (RuntimeError, TypeError, ValueError, AttributeError), match=rf"(?s){message}.*test_units.py:\d+: "
    ):
        lltm_ext.recurrence(gates=2)(function)


# ---- parameters of several values --------------------------------------------------------------------------


def test_a_parameter_of_several_values_is_one_tensor_of_a_layer():
    layer = lltm_ext.Recurrent(cells.layer_norm_lstm, 5, 8, num_layers=2)
    assert layer.scale_ih_l0.shape == (32,) and layer.scale_c_l1.shape == (8,)
    assert torch.equal(layer.scale_ih_l0, torch.ones(32)) and torch.equal(layer.shift_l1, torch.zeros(32))
    layer(torch.randn(3, 2, 5))[0].sum().backward()
    assert layer.scale_hh_l1.grad.abs().sum() > 0

    @lltm_ext.recurrence(gates=1, parameters={"scale": [1.0, 2.0], "shift": None})
    def two(x, p):
        first, second = p.scale
        return first * torch.tanh(x[0] * second + p[1]) + p[0][1]

    layer = lltm_ext.Recurrent(two, 3, 4)
    assert torch.equal(layer.scale_l0, torch.tensor([1.0] * 4 + [2.0] * 4))
    x, h, expected = torch.randn(5, 2, 3), torch.zeros(2, 4), []
    for step in x:
        a = step @ layer.weight_ih_l0.t() + h @ layer.weight_hh_l0.t() + layer.bias_l0
        h = 1.0 * torch.tanh(a * 2.0 + layer.shift_l0) + 2.0
        expected.append(h)
    assert_near(layer(x)[0], torch.stack(expected), 1e-6)


def test_a_list_of_one_number_is_a_tuple_of_one():
    @lltm_ext.recurrence(gates=1, parameters={"scale": [2.0]})
    def one(x, p):
        (scale,) = p.scale
        return torch.tanh(x[0] * scale)

    layer = lltm_ext.Recurrent(one, 3, 4)
    x, h = torch.randn(2, 1, 3), torch.zeros(1, 4)
    output, _ = one(x, h, layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_l0, scale=layer.scale_l0)
    assert layer.scale_l0.shape == (4,) and torch.equal(output, layer(x)[0])


def test_a_parameter_of_several_values_has_its_size_checked():
    layer = lltm_ext.Recurrent(cells.dreamer_gru, 3, 4)
    x, h = torch.zeros(2, 1, 3), torch.zeros(1, 4)
    weights = (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_l0)
    shift = torch.zeros(12)
    with pytest.raises(
        RuntimeError, match=r"^dreamer_gru: expected scale of shape \[3\*hidden_size\] = \[12\], got \[4\]"
    ):
        cells.dreamer_gru(x, h, *weights, scale=torch.ones(4), shift=shift)
    with pytest.raises(TypeError, match=r"^dreamer_gru: expected scale to be a Tensor"):
        cells.dreamer_gru(x, h, *weights, scale=1.0, shift=shift)
