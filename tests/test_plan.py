"""Which kernel runs a sequence on chips that no test has at hand: plan.h, a header without torch or CUDA."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
ASK = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include "common/recurrence/plan.h"

using namespace lltm_ext;

// Each argument: hidden,batch,dense,backward,element_size,gates,capability,multiprocessors,algorithm,chunks:
// a variant of more chunks finds no room.
int main(int count, char** questions) {
  const char* names[] = {"auto", "stepwise", "cluster", "grid"};
  for (int i = 1; i < count; ++i) {
    int n[10];
    char* at = questions[i];
    for (int& value : n) value = std::strtol(at, &at, 10), ++at;
    const Problem problem = {n[0], n[1], n[2] != 0, n[3] != 0, n[4], n[5]};
    const auto has_room = [&](const Variant& v, const GridShape&) { return v.chunks <= n[9]; };
    const Plan plan = plan_recurrence(problem, {n[6], n[7]}, static_cast<Algorithm>(n[8]), has_room);
    const GridShape& grid = plan.grid;
    std::printf("%s|%d|%d|%d|%s\\n", names[static_cast<int>(plan.algorithm)], grid.members, grid.groups,
                grid.rows, plan.why_not.c_str());
  }
}
"""
H200, A100, L4, T4 = (90, 132), (80, 108), (89, 58), (75, 40)
NAMES = {"auto": 0, "stepwise": 1, "cluster": 2, "grid": 3}


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("plan")
    (folder / "plan.cpp").write_text(ASK)
    command = [COMPILER, "-std=c++17", "-Wall", "-Werror", "-I", SOURCES, "plan.cpp", "-o", "plan"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "plan"


@pytest.fixture
def plan(planner):
    """Asks for many plans at once: problems as dicts of what is not the usual."""

    def ask(*problems):
        lines = [question(**problem) for problem in problems]
        done = subprocess.run([planner, *lines], capture_output=True, text=True, check=True)
        return [answer(line) for line in done.stdout.splitlines()]

    return ask


def question(
    hidden, batch, size=2, gates=3, chip=H200, algorithm="auto", dense=True, backward=False, chunks=99
):
    values = (hidden, batch, dense, backward, size, gates, *chip, NAMES[algorithm], chunks)
    return ",".join(str(int(value)) for value in values)


def answer(line):
    algorithm, members, groups, rows, why_not = line.split("|")
    return algorithm, int(members), int(groups), int(rows), why_not


def problems(**more):
    """Problems of every kind, small and large."""
    return [
        {"hidden": hidden, "batch": batch, "size": size, "gates": gates, "backward": backward, **more}
        for hidden in (8, 64, 136, 256, 512, 600, 1024, 2048, 4096)
        for batch in (1, 8, 9, 64, 300, 5000, 10**6)
        for size in (2, 4)
        for gates in (3, 4)
        for backward in (False, True)
    ]


chips = pytest.mark.parametrize("chip", [H200, A100, L4], ids=["H200", "A100", "L4"])


@chips
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "packed"])
@pytest.mark.parametrize("algorithm", ["auto", "cluster", "grid"])
def test_blocks_fit_on_the_chip_and_take_every_row_once(plan, chip, algorithm, dense):
    asked = problems(chip=chip, algorithm=algorithm, dense=dense)
    for problem, (name, members, groups, rows, _) in zip(asked, plan(*asked), strict=True):
        if name == "stepwise":
            continue
        assert groups * rows >= problem["batch"] > (groups - 1) * rows, problem
        if name == "grid":  # whose blocks wait for each other
            assert members * groups <= chip[1], problem
        else:
            assert members <= 8, problem
            assert dense, problem


def only_forward(hidden, size, gates, **_):
    """Whether the backward of a forward that auto may take has no room: by name neither is to be had."""
    return hidden > 512 and size == 4 and gates > 3


@chips
def test_asked_for_by_its_name_a_plan_is_the_same(plan, chip):
    asked = [problem for problem in problems(chip=chip) if not only_forward(**problem)]
    chosen = plan(*asked)
    named = plan(*({**problem, "algorithm": name} for problem, (name, *_) in zip(asked, chosen, strict=True)))
    assert [name for name, *_ in chosen] == [name for name, *_ in named]
    assert {name for name, *_ in chosen} == {"stepwise", "grid"} | ({"cluster"} if chip == H200 else set())


def test_what_no_kernel_takes_is_stepwise(plan):
    for more in ({"size": 8}, {"hidden": 12}, {"chip": T4}, {"batch": 0}, {"hidden": 4096}, {"batch": 10**6}):
        ((name, *_, why_not),) = plan({"hidden": 64, "batch": 8, **more})
        assert (name, why_not) == ("stepwise", ""), more


@pytest.mark.parametrize(
    "algorithm,more,reason",
    [
        ("grid", {"size": 8}, "takes float16, bfloat16 and float32, got float64"),
        ("grid", {"hidden": 12}, "needs a hidden_size that is a multiple of 8, got 12"),
        ("cluster", {"chip": A100}, "needs compute capability 9.0, got 8.0"),
        ("cluster", {"chip": T4}, "needs compute capability 9.0, got 7.5"),
        ("grid", {"chip": T4}, "needs compute capability 8.0, got 7.5"),
        ("cluster", {"dense": False}, "takes no packed sequences"),
        ("cluster", {"hidden": 520}, "has no room on this GPU for hidden_size = 520 and batch = 8"),
        (
            "cluster",
            {"hidden": 136, "size": 4},
            "has no room on this GPU for hidden_size = 136 and batch = 8",
        ),
        ("grid", {"hidden": 2056}, "has no room on this GPU for hidden_size = 2056 and batch = 8"),
        ("grid", {"hidden": 1024, "size": 4, "gates": 4}, "has no room on this GPU for hidden_size = 1024"),
        # Their cell states lie in shared memory.
        ("grid", {"hidden": 1024, "batch": 20_000}, "has no room on this GPU for hidden_size = 1024"),
        ("grid", {"batch": 20_000}, "has no room on this GPU for hidden_size = 64 and batch = 20000"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_cannot_run_says_why(plan, algorithm, more, reason, backward):
    ((name, *_, why_not),) = plan(
        {"hidden": 64, "batch": 8, "algorithm": algorithm, "backward": backward, **more}
    )
    assert name == "stepwise"
    assert why_not.startswith(reason)


def test_a_kernel_that_finds_no_room_in_shared_memory_is_not_taken(plan):
    problem = {"hidden": 600, "batch": 8}
    room, no_room, asked = plan(
        problem, {**problem, "chunks": 2}, {**problem, "chunks": 2, "algorithm": "grid"}
    )
    assert room[0] == "grid"
    assert (no_room[0], no_room[-1]) == ("stepwise", "")
    assert asked[-1] == "has no room on this GPU for hidden_size = 600 and batch = 8"


def test_clusters_take_any_number_of_rows_one_after_the_other(plan):
    for batch in (1, 1000, 10**6):
        ((name, _, groups, rows, _),) = plan({"hidden": 512, "batch": batch, "algorithm": "cluster"})
        assert (name, groups, rows) == ("cluster", -(-batch // 8) if batch > 1 else 1, min(batch, 8))
