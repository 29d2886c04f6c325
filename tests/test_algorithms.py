"""Each algorithm of lltm and lstm by name: values at every size, hazards of blocks that wait for others."""

import contextlib
import functools
import itertools
import re
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from op_suite import (
    BACKWARD,
    DOUBLE,
    EXAMPLES,
    FORWARD,
    Call,
    Make,
    OpSuite,
    added_units,
    assert_all_near,
    assert_near,
    assert_same_bits,
    cotangents,
    forward_and_gradients,
    kernels_of,
    misaligned,
    needs_cuda,
    packed,
    pairwise,
)
from sequence_suite import OPS, LoopOverSteps, relative_errors, single_gradients
from torch.nn.utils.rnn import pack_padded_sequence

import lltm_ext
from lltm_ext import _portable

ALGORITHMS = ("stepwise", "cluster", "grid")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
BITS[torch.bfloat16] = torch.int16


ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
types = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
NEEDED = {"stepwise": (0, 0), "cluster": (9, 0), "grid": (8, 0)}


def on_gpu(*values):
    """Parameters, some of which are algorithms, skipped where the GPU can't run them."""
    needed = max(NEEDED.get(value, (0, 0)) for value in values)
    if torch.cuda.is_available() and needed > CAPABILITY:
        reason = "needs a GPU of compute capability {}.{}".format(*needed)
        return pytest.param(*values, marks=pytest.mark.skip(reason=reason))
    return pytest.param(*values, marks=needs_cuda)


def runs_of(algorithms):
    """(device, algorithm) of all that can run: on the CPU only stepwise."""
    return pytest.mark.parametrize(
        "device,algorithm", [("cpu", "stepwise"), *(on_gpu("cuda", a) for a in algorithms)]
    )


algorithms = pytest.mark.parametrize("algorithm", [on_gpu(a) for a in ALGORITHMS])
runs = runs_of(ALGORITHMS)
runs_of_packed = runs_of(("stepwise", "grid"))
NAMES = ("input", "h0", "c0", "weight_ih", "weight_hh", "bias")


def why_not(algorithm, dtype, hidden, batch, device="cuda", is_packed=False, gates=3):
    """The documented reason why an algorithm can't run, or None if it must."""
    if algorithm == "stepwise":
        return None
    if device == "cpu":
        return "needs a CUDA device"
    if dtype == DOUBLE:
        return "takes float16, bfloat16 and float32, got float64"
    if hidden % 8 and _portable.in_use:
        return "the portable library has no resize_units"
    hidden += -hidden % 8  # units are added
    chip = torch.cuda.get_device_properties(0)
    if NEEDED[algorithm] > CAPABILITY:
        return "needs compute capability {}.{}".format(*NEEDED[algorithm])
    if algorithm == "cluster":
        if is_packed:
            return "takes no packed sequences"
        room = hidden <= (128 if dtype == torch.float32 else 512)
    elif hidden <= 1024:
        blocks = -(-hidden // (16 if dtype == torch.float32 else 32))
        room = blocks <= chip.multi_processor_count
        if dtype == torch.float32 and gates > 3 and not in_tf32():  # fills a multiprocessor's memory
            room = room and hidden <= 512
    else:
        groups = chip.multi_processor_count // -(-hidden // 16)
        one_tile = not is_packed and batch <= 8 * groups
        several = CAPABILITY == (9, 0) and batch <= 320 * groups
        room = hidden <= 2048 and dtype != torch.float32 and (one_tile or several)
    return None if room else f"has no room on this GPU for hidden_size = {hidden} and batch = {batch}"


def in_tf32():
    """Whether the persistent kernels round float32 to TF32: on Hopper, if torch allows it to nn.LSTM."""
    return torch.backends.cudnn.rnn.fp32_precision == "tf32" and CAPABILITY == (9, 0)


def assert_refused(op, call, algorithm, reason, **options):
    assert_refused_plan(op, call, algorithm, reason, **options)
    with pytest.raises(RuntimeError, match=rf"^{op.name}: algorithm '{algorithm}' {reason}"):
        op(*call.args, algorithm=algorithm, **options)


def assert_refused_plan(op, call, algorithm, reason, **options):
    for f in (op.plan, functools.partial(op.plan, backward=True)):
        with pytest.raises(RuntimeError, match=rf"^{op.name}: algorithm '{algorithm}' {reason}"):
            f(*call.args, algorithm=algorithm, **options)


class Results(NamedTuple):
    """Of a function, and of the reference in float64 on the same rounded values."""

    outputs: list
    gradients: list
    exact: list
    exact_gradients: list

    def assert_near(self, dtype, what=""):
        self._assert_near(self.outputs, self.exact, FORWARD[dtype], f"{what} output")
        self._assert_near(
            self.gradients, self.exact_gradients, BACKWARD[dtype], f"{what} gradient of argument"
        )

    def assert_same_nans(self, what=""):
        for kind, found, exact in zip(("output", "gradient"), self[:2], self[2:], strict=True):
            for i, (y, e) in enumerate(zip(found, exact, strict=True)):
                assert torch.equal(y.isnan(), e.isnan()), f"{what} {kind} {i}"

    @staticmethod
    def _assert_near(found, exact, bound, what):
        """assert_all_near on the tensors' device, because copies of many large ones to the CPU take long."""
        pairs = [(y.detach().double(), e.detach().double()) for y, e in zip(found, exact, strict=True)]
        assert [y.shape for y, _ in pairs] == [e.shape for _, e in pairs], what
        table = torch.stack([torch.stack([(y - e).norm(), e.norm()]) for y, e in pairs]).tolist()
        for i, (error, norm) in enumerate(table):
            assert error <= bound * norm, (
                f"{what} {i}: relative L2 error {error / norm if norm else error} > {bound}"
            )


def results_of(function, reference, call, grad_outputs=None):
    outputs, gradients = forward_and_gradients(function, call, grad_outputs)
    exact = call.map(lambda x: packed(x).double())
    return Results(
        outputs, gradients, *forward_and_gradients(reference, exact, grad_outputs or cotangents(outputs))
    )


def results(op, call, algorithm="auto", grad_outputs=None, **options):
    f, loop = functools.partial(op, algorithm=algorithm, **options), functools.partial(op.loop, **options)
    return results_of(f, loop, call, grad_outputs)


def assert_equals_loop(op, call, algorithm, what="", **options):
    assert op.plan(*call.args, algorithm=algorithm, sizes=options.get("sizes")) == algorithm
    results(op, call, algorithm, **options).assert_near(call.args[0].dtype, what)


# ---- Sizes -----------------------------------------------------------------------------------------------
#
# Kernels differ in the hidden units of a block, in its share of the reduction, and in whether a group of
# blocks has several tiles of 8 rows. The hidden size, the rows and the GPU's multiprocessors decide which one
# runs. With 132 multiprocessors these sizes reach all of them.

HIDDEN = (8, 24, 64, 120, 128, 136, 256, 384, 512, 600, 1024, 2048)
BATCHES = (1, 3, 8, 9, 16, 40, 67, 130)


def lengths_and_batches(hidden, device):
    if device == "cpu":
        return [(1, 9), (2, 16), (3, 1), (17, 3)]
    if hidden == 2048:
        return [(1, 1), (3, 3), (2, 8), (2, 9), (4, 64), (5, 67), (4, 128)]
    few_steps = [(length, batch) for length in (1, 2, 3) for batch in BATCHES[length - 1 :: 3]]
    many_rows = [(2, 520)] if hidden in (64, 512, 1024) else []
    return [(17, batch) for batch in BATCHES] + few_steps + many_rows


@functools.lru_cache(maxsize=1)
def exact_results(name, dtype, hidden, device):
    """(call, gradients of its outputs, outputs and gradients in float64) for each length and batch."""
    op, make, found = OPS[name], Make(dtype, device), []
    weights = op.weights(make, hidden)
    for length, batch in lengths_and_batches(hidden, device):
        call = op.call_with(make, length, batch, weights)
        grad_outputs = cotangents([call.args[0].new_empty(length, batch, hidden), *call.args[1:3]])
        exact = forward_and_gradients(op.loop, call.map(torch.Tensor.double), grad_outputs)
        found.append((call, grad_outputs, *exact))
    return found


@pytest.fixture(scope="module", autouse=True)
def clear_cached_results():
    yield
    exact_results.cache_clear()
    long_results.cache_clear()


def assert_every_size(op, dtype, hidden, device, algorithm, rounded_like=None):
    """Returns how many sizes ran. `rounded_like`: the dtype whose error bounds hold instead."""
    ran = 0
    for call, grad_outputs, exact, exact_gradients in exact_results(op.name, dtype, hidden, device):
        length, batch, _ = call.args[0].shape
        if reason := why_not(algorithm, dtype, hidden, batch, device, gates=op.gates):
            assert_refused(op, call, algorithm, reason)
            continue
        what = f"length {length}, batch {batch},"
        for backward in (False, True):
            assert op.plan(*call.args, algorithm=algorithm, backward=backward) == algorithm
        found = forward_and_gradients(functools.partial(op, algorithm=algorithm), call, grad_outputs)
        Results(*found, exact, exact_gradients).assert_near(rounded_like or dtype, what)
        ran += 1
    return ran


# One parametrization, so that the algorithms of one size follow each other and share the results in float64.
@needs_cuda
@pytest.mark.parametrize(
    "op,dtype,hidden,algorithm",
    [
        pytest.param(op, dtype, hidden, a, id=f"{op.name}-{str(dtype).removeprefix('torch.')}-{hidden}-{a}")
        for op, dtype, hidden, a in itertools.product(OPS.values(), TYPES, HIDDEN, ALGORITHMS)
    ],
)
def test_values_and_gradients_at_every_size(op, dtype, hidden, algorithm):
    ran = assert_every_size(op, dtype, hidden, "cuda", algorithm)
    if algorithm == "stepwise":
        assert ran == len(lengths_and_batches(hidden, "cuda"))


@needs_cuda
@added_units
@ops
@types
@pytest.mark.parametrize("algorithm", ["auto", on_gpu("cluster"), on_gpu("grid")])
@pytest.mark.parametrize("sizes", [None, [40] * 9 + [7, 1]], ids=["dense", "packed"])
@pytest.mark.parametrize("hidden", [1, 5, 12, 100, 150, 300])
def test_hidden_sizes_that_are_no_multiple_of_8(op, dtype, algorithm, sizes, hidden):
    call = op.call(Make(dtype, "cuda"), 9, 40, hidden, sizes=sizes)
    if algorithm != "auto" and why_not(algorithm, dtype, hidden, 40, is_packed=bool(sizes), gates=op.gates):
        pytest.skip(f"{algorithm} does not take this size")
    planned = op.plan(*call.args, sizes=sizes, algorithm=algorithm)
    assert planned in ((algorithm,) if algorithm != "auto" else ("cluster", "grid"))
    found = results(op, call, algorithm, sizes=sizes)
    found.assert_near(dtype)
    with torch.inference_mode():
        outputs = call.run(functools.partial(op, algorithm=algorithm, sizes=sizes))
    assert all(x.is_contiguous() for x in outputs)
    assert_all_near(outputs, found.exact, FORWARD[dtype])


@needs_cuda
@added_units
@ops
def test_few_steps_of_such_sizes_run_one_by_one(op):
    plans = [op.plan(*op.call(Make(torch.float16, "cuda"), length, 4, 100).args) for length in (7, 8)]
    assert plans[0] == "stepwise" != plans[1]


@needs_cuda
@ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 20, 33, 75, 95])
@pytest.mark.parametrize("length", [1, 9])
def test_small_layers_of_any_hidden_size_run_in_one_launch(op, dtype, hidden, length):
    call = op.call(Make(dtype, "cuda"), length, 5, hidden)
    if CAPABILITY == (9, 0):
        assert op.plan(*call.args) == ("cluster" if length > 1 else "stepwise")
    results(op, call).assert_near(dtype)


@needs_cuda
@ops
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_long_sums_over_unaligned_rows(op, dtype):
    call = op.call(Make(dtype, "cuda"), 300, 40, 50, input_size=13)
    results(op, call).assert_near(dtype)


@needs_cuda
@ops
@types
def test_both_directions_of_a_hidden_size_that_is_no_multiple_of_8(op, dtype):
    call = op.bidirectional_call(Make(dtype, "cuda"), 9, 5, 100)
    outputs, expected = call.run(op.bidirectional), call.run(op.one_by_one)
    assert all(x.is_contiguous() for x in outputs)
    assert_all_near(outputs, [x.double() for x in expected], FORWARD[dtype])


# ---- No initial states, two biases -----------------------------------------------------------------------

GIVEN = {"h0 and c0": (), "c0": (1,), "h0": (2,), "neither": (1, 2)}  # and the positions of the others


@pairwise(
    op=OPS,
    dtype=TYPES,
    lacking=GIVEN,
    sizes={"dense": None, "packed": [9, 7, 7, 1]},
    reverse={"forward": False, "reverse": True},
)
@runs
def test_a_sequence_without_initial_states_starts_from_zeros(
    op, dtype, device, algorithm, lacking, sizes, reverse
):
    if sizes and algorithm == "cluster":
        pytest.skip("cluster takes no packed sequences")
    make = Make(dtype, device)
    call = op.call(make, 4, 9, 72, sizes=sizes)
    zeros = [torch.zeros_like(x) if i in lacking else x for i, x in enumerate(call.args)]
    without = [None if i in lacking else x for i, x in enumerate(call.args)]
    f = functools.partial(op, sizes=sizes, reverse=reverse, algorithm=algorithm)
    # Gradients of the final states too, and none of them.
    for used in ((0, 1, 2), (0,)):
        found, expected = [], []
        for results, arguments in ((found, without), (expected, zeros)):
            inputs = [x if x is None else x.detach().requires_grad_() for x in arguments]
            outputs = f(*inputs)
            wanted = [x for i, x in enumerate(inputs) if i not in lacking]
            grad_outputs = cotangents([outputs[i] for i in used])
            gradients = torch.autograd.grad([outputs[i] for i in used], wanted, grad_outputs)
            results += [x.detach() for x in outputs] + list(gradients)
        with torch.no_grad():
            found += f(*without)
            expected += f(*zeros)
        assert [x.dtype for x in found] == [x.dtype for x in expected]
        assert_all_near(found, [x.double() for x in expected], FORWARD[dtype])


@pytest.mark.parametrize("hidden", [72, pytest.param(20, marks=added_units)])
@types
@runs
def test_two_biases_are_as_their_sum_and_have_gradients_of_their_own(dtype, device, algorithm, hidden):
    op, make = OPS["lstm"], Make(dtype, device)
    *tensors, bias = op.call(make, 4, 9, hidden).args
    biases = [bias.detach().requires_grad_(), make(4 * hidden).requires_grad_()]
    how = (None, False, algorithm, None)
    outputs = torch.ops.lltm_ext.lstm(*tensors, biases[0], *how, biases[1])
    found = torch.autograd.grad(outputs[0], biases, torch.ones_like(outputs[0]))
    total = (biases[0] + biases[1]).detach().requires_grad_()
    expected = op(*tensors, total, algorithm=algorithm)
    (gradient,) = torch.autograd.grad(expected[0], total, torch.ones_like(expected[0]))
    assert_all_near(outputs, [x.double() for x in expected], FORWARD[dtype])
    assert_all_near(found, [gradient.double()] * 2, BACKWARD[dtype])
    assert found[0].data_ptr() != found[1].data_ptr()
    with torch.no_grad():
        again = torch.ops.lltm_ext.lstm(*tensors, biases[0], *how, biases[1])
    assert_all_near(again, [x.double() for x in expected], FORWARD[dtype])


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_second_bias_that_does_not_fit_is_named(requires_grad):
    *tensors, bias = OPS["lstm"].call(Make(torch.float32, "cpu"), 2, 3, 8).args
    bias = bias.detach().requires_grad_(requires_grad)
    for wrong, error, words in (
        (bias[:-1], RuntimeError, r"shape of bias = \[32\], got \[31\]"),
        (bias[:1], RuntimeError, r"shape of bias = \[32\], got \[1\]"),
        (bias.double(), TypeError, "dtype float32, got float64"),
    ):
        with pytest.raises(error, match=f"^lstm: expected bias_hh of {words}"):
            torch.ops.lltm_ext.lstm(*tensors, bias, None, False, "auto", None, wrong)


@contextlib.contextmanager
def tf32_allowed(allowed=True):
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def tf32():
    with tf32_allowed():
        yield


LIKE_TF32 = torch.float16  # has its 10 bits of mantissa


@ops
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("algorithm", [on_gpu("stepwise"), on_gpu("grid")])
def test_values_and_gradients_in_tf32_at_every_size(op, hidden, algorithm, tf32):
    assert_every_size(op, torch.float32, hidden, "cuda", algorithm, rounded_like=LIKE_TF32)


@ops
@pytest.mark.parametrize("sizes", [None, [40, 40, 9, 9, 1]], ids=["dense", "packed"])
@pytest.mark.parametrize("algorithm", [on_gpu("stepwise"), on_gpu("grid")])
def test_float32_is_rounded_to_tf32_only_where_torch_allows_it(op, sizes, algorithm):
    """Seen in the recurrent product: the input is zero, so the forward has no other product."""
    call = op.call(Make(torch.float32, "cuda"), 20, 40, 256, sizes=sizes)
    call.args[0].zero_()
    exact = call.map(torch.Tensor.double).run(functools.partial(op.loop, sizes=sizes))
    errors = []
    for allowed in (False, True):
        with tf32_allowed(allowed):
            outputs = call.run(functools.partial(op, sizes=sizes, algorithm=algorithm))
        errors.append(max(relative_errors(outputs, exact)))
    assert errors[0] < FORWARD[torch.float32]
    assert errors[1] < FORWARD[LIKE_TF32]
    if CAPABILITY == (9, 0):
        assert errors[1] > FORWARD[torch.float32]


@needs_cuda
@ops
def test_nan_in_tf32_appears_where_the_reference_has_it(op, tf32):
    for where, index in ((0, (2, 1)), (1, (1,)), (2, (1,)), (4, (3,))):
        call = op.call(Make(torch.float32, "cuda"), 6, 9, 64)
        call = Call(*(with_all_ones(x, index) if i == where else x for i, x in enumerate(call.args)))
        found = results(op, call)
        assert found.exact[0].isnan().any()
        found.assert_same_nans(NAMES[where])


@ops
@types
@pytest.mark.parametrize("hidden", [8, 24, 64, 120])
def test_values_and_gradients_on_the_cpu(op, dtype, hidden):
    assert assert_every_size(op, dtype, hidden, "cpu", "stepwise") == 4


def loop_over_steps(step, input, h, c, *weights):
    outputs = []
    for x in input:
        h, c = step(x, h, c, *weights)
        outputs.append(h)
    return torch.stack(outputs), h, c


@functools.lru_cache(maxsize=2)
def long_results(name, dtype, device):
    """A call of 4096 steps, its results in float64, and the errors of PyTorch's ops in the call's dtype."""
    op = OPS[name]
    call = op.call(Make(dtype, device), 4096, 16, 64, input_size=16)
    with torch.no_grad():
        exact = call.map(torch.Tensor.double).run(op.loop)
        composed = call.run(functools.partial(loop_over_steps, op.step))
    return call, exact, relative_errors(composed, exact)


LONG_RUNS = [("cpu", torch.float32, "stepwise")] + [
    on_gpu("cuda", dtype, a) for dtype, a in itertools.product(TYPES, ALGORITHMS)
]


@ops
@pytest.mark.parametrize("device,dtype,algorithm", LONG_RUNS, ids=lambda x: str(x).removeprefix("torch."))
def test_errors_do_not_accumulate_over_4096_steps(op, device, dtype, algorithm):
    """Within the bounds of a short sequence, and at most twice the error of torch's ops in this dtype."""
    call, exact, composed = long_results(op.name, dtype, device)
    outputs = call.run(functools.partial(op, algorithm=algorithm))
    errors = relative_errors(outputs, exact)
    for what, error, theirs in zip(("output", "h_n", "c_n"), errors, composed, strict=True):
        assert error <= 2 * theirs, f"{what}: relative L2 error {error} above twice {theirs}"
        assert error <= FORWARD[dtype], f"{what}: relative L2 error {error} above {FORWARD[dtype]}"


# ---- Directions, packed rows, gradients ------------------------------------------------------------------


@ops
@types
@runs
def test_the_reverse_direction_equals_the_reference(op, dtype, device, algorithm):
    for length, batch, hidden in ((1, 3, 8), (17, 9, 64), (6, 67, 120)):
        call = op.call(Make(dtype, device), length, batch, hidden)
        assert_equals_loop(op, call, algorithm, f"{length, batch, hidden}", reverse=True)


# With so few rows a kernel has room for both directions, and sums each in the same order as by itself. Larger
# sizes are compared with the reference below.
@ops
@types
@runs
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_both_directions_at_once_have_the_same_bits_as_one_by_one(op, dtype, device, algorithm, is_packed):
    if is_packed and algorithm == "cluster":
        pytest.skip("cluster takes no packed sequences")
    if is_packed:
        hidden = 136 if device == "cuda" else 24
        shapes = [(None, sizes[0], hidden, sizes) for sizes in ([5, 4, 3, 2, 1], [40, 40, 8, 1], [16] * 4)]
    elif device == "cuda":
        shapes = [(1, 3, 8, None), (17, 9, 64, None), (50, 40, 128, None), (5, 16, 120, None)]
    else:
        shapes = [(6, 9, 24, None)]
    for length, batch, hidden, sizes in shapes:
        call = op.bidirectional_call(Make(dtype, device), length, batch, hidden, sizes=sizes)
        both, one_by_one = (
            functools.partial(f, algorithm=algorithm) for f in (op.bidirectional, op.one_by_one)
        )
        (outputs, gradients), (expected, exact) = (forward_and_gradients(f, call) for f in (both, one_by_one))
        assert_same_bits(outputs, expected)
        assert_same_bits(call.run(both), expected)
        if is_packed:  # a group with several tiles of rows sums the bias's gradient in another order
            assert_all_near(gradients, exact, BACKWARD[dtype])
        else:
            assert_same_bits(gradients, exact)


@needs_cuda
@ops
@types
def test_both_directions_at_every_size(op, dtype):
    """Whichever kernel runs them: both in one cluster or grid of one or several tiles, or each by its own."""
    for hidden in (64, 256, 512, 600, 1024, 2048):
        for length, batch in ((9, 1), (6, 16), (5, 32), (4, 64), (3, 130)) if hidden < 2048 else ((2, 3),):
            call = op.bidirectional_call(Make(dtype, "cuda"), length, batch, hidden)
            found = results_of(op.bidirectional, op.bidirectional_loop, call)
            found.assert_near(dtype, f"length {length}, batch {batch}, hidden {hidden},")


@needs_cuda
@ops
@types
@algorithms
def test_both_directions_by_each_algorithm(op, dtype, algorithm):
    """Without room for both in one launch each has its own. It refuses what it refuses for one direction."""
    for hidden, batch in ((64, 300), (512, 67), (1024, 9), (2048, 3)):
        call = op.bidirectional_call(Make(dtype, "cuda"), 3, batch, hidden)
        f = functools.partial(op.bidirectional, algorithm=algorithm)
        if reason := why_not(algorithm, dtype, hidden, batch, gates=op.gates):
            with pytest.raises(RuntimeError, match=rf"^{op.name}: algorithm '{algorithm}' {reason}"):
                call.run(f)
            continue
        results_of(f, op.bidirectional_loop, call).assert_near(dtype, f"{hidden, batch}")


SIZES = {
    "one tile": [5, 4, 3, 2, 1],
    "across tiles": [17, 16, 16, 9, 8, 3, 1, 1],
    "one long row": [67] + [1] * 6,
    "equal lengths": [16] * 4,
    "one step": [130],
    "many tiles": [130, 130, 67, 40, 40, 8, 1],
}


@ops
@types
@runs_of_packed
@pytest.mark.parametrize("reverse", [False, True], ids=["rows shrink", "rows grow"])
def test_packed_rows(op, dtype, device, algorithm, reverse):
    for hidden in (8, 136, 600, 1024) if device == "cuda" else (8, 24):
        if why_not(algorithm, dtype, hidden, 130, device, is_packed=True, gates=op.gates):
            assert (dtype, op.gates, hidden > 512) == (torch.float32, 4, True)
            continue
        make = Make(dtype, device)
        weights = op.weights(make, hidden)
        for name, sizes in SIZES.items():
            call = op.call_with(make, None, sizes[0], weights, sizes)
            assert_equals_loop(op, call, algorithm, f"{hidden}, {name},", sizes=sizes, reverse=reverse)


@ops
@types
@runs
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_many_steps(op, dtype, device, algorithm, is_packed):
    """More rows than one chunk of the backward: each chunk's kernel continues where the last one ended."""
    if is_packed and algorithm == "cluster":
        pytest.skip("cluster takes no packed sequences")
    batch, hidden = (200, 8) if is_packed else (90, 24)
    sizes = [batch - t * (batch - 1) // 100 for t in range(100)] if is_packed else None
    assert (sum(sizes) if is_packed else 100 * batch) > 8192
    call = op.call(Make(dtype, device), 100, batch, hidden, input_size=3, sizes=sizes)
    for reverse in (False, True):
        assert_equals_loop(op, call, algorithm, sizes=sizes, reverse=reverse)


@ops
@runs
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (1, 2), (0, 2)], ids=str)
def test_gradients_of_some_outputs_only(op, device, algorithm, used):
    for dtype, hidden in itertools.product((torch.float32, torch.float16), (64, 120)):
        call = op.call(Make(dtype, device), 5, 9, hidden)
        found = []
        for f, c in (
            (functools.partial(op, algorithm=algorithm), call.leaves()),
            (op.loop, call.map(torch.Tensor.double).leaves()),
        ):
            outputs = c.run(f)
            grad_outputs = [g.to(dtype).to(outputs[0].dtype) for g in cotangents(outputs)]
            found.append(
                torch.autograd.grad(
                    [outputs[i] for i in used],
                    c.tensors,
                    [grad_outputs[i] for i in used],
                    materialize_grads=True,
                )
            )
        assert_all_near(*found, BACKWARD[dtype], f"from outputs {used}, gradient of argument")


@ops
@types
@runs
def test_the_gradient_of_a_sum_is_an_expanded_scalar(op, dtype, device, algorithm):
    call = op.call(Make(dtype, device), 5, 9, 64)
    exact = call.map(torch.Tensor.double).leaves()
    call = call.leaves()
    call.run(functools.partial(op, algorithm=algorithm))[0].sum().backward()
    exact.run(op.loop)[0].sum().backward()
    gradients = ([x.grad for x in c.tensors] for c in (call, exact))
    assert_all_near(*gradients, BACKWARD[dtype], "gradient")


@ops
@types
@runs
def test_a_gradient_is_the_same_whichever_others_are_required(op, dtype, device, algorithm):
    """And the outputs are, where nothing is saved for a backward."""
    call = op.call(Make(dtype, device), 5, 9, 64)
    f = functools.partial(op, algorithm=algorithm)
    if device == "cpu" and op.name == "lstm":  # oneDNN's layer may round otherwise where it saves nothing
        outputs, gradients = forward_and_gradients(f, call)
        assert_all_near(call.run(f), outputs, FORWARD[dtype])
        assert_same_bits(single_gradients(f, call), gradients)
    with torch.backends.mkldnn.flags(enabled=device != "cpu"):
        outputs, gradients = forward_and_gradients(f, call)
        assert_same_bits(call.run(f), outputs)
        assert_same_bits(single_gradients(f, call), gradients)


@ops
@types
@runs
def test_no_bias_equals_the_reference(op, dtype, device, algorithm):
    for sizes in (None, [9, 8, 3]) if algorithm != "cluster" else (None,):
        call = op.call(Make(dtype, device), 3, 9, 64, bias=False, sizes=sizes)
        assert_equals_loop(op, call, algorithm, sizes=sizes)


@ops
@types
@runs
def test_no_steps_return_the_states_unchanged(op, dtype, device, algorithm):
    call = op.call(Make(dtype, device), 0, 9, 64)
    outputs, gradients = forward_and_gradients(functools.partial(op, algorithm=algorithm), call)
    assert outputs[0].shape == (0, 9, 64)
    assert_same_bits(outputs[1:], call.args[1:3])
    grad_outputs = cotangents(outputs)
    assert_same_bits(gradients[1:3], grad_outputs[1:])
    assert all((g == 0).all() for g in gradients[3:])


@ops
@runs
def test_cell_states_in_float32_of_half_types(op, device, algorithm):
    for dtype in (torch.float16, torch.bfloat16):
        call = op.call(Make(dtype, device), 5, 9, 64)
        call = Call(*call.args[:2], Make(device=device, seed=1)(9, 64), *call.args[3:])
        outputs, gradients = forward_and_gradients(functools.partial(op, algorithm=algorithm), call)
        assert [y.dtype for y in outputs] == [dtype, dtype, torch.float32]
        assert gradients[2].dtype == torch.float32
        assert_equals_loop(op, call, algorithm)


@ops
@runs
def test_the_public_function_takes_the_algorithm(op, device, algorithm):
    input, h0, c0, *weights = op.call(Make(device=device), 5, 9, 64).args
    output, (h_n, c_n) = op.function(input, (h0, c0), *weights, algorithm=algorithm)
    assert_same_bits([output, h_n, c_n], op(input, h0, c0, *weights, algorithm=algorithm))
    assert op.algorithm_of(input, (h0, c0), *weights, algorithm=algorithm) == algorithm


# ---- NaN and infinity ------------------------------------------------------------------------------------
#
# A grid's blocks recognize a value that is not yet written by the bits of a NaN. A NaN with these bits must
# still pass through as a value.


@ops
@types
@runs
def test_nan_appears_where_the_reference_has_it(op, dtype, device, algorithm):
    call = op.call(Make(dtype, device), 6, 9, 64)
    call.args[0][2, 1, 0] = torch.nan
    found = results(op, call, algorithm)
    outputs, gradients, exact, exact_gradients = found
    assert outputs[0].isnan().any()
    assert not outputs[0].isnan().all()
    found.assert_same_nans()
    others = [b for b in range(9) if b != 1]
    assert_near(outputs[0][:, others], exact[0][:, others], FORWARD[dtype])
    assert_near(gradients[0][:, others], exact_gradients[0][:, others], BACKWARD[dtype])


@ops
@types
@runs
def test_infinity_appears_where_the_reference_has_it(op, dtype, device, algorithm):
    call = op.call(Make(dtype, device), 6, 9, 64)
    call.args[0][1, 0, 0] = torch.inf
    call.args[0][2, 3, 1] = -torch.inf
    call.args[2][5, 7] = torch.inf
    call.args[2][6, 8] = -torch.inf
    outputs = call.run(functools.partial(op, algorithm=algorithm))
    exact = call.map(torch.Tensor.double).run(op.loop)
    assert exact[2].isinf().any()
    assert not all(y.isfinite().all() for y in outputs)
    for y, e in zip(outputs, exact, strict=True):
        near = 10 * FORWARD[dtype]  # of an element, not of a norm
        torch.testing.assert_close(y.double(), e, rtol=near, atol=near, equal_nan=True)


def with_all_ones(x, index):
    """Writes the NaN whose bits are all ones."""
    x = x.clone()
    x.view(BITS[x.dtype])[index] = -1
    assert x[index].isnan().all()
    return x


@ops
@types
@runs
@pytest.mark.parametrize("where", range(len(NAMES)), ids=NAMES)
def test_a_nan_of_all_ones_is_a_nan_like_any_other(op, dtype, device, algorithm, where):
    call = op.call(Make(dtype, device), 6, 9, 64)
    index = {0: (2, 1), 1: (1,), 2: (1,)}.get(where, (3,))
    call = Call(*(with_all_ones(x, index) if i == where else x for i, x in enumerate(call.args)))
    found = results(op, call, algorithm)
    assert found.exact[0].isnan().any()
    found.assert_same_nans()


@ops
@types
@runs_of_packed
def test_nans_of_all_ones_in_packed_rows(op, dtype, device, algorithm):
    sizes = [9, 9, 5, 2]
    call = op.call(Make(dtype, device), None, 9, 64, sizes=sizes)
    call = Call(with_all_ones(call.args[0], (10,)), with_all_ones(call.args[1], (7,)), *call.args[2:])
    for reverse in (False, True):
        found = results(op, call, algorithm, sizes=sizes, reverse=reverse)
        assert found.outputs[0].isnan().any()
        assert not found.outputs[0].isnan().all()
        found.assert_same_nans()


@ops
@types
@runs
@pytest.mark.parametrize("where", range(3), ids=["output", "h_n", "c_n"])
def test_a_nan_of_all_ones_in_an_incoming_gradient(op, dtype, device, algorithm, where):
    call = op.call(Make(dtype, device), 6, 9, 64)
    grad_outputs = cotangents(call.run(functools.partial(op, algorithm=algorithm)))
    grad_outputs[where] = with_all_ones(grad_outputs[where], (3, 1) if where == 0 else (1,))
    found = results(op, call, algorithm, grad_outputs)
    assert found.gradients[0].isnan().any()
    assert not found.gradients[0].isnan().all()
    found.assert_same_nans()


# ---- The same bits each time -----------------------------------------------------------------------------


def sequence(op, algorithm, dtype=torch.float16, length=50, batch=67, hidden=128, seed=0):
    """A call that every algorithm can run, and the function that runs it."""
    return op.call(Make(dtype, "cuda", seed), length, batch, hidden), functools.partial(
        op, algorithm=algorithm
    )


def assert_same_bits_five_times(f, call):
    outputs, gradients = forward_and_gradients(f, call)
    for _ in range(4):
        again, gradients_again = forward_and_gradients(f, call)
        assert_same_bits(again, outputs)
        assert_same_bits(gradients_again, gradients)


@ops
@types
@runs
def test_five_runs_give_the_same_bits(op, dtype, device, algorithm):
    f = functools.partial(op, algorithm=algorithm)
    for length, batch, hidden in ((50, 67, 128), (50, 9, 64)) if device == "cuda" else ((5, 9, 24),):
        assert_same_bits_five_times(f, op.call(Make(dtype, device), length, batch, hidden))


@needs_cuda
@ops
@pytest.mark.parametrize(
    "dtype,algorithm,allowed,sizes",
    [
        (torch.float16, "stepwise", False, [(20, 64, 2048), (20, 128, 2048), (20, 200, 768)]),
        (torch.float32, "stepwise", False, [(30, 1, 1536), (30, 4, 2048), (30, 9, 772), (30, 16, 1024)]),
        (torch.float32, "auto", True, [(30, 67, 128), (30, 40, 512), (30, 9, 1024)]),
    ],
    ids=["large weights", "few rows", "tf32"],
)
def test_five_runs_of_other_kernels_give_the_same_bits(op, dtype, algorithm, allowed, sizes):
    with tf32_allowed(allowed):
        for length, batch, hidden in sizes:
            call = op.call(Make(dtype, "cuda"), length, batch, hidden)
            assert_same_bits_five_times(functools.partial(op, algorithm=algorithm), call)


@ops
@types
@runs_of_packed
def test_five_runs_of_packed_rows_give_the_same_bits(op, dtype, device, algorithm):
    sizes = [67, 67, 66, 40, 9, 8, 1]
    call = op.call(Make(dtype, device), None, 67, 136 if device == "cuda" else 24, sizes=sizes)
    assert_same_bits_five_times(functools.partial(op, algorithm=algorithm, sizes=sizes), call)


@ops
@types
@runs
def test_a_row_has_the_same_values_in_any_batch(op, dtype, device, algorithm):
    """Rows share tiles, groups and kernels, but no values."""
    call = op.call(Make(dtype, device), 9, 40, 64)
    f = functools.partial(op, algorithm=algorithm)
    output, h_n, c_n = call.run(f)
    other = call.args[0].clone()
    other[:, 1:] = 3 - other[:, 1:]
    assert_near(f(other, *call.args[1:])[0][:, :1], output[:, :1], FORWARD[dtype])
    for begin, end in ((0, 1), (0, 8), (3, 20), (32, 40)):
        rows = slice(begin, end)
        input, h0, c0, *weights = call.args
        found = f(input[:, rows], h0[rows], c0[rows], *weights)
        assert_all_near(found, [output[:, rows], h_n[rows], c_n[rows]], FORWARD[dtype])


@needs_cuda
@ops
@types
@algorithms
def test_a_side_stream_gives_the_same_bits(op, dtype, algorithm):
    call, f = sequence(op, algorithm, dtype)
    expected, expected_gradients = forward_and_gradients(f, call)
    grad_outputs = cotangents(expected)
    late = call.map(torch.zeros_like)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # about 0.05 s, in which work on another stream would read the zeros
        for x, value in zip(late.tensors, call.tensors, strict=True):
            x.copy_(value)
        outputs, gradients = forward_and_gradients(f, late, grad_outputs)
    torch.cuda.synchronize()
    assert_same_bits(outputs + gradients, expected + expected_gradients)


def captured(f, call, grad_outputs):
    """A graph of forward and backward, and its output tensors."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            forward_and_gradients(f, call, grad_outputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs, gradients = forward_and_gradients(f, call, grad_outputs)
    return graph, outputs + gradients


def replay(graph, call, new, found):
    """Replays the graph of `call` on the values of `new`. Whatever it fails to write stays NaN."""
    for x, value in zip(call.tensors, new.tensors, strict=True):
        x.copy_(value)
    for x in found:
        x.detach().fill_(torch.nan)
    graph.replay()


@needs_cuda
@ops
@types
@algorithms
@pytest.mark.parametrize("both", [False, True], ids=["one direction", "both directions"])
def test_a_captured_graph_replays_on_changed_input(op, dtype, algorithm, both):
    makers = [Make(dtype, "cuda", seed) for seed in range(3)]
    if both:
        f, n = functools.partial(op.bidirectional, algorithm=algorithm), 6
        call, *changed = (op.bidirectional_call(make, 9, 16, 64) for make in makers)
    else:
        f, n = functools.partial(op, algorithm=algorithm), 3
        call, *changed = (op.call(make, 9, 40, 128) for make in makers)
    grad_outputs = cotangents(forward_and_gradients(f, call)[0])
    graph, found = captured(f, call, grad_outputs)
    for new in changed:
        replay(graph, call, new, found)
        expected, expected_gradients = forward_and_gradients(f, new, grad_outputs)
        assert_all_near(found[:n], expected, FORWARD[dtype], "output")
        assert_all_near(found[n:], expected_gradients, BACKWARD[dtype], "gradient")
        if algorithm != "stepwise" and not both:  # in a graph cuBLAS may choose other kernels
            assert_same_bits(found[:n], expected)


@needs_cuda
@ops
def test_a_captured_graph_runs_packed_rows_stepwise_and_refuses_the_grid(op):
    """The grid copies the table of rows from the host, which a graph would not repeat."""
    sizes = [9, 9, 5, 2]
    call = op.call(Make(torch.float16, "cuda"), None, 9, 64, sizes=sizes)
    f = functools.partial(op, sizes=sizes)
    refused = why_not("grid", torch.float16, 64, 9, is_packed=True)
    assert op.plan(*call.args, sizes=sizes) == ("stepwise" if refused else "grid")
    outputs, _ = forward_and_gradients(f, call)
    grad_outputs = cotangents(outputs)  # must outlive the graph, which reads them
    graph, found = captured(f, call, grad_outputs)
    new = op.call(Make(torch.float16, "cuda", seed=1), None, 9, 64, sizes=sizes)
    replay(graph, call, new, found)
    exact, exact_gradients = forward_and_gradients(
        functools.partial(op.loop, sizes=sizes), new.map(torch.Tensor.double), grad_outputs
    )
    assert_all_near(found[:3], exact, FORWARD[torch.float16])
    assert_all_near(found[3:], exact_gradients, BACKWARD[torch.float16])
    dense = op.call(Make(torch.float16, "cuda"), 3, 9, 64)
    plan_of_dense = op.plan(*dense.args)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        plans = [op.plan(*call.args, sizes=sizes), op.plan(*dense.args)]
        if not refused:
            with pytest.raises(RuntimeError, match="'grid' can't be captured in a graph with a packed seq"):
                op.plan(*call.args, sizes=sizes, algorithm="grid")
        call.args[0] + 1  # an empty graph warns
    assert plans == ["stepwise", plan_of_dense]


@needs_cuda
@ops
@types
@algorithms
def test_the_same_bits_while_another_stream_fills_the_gpu(op, dtype, algorithm):
    call, f = sequence(op, algorithm, dtype)
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = a @ a
    torch.cuda.synchronize()
    with torch.cuda.stream(ours):  # allocates and loads modules, so that nothing below waits for that
        expected = [x.clone() for x in itertools.chain(*forward_and_gradients(f, call))]
        grad_outputs = cotangents(expected[:3])
    with torch.cuda.stream(theirs):
        torch.mm(a, a, out=product)
    torch.cuda.synchronize()
    with torch.cuda.stream(theirs):
        for _ in range(60):  # about 0.1 s
            torch.mm(a, a, out=product)
        products_done = torch.cuda.Event()
        products_done.record()
    with torch.cuda.stream(ours):
        found = forward_and_gradients(f, call, grad_outputs)
        assert not products_done.query(), "the products ended too early to test anything"
    torch.cuda.synchronize()
    assert_same_bits([*found[0], *found[1]], expected)


@needs_cuda
@types
@pytest.mark.parametrize("first,second", [on_gpu(*pair) for pair in itertools.product(ALGORITHMS, repeat=2)])
def test_two_sequences_on_two_streams_at_once(dtype, first, second):
    """Each fills the GPU. Neither may keep the other's blocks from running while its own wait for them."""
    work = [
        (torch.cuda.Stream(), *sequence(op, algorithm, dtype, length=200, seed=i))
        for i, (op, algorithm) in enumerate(zip(OPS.values(), (first, second), strict=True))
    ]
    expected = []
    for stream, call, f in work:
        with torch.cuda.stream(stream):
            results = forward_and_gradients(f, call)
            expected.append([x.clone() for x in itertools.chain(*results)])
            grad_outputs = cotangents(results[0])
        torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    start = torch.cuda.Event()
    start.record()
    found = []
    for stream, _, _ in work:
        stream.wait_event(start)
    for _ in range(3):
        for i, (stream, call, f) in enumerate(work):
            with torch.cuda.stream(stream):
                found.append((i, forward_and_gradients(f, call, grad_outputs)))
    torch.cuda.synchronize()
    for i, (outputs, gradients) in found:
        assert_same_bits([*outputs, *gradients], expected[i])


@needs_cuda
@ops
@algorithms
def test_no_call_waits_for_the_gpu(op, algorithm):
    for sizes in (None, [9, 9, 5, 2]) if algorithm != "cluster" else (None,):
        call = op.call(Make(torch.float16, "cuda"), 50, 9, 128, sizes=sizes)
        f = functools.partial(op, algorithm=algorithm, sizes=sizes)
        grad_outputs = cotangents(forward_and_gradients(f, call)[0])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            forward_and_gradients(f, call, grad_outputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- lltm_algorithm and lstm_algorithm -------------------------------------------------------------------


@ops
def test_the_plan_on_the_cpu_is_stepwise(op, dtype):
    call = op.call(Make(dtype), 3, 9, 64)
    for algorithm, backward in itertools.product(("auto", "stepwise"), (False, True)):
        assert op.plan(*call.args, algorithm=algorithm, backward=backward) == "stepwise"
    input, h0, c0, *weights = call.args
    assert op.algorithm_of(input, (h0, c0), *weights) == "stepwise"


@ops
@pytest.mark.parametrize("algorithm", ["cluster", "grid"])
def test_the_cpu_refuses_persistent_algorithms(op, dtype, algorithm):
    call = op.call(Make(dtype), 3, 9, 64)
    assert_refused(op, call, algorithm, "needs a CUDA device")
    sizes = [9, 5]
    packed_call = op.call(Make(dtype), None, 9, 64, sizes=sizes)
    assert_refused(op, packed_call, algorithm, "needs a CUDA device", sizes=sizes)
    input, h0, c0, *weights = call.args
    for function in (op.function, op.algorithm_of):
        with pytest.raises(RuntimeError, match=rf"algorithm '{algorithm}' needs a CUDA device .*'auto' runs"):
            function(input, (h0, c0), *weights, algorithm=algorithm)


@needs_cuda
@ops
@pytest.mark.parametrize("algorithm", ["cluster", "grid"])
def test_an_algorithm_that_cannot_run_is_refused_with_the_reason(op, algorithm):
    for dtype, hidden, batch in (
        (DOUBLE, 64, 9),
        (torch.float32, 1032, 9),
        (torch.float16, 2056, 1),
        (torch.bfloat16, 2048, 330),
    ):
        reason = why_not(algorithm, dtype, hidden, batch, gates=op.gates)
        assert reason
        call = op.call(Make(dtype, "cuda"), 2, batch, hidden, input_size=3)
        assert_refused(op, call, algorithm, reason)
        assert op.plan(*call.args, algorithm="stepwise") == "stepwise"
        exact = call.map(torch.Tensor.double).run(op.loop)
        assert_all_near(call.run(op), exact, FORWARD[dtype])  # by algorithm="auto"
    for hidden, dtype in ((136, torch.float32), (520, torch.float16)):
        call = op.call(Make(dtype, "cuda"), 2, 3, hidden, input_size=3)
        assert_refused(op, call, "cluster", why_not("cluster", dtype, hidden, 3))
    sizes = [9, 5]
    call = op.call(Make(torch.float16, "cuda"), None, 9, 64, sizes=sizes)
    assert_refused(op, call, "cluster", why_not("cluster", torch.float16, 64, 9, is_packed=True), sizes=sizes)


@needs_cuda
@ops
def test_a_grid_with_too_many_rows_in_a_group_is_refused(op):
    """Shared memory holds their cell states. Only the plan is made: nothing of these sizes is computed."""
    for dtype, hidden, batch in ((torch.float16, 256, 20_000), (torch.float32, 512, 20_000)):
        weights = op.weights(Make(dtype, "cuda"), hidden, input_size=1)
        state = torch.zeros(1, 1, dtype=dtype, device="cuda").expand(batch, hidden)
        call = Call(state.new_zeros(1, batch, 1), state, state, *weights)
        assert_refused_plan(
            op, call, "grid", f"has no room on this GPU for hidden_size = {hidden} and {batch = }"
        )
        assert op.plan(*call.args) == "stepwise"


@ops
def test_algorithm_under_autocast_is_that_of_the_cast_tensors(op, device):
    input, h0, c0, weight_ih, weight_hh, bias = op.call(Make(device=device), 3, 9, 256).args
    mixed = (input.bfloat16(), (h0, c0), weight_ih, weight_hh, bias)
    with pytest.raises(TypeError, match="expected h0 of dtype bfloat16"):
        op.algorithm_of(*mixed)
    lowered = (input.bfloat16(), (h0.bfloat16(), c0), *(w.bfloat16() for w in (weight_ih, weight_hh, bias)))
    with torch.autocast(device, torch.bfloat16):
        assert op.algorithm_of(*mixed) == op.algorithm_of(*lowered)
        if NEEDED["cluster"] <= CAPABILITY and device == "cuda":  # in float32 a cluster can't take 256 units
            assert op.algorithm_of(*mixed, algorithm="cluster") == "cluster"


@ops
def test_an_unknown_algorithm_is_a_value_error(op, device):
    input, h0, c0, *weights = op.call(Make(device=device), 3, 9, 64).args
    for name in ("fastest", "", "Grid", "auto "):
        for function in (op.function, op.algorithm_of):
            with pytest.raises(
                ValueError,
                match=rf"^{op.name}(_algorithm)?: expected algorithm to be 'auto', 'stepwise', 'cluster' or "
                rf"'grid', got '{name}'",
            ):
                function(input, (h0, c0), *weights, algorithm=name)


@ops
def test_auto_runs_everything(op, dtype, device):
    """The algorithm that it chooses gives the same bits when asked for by name."""
    for length, batch, hidden in ((3, 9, 64), (2, 3, 5), (2, 1, 1), (2, 130, 24), (0, 3, 8), (3, 0, 8)):
        call = op.call(Make(dtype, device), length, batch, hidden, input_size=3)
        name = op.plan(*call.args)
        is_fused = device == "cuda" and dtype != DOUBLE
        assert name in (ALGORITHMS if is_fused else ["stepwise"])
        outputs = call.run(op)
        assert_same_bits(call.run(functools.partial(op, algorithm=name)), outputs)
        assert_all_near(outputs, call.map(torch.Tensor.double).run(op.loop), FORWARD[dtype])


def recurrence_kernels(kernels):
    """The names of our kernels among a profiler's: 'void lltm_ext::recurrence_..._kernel<...>(...)'."""
    return [name for kernel in kernels for name in re.findall(r"\brecurrence_\w+_kernel\b", kernel)]


def forward_and_backward(f, call):
    """Functions that run one of the two. All modules are loaded when this returns."""
    call = call.leaves()
    outputs = call.run(f)
    grad_outputs = cotangents(outputs)
    backward = functools.partial(torch.autograd.grad, outputs, call.tensors, grad_outputs, retain_graph=True)
    backward()
    return {"forward": functools.partial(call.run, f), "backward": backward}


FUSED, POINTWISE = "recurrence_fused_step_kernel", "recurrence_pointwise_{}_kernel"
FEW_ROWS = "recurrence_small_batch_kernel"


def may_be_fused(dtype, hidden, sizes):
    """Whether a step may be one kernel: of half types on Hopper, where all steps have the same rows."""
    return CAPABILITY == (9, 0) and dtype.itemsize == 2 and hidden % 8 == 0 and sizes is None


def has_small_batch(dtype, hidden, batch):
    """Whether a stepwise sequence runs by the fused steps of few rows."""
    return dtype == torch.float32 and batch <= 16 and hidden % 4 == 0


@needs_cuda
@ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "batch,hidden,input_size",
    [
        (1, 64, 64),
        (9, 50, 13),
        (16, 256, 7),
        (3, 1, 1),
        (1, 512, 200),
        (2, 40, 8),
        (24, 264, 136),
        (33, 64, 32),
    ],
)
@pytest.mark.parametrize("allowed", [False, True], ids=["ieee", "tf32"])
def test_a_single_step_with_states_is_one_launch_of_everything(
    op, dtype, batch, hidden, input_size, allowed, profiler_sees_kernels
):
    call = op.call(Make(dtype, "cuda"), 1, batch, hidden, input_size=input_size)
    assert op.plan(*call.args) == "stepwise"
    with tf32_allowed(allowed):
        is_rounded = allowed and dtype == torch.float32
        results(op, call).assert_near(LIKE_TF32 if is_rounded else dtype)
        (kernels,) = kernels_of([forward_and_backward(op, call)["forward"]])
    assert recurrence_kernels(kernels) == ["recurrence_single_step_kernel"]
    assert len(kernels) == 1


@needs_cuda
@ops
@types
def test_the_planned_algorithm_is_the_one_that_runs(op, dtype, profiler_sees_kernels):
    cases, functions, make = [], [], Make(dtype, "cuda")
    weights = {hidden: op.weights(make, hidden) for hidden in (5, 64, 256, 600, 1024)}
    for hidden, batch, sizes, algorithm in itertools.product(
        weights, (3, 67, 300), (None, 3), ("auto", *ALGORITHMS)
    ):
        sizes = sizes and [batch, batch, 1]
        if algorithm != "auto" and why_not(
            algorithm, dtype, hidden, batch, is_packed=bool(sizes), gates=op.gates
        ):
            continue
        call = op.call_with(make, 3, batch, weights[hidden], sizes=sizes)
        f = functools.partial(op, sizes=sizes, algorithm=algorithm)
        for direction, function in forward_and_backward(f, call).items():
            planned = op.plan(*call.args, sizes=sizes, algorithm=algorithm, backward=direction == "backward")
            if planned != "stepwise":
                allowed = [f"recurrence_{kind}_{direction}_kernel" for kind in ("persistent", "large")]
            elif has_small_batch(dtype, hidden, batch):
                allowed = [FEW_ROWS]
            else:
                allowed = [POINTWISE.format(direction)] + may_be_fused(dtype, hidden, sizes) * [FUSED]
            cases.append((allowed, f"{algorithm}, {hidden=}, {batch=}, {sizes=}, {direction}: {planned}"))
            functions.append(function)
    for kernels, (allowed, what) in zip(kernels_of(functions), cases, strict=True):
        found = set(recurrence_kernels(kernels))
        assert len(found) == 1 and found <= set(allowed), (what, found, allowed)


@needs_cuda
@ops
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "hidden,batch,sizes,fused",
    [
        (256, 16, None, True),
        (1024, 64, None, True),
        (512, 256, None, True),
        (60, 16, None, False),  # rows are no multiples of 16 bytes
        (256, 16, [16, 16, 9], False),
        (2560, 256, None, False),  # a block would have too much of the product
    ],
)
def test_a_step_is_fused_where_that_is_faster(op, dtype, hidden, batch, sizes, fused, profiler_sees_kernels):
    """Product and cell in one kernel, on Hopper. These sizes are far from the limits in plan.h."""
    call = op.call(Make(dtype, "cuda"), 3, batch, hidden, sizes=sizes)
    f = functools.partial(op, sizes=sizes, algorithm="stepwise")
    expected = FUSED if fused and may_be_fused(dtype, hidden, sizes) else POINTWISE
    functions = forward_and_backward(f, call)
    for direction, kernels in zip(functions, kernels_of(functions.values()), strict=True):
        assert set(recurrence_kernels(kernels)) == {expected.format(direction)}


@needs_cuda
@ops
@pytest.mark.parametrize("sizes", [None, [11, 11, 9, 9, 2, 1]], ids=["dense", "packed"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("hidden", [4, 60, 100, 772, 1024, 1540, 2048])
def test_steps_of_small_batch_equal_the_loop(op, hidden, reverse, sizes):
    """Blocks with all their units and some without, K that is a multiple of what a warp takes, or not."""
    make = Make(torch.float32, "cuda")
    weights = op.weights(make, hidden)
    for batch in (1, 2, 4, 5, 8, 11, 16) if sizes is None else (11,):
        call = op.call_with(make, 5, batch, weights, sizes=sizes)
        assert_equals_loop(op, call, "stepwise", f"{batch=}", sizes=sizes, reverse=reverse)


@needs_cuda
@ops
@pytest.mark.parametrize("batch,hidden,few", [(16, 1536, True), (17, 1536, False), (3, 1538, False)])
def test_steps_of_small_batch_are_one_kernel(op, batch, hidden, few, profiler_sees_kernels):
    call = op.call(Make(torch.float32, "cuda"), 3, batch, hidden)
    functions = forward_and_backward(functools.partial(op, algorithm="stepwise"), call)
    for direction, kernels in zip(functions, kernels_of(functions.values()), strict=True):
        assert set(recurrence_kernels(kernels)) == {FEW_ROWS if few else POINTWISE.format(direction)}


@needs_cuda
@ops
@types
def test_both_directions_are_one_launch(op, dtype, profiler_sees_kernels):
    for sizes in (None, [16, 9, 3]):
        if why_not("grid", dtype, 256, 16, is_packed=bool(sizes), gates=op.gates):
            continue
        functions = forward_and_backward(
            op.bidirectional, op.bidirectional_call(Make(dtype, "cuda"), 3, 16, 256, sizes=sizes)
        )
        for direction, kernels in zip(functions, kernels_of(functions.values()), strict=True):
            assert recurrence_kernels(kernels) == [f"recurrence_persistent_{direction}_kernel"], sizes


# ---- Layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LLTM", "LSTM"])
@hypothesis.settings(EXAMPLES, max_examples=25)
@hypothesis.given(data=st.data())
def test_any_layer_equals_loops_over_its_sequences(data, name, device):
    """On dense or packed input, against loops over each sequence in float64."""
    op, layer_type = OPS[name.lower()], getattr(lltm_ext, name)
    length, batch = data.draw(st.integers(1, 12), label="length"), data.draw(st.integers(1, 6), label="batch")
    input_size = data.draw(st.integers(1, 9), label="input_size")
    hidden = data.draw(st.sampled_from([1, 5, 8, 16, 24, 40]), label="hidden_size")
    options = {
        "num_layers": data.draw(st.integers(1, 3), label="num_layers"),
        "bidirectional": data.draw(st.booleans(), label="bidirectional"),
        "bias": data.draw(st.booleans(), label="bias"),
    }
    lengths = data.draw(
        st.none() | st.lists(st.integers(1, length), min_size=batch, max_size=batch), label="lengths"
    )
    torch.manual_seed(0)
    layer, make = layer_type(input_size, hidden, **options, device=device), Make(device=device)
    values = make(length, batch, input_size).requires_grad_()
    states = options["num_layers"] * (2 if options["bidirectional"] else 1)
    hx = tuple(make(states, batch, hidden).requires_grad_() for _ in range(2))
    if lengths is None:
        output, (h_n, c_n) = layer(values, hx)
        outputs = [output[:, b] for b in range(batch)]
    else:
        rows, (h_n, c_n) = layer(pack_padded_sequence(values, lengths, enforce_sorted=False), hx)
        padded, _ = torch.nn.utils.rnn.pad_packed_sequence(rows)
        outputs = [padded[:n, b] for b, n in enumerate(lengths)]
    ours = [*outputs, h_n, c_n]
    gradients = torch.autograd.grad(ours, [values, *hx, *layer.parameters()], cotangents(ours))

    x, *exact_hx = (v.detach().double().requires_grad_() for v in (values, *hx))
    loop, exact, final = LoopOverSteps(layer, op.step), [], []
    for b, n in enumerate(lengths or [length] * batch):
        output, states = loop(x[:n, b : b + 1], [s[:, b : b + 1] for s in exact_hx])
        exact.append(output[:, 0])
        final.append(states)
    exact += [torch.cat(states, 1) for states in zip(*final, strict=True)]
    grad_outputs = [g.double() for g in cotangents(ours)]
    exact_gradients = torch.autograd.grad(exact, [x, *exact_hx, *loop.parameters()], grad_outputs)
    assert_all_near(ours, exact, FORWARD[torch.float32], "output")
    assert_all_near(gradients, exact_gradients, BACKWARD[torch.float32], "gradient")


# ---- Strides and alignment -------------------------------------------------------------------------------
#
# Last in this file, because a misaligned 16-byte access destroys the CUDA context.


def misaligned_transposed(x):
    """Transposed in memory, and starting at an odd element."""
    return misaligned(x.mT.contiguous()).mT if x.dim() > 1 else misaligned(x)


LAYOUTS = OpSuite.layouts | {"misaligned_transposed": misaligned_transposed}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@ops
@types
@runs
@layouts
def test_strides_of_one_argument_and_of_all(op, dtype, device, algorithm, layout):
    call = op.call(Make(dtype, device), 3, 9, 64)
    for which in (*({i} for i in range(len(NAMES))), set(range(len(NAMES)))):
        changed = Call(*(layout(x) if i in which else x for i, x in enumerate(call.args)))
        what = f"{[NAMES[i] for i in sorted(which)]}:"
        results(op, changed, algorithm).assert_near(dtype, what)


@ops
@layouts
@pytest.mark.parametrize("onednn", [True, False], ids=["oneDNN", "no oneDNN"])
def test_strides_of_products_large_enough_for_onednn(op, layout, onednn):
    """The CPU multiplies only dense float32 matrices of this size by oneDNN, if torch allows it."""
    call = op.call(Make(), 2, 16, 256, input_size=300).map(layout)
    with torch.backends.mkldnn.flags(enabled=onednn):
        results(op, call).assert_near(torch.float32)


@ops
@types
@runs
@layouts
def test_strides_of_incoming_gradients(op, dtype, device, algorithm, layout):
    call = op.call(Make(dtype, device), 3, 9, 64)
    grad_outputs = [layout(g) for g in cotangents(call.run(functools.partial(op, algorithm=algorithm)))]
    results(op, call, algorithm, grad_outputs).assert_near(dtype)


@ops
@types
@runs_of_packed
@layouts
def test_strides_of_packed_rows_and_their_gradients(op, dtype, device, algorithm, layout):
    sizes = [9, 5, 2]
    call = op.call(Make(dtype, device), None, 9, 64, sizes=sizes).map(layout)
    f = functools.partial(op, algorithm=algorithm, sizes=sizes)
    grad_outputs = [layout(g) for g in cotangents(call.run(f))]
    results(op, call, algorithm, grad_outputs, sizes=sizes).assert_near(dtype)
