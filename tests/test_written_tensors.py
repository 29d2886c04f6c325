"""In-place and out= forms on tensors of every kind: the right values, or an error that names the op."""

import pytest
import torch

import lltm_ext
from lltm_ext import _portable

ops = torch.ops.lltm_ext
SHAPE = (3, 4)


def inference():
    with torch.inference_mode():
        return torch.ones(SHAPE)


def freed():
    x = torch.ones(SHAPE)
    x.untyped_storage().resize_(0)
    return x


# That are written, or resized and written.
WRITABLE = {
    "contiguous": lambda: torch.ones(SHAPE),
    "transposed": lambda: torch.ones(4, 3).t(),
    "offset": lambda: torch.ones(30)[7:19].view(SHAPE),
    "gaps": lambda: torch.ones(6, 8)[::2, ::2],
    "negative": lambda: torch.complex(torch.ones(SHAPE), torch.ones(SHAPE)).conj().imag,
    "negative view": lambda: torch._neg_view(torch.ones(SHAPE)),
}
RESIZED = {
    "empty": lambda: torch.empty(0),
    "small": lambda: torch.empty(2),
    "large": lambda: torch.empty(5, 6),
    "number": lambda: torch.empty(()),
    "negative of another size": lambda: torch._neg_view(torch.empty(0)),
}
REFUSED = {
    "expanded": (lambda: torch.ones(1, 4).expand(SHAPE), "with memory for each element"),
    "negative expanded": (lambda: torch._neg_view(torch.ones(1, 4).expand(SHAPE)), "for each element"),
    "sparse": (lambda: torch.ones(SHAPE).to_sparse(), "layout torch.strided, got Sparse"),
    "sparse_csr": (lambda: torch.ones(SHAPE).to_sparse_csr(), "layout torch.strided, got SparseCsr"),
    "mkldnn": (lambda: torch.ones(SHAPE).to_mkldnn(), "layout torch.strided, got Mkldnn"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(SHAPE), 1.0, 0, torch.quint8), "of dtype"),
    "inference": (inference, "not to be an inference tensor"),
    "freed": (freed, "with memory that a kernel can use"),
}
REFUSED_BY_OUT = REFUSED | {
    "meta": (lambda: torch.ones(SHAPE, device="meta"), "on cpu, got meta"),
    "half": (lambda: torch.ones(SHAPE, dtype=torch.float16), "of dtype float32, got float16"),
    "conjugate": (lambda: torch.ones(SHAPE, dtype=torch.complex64).conj(), "of dtype float32, got complex64"),
}
UNARY = ("sigmoid", "relu", "round", "floor", "ceil", "trunc", "binarize")
EXTRA = {"binarize": (0.5, 0.0, 1.0, "identity")}
A, B = torch.linspace(-2, 2, 12).view(SHAPE), torch.linspace(-1, 3, 16).view(4, 4)


def out_forms():
    for name in UNARY:
        function, op, extra = getattr(lltm_ext, name), getattr(ops, f"{name}_out"), EXTRA.get(name, ())
        yield name, (lambda out, f=function: f(A, out=out)), function(A)
        yield f"ops.{name}", (lambda out, f=op, p=extra: f(A, *p, out)), function(A)
    yield "gemm", lambda out: lltm_ext.gemm(A, B, out=out), A @ B
    yield "ops.gemm", lambda out: ops.gemm_out(A, B, None, None, "ieee", out), A @ B


def in_place_forms():
    for name in UNARY:
        yield name, getattr(lltm_ext, f"{name}_"), getattr(lltm_ext, name)
        yield f"ops.{name}", getattr(ops, f"{name}_"), getattr(lltm_ext, name)


OUT = {name: (call, expected) for name, call, expected in out_forms()}
IN_PLACE = {name: (call, function) for name, call, function in in_place_forms()}


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("form", OUT)
def test_out_is_written(form, kind):
    call, expected = OUT[form]
    out = WRITABLE[kind]()
    version = out._version
    call(out)
    torch.testing.assert_close(out.resolve_neg(), expected)
    assert out._version > version


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("kind", RESIZED)
@pytest.mark.parametrize("form", OUT)
def test_out_is_resized(form, kind):
    call, expected = OUT[form]
    out = RESIZED[kind]()
    if "gemm" in form:
        with pytest.raises(RuntimeError, match=r"gemm: expected out of shape \[M, N\] = \[3, 4\], got"):
            call(out)
    else:
        call(out)
        torch.testing.assert_close(out.resolve_neg(), expected)


@pytest.mark.parametrize("kind", REFUSED_BY_OUT)
@pytest.mark.parametrize("form", OUT)
def test_out_is_refused(form, kind):
    make, message = REFUSED_BY_OUT[kind]
    with pytest.raises(
        (RuntimeError, TypeError), match=f"^{form.removeprefix('ops.')}: expected out .*{message}"
    ):
        OUT[form][0](make())


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", ["contiguous", "empty"])
def test_a_result_of_too_many_bytes_is_refused(name, kind):
    huge = torch.ones(()).expand(2**31, 2**31)
    with pytest.raises(RuntimeError, match=rf"^{name}: expected a result of less than 2\^63 bytes"):
        getattr(lltm_ext, name)(huge, out=(WRITABLE | RESIZED)[kind]())
    with pytest.raises(RuntimeError, match=rf"^{name}: expected a result of less than 2\^63 bytes"):
        getattr(lltm_ext, name)(huge)


@pytest.mark.parametrize("form", OUT)
def test_inputs_with_the_negative_bit(form):
    _, expected = OUT[form]
    out = torch.empty(SHAPE)
    if "gemm" in form:
        ops.gemm_out(torch._neg_view(-A), torch._neg_view(-B), None, None, "ieee", out)
    elif form.startswith("ops."):
        name = form.removeprefix("ops.")
        getattr(ops, f"{name}_out")(torch._neg_view(-A), *EXTRA.get(name, ()), out)
    else:
        getattr(lltm_ext, form)(torch._neg_view(-A), out=out)
    torch.testing.assert_close(out, expected)


def test_conjugates():
    z = torch.complex(A, A.flip(0))
    out = torch.empty_like(z).conj()
    lltm_ext.sigmoid(z, out=out)
    torch.testing.assert_close(out.resolve_conj(), torch.sigmoid(z))
    out = torch._neg_view(torch.empty_like(z).conj())
    ops.sigmoid_out(z.conj(), out)
    torch.testing.assert_close(out.resolve_neg().resolve_conj(), torch.sigmoid(z.conj()))
    x = z.clone().conj()
    ops.sigmoid_(x)
    torch.testing.assert_close(x.resolve_conj(), torch.sigmoid(z.conj()))


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("form", IN_PLACE)
def test_input_is_overwritten(form, kind):
    call, function = IN_PLACE[form]
    x = WRITABLE[kind]()
    x.copy_(A)
    version = x._version
    call(x)
    torch.testing.assert_close(x.resolve_neg(), function(A))
    assert x._version > version


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("form", IN_PLACE)
def test_gradient_of_an_overwritten_view(form, kind):
    call, function = IN_PLACE[form]
    base = WRITABLE[kind]().copy_(A).requires_grad_()
    x = base * 1 if not base.is_neg() else torch._neg_view(-base)
    call(x)
    x.sum().backward()
    expected = A.clone().requires_grad_()
    function(expected).sum().backward()
    torch.testing.assert_close(base.grad.resolve_neg(), expected.grad)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("form", IN_PLACE)
def test_input_is_refused(form, kind):
    if _portable.in_use and kind == "inference":
        pytest.skip("calls of an inference tensor alone do not reach the portable library's checks")
    make, message = REFUSED[kind]
    with pytest.raises(
        (RuntimeError, TypeError), match=f"^{form.removeprefix('ops.')}: expected input .*{message}"
    ):
        IN_PLACE[form][0](make())


@pytest.mark.parametrize("form", OUT)
def test_out_with_a_gradient_is_refused(form):
    with pytest.raises(RuntimeError, match=f"^{form.removeprefix('ops.')}: with out= there is no gradient"):
        OUT[form][0](torch.ones(SHAPE, requires_grad=True))


@pytest.mark.parametrize("name", UNARY)
def test_out_that_shares_a_part_of_its_memory_is_refused(name):
    base = torch.ones(20)
    with pytest.raises(RuntimeError, match=f"^{name}: expected out to share all of its memory"):
        getattr(lltm_ext, name)(base[:12].view(SHAPE), out=base[1:13].view(SHAPE))
