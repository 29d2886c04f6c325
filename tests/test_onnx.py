"""torch.onnx.export of models with our ops, by both exporters: onnxruntime computes what eager does."""

import subprocess
import sys
import warnings

import pytest
import torch
from cell_examples import lstm_of_both_states
from op_suite import assert_all_near
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import lltm_ext
from lltm_ext import cells

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")

INPUT, HIDDEN = 5, 6
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters, and of torch.jit.trace
exporters = pytest.mark.parametrize("dynamo", [False, True], ids=["trace", "dynamo"])


@lltm_ext.recurrence(gates=2, separate=True, states=("c",), parameters=("p",), inputs=("gap",))
def gated(x, r, h, s, p, u):
    c = torch.tanh(x[0] + r[0]) * p.p + s.c * u.gap
    return torch.sigmoid(x[1] + r[1]) * c, (c,)


class Model(nn.Module):
    """A call of a function, or of a module with arguments by name."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.modules_of_it = function, nn.ModuleList(modules)

    def forward(self, *args):
        return self.function(*self.modules_of_it, *args)


def rows(batch, length):
    return (torch.randn(batch, INPUT),)


def steps(batch, length):
    return (torch.randn(length, batch, INPUT),)


def batch_first(batch, length):
    return (torch.randn(batch, length, INPUT),)


def with_states(batch, length):
    return *steps(batch, length), *(torch.randn(batch, HIDDEN) for _ in range(2))


def with_resets(batch, length):
    return *steps(batch, length), torch.rand(length, batch) < 0.4


def with_resets_to_initial(batch, length):
    return *with_resets(batch, length), *(torch.randn(1, batch, HIDDEN) for _ in range(2))


def with_gaps(batch, length):
    return *steps(batch, length), torch.rand(length, batch)


def own(cell, **options):
    return lltm_ext.Recurrent(cell, INPUT, HIDDEN, **options)


def elementwise(x):
    signs = lltm_ext.binarize(x, 0.1, -1.0, 1.0, "tanh")
    y = lltm_ext.relu_(lltm_ext.round(3 * x)) + lltm_ext.floor(2 * lltm_ext.sigmoid(x)) * signs
    return y + lltm_ext.ReLUFunction.apply(x)


def reset_to_hx(layer, x, reset, h, c):
    return layer(x, (h, c), reset=reset, reset_to="initial")


def call_lltm(layer, x, h, c):
    return lltm_ext.lltm(x, (h, c), layer.weight_ih_l0, layer.weight_hh_l0)


def discounted(x, reset):
    return lltm_ext.scan(0.9, x, x[0], reset=reset, reverse=True)


def gated_scan(x):
    return lltm_ext.scan(torch.sigmoid(x[..., :1]), x)


# The model, and the arguments for a batch size and a length.
OPS = {
    "elementwise": (lambda: Model(elementwise), rows),
    "gemm": (lambda: Model(lambda a: lltm_ext.gemm(a, a.transpose(1, 2), activation="elu")), steps),
    "Linear": (
        lambda: nn.Sequential(lltm_ext.Linear(INPUT, 4, activation="gelu_tanh"), lltm_ext.Linear(4, 3)),
        batch_first,
    ),
    "LLTMCell": (lambda: lltm_ext.LLTMCell(INPUT, HIDDEN), rows),
}
LAYERS = {
    "LLTM": (
        lambda: lltm_ext.LLTM(INPUT, HIDDEN, 2, batch_first=True, bidirectional=True),
        batch_first,
    ),
    "lltm": (lambda: Model(call_lltm, lltm_ext.LLTM(INPUT, HIDDEN)), with_states),
    "own cell": (lambda: Model(lambda m, x, u: m(x, gap=u), own(gated)), with_gaps),
    "several outputs": (lambda: own(lstm_of_both_states, num_layers=2, bidirectional=True), steps),
    "sLSTM with heads": (lambda: own(cells.slstm, heads=2), steps),
    "LSTM with resets": (
        lambda: Model(lambda m, x, r: m(x, reset=r), lltm_ext.LSTM(INPUT, HIDDEN)),
        with_resets,
    ),
    "scan": (lambda: Model(gated_scan), steps),
    "scan with resets": (lambda: Model(discounted), with_resets),
    "resets to hx": (lambda: Model(reset_to_hx, lltm_ext.LLTM(INPUT, HIDDEN)), with_resets_to_initial),
}


def dynamic_dims(args, others):
    """The dimensions of each argument that differ from the other's."""

    def of(x, y):
        return {d: torch.export.Dim.DYNAMIC for d in range(x.dim()) if x.shape[d] != y.shape[d]}

    return tree_map(of, args, others)


def exported(model, args, others, file, dynamo):
    """Exports for both sizes of arguments, and returns the ONNX model."""
    dims = dynamic_dims(args, others)
    if dynamo:
        shapes = (dims,) if isinstance(model, Model) else dims
        torch.onnx.export(model, args, file, dynamo=True, dynamic_shapes=shapes, verbose=False)
    else:
        names = [f"x{i}" for i in range(len(args))]
        axes = {name: list(of_one) for name, of_one in zip(names, dims, strict=True)}
        torch.onnx.export(model, args, file, dynamo=False, input_names=names, dynamic_axes=axes)
    return onnx.load(file)


def run(file, args):
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, args, strict=True)})
    return [torch.from_numpy(y) for y in found]


def check(model, args, others, file, dynamo, bound=1e-5):
    model.eval()
    found = exported(model, args, others, file, dynamo)
    assert not any(node.domain.startswith("lltm_ext") for node in found.graph.node)
    assert_all_near(run(file, others), tree_leaves(model(*tree_map(torch.clone, others))), bound)
    return [node.op_type for node in found.graph.node]


@exporters
@pytest.mark.parametrize("name", OPS)
def test_an_op_for_another_batch(name, dynamo, tmp_path):
    torch.manual_seed(0)
    build, arguments = OPS[name]
    check(build(), arguments(3, 4), arguments(7, 4), str(tmp_path / "model.onnx"), dynamo)


@exporters
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_for_another_batch_and_length(name, dynamo, tmp_path):
    """A trace has the length of its example."""
    torch.manual_seed(0)
    build, arguments = LAYERS[name]
    others = arguments(7, 9 if dynamo else 4)
    types = check(build(), arguments(3, 4), others, str(tmp_path / "model.onnx"), dynamo)
    assert ("Scan" in types) == dynamo


def test_an_lstm_for_any_length(tmp_path):
    """The exporter refuses that of torch's own."""
    layer = lltm_ext.LSTM(INPUT, HIDDEN)
    assert "Scan" in check(layer, steps(3, 4), steps(7, 9), str(tmp_path / "model.onnx"), True)


@pytest.mark.parametrize("name,is_decomposed", [("Linear", False), ("own cell", False), ("own cell", True)])
def test_an_exported_program(name, is_decomposed, tmp_path):
    torch.manual_seed(0)
    build, arguments = (OPS | LAYERS)[name]
    model, args, others, file = build(), arguments(3, 4), arguments(7, 9), str(tmp_path / "model.onnx")
    dims = dynamic_dims(args, others)
    shapes = (dims,) if isinstance(model, Model) else dims
    program = torch.export.export(model, args, dynamic_shapes=shapes)
    torch.onnx.export(program.run_decompositions() if is_decomposed else program, args, file, verbose=False)
    assert_all_near(run(file, others), tree_leaves(model(*others)), 1e-5)


# ---- quantization

PAIR = ["QuantizeLinear", "DequantizeLinear"]
# The integers, and what FakeQuantize takes besides them.
GRIDS = [
    (-128, 127, {}),
    (0, 255, {"zero_point": 100}),
    (-127, 127, {}),
    (0, 15, {"zero_point": 7, "learn_zero_point": True}),
    (-128, 127, {"num_channels": INPUT, "axis": -1}),
    (-8, 7, {"num_channels": INPUT, "axis": 1, "learn_scale": False}),
]


@exporters
def test_fake_quantize_is_a_pair_of_nodes(dynamo, tmp_path):
    torch.manual_seed(0)
    layers = [lltm_ext.FakeQuantize(low, high, scale=1 / 32, **how) for low, high, how in GRIDS]
    with torch.no_grad():
        for layer in layers:
            layer.scale *= 2.0 ** (torch.arange(layer.scale.numel()) % 3)
    model = Model(lambda *args: tuple(layer(args[-1]) for layer in layers), *layers)
    file = str(tmp_path / "model.onnx")
    types = check(model, rows(3, 4), rows(7, 4), file, dynamo, bound=0)
    assert types.count("QuantizeLinear") == types.count("DequantizeLinear") == len(GRIDS)
    nodes = onnx.load(file).graph.node
    readers = {node.input[0]: node.op_type for node in nodes if node.op_type == "DequantizeLinear"}
    assert all(node.output[0] in readers for node in nodes if node.op_type == "QuantizeLinear")
    if dynamo:  # else the arithmetic of the parameters is left to the runtime
        assert set(types) == {*PAIR, "Clip", "Max", "Min"}


@exporters
def test_fake_quantize_of_more_bits_is_arithmetic(dynamo, tmp_path):
    layer = lltm_ext.FakeQuantize(-(2**15), 2**15 - 1, scale=1 / 1024)
    assert "Round" in check(layer, rows(3, 4), rows(7, 4), str(tmp_path / "model.onnx"), dynamo, bound=0)


@exporters
def test_a_network_trained_for_quantization(dynamo, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        lltm_ext.FakeQuantize(0, 255, scale=1 / 32, zero_point=128),
        lltm_ext.Linear(INPUT, 4, activation="relu"),
        lltm_ext.FakeQuantize(0, 255, scale=1 / 64),
        nn.Linear(4, 3),
    )
    types = check(model, rows(3, 4), rows(7, 4), str(tmp_path / "model.onnx"), dynamo)
    assert [x for x in types if x.endswith("eLinear")] == PAIR * 2
    assert types.count("Relu") == 1


# ---- what has no form in ONNX


def test_a_packed_sequence_is_refused(tmp_path):
    def run_packed(layer, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0]

    model, args = Model(run_packed, own(cells.janet)), (*steps(3, 4), torch.tensor([4, 2, 3]))
    with pytest.raises(NotImplementedError, match=r"^janet: expected padded input for ONNX, got a Packed"):
        torch.onnx.export(model, args, str(tmp_path / "model.onnx"), dynamo=False)


@exporters
def test_an_op_without_a_form_is_named(dynamo, tmp_path):
    model = lltm_ext.StochasticRound(torch.bfloat16)
    with pytest.raises(Exception) as caught, warnings.catch_warnings():
        torch.onnx.export(model, rows(3, 4), str(tmp_path / "model.onnx"), dynamo=dynamo, verbose=False)
    error = caught.value
    assert "stochastic_round" in f"{error} {error.__cause__}"


def test_the_cell_of_a_program_has_to_be_declared():
    from lltm_ext import _onnx

    text = lltm_ext.recurrence(name="text", gates=1, forward="new_h = tanh(x[0]);")
    for program, name in ((text.program, "text"), (gated.program + " ", "gated")):
        nothing = (None,) * 7
        with pytest.raises(NotImplementedError, match=f"^{name}: expected a cell of a Python function"):
            _onnx.custom_cell(torch.randn(2, 3, 4), None, *nothing, None, False, "auto", program)


def test_the_package_imports_no_exporter():
    code = "import sys, lltm_ext; print([m for m in sys.modules if m.startswith(('onnx', 'torch.onnx'))])"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
