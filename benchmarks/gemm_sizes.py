"""gemm against torch.matmul (cuBLAS) at random sizes, of every type and layout.

M, N and K are drawn from 1 to 16,384, uniformly on a logarithmic scale. Times are of the device, as in
gemm.py.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable
from typing import Any

import torch
from gemm import LAYOUTS, measure, with_precision
from harness import DTYPES, INK, OUR_COLOR, OURS, Bench, Row, finish, parse

LARGEST, MOST_FLOP = 16_384, 2**41
COUNT, SEED = 200, 0
TYPES = (*DTYPES, "tf32")
RATIO = "ours / torch"  # of the rates


def shapes(count: int, largest: int, seed: int) -> list[tuple[int, int, int]]:
    """M, K, N. Every second shape has multiples of 8."""
    draw = random.Random(seed)
    found: list[tuple[int, int, int]] = []
    while len(found) < count:
        sizes = [round(2 ** draw.uniform(0, math.log2(largest))) for _ in range(3)]
        if len(found) % 2:
            sizes = [-(-size // 8) * 8 for size in sizes]
        if 2 * math.prod(sizes) <= MOST_FLOP:
            found.append((sizes[0], sizes[1], sizes[2]))
    return found


def measure_type(bench: Bench, name: str, count: int, largest: int) -> list[Row]:
    dtype = "float32" if name == "tf32" else name
    precision = "tf32" if name == "tf32" else "ieee"
    calls = with_precision(precision)
    return [
        measure(bench, "", dtype, LAYOUTS[i // 2 % 4], shape, calls, type=name, precision=precision)
        for i, shape in enumerate(shapes(count, largest, SEED))
    ]


def percentile(values: Iterable[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) * percent // 100]


def claims(rows: list[Row]) -> list[str]:
    found = []
    for name in dict.fromkeys(row["type"] for row in rows):
        here = [row for row in rows if row["type"] == name]
        ratios = [row[RATIO] for row in here]
        worst = sorted(here, key=lambda row: row[RATIO])[:3]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        where = ", ".join(
            f"{row[RATIO]:.2f} at {row['m']} x {row['k']} x {row['n']} {row['layout']}" for row in worst
        )
        by_library = sum(row["kernel"] == "library" for row in here)
        found.append(
            f"{name}: {mean:.3f} x torch's rate (geometric mean of {len(ratios)}), 5th percentile "
            f"{percentile(ratios, 5):.2f}; cuBLAS ran in {by_library}; the lowest: {where}"
        )
    return found


def draw(record: Row) -> Any:
    """A panel for each type: our rate in parts of torch's, by the number of operations."""
    from matplotlib import pyplot as plt

    rows = record["rows"]
    names = list(dict.fromkeys(row["type"] for row in rows))
    figure, panels = plt.subplots(1, len(names), figsize=(15, 3.4), sharey=True, layout="constrained")
    for name, axes in zip(names, panels, strict=True):
        for aligned, marker in ((True, "o"), (False, "x")):
            here = [
                row
                for row in rows
                if row["type"] == name and aligned == all(row[size] % 8 == 0 for size in "mkn")
            ]
            flop = [2 * row["m"] * row["k"] * row["n"] for row in here]
            axes.plot(
                flop,
                [row[RATIO] for row in here],
                marker,
                color=OUR_COLOR,
                markersize=3,
                label="multiples of 8" if aligned else "any sizes",
            )
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(name, loc="left")
        axes.set_xlabel("FLOP")
    panels[0].set_ylabel("rate / torch's")
    panels[0].legend(fontsize=7)
    figure.suptitle(f"{OURS}.gemm: its rate in parts of torch.matmul's, at random sizes", fontsize=11)
    return figure


def main() -> None:
    args = parse(__doc__ or "")
    bench = Bench(args.device, args.seconds / 5, least_rounds=3)
    torch.backends.cuda.matmul.allow_tf32 = False
    count, largest = (8, 256) if args.small else (COUNT, LARGEST)
    types = TYPES if bench.cuda else tuple(DTYPES)
    rows = [row for name in types for row in measure_type(bench, name, count, largest)]
    columns = ["type", "layout", "m", "k", "n", "kernel", f"{OURS} ms", "torch ms", RATIO]
    finish("gemm_sizes", args, rows, columns, claims(rows))


if __name__ == "__main__":
    main()
