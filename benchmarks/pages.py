"""Tables of pages, computed from the results: `python benchmarks/harness.py plot` writes them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
BEGIN, END = "<!-- by benchmarks/harness.py plot -->\n", "<!-- end -->\n"
MODES = ("forward", "training")
HALVES = ("bfloat16", "float16")
PEER = "nn.LSTM"


def load(op: str) -> list[Row]:
    return json.loads((RESULTS / f"{op}.json").read_text())["rows"]


def summary(ratios: Sequence[float]) -> str:
    """The geometric mean of times in parts of the peer's, and their range; bold with a loss in it."""
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    text = f"{mean:.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"**{text}**" if max(ratios) > 1 else text


def number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def against_lstm(rows: Iterable[Row], ours: str, precision: str) -> list[float]:
    return [r[f"{m} {ours} / {PEER}"] for r in rows if r["precision"] == precision for m in MODES]


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


def at_shape(rows: Sequence[Row], layer: str, mode: str, precision: str, *shape: int) -> tuple[str, str, str]:
    """(ours, the peer's, the ratio); the peer of a half type is the faster of nn.LSTM's two."""
    here = {r["precision"]: r for r in rows if (r["B"], r["T"], r["H"]) == shape}
    key = f"{PEER} {mode} ms"
    best = min(HALVES, key=lambda p: here[p][key]) if precision in HALVES else precision
    ours, theirs = here[precision][f"lltm_ext.{layer} {mode} ms"], here[best][key]
    of_type = best if best in HALVES else "likewise"
    return f"{number(ours)} ms", f"`{PEER}` {of_type}: {number(theirs)} ms", f"{ours / theirs:.2f} x"


def layers() -> str:
    """The table."""
    rows, cells = load("lltm"), load("recurrence")
    layer = [r for r in rows if r["part"] == "layer"]
    both = [r for r in rows if r["part"] == "bidirectional"]
    likewise, faster = f"`{PEER}` likewise", f"the faster of `{PEER}` bfloat16 and float16"
    text = line("", "lltm_ext", "peer", "") + "|---|---|---|---|\n"
    for ours, title in (
        ("LSTM", "LSTM layer in float32, 8 shapes, forward and training"),
        ("LLTM", "LLTM layer in float32"),
    ):
        name = f"lltm_ext.{ours}"
        text += line(title, "", likewise, summary(against_lstm(layer, name, "float32")))
        text += line("… in bfloat16", "", likewise, summary(against_lstm(layer, name, "bfloat16")))
        text += line("… in half types", "", faster, summary(against_faster_half(layer, name)))
        text += line("… in IEEE float32", "", likewise, summary(against_lstm(layer, name, "ieee")))
    for ours, title in (("GRU", "GRU in half types; float32; IEEE"), ("RNN", "RNN likewise")):
        of_types = [of_recurrence(cells, ours, p) for p in (HALVES, ("float32",), ("ieee",))]
        text += line(title, "", f"`nn.{ours}` likewise", "; ".join(of_types))
    for title, *what in (
        ("LLTM forward, bfloat16 (B 16, T 1000, H 256)", "LLTM", "forward", "bfloat16", 16, 1000, 256),
        ("… training", "LLTM", "training", "bfloat16", 16, 1000, 256),
        ("… (B 32, T 512, H 1024)", "LLTM", "training", "bfloat16", 32, 512, 1024),
        ("… (B 256, T 256, H 1024)", "LLTM", "training", "bfloat16", 256, 256, 1024),
        ("… (B 128, T 256, H 2048)", "LLTM", "training", "bfloat16", 128, 256, 2048),
        ("LSTM training, float32 (B 64, T 512, H 512)", "LSTM", "training", "float32", 64, 512, 512),
    ):
        text += line(title, *at_shape(layer, *what))
    names = {
        name for row in both for name in ("lltm_ext.LLTM", "lltm_ext.LSTM") if f"{name} forward ms" in row
    }
    ratios = [r[f"{m} {n} / {PEER}"] for r in both for m in MODES for n in names if f"{n} {m} ms" in r]
    text += line("LLTM and LSTM in both directions, 4 shapes, four precisions", "", likewise, summary(ratios))
    memory = next(r for r in layer if (r["precision"], r["H"]) == ("bfloat16", 1024) and r["B"] == 32)
    ours, theirs = memory["lltm_ext.LLTM peak MiB"], memory[f"{PEER} peak MiB"]
    title = "peak memory of LLTM training, bfloat16 (B 32, T 512, H 1024)"
    text += line(title, f"{ours:.0f} MiB", f"`{PEER}` bfloat16: {theirs:.0f} MiB", f"{ours / theirs:.2f} x")
    loop = next(r for r in rows if r["part"] == "sequence")
    ours, theirs = loop["lltm_ext training ms"], loop["loop over PyTorch's ops training ms"]
    title = "training step of LLTM (B 64, T 512, H 512, IEEE float32)"
    peer = f"a Python loop over PyTorch's ops: {number(theirs)} ms"
    text += line(title, f"{number(ours)} ms", peer, f"{ours / theirs:.2f} x")
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
        text += line(title, f"{ours:.0f} us", peers, f"{ours / ops:.2f} x; {ours / extension:.2f} x")
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


def short() -> str:
    """The README's table: the map of sizes, and a few rows of the others."""
    rows = layers().splitlines(keepends=True)
    wanted = ("GRU in", "RNN likewise", "peak memory", "training step of LLTM")
    chosen = [row for row in rows if row.startswith(tuple(f"| {start}" for start in wanted))]
    title = "LSTM in float32, 176 sizes (B 1 to 1024, T 20 to 1000, H 32 to 2048)"
    of_sizes = []
    for precision, setting in SETTINGS.items():
        name = title if precision == "float32" else f"… in {setting}"
        of_sizes.append(line(name, "", f"`{PEER}` likewise", summary(of_map("LSTM", precision, *MODES))))
    return "".join([*rows[:2], *of_sizes, *chosen])


def gemm_sizes() -> str:
    """gemm at random sizes: the rate in parts of cuBLAS's."""
    rows = load("gemm_sizes")
    text = line("type", "geometric mean", "5th percentile", "median", "95th percentile", "slower")
    text += "|---|---|---|---|---|---|\n"
    for name in dict.fromkeys(row["type"] for row in rows):
        ratios = sorted(row["ours / torch"] for row in rows if row["type"] == name)
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        at = [f"{ratios[len(ratios) * percent // 100]:.2f} x" for percent in (5, 50, 95)]
        slower = sum(ratio < 1 for ratio in ratios)
        text += line(name, f"{mean:.2f} x", *at, f"{slower} of {len(ratios)}")
    return text


def cells() -> str:
    """Cells derived from Python, GRU and RNN: times divided by the peer's."""
    rows = load("recurrence")
    text = line("", *MODES) + "|---|---|---|\n"
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if "peer" in row:
            is_half = row["part"] == "torch" and row["precision"] in HALVES
            setting = "half types" if is_half else SETTINGS[row["precision"]]
            groups.setdefault(f"{row['ours']} / {row['peer']}, {setting}", []).append(row)
    for title, here in groups.items():
        text += line(title, *(summary([row[f"{mode} ratio"] for row in here]) for mode in MODES))
    resets = [row for row in rows if row["part"] == "reset"]
    for title, peer in (
        ("LSTM with resets / without, bfloat16", "without"),
        ("… / nn.LSTM on parts of the sequence", "split nn.LSTM"),
    ):
        text += line(title, *(summary([row[f"{mode} / {peer}"] for row in resets]) for mode in MODES))
    return text


# The tables of each page, in the order of their marks.
PAGES = {
    "README.md": [short],
    "docs/benchmarks.md": [sizes, layers, gemm_sizes],
    "docs/design/recurrence.md": [cells],
}


def updated(page: str) -> str:
    """The text of a page, with today's tables between their marks."""
    before, *parts = (ROOT / page).read_text().split(BEGIN)
    tables = zip(PAGES[page], parts, strict=True)
    return before + "".join(BEGIN + table() + END + part.split(END)[1] for table, part in tables)


def write() -> None:
    for page in PAGES:
        (ROOT / page).write_text(updated(page))
