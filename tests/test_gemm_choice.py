"""Which kernel computes a product: gemm_choice.h, a header without torch or CUDA."""

import json
import os
import random
import shutil
import statistics
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "gemm/gemm_choice.h"

using namespace lltm_ext;

// A compute capability, then batch,m,k,n,bytes,tf32,bfloat16,transposed_a,transposed_b,passes in each
// argument: the choice, and its time and the library's.
int main(int count, char** questions) {
  const int capability = std::atoi(questions[1]);
  const DeviceInfo device = {capability, 132, capability == 90, {0, 132, 132, 132, 128, 120, 120, 119, 120},
                             (capability < 80 ? 64 : capability == 90 ? 227 : 99) << 10};
  for (int i = 2; i < count; ++i) {
    long n[10];
    char* at = questions[i];
    for (long& value : n) value = std::strtol(at, &at, 10), ++at;
    Product p = {n[0], n[1], n[3], n[2], static_cast<int>(n[4]), n[5] != 0, n[6] != 0};
    const auto lines = [&](bool along_k, long stride) {
      return Lines{along_k, stride * p.bytes % 16 == 0, stride * p.bytes % 128 == 0};
    };
    p.a = lines(!n[7], n[7] ? p.m : p.k);
    p.b = lines(n[8], n[8] ? p.k : p.n);
    p.operands = static_cast<double>(p.batch) * (p.m + p.n) * p.k;
    p.library_passes = static_cast<int>(n[9]);
    const Choice found = choose(p, device);
    std::printf("%s|%d|%d|%f|%f\\n", kKernelNames[static_cast<int>(found.kernel)], found.tile, found.splits,
                found.time, time_of_library(p, device));
  }
}
"""
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "tf32": 4, "float64": 8}
LEAST_MEANS = {"float16": 1.28, "bfloat16": 1.4, "float32": 1.5, "tf32": 1.42, "float64": 1.3}
# What 200 random products of each type took on an H200, by ours and by cuBLAS.
MEASURED = ROOT / "benchmarks/results/nvidia-h200/gemm_sizes.json"
MOST_BYTES_OF_PARTIAL_SUMS = 64 << 20

Choice = namedtuple("Choice", "kernel tile splits time library")


@pytest.fixture(scope="module")
def choose(tmp_path_factory):
    """Chooses for many (m, k, n) or (batch, m, k, n) at once."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("choice")
    (folder / "choice.cpp").write_text(PROGRAM)
    command = [COMPILER, "-std=c++17", "-Wall", "-Werror", "-I", ROOT / "src", "choice.cpp", "-o", "choice"]
    subprocess.run(command, cwd=folder, check=True)

    def choose(*sizes, dtype="bfloat16", layout="NT", capability=90, passes=0):
        layouts = [layout] * len(sizes) if isinstance(layout, str) else layout
        lines = []
        for each, stored in zip(sizes, layouts, strict=True):
            types = [BYTES[dtype], int(dtype == "tf32"), int(dtype == "bfloat16")]
            how = [*types, *(int(x == "T") for x in stored), passes]
            lines.append(",".join(map(str, [*(1,) * (4 - len(each)), *each, *how])))
        command = [folder / "choice", str(capability), *lines]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = [line.split("|") for line in done.stdout.splitlines()]
        return [Choice(line[0], *map(int, line[1:3]), *map(float, line[3:])) for line in found]

    return choose


@pytest.mark.parametrize("dtype", BYTES)
def test_a_thread_computes_an_element_of_a_tiny_product(choose, dtype):
    for found in choose((30, 8, 50), (6, 6, 6), (1, 3, 1), dtype=dtype, layout="NN"):
        assert (found.kernel, found.splits) == ("direct", 1)


@pytest.mark.parametrize("dtype", BYTES)
def test_an_empty_sum_is_a_kernel_of_ours(choose, dtype):
    for found in choose((5, 0, 7), (0, 5, 7), (7, 5, 0), (0, 0, 0), (0, 3, 4, 5), dtype=dtype):
        assert found.splits == 1
        assert found.time < 1e6


@pytest.mark.parametrize("dtype", ["float64", "tf32"])
def test_float64_and_tf32_are_the_librarys_but_for_small_products(choose, dtype):
    assert {found.kernel for found in choose((1024, 1024, 1024), (4096, 512, 300), dtype=dtype)} == {
        "library"
    }


def test_half_types_are_the_librarys_on_other_gpus_but_for_few_rows(choose):
    sizes = [(512, 512, 512), (4096, 512, 4096), (1009, 1013, 1019)]
    for capability in (75, 80, 89, 120):
        assert {found.kernel for found in choose(*sizes, capability=capability)} == {"library"}
    (few,) = choose((8, 4096, 4096), capability=80)
    assert few.kernel == "few rows"
    (few,) = choose((8, 4096, 4096), capability=75)
    assert few.kernel == "library"


def test_hopper_multiplies_by_its_own_kernel_what_it_multiplies_faster(choose):
    unaligned, square, larger = choose((4095, 4095, 4095), (512, 512, 512), (1024, 1024, 1024), layout="NN")
    assert unaligned.kernel == square.kernel == larger.kernel == "hopper"
    for rows in (1, 8, 16):
        (few,) = choose((rows, 4096, 4096))
        assert few.kernel == "few rows"


def test_an_activation_that_the_library_cannot_add_is_a_reason_for_ours(choose):
    sizes = [(4096, k, 4096) for k in (512, 1024, 4096)]
    assert {found.kernel for found in choose(*sizes, passes=1)} == {"hopper"}
    for without, fused in zip(choose(*sizes), choose(*sizes, passes=1), strict=True):
        assert fused.library > without.library + 10


def test_float32_squares_up_to_1024_are_ours(choose):
    for layout in ("NN", "NT", "TN", "TT"):
        found = choose((512, 512, 512), (1024, 1024, 1024), dtype="float32", layout=layout)
        assert {each.kernel for each in found} == {"ffma"}


def test_blocks_without_room_in_shared_memory_are_not_chosen(choose):
    sizes = [(1024, 1024, 1024), (64, 2048, 64), (300, 4096, 20), (16, 4096, 512)]
    bytes_of_tiles = [58_368, 79_872, 76_800]
    for found in choose(*sizes, dtype="float32", capability=75):
        assert found.kernel != "ffma" or bytes_of_tiles[found.tile] <= 64 << 10


@pytest.mark.parametrize("dtype", BYTES)
def test_partial_sums_stay_within_their_memory(choose, dtype):
    draw = random.Random(0)
    sizes = [tuple(round(2 ** draw.uniform(0, 14)) for _ in range(4)) for _ in range(300)]
    for (batch, m, k, n), found in zip(sizes, choose(*sizes, dtype=dtype), strict=True):
        assert 1 <= found.splits <= k
        if found.splits > 1 and found.kernel in ("ffma", "hopper"):
            assert batch * m * n * found.splits * max(BYTES[dtype], 4) <= MOST_BYTES_OF_PARTIAL_SUMS
        assert 0 < found.time < 1e12


@pytest.mark.parametrize("dtype", BYTES)
def test_the_choice_is_good_for_the_products_that_were_measured(choose, dtype):
    """Of 200 random products: the rate of what is chosen, in parts of cuBLAS's."""
    rows = [row for row in json.loads(MEASURED.read_text())["rows"] if row["type"] == dtype]
    sizes, layouts = [(row["m"], row["k"], row["n"]) for row in rows], [row["layout"] for row in rows]
    ratios = sorted(
        1 if found.kernel == "library" else row["torch ms"] / row["lltm_ext ms"]
        for found, row in zip(choose(*sizes, dtype=dtype, layout=layouts), rows, strict=True)
    )
    assert ratios[0] > 0.88 and ratios[len(ratios) // 20] > 0.96
    assert statistics.geometric_mean(ratios) > LEAST_MEANS[dtype]
