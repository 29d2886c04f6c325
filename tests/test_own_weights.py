"""Cells with weights of their own: units.linear, products of a step besides that of weight_hh with h."""

import copy
import pickle

import pytest
import torch
from cell_examples import WITH_WEIGHTS, Example, norms_between_products
from op_suite import DOUBLE, assert_near, assert_same_bits, needs_cuda

import lltm_ext
from lltm_ext import cells
from lltm_ext._program import diagonal_blocks

TYPES = (torch.float16, torch.bfloat16, torch.float32)


CELLS = [*WITH_WEIGHTS.values(), norms_between_products, cells.dreamer_block_gru]
every_cell = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)


def gru_with_reset_first(input, h, w, u, bias, weight_hn):
    outputs, hidden = [], h.shape[1]
    for x in input:
        r, z, n = (x @ w.t() + bias).chunk(3, -1)
        of_r, of_z = (h @ u.t()).chunk(2, -1)
        assert of_r.shape[-1] == hidden
        z = (z + of_z).sigmoid()
        h = (1 - z) * (n + ((r + of_r).sigmoid() * h) @ weight_hn.t()).tanh() + z * h
        outputs.append(h)
    return torch.stack(outputs), h


def test_a_gru_with_the_reset_first_has_the_values_and_gradients_of_a_loop():
    torch.manual_seed(0)
    length, batch, size, hidden = 6, 3, 5, 12
    shapes = ((length, batch, size), (batch, hidden), (3 * hidden, size), (2 * hidden, hidden), (3 * hidden,))
    tensors = [torch.randn(shape, dtype=DOUBLE) for shape in (*shapes, (hidden, hidden))]
    tensors = [x.requires_grad_() for x in tensors]
    *positional, weight_hn = tensors
    cell = WITH_WEIGHTS["gru_with_reset_first"]
    found, expected = cell(*positional, weight_hn=weight_hn), gru_with_reset_first(*tensors)
    for y, e in zip(found, expected, strict=True):
        assert_near(y, e, 1e-12)
    sums = [sum((y * torch.sin(y)).sum() for y in results) for results in (found, expected)]
    for a, e in zip(*(torch.autograd.grad(x, tensors) for x in sums), strict=True):
        assert_near(a, e, 1e-12)


def block_diagonal(x, weight):
    """x [B, H] times the blocks of a [n*H, H/heads], n results."""
    hidden, size = x.shape[1], weight.shape[1]
    blocks = weight.view(-1, hidden // size, size, size)
    return torch.einsum("bhi,nhoi->nbho", x.view(len(x), -1, size), blocks).flatten(2)


def dreamer_block_gru(layer, input):
    norm, silu = torch.nn.functional.rms_norm, torch.nn.functional.silu
    w = {name.removesuffix("_l0"): x for name, x in layer.named_parameters()}
    h, outputs = input.new_zeros(input.shape[1], layer.hidden_size), []
    for x in input @ w["weight_ih"].t() + w["bias"]:
        projected = h @ w["weight_hh"].t() + w["bias_h"]
        features = silu(norm(projected, projected.shape[-1:], w["scale_h"], 1e-4))
        y = x + block_diagonal(h, w["block"])[0] + features @ w["features"].t()
        y = silu(norm(y, y.shape[-1:], w["scale"], 1e-4))
        r, n, z = block_diagonal(y, w["gates"]) + w["bias_gates"].view(3, 1, -1)
        z = torch.sigmoid(z - 1)
        h = z * torch.tanh(torch.sigmoid(r) * n) + (1 - z) * h
        outputs.append(h)
    return torch.stack(outputs), h


def test_dreamers_gru_of_blocks_has_the_values_and_gradients_of_a_loop():
    torch.manual_seed(0)
    heads = {"block": 4, "gates": 4}
    layer = lltm_ext.Recurrent(cells.dreamer_block_gru, 5, 16, heads=heads, dtype=DOUBLE)
    assert layer.weight_hh_l0.shape == layer.features_l0.shape == (16, 16)
    assert layer.block_l0.shape == (16, 4) and layer.gates_l0.shape == (48, 4)
    for name, x in layer.named_parameters():
        if name.startswith(("scale", "bias")):
            torch.nn.init.normal_(x, 1, 0.3)
    input, parameters = torch.randn(6, 3, 5, dtype=DOUBLE), list(layer.parameters())
    found, expected = layer(input)[0], dreamer_block_gru(layer, input)[0]
    assert_near(found, expected, 1e-12)
    gradients = (torch.autograd.grad(y.sin().sum(), parameters) for y in (found, expected))
    for a, e in zip(*gradients, strict=True):
        assert_near(a, e, 1e-12)


@pytest.mark.parametrize(
    "heads,message",
    [
        ({"gate": 2}, "expected heads of weight_hh or block or features or gates, got those of 'gate'"),
        ({"gates": 3}, r"expected heads\['gates'\] to divide hidden_size = 8, got 3"),
        ({"block": 0}, r"expected heads\['block'\] to be positive, got 0"),
    ],
)
def test_heads_of_weights_are_checked(heads, message):
    with pytest.raises(ValueError, match=message):
        lltm_ext.Recurrent(cells.dreamer_block_gru, 5, 8, heads=heads)


def test_a_weight_of_several_blocks_multiplies_as_a_whole():
    """[2H, 3H] times three values of all units."""

    @lltm_ext.recurrence(gates=3, weights={"w_out": (2, 3)})
    def cell(x, h, w, units):
        a, b = units.linear((torch.tanh(x[0]), h, x[1] * x[2]), w.w_out)
        return torch.tanh(a) * torch.sigmoid(b)

    torch.manual_seed(0)
    hidden = 4
    planes, h0 = torch.randn(1, 2, 3 * hidden, dtype=DOUBLE), torch.randn(2, hidden, dtype=DOUBLE)
    weight_hh = torch.zeros(3 * hidden, hidden, dtype=DOUBLE)
    weight = torch.randn(2 * hidden, 3 * hidden, dtype=DOUBLE, requires_grad=True)
    output, _ = cell(planes, h0, None, weight_hh, w_out=weight)
    x = planes[0].chunk(3, -1)
    a, b = (torch.cat([torch.tanh(x[0]), h0, x[1] * x[2]], -1) @ weight.t()).chunk(2, -1)
    expected = torch.tanh(a) * torch.sigmoid(b)
    assert_near(output[0], expected, 1e-12)
    gradients = (torch.autograd.grad((y * y).sum(), weight)[0] for y in (output, expected))
    assert_near(*gradients, 1e-12)


@pytest.mark.parametrize("dtype", [*TYPES, DOUBLE])
@every_cell
def test_values_and_gradients_equal_the_loop(cell, dtype):
    Example(cell, dtype, length=7, batch=5, hidden=24).check()


@pytest.mark.parametrize("reverse", [False, True])
@every_cell
def test_packed_rows(cell, reverse):
    Example(cell, hidden=9, sizes=[5, 5, 4, 2, 1]).check(reverse=reverse)


@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
@every_cell
def test_resets(cell, reset_to):
    Example(cell, length=8, batch=4, hidden=9, reset=True, reset_to=reset_to).check()


@every_cell
def test_second_derivatives_equal_finite_differences(cell):
    example = Example(cell, length=2, batch=2, hidden=3, input_size=2)
    call = example.call.leaves()
    assert torch.autograd.gradgradcheck(call.bind(lambda *args: example.ours(*args)[0]), call.tensors)


@every_cell
def test_all_gradients_equal_finite_differences(cell):
    """Those of the inputs of the steps, too."""
    assert cell.gradcheck(device="cpu")


@every_cell
def test_a_layer_has_its_weights_and_trains(cell):
    torch.manual_seed(0)
    layer = lltm_ext.Recurrent(cell, 5, 8, num_layers=2, bidirectional=True)
    for name, (rows, columns) in cell.weights.items():
        assert getattr(layer, f"{name}_l1_reverse").shape == (rows * 8, columns * 8)
    steps = {name: torch.rand(4, 3) for name in cell.inputs}
    layer(torch.randn(4, 3, 5), **steps)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_heads_divide_the_weights_of_a_cell():
    torch.manual_seed(0)
    cell = WITH_WEIGHTS["gru_with_reset_first"]
    layer, dense = (lltm_ext.Recurrent(cell, 5, 8, heads=heads) for heads in (2, 1))
    assert layer.weight_hn_l0.shape == (8, 4)
    state = layer.state_dict()
    state["weight_hn_l0"] = torch.block_diag(*layer.weight_hn_l0.detach().split(4))
    gates = layer.weight_hh_l0.detach().split(8)
    state["weight_hh_l0"] = torch.cat([torch.block_diag(*gate.split(4)) for gate in gates])
    dense.load_state_dict(state)
    x = torch.randn(4, 3, 5)
    assert_near(layer(x)[0], dense(x)[0], 1e-6)


def test_the_program_of_heads_says_which_products_have_block_diagonal_weights():
    cell = cells.dreamer_block_gru
    layer = lltm_ext.Recurrent(cell, 5, 64, heads={"block": 8, "gates": 8})
    assert diagonal_blocks(layer._cell) == (8, {0, 2, 3, 4})
    assert layer._cell.program != cell.program
    for heads in ({"block": 8, "gates": 4}, {"weight_hh": 8}, 1):  # heads that differ, and none
        layer = lltm_ext.Recurrent(cell, 5, 64, heads=heads)
        assert diagonal_blocks(layer._cell) == (0, frozenset())


def test_inputs_of_a_step_have_gradients_beside_heads():
    """Such a cell is made from the one with heads, and is called like that one."""
    torch.manual_seed(0)
    cell, x = WITH_WEIGHTS["mogrified"], torch.randn(3, 2, 5, dtype=DOUBLE)
    layer = lltm_ext.Recurrent(cell, 5, 8, heads={"tall": 2}, dtype=DOUBLE)
    gap = torch.rand(3, 2, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda gap: layer(x, gap=gap)[0], gap)
    of_gates = layer._cell.with_inputs_as_gates()
    assert of_gates.units_of_heads == (0, 4, 0)
    assert of_gates.with_heads((0, 0, 0)) is of_gates


@every_cell
def test_torch_compile_traces_a_layer(cell, fresh_dynamo):
    torch.manual_seed(0)
    layer = lltm_ext.Recurrent(cell, 5, 8)
    input, steps = torch.randn(4, 3, 5), {name: torch.rand(4, 3) for name in cell.inputs}
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert_near(compiled(input, **steps)[0], layer(input, **steps)[0], 1e-6)


def test_a_layer_with_heads_in_some_weights_compiles_exports_and_pickles(fresh_dynamo):
    torch.manual_seed(0)
    heads, input = {"block": 4, "gates": 4}, torch.randn(3, 2, 5)
    layer = lltm_ext.Recurrent(cells.dreamer_block_gru, 5, 16, heads=heads)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(layer, (input,)).module()
    for other in (compiled, exported, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert_same_bits(other(input)[0], layer(input)[0])
    assert pickle.loads(pickle.dumps(layer))._cell is layer._cell


def test_products_of_equal_values_have_the_gradients_of_their_surrogates():
    @lltm_ext.recurrence(gates=1, weights=("a",))
    def cell(x, w, units):
        first, second = (units.linear(lltm_ext.spike(x[0], name), w.a) for name in ("atan", "triangle"))
        return torch.tanh(first + 2 * second)

    Example(cell, length=3).check()  # against torch's gradients of the loop


def test_a_product_of_one_number_of_a_row_has_second_derivatives():
    @lltm_ext.recurrence(gates=1, weights=("a",), inputs=("gap",))
    def cell(x, u, w, units):
        return torch.tanh(x[0] + units.linear(u.gap, w.a))

    layer = lltm_ext.Recurrent(cell, 3, 4).double()
    x, gap = torch.randn(3, 2, 3, dtype=DOUBLE), torch.rand(3, 2, dtype=DOUBLE)

    def of_weight(weight):
        return torch.func.functional_call(layer, {"a_l0": weight}, (x,), {"gap": gap})[0]

    assert torch.autograd.gradgradcheck(of_weight, layer.a_l0)


def test_a_step_may_have_many_products_and_parameters():
    @lltm_ext.recurrence(gates=1, weights={"wide": (9, 8)}, parameters={"scale": [1.0] * 70})
    def many(x, h, p, w, units):
        return torch.tanh(x[0] + sum(units.linear([h] * 8, w.wide)) * sum(p.scale))

    assert lltm_ext.Recurrent(many, 3, 2)(torch.randn(2, 1, 3))[0].shape == (2, 1, 2)


@needs_cuda
@pytest.mark.parametrize("hidden", [24, 33, 250])
@pytest.mark.parametrize("dtype", [*TYPES, DOUBLE])
@every_cell
def test_values_and_gradients_equal_the_loop_on_a_gpu(cell, dtype, hidden):
    example = Example(cell, dtype, length=4, batch=3, hidden=hidden, device="cuda")
    example.check()
    example.check(algorithm="stepwise")


@needs_cuda
@pytest.mark.parametrize("hidden, units", [(24, 8), (48, 16), (200, 8), (256, 32), (512, 64), (512, 8)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["dreamer_block_gru", "gru_with_reset_first", "mogrified"])
def test_values_and_gradients_of_heads_equal_the_loop_on_a_gpu(name, dtype, hidden, units):
    cell = next(cell for cell in CELLS if cell.__name__ == name)
    some = tuple(units * (i != 1) * (columns == 1) for i, (_, columns) in enumerate(cell.weights.values()))
    Example(cell.with_heads(some), dtype, length=4, batch=11, hidden=hidden, device="cuda").check()


@needs_cuda
@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
@every_cell
def test_resets_and_packed_rows_on_a_gpu(cell, reset_to):
    Example(cell, length=8, batch=4, hidden=36, reset=True, reset_to=reset_to, device="cuda").check()
    Example(cell, hidden=36, sizes=[5, 5, 4, 2, 1], device="cuda").check(reverse=True)


# ---- errors


def arguments(cell, hidden=4):
    layer = lltm_ext.Recurrent(cell, 3, hidden)
    weights = (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_l0)
    return (torch.zeros(2, 1, 3), torch.zeros(1, hidden), *weights)


def test_the_weights_of_a_call_are_checked():
    cell = WITH_WEIGHTS["gru_with_reset_first"]
    with pytest.raises(TypeError, match=r"^gru_with_reset_first: expected weight_hn to be a Tensor"):
        cell(*arguments(cell))
    shape = r"expected weight_hn of shape \[hidden_size, hidden_size \(or / heads\)\] with hidden_size = 4"
    with pytest.raises(RuntimeError, match=rf"^gru_with_reset_first: {shape}, got \[4, 3\]"):
        cell(*arguments(cell), weight_hn=torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match=r"expected weight_hh of shape \[2\*hidden_size, .*got \[12, 4\]"):
        input, h0, weight_ih, _, bias = arguments(cell)
        cell(input, h0, weight_ih, torch.zeros(12, 4), bias, weight_hn=torch.zeros(4, 4))
    with pytest.raises(TypeError, match="expected weight_hn of dtype float32, got float64"):
        cell(*arguments(cell), weight_hn=torch.zeros(4, 4, dtype=DOUBLE))
    with pytest.raises(RuntimeError, match="algorithm 'grid'"):
        cell(*arguments(cell), weight_hn=torch.zeros(4, 4), algorithm="grid")


@pytest.mark.parametrize(
    "function,message",
    {
        "matrix": (
            lambda x, p, w, units: units.linear(x[0], p.b),
            "expected the weight of units.linear to be w.name, which the cell declares by weights=, got T",
        ),
        "count": (
            lambda x, p, w, units: units.linear((x[0], x[1]), w.a),
            "expected 1 values for the product with w.a, got 2",
        ),
        "number": (
            lambda x, p, w, units: units.linear(torch.ones_like(x[0]), w.a),
            "calls units.linear on the n",
        ),
        "unused": (lambda x, p, w, units: x[0] + 0 * x[1], r"nothing depends on units.linear\(v, w.a\)"),
        "name": (lambda x, p, w, units: units.linear(x[0], w.b), r"w\.b does not exist: w has w\.a"),
        "matmul": (lambda x, p, w, units: torch.matmul(x[0], x[1]), r"units\.linear\(v, w\.name\)"),
    }.values(),
    ids=lambda x: "",
)
def test_what_linear_does_not_take_is_refused_with_the_line(function, message):
    with pytest.raises(
        (RuntimeError, TypeError, ValueError, AttributeError), match=rf"(?s){message}.*\.py:\d+: "
    ):
        lltm_ext.recurrence(gates=2, parameters=("b",), weights=("a",))(function)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"weights": {"a": 2}}, "expected the size of a to be .rows, columns."),
        ({"weights": {"a": (0, 1)}}, "expected the size of a to be .rows, columns."),
        ({"weights": ("x0", "x0")}, "taken"),
        ({"weights": ("a",), "recurrent": False}, "expected no weights for a cell without recurrent product"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lltm_ext.recurrence(gates=1, **options)(lambda x: x[0])
