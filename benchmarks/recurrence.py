"""Own cells: derived LSTM and LLTM against the built-in ones, GRU and RNN against torch's, resets."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from cell_peers import FLASHRNN, SNNTORCH, TORCHRL, OfFlashRNN, OfSnntorch, OfTorchrl
from harness import DTYPES, INK, OUR_COLOR, PEERS, Bench, Row, finish, parse
from libraries import is_installed
from torch import Tensor, nn

import lltm_ext
from lltm_ext import cells

MODES = ("forward", "training")  # without gradients; forward and backward
Shape = tuple[int, int, int]  # B, T, H (= I)
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


HALVES, FLOATS = ("bfloat16", "float16"), ("float32", "ieee")
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
    Comparison("torch", "GRU", "nn.GRU", of_class(lltm_ext.GRU), of_class(nn.GRU), HALVES + FLOATS),
    Comparison("torch", "RNN", "nn.RNN", of_class(lltm_ext.RNN), of_class(nn.RNN), HALVES + FLOATS),
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
        ("bfloat16",),
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


# ---- block-diagonal weights, and norms over the units ------------------------------------------------------


class CompiledLoop(nn.Module):
    """A layer of an own cell as a Python loop over a step that torch.compile has compiled."""

    def __init__(self, like: lltm_ext.Recurrent):
        super().__init__()
        self.layer, self.cell, self.step = like, like.cell, torch.compile(self.one_step, dynamic=False)

    def one_step(
        self, planes: Tensor, blocks: Tensor, parameters: Tensor, h: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        heads, gates = blocks.shape[0], self.cell.gates
        product = torch.bmm(h.unflatten(1, (heads, -1)).transpose(0, 1), blocks)
        product = product.unflatten(2, (gates, -1)).permute(1, 2, 0, 3).flatten(1)
        x, r = (
            y.float().unflatten(1, (gates, -1)).unbind(1)
            for y in ((planes, product) if self.cell.separate else (planes + product, product))
        )
        new_h, new = self.cell.step(x, r, h.float(), states, parameters.float().unbind(0), ())
        return new_h.to(h.dtype), *new

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        layer, hidden = self.layer, self.layer.hidden_size
        planes = nn.functional.linear(input, layer.weight_ih_l0, layer.bias_l0)
        size = layer.weight_hh_l0.shape[1]
        blocks = layer.weight_hh_l0.view(self.cell.gates, -1, size, size).permute(1, 3, 0, 2).flatten(2)
        own = [getattr(layer, f"{name}_l0") for name in self.cell.parameters]
        parameters = torch.cat(own).view(-1, hidden) if own else input.new_empty(0, hidden)
        h = input.new_zeros(input.shape[1], hidden)
        states = [torch.zeros_like(h, dtype=torch.float32) for _ in self.cell.state_names[1:]]
        outputs = []
        for x in planes.unbind(0):
            h, *states = self.step(x, blocks, parameters, h, *states)
            outputs.append(h)
        return torch.stack(outputs), (h, *states)


class Looped(NamedTuple):
    """A cell beside the compiled loop, in bfloat16."""

    part: str
    cell: lltm_ext.RecurrentCell
    heads: int
    grid: tuple[Shape, ...]
    peer: str = "torch.compile'd loop"

    @property
    def ours(self) -> str:
        heads = f", heads={self.heads}" if self.heads > 1 else ""
        return f"Recurrent({self.cell.__name__}{heads})"


LOOPED = (
    Looped("heads", cells.slstm, 4, ((16, 256, 256), (16, 256, 512), (16, 256, 1024), (64, 512, 512))),
    Looped("heads", cells.slstm, 3, ((8, 1024, 768),)),
    Looped("norms", cells.dreamer_gru, 1, ((16, 64, 512),)),
    Looped("norms", cells.layer_norm_lstm, 1, ((64, 512, 512), (16, 1000, 256))),
)


def measure_looped(bench: Bench, c: Looped, shape: Shape) -> Row:
    torch.compiler.reset()  # else the limit of recompilations leaves the peer uncompiled
    dtype, hidden = torch.bfloat16, shape[2]
    layer = lltm_ext.Recurrent(c.cell, hidden, hidden, heads=c.heads, device=bench.device, dtype=dtype)
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "ours": (layer, {}),
        "peer": (CompiledLoop(layer), {}),
    }
    row: Row = {"part": c.part, "ours": c.ours, "peer": c.peer, "precision": "bfloat16"}
    row |= dict(zip("BTH", shape, strict=True))
    row |= in_both_modes(bench, layers, random_input(shape, bench.device, dtype), "bfloat16")
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


# ---- layers of other libraries (cell_peers.py) -------------------------------------------------------------


class BlockGRU(nn.Module):
    """torchrl's DreamerV3BlockGRU by ours: its projection of the input, then the cell."""

    def __init__(self, hidden: int, blocks: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        self.linear, self.scale = nn.Linear(hidden, hidden, **how), nn.Parameter(torch.ones(hidden, **how))
        heads = {"block": blocks, "gates": blocks}
        self.layer = lltm_ext.Recurrent(cells.dreamer_block_gru, hidden, hidden, heads=heads, **how)

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        y = nn.functional.rms_norm(self.linear(input), self.scale.shape, self.scale, 1e-4)
        output: tuple[Tensor, Any] = self.layer(nn.functional.silu(y))
        return output


def measure_blocks(bench: Bench, shape: Shape, precision: str) -> Row:
    dtype, hidden, blocks = dtype_of(precision), shape[2], 8
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "ours": (BlockGRU(hidden, blocks, bench.device, dtype), {}),
        "peer": (OfTorchrl(hidden, blocks, bench.device), {}),
    }
    row: Row = {"part": "norms", "ours": "Recurrent(dreamer_block_gru)", "peer": TORCHRL}
    row |= {"precision": precision} | dict(zip("BTH", shape, strict=True))
    row |= in_both_modes(bench, layers, random_input(shape, bench.device, dtype), precision)
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


@lltm_ext.recurrence(gates=1, states=("membrane",))
def leaky(x: Any, h: Any, s: Any) -> Any:
    """snntorch's RLeaky: a spike h lowers the membrane by the threshold 1 and passes no gradient there."""
    membrane = 0.9 * s.membrane + x[0] - h.detach()
    return lltm_ext.spike(membrane - 1), (membrane,)


def measure_spikes(bench: Bench, shape: Shape, features: int) -> Row:
    """Of the size of the Spiking Heidelberg Digits, which have 700 features."""
    hidden, how = shape[2], (bench.device, torch.float32)
    ours = lltm_ext.Recurrent(leaky, features, hidden, device=bench.device)
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "ours": (ours, {}),
        "peer": (OfSnntorch(features, hidden, *how), {}),
    }
    row: Row = {"part": "spikes", "ours": "Recurrent(leaky)", "peer": SNNTORCH}
    row |= {"precision": "float32", "I": features} | dict(zip("BTH", shape, strict=True))
    row |= in_both_modes(bench, layers, random_input((*shape[:2], features), *how), "float32", hidden)
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


class OfProjections(nn.Module):
    """Our sLSTM with heads, for projections of the input, as FlashRNN's takes them."""

    def __init__(self, hidden: int, heads: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        layer = lltm_ext.Recurrent(cells.slstm, 1, hidden, heads=heads, device=device, dtype=dtype)
        self.weight, self.bias = layer.weight_hh_l0, layer.bias_l0

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        zeros = input.new_zeros(input.shape[1], self.weight.shape[0] // 4)
        output: tuple[Tensor, Any] = cells.slstm(input, (zeros,) * 4, None, self.weight, self.bias)
        return output


def measure_heads(bench: Bench, shape: Shape, heads: int) -> Row:
    (batch, length, hidden), how = shape, (bench.device, torch.bfloat16)
    layers: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "ours": (OfProjections(hidden, heads, *how), {}),
        "peer": (OfFlashRNN(batch, hidden, heads, *how), {}),
    }
    row: Row = {"part": "heads", "ours": f"slstm, heads={heads}", "peer": FLASHRNN, "precision": "bfloat16"}
    row |= dict(zip("BTH", shape, strict=True))
    row |= in_both_modes(bench, layers, random_input((batch, length, 4 * hidden), *how), "bfloat16", hidden)
    return row | {f"{mode} ratio": row[f"ours {mode} ms"] / row[f"peer {mode} ms"] for mode in MODES}


def beside_other_libraries(bench: Bench, small: bool) -> list[Row]:
    """Without a GPU, FlashRNN has no kernels."""
    rows, missing = (
        list[Row](),
        [name for name in ("torchrl", "snntorch", "flashrnn") if not is_installed(name)],
    )
    if missing:
        print(f"not measured: layers of {', '.join(missing)}, which are not installed")
    if "torchrl" not in missing:
        rows.append(measure_blocks(bench, (4, 4, 16) if small else (16, 64, 512), "bfloat16"))
    if "snntorch" not in missing:
        rows.append(measure_spikes(bench, (4, 4, 16) if small else (256, 100, 128), 700))
    if "flashrnn" not in missing and bench.cuda and not small:
        rows += [measure_heads(bench, *how) for how in (((8, 1024, 768), 3), ((64, 512, 512), 4))]
    return rows


# ---- resets ------------------------------------------------------------------------------------------------


class Split(nn.Module):
    """An LSTM that runs the sequence in parts, so that episodes end where parts do: at every row's end."""

    def __init__(self, layer: nn.Module, reset: Tensor):
        super().__init__()
        self.layer, self.reset = layer, reset
        starts = reset.any(1).nonzero().flatten().tolist()
        self.bounds = sorted({0, *starts, len(reset)})

    def forward(self, input: Tensor) -> tuple[Tensor, Any]:
        outputs, hx = [], None
        for begin, end in zip(self.bounds, self.bounds[1:], strict=False):
            if hx is not None:
                kept = (~self.reset[begin]).to(input.dtype)[:, None]
                hx = (hx[0] * kept, hx[1] * kept)
            output, hx = self.layer(input[begin:end], hx)
            outputs.append(output)
        return torch.cat(outputs), hx


def measure_resets(bench: Bench, shape: Shape) -> Row:
    """Every row's episodes have a random length, EPISODE steps on average."""
    batch, length, hidden = shape
    reset = torch.rand(length, batch, device=bench.device) < 1 / EPISODE
    layer = lltm_ext.LSTM(hidden, hidden, device=bench.device, dtype=torch.bfloat16)
    peer = nn.LSTM(hidden, hidden, device=bench.device, dtype=torch.bfloat16)
    input = random_input(shape, bench.device, torch.bfloat16)
    with_resets = (layer, {"reset": reset})
    # In two runs: a split call takes a hundred times as long, and would leave few rounds for the other two.
    runs = [
        in_both_modes(bench, {"reset": with_resets, name: other}, input, "bfloat16")
        for name, other in (("none", (layer, {})), ("split", (Split(peer, reset), {})))
    ]
    row: Row = {"part": "reset", "precision": "bfloat16"} | dict(zip("BTH", shape, strict=True))
    row |= runs[1] | runs[0]
    for mode in MODES:
        row[f"{mode} / without"] = runs[0][f"reset {mode} ms"] / runs[0][f"none {mode} ms"]
        row[f"{mode} / split nn.LSTM"] = runs[1][f"reset {mode} ms"] / runs[1][f"split {mode} ms"]
    return row


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
    found = []
    for part, ours, peer, precisions in (
        *((c.part, c.ours, c.peer, c.precisions) for c in COMPARISONS),
        *((c.part, c.ours, c.peer, ("bfloat16",)) for c in LOOPED),
        ("norms", "Recurrent(dreamer_block_gru)", TORCHRL, ("bfloat16", "float32")),
        ("spikes", "Recurrent(leaky)", SNNTORCH, ("float32",)),
    ):
        groups = [HALVES, ("float32",), ("ieee",)]
        for group in groups:
            here = [
                row
                for row in rows
                if row["part"] == part
                and (row["ours"], row["peer"]) == (ours, peer)
                and row["precision"] in group
            ]
            for mode in MODES:
                ratios = [row[f"{mode} ratio"] for row in here]
                if ratios:
                    mean = math.exp(statistics.fmean(map(math.log, ratios)))
                    types = "half types" if len(set(precisions) & set(group)) > 1 else here[0]["precision"]
                    found.append(
                        f"{ours} / {peer}, {types}, {mode}: {mean:.3f} x (geometric mean of {len(ratios)}; "
                        f"{min(ratios):.2f} to {max(ratios):.2f})"
                    )
    return found


def draw(record: Row) -> Any:
    """Our time in parts of the peer's, for each shape: a panel for each pair of layers."""
    from matplotlib import pyplot as plt

    rows = [row for row in record["rows"] if "ours" in row]
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
            axes.set_title(f"{pair[0]} / {pair[1]}, {mode}")
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
    for looped in LOOPED if not args.small else ():
        rows += [measure_looped(bench, looped, shape) for shape in looped.grid]
    rows += beside_other_libraries(bench, args.small)
    rows += [measure_resets(bench, shape) for shape in (SMALL_GRID if args.small else GRID[:3])]
    for which in MEMORY_BIAS:
        shape = SMALL_GRID[0] if args.small else (16, 1000, 128)
        rows += [measure_memory(bench, which, precision, shape) for precision in HALVES]
    if bench.cuda:
        rows.append(measure_first_call())
    columns = ("ours", "peer", "precision", "B", "T", "H")
    timed = [f"{who} {mode} ms" for mode in MODES for who in ("ours", "peer")]
    compared = [*columns, *timed, *(f"{mode} ratio" for mode in MODES)]
    finish(
        "recurrence",
        args,
        rows,
        {
            "derived": compared,
            "torch": compared,
            "own": compared,
            "heads": compared,
            "norms": compared,
            "spikes": compared,
            "reset": ["B", "T", "H"] + [f"{m} {x}" for m in MODES for x in ("/ without", "/ split nn.LSTM")],
            "long memory": ["layer", "precision", "B", "T", "H"]
            + [f"{name} {what} error" for what in ("output", "gradient") for name in ("ours", "nn")],
            "first call": ["first process s", "next process s"],
        },
        claims_of(rows),
    )


if __name__ == "__main__":
    main()
