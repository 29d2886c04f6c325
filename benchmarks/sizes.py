"""LSTM and LLTM beside nn.LSTM over a map of sizes: times of forward and training, and peak memory.

benchmarks/sizes_gru_rnn.py has GRU and RNN.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness import GRID, INK, OURS, Bench, Row, finish, parse
from lltm import LAYERS, LLTM, LSTM, MODES, PEER, Sequences, Shape, layers, sizes
from pages import HALF, beside_faster_half
from torch import nn

import lltm_ext

BATCHES = (1, 4, 16, 64, 256, 1024)
HIDDEN = (32, 64, 96, 128, 200, 256, 384, 512, 768, 1024, 1536, 2048)
LENGTHS = (20, 200, 1000)
# Of few steps, as graph networks and models of characters have them.
MANY_ROWS = [(b, t, h) for t in (4, 20) for h in (64, 256) for b in (20_000, 65_536, 200_000)]
FLOATS = ("float32", "ieee")
PRECISIONS = (*FLOATS, "bfloat16", "float16")
GRU, RNN = f"{OURS}.GRU", f"{OURS}.RNN"
Groups = Mapping[str, Sequence[str]]  # layers by their peer, with which they take turns
MODULES = LAYERS | {GRU: lltm_ext.GRU, RNN: lltm_ext.RNN, "nn.GRU": nn.GRU, "nn.RNN": nn.RNN}
KINDS = (*MODES, "peak")
# What a shape may take: elements of h over all steps, and multiplications of its products with h.
MOST_ELEMENTS, MOST_PRODUCTS = 2**25, 2**35
MOST_ELEMENTS_OF_MANY_ROWS = 2**28
SHORT_CALL_MS = 1.0  # up to which the host may bound a call


def shapes(small: bool) -> list[Shape]:
    if small:
        return [(b, 20, h) for b in BATCHES[:2] for h in HIDDEN[:2]]
    every = ((b, t, h) for t in LENGTHS for h in HIDDEN for b in BATCHES)
    found = [s for s in every if math.prod(s) <= MOST_ELEMENTS and math.prod(s) * s[2] <= MOST_PRODUCTS]
    return found + [s for s in MANY_ROWS if math.prod(s) <= MOST_ELEMENTS_OF_MANY_ROWS]


def measure_all(bench: Bench, groups: Groups, keys: Sequence[tuple[str, Shape, str]]) -> list[Row]:
    """Sizes with a loss or short calls are measured twice more at the end, and medians count.

    A host that is busy for a second makes a loss where there is none, and short calls several times as long.
    """
    runs = {key: [measure(bench, groups[key[0]], *key)] for key in keys}
    for _ in range(2):
        for key, found in runs.items():
            if any(is_repeated(row, mode) for row in found[0] for mode in MODES):
                found.append(measure(bench, groups[key[0]], *key))
    return [median(rows) for found in runs.values() for rows in zip(*found, strict=True)]


def is_repeated(row: Row, mode: str) -> bool:
    return row[f"{mode} ratio"] > 1 or row[f"ours {mode} ms"] < SHORT_CALL_MS


def median(rows: Sequence[Row]) -> Row:
    """Of the times of one layer and size; memory is that of the first run."""
    middle = dict(rows[0])
    for mode in MODES:
        for time in (f"ours {mode} ms", f"peer {mode} ms"):
            middle[time] = statistics.median(row[time] for row in rows)
        middle[f"{mode} ratio"] = middle[f"ours {mode} ms"] / middle[f"peer {mode} ms"]
    return middle


def measure(bench: Bench, ours: Sequence[str], peer: str, shape: Shape, precision: str) -> list[Row]:
    """A row for each of our layers that have this peer."""
    names = [(name, precision) for name in (*ours, peer)]
    candidates = layers(bench, shape[2], names, MODULES)
    sequences = Sequences(bench, shape, candidates)
    found: Row = {}
    for mode in MODES:
        found |= sequences.times(mode, candidates)
    found |= sequences.peaks()
    rows = []
    for layer in ours:
        row: Row = {"layer": layer, "precision": precision} | sizes(shape)
        for kind in KINDS:
            unit = "MiB" if kind == "peak" else "ms"
            ours, theirs = (found[f"{name} {precision} {kind} {unit}"] for name in (layer, peer))
            row |= {f"ours {kind} {unit}": ours, f"peer {kind} {unit}": theirs}
            row[f"{kind} ratio"] = ours / theirs if ours is not None else None
        rows.append(row)
    return rows


# ---- the summary ---------------------------------------------------------------------------------


def claims(rows: Sequence[Row]) -> list[str]:
    found, rows = [], beside_faster_half(rows)
    for layer in dict.fromkeys(row["layer"] for row in rows):
        for precision in (*FLOATS, HALF):
            here = [row for row in rows if (row["layer"], row["precision"]) == (layer, precision)]
            found += [f"{layer}, {precision}, {claim}" for kind in KINDS for claim in claim_of(here, kind)]
    return found


def claim_of(rows: Iterable[Row], kind: str) -> list[str]:
    ratios = {(r["B"], r["T"], r["H"]): r[f"{kind} ratio"] for r in rows if r[f"{kind} ratio"] is not None}
    if not ratios:
        return []
    mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
    above = [sum(x > limit for x in ratios.values()) for limit in (1, 1.05)]
    worst = sorted(ratios, key=lambda shape: -ratios[shape])[:3]
    where = ", ".join(f"{ratios[shape]:.2f} at {shape}" for shape in worst)
    return [
        f"{kind}: {mean:.2f} x (geometric mean of {len(ratios)}), {above[0]} above 1.00 and {above[1]} above "
        f"1.05 x; the largest (B, T, H): {where}"
    ]


# ---- the picture ---------------------------------------------------------------------------------

COLORED = (0.03, 0.1, 0.3, 1, 1.4, 2)  # the ratios of the colors' ends, and in between


def draw(record: Row) -> Any:
    """A panel for each layer and precision, length and mode: the ratio by batch and hidden size."""
    from matplotlib import pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    columns = [(length, mode) for mode in MODES for length in LENGTHS]
    rows = beside_faster_half(record["rows"])
    lines = list(dict.fromkeys((row["layer"], row["precision"]) for row in rows))
    figure, grid = plt.subplots(
        len(lines),
        len(columns),
        figsize=(15, 1.5 * len(lines)),
        layout="constrained",
        sharex=True,
        sharey=True,
    )
    image, norm = None, TwoSlopeNorm(0, math.log(COLORED[0]), math.log(COLORED[-1]))
    for (layer, precision), panels in zip(lines, grid, strict=True):
        for (length, mode), axes in zip(columns, panels, strict=True):
            ratios = {
                (row["B"], row["H"]): row[f"{mode} ratio"]
                for row in rows
                if (row["layer"], row["precision"], row["T"]) == (layer, precision, length)
                and row["B"] in BATCHES
            }
            values = [[math.log(ratios.get((b, h), math.nan)) for h in HIDDEN] for b in BATCHES]
            image = axes.imshow(values, cmap="RdBu_r", norm=norm, aspect="auto", origin="lower")
            for (b, h), ratio in ratios.items():
                if ratio > 1:
                    at = (HIDDEN.index(h), BATCHES.index(b))
                    axes.text(*at, f"{ratio:.2f}", ha="center", va="center", fontsize=4, color=INK)
            axes.grid(False)
            axes.set_facecolor(GRID)  # not measured
            axes.set_xticks(range(len(HIDDEN)), HIDDEN, fontsize=5, rotation=90)
            axes.set_yticks(range(len(BATCHES)), BATCHES, fontsize=5)
            axes.set_title(f"{layer.rpartition('.')[2]} {precision}, T {length}, {mode}", fontsize=7)
    bar = figure.colorbar(image, ax=grid, shrink=0.4, label="time / that of torch's layer")
    bar.set_ticks([math.log(ratio) for ratio in COLORED], labels=[f"{ratio:g}" for ratio in COLORED])
    figure.supylabel("batch")
    for axes in grid[-1]:
        axes.set_xlabel("hidden and input size", fontsize=6)
    return figure


def run(op: str, description: str, groups: Groups) -> None:
    args = parse(description)
    bench = Bench(args.device, args.seconds / 4)
    precisions = PRECISIONS if bench.cuda else PRECISIONS[:1]
    keys = [
        (*key, precision) for key in itertools.product(groups, shapes(args.small)) for precision in precisions
    ]
    rows = measure_all(bench, groups, keys)
    columns = ["layer", "precision", "B", "T", "H", *(f"{kind} ratio" for kind in KINDS)]
    finish(op, args, rows, columns, claims(rows))


if __name__ == "__main__":
    run("sizes", __doc__ or "", {PEER: (LSTM, LLTM)})
