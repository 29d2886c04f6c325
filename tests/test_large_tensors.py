"""More than 2^31 elements: all offsets are 64-bit. Needs a GPU with enough memory."""

import copy
import math

import pytest
import torch
from op_suite import FORWARD, assert_near, needs_cuda

import lltm_ext

pytestmark = needs_cuda
HALF = torch.float16


def half(*shape):
    return torch.empty(*shape, dtype=HALF, device="cuda").normal_()


def first_and_last(size):
    return slice(0, 64), slice(size - 64, size)


GIB = 2**30


@pytest.fixture(autouse=True)
def memory():
    """Skips a test that needs more free memory, in GiB, than there is. Frees what it took."""
    torch.cuda.empty_cache()

    def need(gib):
        free, _ = torch.cuda.mem_get_info()
        if free < gib * GIB:
            pytest.skip(f"needs {gib} GiB of free GPU memory, found {free / GIB:.0f}")

    yield need
    torch.cuda.empty_cache()


@pytest.mark.parametrize("n", [2**31 + 2**20 + 17, 2**32 + 17], ids=["2^31", "2^32"])
@pytest.mark.parametrize("function", [lltm_ext.sigmoid, lltm_ext.relu, lltm_ext.round])
def test_elementwise(function, n, memory):
    memory(12 * n / GIB)
    torch.manual_seed(0)
    x, grad_output = half(n).requires_grad_(), half(n)
    y = function(x)
    (gradient,) = torch.autograd.grad(y, x, grad_output)
    for start in range(0, n, 2**28):
        piece = slice(start, min(start + 2**28, n))
        part = x[piece].detach().requires_grad_()
        expected = function(part)
        assert torch.equal(y[piece], expected)
        assert torch.equal(gradient[piece], torch.autograd.grad(expected, part, grad_output[piece])[0])


@pytest.mark.parametrize("shape", [(2**17 + 3, 2**15 + 1), (3, 2**31 + 5)], ids=["rows", "three rows"])
def test_elementwise_of_a_broadcast_operand(shape, memory):
    memory(5 * math.prod(shape) / GIB)
    torch.manual_seed(0)
    rows = shape[0]
    x = torch.randn(rows, 1, dtype=torch.float16, device="cuda").expand(shape)
    out = torch.empty(shape, dtype=torch.float16, device="cuda")
    lltm_ext.sigmoid(x, out=out)
    for row in (0, rows // 2, rows - 1):
        assert (out[row] == lltm_ext.sigmoid(x[row, :1])).all()


def test_elementwise_of_a_misaligned_tensor(memory):
    memory(16)
    n = 2**31 + 17
    x = half(n + 1)[1:]
    y = lltm_ext.sigmoid(x)
    for start in (0, 2**30, 2**31 - 8, n - 100):
        piece = slice(start, min(start + 1000, n))
        assert torch.equal(y[piece], lltm_ext.sigmoid(x[piece].clone()))


def test_an_op_made_at_run_time(memory):
    memory(28)
    op = lltm_ext.elementwise("T f(T x, T y)", "return x * y + x;", backward={"x": "return grad * (y + 1);"})
    rows, columns = 2**16 + 3, 2**15 + 1
    x, grad_output = half(rows, columns).requires_grad_(), half(rows, columns)
    for y in (x.detach(), x.detach()[0]):  # the second is broadcast
        output = op(x, y)
        (gradient,) = torch.autograd.grad(output, x, grad_output)
        for some in (*first_and_last(rows), slice(rows // 2, rows // 2 + 64)):
            part, other = x[some].detach().requires_grad_(), y[some] if y.dim() == 2 else y
            expected = op(part, other)
            assert torch.equal(output[some], expected)
            assert torch.equal(gradient[some], torch.autograd.grad(expected, part, grad_output[some])[0])
        del output, gradient


ROWS, COLUMNS = 2**16 + 3, 2**15 + 1


def assert_product(a, b, bias=None):
    c = lltm_ext.gemm(a, b, bias=bias)
    for some in first_and_last(len(a)):
        exact = a[some].double() @ (b if b.dim() == 2 else b[some]).double()
        assert_near(c[some], exact if bias is None else exact + bias.double(), FORWARD[HALF])


def test_gemm_of_a_large_operand(memory):
    memory(12)
    a = half(ROWS, COLUMNS)
    assert_product(a, half(COLUMNS, 8))
    assert_product(a.T, half(ROWS, 8))


def test_gemm_with_a_large_result(memory):
    memory(12)
    assert_product(half(ROWS, 24), half(24, COLUMNS), torch.ones(COLUMNS, dtype=HALF, device="cuda"))


def test_gemm_of_a_large_batch(memory):
    memory(16)
    assert_product(half(2**20 + 1, 64, 33), half(2**20 + 1, 33, 2))


def test_a_sequence_of_many_rows(memory):
    """The gates of all steps are 3 * 2^18 rows of 3072. Rows are independent, so a few are compared."""
    memory(48)
    torch.manual_seed(0)
    length, batch, hidden = 3, 2**18, 1024
    layer = lltm_ext.LLTM(8, hidden, device="cuda", dtype=torch.float16)
    exact_layer = copy.deepcopy(layer).double()
    input = torch.randn(length, batch, 8, device="cuda", dtype=torch.float16).requires_grad_()
    output, _ = layer(input)
    (gradient,) = torch.autograd.grad(output[-1].float().square().sum(), input)
    for rows in first_and_last(batch):
        part = input[:, rows].detach().double().requires_grad_()
        exact, _ = exact_layer(part)
        (expected,) = torch.autograd.grad(exact[-1].square().sum(), part)
        assert_near(output[:, rows], exact, FORWARD[HALF])
        assert_near(gradient[:, rows], expected, 5 * FORWARD[HALF])
