"""gemm against torch.matmul (cuBLAS), and bias and activation fused into it against eager PyTorch.

Times are of the device: each call is a CUDA graph over all sets of operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from harness import DTYPES, INK, OURS, Bench, Row, color, finish, parse, series, sets_beyond_cache
from torch import Tensor

import lltm_ext

LAYOUTS = ("NN", "NT", "TN", "TT")
HALF = ("bfloat16", "float16")
SQUARE, FEW_ROWS, ODD, FUSED, BATCHES = "square", "few rows", "odd shapes", "fused", "batches"
PRECISION = "float32 by matrix units"
CEILING = "measured peak"
COMPILED = "torch.compile"  # tries its own kernels and cuBLAS's, and keeps the fastest
# M, K, N
ODD_SHAPES = {
    "primes": (1009, 1013, 1019),
    "4095": (4095, 4095, 4095),
    "N 33": (8191, 4096, 33),
    "K 33": (8191, 33, 8191),
    "tall": (65_536, 512, 128),
    "wide": (128, 512, 65_536),
    "K small": (4096, 32, 4096),
    "K huge": (256, 65_536, 256),
    "unaligned rows": (2048, 2047, 2048),
    "unaligned result": (2048, 2048, 2047),
}
ONE_WEIGHT = "one weight"  # of all matrices of a batch: its stride is 0
# batch, M, K, N and the layout
BATCH_SHAPES = {
    "attention: scores": (128, 1024, 64, 1024, "NT"),
    "attention: values": (128, 1024, 1024, 64, "NN"),
    "attention to 77: scores": (128, 1024, 64, 77, "NT"),
    "attention to 77: values": (128, 1024, 77, 64, "NN"),
    "64 experts, up": (64, 256, 1024, 4096, "NT"),
    "64 experts, down": (64, 256, 4096, 1024, "NT"),
    "64 experts, weights": (64, 1024, 256, 4096, "TN"),
    "8 rows an expert": (64, 8, 1024, 4096, "NT"),
    ONE_WEIGHT: (32, 512, 1024, 1024, "NN"),
    "32 x 32": (4096, 32, 32, 32, "NN"),
    "6 x 6": (65_536, 6, 6, 6, "NN"),
}
BATCH_DTYPES = ("bfloat16", "float32")


def operand(rows: int, columns: int, transposed: bool, like: dict[str, Any], *batch: int) -> Tensor:
    """`transposed`: stored as [columns, rows] and passed as a transposed view."""
    if transposed:
        return torch.randn(*batch, columns, rows, **like).mT
    return torch.randn(*batch, rows, columns, **like)


def matmul(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(a, b)


def ours(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return lltm_ext.gemm(a, b)


def kernel_of(a: Tensor, b: Tensor, *args: Any, **options: Any) -> str:
    """What lltm_ext.gemm runs: a kernel of ours, "library" or "cpu"."""
    return str(lltm_ext._C.gemm.kernel_of(a, b, *args, **options))


def measure_batch(bench: Bench, dtype: str, shape: str, sizes: tuple[int, int, int, int], layout: str) -> Row:
    batch, m, k, n = sizes
    like = {"device": bench.device, "dtype": DTYPES[dtype]}
    weights = (1,) if shape == ONE_WEIGHT else (batch,)
    elements = batch * (m * k + m * n) + weights[0] * k * n
    operands = [
        (
            operand(m, k, layout[0] == "T", like, batch),
            operand(k, n, layout[1] == "T", like, *weights).expand(batch, k, n),
        )
        for _ in range(sets_beyond_cache(elements * DTYPES[dtype].itemsize, bench.device))
    ]
    times = bench.device_milliseconds({OURS: lltm_ext.gemm, "torch": torch.bmm}, operands)
    found: Row = {"part": BATCHES, "dtype": dtype, "shape": shape, "layout": layout}
    found |= {"batch": batch, "m": m, "k": k, "n": n, "kernel": kernel_of(*operands[0])}
    for name, milliseconds in times.items():
        found |= {f"{name} ms": milliseconds, f"{name} TFLOP/s": 2 * batch * m * k * n / milliseconds / 1e9}
    return found | {"ours / torch": times["torch"] / times[OURS]}


def fused(activation: str, backward: bool, cuda: bool) -> dict[str, Callable[..., Any]]:
    """A linear layer, x W^T + b, and its activation; with `backward`, the gradients too."""

    def trained(f: Callable[..., Tensor]) -> Callable[..., Any]:
        def step(a: Tensor, b: Tensor, bias: Tensor, grad: Tensor) -> Any:
            inputs = [x.detach().requires_grad_() for x in (a, b, bias)]
            return torch.autograd.grad(f(*inputs), inputs, grad)

        return step if backward else f

    function = getattr(torch.nn.functional, activation)

    def eager(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return function(torch.addmm(bias, a, b))

    calls = {
        OURS: trained(lambda a, b, bias: lltm_ext.gemm(a, b, bias=bias, activation=activation)),
        "torch": trained(eager),
    }
    if cuda:
        torch._dynamo.reset()
        compiled = torch.compile(eager, mode="max-autotune-no-cudagraphs", dynamic=False)
        calls[COMPILED] = trained(compiled)
    return calls


def with_precision(precision: str) -> dict[str, Callable[..., Any]]:
    """float32; for tf32, torch may use TF32 too."""

    def torchs(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        try:
            return torch.matmul(a, b)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return {OURS: lambda a, b, bias: lltm_ext.gemm(a, b, precision=precision), "torch": torchs}


def errors(device: torch.device, calls: dict[str, Callable[..., Any]], n: int) -> dict[str, float]:
    """Relative L2 errors against float64."""
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    exact = a.double() @ b.double()
    return {
        f"{name} error": float((call(a, b, a[0]).double() - exact).norm() / exact.norm())
        for name, call in calls.items()
    }


def measure(
    bench: Bench,
    part: str,
    dtype: str,
    layout: str,
    sizes: tuple[int, int, int],
    calls: dict[str, Callable[..., Any]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    m, k, n = sizes
    like = {"device": bench.device, "dtype": DTYPES[dtype]}
    sets = sets_beyond_cache((m * k + k * n + m * n) * DTYPES[dtype].itemsize, bench.device)
    operands = [
        (
            operand(m, k, layout[0] == "T", like),
            operand(k, n, layout[1] == "T", like),
            torch.randn(n, **like),
            *([torch.randn(m, n, **like)] if more.get("backward") else []),
        )
        for _ in range(sets)
    ]
    calls = calls or {OURS: ours, "torch": matmul}
    times = bench.device_milliseconds(calls, operands)
    found: dict[str, Any] = {"part": part, "dtype": dtype, "layout": layout, "m": m, "k": k, "n": n, **more}
    activation, precision = more.get("activation"), more.get("precision", "ieee")
    a, b, bias = operands[0][:3]
    found["kernel"] = kernel_of(a, b, bias if activation else None, activation, precision)
    products = 6 if more.get("backward") else 2
    for name, milliseconds in times.items():
        found |= {f"{name} ms": milliseconds, f"{name} TFLOP/s": products * m * k * n / milliseconds / 1e9}
    # If torch has two ways, relative to the faster one.
    torchs = max(found[f"{name} TFLOP/s"] for name in times if name != OURS)
    return found | {"ours / torch": found[f"{OURS} TFLOP/s"] / torchs}


def main() -> None:
    args = parse(__doc__)
    bench = Bench(args.device, args.seconds)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    if bench.cuda and torch.cuda.get_device_capability(bench.device) >= (8, 0):
        from ceiling import ceiling  # needs Triton: fails before the long part if that is missing

        rows += [{"part": CEILING, **ceiling(bench, dtype)} for dtype in (*DTYPES, "tf32")]
    sizes = (256,) if args.quick else (256, 512) if args.small else (512, 1024, 2048, 4096, 8192)
    for dtype in DTYPES:
        for n in sizes:
            if (dtype, n) == ("float64", 8192):
                continue  # takes seconds per call
            rows += [measure(bench, SQUARE, dtype, layout, (n, n, n)) for layout in LAYOUTS]
    for dtype in HALF:
        for k, n in ((256, 256),) if args.small else ((4096, 4096), (4096, 11_008)):
            for m in (1, 8) if args.small else (1, 2, 4, 8, 16, 32, 64):
                rows.append(measure(bench, FEW_ROWS, dtype, "NT", (m, k, n)))
        for name, shape in ({"primes": (251, 257, 263)} if args.small else ODD_SHAPES).items():
            rows.append(measure(bench, ODD, dtype, "NN", shape, shape=name))
    for dtype in BATCH_DTYPES:
        for name, (batch, *matrices, layout) in BATCH_SHAPES.items():
            few = min(batch, 4) if args.small else batch
            rows.append(measure_batch(bench, dtype, name, (few, *matrices), layout))
    for activation in ("relu", "gelu"):
        for backward in (False, True):
            for k in (64,) if args.small else (512, 1024, 4096):
                m = 256 if args.small else 4096
                more = {"activation": activation, "backward": backward}
                calls = fused(activation, backward, bench.cuda)
                rows.append(measure(bench, FUSED, "bfloat16", "NT", (m, k, m), calls, **more))
    for precision in ("bf16x6", "tf32"):
        calls = with_precision(precision)
        more = {"precision": precision, **errors(bench.device, calls, 256 if args.small else 2048)}
        for n in sizes if args.small else sizes[1:]:
            rows += [
                measure(bench, PRECISION, "float32", layout, (n, n, n), calls, **more) for layout in LAYOUTS
            ]
    found = ["m", "k", "n", "kernel", f"{OURS} ms", "torch ms", f"{OURS} TFLOP/s", "torch TFLOP/s"]
    found.append("ours / torch")
    columns = {
        SQUARE: ["dtype", "layout", *found],
        FEW_ROWS: ["dtype", *found],
        ODD: ["dtype", "shape", *found],
        BATCHES: ["dtype", "shape", "layout", "batch", *found],
        FUSED: ["activation", "backward", *found, f"{COMPILED} ms"],
        PRECISION: ["precision", "layout", *found, f"{OURS} error", "torch error"],
        CEILING: ["dtype", "TFLOP/s"],
    }
    finish("gemm", args, rows, columns, claims(rows))


def claims(rows: list[dict[str, Any]]) -> list[str]:
    """The geometric mean and the minimum of each part, and in how many of its rows the library ran."""
    groups = {f"{SQUARE}, {dtype}": (SQUARE, (dtype,)) for dtype in DTYPES}
    groups |= {f"{part}, half types": (part, HALF) for part in (FEW_ROWS, ODD, FUSED)}
    groups |= {f"{BATCHES}, {dtype}": (BATCHES, (dtype,)) for dtype in BATCH_DTYPES}
    rows_of = {
        name: [row for row in rows if row["part"] == part and row["dtype"] in dtypes]
        for name, (part, dtypes) in groups.items()
    }
    for precision in ("bf16x6", "tf32"):
        rows_of[precision] = [row for row in rows if row.get("precision") == precision]
    found = []
    for name, here in rows_of.items():
        ratios = [row["ours / torch"] for row in here]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        by_library = sum(row["kernel"] == "library" for row in here)
        found.append(
            f"{name}: {mean:.3f} x torch's rate (geometric mean), {min(ratios):.3f} at the worst; "
            f"cuBLAS ran in {by_library} of {len(here)}"
        )
    return found + [
        f"{CEILING}, {row['dtype']}: {row['TFLOP/s']:.1f} TFLOP/s" for row in rows if row["part"] == CEILING
    ]


def draw(record: dict[str, Any]) -> Any:
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    names = ["torch", OURS]
    square = [row for row in record["rows"] if row["part"] == SQUARE]
    dtypes = list(dict.fromkeys(row["dtype"] for row in square))
    styles = {"NN": "-", "NT": ":", "TN": "-.", "TT": "--"}
    ceilings = {row["dtype"]: row["TFLOP/s"] for row in record["rows"] if row["part"] == CEILING}
    roof = {"color": INK, "linewidth": 0.8, "label": CEILING}
    figure, grid = plt.subplots(2, 5, figsize=(17, 6.6), layout="constrained")
    for axes in grid[0][len(dtypes) :]:
        axes.set_axis_off()
    for axes, dtype in zip(grid[0], dtypes, strict=False):
        for name in names:
            for layout, style in styles.items():
                here = [row for row in square if (row["dtype"], row["layout"]) == (dtype, layout)]
                points = series(here, "n", f"{name} TFLOP/s")
                axes.plot(*points, style, color=color(name, names), marker=".", linewidth=1.3)
        if dtype in ceilings:
            axes.axhline(ceilings[dtype], **roof)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(dtype, loc="left")
        axes.set_xlabel("M = N = K")
    grid[0][0].set_ylabel("TFLOP/s")
    for axes, part in zip(grid[1], (FEW_ROWS, ODD, FUSED, BATCHES), strict=False):
        ratios(axes, part, [row for row in record["rows"] if row["part"] == part])
    precisions(grid[1][4], [row for row in record["rows"] if row["part"] == PRECISION])
    handles = [Line2D([], [], color=color(name, names), linewidth=3, label=name) for name in names]
    handles += [Line2D([], [], color=INK, linestyle=style, label=layout) for layout, style in styles.items()]
    handles += [Line2D([], [], **roof)] if ceilings else []
    grid[0][4].legend(handles=handles, loc="upper left")
    return figure


def precisions(axes: Any, rows: list[dict[str, Any]]) -> None:
    """TFLOP/s of each precision, and of torch's IEEE and TF32 products, in layout NN."""
    names = ["torch", OURS]
    for precision, style in (("bf16x6", "-"), ("tf32", ":")):
        here = [row for row in rows if row["precision"] == precision and row["layout"] == "NN"]
        for name in names:
            label = (
                f"{OURS} {precision}" if name == OURS else "torch" + (" tf32" if precision == "tf32" else "")
            )
            points = series(here, "n", f"{name} TFLOP/s")
            axes.plot(*points, style, color=color(name, names), marker=".", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set_title(f"{PRECISION}: TFLOP/s", loc="left")
    axes.set_xlabel("M = N = K")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.25), ncols=2, handlelength=3.5)


def ratios(axes: Any, part: str, rows: list[dict[str, Any]]) -> None:
    """Our rate relative to torch's: above the line is faster."""

    def label(row: dict[str, Any]) -> str:
        if part != FUSED:
            return f"{row['m']} x {row['n']}" if part == FEW_ROWS else row["shape"]
        return f"{row['activation']}{', training' if row['backward'] else ''}, K {row['k']}"

    labels = list(dict.fromkeys(map(label, rows)))
    for dtype, marker in zip(dict.fromkeys(row["dtype"] for row in rows), ("o", "x"), strict=False):
        here = [row for row in rows if row["dtype"] == dtype]
        points = [labels.index(label(row)) for row in here], [row["ours / torch"] for row in here]
        axes.plot(*points, marker, color=color(OURS, ["torch", OURS]), markersize=4, label=dtype)
    axes.axhline(1, color=color("torch", ["torch", OURS]), linewidth=1)
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    if part == BATCHES:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.1 * max(row["ours / torch"] for row in rows))
    axes.set_title(f"{part}: x torch's rate", loc="left")
    axes.legend(fontsize=7)


if __name__ == "__main__":
    main()
