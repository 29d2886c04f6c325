import itertools
import math
import threading

import pytest
import torch
from op_suite import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    Call,
    Make,
    SmoothSuite,
    assert_agree,
    assert_all_near,
    assert_near,
    assert_same_bits,
    cotangents,
    expected_by,
    forward_and_gradients,
    needs_cuda,
    results,
    transposed,
    unfit_for_bindings,
)

import lltm_ext
from lltm_ext import _C, _portable
from lltm_ext._library import differentiable_gradients
from lltm_ext.scan import scan_reference

TYPES = "float16, bfloat16, float32, float64, complex64 or complex128"
ROUNDOFF = {
    torch.float64: 2**-53,
    torch.complex128: 2**-52,
    torch.complex64: 2**-23,
}  # others: float32's 2^-24
STORED = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


def steps(*shape, initial=True, **options):
    """Coefficients of which no product of many is large, and an initial state."""
    return lambda make: Call(
        torch.tanh(make(*shape)), make(*shape), *([make(*shape[1:])] if initial else []), **options
    )


def broadcast(a, b, initial, **options):
    return lambda make: Call(torch.tanh(make(*a)), make(*b), make(*initial), **options)


def bad(a=(4, 3, 2), b=(4, 3, 2), initial=None, **options):
    def build(make):
        given = [make(*x) if isinstance(x, tuple) else x for x in (a, b, initial)]
        return Call(*given, **options)

    return build


TYPE_ERRORS = {
    "a to be a Tensor or a number, got NoneType": bad(a=None),
    "b to be a Tensor or a number, got list": bad(b=[1.0]),
    "a or b to be a Tensor, got two numbers": bad(a=0.5, b=0.5),
    "initial to be a Tensor or a number, got str": bad(initial="zeros"),
    "reset to be a Tensor or None, got list": bad(reset=[True]),
    f"b of dtype {TYPES}, got int64": lambda make: Call(2, make(3, 2).long()),
    "reset of dtype bool, got float32": lambda make: Call(make(3, 2), make(3, 2), reset=make(3)),
}
RUNTIME_ERRORS = {
    r"a and b of shapes that broadcast, got \[4, 3\] and \[4, 2\]": bad(a=(4, 3), b=(4, 2)),
    r"a or b with a first dimension, which is time, got two numbers": bad(a=(), b=()),
    r"initial of a shape that broadcasts to a step, \[3, 2\], got \[4, 3, 2\]": bad(initial=(4, 3, 2)),
    r"initial of a shape that broadcasts to a step, \[3, 2\], got \[3\]": bad(initial=(3,)),
    r"reset of shape \[T\], \[T, B\] .*, where the steps have \[4, 3, 2\], got \[3\]": lambda make: Call(
        make(4, 3, 2), make(4, 3, 2), reset=make(3) > 0
    ),
    "b of layout torch.strided, got Sparse": lambda make: Call(0.5, make(3, 2).to_sparse()),
}


class ScanSuite(SmoothSuite):
    op = "scan"
    Function = lltm_ext.ScanFunction
    empty_samples = {
        "no steps": steps(0, 3, 2),
        "no channels": steps(5, 0, 2),
        "no steps of one channel": steps(0),
    }

    def apply(self, a, b, initial=None, *, reset=None, reverse=False):
        return self.Function.apply(a, b, initial, reset, reverse)

    def dispatcher_calls(self, call):
        scan, backward = (getattr(torch.ops.lltm_ext, name).default for name in ("scan", "scan_backward"))
        yield scan, call
        a, _, *initial = call.args
        h = call.run(lltm_ext.scan)[0]
        yield backward, Call(h.cos(), a, *(initial or [None]), None, h, False, bool(initial))


class TestScan(ScanSuite):
    function = staticmethod(lltm_ext.scan)
    reference = staticmethod(scan_reference)
    samples = {
        "small": steps(3, 2, 2),
        "1": steps(1, initial=False),
        "one step": steps(1, 3, 2),
        "63": steps(63, 3, 5),
        "500": steps(500, 2, 37),
        "reverse": steps(63, 3, 5, reverse=True),
        "no initial state": steps(63, 5, initial=False),
        "one channel": steps(3000),
        "many channels": steps(3, 1300),
        "a of channels": broadcast((5,), (33, 3, 5), (3, 5)),
        "a of rows": broadcast((33, 3, 1), (33, 1, 5), (5,)),
        "b of steps": broadcast((33, 3, 5), (33, 1, 1), (3, 1), reverse=True),
        "a number": lambda make: Call(0.9, make(63, 3, 5)),
        "numbers": lambda make: Call(make(63, 3).tanh(), 1.0, 2.0),
    }
    bad_calls = expected_by("scan", {TypeError: TYPE_ERRORS, RuntimeError: RUNTIME_ERRORS})


def resets_of(b):
    t, row = (torch.arange(n, device=b.device) for n in b.shape[:2])
    return (t[:, None] + row) % 7 == 0


def with_resets(scan):
    """Resets some steps of some rows, the first step among them."""

    def function(a, b, initial=None, *, reverse=False):
        return scan(a, b, initial, reset=resets_of(b), reverse=reverse)

    return function


class TestScanWithResets(ScanSuite):
    function = staticmethod(with_resets(lltm_ext.scan))
    reference = staticmethod(with_resets(scan_reference))
    samples = {
        "small": steps(3, 2, 2),
        "63": steps(63, 3, 5),
        "500": steps(500, 2, 37),
        "reverse": steps(63, 3, 5, reverse=True),
        "long": steps(3000, 2),
        "a of channels": broadcast((5,), (33, 3, 5), (3, 5)),
    }
    empty_samples = {"no steps": steps(0, 3, 2), "no channels": steps(5, 0, 2)}
    bad_calls = expected_by("scan", {RuntimeError: {"a and b of shapes that broadcast": bad(b=(4, 2))}})

    def apply(self, a, b, initial=None, *, reverse=False):
        return with_resets(super().apply)(a, b, initial, reverse=reverse)

    def test_compiles_with_inductor(self, call_of_63, fresh_dynamo):
        """Resets that are given: what makes them torch would compile to C++, which takes long."""
        reset = resets_of(call_of_63.args[1])

        def scan(*args):
            return lltm_ext.scan(*args, reset=reset)

        assert_agree(torch.compile(scan, fullgraph=True), scan, call_of_63.map(transposed))


# ---- accuracy


def in_float64(a, b, initial=None, **how):
    """The loop on the same numbers, and the same loop on absolute values."""
    wide = [x.to(torch.promote_types(x.dtype, DOUBLE)) for x in (a, b, initial)]
    exact, size = scan_reference(*(torch.stack([x, x.abs().to(x)], -1) for x in wide), **how).unbind(-1)
    return exact, size.abs()


def assert_within_the_bound(exact, size, a, b, initial, **how):
    """The bound that the docstring gives, and no NaN where the loop has none."""
    found = lltm_ext.scan(a, b, initial, **how)
    u, n = ROUNDOFF.get(b.dtype, 2**-24), torch.arange(1, len(exact) + 1, device=b.device, dtype=DOUBLE)
    n = (n.flip(0) if how.get("reverse") else n).reshape(-1, *[1] * (exact.dim() - 1))
    bound = 2 * u * n * size + STORED.get(b.dtype, u) * exact.abs() + torch.finfo(b.dtype).smallest_normal
    finite = size.isfinite() & (exact.abs() < torch.finfo(b.dtype).max)
    error = (found.to(exact.dtype) - exact).abs()
    assert (error <= bound)[finite].all(), (error / bound)[finite].max()
    assert not (found.isnan() & ~exact.isnan()).any()


REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(9000,), (9000, 3), (1200, 40), (3, 1500), (300, 2100)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*REALS, torch.complex64, torch.complex128], ids=str)
def test_errors_are_within_the_bound(shape, dtype, device):
    make = Make(DOUBLE, device)
    b, initial = make(*shape), make(*shape[1:])
    near_one = 1 - make(*shape).abs() * 1e-4
    near_minus_one = -1 + make(*shape).abs() * 1e-3
    decaying = make(*shape) * 1e-3
    some_zeros = near_one * (make(*shape) > -2)
    turn = torch.polar(torch.ones_like(b), b) if dtype.is_complex else 1
    coefficients = [(a * turn).to(dtype) for a in (near_one, near_minus_one, decaying, some_zeros)]
    b, initial = b.to(dtype), initial.to(dtype)
    for reverse, has_resets in itertools.product((False, True), (False, True)):
        how = {"reverse": reverse, "reset": make(*shape[:1]) > 3 if has_resets else None}
        # One loop for all of them, because a loop takes long.
        exact = in_float64(torch.stack(coefficients, -1), b.unsqueeze(-1), initial.unsqueeze(-1), **how)
        for a, *of_loop in zip(coefficients, *(x.unbind(-1) for x in exact), strict=True):
            assert_within_the_bound(*of_loop, a, b, initial, **how)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_growing_coefficients_whose_product_overflows(shape, dtype, device):
    """The state is 0 up to the last steps, or stays 1 because b cancels what a adds."""
    b = torch.zeros(shape, dtype=dtype, device=device)
    b[-3:] = 1
    found = lltm_ext.scan(torch.full_like(b, 4), b)
    assert found.flatten(1)[-4:, 0].tolist() == [0, 1, 5, 21] if b.dim() > 1 else found[-1] == 21
    ones = lltm_ext.scan(torch.full_like(b, 2), -torch.ones_like(b), 1.0)
    assert (ones == 1).all()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_infinite_states_stay_infinite_and_nan_ends_at_a_reset(shape, device):
    cases = [*itertools.product((0.5, 1e-3, -2.0, 1.0), (math.inf, -math.inf, math.nan))]
    all_b = Make(torch.float32, device)(*shape, len(cases))
    all_a, all_b[5] = (torch.tensor(column, device=device) for column in zip(*cases, strict=True))
    reset = torch.zeros(shape[0], dtype=torch.bool, device=device)
    reset[shape[0] // 2 :: 100] = True
    for how in ({}, {"reset": reset}):
        exact = scan_reference(all_a, all_b, **how)  # one loop for all cases, because a loop takes long
        for i, (a, _) in enumerate(cases):
            found = lltm_ext.scan(a, all_b[..., i].contiguous(), **how)
            torch.testing.assert_close(found, exact[..., i], equal_nan=True, rtol=1e-4, atol=1e-4)


def test_a_zero_times_an_infinite_state_is_nan_as_in_the_loop(device):
    a, b = torch.full((600,), 0.5, device=device), torch.zeros(600, device=device)
    a[300], b[10] = 0, math.inf
    found = lltm_ext.scan(a, b)
    assert found[10:300].isinf().all() and found[300:].isnan().all()


@pytest.mark.parametrize("reverse", [False, True])
def test_all_steps_at_once_are_those_of_a_call_per_step(reverse, dtype, device):
    make = Make(dtype, device)
    a, b = torch.tanh(make(700, 5)), make(700, 5)
    state, states = None, [None] * len(b)
    wide = torch.float32 if dtype in STORED else dtype
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        state = lltm_ext.scan(a[t : t + 1].to(wide), b[t : t + 1].to(wide), state, reverse=reverse)[0]
        states[t] = state
    assert_near(lltm_ext.scan(a, b, reverse=reverse), torch.stack(states), FORWARD[dtype])


def test_a_number_is_not_rounded_to_a_half_type(device):
    b = torch.ones(4000, dtype=torch.bfloat16, device=device)
    found = lltm_ext.scan(0.999, b)
    assert_near(found, scan_reference(0.999, b.double()), FORWARD[torch.bfloat16])
    a = torch.tensor(0.999, device=device, requires_grad=True)
    exact = torch.tensor(0.999, dtype=DOUBLE, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(lltm_ext.scan(a, b).float().sum(), a)
    (expected,) = torch.autograd.grad(scan_reference(exact, b.double()).sum(), exact)
    assert gradient.dtype == torch.float32
    assert_near(gradient, expected, BACKWARD[torch.bfloat16])


# ---- forms


@pytest.mark.parametrize("reverse", [False, True])
def test_complex_gradients(reverse, device):
    make = Make(DOUBLE, device)
    call = Call(*(torch.complex(make(*s), make(*s)) * 0.5 for s in ((5, 2), (5, 1), (2,)))).leaves()
    for reset in (None, make(5, 2) > 0):

        def function(a, b, initial, reset=reset):
            return lltm_ext.scan(a, b, initial, reset=reset, reverse=reverse)

        assert torch.autograd.gradcheck(function, call.tensors, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, call.tensors)
        output = function(*call.tensors)
        with_graph, without = (
            torch.autograd.grad(output, call.tensors, output.cos(), retain_graph=True, create_graph=graph)
            for graph in (True, False)
        )
        torch.testing.assert_close(with_graph, without)


def parts(tensors):
    """Complex tensors as real ones."""
    return [torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x for x in tensors]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64], ids=str)
def test_dimensions_that_do_not_merge(reverse, dtype, device):
    """Operands in other orders and of other broadcast dimensions, up to more than a kernel has."""
    make = Make(DOUBLE, device)
    a = torch.tanh(make(2, 3, 2, 3, 2, 9)).permute(5, 2, 0, 4, 1, 3).to(dtype)  # [9, 2, 2, 2, 3, 3]
    b, initial = make(9, 1, 2, 1, 3, 1).to(dtype), make(2, 1, 2, 1, 3).to(dtype)
    reset = make(9, 1, 2, 1, 3) > 1

    def using(scan):
        return lambda a, b, initial: scan(a, b, initial, reset=reset, reverse=reverse)

    wide = DOUBLE if not dtype.is_complex else torch.complex128
    call, exact = Call(a, b, initial), Call(*(x.to(wide) for x in (a, b, initial)))
    grad = cotangents(call.run(using(lltm_ext.scan)))
    outputs, gradients = forward_and_gradients(using(lltm_ext.scan), call, grad)
    expected, expected_gradients = forward_and_gradients(using(scan_reference), exact, grad)
    bounds = torch.float32 if dtype.is_complex else dtype
    assert_all_near(parts(outputs), parts(expected), FORWARD[bounds])
    assert_all_near(parts(gradients), parts(expected_gradients), BACKWARD[bounds])


@pytest.mark.parametrize("shape", [(9, 2, 3), (9, 1, 3), (1, 2, 1), (9, 2), (9, 1), (9,), (1,)], ids=str)
def test_resets_have_the_first_dimensions_of_the_steps(shape, device):
    make = Make(DOUBLE, device)
    reset = make(*shape) > 0
    full = reset.reshape(*shape, *[1] * (3 - len(shape))).expand(9, 2, 3)
    call = steps(9, 2, 3)(make)
    for reverse in (False, True):
        found, expected = (
            results(lambda *x, r=r: lltm_ext.scan(*x, reset=r, reverse=reverse), call)  # noqa: B023
            for r in (reset, full.contiguous())
        )
        assert_same_bits(found, expected)


def test_a_reset_is_a_coefficient_of_zero(device):
    call = steps(63, 3, 5)(Make(DOUBLE, device))
    reset = Make(DOUBLE, device, seed=1)(63, 3) > 0.5

    def by_zeros(a, b, initial):
        return lltm_ext.scan(a.masked_fill(reset[..., None], 0), b, initial)

    assert_agree(lambda *x: lltm_ext.scan(*x, reset=reset), by_zeros, call)


def test_reverse_is_the_scan_of_flipped_steps(device):
    call = steps(63, 3, 5)(Make(DOUBLE, device))
    reset = Make(DOUBLE, device, seed=1)(63) > 0.5

    def flipped(a, b, initial):
        return lltm_ext.scan(a.flip(0), b.flip(0), initial, reset=reset.flip(0)).flip(0)

    assert_agree(lambda *x: lltm_ext.scan(*x, reset=reset, reverse=True), flipped, call)


def test_the_strides_of_b_are_kept(device):
    a, b = Make(device=device)(2, 63, 5), Make(device=device, seed=1)(2, 63, 5)
    batch_first = lltm_ext.scan(a.transpose(0, 1), b.transpose(0, 1))
    assert batch_first.stride() == b.transpose(0, 1).stride()
    assert lltm_ext.scan(a.mT, 0.5).stride() == a.mT.stride()
    assert lltm_ext.scan(a[0], b).is_contiguous()


@pytest.mark.parametrize("shape", [(9000, 1), (9000, 3), (1200, 40), (20, 1500), (700, 5, 7)], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_steps_that_are_adjacent_in_memory_have_the_same_bits(shape, reverse, dtype, device):
    """Batch first: a sequence of each channel."""
    make = Make(dtype, device)
    call = Call(torch.tanh(make(*shape)), make(*shape))
    reset = Make(device=device, seed=1)(*shape[:2]) > 2.5
    grad = [make(*shape)]

    def batch_first(x):
        return x.movedim(0, -1).contiguous().movedim(-1, 0)

    def function(a, b):
        return lltm_ext.scan(a, b, reset=reset, reverse=reverse)

    found = results(function, call.map(batch_first), [batch_first(grad[0])])
    assert_same_bits(found, results(function, call, grad))


def test_dtypes_are_promoted(device):
    make = Make(device=device)
    half, single, double = (make(5, 3).to(dtype) for dtype in (torch.float16, torch.float32, DOUBLE))
    for a, b, initial, dtype in (
        (half, single, None, torch.float32),
        (0.5, half, None, torch.float16),
        (half[0, 0], half, single[0], torch.float32),
        (half, half, double[0, 0], torch.float16),
        (half, 1, double[0], DOUBLE),
        (half, half.bfloat16(), None, torch.float32),
        (single, 1j, None, torch.complex64),
    ):
        found, expected = lltm_ext.scan(a, b, initial), scan_reference(a, b, initial)
        assert found.dtype == expected.dtype == dtype
        with torch.autocast(device):
            assert lltm_ext.scan(a, b, initial).dtype == dtype


@pytest.mark.skipif(_portable.in_use, reason="ScanFunction, its autograd, saves h in any case")
def test_only_what_is_needed_is_saved(device):
    a, b, initial = (x.requires_grad_() for x in steps(9, 2)(Make(device=device)).tensors)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        lltm_ext.scan(a.detach(), b, initial)
        assert not any(x.shape == b.shape and x.data_ptr() != a.data_ptr() for x in saved)
        saved.clear()
        h = lltm_ext.scan(a, b, initial)
        assert sum(x.shape == h.shape for x in saved) == 2  # a and h


# ---- bindings


@pytest.mark.parametrize("reverse", [False, True])
def test_raw_bindings_equal_the_function(reverse, dtype, device):
    call = steps(63, 3)(Make(dtype, device))
    reset = Make(device=device)(63) > 1
    a, b, initial = call.tensors
    h = _C.scan.forward(a, b, initial, reset, reverse)
    function = lambda *x: lltm_ext.scan(*x, reset=reset, reverse=reverse)  # noqa: E731
    grad = cotangents([h])
    outputs, gradients = forward_and_gradients(function, call, grad)
    found = _C.scan.backward(grad[0], a, h, initial, reset, reverse)
    assert_same_bits([h, *found], [*outputs, *gradients])


def test_raw_bindings_refuse_bad_inputs(device):
    good = Make(device=device)(3, 5)
    for value, exception, pattern in unfit_for_bindings(good):
        with pytest.raises(exception, match=f"^scan.forward: expected b {pattern}"):
            _C.scan.forward(good, value)
        with pytest.raises(exception, match=f"^scan.backward: expected grad {pattern}"):
            _C.scan.backward(value, good, good)


# ---- on a GPU


@needs_cuda
@pytest.mark.parametrize("dtype", [*REALS, torch.complex64], ids=str)
def test_the_bits_do_not_depend_on_when_blocks_run(dtype):
    for shape in ((100_000, 3), (70_000, 16), (5000, 64, 2), (3000, 700)):
        make = Make(DOUBLE, "cuda")
        a, b = torch.tanh(make(*shape)).to(dtype), make(*shape).to(dtype)
        expected = results(lltm_ext.scan, Call(a, b))
        other = torch.empty(2**28, device="cuda")
        for _ in range(20):
            with torch.cuda.stream(torch.cuda.Stream()):
                other.normal_()
            assert_same_bits(results(lltm_ext.scan, Call(a, b)), expected)
        torch.cuda.synchronize()


@needs_cuda
def test_a_thread_that_needs_less_shared_memory_takes_none_from_another():
    long, short = torch.rand(4096, 4096, device="cuda"), torch.rand(16, 4096, device="cuda")
    expected = lltm_ext.scan(long, long)
    thread = threading.Thread(target=lltm_ext.scan, args=(short, short))
    thread.start()
    thread.join()
    assert_same_bits([lltm_ext.scan(long, long)], [expected])


@needs_cuda
def test_more_elements_than_an_int32_counts():
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * 2**30:
        pytest.skip(f"needs 40 GiB of free GPU memory, found {free / 2**30:.0f}")
    for shape in ((2**19 + 1, 2**12 + 8), (2**12 + 8, 2**19 + 1)):
        a = torch.full(shape[1:], 0.5, dtype=torch.float16, device="cuda")
        b = torch.ones(shape, dtype=torch.float16, device="cuda").requires_grad_()
        h = lltm_ext.scan(a, b)
        assert (h[:3, 0].tolist(), h[:3, -1].tolist()) == ([1, 1.5, 1.75],) * 2
        assert (h[40:] == 2).all()
        (gradient,) = torch.autograd.grad(h, b, torch.ones_like(h))
        assert gradient[-3:, -1].tolist() == [1.75, 1.5, 1]
        assert (gradient[:-40] == 2).all()
        del h, b, gradient


def test_the_composed_backward_is_the_gradient_of_the_loop(device):
    call = steps(9, 2)(Make(DOUBLE, device))
    h = call.run(lltm_ext.scan)[0]
    grad = cotangents([h])
    expected = differentiable_gradients(lambda *x: (scan_reference(*x),), call.tensors, grad)
    a, _, initial = call.tensors
    found = torch.ops.lltm_ext.scan_backward_composed(grad[0], a, initial, None, h, False, True)
    assert_all_near(found, expected, BACKWARD[DOUBLE])


def test_transposed_gradients_have_the_values_of_dense_ones(device):
    call = steps(63, 3, 5)(Make(DOUBLE, device))
    grad = cotangents(call.run(lltm_ext.scan))
    dense = forward_and_gradients(lltm_ext.scan, call, grad)[1]
    strided = forward_and_gradients(lltm_ext.scan, call, [transposed(g) for g in grad])[1]
    assert_all_near(strided, dense, BACKWARD[DOUBLE])
