"""The benchmark of an elementwise op: GB/s over sizes and microseconds of host time, ours beside torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from harness import DTYPES, OURS, Bench, color, finish, parse, rotating, series, sets_beyond_cache
from torch import Tensor

COPY = "device copy"
HOST_TIMED_UP_TO = 2**10


class Mode(NamedTuple):
    """One thing to time. A candidate gets ``inputs`` random tensors and reads and writes ``moved`` in all."""

    name: str
    inputs: int
    moved: int
    candidates: Mapping[str, Callable[..., Tensor]]


def forward_backward(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A whole training step's worth of the op, as the host sees it."""

    def step(input: Tensor, grad_output: Tensor) -> Tensor:
        input.grad = None
        output = function(input.requires_grad_())
        output.backward(grad_output)
        return output

    return step


def run(
    op: str,
    description: str,
    modes: Sequence[Mode],
    through_autograd: Mapping[str, Callable[[Tensor], Tensor]],
) -> None:
    """``modes`` are timed over all sizes; ``through_autograd``, forward and backward, for host time alone."""
    args = parse(description)
    bench = Bench(args.device, args.seconds)
    powers = (10, 16, 20) if args.quick else range(10, 23, 2) if args.small else range(10, 29, 2)
    autograd = Mode(
        "forward + backward", 2, 0, {name: forward_backward(f) for name, f in through_autograd.items()}
    )
    rows = []
    for dtype in ("float32", "bfloat16"):
        for power in powers:
            for mode in modes:
                rows.append(measure(bench, mode, dtype, 2**power))
        rows.append(host_row(bench, autograd, dtype, 2 ** powers[0]))
    columns = ["mode", "dtype", "n", *(f"{name} GB/s" for name in (*modes[0].candidates, COPY))]
    columns += [f"{name} host us" for name in modes[0].candidates]
    finish(op, args, rows, columns)


def measure(bench: Bench, mode: Mode, dtype: str, n: int) -> dict[str, Any]:
    size = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    sets = sets_beyond_cache(mode.moved * n * size, bench.device)
    inputs = [
        tuple(torch.randn(n, device=bench.device, dtype=DTYPES[dtype]) for _ in range(mode.inputs))
        for _ in range(sets)
    ]
    calls = {name: rotating(call, inputs) for name, call in mode.candidates.items()}
    calls[COPY] = rotating(lambda x, *_: x.clone(), inputs)
    row = {"mode": mode.name, "dtype": dtype, "n": n}
    for name, milliseconds in bench.milliseconds(calls).items():
        moved = (2 if name == COPY else mode.moved) * n * size
        row |= {f"{name} ms": milliseconds, f"{name} GB/s": moved / milliseconds / 1e6}
    if n <= HOST_TIMED_UP_TO:
        row |= host_times(bench, mode, inputs[0])
    return row


def host_times(bench: Bench, mode: Mode, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    calls = {name: lambda call=call: call(*inputs) for name, call in mode.candidates.items()}
    return {f"{name} host us": time for name, time in bench.host_microseconds(calls).items()}


def host_row(bench: Bench, mode: Mode, dtype: str, n: int) -> dict[str, Any]:
    inputs = tuple(torch.randn(n, device=bench.device, dtype=DTYPES[dtype]) for _ in range(mode.inputs))
    return {"mode": mode.name, "dtype": dtype, "n": n} | host_times(bench, mode, inputs)


def draw(record: dict[str, Any]) -> Any:
    from matplotlib import pyplot as plt

    rows = record["rows"]
    timed = [row for row in rows if f"{COPY} GB/s" in row]
    modes, dtypes = (
        list(dict.fromkeys(row["mode"] for row in timed)),
        list(dict.fromkeys(row["dtype"] for row in timed)),
    )
    names = [key.removesuffix(" GB/s") for key in timed[0] if key.endswith(" GB/s")]
    figure, grid = plt.subplots(
        len(dtypes),
        len(modes),
        figsize=(4.2 * len(modes), 2.8 * len(dtypes)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for line, dtype in zip(grid, dtypes, strict=True):
        for axes, mode in zip(line, modes, strict=True):
            here = [row for row in timed if (row["mode"], row["dtype"]) == (mode, dtype)]
            for name in sorted(names, key=(COPY, "torch", OURS).index):
                style = (
                    {"color": "#aaaaaa", "linestyle": "--"} if name == COPY else {"color": color(name, names)}
                )
                axes.plot(*series(here, "n", f"{name} GB/s"), label=name, linewidth=1.6, marker=".", **style)
            axes.set_xscale("log", base=2)
            axes.set_title(f"{mode}, {dtype}", loc="left")
        line[0].set_ylabel("GB/s (read + written)")
    for axes in grid[-1]:
        axes.set_xlabel("elements")
    grid[0][0].legend()
    return figure
