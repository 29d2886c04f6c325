"""Tables of pages, computed from the results: `python benchmarks/harness.py plot` writes them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
BEGIN, END = "<!-- by benchmarks/harness.py plot -->\n", "<!-- end -->\n"
MODES = ("forward", "training")
HALVES, HALF = ("bfloat16", "float16"), "half types"
PEER = "nn.LSTM"
COMPILED_LOOP = "torch.compile'd loop"
FASTER_HALF = "in half types the faster of its two"
TORCHRLS = ("pad", "scan", "triton")  # backends of torchrl's modules
# Scans of other libraries, as scan.py names them.
OF_LIBRARIES = (
    "associative_scan",
    "accelerated-scan Triton",
    "accelerated-scan warp",
    "HGRN recurrent",
    "HGRN chunk",
)


def load(op: str) -> list[Row]:
    return json.loads((RESULTS / f"{op}.json").read_text())["rows"]


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def published(rows: Iterable[Row]) -> list[Row]:
    """What tables and pictures show: no compiled loop for a cell of which another library has a kernel."""
    rows = beside_faster_half(rows)
    known = {cell_of(row) for row in rows if row.get("peer", COMPILED_LOOP) != COMPILED_LOOP}
    return [row for row in rows if row.get("peer") != COMPILED_LOOP or cell_of(row) not in known]


def cell_of(row: Row) -> str:
    """'slstm' of 'Recurrent(slstm, heads=4)'."""
    return str(row.get("ours", "")).removeprefix("Recurrent(").rstrip(")").split(",")[0]


def beside_faster_half(rows: Iterable[Row]) -> list[Row]:
    """Rows of layers, with one for both half types where the peer is torch's layer.

    The algorithm that torch chooses for one half type is often several times slower than for the other. So in
    each mode the row has the times, ours and torch's, of the type in which torch's layer is faster. A
    comparison in one half type only is left out.
    """
    found, of_halves = [], dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        is_of_torch = row.get("peer", PEER).startswith("nn.") and f"peer {MODES[0]} ms" in row
        if row.get("precision") in HALVES and is_of_torch:
            key = tuple(row.get(name) for name in ("part", "layer", "ours", "peer", "B", "T", "H"))
            of_halves.setdefault(key, []).append(row)
            if len(of_halves[key]) == len(HALVES):
                found.append(faster_half(of_halves[key]))
        else:
            found.append(row)
    return found


def faster_half(halves: Sequence[Row]) -> Row:
    """Memory is that of training."""
    row = halves[0] | {"precision": HALF}
    for mode in MODES:
        faster = min(halves, key=lambda half: half[f"peer {mode} ms"])
        kinds = (mode, "peak") if mode == "training" else (mode,)
        row |= {key: value for key, value in faster.items() if any(f"{kind} " in key for kind in kinds)}
    return row


def spread(ratios: Sequence[float], unit: str, has_loss: bool) -> str:
    """The geometric mean, and the range of several; bold with a loss in it."""
    text = f"{statistics.geometric_mean(ratios):.2f} {unit}"
    if len(ratios) > 1:
        text += f" ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"**{text}**" if has_loss else text


def summary(ratios: Sequence[float]) -> str:
    """Of times in parts of the peer's."""
    return spread(ratios, "x", max(ratios) > 1)


def rate(ratios: Sequence[float]) -> str:
    """Of rates in parts of the peer's."""
    return spread(ratios, "x the rate", min(ratios) < 1)


def number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n".replace("  ", " ")


def against_lstm(rows: Iterable[Row], ours: str, precision: str) -> list[float]:
    return [r[f"{m} {ours} / {PEER}"] for r in rows if r["precision"] == precision for m in MODES]


def against_faster_half(rows: Sequence[Row], ours: str) -> list[float]:
    """In both half types, beside the faster of nn.LSTM's two. All took turns in one run."""
    found, shapes = [], {}
    for row in rows:
        shapes.setdefault((row["B"], row["T"], row["H"]), {})[row["precision"]] = row
    for of_shape in shapes.values():
        for mode in MODES:
            halves = [of_shape[p] for p in HALVES if p in of_shape]
            peer = min(row[f"{PEER} {mode} ms"] for row in halves)
            found += [row[f"{ours} {mode} ms"] / peer for row in halves if f"{ours} {mode} ms" in row]
    return found


def of_recurrence(rows: Iterable[Row], ours: str, precision: str) -> str:
    chosen = where(rows, ours=ours, precision=precision)
    return summary([r[f"{mode} ratio"] for r in chosen for mode in MODES])


def at_shape(rows: Sequence[Row], layer: str, mode: str, precision: str, *shape: int) -> tuple[str, str, str]:
    """(ours, the peer's, the ratio); the peer of a half type is the faster of nn.LSTM's two."""
    here = {r["precision"]: r for r in rows if (r["B"], r["T"], r["H"]) == shape}
    key = f"{PEER} {mode} ms"
    best = min(HALVES, key=lambda p: here[p][key]) if precision in HALVES else precision
    ours, theirs = here[precision][f"lltm_ext.{layer} {mode} ms"], here[best][key]
    of_type = best if best in HALVES else "likewise"
    return f"{number(ours)} ms", f"`{PEER}` {of_type}: {number(theirs)} ms", summary([ours / theirs])


def layers() -> str:
    """The table."""
    rows, cells = load("lltm"), load("recurrence")
    layer = [r for r in rows if r["part"] == "layer"]
    both = [r for r in rows if r["part"] == "bidirectional"]
    likewise, faster = f"`{PEER}` likewise", f"the faster of `{PEER}` bfloat16 and float16"
    cells = beside_faster_half(cells)
    text = line("", "lltm_ext", "peer", "") + "|---|---|---|---|\n"
    for ours, title in (
        ("LSTM", "LSTM layer in float32, 8 shapes, forward and training"),
        ("LLTM", "LLTM layer in float32"),
    ):
        name = f"lltm_ext.{ours}"
        text += line(title, "", likewise, summary(against_lstm(layer, name, "float32")))
        text += line("… in half types", "", faster, summary(against_faster_half(layer, name)))
        text += line("… in IEEE float32", "", likewise, summary(against_lstm(layer, name, "ieee")))
    for ours, title in (("GRU", "GRU in half types; float32; IEEE"), ("RNN", "RNN likewise")):
        of_types = [of_recurrence(cells, ours, p) for p in (HALF, "float32", "ieee")]
        text += line(title, "", f"`nn.{ours}`, {FASTER_HALF}", "; ".join(of_types))
    for title, *what in (
        ("LLTM forward, bfloat16 (B 16, T 1000, H 256)", "LLTM", "forward", "bfloat16", 16, 1000, 256),
        ("… training", "LLTM", "training", "bfloat16", 16, 1000, 256),
        ("… (B 32, T 512, H 1024)", "LLTM", "training", "bfloat16", 32, 512, 1024),
        ("… (B 256, T 256, H 1024)", "LLTM", "training", "bfloat16", 256, 256, 1024),
        ("… (B 128, T 256, H 2048)", "LLTM", "training", "bfloat16", 128, 256, 2048),
        ("LSTM training, float32 (B 64, T 512, H 512)", "LSTM", "training", "float32", 64, 512, 512),
    ):
        text += line(title, *at_shape(layer, *what))
    ratios = []
    for name in ("lltm_ext.LLTM", "lltm_ext.LSTM"):
        ratios += [x for p in ("float32", "ieee") for x in against_lstm(both, name, p)]
        ratios += against_faster_half(both, name)
    peer = f"`{PEER}`, {FASTER_HALF}"
    text += line("LLTM and LSTM in both directions, 4 shapes, four precisions", "", peer, summary(ratios))
    memory = next(r for r in layer if (r["precision"], r["H"]) == ("bfloat16", 1024) and r["B"] == 32)
    ours, theirs = memory["lltm_ext.LLTM peak MiB"], memory[f"{PEER} peak MiB"]
    title = "peak memory of LLTM training, bfloat16 (B 32, T 512, H 1024)"
    text += line(title, f"{ours:.0f} MiB", f"`{PEER}` bfloat16: {theirs:.0f} MiB", summary([ours / theirs]))
    loop = next(r for r in rows if r["part"] == "sequence")
    ours, theirs = loop["lltm_ext training ms"], loop["loop over PyTorch's ops training ms"]
    title = "training step of LLTM (B 64, T 512, H 512, IEEE float32)"
    peer = f"a Python loop over PyTorch's ops: {number(theirs)} ms"
    text += line(title, f"{number(ours)} ms", peer, summary([ours / theirs]))
    return text + of_one_step(rows)


def of_one_step(rows: Iterable[Row]) -> str:
    """Host times of lltm_cell."""
    text = ""
    for what, title in (
        ("forward", "one step of LLTM, host time forward (B 16, I 32, H 128, float32)"),
        ("backward", "… backward"),
        ("backward of sums", "… backward of `(new_h.sum() + new_cell.sum())`, as in the tutorial"),
    ):
        row = next(r for r in rows if r["part"] == "step" and r["what"] == what and not r["waits"])
        ours, ops, extension = (
            row[f"{name} us"] for name in ("lltm_ext.lltm_cell", "PyTorch's ops", "tutorial-style extension")
        )
        peers = f"PyTorch's ops: {ops:.0f} us; tutorial-style extension: {extension:.0f} us"
        ratios = "; ".join(summary([ours / theirs]) for theirs in (ops, extension))
        text += line(title, f"{ours:.0f} us", peers, ratios)
    return text


SETTINGS = {"float32": "float32", "ieee": "IEEE float32", HALF: HALF}


def of_map(layer: str, precision: str, *kinds: str) -> list[float]:
    """Times in parts of nn.LSTM's at all sizes of the map."""
    rows = where(beside_faster_half(load("sizes")), layer=f"lltm_ext.{layer}", precision=precision)
    return [row[key] for row in rows for key in (f"{kind} ratio" for kind in kinds) if row[key] is not None]


def sizes() -> str:
    """The map of sizes: times and peak memory in parts of nn.LSTM's."""
    text = line("", *MODES, "peak memory", "slower") + "|---|---|---|---|---|\n"
    for layer in ("LSTM", "LLTM"):
        for precision, title in SETTINGS.items():
            ratios = of_map(layer, precision, *MODES)
            slower = f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
            cells = [summary(of_map(layer, precision, kind)) for kind in (*MODES, "peak")]
            text += line(f"{layer}, {title}", *cells, slower)
    return text


def short() -> str:
    """The README's table: the map of sizes, and a few rows of the others."""
    rows = layers().splitlines(keepends=True)
    wanted = ("GRU in", "RNN likewise", "peak memory", "training step of LLTM")
    chosen = [row for row in rows if row.startswith(tuple(f"| {start}" for start in wanted))]
    title = "LSTM in float32, 176 sizes (B 1 to 1024, T 20 to 1000, H 32 to 2048)"
    of_sizes = []
    for precision, setting in SETTINGS.items():
        name = title if precision == "float32" else f"… in {setting}"
        peer = f"`{PEER}`, {FASTER_HALF}" if precision == HALF else f"`{PEER}` likewise"
        of_sizes.append(line(name, "", peer, summary(of_map("LSTM", precision, *MODES))))
    return "".join([*rows[:2], *of_sizes, *chosen])


def ops() -> str:
    """gemm and the elementwise ops: rates in parts of the peer's."""
    text = line("", "lltm_ext", "peer", "") + "|---|---|---|---|\n"
    return text + of_gemm(load("gemm")) + of_elementwise(load("elementwise"))


def against_torch(rows: Iterable[Row], ratio: str = "ours / torch") -> str:
    """The rate in parts of torch's, and in how many rows the library ran, which is no win."""
    here = list(rows)
    text, by_library = rate([row[ratio] for row in here]), len(where(here, kernel="library"))
    return f"{text}, cuBLAS itself in {by_library} of {len(here)}" if by_library else text


def speeds(row: Row, unit: str) -> list[str]:
    return [f"{number(row[f'{name} {unit}'])} {unit}" for name in ("lltm_ext", "torch")]


def of_gemm(rows: Sequence[Row]) -> str:
    squares = where(rows, part="square")
    half = [r for r in squares if r["dtype"] in HALVES]
    large = [r for r in half if r["n"] >= 2048]
    text = line("gemm in half types, 2048^3 to 8192^3, all layouts", "", "cuBLAS", against_torch(large))
    small = [against_torch(where(half, n=n)) for n in (1024, 512)]
    text += line("… 1024^3; 512^3", "", "cuBLAS", "; ".join(small))
    (peak,) = where(rows, part="measured peak", dtype="bfloat16")
    (row,) = where(squares, dtype="bfloat16", n=4096, layout="NN")
    ours, theirs = speeds(row, "TFLOP/s")
    title = f"… 4096^3 bfloat16, NN; the matrix units by themselves do {number(peak['TFLOP/s'])} TFLOP/s"
    text += line(title, ours, f"cuBLAS: {theirs}", against_torch([row]))
    for title, here in (
        ("… 1 to 64 rows, K 4096, N 4096", where(rows, part="few rows", n=4096)),
        ("… N 11008", where(rows, part="few rows", n=11_008)),
        ("… ten odd shapes", where(rows, part="odd shapes")),
    ):
        text += line(title, "", "cuBLAS", against_torch(here))
    text += of_fused(where(rows, part="fused"))
    float32, float64 = (against_torch(where(squares, dtype=dtype)) for dtype in ("float32", "float64"))
    text += line("gemm in float32, 512^3 to 8192^3, all layouts", "", "cuBLAS", float32)
    text += "".join(of_precision(name, where(rows, precision=name)) for name in ("bf16x6", "tf32"))
    text += line("gemm in float64, 512^3 to 4096^3, all layouts", "", "cuBLAS", float64)
    batches = [against_torch(where(rows, part="batches", dtype=dtype)) for dtype in ("bfloat16", "float32")]
    title = "batches: attention, experts, 6 x 6 and 32 x 32 matrices, in bfloat16; float32"
    return text + line(title, "", "`torch.bmm`", "; ".join(batches))


def of_fused(rows: Sequence[Row]) -> str:
    text = ""
    for backward, title in (
        (False, "gemm with bias and relu, 4096 x 512 x 4096 bfloat16"),
        (True, "… forward and backward"),
    ):
        (row,) = where(rows, activation="relu", k=512, backward=backward)
        ours, eager, compiled = (
            f"{1e3 * row[f'{name} ms']:.0f} us" for name in ("lltm_ext", "torch", "torch.compile")
        )
        peers = f"`relu(addmm(...))`: {eager}; compiled, max-autotune: {compiled}"
        text += line(title, ours, peers, against_torch([row]))
    title = "… relu and gelu, both ways, K 512, 1024 and 4096"
    return text + line(title, "", "the faster of eager and compiled", against_torch(rows))


def of_precision(name: str, rows: Sequence[Row]) -> str:
    """float32 by matrix units. The error is of 2048^3, in all rows."""
    (row,) = where(rows, n=4096, layout="NN")
    ours, theirs = speeds(row, "TFLOP/s")
    error = row["lltm_ext error"] / row["torch error"]
    title = f'… `precision="{name}"`, 1024^3 to 8192^3, {error:.2f} x cuBLAS\'s error (2048^3)'
    peer = "cuBLAS's TF32" if name == "tf32" else "cuBLAS"
    return line(title, f"{ours} at 4096^3, NN", f"{peer}: {theirs}", against_torch(rows))


def of_elementwise(rows: Sequence[Row]) -> str:
    measured = where(rows, part="device time")

    def from_size(least: int, *names: str, ratio: str = "torch / ours") -> str:
        return against_torch([r for r in measured if r["op"] in names and r["n"] >= least], ratio)

    def at_2_28(title: str, op: str, peer: str, dtype: str = "float32") -> str:
        (row,) = where(measured, op=op, dtype=dtype, n=2**28)
        ours, theirs = speeds(row, "GB/s")
        return line(title, ours, f"{peer}: {theirs}", against_torch([row], "torch / ours"))

    simple = ("sigmoid", "relu", "round", "floor", "ceil", "trunc")
    ratios = f"{from_size(2**24, *simple)}; {from_size(2**24, *simple, ratio='ours / copy')}"
    text = line(f"{', '.join(simple)}, 2^24 elements and more", "", "torch; a copy", ratios)
    title = "round straight through, forward and backward, 2^28 float32"
    text += at_2_28(title, "round, straight through", "`x + (torch.round(x) - x).detach()`")
    text += at_2_28("binarize, 2^28 float32", "binarize", "`(x > 0.5).to(x.dtype)`")
    title = "fake_quantize, forward and backward, 2^28 float32"
    text += at_2_28(title, "fake_quantize, training", "torch")
    text += at_2_28("… bfloat16", "fake_quantize, training", "torch", "bfloat16")
    ratios = f"{from_size(2**26, '… per row of 1,024')}; {from_size(2**26, '… learning the scale')}"
    text += line("… a scale for each row; learning the scale, from 2^26 on", "", "torch", ratios)
    title = "stochastic_round to bfloat16, 2^28"
    text += at_2_28(title, "stochastic_round", "`x.to(torch.bfloat16)`")
    text += line("… all sizes", "", "likewise", from_size(0, "stochastic_round"))
    return text + of_run_time(rows)


def of_run_time(rows: Sequence[Row]) -> str:
    (row,) = where(rows, part="made at run time", dtype="float32", n=2**28)
    ours, theirs = row["run time GB/s"], row["jiterator GB/s"]
    peer = f"torch's jiterator: {number(theirs)} GB/s"
    text = line("relu made at run time, 2^28 float32", f"{number(ours)} GB/s", peer, rate([ours / theirs]))
    (first,) = where(rows, part="first call")
    times = f"{number(first['compiled ms'])} ms; {number(first['from disk ms'])} ms"
    return text + line("… first call; with its binary on disk", times, "", "")


def gemm_sizes() -> str:
    """gemm at random sizes: the rate in parts of cuBLAS's. Products that cuBLAS computes are no wins."""
    rows = load("gemm_sizes")
    text = line(
        "type", "geometric mean", "5th percentile", "median", "95th percentile", "faster", "cuBLAS ran"
    )
    text += "|---|---|---|---|---|---|---|\n"
    for name in dict.fromkeys(row["type"] for row in rows):
        here = where(rows, type=name)
        ratios = sorted(row["ours / torch"] for row in here)
        by_library = len(where(here, kernel="library"))
        faster = sum(row["ours / torch"] > 1 and row.get("kernel") != "library" for row in here)
        mean = statistics.geometric_mean(ratios)
        at = [f"{ratios[len(ratios) * percent // 100]:.2f} x" for percent in (5, 50, 95)]
        text += line(name, f"{mean:.2f} x", *at, f"{faster} of {len(ratios)}", str(by_library))
    return text


def cells() -> str:
    """Cells derived from Python, GRU and RNN: times divided by the peer's."""
    rows = published([*load("recurrence"), *load("cells")])
    text = line("", *MODES) + "|---|---|---|\n" + of_pairs(rows)
    resets = where(rows, part="reset")
    ratios = ([row[f"{mode} / without"] for row in resets] for mode in MODES)
    text += line("LSTM with resets / without, bfloat16", *map(summary, ratios))
    return text + against_torchrl(row for row in load("rl") if "resets" in row["model"])


def of_pairs(rows: Iterable[Row]) -> str:
    """A line for each pair of ours and a peer in a setting."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if "peer" in row:
            setting = SETTINGS.get(row["precision"], row["precision"])
            groups.setdefault(f"{row['ours']} / {row['peer']}, {setting}", []).append(row)
    return "".join(
        line(title, *(summary([row[f"{mode} ratio"] for row in here]) for mode in MODES))
        for title, here in groups.items()
    )


def against_torchrl(rows: Iterable[Row]) -> str:
    """A line for each of torchrl's modules: converted by from_torch, beside its fastest backend."""
    groups: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        own = [row[f"{name} ms"] for name in TORCHRLS if f"{name} ms" in row]
        title = f"{row['model']}, converted / torchrl's fastest backend, float32"
        ratios = groups.setdefault(title, {mode: [] for mode in MODES})
        ratios[row["mode"]].append(row["converted ms"] / min(own))
    return "".join(
        line(title, *(summary(ratios[mode]) for mode in MODES)) for title, ratios in groups.items()
    )


def peers() -> str:
    """Cells, scans and modules beside the kernels of other libraries: times divided by the peer's."""
    text = line("", *MODES) + "|---|---|---|\n"
    rows = sorted(load("cells"), key=lambda row: row["peer"] == COMPILED_LOOP)
    names = ("cells" if row["peer"] == COMPILED_LOOP else cell_of(row) for row in rows)
    text += of_pairs(row | {"ours": name} for row, name in zip(rows, names, strict=True))
    text += of_scans("scan", ", float32", where(load("scan"), part="scan"), OF_LIBRARIES)
    return text + against_torchrl(load("rl"))


def of_scans(part: str, title: str, rows: Sequence[Row], peers: Iterable[str]) -> str:
    """A line for each peer that was measured."""
    text = ""
    for key, peer in ((f"/ {peer}", peer) for peer in peers):
        of_modes = [[row[key] for row in where(rows, mode=mode) if key in row] for mode in MODES]
        if any(of_modes):
            text += line(f"{part} / {peer}{title}", *(summary(x) if x else "" for x in of_modes))
    return text


def scans() -> str:
    """scan, GAE and cells without a product: times divided by a copy's and by the peers'."""
    if not (RESULTS / "scan.json").is_file():
        return ""
    rows = [row for row in load("scan") if "/ copy" in row]
    text = line("", *MODES) + "|---|---|---|\n"

    def beside_copy(part: str, here: Sequence[Row]) -> str:
        large = [row for row in here if row["MB"] >= 400]
        medium = [row for row in here if 100 <= row["MB"] < 400]
        found = of_scans(part, ", from 400 MB on", large, ["copy"])
        return found + of_scans(part, ", 100 to 400 MB", medium, ["copy"])

    of_scan, constant = where(rows, part="scan"), where(rows, part="constant a")
    peers = [key[2:] for row in rows for key in row if key.startswith("/ ")]
    others = [peer for peer in dict.fromkeys(peers) if peer != "copy"]
    text += beside_copy("scan", of_scan) + of_scans("scan", ", all sizes", of_scan, others)
    text += beside_copy("scan, a number as a", constant)
    text += of_scans("scan, a number as a", "", constant, others)
    for name in dict.fromkeys(row["cell"] for row in where(rows, part="cells")):
        text += beside_copy(f"`cells.{name}`", where(rows, part="cells", cell=name))
    return text + of_gae(where(rows, part="GAE"))


def of_gae(rows: Iterable[Row]) -> str:
    """A table of its own: microseconds."""
    rows = list(rows)
    names = list(dict.fromkeys(key[:-3] for row in rows for key in row if key.endswith(" ms")))
    text = "\n" + line("GAE, B 64, T 16,384: microseconds", *names) + line(*["---"] * (1 + len(names)))
    for row in rows:
        times = (f"{1e3 * row[key]:.1f}" if (key := f"{name} ms") in row else "" for name in names)
        text += line(row["mode"], *times)
    return text


def resets_of_torchrl() -> str:
    """Times of torchrl's modules, converted and with its backends."""
    text = line("module", "hidden", "mode", "converted", "the layer alone", *(f"`{x}`" for x in TORCHRLS))
    text += line(*["---"] * (5 + len(TORCHRLS)))
    for row in load("rl"):
        keys = [f"{name} ms" for name in ("converted", "layer", *TORCHRLS)]
        times = (f"{number(row[key])} ms" if key in row else "" for key in keys)
        text += line(row["model"], row["sizes"].rpartition(" ")[2], row["mode"], *times)
    return text


def libraries() -> str:
    """Training steps of other libraries' models."""
    text = line("library", "model", "sizes", "torch's layers", "converted", "ratio")
    text += "|---|---|---|---|---|---|\n"
    for row in load("libraries"):
        name = f"{row['library']} {row['version']}"
        times = [f"{number(row[key])} ms" for key in ("peer ms", "ours ms")]
        text += line(name, row["model"], row["sizes"], *times, summary([row["ratio"]]))
    return text


# The tables of each page, in the order of their marks.
PAGES = {
    "README.md": [short],
    "docs/benchmarks.md": [sizes, layers, scans, ops, gemm_sizes],
    "docs/design/recurrence.md": [cells],
    "docs/libraries.md": [libraries, resets_of_torchrl],
    "docs/peers.md": [peers],
}


def updated(page: str) -> str:
    """The text of a page, with today's tables between their marks."""
    before, *parts = (ROOT / page).read_text().split(BEGIN)
    tables = zip(PAGES[page], parts, strict=True)
    return before + "".join(BEGIN + table() + END + part.split(END)[1] for table, part in tables)


def write() -> None:
    for page in PAGES:
        (ROOT / page).write_text(updated(page))
