"""The README's picture, of several results: `python benchmarks/harness.py plot` draws it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import INK, OUR_COLOR, pyplot, save
from pages import MODES, PEER_OF, RESULTS, SETTINGS, beside_libraries, of_map, pairs, ratios

PICTURE = RESULTS.parents[1] / "plots" / RESULTS.name / "overview.png"


def comparisons() -> dict[str, Sequence[float]]:
    """Our times in parts of the peer's, forward and training, by both names."""
    found = {
        f"{layer} / {PEER_OF[layer]}, {setting}": ratios(of_map(layer, precision), *MODES)
        for layer in ("LSTM", "GRU", "RNN")
        for precision, setting in SETTINGS.items()
    }
    return found | {title: ratios(rows, *MODES) for title, rows in pairs(beside_libraries()).items()}


def draw() -> Any:
    """A line for each comparison: the geometric mean and the range."""
    lines = comparisons()
    figure, axes = pyplot().subplots(figsize=(9, 0.25 * len(lines) + 1), layout="constrained")
    for y, of_line in enumerate(lines.values()):
        mean = statistics.geometric_mean(of_line)
        axes.barh(y, max(of_line) - min(of_line), 0.5, min(of_line), color=OUR_COLOR, alpha=0.3)
        axes.plot(mean, y, "o", color=OUR_COLOR, markersize=6)
        beside = axes.get_yaxis_transform()
        axes.text(1.02, y, f"{mean:.2f} x", va="center", color=INK, transform=beside)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(lines)), lines)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.01, 0.03, 0.1, 0.3, 1], [f"{tick:g}" for tick in ticks])
    axes.set_xlim(0.003, 2)
    axes.set_xlabel("our time / the peer's, forward and training: geometric mean and range")
    return figure


def write() -> Path:
    environment = json.loads((RESULTS / "sizes.json").read_text())["environment"]
    save(draw(), PICTURE, environment)
    return PICTURE
