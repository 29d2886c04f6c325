"""Elementwise ops: GB/s over sizes and host time, ours against torch's and a plain copy."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from harness import DTYPES, INK, OURS, Bench, color, finish, parse, series, sets_beyond_cache
from torch import Tensor

import lltm_ext

COPY = "copy"
DEVICE, HOST, RUNTIME, FIRST = "device time", "host time", "made at run time", "first call"
LARGE = 2**24  # from this size a copy is limited by memory only
aten, ops = torch.ops.aten, torch.ops.lltm_ext
Function = Callable[..., Tensor]


class Case(NamedTuple):
    """Our op and torch's, on ``inputs`` random tensors. At least ``moved`` tensors are read or written."""

    ours: Function
    torchs: Function
    inputs: int = 1
    moved: float = 2
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    eager: tuple[str, ...] = ()  # can't be captured: torch's reads its parameters back from the GPU


def training(function: Function) -> Function:
    """Forward and backward of a function of one tensor."""

    def step(input: Tensor, grad_output: Tensor) -> Tensor:
        input = input.detach().requires_grad_()
        return torch.autograd.grad(function(input), input, grad_output)[0]

    return step


def straight_through(step: Function) -> Function:
    """The usual PyTorch idiom."""
    return lambda x: x + (step(x) - x).detach()


def torch_binarize(x: Tensor) -> Tensor:
    return (x > 0.5).to(x.dtype)


def clipped_backward(g: Tensor, x: Tensor) -> Tensor:
    return g * ((x - 0.5).abs() <= 0.5)


def tanh_backward(g: Tensor, x: Tensor) -> Tensor:
    return g * (1 - torch.tanh((x - 0.5) / 0.5).square())


def binarize_backward(grad: str) -> Function:
    return lambda g, x: ops.binarize_backward(g, x, 0.5, 0.0, 1.0, grad)


# ---- Quantizers: 8 bits, a scale for the tensor or for each row of 1,024.

RANGE = (-128, 127)


@functools.cache
def scales(channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(scales, zero points)"""
    scale = torch.full((channels,), 0.02, device=device)
    return scale, torch.zeros(channels, dtype=torch.int32, device=device)


@functools.cache
def learned(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.full((1,), 0.02, device=device), torch.zeros(1, device=device)


def per_tensor(function: Callable[..., Tensor]) -> Function:
    return lambda x: function(x, 0.02, 0, *RANGE)


def per_row(function: Callable[..., Tensor]) -> Function:
    return lambda x: function(x.view(-1, 1024), *scales(x.numel() // 1024, x.device), 0, *RANGE).view_as(x)


def ours_per_row(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int) -> Tensor:
    return lltm_ext.fake_quantize(x, scale, zero_point, low, high, axis=axis)


def learning(function: Callable[..., Tensor]) -> Function:
    """Forward and backward, to the input, the scale and the zero point."""

    def step(x: Tensor, grad_output: Tensor) -> Any:
        leaves = [p.detach().requires_grad_() for p in (x, *learned(x.device))]
        return torch.autograd.grad(function(*leaves, *RANGE), leaves, grad_output)

    return step


def torch_learned(*args: Any) -> Tensor:
    return torch._fake_quantize_learnable_per_tensor_affine(*args, 1.0)


def pair(
    how: Callable[[Function], Function], ours: Function, torchs: Function, *rest: Any, **more: Any
) -> Case:
    return Case(how(ours), how(torchs), *rest, **more)


CASES: Mapping[str, Case] = {
    "sigmoid": Case(lltm_ext.sigmoid, torch.sigmoid),
    "sigmoid backward": Case(ops.sigmoid_backward, aten.sigmoid_backward, 2, 3),
    "relu": Case(lltm_ext.relu, torch.relu),
    "relu backward": Case(ops.relu_backward, lambda g, y: aten.threshold_backward(g, y, 0), 2, 3),
    **{
        name: Case(getattr(lltm_ext, name), getattr(torch, name))
        for name in ("round", "floor", "ceil", "trunc")
    },
    "binarize": Case(lltm_ext.binarize, torch_binarize),
    "binarize clipped backward": Case(binarize_backward("clipped"), clipped_backward, 2, 3),
    "binarize tanh backward": Case(binarize_backward("tanh"), tanh_backward, 2, 3),
    "round, straight through": pair(training, lltm_ext.round, straight_through(torch.round), 2),
    "binarize, straight through": pair(training, lltm_ext.binarize, straight_through(torch_binarize), 2),
    "fake_quantize": pair(per_tensor, lltm_ext.fake_quantize, torch.fake_quantize_per_tensor_affine),
    "fake_quantize, training": pair(
        lambda f: training(per_tensor(f)), lltm_ext.fake_quantize, torch.fake_quantize_per_tensor_affine, 2, 4
    ),
    "… per row of 1,024": Case(
        training(per_row(ours_per_row)),
        training(per_row(torch.fake_quantize_per_channel_affine)),
        2,
        4,
        eager=("torch",),
    ),
    # torch's learns in float32 only.
    "… learning the scale": pair(
        learning, lltm_ext.fake_quantize, torch_learned, 2, 5, ("float32",), eager=("torch",)
    ),
    # torch has no such op: its rounding to nearest.
    "stochastic_round": pair(
        lambda f: lambda x: f(x, torch.bfloat16), lltm_ext.stochastic_round, Tensor.to, 1, 1.5, ("float32",)
    ),
}
# Host time is measured of these, with and without a gradient.
CALLED = ("sigmoid", "relu", "round", "binarize")


def measure(bench: Bench, name: str, dtype: str, n: int) -> dict[str, Any]:
    case = CASES[name]
    size = DTYPES[dtype].itemsize
    sets = sets_beyond_cache(int(case.moved * n * size), bench.device)
    inputs = [
        tuple(torch.randn(n, device=bench.device, dtype=DTYPES[dtype]) for _ in range(case.inputs))
        for _ in range(sets)
    ]
    calls = {OURS: case.ours, "torch": case.torchs, COPY: lambda x, *_: x.clone()}
    row: dict[str, Any] = {"part": DEVICE, "op": name, "dtype": dtype, "n": n}
    # In a graph a large copy takes a slower path.
    eager = [*case.eager, *([COPY] if n >= LARGE else [])]
    for candidate, milliseconds in bench.device_milliseconds(calls, inputs, eager).items():
        moved = (2 if candidate == COPY else case.moved) * n * size
        row |= {f"{candidate} ms": milliseconds, f"{candidate} GB/s": moved / milliseconds / 1e6}
    row["torch / ours"] = row["torch ms"] / row[f"{OURS} ms"]
    row["ours / copy"] = row[f"{OURS} GB/s"] / row[f"{COPY} GB/s"]
    if n >= LARGE and bench.cuda:
        del inputs, calls
        torch.cuda.empty_cache()
    return row


def measure_host(bench: Bench, name: str, dtype: str, grad: bool) -> dict[str, Any]:
    x = torch.randn(1024, device=bench.device, dtype=DTYPES[dtype], requires_grad=grad)
    case = CASES[name]
    times = bench.host_microseconds({OURS: lambda: case.ours(x), "torch": lambda: case.torchs(x)})
    row: dict[str, Any] = {"part": HOST, "op": name, "dtype": dtype, "grad": grad}
    row |= {f"{candidate} us": time for candidate, time in times.items()}
    return row | {"ours - torch us": times[OURS] - times["torch"]}


# ---- Ops made at run time

FORMULA = "return x <= 0 ? T(0) : x;"
SLOPE = {"x": "return output <= 0 ? T(0) : grad;"}
FIRST_CALL = f"""
import json, sys, time, torch, lltm_ext
x = torch.randn(2**20, device="cuda")
lltm_ext.relu(x)
torch.cuda.synchronize()
op = lltm_ext.elementwise("T relu(T x)", {FORMULA!r}, backward={SLOPE!r})
start = time.perf_counter()
op(x)
torch.cuda.synchronize()
print(json.dumps((time.perf_counter() - start) * 1e3))
"""


def relus() -> dict[str, Function]:
    return {
        "run time": lltm_ext.elementwise("T relu(T x)", FORMULA, backward=SLOPE),
        "ahead of time": lltm_ext.relu,
        "jiterator": torch.cuda.jiterator._create_jit_fn(
            "template <typename T> T relu(T x) { return x <= T(0) ? T(0) : x; }"
        ),
        "torch.compile": torch.compile(lambda x: torch.where(x <= 0, 0, x), dynamic=False),
    }


def measure_runtime(bench: Bench, dtype: str, n: int) -> dict[str, Any]:
    torch._dynamo.reset()
    size = DTYPES[dtype].itemsize
    sets = sets_beyond_cache(2 * n * size, bench.device)
    inputs = [(torch.randn(n, device=bench.device, dtype=DTYPES[dtype]),) for _ in range(sets)]
    row: dict[str, Any] = {"part": RUNTIME, "dtype": dtype, "n": n}
    times = bench.device_milliseconds(relus(), inputs)
    row |= {f"{name} GB/s": 2 * n * size / milliseconds / 1e6 for name, milliseconds in times.items()}
    if n == 1024:
        x = inputs[0][0]
        calls = {name: functools.partial(relu, x) for name, relu in relus().items()}
        row |= {f"{name} us": us for name, us in bench.host_microseconds(calls).items()}
    return row


def measure_first_call() -> dict[str, Any]:
    """The first call in a new process: compiled, and then read from disk."""
    command = [sys.executable, "-c", FIRST_CALL]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"LLTM_EXT_CACHE": f"{folder}/cache"}
        times = [json.loads(subprocess.check_output(command, env=env, text=True)) for _ in range(2)]
    return {"part": FIRST, "compiled ms": times[0], "from disk ms": times[1]}


def main() -> None:
    args = parse(__doc__ or "")
    bench = Bench(args.device, args.seconds)
    powers = (10, 16, 20) if args.quick else range(10, 23, 2) if args.small else range(10, 31, 2)
    rows = [
        measure(bench, name, dtype, 2**power)
        for name, case in CASES.items()
        for dtype in case.dtypes
        for power in powers
    ]
    rows += [measure_host(bench, name, "float32", grad) for name in CALLED for grad in (False, True)]
    if bench.cuda:
        rows += [measure_runtime(bench, dtype, 2**p) for dtype in ("float32", "bfloat16") for p in powers]
        rows.append(measure_first_call())
    rates = [f"{name} GB/s" for name in (OURS, "torch", COPY)]
    ways = ("run time", "ahead of time", "jiterator", "torch.compile")
    columns = {
        DEVICE: ["op", "dtype", "n", f"{OURS} ms", *rates, "torch / ours", "ours / copy"],
        HOST: ["op", "dtype", "grad", f"{OURS} us", "torch us", "ours - torch us"],
    }
    if bench.cuda:
        columns[RUNTIME] = ["dtype", "n", *(f"{way} GB/s" for way in ways), *(f"{way} us" for way in ways)]
        columns[FIRST] = ["compiled ms", "from disk ms"]
    finish("elementwise", args, rows, columns, claims(rows))


def claims(rows: list[dict[str, Any]]) -> list[str]:
    """For each op: its rate against a copy's where that is limited by memory, and against torch's."""
    found = []
    for name in CASES:
        here = [row for row in rows if row["part"] == DEVICE and row["op"] == name]
        large = [row["ours / copy"] for row in here if row["n"] >= LARGE]
        ratios = [row["torch / ours"] for row in here]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        worst = min(here, key=lambda row: row["torch / ours"])
        copied = f"at least {min(large):.3f} x the copy's rate from 2^24 elements; " if large else ""
        found.append(
            f"{name}: {copied}{mean:.2f} x torch's rate (geometric mean of all sizes), at worst "
            f"{worst['torch / ours']:.2f} x ({worst['dtype']}, 2^{worst['n'].bit_length() - 1})"
        )
    for row in rows:
        if row["part"] == RUNTIME and row["n"] >= LARGE:
            ratio = row["run time GB/s"] / row["ahead of time GB/s"]
            size = row["n"].bit_length() - 1
            found.append(
                f"relu made at run time, {row['dtype']} 2^{size}: {ratio:.3f} x the rate of lltm_ext.relu"
            )
        if row["part"] == RUNTIME and "run time us" in row:
            more = row["run time us"] - row["ahead of time us"]
            found.append(f"relu made at run time: {more:+.1f} us of host time compared with lltm_ext.relu")
        if row["part"] == FIRST:
            found.append(
                f"an op made at run time: first call {row['compiled ms']:.0f} ms, "
                f"from disk {row['from disk ms']:.1f} ms"
            )
        if row["part"] == HOST:
            how = "with a gradient" if row["grad"] else "without gradient"
            found.append(f"{row['op']}, {how}: {row['ours - torch us']:+.1f} us of host time against torch's")
    return found


def draw(record: dict[str, Any]) -> Any:
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    rows = [row for row in record["rows"] if row["part"] == DEVICE]
    names = [OURS, "torch"]
    cases = list(dict.fromkeys(row["op"] for row in rows))
    across = 6
    down = -(-len(cases) // across)
    figure, grid = plt.subplots(
        down, across, figsize=(2.8 * across, 2.4 * down), sharex=True, sharey=True, layout="constrained"
    )
    styles = {"float32": "-", "bfloat16": "--"}
    for axes, case in zip(grid.flat, cases, strict=False):
        for dtype, style in styles.items():
            here = [row for row in rows if (row["op"], row["dtype"]) == (case, dtype)]
            axes.plot(*series(here, "n", f"{COPY} GB/s"), style, color="#aaaaaa", linewidth=1.2)
            for name in reversed(names):
                axes.plot(*series(here, "n", f"{name} GB/s"), style, color=color(name, names), linewidth=1.4)
        axes.set_xscale("log", base=2)
        axes.set_title(case, loc="left", fontsize=9)
    for axes in grid.flat[len(cases) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("GB/s")
    for axes in grid[-1]:
        axes.set_xlabel("elements")
    handles = [Line2D([], [], color=color(name, names), linewidth=3, label=name) for name in names]
    handles.append(Line2D([], [], color="#aaaaaa", linewidth=3, label="copy"))
    handles += [Line2D([], [], color=INK, linestyle=style, label=dtype) for dtype, style in styles.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles))
    return figure


if __name__ == "__main__":
    main()
