r"""Fit the constants of gemm_kernel.cu's kernels to the times of tools/gemm_schedule.cu.

On a GPU, with CUDA's nvcc (where it does not find the headers of CCCL, add -I for them), and a C++ compiler:

    nvcc -arch=native -O3 -std=c++17 --expt-relaxed-constexpr -DLLTM_EXT_WITH_CUDA -Isrc \
        tools/gemm_schedule.cu -o schedule
    ./schedule 1000 1 > times.txt
    pip install scipy
    python tools/gemm_schedule.py times.txt

It prints the constants of each kernel, and how much longer the kernels that they choose take than the
fastest ones. The estimates are gemm_schedule.h's own, compiled for the host.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

SOURCES = Path(__file__).parents[1] / "src"
# A line of times: a type, then numbers. The sizes are GemmSizes.
BATCH, N, OPERANDS, BYTES = 0, 2, 4, 5
PRODUCT, KIND, PLACE, TILE, SPLITS, TIME = slice(0, 10), 10, 11, slice(12, 16), 16, 17
TILES, DIRECT, OUTER = range(3)
# Of each kind: the names of the constants, in the order of their struct, and where the fit starts.
CONSTANTS: dict[int, dict[str, float]] = {
    TILES: {"wait": 0.5, "work": 0.3, "ends": 2.5, "store": 0.5, "pieces": 1.1, "latency": 1},
    DIRECT: {"ends": 0.9, "wait": 0.4, "work": 1, "store": 1},
    OUTER: {"ends": 2, "depth": 0.07, "work": 60, "store": 0.3},
}
BLOCKS = 3  # of a multiprocessor, in TILE: with one there is no store, and work is wait
LIBRARY = """
#include "gemm/gemm_schedule.h"

using namespace lltm_ext;

// lines: as tools/gemm_schedule.cu prints them, without the type. constants: of the kernel that they time.
extern "C" void estimates(const double* lines, long count, long width, int multiprocessors,
                          const double* constants, double* to) {
  DeviceInfo device = {0, multiprocessors};
  for (long i = 0; i < count; ++i, lines += width) {
    const auto at = [&](int place) { return static_cast<int64_t>(lines[place]); };
    const GemmSizes sizes = {at(0),    at(1),      at(2),      at(3),      int(at(5)), int(at(6)),
                             lines[4], at(7) != 0, at(8) != 0, int(at(9))};
    const int tile[] = {int(at(12)), int(at(13)), int(at(14)), int(at(15))};
    const int64_t tiles = sizes.batch * ceil_div(sizes.m, tile[0]) * ceil_div(sizes.n, tile[1]);
    const double* x = constants;
    if (at(10) == 0) {
      const TileCost cost = {tile[0], tile[1], tile[2], tile[3], x[0], x[1], x[2], x[3], x[4], x[5]};
      to[i] = time_of(sizes, cost, tiles, at(16), false, device);
    } else if (at(10) == 1) {
      to[i] = time_of(sizes, DirectCost{tile[0], tile[1], tile[2], tile[3], x[0], x[1], x[2], x[3]}, at(16));
    } else {
      to[i] = time_of(sizes, OuterCost{tile[0], tile[1], tile[2], x[0], x[1], x[2], x[3]}, tiles);
    }
  }
}
"""

Estimate = Callable[[Any, Any], Any]


def compiled_estimates(multiprocessors: int) -> Estimate:
    """gemm_schedule.h's time_of, of lines and the constants of their kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "estimates.cpp"), Path(folder, "estimates.so")
        source.write_text(LIBRARY)
        compiler = os.environ.get("CXX", "c++")
        subprocess.run(
            [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", f"-I{SOURCES}", source, "-o", library],
            check=True,
        )
        call = ctypes.CDLL(str(library)).estimates
    pointer = np.ctypeslib.ndpointer(float, flags="C")
    call.argtypes = [pointer, ctypes.c_long, ctypes.c_long, ctypes.c_int, pointer, pointer]
    call.restype = None

    def estimate(lines: Any, constants: Any) -> Any:
        found = np.empty(len(lines))
        call(lines, *lines.shape, multiprocessors, np.ascontiguousarray(constants, float), found)
        return found

    return estimate


def whole(kind: int, logarithms: Any, one_block: bool) -> Any:
    constants = np.exp(logarithms)
    if kind == TILES and one_block:
        constants[1], constants[3] = constants[0], 0
    return constants


def fit(lines: Any, best: Any, estimate: Estimate) -> Any:
    kind, one_block = int(lines[0, KIND]), lines[0, TILE][BLOCKS] == 1
    weights = np.maximum(0.1, (best / lines[:, TIME]) ** 2)  # which of the fast ones is chosen matters most

    def residuals(logarithms: Any) -> Any:
        return weights * np.log(estimate(lines, whole(kind, logarithms, one_block)) / lines[:, TIME])

    start = np.log(list(CONSTANTS[kind].values()))
    # Bounds, because some constants hardly matter for some kernels.
    found = least_squares(
        residuals, start, bounds=(start - 4, start + 4), loss="soft_l1", f_scale=0.1, max_nfev=300
    )
    return whole(kind, found.x, one_block)


def fit_type(name: str, lines: Any, estimate: Estimate) -> None:
    _, product = np.unique(lines[:, PRODUCT], axis=0, return_inverse=True)
    product = product.reshape(-1)
    best = np.full(product.max() + 1, np.inf)
    np.minimum.at(best, product, lines[:, TIME])
    estimates = np.empty(len(lines))
    for kind, place in np.unique(lines[:, [KIND, PLACE]], axis=0):
        here = (lines[:, KIND] == kind) & (lines[:, PLACE] == place)
        constants = fit(lines[here], best[product[here]], estimate)
        estimates[here] = estimate(lines[here], constants)
        error = np.median(np.abs(np.log(estimates[here] / lines[here, TIME])))
        numbers = ", ".join(
            f"{key} {value:.3g}" for key, value in zip(CONSTANTS[kind], constants, strict=True)
        )
        what = ("tile", "direct", "outer")[int(kind)]
        print(f"{name} {what} {place:.0f}: {numbers}; {here.sum()} times, typical error {error:.1%}")
    chosen = np.full(len(best), -1)
    for line in np.argsort(-estimates):
        chosen[product[line]] = line
    loss = lines[chosen, TIME] / best
    mean, most = np.exp(np.log(loss).mean()), np.quantile(loss, 0.95)
    print(f"{name}: chosen / best {mean:.4f} (geometric mean of {len(best)}), 95 % at most {most:.2f}")


def main() -> None:
    words = [line.split() for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    multiprocessors = int(words[0][1])
    estimate = compiled_estimates(multiprocessors)
    words = [line for line in words if len(line) > 2]
    for name in dict.fromkeys(line[0] for line in words):
        lines = np.array([line[1:] for line in words if line[0] == name], float)
        fit_type(name, np.ascontiguousarray(lines), estimate)


if __name__ == "__main__":
    main()
