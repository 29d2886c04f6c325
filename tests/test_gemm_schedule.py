"""Which tile computes a product, and in how many parts: gemm_schedule.h, a header without torch or CUDA."""

import os
import random
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "gemm/gemm_schedule.h"

using namespace lltm_ext;

// A compute capability, then batch,m,n,k in each argument. A small tile, a large one, one thread for an
// element, and all K of a tile.
int main(int count, char** questions) {
  const TileCost tiles[] = {{64, 64, 16, 4, 0.5, 0.45, 2.5, 1, 1, 0, true},
                            {256, 128, 16, 1, 2.2, 2.2, 9, 0}};
  const DirectCost direct[] = {{1, 1, 1, 8, 1, 0.4, 0.8, 1}};
  const OuterCost outer[] = {{64, 128, 61, 2.7, 0.1, 56, 0.25}};
  const int capability = std::atoi(questions[1]);
  for (int i = 2; i < count; ++i) {
    long n[4];
    char* at = questions[i];
    for (long& value : n) value = std::strtol(at, &at, 10), ++at;
    const double operands = static_cast<double>(n[0] * (n[1] + n[2]) * n[3]);
    const GemmSizes sizes = {n[0], n[1], n[2], n[3], 4, 4, operands, true, false, 4};
    const DeviceInfo device = {capability, 132, true, {0, 132, 132, 132, 128, 120, 120, 119, 120}, 227 << 10};
    const Schedule found = best_schedule(tiles, 2, 1, direct, 1, outer, 1, sizes, device);
    std::printf("%d|%d|%f|%d|%d\\n", found.tile, found.splits, found.time, found.programmatic,
                found.in_cluster);
  }
}
"""
SMALL, LARGE, DIRECT, OUTER = range(4)
MOST_BYTES_OF_PARTIAL_SUMS = 64 << 20


Schedule = namedtuple("Schedule", "tile splits time programmatic in_cluster")


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    """Chooses for many (batch, m, n, k) at once."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "schedule.cpp").write_text(PROGRAM)
    command = [COMPILER, "-std=c++17", "-Wall", "-Werror", "-I", SOURCES, "schedule.cpp", "-o", "schedule"]
    subprocess.run(command, cwd=folder, check=True)

    def choose(*sizes, capability=90):
        lines = [",".join(map(str, each)) for each in sizes]
        command = [folder / "schedule", str(capability), *lines]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [Schedule(*map(float, line.split("|"))) for line in done.stdout.splitlines()]

    return choose


def test_large_products_take_large_tiles_in_one_part(schedule):
    (found,) = schedule((1, 8192, 8192, 8192))
    assert (found.tile, found.splits, found.programmatic) == (LARGE, 1, False)


def test_long_sums_of_few_results_are_split_over_the_multiprocessors(schedule):
    (found,) = schedule((1, 60, 60, 8192))
    assert found.tile == SMALL
    assert 100 <= found.splits <= 528
    assert found.programmatic


def test_a_long_sum_is_split_into_several_rounds_of_large_tiles(schedule):
    # 77 tiles would leave 55 of 132 multiprocessors idle.
    (found,) = schedule((1, 1568, 1408, 14_952))
    assert found.tile == LARGE
    assert found.splits * 77 > 2 * 132


def test_blocks_that_take_long_start_early_only_if_they_fill_all_multiprocessors(schedule):
    # 256 and 512 small tiles, of which 132 multiprocessors run 528 at once.
    uneven, even, longer, short = schedule(
        (1, 1024, 1024, 240), (1, 2048, 1024, 150), (1, 2048, 1024, 300), (1, 1024, 1024, 70)
    )
    assert {found.tile for found in (uneven, even, longer, short)} == {SMALL}
    early = (uneven.programmatic, even.programmatic, longer.programmatic, short.programmatic)
    assert early == (False, True, False, True)


def test_short_sums_of_few_results_take_a_thread_each(schedule):
    (found,) = schedule((1, 30, 50, 8))
    assert (found.tile, found.splits) == (DIRECT, 1)


def test_short_sums_of_many_results_keep_all_of_k(schedule):
    longest, longer = schedule((1, 4096, 16_384, 16), (1, 4096, 16_384, 62))
    assert (longest.tile, longest.splits) == (OUTER, 1)
    assert longer.tile != OUTER


def test_partial_sums_stay_within_their_memory(schedule):
    draw = random.Random(0)
    sizes = [tuple(round(2 ** draw.uniform(0, 14)) for _ in range(4)) for _ in range(500)]
    for (batch, m, n, k), found in zip(sizes, schedule(*sizes), strict=True):
        assert 1 <= found.splits <= k
        if found.splits > 1 and not found.in_cluster:
            assert batch * m * n * found.splits * 4 <= MOST_BYTES_OF_PARTIAL_SUMS
        assert found.time > 0


def test_a_cluster_adds_the_sums_of_few_blocks_on_hopper_only(schedule):
    sizes = (1, 256, 256, 512)
    (on_hopper,) = schedule(sizes)
    (elsewhere,) = schedule(sizes, capability=80)
    assert on_hopper.in_cluster
    assert 2 <= on_hopper.splits <= 8
    assert not elsewhere.in_cluster
    assert elsewhere.time >= on_hopper.time


def test_an_empty_sum_is_not_split(schedule):
    (found,) = schedule((1, 5, 7, 0))
    assert found.splits == 1
