r"""Fit kTilings and the constants of gemm_hopper.cu to the times of tools/gemm_tilings.cu.

On a Hopper GPU, with CUDA's nvcc (where it does not find the headers of CCCL, add -I for them):

    nvcc -arch=sm_90a -O3 -std=c++17 --expt-relaxed-constexpr -DLLTM_EXT_SM90A -Isrc \
        tools/gemm_tilings.cu -o tilings
    ./tilings 1000 1 > times.txt
    pip install scipy
    python tools/gemm_tilings.py times.txt

It prints the table, and how much longer the tilings that it chooses take than the best ones. Files from
several GPUs give one table for all of them. Model.times is time_of in gemm_hopper.cu, for all products and
tilings at once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

GLOBALS = {
    "bytes per microsecond / 1e6": 20,
    "kAddSums": 3,
    "sectors": 0.7,
    "parts": 0.8,
    "narrow": 2.4,
    "kUnalignedEnds": 0.5,
    "kUnalignedStore": 0.3,
}
START = (0.3, 3, 1, 0.3)  # of a tiling: slice, launch, ends, store
ROW_BYTES, STREAM_K_MARGIN = 128, 1.04


@dataclass
class Measured:
    tilings: Any  # [tiling]: rows, columns, height, width, splits, stream_k, clusters at once
    products: Any  # [product]: batch, m, n, k, stride_a, stride_b, mn_major_a, mn_major_b
    times: Any  # [product, tiling], NaN where a tiling does not apply

    @classmethod
    def read(cls, path: Path) -> Measured:
        header, lines = path.read_text().split("\n\n")
        tilings = np.array([line.split() for line in header.splitlines()], int)
        table = np.array([line.split() for line in lines.splitlines()], float)
        times = np.where(table[:, 8:] < 0, np.nan, table[:, 8:])
        return cls(tilings, table[:, :8].astype(int), times)


class Model:
    def __init__(self, measured: Measured):
        rows, columns, height, width, splits, stream_k, clusters = measured.tilings.T
        batch, m, n, k, *self.strides, _, _ = (x[:, None] for x in measured.products.T)
        self.shape = measured.times.shape
        self.stream_k = stream_k == 1
        tiles = batch * -(-m // (rows * height)) * -(-n // (columns * width))
        self.slices = -(-k // (64 * splits))
        filled = k / (self.slices * 64 * splits)  # K's end leaves the last slice partly empty
        at_once = np.where(self.stream_k, clusters, np.minimum(tiles, clusters)) * splits * ROW_BYTES * filled
        self.bytes_a, self.bytes_b = at_once * height * rows, at_once * width * columns
        self.rounds = tiles / clusters
        self.columns, self.result, self.unaligned = n, 2e-6 * batch * m * n, n % 8 != 0
        # A slice takes as long in stream-K as in whole tiles of the same shape.
        shapes = measured.tilings[:, :5].tolist()
        self.same_slice = [shapes.index(shape) for shape in shapes]

    def start(self) -> Any:
        return np.log([*GLOBALS.values(), *START * self.shape[1]])

    def split(self, logarithms: Any) -> tuple[Any, Any]:
        """The constants, and [tiling, 4] of the table."""
        values = np.exp(logarithms)
        table = values[len(GLOBALS) :].reshape(-1, len(START)).copy()
        table[:, 0] = table[self.same_slice, 0]
        return values[: len(GLOBALS)], table

    def times(self, constants: Any, table: Any) -> Any:
        bandwidth, add_sums, sectors, parts, narrow, unaligned_ends, unaligned_store = constants
        traffic_a, traffic_b = (
            1 + sectors * (stride % 64 != 0) + parts * (stride % 16 != 0) for stride in self.strides
        )
        few_columns = (self.columns <= 64) & (self.strides[1] < 64)
        hot = np.where(few_columns, narrow * 64 / self.strides[1], 0)
        read = self.bytes_a * traffic_a + self.bytes_b * np.maximum(traffic_b, hot)
        slice_time, launch, ends, store = table.T
        tile = self.slices * np.hypot(slice_time, read / (bandwidth * 1e6))
        full = np.ceil(self.rounds)
        rounds = np.where(self.stream_k, self.rounds, full)
        sums = np.where(self.stream_k, add_sums * np.log2(1 + 1 / self.rounds), 0)
        unaligned = np.where(self.unaligned, unaligned_ends + unaligned_store * self.result, 0)
        return launch + full * ends + store * self.result + unaligned + rounds * tile + sums


def residuals(model: Model, measured: Measured, logarithms: Any) -> Any:
    applies, best = ~np.isnan(measured.times), np.nanmin(measured.times, 1, keepdims=True)
    weights = np.maximum(0.1, (best / measured.times) ** 2)  # which of the fast ones is chosen matters most
    return (weights * np.log(model.times(*model.split(logarithms)) / measured.times))[applies]


def fit(files: list[Measured]) -> tuple[Any, Any]:
    models = [Model(measured) for measured in files]

    def all_residuals(logarithms: Any) -> Any:
        return np.concatenate(
            [residuals(model, measured, logarithms) for model, measured in zip(models, files, strict=True)]
        )

    found = models[0].start()
    for _ in range(2):
        found = least_squares(all_residuals, found, loss="soft_l1", f_scale=0.07, max_nfev=200).x
    return models[0].split(found)


def chosen_over_best(measured: Measured, constants: Any, table: Any) -> Any:
    estimates = Model(measured).times(constants, table) * np.where(measured.tilings[:, 5], STREAM_K_MARGIN, 1)
    estimates[np.isnan(measured.times)] = np.inf
    chosen = np.take_along_axis(measured.times, estimates.argmin(1)[:, None], 1)
    return chosen[:, 0] / np.nanmin(measured.times, 1)


def main() -> None:
    files = [Measured.read(Path(path)) for path in sys.argv[1:]]
    constants, table = fit(files)
    for name, value in zip(GLOBALS, constants, strict=True):
        print(f"{name}: {value:.3g}")
    for tiling, values in zip(files[0].tilings, table, strict=True):
        numbers = ", ".join(f"{value:.3g}" if value > 1e-3 else "0" for value in values)
        print(
            "    {{{}, {}, {}, {}, {}, {}, {}}},".format(*tiling[:5], ("false", "true")[tiling[5]], numbers)
        )
    for path, measured in zip(sys.argv[1:], files, strict=True):
        loss = chosen_over_best(measured, constants, table)
        mean = np.exp(np.log(loss).mean())
        print(f"{path}: chosen / best {mean:.4f} (geometric mean), {loss.max():.2f} at most")


if __name__ == "__main__":
    main()
