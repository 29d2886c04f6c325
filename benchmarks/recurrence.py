"""Own cells: derived LSTM and LLTM against the built-in ones, and resets.

benchmarks/cells.py has those with heads, norms, further products and spikes, sizes_gru_rnn.py GRU and RNN.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from harness import DTYPES, INK, OUR_COLOR, PEERS, Bench, Row, finish, parse
from pages import HALF, HALVES, published
from torch import Tensor, nn

import lltm_ext
from lltm_ext import cells

MODES = ("forward", "training")  # without gradients; forward and backward
Shape = tuple[int, int, int]  # B, T, H (= I)
TIMED = tuple(f"{who} {mode} ms" for mode in MODES for who in ("ours", "peer"))
COMPARED = ["ours", "peer", "precision", "B", "T", "H", *TIMED, *(f"{mode} ratio" for mode in MODES)]
GRID: tuple[Shape, ...] = (
    (16, 512, 128),
    (16, 1000, 256),
    (64, 512, 512),
    (32, 512, 1024),
    (256, 256, 1024),
    (128, 256, 2048),
    (1, 1000, 256),
    (1, 512, 1024),
)
SMALL_GRID: tuple[Shape, ...] = ((4, 16, 32),)
EPISODE = 64  # steps

Layer = Callable[[int, torch.device, torch.dtype], nn.Module]


def of_class(Class: type[nn.Module], *before: Any, **options: Any) -> Layer:
    return lambda hidden, device, dtype: Class(*before, hidden, hidden, device=device, dtype=dtype, **options)


class Comparison(NamedTuple):
    """Ours against a peer. `precisions` are dtypes in torch's default settings, or "ieee"."""

    part: str
    ours: str
    peer: str
    our_layer: Layer
    peer_layer: Layer
    precisions: tuple[str, ...]
    grid: tuple[Shape, ...] = GRID


FLOATS = ("float32", "ieee")
COMPARISONS = (
    Comparison(
        "derived",
        "Recurrent(lstm)",
        "LSTM",
        of_class(lltm_ext.Recurrent, cells.lstm),
        of_class(lltm_ext.LSTM),
        ("bfloat16", "float32"),
    ),
    Comparison(
        "derived",
        "Recurrent(lltm)",
        "LLTM",
        of_class(lltm_ext.Recurrent, cells.lltm),
        of_class(lltm_ext.LLTM),
        ("bfloat16", "float32"),
    ),
    Comparison(
        "own",
        "Recurrent(peephole_lstm)",
        "LSTM",
        of_class(lltm_ext.Recurrent, cells.peephole_lstm),
        of_class(lltm_ext.LSTM),
        ("bfloat16",),
    ),
    Comparison(
        "own",
        "Recurrent(indrnn)",
        "nn.RNN(relu)",
        of_class(lltm_ext.Recurrent, cells.indrnn),
        of_class(nn.RNN, nonlinearity="relu"),
        HALVES,
    ),
)


@contextmanager
def settings(precision: str) -> Iterator[None]:
    """torch's defaults, in which its layers and ours use TF32; "ieee" is float32 without it."""
    torch.backends.cudnn.allow_tf32 = precision != "ieee"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = True


def dtype_of(precision: str) -> torch.dtype:
    return DTYPES["float32" if precision == "ieee" else precision]


def random_input(shape: Shape, device: torch.device, dtype: torch.dtype) -> Tensor:
    batch, length, hidden = shape
    return torch.randn(length, batch, hidden, device=device, dtype=dtype)


def forward_of(layer: Callable[..., Any], input: Tensor, precision: str, **options: Any) -> Callable[[], Any]:
    def forward() -> Any:
        with settings(precision), torch.no_grad():
            return layer(input, **options)

    return forward


def training_of(
    layer: nn.Module, input: Tensor, grad_output: Tensor, precision: str, **options: Any
) -> Callable[[], Any]:
    def training() -> None:
        input.grad = None
        layer.zero_grad()
        with settings(precision):
            layer(input, **options)[0].backward(grad_output)

    return training


def in_both_modes(
    bench: Bench,
    layers: Mapping[str, tuple[nn.Module, dict[str, Any]]],
    input: Tensor,
    precision: str,
    hidden: int | None = None,
) -> Row:
    input = input.detach().requires_grad_()
    grad_output = torch.randn_like(input if hidden is None else input[..., :1].expand(-1, -1, hidden))
    row: Row = {}
    for mode in MODES:
        calls = {
            name: forward_of(layer, input, precision, **options)
            if mode == "forward"
            else training_of(layer, input, grad_output, precision, **options)
            for name, (layer, options) in layers.items()
        }
        row |= {f"{name} {mode} ms": time for name, time in bench.milliseconds(calls).items()}
    return row


def compare(bench: Bench, c: Comparison, shape: Shape, precision: str) -> Row:
    dtype, hidden = dtype_of(precision), shape[2]
    layers = {
        "ours": (c.our_layer(hidden, bench.device, dtype), {}),
        "peer": (c.peer_layer(hidden, bench.device, dtype), {}),
    }
    times = in_both_modes(bench, layers, random_input(shape, bench.device, dtype), precision)
    row: Row = {"part": c.part, "ours": c.ours, "peer": c.peer, "precision": precision}
    row |= dict(zip("BTH", shape, strict=True)) | times
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


# ---- resets ------------------------------------------------------------------------------------------------


def measure_resets(bench: Bench, shape: Shape) -> Row:
    """Every row's episodes have a random length, EPISODE steps on average. benchmarks/rl.py has the peers."""
    batch, length, hidden = shape
    reset = torch.rand(length, batch, device=bench.device) < 1 / EPISODE
    layer = lltm_ext.LSTM(hidden, hidden, device=bench.device, dtype=torch.bfloat16)
    input = random_input(shape, bench.device, torch.bfloat16)
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "reset": (layer, {"reset": reset}),
        "none": (layer, {}),
    }
    row: Row = {"part": "reset", "precision": "bfloat16"} | dict(zip("BTH", shape, strict=True))
    row |= in_both_modes(bench, layers, input, "bfloat16")
    return row | {f"{mode} / without": row[f"reset {mode} ms"] / row[f"none {mode} ms"] for mode in MODES}


# ---- a long memory -------------------------------------------------------------------------------------

MEMORY_BIAS = {"LSTM": 3.0, "GRU": 5.0}  # of the forget or update gate, whose values are then near 1


def outputs_and_gradients(layer: nn.Module, input: Tensor, grad_output: Tensor) -> list[Tensor]:
    input = input.clone().requires_grad_()
    output, _ = layer(input)
    return [output, *torch.autograd.grad(output, [input, *layer.parameters()], grad_output)]


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


def measure_memory(bench: Bench, which: str, precision: str, shape: Shape) -> Row:
    """Errors against float64, of the output and the largest of the gradients, where gates forget little."""
    hidden, dtype = shape[2], dtype_of(precision)
    Peer, Ours = getattr(nn, which), getattr(lltm_ext, which)
    exact = Peer(hidden, hidden, device=bench.device, dtype=torch.float64)
    with torch.no_grad():
        exact.bias_ih_l0[hidden : 2 * hidden] += MEMORY_BIAS[which]
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(dtype))
    input = random_input(shape, bench.device, dtype)
    grad_output = torch.randn_like(input)
    expected = outputs_and_gradients(exact, input.double(), grad_output.double())
    row: Row = {"part": "long memory", "layer": which, "precision": precision}
    row |= dict(zip("BTH", shape, strict=True))
    for name, Layer in (("ours", Ours), ("nn", Peer)):
        layer = Layer(hidden, hidden, device=bench.device, dtype=dtype)
        layer.load_state_dict(exact.state_dict())
        found = outputs_and_gradients(layer, input, grad_output)
        output, *gradients = (relative_error(a, b) for a, b in zip(found, expected, strict=True))
        row |= {f"{name} output error": output, f"{name} gradient error": max(gradients)}
    return row


# ---- the first call ----------------------------------------------------------------------------------------

FIRST_CALL = """
import sys, time
import torch, lltm_ext
torch.ones(1, device="cuda").exp(); torch.ones(8, 8, device="cuda", dtype=torch.bfloat16).mm(
    torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)); torch.cuda.synchronize()
start = time.perf_counter()

@lltm_ext.recurrence(gates=3, separate=True, parameters=("b_hn",))
def invented(x, r, h, p):
    reset, update = torch.sigmoid(x[0] + r[0]), torch.sigmoid(x[1] + r[1])
    candidate = torch.sin(x[2] + reset * (r[2] + p.b_hn))
    return (1 - update) * candidate + update * h

layer = lltm_ext.Recurrent(invented, 64, 256, device="cuda", dtype=torch.bfloat16)
layer(torch.randn(100, 16, 64, device="cuda", dtype=torch.bfloat16))[0].sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def measure_first_call() -> Row:
    """Seconds of a new cell's first training call, and of the same in the next process."""
    with tempfile.TemporaryDirectory() as cache:
        seconds = [
            float(
                subprocess.run(
                    [sys.executable, "-c", FIRST_CALL],
                    env={**os.environ, "LLTM_EXT_CACHE": cache + "/cache"},
                    cwd=cache,  # -c imports from the working directory first, which may be the checkout
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for _ in range(2)
        ]
    return {"part": "first call", "first process s": seconds[0], "next process s": seconds[1]}


# ---- the summary -------------------------------------------------------------------------------------------


def claims_of(rows: Sequence[Row]) -> list[str]:
    found, rows = list[str](), published(rows)
    for pair in dict.fromkeys((row["ours"], row["peer"]) for row in rows if "ours" in row):
        of_pair = [row for row in rows if (row.get("ours"), row.get("peer")) == pair]
        for precision in (HALF, *HALVES, *FLOATS):
            here = [row for row in of_pair if row["precision"] == precision]
            for mode in MODES if here else ():
                ratios = [row[f"{mode} ratio"] for row in here]
                found.append(
                    f"{' / '.join(pair)}, {precision}, {mode}: {statistics.geometric_mean(ratios):.3f} x "
                    f"(geometric mean of {len(ratios)}; {min(ratios):.2f} to {max(ratios):.2f})"
                )
    return found


def draw(record: Row) -> Any:
    """Our time in parts of the peer's, for each shape: a panel for each pair of layers."""
    from matplotlib import pyplot as plt

    rows = [row for row in published(record["rows"]) if "ours" in row]
    pairs = list(dict.fromkeys((row["ours"], row["peer"]) for row in rows))
    figure, grid = plt.subplots(
        len(pairs), 2, figsize=(10.5, 1.9 * len(pairs)), sharey="row", squeeze=False, layout="constrained"
    )
    precisions = dict.fromkeys(row["precision"] for row in rows)
    colors = dict(zip(precisions, (OUR_COLOR, *PEERS), strict=False))
    for pair, panels in zip(pairs, grid, strict=True):
        here = [row for row in rows if (row["ours"], row["peer"]) == pair]
        shapes = list(dict.fromkeys((row["B"], row["T"], row["H"]) for row in here))
        highest = max(1.0, *(row[f"{mode} ratio"] for row in here for mode in MODES))
        for mode, axes in zip(MODES, panels, strict=True):
            for precision in dict.fromkeys(row["precision"] for row in here):
                points = [row for row in here if row["precision"] == precision]
                at = [shapes.index((row["B"], row["T"], row["H"])) for row in points]
                ratios = [row[f"{mode} ratio"] for row in points]
                axes.plot(at, ratios, "o", color=colors[precision], label=precision, markersize=4)
            axes.axhline(1, color=INK, linewidth=0.8)
            axes.set_ylim(0, 1.1 * highest)
            axes.set_xticks(range(len(shapes)), ["\n".join(map(str, shape)) for shape in shapes], fontsize=6)
            axes.set_title(textwrap.fill(f"{pair[0]} / {pair[1]}, {mode}", 50))
        panels[0].set_ylabel("time / peer's")
        # Beside the panels: among few points a legend's marker looks like one.
        panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)
    figure.suptitle("Own cells: times in parts of the peer's; sizes are B, T, H", fontsize=11)
    return figure


def main() -> None:
    args = parse(__doc__ or "")
    bench = Bench(args.device, args.seconds)
    rows: list[Row] = []
    for c in COMPARISONS:
        for shape in SMALL_GRID if args.small else c.grid:
            rows += [compare(bench, c, shape, precision) for precision in c.precisions]
    rows += [measure_resets(bench, shape) for shape in (SMALL_GRID if args.small else GRID[:3])]
    for which in MEMORY_BIAS:
        shape = SMALL_GRID[0] if args.small else (16, 1000, 128)
        rows += [measure_memory(bench, which, precision, shape) for precision in HALVES]
    if bench.cuda:
        rows.append(measure_first_call())
    finish(
        "recurrence",
        args,
        rows,
        {
            **dict.fromkeys(("derived", "torch", "own"), COMPARED),
            "reset": ["B", "T", "H"] + [f"{mode} / without" for mode in MODES],
            "long memory": ["layer", "precision", "B", "T", "H"]
            + [f"{name} {what} error" for what in ("output", "gradient") for name in ("ours", "nn")],
            "first call": ["first process s", "next process s"],
        },
        claims_of(rows),
    )


if __name__ == "__main__":
    main()
