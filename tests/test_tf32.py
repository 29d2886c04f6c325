"""Float32 of sequences on CUDA: TF32 where nn.LSTM's own switch allows it, whatever other switches say."""

import copy
import functools

import pytest
import torch
from op_suite import BACKWARD, FORWARD, Call, Make, forward_and_gradients, needs_cuda
from sequence_suite import OPS, relative_errors
from torch import nn
from torch.backends import cudnn

import lltm_ext
from lltm_ext import _portable, cells

pytestmark = needs_cuda

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
TF32 = pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs a GPU with TF32")
HOPPER = pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs Hopper, whose persistent kernels use TF32")
IEEE_ERROR, TF32_ERROR = 1e-5, 5e-5  # at most; of a product at least

LAYERS = {
    "LLTM": lltm_ext.LLTM,
    "LSTM": lltm_ext.LSTM,
}
if not _portable.in_use:  # it lacks their kernels
    LAYERS |= {
        "GRU": lltm_ext.GRU,
        "RNN": lltm_ext.RNN,
        "Recurrent": functools.partial(lltm_ext.Recurrent, cells.cifg),
    }
# Length, batch, units: kernels of every kind (recurrence/persistent/variants.h).
SIZES = [(20, 300, 64), (20, 16, 128), (20, 100, 128), (20, 300, 128)]
SIZES += [(50, 32, 256), (20, 64, 512), (20, 16, 1024), (4, 256, 1024)]
SIZES += [(9, 300, 512), (9, 96, 1024)]  # the backward is of another kind than the forward
ops = pytest.mark.parametrize("op", OPS)
algorithms = pytest.mark.parametrize("algorithm", ["stepwise", pytest.param("grid", marks=HOPPER)])


def set_allow_tf32(allowed):
    cudnn.allow_tf32 = allowed


def set_precision_of_rnn(allowed):
    cudnn.rnn.fp32_precision = "tf32" if allowed else "ieee"


def set_precision_of_cudnn(allowed):
    cudnn.rnn.fp32_precision = "none"
    cudnn.fp32_precision = "tf32" if allowed else "ieee"


@pytest.fixture(autouse=True)
def defaults_after():
    yield
    cudnn.fp32_precision = "none"
    torch.backends.cuda.matmul.allow_tf32 = False


def exact_of(call, function):
    return forward_and_gradients(function, call.map(torch.Tensor.double))


def call_of(op, length, batch, size, bias=True):
    return OPS[op].call(Make(torch.float32, "cuda"), length, batch, size, input_size=size, bias=bias)


# ---- which switch ------------------------------------------------------------------------------------------


def outputs_and_gradients(layer, input):
    input = input.detach().requires_grad_()
    output = layer(input)[0]
    grad = Make(torch.float32, "cuda", seed=1)(*output.shape).to(output.dtype)
    return [output], torch.autograd.grad(output, [input, *layer.parameters()], grad)


@TF32
@pytest.mark.parametrize("matmul", [False, True], ids=["matmul IEEE", "matmul TF32"])
@pytest.mark.parametrize("allow", [set_allow_tf32, set_precision_of_rnn, set_precision_of_cudnn])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_use_tf32_where_nn_lstm_may(kind, allow, matmul):
    torch.backends.cuda.matmul.allow_tf32 = matmul
    layer = LAYERS[kind](96, 64, bidirectional=True, device="cuda")
    input = Make(torch.float32, "cuda")(9, 16, 96)
    exact, exact_gradients = outputs_and_gradients(copy.deepcopy(layer).double(), input.double())
    for allowed in (False, True):
        allow(allowed)
        found, gradients = outputs_and_gradients(layer, input)
        of_outputs, of_gradients = relative_errors(found, exact), relative_errors(gradients, exact_gradients)
        if allowed:
            assert min(of_outputs + of_gradients) > FORWARD[torch.float32]
        else:
            assert max(of_outputs) < FORWARD[torch.float32]
            assert max(of_gradients) < BACKWARD[torch.float32]


@TF32
def test_torchs_own_switch_is_on_by_default():
    cudnn.allow_tf32 = True  # as torch sets it at first; conftest.py turns it off
    layer, input = lltm_ext.LSTM(64, 64, device="cuda"), Make(torch.float32, "cuda")(4, 8, 64)
    exact, _ = outputs_and_gradients(copy.deepcopy(layer).double(), input.double())
    assert relative_errors(outputs_and_gradients(layer, input)[0], exact)[0] > FORWARD[torch.float32]


@TF32
def test_a_sequence_leaves_torchs_switches_as_they_were():
    x = Make(torch.float32, "cuda")(256, 256)
    for matmul, rnn in ((False, True), (True, False)):
        torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32 = matmul, rnn
        before = x @ x
        forward_and_gradients(functools.partial(OPS["lltm"], algorithm="stepwise"), call_of("lltm", 3, 8, 64))
        assert (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32) == (matmul, rnn)
        assert torch.equal(x @ x, before)


# ---- which products ----------------------------------------------------------------------------------------


@TF32
@ops
@pytest.mark.parametrize("matmul", [False, True], ids=["matmul IEEE", "matmul TF32"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("width", [256, 97])
def test_the_input_projection(op, bias, matmul, width):
    """One step from h0 = 0 has no other product. Rows of 97 numbers are not aligned."""
    torch.backends.cuda.matmul.allow_tf32 = matmul
    call = call_of(op, 1, 64, 256, bias)
    call.args[1].zero_()
    input, weight_ih = call.args[0][..., :width].contiguous(), call.args[3][:, :width].contiguous()
    call = Call(input, *call.args[1:3], weight_ih, *call.args[4:])
    exact = call.map(torch.Tensor.double).run(OPS[op].loop)
    for allowed in (False, True):
        cudnn.allow_tf32 = allowed
        found = relative_errors(call.run(functools.partial(OPS[op], algorithm="stepwise")), exact)
        if not allowed:
            assert max(found) < IEEE_ERROR
        elif width % 4 == 0:  # for others cuBLAS may have no kernel in TF32
            assert min(found) > IEEE_ERROR


@TF32
@ops
@algorithms
@pytest.mark.parametrize("matmul", [False, True], ids=["matmul IEEE", "matmul TF32"])
def test_the_products_of_the_backward(op, algorithm, matmul):
    """One step whose inputs have 8 bits, which TF32 does not round: only the gates' gradients are rounded."""
    torch.backends.cuda.matmul.allow_tf32 = matmul
    call = call_of(op, 1, 64, 256).map(lambda x: x.bfloat16().float())
    exact, exact_gradients = exact_of(call, OPS[op].loop)
    for allowed in (False, True):
        cudnn.allow_tf32 = allowed
        found, gradients = forward_and_gradients(functools.partial(OPS[op], algorithm=algorithm), call)
        assert max(relative_errors(found, exact)) < IEEE_ERROR
        input, h0, c0, weight_ih, weight_hh, bias = relative_errors(gradients, exact_gradients)
        assert max(c0, bias) < IEEE_ERROR
        of_products = (input, h0, weight_ih, weight_hh)
        assert min(of_products) > TF32_ERROR if allowed else max(of_products) < IEEE_ERROR


# ---- how well ----------------------------------------------------------------------------------------------


@TF32
@pytest.mark.parametrize("length,batch,size", SIZES, ids=str)
def test_errors_are_at_most_those_of_nn_lstm(length, batch, size):
    cudnn.allow_tf32 = True
    layer, peer = lltm_ext.LSTM(size, size, device="cuda"), nn.LSTM(size, size, device="cuda")
    layer.load_state_dict(peer.state_dict())
    input = Make(torch.float32, "cuda")(length, batch, size)
    exact = outputs_and_gradients(copy.deepcopy(layer).double(), input.double())
    ours, theirs = (
        relative_errors([*found, *gradients], [*exact[0], *exact[1]])
        for found, gradients in (outputs_and_gradients(layer, input), outputs_and_gradients(peer, input))
    )
    names = ("output", "input", *(name for name, _ in peer.named_parameters()))
    assert {n: x / y for n, x, y in zip(names, ours, theirs, strict=True) if x > 1.1 * y} == {}


@TF32
@ops
@pytest.mark.parametrize(
    "algorithm,length", [("stepwise", 30), pytest.param("grid", 30, marks=HOPPER), ("auto", 1)]
)
def test_rounding_has_no_bias(op, algorithm, length):
    """Of positive numbers, cut off ones would make every sum too small, by 2.6 of their spread."""
    cudnn.allow_tf32 = True
    input, h0, c0, weight_ih, weight_hh, bias = (x.abs() for x in call_of(op, length, 40, 256).args)
    call = Call(input, h0, c0, weight_ih / 16, weight_hh / 16, bias)
    exact = call.map(torch.Tensor.double).run(OPS[op].loop)
    found = call.run(functools.partial(OPS[op], algorithm=algorithm))
    error = found[0].double() - exact[0]
    assert error.std() > 1e-6  # that of IEEE float32 is 1e-7
    assert error.mean().abs() < 0.5 * error.std()
