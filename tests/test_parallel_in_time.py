"""Cells without a product of h on few units, whose steps run in parallel (src/recurrence/without_product)."""

import functools

import pytest
import torch
from cell_examples import CELLS, MIXING, Example, growing
from op_suite import (
    DOUBLE,
    FORWARD,
    Make,
    assert_all_near,
    assert_near,
    assert_same_bits,
    cotangents,
    kernels_of,
    needs_cuda,
)

import lltm_ext
from lltm_ext import cells

pytestmark = [pytest.mark.compiles, needs_cuda]

LENGTH, BATCH, HIDDEN = 5000, 2, 3  # two tiles or more of all threads' steps
TYPES = (torch.float16, torch.bfloat16, torch.float32, DOUBLE)
WITHOUT_PRODUCT = {name: cell for name, cell in (CELLS | MIXING).items() if not cell.recurrent}
JUMPING = ("indrnn", "lif")  # other types round some value of so many to the other side of the jump
SMOOTH = [name for name in WITHOUT_PRODUCT if name not in JUMPING]
RESETS = {
    "bools": {"reset": True},
    "shares": {"reset": torch.float32},
    "to initial": {"reset": True, "reset_to": "initial"},
}


@lltm_ext.recurrence(gates=0, states=("im",), inputs=("value",), parameters=("angle",), recurrent=False)
def lossless_rotation(h, s, p, u):
    real, imaginary = torch.cos(p.angle), torch.sin(p.angle)
    return real * h - imaginary * s.im + u.value, (imaginary * h + real * s.im,)


@lltm_ext.recurrence(gates=0, inputs=("factor", "value"), recurrent=False)
def scaled(h, u):
    return u.factor * h + u.value


def example_of(name, dtype, length=LENGTH, batch=BATCH, hidden=HIDDEN, **options):
    return Example(WITHOUT_PRODUCT[name], dtype, length, batch, hidden, device="cuda", **options)


@pytest.mark.parametrize(
    "name,dtype",
    [(name, dtype) for name in SMOOTH for dtype in TYPES] + [(name, DOUBLE) for name in JUMPING],
    ids=str,
)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_long_sequences_equal_the_loop(name, dtype, reverse):
    example_of(name, dtype).check(reverse=reverse)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("resets", RESETS.values(), ids=RESETS)
@pytest.mark.parametrize("hidden", [3, 4], ids=["one unit a thread", "a pair"])
def test_resets(name, resets, hidden):
    example_of(name, torch.float32, 1000, 3, hidden, **resets).check()


@pytest.mark.parametrize("name", ["mingru", "sru", "without_product", *MIXING])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_rows_of_packed_sequences_end_each_for_itself(name, reverse):
    sizes = [5] * 300 + [4] * 20 + [3] * 160 + [1] * 500
    example_of(name, torch.float32, len(sizes), 5, sizes=sizes, reset=True).check(reverse=reverse)


@pytest.mark.parametrize("name", ["mingru", "without_product", *MIXING])
def test_the_same_call_gives_the_same_bits(name):
    example = example_of(name, torch.float32)

    def run():
        call = example.call.leaves()
        outputs = call.run(example.ours)
        return [*outputs, *torch.autograd.grad(outputs, call.tensors, cotangents(outputs), allow_unused=True)]

    for first, second in zip(run(), run(), strict=True):
        if first is not None:
            assert_same_bits(first, second)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_all_steps_at_once_equal_calls_of_one_step(dtype):
    make = Make(dtype, "cuda")
    input, state = make(1000, 2, 6), make(2, 3)
    output, last = cells.mingru(input, state, None, None)
    for x, expected in zip(input, output, strict=True):
        y, state = cells.mingru(x[None], state, None, None)
        assert_near(y[0], expected, FORWARD[dtype])
    assert_near(state, last, FORWARD[dtype])


def test_few_units_and_many_run_one_kernel(profiler_sees_kernels):
    for hidden in (3, 20_000):
        example = example_of("mingru", torch.float32, 200, 2, hidden)
        call = example.call.leaves()
        outputs = call.run(example.ours)
        backward = functools.partial(
            torch.autograd.grad, outputs, call.tensors, cotangents(outputs), retain_graph=True
        )
        backward()  # compiles
        for kernels in kernels_of([functools.partial(call.run, example.ours), backward]):
            assert kernels.count("custom_cell_kernel") == 1


def test_states_that_lose_nothing_stay_exact_over_many_steps():
    value, angle = torch.rand(5000, 2, 3, device="cuda") - 0.5, torch.rand(3, device="cuda")
    start = torch.randn(2, 3, device="cuda")
    found, exact = (
        lossless_rotation(None, (start.to(t), start.to(t)), angle=angle.to(t), value=value.to(t))[0]
        for t in (torch.float32, DOUBLE)
    )
    assert_near(found, exact, 1e-3)  # the angle's own rounding, 5,000 times
    expected, states = [], [start.double()] * 2
    for x in value[:1000].double():
        real, imaginary = torch.cos(angle.double()), torch.sin(angle.double())
        states = [real * states[0] - imaginary * states[1] + x, imaginary * states[0] + real * states[1]]
        expected.append(states[0])
    assert_near(exact[:1000], torch.stack(expected), 1e-12)


def test_products_of_coefficients_may_overflow_where_h_does_not():
    """Zeros stay zeros, and an infinity that a reset ends does not reach later steps."""
    steps = torch.full((1000, 2), 8.0, device="cuda")
    zeros = torch.zeros(2, 3, device="cuda")
    output, _ = scaled(None, zeros, factor=steps, value=torch.zeros_like(steps))
    assert not output.any()
    reset = torch.zeros(1000, 2, dtype=torch.bool, device="cuda")
    reset[::500] = True
    output, _ = scaled(None, zeros + 1, factor=steps, value=torch.ones_like(steps), reset=reset)
    assert output[499].isinf().all() and output[500].eq(1).all() and output[510].isfinite().all()


@pytest.mark.parametrize("steps", [1000, 20_000])
def test_threads_without_a_map_run_one_after_the_other(steps):
    input, zeros = torch.rand(steps, 2, 3, device="cuda"), torch.zeros(2, 3, device="cuda")
    y, (h_n, y_n) = growing(input, (zeros, zeros), None, None)
    assert torch.equal(y, input) and torch.equal(h_n, input[-1]) and torch.equal(y_n, input[-1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_until_a_reset(bad):
    """Also where the product of the factors since is zero in float32, or a factor is."""
    value = torch.zeros(3000, 2, device="cuda")
    value[100] = bad
    factor = torch.full_like(value, 0.01)
    reset = torch.zeros(3000, 2, dtype=torch.bool, device="cuda")
    reset[2500] = True
    zeros = torch.zeros(2, 3, device="cuda")
    for resets in (None, reset):
        output, _ = scaled(None, zeros, factor=factor, value=value, reset=resets)
        end = 3000 if resets is None else 2500
        assert output[:100].eq(0).all() and output[end:].eq(0).all()
        assert (output[100:end] == bad).all() or output[100:end].isnan().all()
    factor[200] = 0
    output, _ = scaled(None, zeros, factor=factor, value=value)
    assert output[200:].isnan().all()


def test_a_factor_of_zero_ends_what_was_before():
    factor = torch.rand(1000, 2, device="cuda")
    factor[123], value = 0, torch.randn(1000, 2, device="cuda")
    output, _ = scaled(None, torch.full((2, 3), 1e30, device="cuda"), factor=factor, value=value)
    assert_all_near([output[123]], [value[123, :, None].expand(2, 3)], 0)
