"""Which kernel runs a sequence, on any chip: plan.h, a header without torch or CUDA, compiled on its own."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCES = Path(__file__).parents[1] / "src"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include "recurrence/plan.h"

using namespace lltm_ext;

// Each argument: hidden,batch,dense,backward,element_size,gates,capability,multiprocessors,hopper,
// shared bytes,algorithm,states,sequences,tf32,recurrent,side by side,steps,affine,over units,heads,products,
// units of a head in the weights of four of these,whether |h| is at most 1
int main(int count, char** questions) {
  const char* names[] = {"auto", "stepwise", "cluster", "grid"};
  for (int i = 1; i < count; ++i) {
    int n[23];
    char* at = questions[i];
    for (int& value : n) value = std::strtol(at, &at, 10), ++at;
    const CellShape cell = {n[5], n[11], /*saved=*/n[5] + 1, 0, 0, n[14] != 0, false, false,
                            1, true, false, false, n[17] != 0, n[18] != 0, n[20], n[20], n[20], 0,
                            {0, n[20] > 0, n[20]}, {0, n[20], n[20] > 0},
                            n[21], n[21] ? 4 : 0, {0, 1, 1}, {0, 1, 2}, n[22] != 0};
    const Problem problem = {cell, n[0], n[1], n[2] != 0, n[3] != 0, n[4], n[12], n[13] != 0,
                             n[15] != 0, n[16], n[19]};
    const PersistentVariant* variants = problem.element_size == 2 ? kHalfVariants : kFloatVariants;
    DeviceInfo device = {n[6], n[7], n[8] != 0, {}, n[9]};
    for (int& multiprocessors : device.cluster_multiprocessors) multiprocessors = n[7] / 11 * 10;
    device.cluster_multiprocessors[2] = n[7] / 2 * 2;
    device.cluster_multiprocessors[3] = n[7] / 22 * 19;
    const Plan plan = plan_recurrence(problem, device, static_cast<Algorithm>(n[10]));
    const PersistentVariant variant = plan.variant < 0 ? PersistentVariant() : variants[plan.variant];
    const GroupGrid& grid = plan.grid;
    const char* algorithm = names[static_cast<int>(plan.algorithm)];
    std::printf("%s|%d|%d|%d|%d|%s|%d|%d|%d|%d|%d|%d|%d|%d|%d|%d|%d|%d\\n", algorithm, grid.group_blocks,
                grid.groups, plan.most_groups, grid.rows, plan.why_not.c_str(), variant.on_hopper_only,
                variant.tf32, variant.row_per_block, plan.independent, plan.tiles.threads, plan.tiles.units,
                plan.fused_step.rows, plan.fused_step.split_k, plan.small_batch.rows, plan.small_batch.units,
                plan.small_batch.split_k, plan.large.tile);
  }
}
"""
# Each has a compute capability, multiprocessors, code for sm_90a or not, bytes of shared memory for a block.
H200, A100 = (90, 132, True, 227 << 10), (80, 108, False, 163 << 10)
L4, T4 = (89, 58, False, 99 << 10), (75, 40, False, 64 << 10)
B200 = (100, 148, False, 227 << 10)
NAMES = {"auto": 0, "stepwise": 1, "cluster": 2, "grid": 3}


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("plan")
    (folder / "plan.cpp").write_text(PROGRAM)
    command = [COMPILER, "-std=c++17", "-Wall", "-Werror", "-I", SOURCES, "plan.cpp", "-o", "plan"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "plan"


@pytest.fixture
def plan(planner):
    """Plans many problems at once, each a dict of arguments of `encode`."""

    def plan_all(*problems):
        lines = [encode(**problem) for problem in problems]
        done = subprocess.run([planner, *lines], capture_output=True, text=True, check=True)
        return [decode(line) for line in done.stdout.splitlines()]

    return plan_all


class Plan(NamedTuple):
    algorithm: str
    members: int
    groups: int
    most_groups: int  # of a launch; 0: one has all
    rows: int
    why_not: str
    on_hopper_only: bool  # the kernel runs only there
    tf32: bool  # the kernel uses it
    one_row: bool  # a block has one
    independent: bool  # one kernel runs all steps of units without a product
    tile_threads: int  # of a block of tiles of their steps; 0: a thread has all
    tile_units: int  # of a thread
    fused_step: tuple[int, int]  # has rows and split-K; zeros if a step is not fused
    small_batch: tuple[int, int, int]  # has rows, units and split-K; zeros if a step is not one of few rows
    large_tile: int  # of a large layer's kernel, or -1


def encode(
    hidden,
    batch,
    size=2,
    gates=3,
    chip=H200,
    algorithm="auto",
    dense=True,
    backward=False,
    states=1,
    sequences=1,
    tf32=False,
    recurrent=True,
    side_by_side=False,
    steps=100,
    affine=False,
    over_units=False,
    heads=1,
    products=0,
    head_units=0,
    bounded=False,
):
    cell = states, sequences, tf32, recurrent, side_by_side, steps, affine, over_units, heads, products
    values = (
        hidden,
        batch,
        dense,
        backward,
        size,
        gates,
        *chip,
        NAMES[algorithm],
        *cell,
        head_units,
        bounded,
    )
    return ",".join(str(int(value)) for value in values)


def decode(line):
    algorithm, *sizes, why_not, hopper, tf32, one_row, independent, threads, units = line.split("|")[:12]
    tiles = line.split("|")[12:]
    flags = (flag == "1" for flag in (hopper, tf32, one_row, independent))
    fused_step, small_batch = tuple(map(int, tiles[:2])), tuple(map(int, tiles[2:5]))
    numbers = int(threads), int(units), fused_step, small_batch, int(tiles[5])
    return Plan(algorithm, *map(int, sizes), why_not, *flags, *numbers)


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
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize(
    "more", [{}, {"heads": 4}, {"over_units": True}], ids=["", "heads", "values over units"]
)
def test_blocks_fit_on_the_chip_and_take_every_row_once(plan, chip, algorithm, dense, sequences, more):
    asked = problems(chip=chip, algorithm=algorithm, dense=dense, sequences=sequences, **more)
    sequences *= more.get("heads", 1)
    for problem, (name, members, groups, most_groups, rows, *_, large_tile) in zip(
        asked, plan(*asked), strict=True
    ):
        if name == "stepwise":
            continue
        assert groups * rows >= problem["batch"] > (groups - 1) * rows, problem
        if name == "grid":  # its blocks wait for each other
            at_once = 1 if large_tile >= 0 else sequences
            assert at_once * members * (most_groups or groups) <= chip[1], problem
            assert not most_groups or more.get("over_units") or large_tile >= 0, problem
        else:
            assert members <= 8, problem
            assert dense, problem


def only_forward(hidden, size, gates, **_):
    """Whether the backward has no room, so that only "auto" may choose the forward."""
    return hidden > 512 and size == 4 and gates > 3


def with_both_passes(plan, asked):
    """Without large layers of which no grid runs the other pass, so that only "auto" may choose this one."""
    others = ({**problem, "backward": not problem["backward"], "algorithm": "grid"} for problem in asked)
    found = zip(asked, plan(*asked), plan(*others), strict=True)
    return [problem for problem, this, other in found if this.large_tile < 0 or not other.why_not]


@chips
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "packed"])
@pytest.mark.parametrize("algorithm", ["cluster", "grid"])
def test_an_algorithm_by_name_serves_both_passes(plan, chip, algorithm, dense):
    asked = [
        {**problem, "hidden": hidden, "algorithm": algorithm, "dense": dense, "chip": chip}
        for problem in problems()
        for hidden in (problem["hidden"], 768, 1536)
        if problem["size"] == 2
    ]
    others = ({**problem, "backward": not problem["backward"]} for problem in asked)
    for problem, this, other in zip(asked, plan(*asked), plan(*others), strict=True):
        if this.large_tile >= 0:
            assert other.algorithm == "grid", problem


@chips
def test_the_chosen_algorithm_can_be_asked_for_by_name(plan, chip):
    asked = [problem for problem in problems(chip=chip) if not only_forward(**problem)]
    asked = with_both_passes(plan, asked)
    chosen = plan(*asked)
    named = plan(*({**problem, "algorithm": name} for problem, (name, *_) in zip(asked, chosen, strict=True)))
    assert [name for name, *_ in chosen] == [name for name, *_ in named]
    assert {name for name, *_ in chosen} == {"stepwise", "grid"} | ({"cluster"} if chip == H200 else set())


def test_kernels_compiled_only_for_hopper_run_only_there(plan):
    others = [problem for chip in (A100, L4, B200) for problem in problems(chip=chip)]
    assert not any(found.on_hopper_only for found in plan(*others))
    assert any(found.on_hopper_only for found in plan(*problems()))


def test_tf32_runs_float32_on_hopper_where_it_is_allowed(plan):
    for more in ({}, {"dense": False}, {"sequences": 2}):
        for other in ({"tf32": False}, {"tf32": True, "chip": A100}, {"tf32": True, "chip": L4}):
            assert not any(found.tf32 for found in plan(*problems(**more, **other)))
        asked = problems(tf32=True, **more)
        chosen = [p for p, found in zip(asked, plan(*asked), strict=True) if found.tf32]
        assert {problem["size"] for problem in chosen} == {4}
        assert {problem["hidden"] for problem in chosen} >= {64, 256, 1024}


def test_small_layers_run_in_blocks_of_their_own_and_large_ones_share_the_chip(plan):
    for size in (2, 4):
        small, large = plan(*({"hidden": hidden, "batch": 16, "size": size} for hidden in (32, 512)))
        assert small[:2] == ("cluster", 1)
        assert large.algorithm == "grid" and large.members > 8


def test_backward_clusters_of_small_blocks_run_all_at_once_in_half_types(plan):
    asked = [{**p, "chip": chip} for chip in (H200, B200) for p in problems() if p["backward"]]
    found = [
        (problem, found)
        for problem, found in zip(asked, plan(*asked), strict=True)
        if found.algorithm == "cluster" and found.members > 2 and problem["size"] == 2
    ]
    assert found
    for problem, (_, members, groups, *_) in found:
        resident = problem["chip"][1] // 22 * 19 if members == 3 else problem["chip"][1] // 11 * 10
        assert members * groups <= resident, problem


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_on_two_streams_fewer_grids_of_half_types_pay(plan, backward):
    """Two grids would wait for each other."""
    one = [{"hidden": 768, "batch": batch, "gates": 4, "backward": backward} for batch in (8, 32, 128, 512)]
    alone = [found.algorithm == "grid" for found in plan(*one)]
    of_two = [found.algorithm == "grid" for found in plan(*({**p, "side_by_side": True} for p in one))]
    assert all(grid <= grid_alone for grid, grid_alone in zip(of_two, alone, strict=True))
    assert 0 < sum(of_two) < sum(alone)


def test_a_problem_that_no_persistent_kernel_can_run_is_stepwise(plan):
    for more in (
        {"size": 8},
        {"hidden": 132},
        {"chip": T4},
        {"batch": 0},
        {"hidden": 4096},
    ):
        (found,) = plan({"hidden": 64, "batch": 8, **more})
        assert (found.algorithm, found.why_not) == ("stepwise", ""), more


def test_an_algorithm_by_name_is_the_variant_that_auto_takes(plan):
    """So that both give the same bits."""
    for more in ({}, {"tf32": True}):
        # By name an algorithm must serve both passes, which in IEEE float32 some do not.
        asked = with_both_passes(plan, [p for p in problems(**more) if p["size"] == 2 or more])
        auto = plan(*asked)
        named = plan(*({**p, "algorithm": a.algorithm} for p, a in zip(asked, auto, strict=True)))
        for problem, a, b in zip(asked, auto, named, strict=True):
            assert a == b, problem


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
        # Shared memory holds the cell states.
        ("grid", {"hidden": 1024, "batch": 20_000}, "has no room on this GPU for hidden_size = 1024"),
        ("grid", {"batch": 20_000}, "has no room on this GPU for hidden_size = 64 and batch = 20000"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_algorithm_that_cannot_run_is_refused_with_the_reason(plan, algorithm, more, reason, backward):
    (found,) = plan({"hidden": 64, "batch": 8, "algorithm": algorithm, "backward": backward, **more})
    assert found.algorithm == "stepwise"
    assert found.why_not.startswith(reason)


def test_a_kernel_without_room_in_shared_memory_is_not_chosen(plan):
    problem, small = {"hidden": 600, "batch": 8}, {"chip": (*H200[:3], 16 << 10)}
    room, no_room, asked = plan(problem, {**problem, **small}, {**problem, **small, "algorithm": "grid"})
    assert room.algorithm == "grid"
    assert (no_room.algorithm, no_room.why_not) == ("stepwise", "")
    assert asked.why_not == "has no room on this GPU for hidden_size = 600 and batch = 8"


directions = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


@pytest.mark.parametrize(
    "problem",
    [
        {"hidden": 4096, "batch": 8},  # There is no room.
        {"hidden": 512, "batch": 5000},  # Nothing is gained.
        {"hidden": 64, "batch": 8, "chip": T4},
        {"hidden": 64, "batch": 8, "algorithm": "stepwise"},
    ],
    ids=str,
)
def test_two_sequences_do_not_share_a_launch(plan, problem):
    """No kernel runs both, not even a fused step."""
    (found,) = plan({**problem, "sequences": 2})
    assert (found.algorithm, found.fused_step, found.small_batch) == ("stepwise", (0, 0), (0, 0, 0))


LARGE = [
    {"hidden": hidden, "batch": batch, "gates": 4}
    for hidden, batch in ((1024, 256), (1024, 1024), (1536, 64), (2048, 128))
]
NOT_LARGE = [
    {"dense": False},
    {"size": 4, "tf32": True},
    {"heads": 2},
    {"side_by_side": True},
    {"steps": 1},
    {"chip": B200},
    {"gates": 5},
    {"over_units": True},
    {"algorithm": "stepwise"},
]


def test_large_layers_have_a_kernel(plan):
    for problem, found in zip(LARGE, plan(*LARGE), strict=True):
        assert found.algorithm == "grid" and found.large_tile >= 0, problem
        assert found.members * 16 >= problem["hidden"] and found.members <= 132, problem
    # Clusters of eight fill 120 multiprocessors, less than 2,048 units of four gates take. A group of 1,024
    # rows would have launches in parts, slower than fused steps.
    backward = [{**problem, "backward": True} for problem in LARGE]
    for problem, found in zip(backward, plan(*backward), strict=True):
        assert (found.large_tile >= 0) == (problem["hidden"] < 2048 and problem["batch"] < 1024), problem
        if found.large_tile >= 0:
            assert found.members % 8 == 0 and 16 * found.members >= problem["hidden"], problem
    others = [{**problem, **other} for problem in LARGE for other in NOT_LARGE]
    assert {found.large_tile for found in plan(*others)} == {-1}


TF32 = {"size": 4, "tf32": True, "bounded": True}


def test_large_layers_of_bounded_cells_have_a_kernel_forward_in_tf32(plan):
    for problem, found in zip(LARGE, plan(*({**problem, **TF32} for problem in LARGE)), strict=True):
        assert found.algorithm == "grid" and found.large_tile >= 0, problem
    not_large = [other for other in NOT_LARGE if "size" not in other]
    not_large += [{"tf32": False}, {"bounded": False}, {"backward": True}, {"size": 8}]
    others = [{**problem, **TF32, **other} for problem in LARGE for other in not_large]
    # An algorithm requested by name serves forward and backward.
    others += [{**problem, **TF32, "algorithm": "grid"} for problem in LARGE]
    assert {found.large_tile for found in plan(*others)} == {-1}


def test_few_rows_have_a_large_layers_kernel_in_tf32_where_weights_are_too_large_for_a_grid(plan):
    found = plan(*({"hidden": h, "batch": b, **TF32} for h in (1536, 2048) for b in (1, 16, 40)))
    assert all(x.large_tile >= 0 for x in found)
    assert plan({"hidden": 1024, "batch": 16, **TF32})[0].large_tile == -1
    assert plan({"hidden": 2048, "batch": 16, **TF32, "steps": 3})[0].large_tile == -1


def test_fused_steps_have_a_tile_that_is_compiled_and_split_k_less_for_more_rows(plan):
    asked = problems(algorithm="stepwise")
    for problem, found in zip(asked, plan(*asked), strict=True):
        rows, split_k = found.fused_step
        assert (rows, split_k) == (0, 0) or (rows in (64, 128) and split_k in (1, 2, 4, 8)), problem
    few, many, large = plan(
        *(
            {"hidden": h, "batch": b, "algorithm": "stepwise"}
            for h, b in ((1024, 16), (1024, 256), (4096, 256))
        )
    )
    assert few.fused_step[1] > many.fused_step[1] > 0
    assert large.fused_step == (0, 0)  # A block would have too much of the product.


FUSED, FEW_ROWS = {"hidden": 1024, "batch": 64}, {"hidden": 1024, "batch": 8, "size": 4}
OTHERS = [
    *(("fused_step", FUSED, more) for more in ({"size": 4}, {"size": 8}, {"hidden": 68}, {"dense": False})),
    *(("fused_step", FUSED, more) for more in ({"chip": A100}, {"recurrent": False})),
    ("fused_step", FUSED, {"gates": 9}),  # wgmma has no tile of so many columns
    *(
        ("small_batch", FEW_ROWS, more)
        for more in ({"size": 2}, {"size": 8}, {"hidden": 1022}, {"batch": 17})
    ),
    *(
        ("small_batch", FEW_ROWS, more)
        for more in ({"batch": 9, "tf32": True}, {"batch": 0}, {"recurrent": False})
    ),
]


@pytest.mark.parametrize("kernel,problem,more", OTHERS, ids=str)
def test_other_steps_have_no_such_kernel(plan, kernel, problem, more):
    usual, other = (plan({**problem, "algorithm": "stepwise", **m})[0] for m in ({}, more))
    assert any(getattr(usual, kernel))
    assert not any(getattr(other, kernel))


@pytest.mark.parametrize("chip", [H200, A100, L4, T4], ids=["H200", "A100", "L4", "T4"])
def test_units_without_a_product_run_all_steps_in_one_kernel(plan, chip):
    sizes = [(512, 16), (63, 5), (1, 1), (4096, 100_000)]
    asked = [
        {"hidden": hidden, "batch": batch, "size": size, "backward": backward, "dense": dense, "chip": chip}
        for hidden, batch in sizes
        for size in (2, 4, 8)
        for backward in (False, True)
        for dense in (False, True)
    ]
    for algorithm in ("auto", "stepwise"):
        for recurrent in (False, True):
            for found in plan(*({**p, "algorithm": algorithm, "recurrent": recurrent} for p in asked)):
                assert found.independent == (not recurrent)
                assert recurrent or found.algorithm == "stepwise"


LONG = {"recurrent": False, "steps": 16384, "batch": 64, "size": 4}


def test_few_units_without_a_product_run_many_steps_in_tiles(plan):
    one, some, few_steps, backward, mixing = plan(
        {**LONG, "hidden": 1, "affine": True},
        {**LONG, "hidden": 64, "affine": True},
        {**LONG, "hidden": 1, "affine": True, "steps": 128},
        {**LONG, "hidden": 64, "backward": True},
        {**LONG, "hidden": 64, "backward": True, "states": 4},
    )
    assert [x.tile_threads for x in (one, some, few_steps, backward, mixing)] == [256, 128, 256, 128, 64]


def test_a_thread_of_tiles_has_a_pair_of_units_in_half_types(plan):
    for more, units in (({"size": 2}, 2), ({"size": 2, "hidden": 63}, 1), ({}, 1), ({"size": 8}, 1)):
        (found,) = plan({**LONG, "hidden": 64, "backward": True, **more})
        assert found.tile_threads > 0
        assert found.tile_units == units


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"affine": True, "steps": 127},
        {"affine": True, "hidden": 512},
        {"affine": True, "states": 5},
        {"affine": True, "sequences": 2},
        {"affine": True, "recurrent": True},
        {"backward": True, "batch": 10**6},
        {"affine": True, "batch": 0},
    ],
    ids=["not affine", "short", "wide", "many states", "two sequences", "a product", "many rows", "no rows"],
)
def test_other_steps_have_no_tiles(plan, more):
    (found,) = plan({**LONG, "hidden": 64, **more})
    assert found.tile_threads == 0


def test_no_other_algorithm_runs_units_without_a_product(plan):
    for found in plan(
        *({"hidden": 64, "batch": 8, "recurrent": False, "algorithm": a} for a in ("cluster", "grid"))
    ):
        assert found.why_not == "takes cells with a product of h, got one without"


@directions
def test_steps_of_small_batch_cover_all_units_and_fit_a_block(plan, backward):
    sizes = [(hidden, gates) for hidden in (4, 60, 512, 1000, 2044, 6000) for gates in (1, 3, 4, 5, 9, 24)]
    asked = [
        {"hidden": hidden, "gates": gates, "batch": 8, "size": 4, "backward": backward, "chip": chip}
        for hidden, gates in sizes
        for chip in (H200, A100, L4, T4)
    ]
    for problem, found in zip(asked, plan(*({**p, "algorithm": "stepwise"} for p in asked)), strict=True):
        rows, units, split_k = found.small_batch
        warps = -(-units * (1 if backward else problem["gates"]) // 8) * split_k
        assert rows == 8 and 1 <= warps <= 8, problem
        assert split_k * 12 << 10 <= problem["chip"][3], problem


def test_only_stepwise_plans_have_a_fused_step(plan):
    for found in plan(*problems()):
        assert found.algorithm == "stepwise" or (found.fused_step, found.small_batch) == ((0, 0), (0, 0, 0))


def test_values_over_units_are_exchanged_in_a_cluster_or_else_a_grid(plan):
    how = {"over_units": True}
    half = [{"hidden": hidden, "batch": 16, **how} for hidden in (64, 512, 1024)]
    floats = [{"hidden": hidden, "batch": 16, "size": 4, **how} for hidden in (64, 512)]
    found = plan(*half, *(x | {"backward": True} for x in half), *floats)
    wanted = ["cluster", "cluster", "grid"]
    assert [x.algorithm for x in found] == [*wanted, *wanted, "cluster", "grid"]
    assert not any(x.one_row or x.fused_step[0] or x.small_batch[0] for x in found)
    (many_rows,) = plan({"hidden": 512, "batch": 64, "size": 4, **how})
    assert many_rows.algorithm == "stepwise"


@pytest.mark.parametrize(
    "options", [{"hidden": 4096}, {"batch": 4096}, {"dense": False}, {"recurrent": False}]
)
def test_other_cells_with_values_over_units_run_step_by_step(options, plan):
    (found,) = plan({"hidden": 512, "batch": 16, "over_units": True} | options)
    assert (found.algorithm, found.independent, found.fused_step) == ("stepwise", False, (0, 0))


def test_weights_of_a_cells_own_are_on_the_chip_too(plan):
    problems = [{"hidden": hidden, "batch": 16, "gates": 1} for hidden in (128, 256, 512, 1024)]
    found = plan(*(x | {"products": 5, "backward": back} for x in problems for back in (False, True)))
    assert [x.algorithm for x in found] == ["cluster"] * 4 + ["grid"] * 4
    assert not any(x.one_row or x.fused_step[0] or x.small_batch[0] for x in found)
    (in_parts,) = plan({"hidden": 512, "batch": 64, "size": 4, "gates": 1, "products": 5})
    assert in_parts.algorithm == "grid" and 0 < in_parts.most_groups < in_parts.groups
    packed, twice = {"dense": False, "algorithm": "grid"}, {"heads": 2, "algorithm": "grid"}
    refused = plan(*({"hidden": 64, "batch": 8, "products": 1} | options for options in (packed, twice)))
    assert refused[0].why_not == "takes no packed sequences of cells that read other units"
    assert refused[1].algorithm == "stepwise"


def test_a_cluster_has_room_for_block_diagonal_weights_of_which_blocks_have_whole_heads(plan):
    problem = {"hidden": 512, "batch": 16, "gates": 1, "products": 5, "over_units": True}
    of_units = {
        units: plan(*(problem | {"head_units": units, "backward": back} for back in (False, True)))
        for units in (0, 32, 64, 128)
    }
    found = {units: tuple(x.algorithm for x in plans) for units, plans in of_units.items()}
    assert found == {units: ("cluster" if 0 < units <= 64 else "grid",) * 2 for units in found}


def test_all_heads_have_blocks_at_the_same_time(plan):
    dense, heads = plan({"hidden": 128, "batch": 64}, {"hidden": 128, "batch": 64, "heads": 16})
    assert (dense.algorithm, heads.algorithm) == ("cluster", "cluster")
    grids = plan(*({"hidden": 1024, "batch": 16, "heads": heads} for heads in (1, 2, 4)))
    assert all(x.members * x.groups * heads <= 132 for x, heads in zip(grids, (1, 2, 4), strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_heads_have_no_kernels_of_single_steps(size, plan):
    found = plan(*({"hidden": 2048, "batch": batch, "size": size, "heads": 4} for batch in (8, 256)))
    assert all(x.fused_step == (0, 0) and x.small_batch == (0, 0, 0) for x in found)


MANY_ROWS = {"hidden": 256, "batch": 1024, "gates": 1, "states": 0}


@directions
def test_a_block_has_all_units_of_one_gate_for_more_than_64_rows(plan, backward):
    sizes = [(256, 65, 1), (200, 300, 3), (136, 300, 3), (256, 1024, 8), (256, 8448, 8)]
    for hidden, batch, rows in sizes:
        (found,) = plan({**MANY_ROWS, "hidden": hidden, "batch": batch, "backward": backward})
        assert (found.algorithm, found.members, found.rows) == ("cluster", 1, rows), (hidden, batch)
    of_few_rows = [{"batch": 1}, {"batch": 64}, {"hidden": 136, "batch": 64}]
    for found in plan(*({**MANY_ROWS, **more, "backward": backward} for more in of_few_rows)):
        assert (found.algorithm, found.members > 1) == ("cluster", True)


@directions
@pytest.mark.parametrize(
    "more",
    [
        {"gates": 2},
        {"gates": 4},
        {"products": 1},
        {"over_units": True},
        {"states": 3},
        {"hidden": 264},
        {"size": 4, "tf32": True},
        {"dense": False},
        {"chip": B200},
    ],
    ids=str,
)
def test_no_other_block_has_so_many_units(plan, more, backward):
    (found,) = plan({**MANY_ROWS, **more, "backward": backward})
    assert found.members != 1


@directions
@pytest.mark.parametrize(
    "more", [{"gates": 4}, {"gates": 1, "hidden": 256}, {"gates": 4, "size": 4, "tf32": True}], ids=str
)
def test_single_blocks_run_any_number_of_rows(plan, more, backward):
    (found,) = plan({"hidden": 64, "batch": 200_000, **more, "backward": backward})
    assert (found.algorithm, found.members) == ("cluster", 1)


@directions
@pytest.mark.parametrize(
    "more",
    [
        {"hidden": 128, "size": 4, "batches": (17, 33, 4000)},
        {"hidden": 104, "gates": 4, "size": 4, "batches": (19, 4000)},
        {"hidden": 256, "batches": (161, 3000)},
        {"hidden": 200, "gates": 4, "batches": (161, 3000)},
        {"hidden": 200, "gates": 1, "size": 4, "batches": (129, 4000)},
        {"hidden": 200, "gates": 1, "size": 4, "tf32": True, "batches": (161, 4000)},
    ],
    ids=str,
)
def test_clusters_of_two_blocks_take_many_rows(plan, more, backward):
    batches = more["batches"]
    more = {**{k: v for k, v in more.items() if k != "batches"}, "backward": backward}
    fewer, *many = plan(*({**more, "batch": batch} for batch in (batches[0] - 1, *batches)))
    assert (fewer.algorithm, fewer.members) != ("cluster", 2)
    for found in many:
        assert (found.algorithm, found.members) == ("cluster", 2)


@directions
def test_ieee_products_of_128_units_take_two_rows_a_multiprocessor_one_after_the_other(plan, backward):
    sizes = {"hidden": 128, "size": 4, "gates": 1, "backward": backward}
    few, many, more = plan(*({**sizes, "batch": batch} for batch in (132, 264, 265)))
    assert few.one_row and many.one_row and not more.one_row
    (on_tensor_cores,) = plan({**sizes, "batch": 264, "tf32": True})
    assert on_tensor_cores.tf32 and not on_tensor_cores.one_row


@directions
@pytest.mark.parametrize("hidden, members", [(384, 3), (512, 4)])
def test_one_gate_of_half_types_has_blocks_of_128_units(plan, hidden, members, backward):
    fewer, found = plan(
        *({"hidden": hidden, "batch": b, "gates": 1, "backward": backward} for b in (128, 129))
    )
    assert fewer.members > members
    assert (found.algorithm, found.members) == ("cluster", members)


def test_a_launch_of_few_steps_backward_has_one_wave_of_large_blocks_in_half_types(plan):
    few, many, one_wave = plan(
        *(
            {"hidden": 256, "batch": b, "steps": s, "backward": True}
            for b, s in ((600, 15), (600, 16), (400, 4))
        )
    )
    assert few.fused_step != (0, 0) and few.algorithm == "stepwise"
    assert (many.algorithm, many.members) == (one_wave.algorithm, one_wave.members) == ("cluster", 2)


@directions
def test_of_cells_with_values_over_units_many_rows_have_larger_blocks(plan, backward):
    how = {"over_units": True, "backward": backward}
    half, single = {"hidden": 256, **how}, {"hidden": 128, "size": 4, **how}
    found = plan(*({**half, "batch": b} for b in (160, 161)), *({**single, "batch": b} for b in (15, 16)))
    assert [(x.algorithm, x.members) for x in found] == [("cluster", n) for n in (8, 2, 8, 2)]
    (four_gates,) = plan({**half, "gates": 4, "batch": 161})
    assert four_gates.members == (8 if backward else 2)
