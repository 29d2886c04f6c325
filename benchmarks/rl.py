"""torchrl's LSTMModule and GRUModule over rollouts: converted by from_torch, and with torchrl's backends.

    python -m pip install torchrl
    python benchmarks/rl.py

Rollouts are random, float32, in torch's default settings. With resets an episode has 50 steps on average.
"layer" is our layer by itself with ``reset=``, without the states after each episode that torchrl returns.
torchrl's Triton kernels multiply in TF32, as cuDNN's and ours do: torchrl's own default is IEEE float32. They
are timed with up to 128 units, because with more they take many minutes to compile and tune. A backend that
fails, or whose first call takes too long, is named at the end: scan and triton compile then.
"""

from __future__ import annotations

import importlib.metadata
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from harness import PEERS, Bench, Row, finish, parse
from libraries import is_installed
from torch import Tensor, nn

import lltm_ext

FULL = [{"batch": 128, "steps": 128, "features": 64, "hidden": hidden} for hidden in (256, 128)]
SMALL = [{"batch": 4, "steps": 16, "features": 4, "hidden": 16}]
MOST_UNITS, MOST_SECONDS = 128, 300  # of triton; of a first call
BACKENDS = ("pad", "scan", "triton")
NAMES = ("converted", "layer", *BACKENDS)
STATES = {"LSTM": ("h", "c"), "GRU": ("h",)}

Loss = Callable[[], Tensor]


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises a TimeoutError in the block after this time."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the first call takes more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def module_of(kind: str, backend: str, device: torch.device, sizes: dict[str, int]) -> nn.Module:
    from torchrl import modules

    torch.manual_seed(0)  # all have the same weights
    return getattr(modules, f"{kind}Module")(
        sizes["features"],
        sizes["hidden"],
        in_keys=["x", *STATES[kind]],
        out_keys=["y", *(("next", state) for state in STATES[kind])],
        recurrent_backend=backend,
        recurrent_matmul_precision="tf32",
        default_recurrent_mode=True,
        device=device,
    )


def rollouts_for(kind: str, with_resets: bool, device: torch.device, sizes: dict[str, int]) -> Any:
    from tensordict import TensorDict

    shape = (sizes["batch"], sizes["steps"])
    is_init = torch.rand(*shape, 1, device=device) < (1 / 50 if with_resets else 0)
    is_init[:, 0] = True
    data = {state: torch.zeros(*shape, 1, sizes["hidden"], device=device) for state in STATES[kind]}
    data |= {"x": torch.randn(*shape, sizes["features"], device=device), "is_init": is_init}
    return TensorDict(data, batch_size=shape)


def candidate(name: str, kind: str, rollouts: Any, sizes: dict[str, int]) -> tuple[nn.Module, Loss]:
    """Builds a module, and what computes the mean of its squared outputs."""
    backend = name if name in BACKENDS else "pad"
    module = module_of(kind, backend, rollouts["x"].device, sizes)
    if backend != name:
        lltm_ext.from_torch(module)
    if name != "layer":
        return module, lambda: module(rollouts.clone(False))["y"].square().mean()
    layer, reset = next(module.children()), rollouts["is_init"].squeeze(-1)
    return layer, lambda: layer(rollouts["x"], reset=reset)[0].square().mean()


def training(module: nn.Module, loss_of: Loss) -> Callable[[], Tensor]:
    def step() -> Tensor:
        module.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss.detach()

    return step


def forward(loss_of: Loss) -> Callable[[], Tensor]:
    return torch.no_grad()(loss_of)


def measure(
    bench: Bench,
    kind: str,
    with_resets: bool,
    sizes: dict[str, int],
    failures: dict[str, str],
) -> list[Row]:
    """Times all candidates by turns. Those that fail are added to ``failures`` and are not tried again."""
    torch.manual_seed(1)
    rollouts = rollouts_for(kind, with_resets, bench.device, sizes)
    calls: dict[str, dict[str, Callable[[], Tensor]]] = {"forward": {}, "training": {}}
    losses = {}
    for name in NAMES:
        what = f"{kind} {name}, hidden {sizes['hidden']}"
        if what in failures or (name == "triton" and sizes["hidden"] > MOST_UNITS):
            continue
        try:
            with at_most(MOST_SECONDS):
                module, loss_of = candidate(name, kind, rollouts, sizes)
                train = training(module, loss_of)
                losses[name] = float(train())
        except Exception as error:
            failures[what] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            continue
        calls["forward"][name], calls["training"][name] = forward(loss_of), train
    rows = []
    for mode, of_mode in calls.items():
        times = bench.milliseconds(of_mode)
        row: Row = {
            "version": importlib.metadata.version("torchrl"),
            "model": f"{kind}Module{', resets' if with_resets else ''}",
            "mode": mode,
            "sizes": ", ".join(f"{name} {size:,}" for name, size in sizes.items()),
            **{f"{name} ms": times[name] for name in times},
        }
        for name in BACKENDS:
            if name in times:
                row[f"/ {name}"] = times["converted"] / times[name]
        row["loss difference"] = max(abs(loss / losses["pad"] - 1) for loss in losses.values())
        rows.append(row)
    return rows


def claims(rows: Sequence[Row], failures: dict[str, str]) -> list[str]:
    found = [
        f"{row['model']}, {row['sizes']}, {row['mode']}: converted / fastest backend "
        f"{max(row[f'/ {name}'] for name in BACKENDS if f'/ {name}' in row):.2f} x"
        for row in rows
    ]
    return found + [f"not measured: {what}, {error}" for what, error in failures.items()]


def draw(record: Row) -> Any:
    """A bar for each candidate in groups, one for each model and mode."""
    from matplotlib import pyplot as plt

    rows = record["rows"][::-1]
    figure, axes = plt.subplots(figsize=(7, 1 + 0.7 * len(rows)), layout="constrained")
    colors = dict(zip(NAMES, ("#1f5fa8", "#8fb4dc", *PEERS), strict=True))
    for i, name in enumerate(NAMES):
        here = [(k, row[f"{name} ms"]) for k, row in enumerate(rows) if f"{name} ms" in row]
        if not here:
            continue
        bars = axes.barh(
            [k + 0.32 - 0.16 * i for k, _ in here],
            [t for _, t in here],
            0.15,
            color=colors[name],
            label=name,
        )
        axes.bar_label(bars, [f"{t:.3g}" for _, t in here], padding=3, fontsize=6)
    labels = [f"{row['model']}, {row['mode']}\n{row['sizes'].rpartition(', ')[2]}" for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.grid(axis="y", visible=False)
    axes.set_xscale("log")
    axes.set_xlabel("ms, float32")
    axes.legend()
    return figure


def main() -> None:
    args = parse(__doc__ or "")
    if not is_installed("torchrl"):
        return print("not measured: torchrl is not installed")
    logging.disable(logging.DEBUG)  # scan logs its graphs
    bench = Bench(args.device, 2 * args.seconds)
    failures: dict[str, str] = {}
    rows: list[Row] = []
    for sizes in SMALL if args.small else FULL:
        for kind in STATES:
            for with_resets in (True, False):
                rows += measure(bench, kind, with_resets, sizes, failures)
    times = [f"{name} ms" for name in NAMES] + [f"/ {name}" for name in BACKENDS]
    finish("rl", args, rows, ("model", "sizes", "mode", *times, "loss difference"), claims(rows, failures))


if __name__ == "__main__":
    main()
