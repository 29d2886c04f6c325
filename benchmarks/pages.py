"""Tables of pages, computed from the results: `python benchmarks/harness.py plot` writes them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
BEGIN, END = "<!-- by benchmarks/harness.py plot -->\n", "<!-- end -->\n"
MODES = ("forward", "training")
HALVES, HALF = ("bfloat16", "float16"), "half types"
SETTINGS = {"float32": "float32", "ieee": "IEEE float32", HALF: HALF}
PEER = "nn.LSTM"
PEER_OF = {"LSTM": PEER, "LLTM": PEER, "GRU": "nn.GRU", "RNN": "nn.RNN"}  # on the map of sizes
FASTER_HALF = "in half types the faster of its two"
COMPILED_LOOP = "torch.compile'd loop"
TORCHRLS = ("pad", "scan", "triton")  # backends of torchrl's modules
SIMPLE = ("sigmoid", "relu", "round", "floor", "ceil", "trunc")  # elementwise ops
LEAST_LOSS = 1.005  # of a table of losses; below are ties


def load(op: str) -> list[Row]:
    return json.loads((RESULTS / f"{op}.json").read_text())["rows"]


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


# ---- which rows of results are published -----------------------------------------------------------


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


def lstm_time(row: Row, rows: Iterable[Row], mode: str) -> float:
    """nn.LSTM's at the row's shape, in half types the faster of its two: they took turns."""
    types = HALVES if row["precision"] in HALVES else (row["precision"],)
    same = (other for other in rows if shape_of(other) == shape_of(row) and other["precision"] in types)
    return min(float(other[f"{PEER} {mode} ms"]) for other in same)


def of_map(layer: str, precision: str) -> list[Row]:
    """A layer at all sizes of the map."""
    rows = load("sizes_gru_rnn" if layer in ("GRU", "RNN") else "sizes")
    return where(beside_faster_half(rows), layer=f"lltm_ext.{layer}", precision=precision)


def beside_libraries() -> list[Row]:
    """Cells and modules beside the kernels of other libraries."""
    return [row | {"ours": cell_of(row)} for row in published(load("cells"))] + of_torchrl()


def of_torchrl() -> list[Row]:
    """torchrl's modules, converted, beside its fastest backend: one row for both modes, as cells have it."""
    found: dict[tuple[str, str], Row] = {}
    for row in load("rl"):
        model, sizes = row["model"], row["sizes"]
        pair = {"ours": f"{model}, converted", "peer": "torchrl's fastest backend", "precision": "float32"}
        fastest = min(row[f"{name} ms"] for name in TORCHRLS if f"{name} ms" in row)
        found.setdefault((model, sizes), pair | {"sizes": sizes})
        found[model, sizes][f"{row['mode']} ratio"] = row["converted ms"] / fastest
    return list(found.values())


def pairs(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows with a peer, by both and the setting."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if "peer" in row:
            setting = SETTINGS.get(row["precision"], row["precision"])
            found.setdefault(f"{row['ours']} / {row['peer']}, {setting}", []).append(row)
    return found


def peers_of_scans(rows: Iterable[Row]) -> list[str]:
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("/ "))
    return [key.removeprefix("/ ") for key in keys if key not in ("/ copy", "/ lltm_ext, compiled")]


# ---- text ------------------------------------------------------------------------------------------


def header(*cells: str) -> str:
    return line(*cells) + f"|{'---|' * len(cells)}\n"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n".replace("  ", " ")


def number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


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


def ratios(rows: Iterable[Row], *kinds: str) -> list[float]:
    return [row[key] for row in rows for key in (f"{kind} ratio" for kind in kinds) if row[key] is not None]


def shape_of(row: Row) -> str:
    return row["sizes"] if "sizes" in row else f"B {row['B']}, T {row['T']}, H {row['H']}"


# ---- the README's claims ---------------------------------------------------------------------------


class Claim(NamedTuple):
    """A line of the README, and where its figure comes from."""

    title: str
    figure: str
    result: str
    rows: str


def claims() -> list[Claim]:
    def times_of(layer: str, *precisions: str) -> str:
        return "; ".join(summary(ratios(of_map(layer, precision), *MODES)) for precision in precisions)

    derived = where(load("recurrence"), part="derived")
    of_scan = [row[key] for row in where(load("scan"), part="scan") if (key := "/ associative_scan") in row]
    fused = [1 / row["ours / torch"] for row in where(load("gemm"), part="fused")]
    peak = summary(ratios(of_map("LSTM", "float32"), "peak"))
    sizes = "186 sizes, B 1 to 200,000, T 4 to 1000, H 32 to 2048"
    types, of_types = "half types; float32; IEEE", (HALF, "float32", "ieee")
    return [
        Claim(f"`LSTM` / `nn.LSTM`, float32, {sizes}", times_of("LSTM", "float32"), "sizes", "`float32`"),
        Claim("… IEEE float32", times_of("LSTM", "ieee"), "sizes", "`ieee`"),
        Claim("… half types", times_of("LSTM", HALF), "sizes", "`bfloat16`, `float16`"),
        Claim("… peak memory in training, float32", peak, "sizes", "`peak ratio`"),
        Claim(f"`GRU` / `nn.GRU`: {types}", times_of("GRU", *of_types), "sizes_gru_rnn", "`GRU`"),
        Claim("`RNN` / `nn.RNN`, likewise", times_of("RNN", *of_types), "sizes_gru_rnn", "`RNN`"),
        Claim(
            "LSTM and LLTM written in Python / `LSTM`, `LLTM`",
            summary(ratios(derived, *MODES)),
            *("recurrence", "`derived`"),
        ),
        Claim(
            "models of eight libraries, converted / with torch's layers: a training step",
            summary([row["ratio"] for row in load("libraries")]),
            *("libraries", "all"),
        ),
        Claim("`scan` / `associative_scan`, float32", summary(of_scan), "scan", "`scan`"),
        Claim(
            "`gemm` with relu or gelu / the faster of eager and compiled, bfloat16",
            summary(fused),
            *("gemm", "`fused`"),
        ),
    ]


def short() -> str:
    text = header("", "claim: ours / peer", "")
    return text + "".join(line(str(n), claim.title, claim.figure) for n, claim in enumerate(claims(), 1))


def proofs() -> str:
    """Where the README's claims come from."""
    of_results: dict[str, list[tuple[str, str]]] = {}
    for n, claim in enumerate(claims(), 1):
        of_results.setdefault(claim.result, []).append((str(n), claim.rows))
    text = header("claims", "results", "rows")
    for result, of_result in of_results.items():
        numbers, rows = zip(*of_result, strict=True)
        file = f"[`{result}.json`](../benchmarks/results/nvidia-h200/{result}.json)"
        text += line(", ".join(numbers), file, "; ".join(rows))
    return text


# ---- layers and cells ------------------------------------------------------------------------------


def sizes() -> str:
    """The map of sizes: times and peak memory in parts of those of torch's layers."""
    text = header("", *MODES, "peak memory", "slower")
    for layer in PEER_OF:
        for precision, setting in SETTINGS.items():
            rows = of_map(layer, precision)
            of_times = ratios(rows, *MODES)
            slower = f"{sum(ratio > 1 for ratio in of_times)} of {len(of_times)}"
            of_kinds = (summary(ratios(rows, kind)) for kind in (*MODES, "peak"))
            text += line(f"{layer} / {PEER_OF[layer]}, {setting}", *of_kinds, slower)
    return text


def layers() -> str:
    """LLTM and LSTM in both directions, beside a loop, and of one step."""
    rows = load("lltm")
    both = where(rows, part="bidirectional")
    of_both = [
        row[f"lltm_ext.{ours} {mode} ms"] / lstm_time(row, both, mode)
        for row in both
        for ours in ("LLTM", "LSTM")
        for mode in MODES
    ]
    title = "LLTM and LSTM in both directions, 4 shapes, four precisions"
    text = header("", "lltm_ext", "peer", "")
    text += line(title, "", f"`{PEER}`, {FASTER_HALF}", summary(of_both))
    (loop,) = where(rows, part="sequence")
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
        (row,) = where(rows, part="step", what=what, waits=False)
        ours, ops, extension = (
            row[f"{name} us"] for name in ("lltm_ext.lltm_cell", "PyTorch's ops", "tutorial-style extension")
        )
        peers = f"PyTorch's ops: {ops:.0f} us; tutorial-style extension: {extension:.0f} us"
        ratios = "; ".join(summary([ours / theirs]) for theirs in (ops, extension))
        text += line(title, f"{ours:.0f} us", peers, ratios)
    return text


def cells() -> str:
    """Cells derived from Python: times in parts of the peer's."""
    rows = published(load("recurrence"))
    resets = where(rows, part="reset")
    of_resets = (summary([row[f"{mode} / without"] for row in resets]) for mode in MODES)
    return header("", *MODES) + of_pairs(rows) + line("LSTM with resets / without, bfloat16", *of_resets)


def of_pairs(rows: Iterable[Row]) -> str:
    return "".join(
        line(title, *(summary(ratios(of_pair, mode)) for mode in MODES))
        for title, of_pair in pairs(rows).items()
    )


# ---- other libraries -------------------------------------------------------------------------------


def peers() -> str:
    """Cells, modules and scans beside the kernels of other libraries: times in parts of the peer's."""
    text = header("", *MODES) + of_pairs(beside_libraries())
    for part, title in (("scan", "scan"), ("constant a", "scan, a number as a")):
        rows = where(load("scan"), part=part)
        for peer in peers_of_scans(rows):
            of_modes = (
                [row[key] for row in where(rows, mode=mode) if (key := f"/ {peer}") in row] for mode in MODES
            )
            text += line(
                f"{title} / {peer}, float32", *(summary(found) if found else "" for found in of_modes)
            )
    return text


def libraries() -> str:
    """Training steps of other libraries' models."""
    text = header("library", "model", "sizes", "torch's layers", "converted", "ratio")
    for row in load("libraries"):
        name = f"{row['library']} {row['version']}"
        times = [f"{number(row[key])} ms" for key in ("peer ms", "ours ms")]
        text += line(name, row["model"], row["sizes"], *times, summary([row["ratio"]]))
    return text


def resets_of_torchrl() -> str:
    """Milliseconds of torchrl's modules, converted and with its backends: forward / training."""
    backends = (f"`{name}`" for name in TORCHRLS)
    text = header("module", "hidden", "converted", "layer only", *backends)
    rows = load("rl")
    for model, sizes in dict.fromkeys((row["model"], row["sizes"]) for row in rows):
        of_modes = where(rows, model=model, sizes=sizes)
        keys = (f"{name} ms" for name in ("converted", "layer", *TORCHRLS))
        times = (" / ".join(number(row[key]) for row in of_modes if key in row) for key in keys)
        text += line(model, sizes.rpartition(" ")[2], *times)
    return text


# ---- scans -----------------------------------------------------------------------------------------


def scans() -> str:
    """scan and cells without a product beside a copy; GAE."""
    rows = load("scan")
    parts = {
        "scan": where(rows, part="scan"),
        "scan, a number as a": where(rows, part="constant a"),
    }
    of_cells = where(rows, part="cells")
    for name in dict.fromkeys(row["cell"] for row in of_cells):
        parts[f"`cells.{name}`"] = where(of_cells, cell=name)
    return beside_copy(parts) + "\n" + of_gae(where(rows, part="GAE"))


def beside_copy(parts: Mapping[str, Sequence[Row]]) -> str:
    """Times in parts of a copy's, by size."""
    kinds = [(mode, least, most) for mode in MODES for least, most in ((400, math.inf), (100, 400))]
    titles = [
        f"{mode}, {f'from {least} MB on' if most == math.inf else f'{least} to {most} MB'}"
        for mode, least, most in kinds
    ]
    text = header("ours / copy", *titles)
    for part, rows in parts.items():
        of_kinds = (
            [row["/ copy"] for row in where(rows, mode=mode) if "/ copy" in row and least <= row["MB"] < most]
            for mode, least, most in kinds
        )
        text += line(part, *(summary(found) if found else "" for found in of_kinds))
    return text


def of_gae(rows: Sequence[Row]) -> str:
    """Microseconds."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key.endswith(" ms")))
    text = header("GAE, B 64, T 16,384: microseconds", *(key.removesuffix(" ms") for key in keys))
    for row in rows:
        text += line(row["mode"], *(f"{1e3 * row[key]:.1f}" if key in row else "" for key in keys))
    return text


# ---- gemm and the elementwise ops ------------------------------------------------------------------


def ops() -> str:
    """gemm and the elementwise ops: rates in parts of the peer's."""
    return header("", "lltm_ext", "peer", "") + of_gemm(load("gemm")) + of_elementwise(load("elementwise"))


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

    ratios = f"{from_size(2**24, *SIMPLE)}; {from_size(2**24, *SIMPLE, ratio='ours / copy')}"
    text = line(f"{', '.join(SIMPLE)}, 2^24 elements and more", "", "torch; a copy", ratios)
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
    percentiles = ("5th percentile", "median", "95th percentile")
    text = header("type", "geometric mean", *percentiles, "faster", "cuBLAS ran")
    for name in dict.fromkeys(row["type"] for row in rows):
        here = where(rows, type=name)
        ratios = sorted(row["ours / torch"] for row in here)
        by_library = len(where(here, kernel="library"))
        faster = sum(row["ours / torch"] > 1 and row.get("kernel") != "library" for row in here)
        mean = statistics.geometric_mean(ratios)
        at = [f"{ratios[len(ratios) * percent // 100]:.2f} x" for percent in (5, 50, 95)]
        text += line(name, f"{mean:.2f} x", *at, f"{faster} of {len(ratios)}", str(by_library))
    return text


# ---- losses ----------------------------------------------------------------------------------------


def losses() -> str:
    """Everything in the results that takes longer than a peer, or a layer more memory."""
    text = header("ours / peer", "at most", "at", "slower")
    groups = {
        f"`{layer}` / `{peer}`, {setting}": of_map(layer, precision)
        for layer, peer in PEER_OF.items()
        for precision, setting in SETTINGS.items()
    }
    of_memory = {
        title: [(row["peak ratio"], shape_of(row)) for row in rows] for title, rows in groups.items()
    }
    groups |= pairs([*published(load("recurrence")), *beside_libraries()])
    for title, rows in groups.items():
        found = [(row[f"{mode} ratio"], f"{mode}, {shape_of(row)}") for row in rows for mode in MODES]
        text += loss(title, found) + loss(f"{title}, peak memory", of_memory.get(title, []))
    of_models = [(row["ratio"], f"training, {row['model']}") for row in load("libraries")]
    text += loss("models of other libraries, converted / with torch's layers", of_models)
    return text + losses_of_scans() + losses_of_ops()


def loss(title: str, ratios: Sequence[tuple[float, str]]) -> str:
    """A line, if there is a loss. The ratios are times in parts of the peer's."""
    slower = [ratio for ratio, _ in ratios if ratio > LEAST_LOSS]
    if not slower:
        return ""
    worst, size = max(ratios)
    return line(title, f"{worst:.2f} x", size, f"{len(slower)} of {len(ratios)}")


def losses_of_scans() -> str:
    text = ""
    for part in ("scan", "GAE"):
        rows = where(load("scan"), part=part)
        for peer in peers_of_scans(rows):
            found = [
                (row[f"/ {peer}"], f"{row['mode']}, {shape_of_scan(row)}")
                for row in rows
                if f"/ {peer}" in row
            ]
            text += loss(f"{part} / {peer}", found)
    return text


def shape_of_scan(row: Row) -> str:
    """'B 8, T 65,536, H 1,536' of '(8, 65,536, 1,536)'."""
    sizes = row["(B, T, H)"].strip("()").split(", ")
    return ", ".join(f"{name} {size}" for name, size in zip("BTH", sizes, strict=True))


def losses_of_ops() -> str:
    text = ""
    for part in ("square", "few rows", "odd shapes", "batches", "fused"):
        rows = where(load("gemm"), part=part)
        text += loss(f"`gemm` / cuBLAS, {part}", of_products(rows))
    text += loss("`gemm` / cuBLAS, random sizes, all types", of_products(load("gemm_sizes")))
    rows = where(load("elementwise"), part="device time")
    for mode in ("", "backward"):
        names = {f"{name} {mode}".strip() for name in SIMPLE}
        found = of_elements(r for r in rows if r["op"] in names)
        text += loss(f"{', '.join(SIMPLE)} / torch{mode and f', {mode}'}", found)
    for op in dict.fromkeys(row["op"] for row in rows):
        if op.split()[0] not in SIMPLE:
            peer = "`x.to(dtype)`" if op == "stochastic_round" else "torch"
            text += loss(f"{op} / {peer}", of_elements(where(rows, op=op)))
    return text


def of_elements(rows: Iterable[Row]) -> list[tuple[float, str]]:
    return [(1 / r["torch / ours"], f"{r['n']:,} {r['dtype']}") for r in rows]


def of_products(rows: Iterable[Row]) -> list[tuple[float, str]]:
    found = []
    for r in rows:
        batch = f"{r['batch']} of " if r.get("batch") else ""
        ran = ", by cuBLAS" if r.get("kernel") == "library" else ""
        dtype = r.get("type", r["dtype"])
        size = f"{batch}{r['m']:,} x {r['k']:,} x {r['n']:,} {r['layout']} {dtype}{ran}"
        found.append((1 / r["ours / torch"], size))
    return found


# ---- pages -----------------------------------------------------------------------------------------


# The tables of each page, in the order of their marks.
PAGES = {
    "README.md": [short],
    "docs/benchmarks.md": [proofs, sizes, layers, cells, scans, ops, gemm_sizes],
    "docs/libraries.md": [libraries, resets_of_torchrl],
    "docs/limits.md": [losses],
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
