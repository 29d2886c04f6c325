"""`python -m lltm_ext selftest` and `bench` run what they list, and report failures."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import forks
import pytest
import torch
from tooling import CONSOLE_SCRIPT

import lltm_ext
from lltm_ext import __main__
from lltm_ext._install import bench, build_record, selftest

CPU = torch.device("cpu")
ONLY_ON_SOME_GPUS = ("elementwise, made now", ", cluster", ", grid")


def run_selftest(capsys):
    status = selftest.main(argparse.Namespace())
    return status, capsys.readouterr().out


@pytest.fixture(autouse=True)
def _cache(monkeypatch):
    monkeypatch.setenv("LLTM_EXT_CACHE", "")  # which a selftest sets; so that it is as before


@pytest.fixture
def only(monkeypatch):
    """Rows by name, on the CPU."""

    def choose(*names):
        rows = [check for check in selftest.checks() if check.name in names]
        monkeypatch.setattr(selftest, "checks", lambda: rows)
        monkeypatch.setattr(selftest, "devices", lambda: [CPU])

    return choose


def test_the_module_runs_the_selftest(only, capsys):
    only("relu")
    assert __main__.main(["selftest"]) == 0
    assert "4 passed" in capsys.readouterr().out


def test_this_installation_passes(tmp_path):
    """By the console script, which has to import the package again for it."""
    done = forks.run("-c", CONSOLE_SCRIPT, "selftest", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    passed, failed, not_run = map(int, re.findall(r"(\d+) (?:passed|failed|can't run here)", done.stdout))
    assert failed == 0
    assert "FAILED" not in done.stdout
    # A cell of the table for each row, dtype and device.
    cells = {(check.name, dtype) for check in selftest.checks() for dtype in check.dtypes}
    everywhere = {(name, dtype) for name, dtype in cells if not name.endswith(ONLY_ON_SOME_GPUS)}
    devices = len(list(selftest.devices()))
    assert passed + not_run == devices * len(cells)
    assert passed >= devices * len(everywhere)
    if devices == 1:
        assert passed == len(everywhere)


def test_what_can_not_run_is_listed(capsys, only):
    only("elementwise, made now", "lltm, grid", "lstm, grid")
    status, text = run_selftest(capsys)
    assert status == 0
    dtypes = "float64, float32, float16, bfloat16"
    assert f"- elementwise, made now: its formula is compiled for CUDA devices ({dtypes})" in text
    assert f"- lltm, grid: algorithm 'grid' needs a CUDA device ({dtypes})" in text
    assert "\n0 passed, 0 failed, 12 can't run here, " in text


@pytest.mark.parametrize("seen,reason", [(False, "torch sees none"), (True, "is built for the CPU only")])
def test_the_reason_for_testing_no_gpu_is_printed(capsys, monkeypatch, seen, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setattr(build_record, "read", lambda: {"version": "0.1.0+cpu", "cuda": None})
    assert list(selftest.devices()) == [CPU]
    assert reason in capsys.readouterr().out


def test_every_op_has_a_row():
    functions = {name for name in lltm_ext.__all__ if isinstance(getattr(lltm_ext, name), FunctionType)}
    functions = {name for name in functions if not name.endswith(("_", "_algorithm", "_torch", "_xlstm"))}
    functions.remove("spike")  # it consists of torch's ops
    assert functions <= {check.name.partition(",")[0] for check in selftest.checks()}


class Doubled(torch.autograd.Function):
    """relu, with twice its gradient."""

    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return torch.relu(input)

    @staticmethod
    def backward(ctx, grad_output):
        return 2 * grad_output * (ctx.saved_tensors[0] > 0)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (torch.sigmoid, "relative L2 error of the result "),
        (lambda x: torch.relu(x) * float("nan"), "relative L2 error of the result inf, expected at most"),
        (Doubled.apply, "relative L2 error of the gradient 1.0e+00, expected at most"),
        (lambda x: torch.relu(x)[1:], "ValueError: expected shape [37, 65], got [36, 65]"),
        (lambda x: None, "TypeError: "),
    ],
    ids=["result", "NaN", "gradient", "shape", "error"],
)
def test_a_wrong_op_fails(capsys, monkeypatch, only, wrong, message):
    only("relu")
    assert run_selftest(capsys)[0] == 0
    monkeypatch.setattr(lltm_ext, "relu", wrong)
    status, text = run_selftest(capsys)
    assert status == 1
    assert f"FAILED relu: {message}" in text
    assert "\n0 passed, 4 failed, 0 can't run here, " in text


def test_values_that_are_rounded_to_nearest_are_not_right_on_average(capsys, monkeypatch, only):
    only("stochastic_round")
    monkeypatch.setattr(lltm_ext, "stochastic_round", lambda x, dtype: x.to(dtype))
    status, text = run_selftest(capsys)
    assert status == 1
    assert "\n0 passed, 2 failed" in text


def test_an_error_of_the_planner_is_no_reason_to_skip(monkeypatch):
    (row,) = [check for check in selftest.checks() if check.name == "lltm, grid"][:1]

    def broken(*args, **how):
        raise RuntimeError("lltm_algorithm: no")

    monkeypatch.setattr(lltm_ext, "lltm_algorithm", broken)
    cell = selftest.examine([row], torch.float32, CPU)
    assert cell == (None, ("RuntimeError: lltm_algorithm: no",), ())


# ---- bench -------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
import harness, lltm_ext
print(json.dumps([harness.here, sys.argv[1:]]))
sys.exit("--quick" in sys.argv)
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "harness.py").write_text("here = __name__")
    for name in ("gemm", "lltm"):
        (folder / f"{name}.py").write_text(SCRIPT)
    monkeypatch.setattr(bench, "FOLDER", folder)
    monkeypatch.setattr(bench, "OPS", ["gemm", "lltm"])
    return tmp_path


def run_bench(*arguments):
    return __main__.main(["bench", *arguments])


def test_bench_knows_the_scripts_that_came_with_the_package():
    expected = "cells elementwise gemm gemm_sizes libraries lltm recurrence rl scan sizes sizes_gru_rnn"
    assert " ".join(bench.OPS) == expected


def test_bench_runs_every_script_and_writes_here(scripts, monkeypatch, capfd):
    monkeypatch.chdir(scripts)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # without the folder of a script
    assert run_bench() == 0
    calls = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert calls == [["harness", ["--out", str(scripts)]]] * 2


def test_bench_passes_its_arguments_on(scripts, capfd):
    arguments = ("--out", "/somewhere", "--device", "cpu", "--seconds", "0.5")
    assert run_bench("gemm", *arguments) == 0
    assert json.loads(capfd.readouterr().out) == ["harness", list(arguments)]


def test_bench_fails_where_a_script_does(scripts):
    assert run_bench("gemm", "--quick") == 1


def test_bench_names_missing_packages(monkeypatch, capsys):
    monkeypatch.setattr(bench, "NEEDED", ("json", "absent_plots", "absent_tables"))
    assert run_bench() == 1
    message = capsys.readouterr().err.replace(sys.executable, "python")
    needed = "absent_plots and absent_tables"
    assert message == f"bench needs {needed}. Run: python -m pip install absent_plots absent_tables\n"


@pytest.mark.skipif(not (Path(__file__).parent.parent / "pyproject.toml").is_file(), reason="reads it")
def test_bench_needs_what_its_extra_lists():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    listed = re.search(r"^bench = (\[.*\])$", text, re.MULTILINE)
    assert listed is not None and json.loads(listed[1]) == list(bench.NEEDED)


def lltm_ext_command(python, *arguments):
    done = subprocess.run([sys.executable, *python, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    "python,name", [(["-m", "lltm_ext"], "python -m lltm_ext"), (["-c", CONSOLE_SCRIPT], "lltm-ext")]
)
def test_the_command_says_its_version_and_without_arguments_what_it_does(python, name):
    assert lltm_ext_command(python, "--version") == f"lltm_ext {lltm_ext.__version__.partition('+')[0]}\n"
    assert lltm_ext_command(python).startswith(f"usage: {name} ")
