"""Tools that know torch's ops take ours too: torch.utils.flop_counter, torch.fx and torch.jit.script."""

import contextlib
import copy
import io
import pickle

import forks
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lltm_ext

SIZE, H, T, B = 8, 6, 5, 4
ROWS = T * B


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def forward_and_training(module, *inputs):
    """(the operations of a call, and of a call with its backward)"""

    def output():
        found = module(*inputs)
        return found if isinstance(found, torch.Tensor) else found[0]

    return counted(output), counted(lambda: output().sum().backward())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_linear_layer_counts_like_torchs(requires_grad):
    input = torch.randn(T, B, SIZE, requires_grad=requires_grad)
    ours, theirs = (forward_and_training(m(SIZE, H), input) for m in (lltm_ext.Linear, nn.Linear))
    assert ours == theirs


def test_batched_products_count_like_torchs():
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    assert counted(lambda: lltm_ext.gemm(a, b)) == counted(lambda: torch.bmm(a, b)) == 2 * 3 * 4 * 5 * 6


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("name,gates", [("LSTM", 4), ("GRU", 3), ("RNN", 1), ("LLTM", 3)])
def test_a_sequence_counts_its_products(name, gates, directions):
    layer = getattr(lltm_ext, name)(SIZE, H, bidirectional=directions == 2)
    of_input, of_h = (2 * ROWS * gates * H * size * directions for size in (SIZE, H))
    forward = of_input + of_h
    for input, backward in (
        (torch.randn(T, B, SIZE, requires_grad=True), 2 * forward),
        (torch.randn(T, B, SIZE), 2 * forward - of_input),
    ):
        assert forward_and_training(layer, input) == (forward, forward + backward)
    if name in ("GRU", "RNN"):  # of torch's LSTM on the CPU nothing is counted
        peer = getattr(nn, name)(SIZE, H, bidirectional=directions == 2)
        assert counted(lambda: peer(torch.randn(T, B, SIZE))) == forward


def test_a_weight_of_a_cells_own_counts_as_often_as_a_step_uses_it():
    @lltm_ext.recurrence(gates=1, weights=("square",))
    def twice(x, h, w, units):
        return torch.tanh(x[0] + units.linear(torch.tanh(units.linear(h, w.square)), w.square))

    layer, input = lltm_ext.Recurrent(twice, SIZE, H), torch.randn(T, B, SIZE, requires_grad=True)
    forward = 2 * ROWS * (H * SIZE + 3 * H * H)
    assert forward_and_training(layer, input) == (forward, 3 * forward)


def test_a_step_counts_its_products():
    cell, input = lltm_ext.LLTMCell(SIZE, H), torch.randn(B, SIZE, requires_grad=True)
    forward = 2 * B * 3 * H * (SIZE + H)
    assert forward_and_training(cell, input, (torch.zeros(B, H), torch.zeros(B, H))) == (forward, 3 * forward)


def test_torch_fx_traces_through_a_module_with_a_forward_of_its_own():
    class Doubled(lltm_ext.ReLU):
        def forward(self, input):
            return 2 * input

    traced = torch.fx.symbolic_trace(nn.Sequential(Doubled()))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_function", "output"]


# ---- functions and torch.fx, or another type that implements torch's functions -----------------------------

STATE, WEIGHT = torch.zeros(B, H), torch.ones(2 * H, H) / H
CALLS = {
    "relu": lambda x: lltm_ext.relu(x),
    "relu_": lambda x: lltm_ext.relu_(2 * x),
    "sigmoid": lambda x: lltm_ext.sigmoid(x),
    "round": lambda x: lltm_ext.round(x),
    "binarize": lambda x: lltm_ext.binarize(x, 0.2),
    "binarize_": lambda x: lltm_ext.binarize_(2 * x, 0.2),
    "gemm": lambda x: lltm_ext.gemm(x, x, activation="gelu"),
    "gemm, b": lambda x: lltm_ext.gemm(torch.ones(T, B, B), x),
    "gemm, bias": lambda x: lltm_ext.gemm(STATE, STATE.t(), bias=x[0, :, 0]),
    "fake_quantize": lambda x: lltm_ext.fake_quantize(x, 0.1, 0, -8, 7),
    "fake_quantize, scale": lambda x: lltm_ext.fake_quantize(STATE + 1, x.abs().amax(), 0, -8, 7),
    "stochastic_round": lambda x: lltm_ext.stochastic_round(lltm_ext.round(x), torch.bfloat16),
    "lltm_cell": lambda x: lltm_ext.lltm_cell(x[0], torch.ones(3 * H, H + B), None, STATE, STATE),
    "lltm": lambda x: lltm_ext.lltm(x, (STATE, STATE), torch.ones(3 * H, B), torch.ones(3 * H, H))[0],
    "lstm, c0": lambda x: lltm_ext.lstm(
        torch.ones(T, B, H), (STATE, STATE + x.sum()), torch.ones(4 * H, H), torch.ones(4 * H, H)
    )[0],
    "ugrnn": lambda x: lltm_ext.cells.ugrnn(x, STATE, WEIGHT[:, :B], WEIGHT)[0],
    "ugrnn, h0": lambda x: lltm_ext.cells.ugrnn(torch.ones(T, B, H), STATE + x.sum(), WEIGHT, WEIGHT)[0],
    "ugrnn, weight_ih": lambda x: lltm_ext.cells.ugrnn(torch.ones(T, B, H), STATE, WEIGHT + x.sum(), WEIGHT)[
        0
    ],
    "squared": lambda x: squared(x),
}
squared = lltm_ext.elementwise("T squared(T x)", "return x * x;", cpu=torch.square)


@pytest.mark.parametrize("call", CALLS)
def test_torch_fx_makes_a_node_of_a_function(call):
    function, input = CALLS[call], torch.randn(T, B, B)
    traced = torch.fx.symbolic_trace(function)
    targets = [getattr(node.target, "__name__", "") for node in traced.graph.nodes]
    assert call.partition(",")[0] in targets
    torch.testing.assert_close(traced(input), function(input))


class Recorder:
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function, types, args, kwargs


def test_a_type_with_torch_function_gets_the_call():
    x, weight = Recorder(), torch.ones(2, 2)
    assert lltm_ext.relu(x) == (lltm_ext.relu, (Recorder,), (x,), {})
    function, types, args, kwargs = lltm_ext.gemm(weight, x, activation="relu")
    assert function is lltm_ext.gemm and types == (Recorder,) and args[1] is x
    assert kwargs == {"activation": "relu", "precision": "ieee"}
    cell = lltm_ext.cells.ugrnn
    function, types, args, kwargs = cell(weight, weight, x, weight, algorithm="stepwise")
    assert function is cell and types == (Recorder,) and args[2] is x and kwargs["algorithm"] == "stepwise"


class Subclass(torch.Tensor):
    pass


def test_an_error_with_a_subclass_of_tensor_is_that_of_a_tensor():
    x = torch.ones(T, B, H).as_subclass(Subclass)
    with pytest.raises(TypeError, match="expected weight_ih of dtype float32, got float64"):
        lltm_ext.cells.ugrnn(x, STATE, WEIGHT.double(), WEIGHT)


@pytest.mark.parametrize("value", [None, 3, "x", torch.Tensor])
def test_another_value_is_an_error_that_names_the_argument(value):
    for function in (
        lambda: lltm_ext.relu(value),
        lambda: lltm_ext.relu_(value),
        lambda: lltm_ext.fake_quantize(value, 1, 0, 0, 1),
        lambda: lltm_ext.cells.ugrnn(value, STATE, WEIGHT, WEIGHT),
    ):
        for mode in (
            contextlib.nullcontext(),
            torch.device("cpu"),
        ):  # a device is a mode of torch's functions
            with mode, pytest.raises(TypeError, match="expected input to be a Tensor, got"):
                function()


# ---- torch.jit.script --------------------------------------------------------------------------------------


def scripts_of(model):
    """A scripted model, and one saved and loaded."""
    scripted = torch.jit.script(copy.deepcopy(model))
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return scripted, torch.jit.load(file)


def check_script(model, *args, gradients=True, scripts=None, **kwargs):
    """Compares scripted models with the model: results and gradients."""
    expected = outputs_and_gradients(model, args, kwargs, gradients)
    for other in scripts or scripts_of(model):
        found = outputs_and_gradients(other, args, kwargs, gradients)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def outputs_and_gradients(model, args, kwargs, gradients):
    args = [x.clone().requires_grad_(gradients) if i == 0 else x for i, x in enumerate(args)]
    output = model(*args, **kwargs)
    first = output if isinstance(output, torch.Tensor) else output[0]
    return output, torch.autograd.grad(first.float().square().sum(), args[0]) if gradients else None


@lltm_ext.recurrence(gates=2, inputs=("time",), parameters=("rate", "shift"))
def timed(x, h, u, p):
    return torch.tanh(x[0]) * u.time * p.rate + h * torch.sigmoid(x[1] + p.shift)


SCRIPTED = {
    "Linear": lambda: lltm_ext.Linear(SIZE, H, bias=False),
    "ReLU in place": lambda: nn.Sequential(lltm_ext.Linear(SIZE, H), lltm_ext.ReLU(inplace=True)),
    "Binarize": lambda: lltm_ext.Binarize(0, -1, 1, grad="tanh"),
    "FakeQuantize": lambda: lltm_ext.FakeQuantize(-8, 7, 0.1, num_channels=SIZE, axis=-1),
    "GRU": lambda: nn.Sequential(lltm_ext.GRU(SIZE, H, bidirectional=True)),
    "LLTM": lambda: lltm_ext.LLTM(SIZE, H, 2, bidirectional=True),
}


@pytest.mark.parametrize("module", SCRIPTED)
def test_torch_script(module):
    check_script(SCRIPTED[module](), torch.randn(T, B, SIZE))


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}])
@pytest.mark.parametrize("cell", ["gru", "lstm", "slstm", "peephole_lstm"])
def test_a_trace_of_an_own_cell_takes_other_sizes(cell, options):
    layer = lltm_ext.Recurrent(getattr(lltm_ext.cells, cell), SIZE, H, **options)
    traced = torch.jit.trace(layer, torch.randn(T, B, SIZE))
    input = torch.randn(3, 2, SIZE)
    torch.testing.assert_close(traced(input), layer(input))


def test_torch_script_of_random_rounding():
    module, input = lltm_ext.StochasticRound(torch.bfloat16), torch.randn(100)
    torch.manual_seed(0)
    expected = module(input)
    torch.manual_seed(0)
    assert torch.equal(torch.jit.script(module)(input), expected)


def test_torch_script_of_a_step():
    cell, hx = lltm_ext.LLTMCell(SIZE, H), (torch.randn(B, H), torch.randn(B, H))
    check_script(cell, torch.randn(B, SIZE))
    check_script(cell, torch.randn(B, SIZE), hx)
    check_script(cell, torch.randn(SIZE))


BOTH = {"num_layers": 2, "bidirectional": True}


@pytest.mark.parametrize(
    "cell,options",
    [
        *(("gru", options) for options in ({}, BOTH, {"batch_first": True})),
        ("lstm", {"batch_first": True}),
        ("slstm", BOTH),
        ("indrnn", {}),
        ("peephole_lstm", BOTH),
    ],
)
def test_torch_script_of_an_own_cell(cell, options):
    cell = getattr(lltm_ext.cells, cell)
    layer = lltm_ext.Recurrent(cell, SIZE, H, **options)
    slices, input = 4 if "num_layers" in options else 1, torch.randn(T, T, SIZE)
    hx = tuple(torch.rand(slices, T, H) for _ in cell.state_names)
    hx = hx if cell.states else hx[0]
    reset = torch.rand(T, T) < 0.3
    scripts = scripts_of(layer)
    check_script(layer, input, scripts=scripts)
    check_script(layer, input, hx, scripts=scripts)
    check_script(layer, input, hx, reset=reset, scripts=scripts)
    check_script(layer, input, reset=reset.float(), scripts=scripts)
    check_script(layer.bfloat16(), input.bfloat16())


def test_torch_script_of_step_inputs_heads_and_dropout():
    layer = lltm_ext.Recurrent(timed, SIZE, H, 2, batch_first=True, heads=2, dropout=0.5).eval()
    for shape in ((B, T), (B, T, H)):
        check_script(layer, torch.randn(B, T, SIZE), time=torch.rand(shape))
    scripted, input, time = torch.jit.script(layer.train()), torch.randn(B, T, SIZE), torch.rand(B, T)
    assert not torch.equal(scripted(input, time=time)[0], scripted(input, time=time)[0])
    with pytest.raises(Exception, match="input of the steps is missing"):
        scripted(input)


def test_a_model_that_was_scripted_stays_as_it_was():
    """torch.jit.script puts what it compiles into the model that it is given."""
    model = nn.Sequential(lltm_ext.Recurrent(lltm_ext.cells.gru, SIZE, H))
    input = nn.utils.rnn.pack_sequence([torch.randn(3, SIZE), torch.randn(2, SIZE)])
    expected = model(input)[0].data
    torch.jit.script(model)
    torch.jit.script(model)
    assert isinstance(model[0], lltm_ext.Recurrent) and torch.equal(model(input)[0].data, expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is lltm_ext.Recurrent and torch.equal(other(input)[0].data, expected)


def call_functions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = lltm_ext.gemm(x, w, activation="gelu") + lltm_ext.round(lltm_ext.sigmoid(x))
    lltm_ext.relu_(y)
    h = torch.zeros_like(y)
    h, c = lltm_ext.lltm_cell(y, torch.cat([w, w]).repeat(3, 1).reshape(3 * 6, 12), None, h, h)
    return lltm_ext.binarize(h, 0.1, grad="clipped") + lltm_ext.fake_quantize(
        c, torch.tensor(0.1), torch.tensor(0), -8, 7
    )


def test_torch_script_calls_functions():
    check_script(call_functions, torch.randn(H, H), torch.randn(H, H))


def test_torch_script_of_a_function_with_other_arguments_is_an_error():
    def call(x: torch.Tensor):
        return lltm_ext.lltm(x, (x, x), x, x)

    with pytest.raises(RuntimeError, match="a script can have a layer"):
        torch.jit.script(call)


@pytest.mark.parametrize("module", ["torch.utils.flop_counter", "torch._dynamo, torch.onnx"])
def test_the_package_may_be_imported_after_a_tool_that_it_tells_of_its_ops(module, tmp_path):
    done = forks.run("-c", f"import {module}, lltm_ext", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
