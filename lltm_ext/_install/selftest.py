"""`python -m lltm_ext selftest`: every op and algorithm against its reference, on every device.

A check runs the op and, in float64 on the CPU, its reference in pure PyTorch, on the same random values. It
compares the results, and the gradients for random output gradients, by their relative L2 error.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lltm_ext
from lltm_ext._activations import ACTIVATIONS
from lltm_ext._arguments import SequenceCall
from lltm_ext._install import build_record, toolchain
from lltm_ext._loop import run_loop
from lltm_ext._unary import UNARY_OPS
from lltm_ext.fake_quantize import fake_quantize_reference
from lltm_ext.gemm import gemm_reference
from lltm_ext.lltm import lltm_cell_reference, lltm_reference
from lltm_ext.lstm import lstm_reference
from lltm_ext.scan import scan_reference
from lltm_ext.stochastic_round import stochastic_round_reference

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float64, torch.float32, *HALVES)
# The largest relative L2 error of a result, and of a gradient. The tests have the same bounds.
FORWARD = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
BACKWARD = {torch.float64: 2e-12, torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}

Function = Callable[..., Any]  # takes tensors, returns tensors, in tuples or not
Inputs = tuple[Tensor, ...]


class Unable(Exception):
    """This device, dtype or size is not supported; the message says why."""


class Make:
    """Random values, the same everywhere and, up to rounding, in every dtype."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)).to(self.dtype)


class Check(NamedTuple):
    """Checks with the same name share a row of the table."""

    name: str
    ours: Function
    reference: Function
    inputs: Callable[[Make], Inputs]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    forward: float | None = None  # another bound for the results
    backward: float | None = None


# ---- the checks --------------------------------------------------------------------------------------------


def checks() -> Iterator[Check]:
    yield from of_elementwise_ops()
    yield made_at_run_time()
    yield from of_quantizers()
    yield from of_gemm()
    yield from of_scans()
    yield compare("lltm_cell", lltm_cell_reference, cell_inputs)
    yield from of_sequences("lltm", 3, lltm_reference)
    yield from of_sequences("lstm", 4, lstm_reference)
    yield Check("recurrence, gru", own_gru, torch_gru, functools.partial(gru_inputs, 9, 16, 64))
    for hidden in (64, 136):
        yield from of_own_cell("recurrence, norms", lltm_ext.cells.dreamer_gru, hidden)
    yield from of_own_cell("recurrence, heads", lltm_ext.cells.gru, 128, heads=2)


def public(name: str) -> Function:
    """The function of this name, looked up when it is called."""
    return lambda *args, **kwargs: getattr(lltm_ext, name)(*args, **kwargs)


def compare(
    row: str,
    reference: Function,
    inputs: Callable[[Make], Inputs],
    how: Callable[[Function], Function] = lambda function: function,
) -> Check:
    """Compares the op that the row is named after and its reference, both called through ``how``."""
    return Check(row, how(public(row.partition(",")[0])), how(reference), inputs)


def with_options(**options: Any) -> Callable[[Function], Function]:
    return lambda function: functools.partial(function, **options)


def of_elementwise_ops() -> Iterator[Check]:
    for name, op in UNARY_OPS.items():
        yield compare(name, op.reference, values)
        yield compare(name, op.reference, values, lambda f: lambda x: f(x.t()[::2]))
        yield Check(name, in_place(name), op.reference, values)
    for grad in ("clipped", "tanh"):
        yield compare("binarize", UNARY_OPS["binarize"].reference, values, with_options(grad=grad))


def values(make: Make) -> Inputs:
    return (make(37, 65, scale=2),)


def in_place(name: str) -> Function:
    return lambda x: public(f"{name}_")(x.clone())


def made_at_run_time() -> Check:
    """Checks an op that is compiled at run time; it has no kernel for the CPU."""
    slopes = {"x": "T d = a + fabs(x); return grad * y * a / (d * d);", "y": "return grad * output / y;"}

    def ours(x: Tensor, y: Tensor) -> Tensor:
        if not x.is_cuda:
            raise Unable("its formula is compiled for CUDA devices")
        signature, formula = "T scaled_softsign(T x, T y, T a)", "return y * x / (a + fabs(x));"
        return lltm_ext.elementwise(signature, formula, backward=slopes, scalars={"a": 2.0})(x, y)

    def inputs(make: Make) -> Inputs:
        return make(37, 65), (1.5 + torch.tanh(make(37, 65).double())).to(make.dtype)  # y is not near 0

    # The gradient of y reads the rounded output.
    return Check("elementwise, made now", ours, lambda x, y: y * x / (2 + x.abs()), inputs)


def of_quantizers() -> Iterator[Check]:
    grid = {"quant_min": -8, "quant_max": 7}
    by_numbers, by_channel = with_options(scale=0.25, zero_point=1, **grid), with_options(**grid, axis=1)
    yield compare("fake_quantize", fake_quantize_reference, steps, by_numbers)
    yield compare("fake_quantize, learnt", fake_quantize_reference, steps_by_channel, by_channel)
    for dtype in HALVES:
        # Rounding to nearest would be off by a fifth of eps; the mean of this many draws is off by 0.004.
        bound = torch.finfo(dtype).eps / 32
        ours = functools.partial(average_of_draws, dtype)
        yield Check("stochastic_round", ours, lambda x: x, single_values, (dtype,), forward=bound)


def steps_by_channel(make: Make) -> Inputs:
    """Values, scales and zero points; the values are far from ties, so rounding them does not matter."""
    scale, zero_point = 0.25 + 0.1 * torch.tanh(make(33).double()), (2 * make(33)).round() + 0.25
    x = (5 * make(65, 33).double()).round() + 0.3 * torch.tanh(make(65, 33).double())
    return (x * scale).to(make.dtype), scale.to(make.dtype), zero_point.to(make.dtype)


def steps(make: Make) -> Inputs:
    x, scale, _ = steps_by_channel(make)
    return ((x.double() / scale.double() * 0.25).to(make.dtype),)


def single_values(make: Make) -> Inputs:
    return (Make(torch.float32)(257),)


def average_of_draws(dtype: torch.dtype, x: Tensor) -> Tensor:
    drawn = lltm_ext.stochastic_round(x.expand(4096, -1), dtype)
    down, up, _ = stochastic_round_reference(x.detach(), dtype)
    if not ((drawn == down) | (drawn == up)).all():
        raise ValueError("stochastic_round: got a value that is none of the input's two neighbours")
    return drawn.double().mean(0)


def of_gemm() -> Iterator[Check]:
    def transposed(function: Function) -> Function:
        return lambda a, b: function(a.mT, b.mT)

    def with_bias(activation: str, function: Function) -> Function:
        return lambda a, b, bias: function(a, b, bias=bias, activation=activation)

    gemm = functools.partial(compare, reference=gemm_reference)
    for m, k, n in ((63, 65, 67), (128, 64, 256), (17, 1001, 5), (8, 512, 256), (256, 512, 384)):
        yield gemm("gemm", inputs=matrices((m, k), (k, n)))
    for shapes in ((65, 63), (67, 65)), ((512, 256), (384, 512)):
        yield gemm("gemm, transposed", inputs=matrices(*shapes), how=transposed)
    for second in ((7, 65, 67), (65, 67)):
        yield gemm("gemm, batched", inputs=matrices((7, 63, 65), second))
    for activation in ACTIVATIONS:
        how = functools.partial(with_bias, activation)
        for m, k, n in ((63, 65, 67), (128, 64, 256)):
            yield gemm("gemm, bias, activation", inputs=matrices((m, k), (k, n), (n,)), how=how)
    for m, k, n in ((63, 65, 67), (256, 512, 384)):
        operands = matrices((m, k), (k, n))
        for precision, bound in (("bf16x6", None), ("bf16x9", None), ("tf32", 1e-3)):
            ours = functools.partial(public("gemm"), precision=precision)
            yield Check(f"gemm, {precision}", ours, gemm_reference, operands, (torch.float32,), bound, bound)


def matrices(*shapes: tuple[int, ...]) -> Callable[[Make], Inputs]:
    """Makes matrices. The first is scaled so that the products are of size 1."""
    return lambda make: tuple(make(*s, scale=1 if i else s[-1] ** -0.5) for i, s in enumerate(shapes))


def of_scans() -> Iterator[Check]:
    for steps, channels in ((129, 65), (5, 2049), (9000, 3)):
        inputs = functools.partial(coefficients, steps, channels)
        yield compare("scan", scan_reference, inputs)
        yield compare("scan, reverse", scan_reference, inputs, with_options(reverse=True))


def coefficients(steps: int, channels: int, make: Make) -> Inputs:
    """Makes a, b and initial of a scan. No product of many a is large."""
    a = torch.tanh(make(steps, channels).double()).to(make.dtype)
    return a, make(steps, channels), make(channels)


def cell_inputs(make: Make) -> Inputs:
    """Makes input, weights, bias, old_h and old_cell."""
    return make(16, 40), make(3 * 64, 64 + 40, scale=0.1), make(3 * 64), make(16, 64), make(16, 64)


def of_sequences(name: str, gates: int, reference: Function) -> Iterator[Check]:
    reference = functools.partial(paired, reference)
    for length, batch, hidden in ((9, 16, 64), (7, 40, 128)):
        inputs = functools.partial(sequence, gates, length, batch, hidden)
        for algorithm in ("auto", "stepwise", "cluster", "grid"):
            ours = functools.partial(by_algorithm, name, algorithm)
            yield Check(f"{name}, {algorithm}", ours, reference, inputs)


def sequence(gates: int, length: int, batch: int, hidden: int, make: Make) -> Inputs:
    """Makes input, h0, c0, weight_ih, weight_hh and bias."""
    weights = make(gates * hidden, 40, scale=40**-0.5), make(gates * hidden, hidden, scale=0.5 * hidden**-0.5)
    states = make(batch, hidden, scale=0.5), make(batch, hidden)
    return make(length, batch, 40), *states, *weights, make(gates * hidden)


def paired(function: Function, input: Tensor, h0: Tensor, c0: Tensor, *weights: Tensor, **how: Any) -> Any:
    return function(input, (h0, c0), *weights, **how)


def by_algorithm(name: str, algorithm: str, *tensors: Tensor) -> Any:
    for backward in (False, True):
        try:
            paired(public(f"{name}_algorithm"), *tensors, algorithm=algorithm, backward=backward)
        except RuntimeError as error:
            reason, can_not, _ = str(error).partition(" (algorithm 'auto' runs everything)")
            raise Unable(reason.removeprefix(f"{name}: ")) if can_not else error from None
    return paired(public(name), *tensors, algorithm=algorithm)


def own_gru(*tensors: Tensor) -> Any:
    *arguments, b_hn = tensors
    return lltm_ext.cells.gru(*arguments, b_hn=b_hn)


def torch_gru(
    input: Tensor, h0: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor, b_hn: Tensor
) -> Any:
    weights = [weight_ih, weight_hh, bias, torch.nn.functional.pad(b_hn, (2 * len(b_hn), 0))]
    output, h_n = torch.gru(input, h0[None], weights, True, 1, 0.0, False, False, False)
    return output, h_n[0]


def gru_inputs(length: int, batch: int, hidden: int, make: Make) -> Inputs:
    """Makes input, h0, weight_ih, weight_hh, bias and b_hn."""
    input, h0, _, *weights = sequence(3, length, batch, hidden, make)
    return input, h0, *weights, make(hidden)


def of_own_cell(row: str, cell: lltm_ext.RecurrentCell, hidden: int, heads: int = 1) -> Iterator[Check]:
    """The cell's kernels against a loop of its function, by torch's ops."""
    inputs = functools.partial(own_inputs, cell, hidden, heads)
    for algorithm in ("auto", "stepwise", "cluster", "grid"):
        ours = functools.partial(own_cell, cell, algorithm)
        yield Check(row, ours, functools.partial(own_loop, cell), inputs)


def own_inputs(cell: lltm_ext.RecurrentCell, hidden: int, heads: int, make: Make) -> Inputs:
    """Makes input, h0, weight_ih, weight_hh, bias and the cell's parameters."""
    input, h0, _, weight_ih, _, bias = sequence(cell.gates, 9, 11, hidden, make)
    size = hidden // heads
    weight_hh = make(cell.gates * hidden, size, scale=0.5 * size**-0.5)
    return input, h0, weight_ih, weight_hh, bias, *(make(n * hidden) for n in cell.widths().values())


def with_names(cell: lltm_ext.RecurrentCell, tensors: Inputs) -> tuple[Any, ...]:
    """Input, the states, which are zeros besides h0, the weights, and the parameters by their names."""
    input, h0, *weights = tensors[:5]
    states = (h0, *(torch.zeros_like(h0) for _ in cell.state_names[1:]))
    named = dict(zip(cell.parameters, tensors[5:], strict=True))
    return input, states if len(states) > 1 else h0, *weights, named


def own_cell(cell: lltm_ext.RecurrentCell, algorithm: str, *tensors: Tensor) -> Any:
    *arguments, named = with_names(cell, tensors)
    for backward in (False, True):
        try:
            cell.algorithm(*arguments, **named, algorithm=algorithm, backward=backward)
        except (RuntimeError, ValueError) as error:
            reason, can_not, _ = str(error).partition(" (algorithm 'auto' runs everything)")
            raise Unable(reason.partition(": ")[2]) if can_not else error from None
    output, final = cell(*arguments, **named, algorithm=algorithm)
    return output, *(final if isinstance(final, tuple) else (final,))


def own_loop(cell: lltm_ext.RecurrentCell, *tensors: Tensor) -> Any:
    input, states, weight_ih, weight_hh, bias, named = with_names(cell, tensors)
    parameters = cell.values_of_units(named, tensors[1].shape[1])
    states = states if isinstance(states, tuple) else (states,)
    call = SequenceCall(input, states, weight_ih, weight_hh, bias, parameters)
    output, final = run_loop(cell, call)
    return output, *final


# ---- a check -----------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """What the checks of a row found in one dtype."""

    errors: tuple[float, ...] | None  # the largest of results and of gradients; None: no check completed
    faults: tuple[str, ...]
    unable: tuple[str, ...]

    def __str__(self) -> str:
        if self.faults:
            return "FAILED"
        return " ".join(f"{e:.0e}" if e else "0" for e in self.errors) if self.errors else "-"


def examine(row: list[Check], dtype: torch.dtype, device: torch.device) -> Cell:
    errors, faults, unable = [], [], []
    for check in row:
        if dtype not in check.dtypes:
            continue
        bounds = check.forward or FORWARD[dtype], check.backward or BACKWARD[dtype]
        try:
            found = errors_of(check, dtype, device)
        except Unable as reason:
            unable.append(str(reason))
        except Exception as error:  # any error: the next check still runs
            faults.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            errors.append(found)
            faults += [
                f"relative L2 error of the {what} {error:.1e}, expected at most {bound:.1e}"
                for what, error, bound in zip(("result", "gradient"), found, bounds, strict=True)
                if error > bound
            ]
    worst = tuple(map(max, zip(*errors, strict=True))) or None
    return Cell(worst, tuple(dict.fromkeys(faults)), tuple(dict.fromkeys(unable)))


@contextmanager
def no_tf32() -> Iterator[None]:
    """Turns TF32 off, torch's default for sequences: float32's bounds are those of IEEE arithmetic."""
    rnn: Any = torch.backends.cudnn.rnn
    before = rnn.fp32_precision
    rnn.fp32_precision = "ieee"
    try:
        yield
    finally:
        rnn.fp32_precision = before


@no_tf32()
def errors_of(check: Check, dtype: torch.dtype, device: torch.device) -> tuple[float, ...]:
    inputs = [x.to(device) for x in check.inputs(Make(dtype))]
    actual = forward_and_gradients(check.ours, inputs, dtype)
    return tuple(map(largest_error, actual, expected(check.reference, check.inputs, dtype)))


@functools.cache  # serves other devices, and checks of the same function
def expected(
    reference: Function, inputs: Callable[[Make], Inputs], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    return forward_and_gradients(reference, [x.double() for x in inputs(Make(dtype))], dtype)


def forward_and_gradients(
    function: Function, inputs: list[Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and the gradients of the inputs for random output gradients in `dtype`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = flat(function(*leaves))
    make = Make(dtype)
    cotangents = [make(*y.shape).to(y) for y in outputs]
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    return [y.detach().double().cpu() for y in outputs], [g.double().cpu() for g in gradients]


def flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [y for group in outputs for y in flat(group)]


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative L2 error; infinite for NaN."""
    largest = 0.0
    for ours, theirs in zip(actual, expected, strict=True):
        if ours.shape != theirs.shape:
            raise ValueError(f"expected shape {list(theirs.shape)}, got {list(ours.shape)}")
        largest = max(largest, ((ours - theirs).norm() / theirs.norm()).nan_to_num(math.inf, math.inf).item())
    return largest


# ---- all of them -------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    start = time.monotonic()
    torch.manual_seed(0)
    rows: dict[str, list[Check]] = {}
    for check in checks():
        rows.setdefault(check.name, []).append(check)
    print("Relative L2 errors of results and of gradients, against the reference in float64")
    with tempfile.TemporaryDirectory() as folder:
        # The cache is empty, so that ops made at run time are compiled.
        os.environ["LLTM_EXT_CACHE"] = f"{folder}/cache"
        cells = [cell for device in devices() for cell in table(device, rows)]
    failed, not_run = (sum(str(cell) == what for cell in cells) for what in ("FAILED", "-"))
    passed, seconds = len(cells) - failed - not_run, time.monotonic() - start
    print(f"\n{passed} passed, {failed} failed, {not_run} can't run here, in {seconds:.0f} s")
    return 1 if failed else 0


def trial(done: Sequence[str] = ()) -> Iterator[tuple[str, str | None]]:
    """Calls each op once, forward and backward, on the CPU and on a GPU that the modules are built for.

    Yields each name before the call, which may kill the process, and again with its error if it fails.
    """
    torch.manual_seed(0)
    first: dict[str, Check] = {}
    for check in checks():
        first.setdefault(check.name, check)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLTM_EXT_CACHE"] = folder
        for device in ("cpu", *supported_gpus()[:1]):
            for op, check in first.items():
                name = f"{op} on {device}"
                if name in done:
                    continue
                yield name, None
                dtype = torch.float32 if torch.float32 in check.dtypes else check.dtypes[0]
                for fault in examine([check], dtype, torch.device(device)).faults:
                    yield name, fault


def supported_gpus() -> list[str]:
    record = build_record.read()
    if record["cuda"] is None or not torch.cuda.is_available():
        return []
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    built = record["architectures"]
    return [f"cuda:{i}" for i, (x, y) in enumerate(capabilities) if toolchain.runs_on(built, f"{x}.{y}")]


def devices() -> Iterator[torch.device]:
    yield torch.device("cpu")
    record = build_record.read()
    if not torch.cuda.is_available():
        print("\nNo GPU is tested: torch sees none")
    elif record["cuda"] is None:
        print(f"\nNo GPU is tested: lltm_ext {record['version']} is built for the CPU only")
    else:
        yield from (torch.device("cuda", i) for i in range(torch.cuda.device_count()))


def table(device: torch.device, rows: dict[str, list[Check]]) -> Iterator[Cell]:
    """Prints each row as soon as it is known; then what failed, and what can't run and why."""
    title = device.type if device.type == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"
    width = max(map(len, rows))
    print(f"\n{title}\n{'':{width}}", *(f"{str(d).removeprefix('torch.'):>13}" for d in DTYPES))
    lines: dict[str, list[str]] = {}
    for name, row in rows.items():
        cells = {d: examine(row, d, device) for d in DTYPES if any(d in check.dtypes for check in row)}
        print(f"{name:{width}}", *(f"{cells.get(d, '')!s:>13}" for d in DTYPES), flush=True)
        for dtype, cell in cells.items():
            for mark, texts in (("FAILED", cell.faults), ("-", cell.unable)):
                for text in texts:
                    lines.setdefault(f"{mark} {name}: {text}", []).append(str(dtype).removeprefix("torch."))
        yield from cells.values()
    for line, dtypes in lines.items():
        print(f"{line} ({', '.join(dtypes)})")
