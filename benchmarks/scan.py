"""scan: forward and training, compared with a copy of the same bytes, torch's associative_scan and Triton.

The steps are float32 [T, B, H], with an ``a`` and a ``b`` for each. Forward moves 12 bytes an element (a, b,
h), training 32 (and a, h, the gradient of h; the gradients of a and b). "Triton" is a kernel of this file in
the manner of accelerated-scan's: a program has some channels, and scans blocks of steps one after the other.
"""

from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo
from harness import INK, OURS, Bench, Row, color, finish, parse, sets_beyond_cache
from torch import Tensor

import lltm_ext

COPY, ASSOCIATIVE, TRITON = "copy", "associative_scan", "Triton"
PEERS = (ASSOCIATIVE, TRITON)
BYTES = {"forward": 12, "training": 32}
Function = Callable[..., Any]


class Sizes(NamedTuple):
    batch: int
    steps: int
    hidden: int

    def __str__(self) -> str:
        return f"({self.batch:,}, {self.steps:,}, {self.hidden:,})"


FULL = [
    Sizes(8, 65536, 1536),
    Sizes(64, 16384, 1),
    Sizes(64, 4096, 64),
    Sizes(64, 4096, 1024),
    Sizes(1, 2**20, 16),
    Sizes(4096, 128, 1),
]
SMALL = [Sizes(4, 256, 1), Sizes(4, 64, 16)]


def some_random(count: int) -> list[Sizes]:
    """Sizes of 1 to 400 MB a tensor, the same in each run."""
    rng, found = random.Random(0), []
    while len(found) < count:
        batch, steps, hidden = (int(2 ** rng.uniform(0, most)) for most in (10, 20, 12))
        if 2**18 <= batch * steps * hidden <= 10**8:
            found.append(Sizes(batch, steps, hidden))
    return found


# ---- torch's


@functools.cache
def compiled_associative_scan() -> Function:
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(first: tuple[Tensor, Tensor], then: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return then[0] * first[0], then[0] * first[1] + then[1]

    return torch.compile(lambda a, b: associative_scan(combine, (a, b), dim=0)[1])


# ---- Triton


@functools.cache
def triton_scan() -> Function:
    """The scan of [T, C] with its gradient."""
    import triton
    import triton.language as tl

    @triton.jit
    def combine(a, b, next_a, next_b):
        return next_a * a, next_a * b + next_b

    @triton.jit
    def forward_kernel(a, b, h, steps, channels, STEPS: tl.constexpr, CHANNELS: tl.constexpr):
        c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        row = tl.arange(0, STEPS)
        state = tl.zeros([CHANNELS], tl.float32)
        for first in range(0, steps, STEPS):
            t = first + row
            here = (t[:, None] < steps) & (c[None, :] < channels)
            at = t[:, None].to(tl.int64) * channels + c[None, :]
            factor, sum = tl.associative_scan(
                (tl.load(a + at, here, 1.0), tl.load(b + at, here, 0.0)), 0, combine
            )
            found = factor * state[None, :] + sum
            tl.store(h + at, found, here)
            state = tl.sum(tl.where(row[:, None] == STEPS - 1, found, 0.0), 0)

    @triton.jit
    def backward_kernel(a, h, g, da, db, steps, channels, STEPS: tl.constexpr, CHANNELS: tl.constexpr):
        c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        row = tl.arange(0, STEPS)
        state = tl.zeros([CHANNELS], tl.float32)
        for first in range(0, steps, STEPS):
            t = steps - 1 - first - row
            here = (t[:, None] >= 0) & (c[None, :] < channels)
            at = t[:, None].to(tl.int64) * channels + c[None, :]
            next_a = tl.load(a + at + channels, here & (t[:, None] + 1 < steps), 0.0)
            before = tl.load(h + at - channels, here & (t[:, None] > 0), 0.0)
            factor, sum = tl.associative_scan((next_a, tl.load(g + at, here, 0.0)), 0, combine)
            found = factor * state[None, :] + sum
            tl.store(db + at, found, here)
            tl.store(da + at, found * before, here)
            state = tl.sum(tl.where(row[:, None] == STEPS - 1, found, 0.0), 0)

    def launch(kernel: Any, *tensors: Tensor) -> None:
        steps, channels = tensors[0].shape
        block = min(32, triton.next_power_of_2(channels))
        kernel[(triton.cdiv(channels, block),)](
            *tensors, steps, channels, STEPS=min(4096 // block, triton.next_power_of_2(steps)), CHANNELS=block
        )

    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            h = torch.empty_like(b)
            launch(forward_kernel, a, b, h)
            ctx.save_for_backward(a, h)
            return h

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            a, h = ctx.saved_tensors
            da, db = torch.empty_like(a), torch.empty_like(a)
            launch(backward_kernel, a, h, grad.contiguous(), da, db)
            return da, db

    return lambda a, b: Scan.apply(a.flatten(1), b.flatten(1)).view_as(b)


# ---- measuring


def forward(scan: Function) -> Function:
    return lambda a, b, *_: scan(a, b)


def training(scan: Function) -> Function:
    def step(a: Tensor, b: Tensor, grad: Tensor, *_: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (a, b)]
        return torch.autograd.grad(scan(*leaves), leaves, grad)

    return step


MODES = {"forward": forward, "training": training}


def scans(device: torch.device) -> dict[str, Function]:
    found: dict[str, Function] = {OURS: lltm_ext.scan}
    if device.type == "cuda":
        found[ASSOCIATIVE] = lambda a, b: compiled_associative_scan()(a, b)
        if importlib.util.find_spec("triton"):
            found[TRITON] = lambda a, b: triton_scan()(a, b)
    return found


def arguments(sizes: Sizes, mode: str, device: torch.device) -> tuple[Tensor, ...]:
    """a, b, the gradient of h; half the bytes that a call moves, for the copy."""
    shape = sizes.steps, sizes.batch, sizes.hidden
    b, grad = torch.randn(shape, device=device), torch.randn(shape, device=device)
    a = torch.rand(shape, device=device)
    return a, b, grad, torch.empty(b.numel() * BYTES[mode] // 8, device=device)


def measure(bench: Bench, sizes: Sizes, mode: str, failures: dict[str, str]) -> Row:
    torch._dynamo.reset()  # compiles for these sizes
    compiled_associative_scan.cache_clear()
    moved = sizes.batch * sizes.steps * sizes.hidden * BYTES[mode]
    sets = [arguments(sizes, mode, bench.device) for _ in range(sets_beyond_cache(moved, bench.device))]
    calls: dict[str, Function] = {}
    for name, scan in scans(bench.device).items():
        call = MODES[mode](scan)
        try:
            call(*sets[0])
            bench.synchronize()
        except Exception as error:
            failures[f"{name}, {mode} at {sizes}"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        calls[name] = call
    calls[COPY] = lambda *tensors: tensors[-1].clone()
    times = bench.device_milliseconds(calls, sets)
    row: Row = {"mode": mode, "(B, T, H)": str(sizes), "MB": moved / 1e6}
    row |= {f"{name} ms": time for name, time in times.items()}
    row |= {f"/ {name}": times[OURS] / times[name] for name in (COPY, *PEERS) if name in times}
    return row


def claims(rows: Sequence[Row], failures: dict[str, str]) -> list[str]:
    found = []
    for mode in MODES:
        for least, most in ((400, float("inf")), (100, 400)):
            ratios = [row["/ copy"] for row in rows if row["mode"] == mode and least <= row["MB"] < most]
            if ratios:
                range_ = f"from {least} MB on" if most > 400 else f"from {least} to {most} MB"
                found.append(f"{mode}, {range_}: at most {max(ratios):.2f} x a copy of the same bytes")
        for peer in PEERS:
            ratios = [row[f"/ {peer}"] for row in rows if row["mode"] == mode and f"/ {peer}" in row]
            if ratios:
                found.append(f"{mode}: {min(ratios):.2f} to {max(ratios):.2f} x {peer}")
    return found + [f"not measured: {what}: {why}" for what, why in failures.items()]


def draw(record: Row) -> Any:
    """For each mode and size, the times of all over that of a copy."""
    from matplotlib import pyplot as plt

    names = (OURS, *PEERS)
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True, layout="constrained")
    for axes, mode in zip(panels, MODES, strict=True):
        rows = [row for row in record["rows"] if row["mode"] == mode][::-1]
        for i, name in enumerate(names):
            here = [
                (k, row[f"{name} ms"] / row["copy ms"]) for k, row in enumerate(rows) if f"{name} ms" in row
            ]
            axes.barh(
                [k + 0.25 - 0.25 * i for k, _ in here],
                [ratio for _, ratio in here],
                0.23,
                color=color(name, names),
                label=name,
            )
        axes.set_yticks(range(len(rows)), [row["(B, T, H)"] for row in rows])
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel("time / that of a copy of the same bytes")
        axes.set_title(f"{mode}, float32")
        axes.grid(axis="y", visible=False)
    panels[0].legend()
    return figure


def main() -> None:
    args = parse(__doc__ or "")
    bench = Bench(args.device, args.seconds)
    failures: dict[str, str] = {}
    rows = [
        measure(bench, sizes, mode, failures)
        for sizes in (SMALL if args.small else FULL + some_random(6))
        for mode in MODES
    ]
    columns = ("mode", "(B, T, H)", "MB", *(f"{name} ms" for name in (OURS, COPY, *PEERS)))
    finish("scan", args, rows, (*columns, *(f"/ {name}" for name in (COPY, *PEERS))), claims(rows, failures))


if __name__ == "__main__":
    main()
