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
// shared bytes,algorithm,states,sequences,tf32,recurrent,side by side
int main(int count, char** questions) {
  const char* names[] = {"auto", "stepwise", "cluster", "grid"};
  for (int i = 1; i < count; ++i) {
    int n[16];
    char* at = questions[i];
    for (int& value : n) value = std::strtol(at, &at, 10), ++at;
    const CellShape cell = {n[5], n[11], /*saved=*/n[5] + 1, 0, 0, n[14] != 0, false, false, -1};
    const Problem problem = {cell, n[0], n[1], n[2] != 0, n[3] != 0, n[4], n[12], n[13] != 0,
                             n[15] != 0};
    const PersistentVariant* variants = problem.element_size == 2 ? kHalfVariants : kFloatVariants;
    DeviceInfo device = {n[6], n[7], n[8] != 0, {}, n[9]};
    for (int& multiprocessors : device.cluster_multiprocessors) multiprocessors = n[7] / 11 * 10;
    device.cluster_multiprocessors[3] = n[7] / 22 * 19;
    const Plan plan = plan_recurrence(problem, device, static_cast<Algorithm>(n[10]));
    const PersistentVariant variant = plan.variant < 0 ? PersistentVariant() : variants[plan.variant];
    const GroupGrid& grid = plan.grid;
    const char* algorithm = names[static_cast<int>(plan.algorithm)];
    std::printf("%s|%d|%d|%d|%s|%d|%d|%d|%d|%d|%d|%d|%d|%d\\n", algorithm, grid.group_blocks, grid.groups,
                grid.rows, plan.why_not.c_str(), variant.on_hopper_only, variant.tf32, variant.one_row,
                plan.independent, plan.fused_step.rows, plan.fused_step.split_k, plan.few_rows.rows,
                plan.few_rows.units, plan.few_rows.split_k);
  }
}
"""
# Compute capability, multiprocessors, code for sm_90a, bytes of shared memory that a block may have.
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
    rows: int
    why_not: str
    on_hopper_only: bool  # the kernel
    tf32: bool  # the kernel
    one_row: bool  # a block
    independent: bool  # one kernel runs all steps of units without a product
    fused_step: tuple[int, int]  # rows and split-K; zeros if a step is not fused
    few_rows: tuple[int, int, int]  # rows, units and split-K; zeros if a step is not one of few rows


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
):
    cell = states, sequences, tf32, recurrent, side_by_side
    values = (hidden, batch, dense, backward, size, gates, *chip, NAMES[algorithm], *cell)
    return ",".join(str(int(value)) for value in values)


def decode(line):
    algorithm, members, groups, rows, why_not, hopper, tf32, one_row, independent, *tiles = line.split("|")
    sizes = int(members), int(groups), int(rows)
    flags = (flag == "1" for flag in (hopper, tf32, one_row, independent))
    fused_step, few_rows = tuple(map(int, tiles[:2])), tuple(map(int, tiles[2:]))
    return Plan(algorithm, *sizes, why_not, *flags, fused_step, few_rows)


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
def test_blocks_fit_on_the_chip_and_take_every_row_once(plan, chip, algorithm, dense, sequences):
    asked = problems(chip=chip, algorithm=algorithm, dense=dense, sequences=sequences)
    for problem, (name, members, groups, rows, *_) in zip(asked, plan(*asked), strict=True):
        if name == "stepwise":
            continue
        assert groups * rows >= problem["batch"] > (groups - 1) * rows, problem
        if name == "grid":  # whose blocks wait for each other
            assert sequences * members * groups <= chip[1], problem
        else:
            assert members <= 8, problem
            assert dense, problem


def only_forward(hidden, size, gates, **_):
    """Whether the backward has no room, so that only "auto" may choose the forward."""
    return hidden > 512 and size == 4 and gates > 3


@chips
def test_the_chosen_algorithm_can_be_asked_for_by_name(plan, chip):
    asked = [problem for problem in problems(chip=chip) if not only_forward(**problem)]
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
        assert not any(found.tf32 for found in plan(*problems(**more)))
        for chip in (A100, L4):
            assert not any(found.tf32 for found in plan(*problems(chip=chip, tf32=True, **more)))
        asked = problems(tf32=True, **more)
        for problem, found in zip(asked, plan(*asked), strict=True):
            one_row = found[:4:3] == ("cluster", 1) and problem["hidden"] <= 64
            few = problem["batch"] * problem.get("sequences", 1) <= 132
            assert found.tf32 == (
                problem["size"] == 4 and found.algorithm != "stepwise" and not (one_row and few)
            ), problem


def test_tf32_has_room_for_four_gates_of_1024_units(plan):
    problem = {"hidden": 1024, "batch": 8, "size": 4, "gates": 4, "backward": True}
    ieee, tf32 = plan(problem, {**problem, "tf32": True})
    assert (ieee.algorithm, tf32.algorithm) == ("stepwise", "grid")


def test_a_problem_that_no_persistent_kernel_can_run_is_stepwise(plan):
    for more in (
        {"size": 8},
        {"hidden": 132},
        {"chip": T4},
        {"batch": 0},
        {"hidden": 4096},
        {"batch": 10**6},
    ):
        (found,) = plan({"hidden": 64, "batch": 8, **more})
        assert (found.algorithm, found.why_not) == ("stepwise", ""), more


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("size", [2, 4], ids=["half", "float32"])
def test_blocks_of_one_row_take_any_number_of_units(plan, size, backward):
    odd, large = plan(*({"hidden": h, "batch": 8, "size": size, "backward": backward} for h in (75, 100)))
    assert odd.one_row
    assert large.algorithm == "stepwise"  # with units added it runs in one launch


def test_in_half_types_blocks_of_one_row_serve_few_units_or_odd_numbers_of_them(plan):
    sizes = {32: 264, 31: 264, 33: 132, 95: 132}
    few = plan(*({"hidden": h, "batch": most} for h, most in sizes.items()))
    many = plan(*({"hidden": h, "batch": most + 1} for h, most in sizes.items()))
    assert all(p.one_row for p in few)
    assert not any(p.one_row for p in (*many, *plan({"hidden": 40, "batch": 1}, {"hidden": 97, "batch": 1})))


def test_groups_are_no_more_than_the_clusters_of_their_size_that_run_at_once(plan):
    """Clusters of three blocks fill 114 of these multiprocessors, others 120."""
    problem = {"hidden": 96, "batch": 200, "size": 4, "gates": 4, "tf32": True, "backward": True}
    (found,) = plan(problem)
    assert (found.members, found.groups) == (3, 34)


def test_an_algorithm_by_name_is_the_variant_that_auto_takes(plan):
    """So that both give the same bits."""
    for more in ({}, {"tf32": True}):
        # By name an algorithm must serve both passes, which in IEEE float32 some do not.
        asked = [p for p in problems(**more) if p["size"] == 2 or more]
        auto = plan(*asked)
        named = plan(*({**p, "algorithm": a.algorithm} for p, a in zip(asked, auto, strict=True)))
        for problem, a, b in zip(asked, auto, named, strict=True):
            assert a == b, problem


def test_clusters_in_many_waves_leave_half_types_to_fused_steps(plan):
    for hidden, most in ((256, 7 * 15 * 8), (512, 4 * 15 * 8)):
        few, many = plan(*({"hidden": hidden, "batch": most + i} for i in (0, 1)))
        assert few.algorithm == "cluster"
        assert many.algorithm == "stepwise" and many.fused_step[0] > 0


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


def test_clusters_can_run_any_number_of_rows_one_after_the_other(plan):
    for batch in (1, 1000, 10**6):
        (found,) = plan({"hidden": 512, "batch": batch, "algorithm": "cluster"})
        assert found[:1] + found[2:4] == ("cluster", -(-batch // 8) if batch > 1 else 1, min(batch, 8))


@pytest.mark.parametrize(
    "hidden,size,blocks", [(8, 2, 2), (32, 2, 2), (40, 2, 2), (8, 4, 2), (24, 4, 2), (72, 2, 3)]
)
def test_a_cluster_has_at_least_two_blocks(plan, hidden, size, blocks):
    (found,) = plan({"hidden": hidden, "batch": 8, "size": size, "algorithm": "cluster", "chip": B200})
    assert found[:2] == ("cluster", blocks)


def test_backward_clusters_of_several_blocks_run_all_at_once(plan):
    """65 of two blocks on this chip, with eight rows each."""
    most, more = plan(*({"hidden": 64, "batch": n, "backward": True, "chip": B200} for n in (520, 521)))
    assert most[:3] == ("cluster", 2, 65)
    assert more.algorithm != "cluster"


directions = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


@directions
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("size,tf32", [(2, False), (4, True)], ids=["half", "tf32"])
def test_on_hopper_one_block_has_all_units_of_a_small_layer(plan, size, tf32, backward, sequences):
    more = {"size": size, "tf32": tf32, "backward": backward, "sequences": sequences}
    most_rows = 9 * 132 * 8 // sequences  # of nine waves of blocks
    for hidden in (8, 64, 72, 128):
        found = plan(*({"hidden": hidden, "batch": batch, **more} for batch in (300, most_rows)))
        expected = hidden <= (128 if size == 2 else 64)
        assert [p[:2] == ("cluster", 1) and p.rows > 1 for p in found] == [expected] * 2, hidden
    (found,) = plan({"hidden": 64, "batch": most_rows + 1, **more})
    assert found.algorithm == "stepwise"


def test_few_rows_of_128_units_run_backward_in_a_cluster_of_several_blocks(plan):
    few, many = plan(*({"hidden": 128, "batch": batch, "backward": True} for batch in (32, 33)))
    assert (few[:2], many[:2]) == (("cluster", 4), ("cluster", 1))


@directions
@pytest.mark.parametrize("sequences", [1, 2])
def test_on_hopper_a_block_has_one_row_of_a_small_layer_in_float32(plan, backward, sequences):
    more = {"size": 4, "backward": backward, "sequences": sequences}
    for hidden in (8, 32, 40, 64, 72, 96):
        for batch in (1, 16, 528 // sequences):
            (found,) = plan({"hidden": hidden, "batch": batch, **more})
            assert found.one_row and found[:4] == ("cluster", 1, found.groups, 1), (hidden, batch)
    # The weights of more gates don't fit into the registers.
    for gates, most in ((1, 128), (2, 128), (3, 96), (5, 64), (12, 64), (13, 32), (24, 32), (25, 0)):
        sizes = (8, 32, 40, 64, 72, 96, 104, 128, 136)
        found = plan(*({"hidden": hidden, "batch": 16, "gates": gates, **more} for hidden in sizes))
        assert max((h for h, p in zip(sizes, found, strict=True) if p.one_row), default=0) == most, gates


@directions
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("hidden,tf32,most", [(64, False, 528), (64, True, 132), (96, True, 132)])
def test_tiles_of_eight_rows_run_a_small_layer_of_many_rows(plan, hidden, tf32, most, backward, sequences):
    """Where they are faster than one row a block."""
    more = {"hidden": hidden, "size": 4, "tf32": tf32, "backward": backward, "sequences": sequences}
    few, many = plan(*({"batch": most // sequences + i, **more} for i in (0, 1)))
    assert few.one_row and not few.tf32
    assert not many.one_row and many.tf32 == tf32 and many.algorithm == "cluster"


@directions
def test_layers_of_up_to_128_units_in_tf32_have_larger_blocks_for_more_rows(plan, backward):
    more = {"hidden": 128, "size": 4, "gates": 4, "tf32": True, "backward": backward}
    found = plan(*({"batch": batch, **more} for batch in (1, 96, 97, 240, 241, 9 * 60 * 8)))
    assert all(p.tf32 for p in found)
    assert [p[:2] for p in found] == [("grid", 8)] * 2 + [("cluster", 4)] * 2 + [("cluster", 2)] * 2


@pytest.mark.parametrize(
    "hidden,batch,more,grid",
    [
        (256, 16, {}, ("cluster", 8, 6, 3)),
        (256, 1, {"backward": True}, ("cluster", 8, 1, 1)),
        (256, 64, {}, ("grid", 8, 8, 8)),  # of clusters, some would wait
        (512, 32, {}, ("grid", 16, 4, 8)),
        (600, 32, {}, ("grid", 19, 2, 16)),
        (1024, 32, {"backward": True}, ("grid", 32, 2, 16)),
        (256, 16, {"size": 4, "gates": 4}, ("grid", 16, 4, 4)),
        (256, 16, {"dense": False}, ("grid", 8, 8, 2)),
    ],
)
def test_two_sequences_share_the_chip(plan, hidden, batch, more, grid):
    (found,) = plan({"hidden": hidden, "batch": batch, "sequences": 2, **more})
    assert found[:4] == grid


@pytest.mark.parametrize("backward", [False, True])
def test_on_two_streams_grids_of_many_rows_leave_half_types_to_fused_steps(plan, backward):
    """Two grids would wait for each other."""
    one = {"hidden": 768, "batch": 128, "gates": 4, "backward": backward}
    of_two = {**one, "side_by_side": True}
    many, many_of_two, few_of_two = plan(one, of_two, {**of_two, "batch": 96})
    assert many.algorithm == few_of_two.algorithm == "grid"
    assert many_of_two.algorithm == "stepwise" and many_of_two.fused_step[0] > 0


@pytest.mark.parametrize(
    "problem",
    [
        {"hidden": 2048, "batch": 8},  # no room
        {"hidden": 512, "batch": 64},  # no gain
        {"hidden": 512, "batch": 64, "size": 4},
        {"hidden": 64, "batch": 8, "chip": T4},
        {"hidden": 64, "batch": 8, "algorithm": "stepwise"},
    ],
    ids=str,
)
def test_two_sequences_do_not_share_a_launch(plan, problem):
    """No kernel runs both, not even a fused step."""
    (found,) = plan({**problem, "sequences": 2})
    assert (found.algorithm, found.fused_step, found.few_rows) == ("stepwise", (0, 0), (0, 0, 0))


@pytest.mark.parametrize(
    "hidden,batch,backward,tile",
    [
        (1024, 16, False, (64, 4)),
        (1024, 128, False, (64, 2)),
        (1024, 256, False, (128, 2)),
        (2048, 128, False, (128, 2)),
        (32, 16, False, (64, 1)),
        (4096, 256, False, (0, 0)),  # a block would have too much of the product
        (512, 512, True, (64, 2)),
        (1024, 64, True, (64, 4)),
        (768, 256, True, (64, 4)),  # some multiprocessors have two blocks
        (2048, 64, True, (64, 4)),
        (2048, 128, True, (128, 8)),
        (2160, 128, True, (128, 8)),
        (2168, 128, True, (0, 0)),  # one cluster more than can run at once
        (1024, 256, True, (0, 0)),
    ],
)
def test_the_tile_and_split_k_of_a_fused_step(plan, hidden, batch, backward, tile):
    (found,) = plan({"hidden": hidden, "batch": batch, "backward": backward, "algorithm": "stepwise"})
    assert found.fused_step == tile


@pytest.mark.parametrize(
    "hidden,batch,tile",
    [
        (768, 256, (64, 2)),
        (768, 320, (64, 2)),
        (768, 384, (0, 0)),  # more tiles than multiprocessors
        (1024, 256, (64, 2)),
        (1536, 128, (0, 0)),
    ],
)
def test_forward_steps_of_four_gates_have_tiles_of_64_rows(plan, hidden, batch, tile):
    """Up to 1,024 units, while every tile gets a multiprocessor."""
    (found,) = plan({"hidden": hidden, "batch": batch, "gates": 4, "algorithm": "stepwise"})
    assert found.fused_step == tile


@pytest.mark.parametrize(
    "more",
    [
        {"size": 4},
        {"size": 8},
        {"hidden": 68},
        {"dense": False},
        {"chip": A100},
        {"recurrent": False},
        {"gates": 9},  # wgmma has no tile of so many columns
    ],
    ids=str,
)
def test_other_steps_are_not_fused(plan, more):
    fused, found = (plan({"hidden": 1024, "batch": 64, "algorithm": "stepwise", **m})[0] for m in ({}, more))
    assert fused.fused_step != (0, 0)
    assert found.fused_step == (0, 0)


@pytest.mark.parametrize("gates,forward", [(1, 64), (8, 64), (9, 0)])
def test_backward_steps_of_any_number_of_gates_are_fused(plan, gates, forward):
    problem = {"hidden": 512, "batch": 64, "gates": gates, "algorithm": "stepwise"}
    found = plan(problem, {**problem, "backward": True})
    assert [step.fused_step[0] for step in found] == [forward, 64]


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


def test_no_other_algorithm_runs_units_without_a_product(plan):
    for found in plan(
        *({"hidden": 64, "batch": 8, "recurrent": False, "algorithm": a} for a in ("cluster", "grid"))
    ):
        assert found.why_not == "takes cells with a product of h, got one without"


@pytest.mark.parametrize(
    "hidden,batch,backward,more,tile",
    [
        (1024, 1, False, {}, (1, 8, 2)),
        (1024, 2, False, {}, (4, 8, 2)),
        (1536, 5, False, {}, (8, 12, 1)),
        (2048, 16, False, {}, (16, 16, 1)),
        (4096, 16, False, {}, (16, 16, 1)),  # two blocks for each multiprocessor
        (1024, 16, True, {}, (16, 8, 8)),
        (2048, 16, True, {}, (16, 16, 4)),
        (768, 9, True, {"dense": False}, (16, 6, 8)),
        (68, 3, False, {"gates": 3}, (4, 1, 2)),
        (4, 1, True, {"chip": T4}, (1, 1, 1)),
        (1024, 1, True, {"chip": T4}, (1, 26, 2)),
        (512, 16, True, {"chip": T4}, (16, 13, 4)),
        (512, 16, True, {"chip": L4}, (16, 9, 4)),
        (64, 16, True, {"chip": (75, 64, False, 64 << 10)}, (16, 1, 4)),  # shared memory for no more parts
        (512, 8, False, {"gates": 64}, (8, 1, 1)),
        (512, 8, False, {"gates": 65}, (0, 0, 0)),
    ],
)
def test_the_tile_and_split_k_of_a_step_of_few_rows(plan, hidden, batch, backward, more, tile):
    problem = {"size": 4, "gates": 4, "algorithm": "stepwise", **more}
    (found,) = plan({"hidden": hidden, "batch": batch, "backward": backward, **problem})
    assert found.few_rows == tile


@directions
def test_steps_of_few_rows_cover_all_units_and_fit_a_block(plan, backward):
    sizes = [(hidden, gates) for hidden in (4, 60, 512, 1000, 2044, 6000) for gates in (1, 3, 4, 5, 9, 24)]
    asked = [
        {"hidden": hidden, "gates": gates, "batch": 8, "size": 4, "backward": backward, "chip": chip}
        for hidden, gates in sizes
        for chip in (H200, A100, L4, T4)
    ]
    for problem, found in zip(asked, plan(*({**p, "algorithm": "stepwise"} for p in asked)), strict=True):
        rows, units, split_k = found.few_rows
        warps = -(-units * (1 if backward else problem["gates"]) // 8) * split_k
        assert rows == 8 and 1 <= warps <= 8, problem
        assert split_k * 12 << 10 <= problem["chip"][3], problem


@pytest.mark.parametrize(
    "more",
    [
        {"size": 2},
        {"size": 8},
        {"hidden": 1022},
        {"batch": 17},
        {"batch": 9, "tf32": True},
        {"batch": 0},
        {"recurrent": False},
    ],
    ids=str,
)
def test_other_steps_are_not_of_few_rows(plan, more):
    problem = {"hidden": 1024, "batch": 8, "size": 4, "algorithm": "stepwise"}
    few, found = (plan({**problem, **m})[0] for m in ({}, more))
    assert few.few_rows != (0, 0, 0)
    assert found.few_rows == (0, 0, 0)


def test_only_stepwise_plans_have_a_fused_step(plan):
    for found in plan(*problems()):
        assert found.algorithm == "stepwise" or (found.fused_step, found.few_rows) == ((0, 0), (0, 0, 0))
