"""LLTM: a step as the tutorials run it, the layer against nn.LSTM and against a Python loop over cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from harness import DTYPES, INK, OURS, Bench, Row, color, finish, parse
from torch import Tensor, nn
from torch.nn import functional as F

import lltm_ext
from lltm_ext._C import lltm as _C

COMPOSED, TUTORIAL, CELLS, LSTM = "PyTorch's ops", "tutorial's extension", "loop over LLTMCell", "nn.LSTM"
LOOP = "loop over PyTorch's ops"
FUNCTION, CELL = f"{OURS}.LLTMFunction", f"{OURS}.lltm_cell"
STEP = {"batch": 16, "features": 32, "state": 128}
SEQUENCE = (64, 512, 512)
# B, T, H (= I)
GRID = (
    (16, 512, 128),
    (16, 1000, 256),
    (64, 512, 512),
    (32, 512, 1024),
    (256, 256, 1024),
    (128, 256, 2048),
    (1, 1000, 256),
    (1, 512, 1024),
)
SMALL_GRID = ((1, 32, 64), (16, 32, 64))
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


# ---- the peers -----------------------------------------------------------------------------------


def composed_cell(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """The cell as one writes it in Python."""
    i, o, z = F.linear(torch.cat([old_h, input], dim=1), weights, bias).chunk(3, dim=1)
    new_cell = old_cell + F.elu(z) * torch.sigmoid(i)
    return torch.tanh(new_cell) * torch.sigmoid(o), new_cell


class TutorialFunction(torch.autograd.Function):
    """The way of the tutorials: raw bindings in a Function of one's own."""

    @staticmethod
    def forward(ctx, input, weights, bias, old_h, old_cell):
        outputs = _C.forward(input, weights, bias, old_h, old_cell)
        ctx.save_for_backward(*outputs[1:], weights)
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx, grad_h, grad_cell):
        gradients = _C.backward(grad_h.contiguous(), grad_cell.contiguous(), *ctx.saved_tensors)
        d_old_h, d_input, d_weights, d_bias, d_old_cell = gradients[:5]
        return d_input, d_weights, d_bias, d_old_h, d_old_cell


class ComposedCell(nn.Module):
    def __init__(self, like: lltm_ext.LLTMCell):
        super().__init__()
        self.weights, self.bias = like.weights, like.bias

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return composed_cell(input, self.weights, self.bias, *hx)


class Loop(nn.Module):
    """A cell called once a step, from Python."""

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


# ---- (a) the tutorial's step ---------------------------------------------------------------------


def measure_step(bench: Bench, rounds: int) -> list[Row]:
    """Host time of one training step, as the tutorials measure it, without and with waiting for the GPU."""
    cells: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        COMPOSED: composed_cell,
        TUTORIAL: TutorialFunction.apply,
        FUNCTION: lltm_ext.LLTMFunction.apply,
        CELL: lltm_ext.lltm_cell,
    }
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
            rows.append(
                {"part": "step", "what": what, "waits": wait} | {f"{name} us": t for name, t in times.items()}
            )
    return rows


# ---- (b) and (c): sequences ----------------------------------------------------------------------


def forward_call(module: nn.Module, input: Tensor) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return module(input)

    return call


def training_call(module: nn.Module, input: Tensor, grad_output: Tensor) -> Callable[[], None]:
    def call() -> None:
        input.grad = None
        module.zero_grad()
        module(input)[0].backward(grad_output)

    return call


def measure_sequences(
    bench: Bench, modules: dict[str, nn.Module], shape: tuple[int, int, int], dtype: torch.dtype
) -> Row:
    batch, length, hidden = shape
    like = {"device": bench.device, "dtype": dtype}
    input = torch.randn(length, batch, hidden, **like).requires_grad_()
    grad_output = torch.randn(length, batch, hidden, **like)
    training = {name: training_call(module, input, grad_output) for name, module in modules.items()}
    row: Row = {"B": batch, "T": length, "H": hidden}
    for name, time in bench.milliseconds({n: forward_call(m, input) for n, m in modules.items()}).items():
        row[f"{name} forward ms"] = time
    for name, time in bench.milliseconds(training).items():
        row[f"{name} training ms"] = time

    def clear() -> None:
        input.grad = None
        for module in modules.values():
            module.zero_grad()

    for name, call in training.items():
        row[f"{name} peak MiB"] = bench.peak_mib(call, clear)
        clear()
    return row


@contextmanager
def matmul_precision(precision: str) -> Iterator[torch.dtype]:
    """tf32 is a mode of float32's products; cuDNN has a switch of its own, which is on by default."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield DTYPES["float32" if precision == "tf32" else precision]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = True


def measure_layer(bench: Bench, precision: str, shape: tuple[int, int, int]) -> Row:
    """Against nn.LSTM of the same size, which has four gates to our three."""
    hidden = shape[2]
    with matmul_precision(precision) as dtype:
        like = {"device": bench.device, "dtype": dtype}
        modules = {OURS: lltm_ext.LLTM(hidden, hidden, **like), LSTM: nn.LSTM(hidden, hidden, **like)}
        row = measure_sequences(bench, modules, shape, dtype)
    for what in ("forward", "training"):
        row[f"{what} ours / {LSTM}"] = row[f"{OURS} {what} ms"] / row[f"{LSTM} {what} ms"]
    return {"part": "layer", "precision": precision} | row


def measure_loop(bench: Bench, shape: tuple[int, int, int]) -> Row:
    hidden = shape[2]
    with matmul_precision("float32") as dtype:
        cell = lltm_ext.LLTMCell(hidden, hidden, device=bench.device)
        modules = {
            OURS: lltm_ext.LLTM(hidden, hidden, device=bench.device),
            LOOP: Loop(ComposedCell(cell), hidden),
            CELLS: Loop(cell, hidden),
        }
        return {"part": "sequence", "precision": "float32"} | measure_sequences(bench, modules, shape, dtype)


# ---- what is claimed -----------------------------------------------------------------------------


def claims(rows: list[Row]) -> list[str]:
    said = []
    for row in rows:
        if row["part"] == "step" and not row["waits"]:
            theirs = row[f"{COMPOSED} us"]
            for name in (FUNCTION, CELL):
                ratio = f"{row[f'{name} us'] / theirs:.2f} x PyTorch's {theirs:.0f}"
                said.append(
                    f"step, {row['what']}: {name} takes {row[f'{name} us']:.0f} us of host time, {ratio}"
                )
        if row["part"] == "sequence":
            ours, theirs = row[f"{OURS} training ms"], row[f"{LOOP} training ms"]
            said.append(
                f"sequence, training: {ours:.2f} ms, {theirs / ours:.1f} x faster than a loop's {theirs:.2f}"
            )
            ours, theirs = row[f"{OURS} peak MiB"], row[f"{LOOP} peak MiB"]
            if ours is not None:
                said.append(f"sequence, peak memory: {ours:.0f} MiB, a loop's {theirs:.0f}")
    return said


def main() -> None:
    args = parse(__doc__)
    bench = Bench(args.device, args.seconds)
    rows = measure_step(bench, 50 if args.quick else 300)
    rows.append(measure_loop(bench, (4, 16, 32) if args.quick else (16, 64, 128) if args.small else SEQUENCE))
    for precision in PRECISIONS:
        if precision == "float32" or args.device.type == "cuda":
            rows += [measure_layer(bench, precision, shape) for shape in (SMALL_GRID if args.small else GRID)]
    head = ["part", "what", "waits", "precision", "B", "T", "H"]
    parts = {
        "step": head[1:3] + [f"{name} us" for name in (COMPOSED, TUTORIAL, FUNCTION, CELL)],
        "sequence": head[4:]
        + [f"{name} {what}" for what in ("training ms", "peak MiB") for name in (OURS, CELLS, LOOP)],
        "layer": head[3:]
        + [f"{name} {what}" for what in ("forward ms", "training ms", "peak MiB") for name in (OURS, LSTM)]
        + [f"training ours / {LSTM}"],
    }
    finish("lltm", args, rows, parts, claims(rows))


# ---- the picture ---------------------------------------------------------------------------------


def draw(record: dict[str, Any]) -> Any:
    from matplotlib import pyplot as plt

    rows = record["rows"]
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(13, 3.8), layout="constrained", width_ratios=(1, 1, 1.25)
    )
    draw_step(left, [row for row in rows if row["part"] == "step"])
    draw_sequence(middle, next(row for row in rows if row["part"] == "sequence"))
    draw_layer(right, [row for row in rows if row["part"] == "layer"])
    return figure


def bars(axes: Any, names: list[str], values: list[float], labels: list[str]) -> None:
    drawn = axes.barh(names, values, color=[color(name, names) for name in names], height=0.7)
    axes.bar_label(drawn, labels, padding=3, fontsize=8, color=INK)
    axes.margins(x=0.25)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def draw_step(axes: Any, rows: list[Row]) -> None:
    times = {row["what"]: row for row in rows if not row["waits"]}
    names = [CELL, FUNCTION, TUTORIAL, COMPOSED]
    for offset, what in ((0.19, "forward"), (-0.19, "backward")):
        values = [times[what][f"{name} us"] for name in names]
        places = [i + offset for i in range(len(names))]
        drawn = axes.barh(
            places, values, 0.36, color=[color(n, names) for n in names], alpha=1 if offset > 0 else 0.6
        )
        axes.bar_label(drawn, [f"{what} {value:.0f}" for value in values], padding=3, fontsize=8, color=INK)
    axes.set_yticks(range(len(names)), names)
    axes.margins(x=0.4)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
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
    bars(axes, names, values, labels)
    axes.margins(x=0.5)
    axes.set_xlabel("forward + backward, ms")
    axes.set_title(f"{row['T']} steps: batch {row['B']}, {row['H']} hidden, float32", loc="left")


def draw_layer(axes: Any, rows: list[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    shapes = list(dict.fromkeys((row["B"], row["T"], row["H"]) for row in rows))
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    marks = dict(zip(PRECISIONS, ("o", "s", "^", "D"), strict=True))
    shades = dict(zip(PRECISIONS, ("#1f5fa8", "#7fb2e0", "#2a8a5f", "#9a5fb5"), strict=True))
    for precision in precisions:
        here = [row for row in rows if row["precision"] == precision]
        places = [shapes.index((row["B"], row["T"], row["H"])) for row in here]
        ratios = [row[f"training ours / {LSTM}"] for row in here]
        axes.plot(
            ratios,
            places,
            marks[precision],
            color=shades[precision],
            label=precision,
            markersize=6,
            alpha=0.9,
        )
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(min(0.45, *axes.get_xlim()), max(2.2, *axes.get_xlim()))
    axes.set_yticks(range(len(shapes)), [f"{b} x {t} x {h}" for b, t, h in shapes])
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_xlabel("times nn.LSTM's time, forward + backward")
    axes.set_title("Layer beside nn.LSTM: batch x steps x hidden", loc="left")


if __name__ == "__main__":
    main()
