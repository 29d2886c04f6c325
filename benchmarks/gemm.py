"""gemm against torch.matmul (cuBLAS), and bias and relu fused into it against eager PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from harness import DTYPES, INK, OURS, Bench, color, finish, parse, rotating, series, sets_beyond_cache
from torch import Tensor

import lltm_ext

LAYOUTS = ("NN", "NT", "TN")
FUSED = "NT + bias, relu"


def operand(rows: int, columns: int, transposed: bool, like: dict[str, Any]) -> Tensor:
    """T: stored the other way round, and handed over as a transposed view."""
    return torch.randn(columns, rows, **like).t() if transposed else torch.randn(rows, columns, **like)


def measure(bench: Bench, dtype: str, layout: str, n: int) -> dict[str, Any]:
    like = {"device": bench.device, "dtype": DTYPES[dtype]}
    sets = sets_beyond_cache(3 * n * n * DTYPES[dtype].itemsize, bench.device)
    operands = [tuple(operand(n, n, side == "T", like) for side in layout) for _ in range(sets)]
    return row(bench, {OURS: lltm_ext.gemm, "torch": torch.matmul}, operands, dtype, layout, n)


def measure_fused(bench: Bench, dtype: str, n: int) -> dict[str, Any]:
    """A linear layer and its relu: x W^T + b."""
    like = {"device": bench.device, "dtype": DTYPES[dtype]}
    sets = sets_beyond_cache(3 * n * n * DTYPES[dtype].itemsize, bench.device)
    operands = [
        (torch.randn(n, n, **like), torch.randn(n, n, **like).t(), torch.randn(n, **like))
        for _ in range(sets)
    ]
    calls = {
        OURS: lambda a, b, bias: lltm_ext.gemm(a, b, bias=bias, activation="relu"),
        "torch": lambda a, b, bias: torch.relu(torch.addmm(bias, a, b)),
    }
    return row(bench, calls, operands, dtype, FUSED, n)


def row(bench: Bench, calls: dict, operands: list, dtype: str, layout: str, n: int) -> dict[str, Any]:
    times = bench.milliseconds({name: rotating(call, operands) for name, call in calls.items()})
    found: dict[str, Any] = {"dtype": dtype, "layout": layout, "n": n}
    for name, milliseconds in times.items():
        found |= {f"{name} ms": milliseconds, f"{name} TFLOP/s": 2 * n**3 / milliseconds / 1e9}
    return found | {"ours / torch": found[f"{OURS} TFLOP/s"] / found["torch TFLOP/s"]}


def main() -> None:
    args = parse(__doc__)
    bench = Bench(args.device, args.seconds)
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = (256,) if args.quick else (256, 512) if args.small else (512, 1024, 2048, 4096, 8192)
    rows = []
    for dtype in DTYPES:
        for n in sizes:
            if (dtype, n) == ("float64", 8192):
                continue  # seconds a call
            rows += [measure(bench, dtype, layout, n) for layout in LAYOUTS]
            rows.append(measure_fused(bench, dtype, n))
    columns = [
        "dtype",
        "layout",
        "n",
        f"{OURS} ms",
        "torch ms",
        f"{OURS} TFLOP/s",
        "torch TFLOP/s",
        "ours / torch",
    ]
    finish("gemm", args, rows, columns)


def draw(record: dict[str, Any]) -> Any:
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    rows, names = record["rows"], ["torch", OURS]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    styles = {"NN": "-", "NT": ":", "TN": "-.", FUSED: "--"}
    figure, line = plt.subplots(
        1, len(dtypes), figsize=(3.4 * len(dtypes), 3.4), layout="constrained", squeeze=False
    )
    for axes, dtype in zip(line[0], dtypes, strict=True):
        for name in names:
            for layout, style in styles.items():
                here = [row for row in rows if (row["dtype"], row["layout"]) == (dtype, layout)]
                axes.plot(
                    *series(here, "n", f"{name} TFLOP/s"),
                    style,
                    color=color(name, names),
                    marker=".",
                    linewidth=1.3,
                )
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(dtype, loc="left")
        axes.set_xlabel("M = N = K")
    line[0][0].set_ylabel("TFLOP/s")
    handles = [Line2D([], [], color=color(name, names), linewidth=3, label=name) for name in names]
    handles += [Line2D([], [], color=INK, linestyle=style, label=layout) for layout, style in styles.items()]
    figure.legend(handles=handles, loc="outside right center")
    return figure


if __name__ == "__main__":
    main()
