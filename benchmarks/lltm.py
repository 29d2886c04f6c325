"""LLTM: one step against a tutorial-style extension, layers against nn.LSTM and a Python loop over cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import tutorial_extension
from harness import DTYPES, INK, OUR_COLOR, OURS, PEERS, Bench, Row, color, finish, parse, series
from pages import FASTER_HALF, HALVES, lstm_time
from torch import Tensor, nn
from torch.nn import functional as F

import lltm_ext
from lltm_ext._C import lltm as _C

COMPOSED, TUTORIAL = "PyTorch's ops", "tutorial-style extension"  # tutorial_extension.py
BINDINGS = f"{OURS} raw bindings"  # in a Function of the user's, as the tutorial calls its extension
FUNCTION, CELL = f"{OURS}.LLTMFunction", f"{OURS}.lltm_cell"
STEP_PEERS = (COMPOSED, TUTORIAL)
LOOP, CELLS = "loop over PyTorch's ops", "loop over LLTMCell"
LLTM, LSTM, PEER = f"{OURS}.LLTM", f"{OURS}.LSTM", "nn.LSTM"
MODES = ("forward", "training")  # without gradients; forward and backward
STEP = {"batch": 16, "features": 32, "state": 128}

Shape = tuple[int, int, int]  # B, T, H (= I)
SEQUENCE: Shape = (64, 512, 512)
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
SMALL_GRID: tuple[Shape, ...] = ((1, 32, 64), (16, 32, 64))
BIDIRECTIONAL_GRID: tuple[Shape, ...] = ((1, 1000, 256), (16, 1000, 256), (64, 512, 512), (32, 512, 1024))
CPU_GRID: tuple[Shape, ...] = ((1, 128, 256), (16, 128, 256), (32, 64, 512))
# All layers of a group take turns.
GROUPS = (("float32", "ieee"), HALVES)

# One of the three varies.
SWEEPS: dict[str, list[Shape]] = {
    "H": [(16, 256, h) for h in (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)],
    "B": [(2**n, 256, 256) for n in range(10)],
    "T": [(16, 2**n, 256) for n in range(5, 12)],
}
CPU_SWEEPS: dict[str, list[Shape]] = {
    "H": [(16, 64, h) for h in (64, 128, 256, 512)],
    "B": [(2**n, 64, 256) for n in range(0, 7, 2)],
    "T": [(16, 2**n, 256) for n in range(3, 8)],
}
SMALL_SWEEPS: dict[str, list[Shape]] = {
    "H": [(4, 16, 16), (4, 16, 64)],
    "B": [(1, 16, 32), (8, 16, 32)],
    "T": [(4, 8, 32), (4, 32, 32)],
}

ALGORITHMS = ("cluster", "grid", "stepwise")
ALGORITHM_GRID: list[Shape] = [(b, 128, h) for b in (1, 16, 64, 256) for h in (128, 256, 512, 1024, 2048)]
SMALL_ALGORITHM_GRID: list[Shape] = [(1, 16, 32), (4, 16, 32)]

# The shortest possible step of a persistent kernel, us: the time its blocks need to exchange h, without any
# arithmetic. Measured on an H200: a cluster's all-to-all of up to 8 blocks and of 16, and a grid's barrier.
CLUSTER_FLOORS, GRID_FLOOR = {8: 0.36, 16: 0.47}, 0.93
CLUSTER_BLOCKS = 8  # at most: kMostClusterBlocks in src/common/device.h
FLOORS = {"cluster": CLUSTER_FLOORS[CLUSTER_BLOCKS], "grid": GRID_FLOOR}


# ---- the peers -----------------------------------------------------------------------------------


def composed_cell(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """The cell in PyTorch's ops."""
    i, o, z = F.linear(torch.cat([old_h, input], dim=1), weights, bias).chunk(3, dim=1)
    new_cell = old_cell + F.elu(z) * torch.sigmoid(i)
    return torch.tanh(new_cell) * torch.sigmoid(o), new_cell


def user_function(extension: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """A user's Function over an extension's `forward` and `backward`, as the tutorial writes it."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, weights, bias, old_h, old_cell):
            outputs = extension.forward(input, weights, bias, old_h, old_cell)
            ctx.save_for_backward(*outputs[1:], weights)
            return outputs[0], outputs[1]

        @staticmethod
        def backward(ctx, grad_h, grad_cell):
            gradients = extension.backward(grad_h.contiguous(), grad_cell.contiguous(), *ctx.saved_tensors)
            d_old_h, d_input, d_weights, d_bias, d_old_cell = gradients
            return d_input, d_weights, d_bias, d_old_h, d_old_cell

    return Function.apply


class ComposedCell(nn.Module):
    def __init__(self, like: lltm_ext.LLTMCell):
        super().__init__()
        self.weights, self.bias = like.weights, like.bias

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return composed_cell(input, self.weights, self.bias, *hx)


class Loop(nn.Module):
    """A Python loop that calls a cell for each step."""

    def __init__(self, cell: nn.Module, hidden_size: int):
        super().__init__()
        self.cell, self.hidden_size = cell, hidden_size

    def forward(self, input: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = c = input.new_zeros(input.shape[1], self.hidden_size)
        outputs = []
        for step in input:
            h, c = self.cell(step, (h, c))
            outputs.append(h)
        return torch.stack(outputs), (h, c)


# ---- (a) one step --------------------------------------------------------------------------------


def measure_step(bench: Bench, rounds: int) -> list[Row]:
    """Host time of one training step, as the tutorial measures it, without and with waiting for the GPU."""
    cells: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        COMPOSED: composed_cell,
        BINDINGS: user_function(_C),
        FUNCTION: lltm_ext.LLTMFunction.apply,
        CELL: lltm_ext.lltm_cell,
    }
    left_out: Row = {}
    try:
        cells[TUTORIAL] = user_function(tutorial_extension.build(bench.device))
    except (RuntimeError, OSError) as error:
        left_out[f"{TUTORIAL} error"] = str(error).split("\n")[0]
    batch, features, state = STEP.values()
    like = {"device": bench.device}
    parameters = [
        nn.Parameter(torch.randn(3 * state, features + state, **like) / state**0.5),
        nn.Parameter(torch.randn(3 * state, **like)),
    ]
    input, old_h, old_cell, grad_h, grad_cell = (
        torch.randn(batch, n, **like) for n in (features, state, state, state, state)
    )

    def forward(name: str) -> tuple[Tensor, Tensor]:
        for parameter in parameters:
            parameter.grad = None
        return cells[name](input, *parameters, old_h, old_cell)

    def backward(outputs: tuple[Tensor, Tensor]) -> None:
        torch.autograd.backward(outputs, (grad_h, grad_cell))

    def backward_of_sums(outputs: tuple[Tensor, Tensor]) -> None:
        (outputs[0].sum() + outputs[1].sum()).backward()

    for name in cells:  # all compute the same step
        outputs, expected = forward(name), forward(COMPOSED)
        found = torch.autograd.grad(outputs, parameters, (grad_h, grad_cell))
        gradients = torch.autograd.grad(expected, parameters, (grad_h, grad_cell))
        torch.testing.assert_close((*outputs, *found), (*expected, *gradients), rtol=1e-3, atol=1e-3)

    forwards = {name: lambda name=name: forward(name) for name in cells}
    timed = {
        "forward": (forwards, None),
        "backward": (dict.fromkeys(cells, backward), forward),
        "backward of sums": (dict.fromkeys(cells, backward_of_sums), forward),
    }
    rows = []
    for what, (calls, before) in timed.items():
        for wait in (False, True):
            times = bench.host_microseconds(calls, before=before, wait=wait, rounds=rounds)
            row = {"part": "step", "what": what, "waits": wait} | left_out
            rows.append(row | {f"{name} us": time for name, time in times.items()})
    return rows


# ---- sequences -----------------------------------------------------------------------------------


class Candidate(NamedTuple):
    module: nn.Module
    precision: str


def dtype_of(precision: str) -> torch.dtype:
    return DTYPES["float32" if precision == "ieee" else precision]


@contextmanager
def settings(precision: str) -> Iterator[None]:
    """torch's defaults, in which nn.LSTM and our layers use TF32; "ieee" is float32 without it."""
    torch.backends.cudnn.allow_tf32 = precision != "ieee"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = True


class Sequences:
    """Random sequences of one shape, and the candidates that run over them."""

    def __init__(self, bench: Bench, shape: Shape, candidates: Mapping[str, Candidate], directions: int = 1):
        self.bench, self.candidates = bench, candidates
        self.batch, self.length, self.hidden = shape
        dtypes = {dtype_of(candidate.precision) for candidate in candidates.values()}

        def random(features: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(self.length, self.batch, features, device=bench.device, dtype=dtype)

        self.inputs = {d: random(self.hidden, d).requires_grad_() for d in dtypes}
        self.grad_outputs = {d: random(directions * self.hidden, d) for d in dtypes}

    def input(self, name: str) -> Tensor:
        return self.inputs[dtype_of(self.candidates[name].precision)]

    def call(self, name: str, mode: str) -> Callable[[], Any]:
        module, precision = self.candidates[name]
        input, grad_output = self.input(name), self.grad_outputs[dtype_of(precision)]

        def forward() -> Any:
            with settings(precision), torch.no_grad():
                return module(input)

        def training() -> None:
            input.grad = None
            module.zero_grad()
            with settings(precision):
                module(input)[0].backward(grad_output)

        return {"forward": forward, "training": training}[mode]

    def clear(self) -> None:
        for input in self.inputs.values():
            input.grad = None
        for candidate in self.candidates.values():
            candidate.module.zero_grad()

    def times(self, mode: str, names: Iterable[str]) -> Row:
        found = self.bench.milliseconds({name: self.call(name, mode) for name in names})
        return {f"{name} {mode} ms": time for name, time in found.items()} | {
            f"{name} {mode} us/step": time * 1e3 / self.length for name, time in found.items()
        }

    def peaks(self) -> Row:
        """Peak memory of a training step, inputs and parameters not included."""
        found = {
            f"{name} peak MiB": self.bench.peak_mib(self.call(name, "training"), self.clear)
            for name in self.candidates
        }
        self.clear()
        return found

    def algorithms(self, modes: Sequence[str]) -> Row:
        """Which algorithm each of our layers takes, and the shortest possible step of it."""
        found: Row = {}
        for name, (module, precision) in self.candidates.items():
            if not isinstance(module, OUR_LAYERS):
                continue
            input = self.input(name)
            with settings(precision):
                forward, backward = (algorithm_of(module, input, b) for b in (False, True))
            passes = {"forward": (forward,), "training": (forward, backward)}
            found |= {f"{name} forward algorithm": forward, f"{name} backward algorithm": backward}
            for mode in modes:
                # Up to 128 units mostly run in one block, which exchanges nothing.
                floors = [FLOORS.get(a) if module.hidden_size > 128 else None for a in passes[mode]]
                found[f"{name} {mode} floor us/step"] = None if None in floors else sum(floors)
        return found


# ---- (b) a loop over cells -----------------------------------------------------------------------


def measure_loop(bench: Bench, shape: Shape) -> Row:
    """All in IEEE float32, as torch's own products are by default."""
    hidden = shape[2]
    cell = lltm_ext.LLTMCell(hidden, hidden, device=bench.device)
    modules = {
        OURS: lltm_ext.LLTM(hidden, hidden, device=bench.device),
        LOOP: Loop(ComposedCell(cell), hidden),
        CELLS: Loop(cell, hidden),
    }
    sequences = Sequences(bench, shape, {name: Candidate(m, "ieee") for name, m in modules.items()})
    row = {"part": "sequence", "precision": "ieee"} | sizes(shape)
    return (
        row | sequences.times("forward", modules) | sequences.times("training", modules) | sequences.peaks()
    )


def sizes(shape: Shape) -> Row:
    return dict(zip("BTH", shape, strict=True))


# ---- (c) layers ----------------------------------------------------------------------------------

LAYERS: dict[str, type[nn.Module]] = {LLTM: lltm_ext.LLTM, LSTM: lltm_ext.LSTM, PEER: nn.LSTM}
OUR_LAYERS = (lltm_ext.LLTM, lltm_ext.LSTM)


def algorithm_of(module: nn.Module, input: Tensor, backward: bool) -> str:
    function = lltm_ext.lltm_algorithm if isinstance(module, lltm_ext.LLTM) else lltm_ext.lstm_algorithm
    zeros = input.new_zeros(input.shape[1], module.hidden_size)
    return function(input, (zeros, zeros), module.weight_ih_l0, module.weight_hh_l0, backward=backward)


def layers(
    bench: Bench,
    hidden: int,
    names: Iterable[tuple[str, str]],
    modules: Mapping[str, type[nn.Module]] = LAYERS,
    **options: Any,
) -> dict[str, Candidate]:
    """Candidates named after a layer and its precision: 'nn.LSTM float16', ..."""
    return {
        f"{name} {precision}": Candidate(
            modules[name](hidden, hidden, device=bench.device, dtype=dtype_of(precision), **options),
            precision,
        )
        for name, precision in names
    }


def measure_layers(
    bench: Bench, shape: Shape, precisions: Sequence[str], bidirectional: bool = False
) -> list[Row]:
    """A row for each precision. nn.LSTM and LSTM have four gates, LLTM has three."""
    names = [(name, p) for p in precisions for name in LAYERS]
    candidates = layers(bench, shape[2], names, bidirectional=bidirectional)
    sequences = Sequences(bench, shape, candidates, directions=1 + bidirectional)
    found = {} if bidirectional else sequences.algorithms(MODES)
    for mode in MODES:
        found |= sequences.times(mode, sequences.candidates)
    found |= sequences.peaks()
    rows = []
    for precision in precisions:
        row = {"part": "bidirectional" if bidirectional else "layer", "precision": precision} | sizes(shape)
        here = f" {precision} "
        row |= {key.replace(here, " ", 1): value for key, value in found.items() if here in key}
        for mode in MODES:
            for name in (LLTM, LSTM):
                if f"{name} {mode} ms" in row:
                    row[f"{mode} {name} / {PEER}"] = row[f"{name} {mode} ms"] / row[f"{PEER} {mode} ms"]
        rows.append(row)
    return rows


def measure_sweep(bench: Bench, over: str, shape: Shape, precisions: Sequence[str]) -> Row:
    """A training step in the first precision, the peer in all of them."""
    names = [(name, precisions[0]) for name in LAYERS] + [(PEER, p) for p in precisions[1:]]
    sequences = Sequences(bench, shape, layers(bench, shape[2], names))
    row = {"part": "sweep", "over": over} | sizes(shape) | sequences.algorithms(["training"])
    return row | sequences.times("training", sequences.candidates)


# ---- (d) algorithms ------------------------------------------------------------------------------


class ByAlgorithm(nn.Module):
    """The LLTM by one algorithm. Raises where that one can't run."""

    def __init__(self, layer: lltm_ext.LLTM, algorithm: str):
        super().__init__()
        self.layer, self.algorithm = layer, algorithm

    def forward(self, input: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        zeros = input.new_zeros(input.shape[1], self.layer.hidden_size)
        weights = (self.layer.weight_ih_l0, self.layer.weight_hh_l0, self.layer.bias_l0)
        return lltm_ext.lltm(input, (zeros, zeros), *weights, algorithm=self.algorithm)


def measure_algorithms(bench: Bench, shape: Shape, precision: str) -> Row:
    layer = lltm_ext.LLTM(shape[2], shape[2], device=bench.device, dtype=dtype_of(precision))
    candidates = {name: Candidate(ByAlgorithm(layer, name), precision) for name in ALGORITHMS}
    sequences = Sequences(bench, shape, candidates)
    row = {"part": "algorithm", "precision": precision} | sizes(shape)
    for name, backward in (("forward", False), ("backward", True)):
        row[f"auto {name}"] = algorithm_of(layer, sequences.input("stepwise"), backward)
    for mode in MODES:
        runnable = []
        for name in ALGORITHMS:
            call = sequences.call(name, mode)
            try:
                call()
            except (RuntimeError, ValueError) as error:
                row |= {f"{name} {mode} {unit}": None for unit in ("ms", "us/step")}
                row[f"{name} {mode} error"] = str(error).split("\n")[0]
            else:
                runnable.append(name)
        row |= sequences.times(mode, runnable)
    return row


# ---- the summary ---------------------------------------------------------------------------------

# Our layer, and the precisions in which it is compared with the faster of the peer's.
COMPARED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (LLTM, HALVES),
    (LLTM, ("float32",)),
    (LLTM, ("ieee",)),
    (LSTM, HALVES),
    (LSTM, ("float32",)),
    (LSTM, ("ieee",)),
)


def summarize(rows: list[Row]) -> list[Row]:
    found = []
    for ours, precisions in COMPARED:
        here = [row for row in rows if row["part"] == "layer" and row["precision"] in precisions]
        ratios: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
        for mode in MODES:
            for row in here:
                ratio = row[f"{ours} {mode} ms"] / lstm_time(row, here, mode)
                ratios[mode][f"{shape_name(row)} {row['precision']} {mode}"] = ratio
        ratios["both"] = ratios["forward"] | ratios["training"]
        for mode, of in ratios.items() if here else ():
            worst = max(of, key=of.__getitem__)
            row = {"part": "summary", "ours": ours, "precision": ", ".join(precisions), "mode": mode}
            row |= {"ratios": len(of), "geometric mean": statistics.geometric_mean(of.values())}
            row |= {"worst": of[worst], "worst at": worst}
            found.append(row | {"losses": {name: ratio for name, ratio in of.items() if ratio > 1}})
    return found


def shape_of(row: Row) -> Shape:
    return row["B"], row["T"], row["H"]


def shape_name(row: Row) -> str:
    return " x ".join(map(str, shape_of(row)))


# ---- claims --------------------------------------------------------------------------------------


def claims(rows: list[Row]) -> list[str]:
    found = []
    for row in rows:
        if row["part"] == "step" and not row["waits"]:
            peers = {peer: row[f"{peer} us"] for peer in STEP_PEERS if f"{peer} us" in row}
            for name in (FUNCTION, CELL):
                ours = row[f"{name} us"]
                ratios = [f"{ours / theirs:.2f} x {peer} ({theirs:.0f})" for peer, theirs in peers.items()]
                found.append(f"step, {row['what']}: {name} {ours:.0f} us of host time, {', '.join(ratios)}")
        if row["part"] == "sequence":
            ours, theirs = row[f"{OURS} training ms"], row[f"{LOOP} training ms"]
            found.append(
                f"sequence, training: {ours:.2f} ms, {theirs / ours:.1f} x faster than a loop's {theirs:.2f}"
            )
            ours, theirs = row[f"{OURS} peak MiB"], row[f"{LOOP} peak MiB"]
            if ours is not None:
                found.append(f"sequence, peak memory: {ours:.0f} MiB, a loop's {theirs:.0f}")
        if row["part"] == "bidirectional" and f"{LLTM} training ms" in row:
            ratios = [f"{mode} {row[f'{mode} {LLTM} / {PEER}']:.2f} x {PEER}" for mode in MODES]
            found.append(f"bidirectional LLTM, {shape_name(row)} {row['precision']}: {', '.join(ratios)}")
        if row["part"] == "summary":
            mean, worst = f"{row['geometric mean']:.2f} x", f"{row['worst']:.2f} x ({row['worst at']})"
            fastest = "the fastest " if ", " in row["precision"] else ""
            found.append(
                f"{row['ours']} in {row['precision']}, {row['mode']}: {mean} {fastest}{PEER}'s time "
                f"(geometric mean of {row['ratios']}), at worst {worst}"
            )
            if row["mode"] == "both":
                losses = [f"{name} {ratio:.2f} x" for name, ratio in row["losses"].items()]
                found.append(f"losses of {row['ours']} in {row['precision']}: {', '.join(losses) or 'none'}")
    errors = {row.get(f"{TUTORIAL} error") for row in rows} - {None}
    return found + [f"step: no {TUTORIAL}, {error}" for error in errors]


def main() -> None:
    args = parse(__doc__)
    bench, brief = Bench(args.device, args.seconds), Bench(args.device, args.seconds / 4)
    grid, sweeps, algorithm_grid = GRID, SWEEPS, ALGORITHM_GRID
    groups: tuple[tuple[str, ...], ...] = GROUPS
    if args.device.type == "cpu":  # computes in float32, and has one algorithm
        grid, sweeps, algorithm_grid, groups = CPU_GRID, CPU_SWEEPS, [], (("float32",),)
    if args.quick:
        grid, sweeps, algorithm_grid = SMALL_GRID, SMALL_SWEEPS, SMALL_ALGORITHM_GRID
    bidirectional_grid = BIDIRECTIONAL_GRID if grid is GRID else grid[1:2]
    rows = measure_step(bench, 50 if args.quick else 300)
    rows.append(measure_loop(bench, (4, 16, 32) if args.quick else (16, 64, 128) if args.small else SEQUENCE))
    for precisions in groups:
        rows += [row for shape in grid for row in measure_layers(bench, shape, precisions)]
        rows += [
            row for shape in bidirectional_grid for row in measure_layers(bench, shape, precisions, True)
        ]
    for over, shapes in sweeps.items():
        rows += [measure_sweep(brief, over, shape, groups[-1]) for shape in shapes]
    for precision in dict.fromkeys((groups[-1][0], "float32")):
        rows += [measure_algorithms(brief, shape, precision) for shape in algorithm_grid]
    rows += summarize(rows)
    finish("lltm", args, rows, tables(groups), claims(rows))


def tables(groups: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """The columns of each part's table. The JSON holds more."""
    size = ["precision", "B", "T", "H"]
    swept = [f"{name} {groups[-1][0]}" for name in LAYERS] + [f"{PEER} {p}" for p in groups[-1][1:]]
    layer = [*size, *(f"{name} {mode} us/step" for mode in MODES for name in LAYERS)]
    layer += [f"training {LLTM} / {PEER}"]
    return {
        "step": ["what", "waits"] + [f"{name} us" for name in (*STEP_PEERS, BINDINGS, FUNCTION, CELL)],
        "sequence": size[1:]
        + [f"{name} {what}" for what in ("training ms", "peak MiB") for name in (OURS, CELLS, LOOP)],
        "layer": layer,
        "bidirectional": layer,
        "sweep": ["over", *size[1:]] + [f"{name} training us/step" for name in swept],
        "algorithm": [*size[:2], "H"]
        + [f"{name} {mode} us/step" for mode in MODES for name in ALGORITHMS]
        + ["auto forward", "auto backward"],
        "summary": ["ours", "precision", "mode", "ratios", "geometric mean", "worst", "worst at"],
    }


# ---- the picture ---------------------------------------------------------------------------------


def draw(record: dict[str, Any]) -> Any:
    from matplotlib import pyplot as plt

    parts: dict[str, list[Row]] = {}
    for row in record["rows"]:
        parts.setdefault(row["part"], []).append(row)
    heights = (1, 1.15, 1) if "algorithm" in parts else (1, 1.15)
    figure = plt.figure(figsize=(13, 3.35 * sum(heights)), layout="constrained")
    lines = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    step, sequence, layer = lines[0].subgridspec(1, 3, width_ratios=(1, 1, 1.25)).subplots()
    draw_step(step, parts["step"])
    draw_sequence(sequence, parts["sequence"][0])
    draw_layer(layer, parts["layer"])
    panels = lines[1].subgridspec(1, 3).subplots(sharey=True)
    for axes, over in zip(panels, "HBT", strict=True):
        draw_sweep(axes, over, [row for row in parts["sweep"] if row["over"] == over])
    outer_labels(panels)
    if "algorithm" in parts:
        batches = list(dict.fromkeys(row["B"] for row in parts["algorithm"]))
        panels = lines[2].subgridspec(1, len(batches)).subplots(sharey=True)
        for axes, batch in zip(panels, batches, strict=True):
            draw_algorithms(axes, [row for row in parts["algorithm"] if row["B"] == batch])
        panels[0].set_title(f"LLTM: {panels[0].get_title(loc='left')}", loc="left")
        outer_labels(panels)
    return figure


def outer_labels(panels: Sequence[Any]) -> None:
    panels[0].set_ylabel("forward + backward, us a step")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))


def bars(axes: Any, names: list[str], sets: Sequence[tuple[float, list[float], list[str]]]) -> None:
    """A bar for each name, or several: the sets have an offset, the values and the labels."""
    for i, (offset, values, labels) in enumerate(sets):
        places, shades = [at + offset for at in range(len(names))], [color(name, names) for name in names]
        drawn = axes.barh(places, values, 0.72 / len(sets), color=shades, alpha=0.6 if i else 1)
        axes.bar_label(drawn, labels, padding=3, fontsize=8, color=INK)
    axes.set_yticks(range(len(names)), names)
    axes.margins(x=0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def draw_step(axes: Any, rows: list[Row]) -> None:
    times = {row["what"]: row for row in rows if not row["waits"]}
    names = [CELL, FUNCTION, BINDINGS, *(peer for peer in STEP_PEERS if f"{peer} us" in rows[0])]
    sets = []
    for offset, what in ((0.19, "forward"), (-0.19, "backward")):
        values = [times[what][f"{name} us"] for name in names]
        sets.append((offset, values, [f"{what} {value:.0f}" for value in values]))
    bars(axes, names, sets)
    axes.set_xlabel("host time, us")
    axes.set_title(
        f"One step: batch {STEP['batch']}, {STEP['features']} in, {STEP['state']} hidden, float32", loc="left"
    )


def draw_sequence(axes: Any, row: Row) -> None:
    names = [OURS, CELLS, LOOP]
    values = [row[f"{name} training ms"] for name in names]
    memory = [row[f"{name} peak MiB"] for name in names]
    labels = [
        f"{value:.1f} ms" + (f", {peak:,.0f} MiB" if peak is not None else "")
        for value, peak in zip(values, memory, strict=True)
    ]
    bars(axes, names, [(0, values, labels)])
    axes.set_xlabel("forward + backward, ms")
    axes.set_title(f"{row['T']} steps: batch {row['B']}, {row['H']} hidden, float32", loc="left")


def draw_layer(axes: Any, rows: list[Row]) -> None:
    shapes = list(dict.fromkeys(shape_of(row) for row in rows))
    precisions = dict.fromkeys(row["precision"] for row in rows)
    shades = ("#1f5fa8", "#c2703d", "#2a8a5f", "#9a5fb5")
    for name in (LLTM, LSTM):
        for precision, mark, shade in zip(precisions, "os^D", shades, strict=False):
            here = [row for row in rows if row["precision"] == precision]
            axes.plot(
                [row[f"{name} training ms"] / lstm_time(row, rows, "training") for row in here],
                [shapes.index(shape_of(row)) + (0.15 if name == LSTM else -0.15) for row in here],
                mark,
                color=shade,
                fillstyle="full" if name == LLTM else "none",
                label=f"{name.removeprefix(OURS + '.')} {precision}",
                markersize=6,
                alpha=0.9,
            )
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xscale("log")
    plain_ticks(axes.xaxis)
    axes.set_xlim(min(0.45, *axes.get_xlim()), max(2.2, *axes.get_xlim()))
    axes.set_yticks(range(len(shapes)), [f"{b} x {t} x {h}" for b, t, h in shapes])
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_xlabel(f"times {PEER}'s time, {FASTER_HALF}, forward + backward")
    axes.set_title(f"Layers against {PEER}: batch x steps x hidden", loc="left")


def log_axes(axes: Any, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)
    axes.minorticks_off()


def plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def draw_sweep(axes: Any, over: str, rows: list[Row]) -> None:
    names = [key.removesuffix(" training ms") for key in rows[0] if key.endswith(" training ms")]
    peers = dict(zip((name for name in names if name.startswith(PEER)), PEERS, strict=False))
    for name in names:
        axes.plot(
            *series(rows, over, f"{name} training us/step"),
            marker=".",
            color=peers.get(name, OUR_COLOR),
            linestyle="--" if name.startswith(LSTM) else "-",
            label=name,
        )
    # Stepwise algorithms leave gaps.
    floors = [row[f"{names[0]} training floor us/step"] or math.nan for row in rows]
    places, what = [row[over] for row in rows], "floor: the LLTM's\nblocks exchange h"
    if not all(map(math.isnan, floors)):
        axes.plot(places, floors, ":", color=INK, drawstyle="steps-mid", label=what)
    log_axes(axes, [place for place in places if math.log2(place).is_integer()])
    words = {"B": "batch {}", "T": "{} steps", "H": "{} hidden"}
    fixed = ", ".join(words[key].format(rows[0][key]) for key in "BTH" if key != over)
    axes.set_xlabel({"B": "batch", "T": "length", "H": "hidden size"}[over])
    axes.set_title(f"Training against {axes.get_xlabel()}: {fixed}", loc="left")


def draw_algorithms(axes: Any, rows: list[Row]) -> None:
    colors = dict(zip(ALGORITHMS, (OUR_COLOR, "#2a8a5f", "#9a5fb5"), strict=True))
    for precision, style in (("bfloat16", "-"), ("float32", "--")):
        here = [row for row in rows if row["precision"] == precision]
        for name in ALGORITHMS if here else ():
            hidden, times = series(here, "H", f"{name} training us/step")
            axes.plot(hidden, times, style, marker=".", color=colors[name], label=f"{name} {precision}")
    log_axes(axes, sorted({row["H"] for row in rows}))
    axes.set_xlabel("hidden size")
    axes.set_title(f"batch {rows[0]['B']}, {rows[0]['T']} steps", loc="left")


if __name__ == "__main__":
    main()
