"""Elementwise ops: GB/s over sizes, and microseconds of host time, ours beside torch's and a plain copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from harness import DTYPES, INK, OURS, Bench, color, finish, parse, series, sets_beyond_cache
from torch import Tensor

import lltm_ext

COPY = "copy"
DEVICE, HOST = "device time", "host time"
LARGE = 2**24  # from here on a copy is limited by memory alone
aten, ops = torch.ops.aten, torch.ops.lltm_ext
Function = Callable[..., Tensor]


class Case(NamedTuple):
    """Ours and torch's way, of ``inputs`` random tensors, of which ``moved`` are read or written at least."""

    ours: Function
    torchs: Function
    inputs: int = 1
    moved: int = 2


def training(function: Function) -> Function:
    """Forward and backward of a function of one tensor."""

    def step(input: Tensor, grad_output: Tensor) -> Tensor:
        input = input.detach().requires_grad_()
        return torch.autograd.grad(function(input), input, grad_output)[0]

    return step


def straight_through(step: Function) -> Function:
    """The usual way to say it in PyTorch."""
    return lambda x: x + (step(x) - x).detach()


def torch_binarize(x: Tensor) -> Tensor:
    return (x > 0.5).to(x.dtype)


def clipped_backward(g: Tensor, x: Tensor) -> Tensor:
    return g * ((x - 0.5).abs() <= 0.5)


def tanh_backward(g: Tensor, x: Tensor) -> Tensor:
    return g * (1 - torch.tanh((x - 0.5) / 0.5).square())


def binarize_backward(grad: str) -> Function:
    return lambda g, x: ops.binarize_backward(g, x, 0.5, 0.0, 1.0, grad)


CASES: Mapping[str, Case] = {
    "sigmoid": Case(lltm_ext.sigmoid, torch.sigmoid),
    "sigmoid backward": Case(ops.sigmoid_backward, aten.sigmoid_backward, 2, 3),
    "relu": Case(lltm_ext.relu, torch.relu),
    "relu backward": Case(ops.relu_backward, lambda g, y: aten.threshold_backward(g, y, 0), 2, 3),
    "round": Case(lltm_ext.round, torch.round),
    "floor": Case(lltm_ext.floor, torch.floor),
    "ceil": Case(lltm_ext.ceil, torch.ceil),
    "trunc": Case(lltm_ext.trunc, torch.trunc),
    "binarize": Case(lltm_ext.binarize, torch_binarize),
    "binarize clipped backward": Case(binarize_backward("clipped"), clipped_backward, 2, 3),
    "binarize tanh backward": Case(binarize_backward("tanh"), tanh_backward, 2, 3),
    "round, straight through": Case(training(lltm_ext.round), training(straight_through(torch.round)), 2),
    "binarize, straight through": Case(
        training(lltm_ext.binarize), training(straight_through(torch_binarize)), 2
    ),
}
# Whose host time is measured, without a gradient and with one.
CALLED = ("sigmoid", "relu", "round", "binarize")


def measure(bench: Bench, name: str, dtype: str, n: int) -> dict[str, Any]:
    case = CASES[name]
    size = DTYPES[dtype].itemsize
    sets = sets_beyond_cache(case.moved * n * size, bench.device)
    inputs = [
        tuple(torch.randn(n, device=bench.device, dtype=DTYPES[dtype]) for _ in range(case.inputs))
        for _ in range(sets)
    ]
    calls = {OURS: case.ours, "torch": case.torchs, COPY: lambda x, *_: x.clone()}
    row: dict[str, Any] = {"part": DEVICE, "op": name, "dtype": dtype, "n": n}
    # In a graph a large copy goes another, slower way.
    eager = [COPY] if n >= LARGE else []
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


def main() -> None:
    args = parse(__doc__ or "")
    bench = Bench(args.device, args.seconds)
    powers = (10, 16, 20) if args.quick else range(10, 23, 2) if args.small else range(10, 31, 2)
    rows = [
        measure(bench, name, dtype, 2**power)
        for name in CASES
        for dtype in ("float32", "bfloat16", "float16")
        for power in powers
    ]
    rows += [measure_host(bench, name, "float32", grad) for name in CALLED for grad in (False, True)]
    rates = [f"{name} GB/s" for name in (OURS, "torch", COPY)]
    columns = {
        DEVICE: ["op", "dtype", "n", f"{OURS} ms", *rates, "torch / ours", "ours / copy"],
        HOST: ["op", "dtype", "grad", f"{OURS} us", "torch us", "ours - torch us"],
    }
    finish("elementwise", args, rows, columns, claims(rows))


def claims(rows: list[dict[str, Any]]) -> list[str]:
    """Of each op: its share of a copy's rate where that is limited by memory, its rate beside torch's."""
    found = []
    for name in CASES:
        here = [row for row in rows if row["part"] == DEVICE and row["op"] == name]
        large = [row["ours / copy"] for row in here if row["n"] >= LARGE]
        ratios = [row["torch / ours"] for row in here]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        worst = min(here, key=lambda row: row["torch / ours"])
        copied = f"at least {min(large):.3f} x the copy's rate from 2^24 elements on; " if large else ""
        found.append(
            f"{name}: {copied}{mean:.2f} x torch's rate (geometric mean of all sizes), at worst "
            f"{worst['torch / ours']:.2f} x ({worst['dtype']}, 2^{worst['n'].bit_length() - 1})"
        )
    for row in rows:
        if row["part"] == HOST:
            how = "with a gradient to come" if row["grad"] else "without gradient"
            found.append(f"{row['op']}, {how}: {row['ours - torch us']:+.1f} us of host time beside torch's")
    return found


def draw(record: dict[str, Any]) -> Any:
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    rows = [row for row in record["rows"] if row["part"] == DEVICE]
    names = [OURS, "torch"]
    cases = list(dict.fromkeys(row["op"] for row in rows))
    across = 4
    down = -(-len(cases) // across)
    figure, grid = plt.subplots(
        down, across, figsize=(3.4 * across, 2.5 * down), sharex=True, sharey=True, layout="constrained"
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
