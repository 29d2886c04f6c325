"""A script like that of PyTorch's tutorial on C++ extensions: a user's must run unchanged."""

import math

import pytest
import torch
from op_suite import BACKWARD, DOUBLE, FORWARD, Call, Make, assert_accurate, assert_all_near, assert_same_bits

import lltm_ext
from lltm_ext import _C, LLTMFunction
from lltm_ext.lltm import lltm_cell_reference


class HandWrittenFunction(torch.autograd.Function):
    """A user's own Function over the raw bindings."""

    @staticmethod
    def forward(ctx, input, weights, bias, old_h, old_cell):
        outputs = _C.lltm.forward(input, weights, bias, old_h, old_cell)
        new_h, new_cell = outputs[:2]
        ctx.save_for_backward(*outputs[1:], weights)
        return new_h, new_cell

    @staticmethod
    def backward(ctx, grad_h, grad_cell):
        outputs = _C.lltm.backward(grad_h.contiguous(), grad_cell.contiguous(), *ctx.saved_tensors)
        d_old_h, d_input, d_weights, d_bias, d_old_cell = outputs
        return d_input, d_weights, d_bias, d_old_h, d_old_cell


class LLTM(torch.nn.Module):
    def __init__(self, input_features, state_size, function=LLTMFunction, bias_shape=None):
        super().__init__()
        self.input_features = input_features
        self.state_size = state_size
        self.function = function
        self.weights = torch.nn.Parameter(torch.empty(3 * state_size, input_features + state_size))
        self.bias = torch.nn.Parameter(torch.empty(bias_shape or 3 * state_size))
        self.reset_parameters()

    def reset_parameters(self):
        bound = 1.0 / math.sqrt(self.state_size)
        for weight in self.parameters():
            weight.data.uniform_(-bound, +bound)

    def forward(self, input, state):
        return self.function.apply(input, self.weights, self.bias, *state)


BATCH, FEATURES, STATE = 16, 32, 128

functions = pytest.mark.parametrize("function", [LLTMFunction, HandWrittenFunction])
biases = pytest.mark.parametrize("bias_shape", [(3 * STATE,), (1, 3 * STATE)], ids=str)


def random_step(device, dtype):
    make = Make(dtype, device)
    return make(BATCH, FEATURES), (make(BATCH, STATE), make(BATCH, STATE))


@functions
@biases
def test_one_step_equals_the_reference(function, bias_shape, dtype, device):
    rnn = LLTM(FEATURES, STATE, function, bias_shape).to(device, dtype)
    x, (h, c) = random_step(device, dtype)
    call = Call(x, rnn.weights, rnn.bias, h, c)
    assert_accurate(function.apply, lltm_cell_reference, call, dtype)
    assert_same_bits(rnn(x, (h, c)), call.run(function.apply))


@functions
def test_the_training_loop_runs(function, device):
    torch.manual_seed(0)
    X = torch.randn(BATCH, FEATURES, device=device)
    h = torch.randn(BATCH, STATE, device=device)
    C = torch.randn(BATCH, STATE, device=device)
    rnn = LLTM(FEATURES, STATE, function).to(device)
    optimizer = torch.optim.SGD(rnn.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        new_h, new_C = rnn(X, (h, C))
        loss = new_h.sum() + new_C.sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@biases
def test_a_tutorial_checkpoint_loads_into_the_cell(bias_shape, tmp_path, device):
    rnn = LLTM(FEATURES, STATE, bias_shape=bias_shape).to(device)
    torch.save(rnn.state_dict(), tmp_path / "checkpoint.pt")
    cell = lltm_ext.LLTMCell(FEATURES, STATE, device=device)
    state_dict = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    cell.load_state_dict(state_dict)
    assert state_dict["bias"].shape == bias_shape  # loading does not change the caller's dict
    x, state = random_step(device, torch.float32)
    assert_same_bits(cell(x, state), rnn(x, state))


def test_a_tutorial_checkpoint_loads_into_a_cell_within_a_model():
    model = torch.nn.ModuleDict({"rnn": LLTM(FEATURES, STATE, bias_shape=(1, 3 * STATE))})
    ours = torch.nn.ModuleDict({"rnn": lltm_ext.LLTMCell(FEATURES, STATE)})
    ours.load_state_dict(model.state_dict())
    assert torch.equal(ours["rnn"].bias, model["rnn"].bias[0])
    with pytest.raises(RuntimeError, match=r"size mismatch for rnn\.bias"):
        ours.load_state_dict({**model.state_dict(), "rnn.bias": torch.zeros(2, 3 * STATE)})


def raw_arguments(dtype=torch.float32, device="cpu"):
    make = Make(dtype, device)
    arguments = {"input": make(4, 3), "weights": make(15, 8, scale=0.3), "bias": make(15)}
    arguments |= {"old_h": make(4, 5), "old_cell": make(4, 5)}
    forward = _C.lltm.forward(*arguments.values())
    names = ("new_cell", "input_gate", "output_gate", "candidate_cell", "X", "gate_weights")
    saved = dict(zip(names, forward[1:], strict=True))
    gradients = {"grad_h": make(4, 5), "grad_cell": make(4, 5)}
    return arguments, gradients | saved | {"weights": arguments["weights"]}


def test_the_raw_forward_returns_the_tutorials_list(dtype, device):
    arguments, _ = raw_arguments(dtype, device)
    outputs = _C.lltm.forward(**arguments)
    assert isinstance(outputs, list)
    exact = {name: x.double() for name, x in arguments.items()}
    X = torch.cat([exact["old_h"], exact["input"]], 1)
    gate_weights = X @ exact["weights"].t() + exact["bias"]
    i, o, z = gate_weights.chunk(3, 1)
    i, o, z = i.sigmoid(), o.sigmoid(), torch.nn.functional.elu(z)
    new_cell = exact["old_cell"] + z * i
    assert_all_near(outputs, [new_cell.tanh() * o, new_cell, i, o, z, X, gate_weights], FORWARD[dtype])
    assert all(y.is_contiguous() and y.dtype == dtype for y in outputs)


def test_the_raw_backward_returns_the_tutorials_list(device):
    arguments, backward = raw_arguments(DOUBLE, device)
    found = _C.lltm.backward(**backward)
    assert isinstance(found, list)
    leaves = {name: x.clone().requires_grad_() for name, x in arguments.items()}
    outputs = lltm_cell_reference(**leaves)
    inputs = [leaves[name] for name in ("old_h", "input", "weights", "bias", "old_cell")]
    expected = torch.autograd.grad(outputs, inputs, [backward["grad_h"], backward["grad_cell"]])
    found[3] = found[3].view(15)  # [1, 3H], as the tutorial sums it
    assert_all_near(found, expected, BACKWARD[DOUBLE])


def test_the_raw_forward_without_bias_equals_a_bias_of_zeros(device):
    arguments, _ = raw_arguments(DOUBLE, device)
    without = _C.lltm.forward(**{**arguments, "bias": None})
    zeros = _C.lltm.forward(**{**arguments, "bias": torch.zeros(15, dtype=DOUBLE, device=device)})
    assert_all_near(without, zeros, FORWARD[DOUBLE])


BINDINGS = ("forward", "backward")
COMPARED_WITH = {"forward": ("input",), "backward": ("weights", "X", "new_cell")}


def bad_inputs(x):
    """Values that CHECK_INPUT refuses in place of x: (value, exception, end of its message)."""
    yield torch.stack([x, x], -1)[..., 0], RuntimeError, "to be contiguous, got strides"
    yield x.long(), TypeError, "of dtype .*, got int64"
    yield x.double(), TypeError, "of dtype .*, got float"
    yield torch.cat([x, x]), RuntimeError, r"of shape .*, got \["
    yield x.to_sparse(), RuntimeError, "of layout torch.strided, got Sparse"


@pytest.mark.parametrize(
    "binding,name",
    [(binding, name) for binding, names in zip(BINDINGS, raw_arguments(), strict=True) for name in names],
)
def test_the_raw_bindings_refuse_bad_inputs(binding, name, device):
    arguments = dict(zip(BINDINGS, raw_arguments(device=device), strict=True))[binding]
    function = getattr(_C.lltm, binding)
    good = function(**arguments)
    for value, exception, pattern in bad_inputs(arguments[name]):
        # The others are compared with these, so the message may name another one.
        argument = r"\w+" if name in COMPARED_WITH[binding] else name
        with pytest.raises(exception, match=f"^lltm.{binding}: expected {argument} {pattern}"):
            function(**{**arguments, name: value})
    assert_same_bits(function(**arguments), good)


def test_the_raw_bindings_refuse_other_types_than_tensors():
    for binding, name, arguments in zip(BINDINGS, ("weights", "X"), raw_arguments(), strict=True):
        with pytest.raises(TypeError, match=rf"{binding}\(\): incompatible function arguments"):
            getattr(_C.lltm, binding)(**{**arguments, name: None})
