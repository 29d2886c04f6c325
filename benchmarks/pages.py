"""Tables of pages, computed from the results: `python benchmarks/harness.py plot` writes them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
BEGIN, END = "<!-- by benchmarks/harness.py plot -->\n", "<!-- end -->\n"
MODES = ("forward", "training")
HALVES = ("bfloat16", "float16")
PEER = "nn.LSTM"


def load(op: str) -> list[Row]:
    return json.loads((RESULTS / f"{op}.json").read_text())["rows"]


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


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


def against_faster_half(rows: Sequence[Row], ours: str) -> list[float]:
    """In a half type, beside the faster of nn.LSTM's two."""
    found, shapes = [], {}
    for row in rows:
        shapes.setdefault((row["B"], row["T"], row["H"]), {})[row["precision"]] = row
    for of_shape in shapes.values():
        for mode in MODES:
            halves = [of_shape[p] for p in HALVES if p in of_shape]
            peer = min(row[f"{PEER} {mode} ms"] for row in halves)
            found += [row[f"{ours} {mode} ms"] / peer for row in halves if f"{ours} {mode} ms" in row]
    return found


def of_recurrence(rows: Iterable[Row], ours: str, precisions: Sequence[str]) -> str:
    chosen = [r for r in rows if r.get("ours") == ours and r["precision"] in precisions]
    return summary([r[f"{mode} ratio"] for r in chosen for mode in MODES])


def layers() -> str:
    """The table."""
    rows = load("lltm")
    layer = [r for r in rows if r["part"] == "layer"]
    both = [r for r in rows if r["part"] == "bidirectional"]
    likewise, faster = f"`{PEER}` likewise", f"the faster of `{PEER}` bfloat16 and float16"
    text = line("", "lltm_ext", "peer", "") + "|---|---|---|---|\n"
    for ours in ("LSTM", "LLTM"):
        title = f"{ours} layer in half types, 8 shapes, forward and training"
        text += line(title, "", faster, summary(against_faster_half(layer, f"lltm_ext.{ours}")))
    names = {
        name for row in both for name in ("lltm_ext.LLTM", "lltm_ext.LSTM") if f"{name} forward ms" in row
    }
    ratios = [r[f"{m} {n} / {PEER}"] for r in both for m in MODES for n in names if f"{n} {m} ms" in r]
    text += line("LLTM and LSTM in both directions, 4 shapes, four precisions", "", likewise, summary(ratios))
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


SETTINGS = {"float32": "float32", "ieee": "IEEE float32", "bfloat16": "bfloat16", "float16": "float16"}


def of_map(layer: str, precision: str, *kinds: str) -> list[float]:
    """Times in parts of nn.LSTM's at all sizes of the map."""
    rows = [r for r in load("sizes") if (r["layer"], r["precision"]) == (f"lltm_ext.{layer}", precision)]
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


class Claim(NamedTuple):
    """A line of the README, and where its figure comes from."""

    title: str
    figure: Callable[[], str]
    result: str
    rows: str


def of_recurrent(ours: str) -> Callable[[], str]:
    def figure() -> str:
        rows = load("recurrence")
        return "; ".join(of_recurrence(rows, ours, p) for p in (HALVES, ("float32",), ("ieee",)))

    return figure


def of_halves() -> str:
    return "; ".join(summary(of_map("LSTM", precision, *MODES)) for precision in HALVES)


def of_python_cells() -> str:
    rows = where(load("recurrence"), part="derived")
    return summary([row[f"{mode} ratio"] for row in rows for mode in MODES])


def of_models() -> str:
    return summary([row["ratio"] for row in load("libraries")])


def of_loop() -> str:
    (row,) = where(load("lltm"), part="sequence")
    return summary([row["lltm_ext training ms"] / row["loop over PyTorch's ops training ms"]])


def of_scans() -> str:
    rows = where(load("scan"), part="scan")
    return summary([row[key] for row in rows if (key := "/ associative_scan") in row])


def of_epilogues() -> str:
    rows = where(load("gemm"), part="fused")
    return summary([1 / row["ours / torch"] for row in rows])


CLAIMS = (
    Claim(
        "`LSTM` / `nn.LSTM`, float32, 176 sizes, B 1 to 1024, T 20 to 1000, H 32 to 2048",
        lambda: summary(of_map("LSTM", "float32", *MODES)),
        *("sizes", "`float32`"),
    ),
    Claim("… IEEE float32", lambda: summary(of_map("LSTM", "ieee", *MODES)), "sizes", "`ieee`"),
    Claim("… bfloat16; float16", of_halves, "sizes", "`bfloat16`, `float16`"),
    Claim(
        "… peak memory in training, float32",
        lambda: summary(of_map("LSTM", "float32", "peak")),
        *("sizes", "`peak ratio`"),
    ),
    Claim(
        "`GRU` / `nn.GRU`, 8 shapes: half types; float32; IEEE", of_recurrent("GRU"), "recurrence", "`GRU`"
    ),
    Claim("`RNN` / `nn.RNN`, likewise", of_recurrent("RNN"), "recurrence", "`RNN`"),
    Claim("LSTM and LLTM written in Python / `LSTM`, `LLTM`", of_python_cells, "recurrence", "`derived`"),
    Claim(
        "models of eight libraries, converted / with torch's layers: a training step",
        of_models,
        *("libraries", "all"),
    ),
    Claim("`scan` / `associative_scan`, float32", of_scans, "scan", "`scan`"),
    Claim(
        "`gemm` with relu or gelu / the faster of eager and compiled, bfloat16",
        of_epilogues,
        *("gemm", "`fused`"),
    ),
)


def short() -> str:
    """The README's claims."""
    text = line("", "claim: ours / peer", "") + "|---|---|---|\n"
    return text + "".join(
        line(str(n), claim.title, claim.figure()) for n, claim in enumerate(CLAIMS, start=1)
    )


def proofs() -> str:
    """Where each of the README's claims comes from."""
    text = line("", "claim", "results: rows") + "|---|---|---|\n"
    for n, claim in enumerate(CLAIMS, start=1):
        file = f"[`{claim.result}.json`](../benchmarks/results/nvidia-h200/{claim.result}.json)"
        text += line(str(n), claim.title, f"{file}: {claim.rows}")
    return text


SIMPLE = ("sigmoid", "relu", "round", "floor", "ceil", "trunc")  # elementwise ops
LEAST_LOSS = 1.005  # of a table of losses; below are ties


def loss(title: str, mode: str, ratios: Sequence[tuple[float, str]]) -> str:
    """A line of the table of losses, if there is one. The ratios are times in parts of the peer's."""
    slower = [ratio for ratio, _ in ratios if ratio > LEAST_LOSS]
    if not slower:
        return ""
    worst, size = max(ratios)
    return line(title, mode, f"{worst:.2f} x", size, f"{len(slower)} of {len(ratios)}")


def shape_of(row: Row) -> str:
    return f"B {row['B']}, T {row['T']}, H {row['H']}"


def losses() -> str:
    """Everything in the results that takes longer than a peer."""
    text = line("ours / peer", "", "at most", "at", "slower") + "|---|---|---|---|---|\n"
    for layer in ("LSTM", "LLTM"):
        for precision, title in SETTINGS.items():
            rows = [
                r for r in load("sizes") if (r["layer"], r["precision"]) == (f"lltm_ext.{layer}", precision)
            ]
            for mode in MODES:
                found = [(row[f"{mode} ratio"], shape_of(row)) for row in rows]
                text += loss(f"`{layer}` / `{PEER}`, {title}", mode, found)
    for title, rows in groups_of_cells().items():
        for mode in MODES:
            text += loss(title, mode, [(row[f"{mode} ratio"], shape_of(row)) for row in rows])
    return text + losses_of_scans() + losses_of_ops()


def sizes_of(shape: str) -> str:
    """The shape of a scan, as `shape_of` writes that of a layer."""
    sizes = shape.strip("()").split(", ")
    return ", ".join(f"{name} {size}" for name, size in zip("BTH", sizes, strict=True))


def losses_of_scans() -> str:
    rows, text = load("scan"), ""
    for part in ("scan", "GAE"):
        here = where(rows, part=part)
        for mode in dict.fromkeys(row["mode"] for row in here):
            of_mode = where(here, mode=mode)
            for key in dict.fromkeys(key for row in of_mode for key in row if key.startswith("/ ")):
                if key not in ("/ copy", "/ lltm_ext, compiled"):
                    found = [(row[key], sizes_of(row["(B, T, H)"])) for row in of_mode if key in row]
                    text += loss(f"{part} {key}", mode, found)
    return text


def losses_of_ops() -> str:
    text = ""
    for part in ("square", "few rows", "odd shapes", "batches", "fused"):
        rows = where(load("gemm"), part=part)
        text += loss(f"`gemm` / cuBLAS, {part}", "", of_products(rows))
    text += loss("`gemm` / cuBLAS, random sizes, all types", "", of_products(load("gemm_sizes")))
    rows = where(load("elementwise"), part="device time")
    for mode in ("", "backward"):
        names = {f"{name} {mode}".strip() for name in SIMPLE}
        text += loss(f"{', '.join(SIMPLE)} / torch", mode, of_elements(r for r in rows if r["op"] in names))
    for op in dict.fromkeys(row["op"] for row in rows):
        if op.split()[0] not in SIMPLE:
            peer = "`x.to(dtype)`" if op == "stochastic_round" else "torch"
            text += loss(f"{op} / {peer}", "", of_elements(where(rows, op=op)))
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


def groups_of_cells() -> dict[str, list[Row]]:
    """The rows of cells with a peer, by both and the setting."""
    groups: dict[str, list[Row]] = {}
    for row in (*load("recurrence"), *load("cells")):
        if "peer" in row:
            is_half = row["part"] == "torch" and row["precision"] in HALVES
            setting = "half types" if is_half else SETTINGS[row["precision"]]
            groups.setdefault(f"{row['ours']} / {row['peer']}, {setting}", []).append(row)
    return groups


def cells() -> str:
    """Cells derived from Python, GRU and RNN: times divided by the peer's."""
    text = line("", *MODES) + "|---|---|---|\n"
    for title, here in groups_of_cells().items():
        text += line(title, *(summary([row[f"{mode} ratio"] for row in here]) for mode in MODES))
    resets = where(load("recurrence"), part="reset")
    for title, peer in (
        ("LSTM with resets / without, bfloat16", "without"),
        ("… / nn.LSTM on parts of the sequence", "split nn.LSTM"),
    ):
        text += line(title, *(summary([row[f"{mode} / {peer}"] for row in resets]) for mode in MODES))
    return text


def scans() -> str:
    """scan, GAE and cells without a product: times divided by a copy's and by the peers'."""
    if not (RESULTS / "scan.json").is_file():
        return ""
    rows = [row for row in load("scan") if "/ copy" in row]
    text = line("", *MODES) + "|---|---|---|\n"

    def lines(part: str, title: str, here: Sequence[Row], peers: Iterable[str]) -> str:
        found = ""
        for key, peer in ((f"/ {peer}", peer) for peer in peers):
            of_modes = [[row[key] for row in where(here, mode=mode) if key in row] for mode in MODES]
            if any(of_modes):
                found += line(f"{part} / {peer}{title}", *(summary(x) if x else "" for x in of_modes))
        return found

    of_scan, constant = where(rows, part="scan"), where(rows, part="constant a")
    peers = [key[2:] for row in rows for key in row if key.startswith("/ ")]
    others = [peer for peer in dict.fromkeys(peers) if peer != "copy"]
    text += lines("scan", ", all sizes", of_scan, others) + lines("scan, a number as a", "", constant, others)
    of_parts = {"scan": of_scan, "scan, a number as a": constant}
    for name in dict.fromkeys(row["cell"] for row in where(rows, part="cells")):
        of_parts[f"`cells.{name}`"] = where(rows, part="cells", cell=name)
    return text + beside_copy(of_parts) + of_gae(where(rows, part="GAE"))


def beside_copy(parts: Mapping[str, Sequence[Row]]) -> str:
    """A table of its own: times in parts of a copy's, by size."""
    kinds = [(mode, least, most) for mode in MODES for least, most in ((400, math.inf), (100, 400))]
    titles = [
        f"{mode}, {f'from {least} MB on' if most == math.inf else f'{least} to {most} MB'}"
        for mode, least, most in kinds
    ]
    text = "\n" + line("ours / copy", *titles) + line(*["---"] * (1 + len(kinds)))
    for part, rows in parts.items():
        cells = []
        for mode, least, most in kinds:
            found = [r["/ copy"] for r in where(rows, mode=mode) if least <= r["MB"] < most]
            cells.append(summary(found) if found else "")
        text += line(part, *cells)
    return text


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
    text = line("module", "mode", "converted", "the layer alone", "`pad`", "`scan`")
    text += line(*["---"] * 6)
    for row in load("rl"):
        times = (f"{number(row[f'{name} ms'])} ms" for name in ("converted", "layer", "pad", "scan"))
        text += line(row["model"], row["mode"], *times)
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
    "docs/benchmarks.md": [proofs, sizes, layers, cells, scans, ops, gemm_sizes],
    "docs/limits.md": [losses],
    "docs/libraries.md": [libraries, resets_of_torchrl],
}


def updated(page: str) -> str:
    """The text of a page, with today's tables between their marks."""
    before, *parts = (ROOT / page).read_text().split(BEGIN)
    tables = zip(PAGES[page], parts, strict=True)
    return before + "".join(BEGIN + table() + END + part.split(END)[1] for table, part in tables)


def write() -> None:
    for page in PAGES:
        (ROOT / page).write_text(updated(page))
