"""Programs of examples/ and a benchmark, in small sizes.

The others are run by test_cpp.py, test_distributed.py and test_elementwise.py.
"""

import importlib
import sys
from pathlib import Path

import forks
import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(program, *options, cwd):
    done = forks.run(ROOT / program, *options, "--device", "cpu", "--out", cwd, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_trains_our_lstm_as_torchs_and_an_own_cell(tmp_path):
    said = run("examples/char_lm.py", "--steps", "20", "--hidden-size", "32", cwd=tmp_path)
    assert "curves:      agree" in said and "two_speeds" in said
    assert (tmp_path / "loss.png").is_file() and (tmp_path / "char_lm.pt").is_file()


@pytest.fixture
def export(monkeypatch):
    """examples/export.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield importlib.import_module("export")
    for name in ("export", "char_lm"):
        del sys.modules[name]


@pytest.mark.parametrize("states", ["that differ", "that became one input"])
def test_an_exported_program_computes_what_the_model_does_or_is_found(export, monkeypatch, states):
    torch.manual_seed(0)
    model = export.CharLM(11, 24).eval().requires_grad_(False)
    if states == "that became one input":
        monkeypatch.setattr(export, "state", lambda model, batch: (torch.zeros(1, batch, 24),) * 2)
    difference = export.largest_difference(export.export(model).module(), model, "vocabulary!")
    if states == "that differ":
        assert difference <= export.TOLERANCE
    else:
        assert difference > 1000 * export.TOLERANCE


@pytest.mark.parametrize("op", ["lltm", "scan"])
def test_a_benchmark_writes_its_results_and_a_plot(op, tmp_path):
    run(f"benchmarks/{op}.py", "--quick", cwd=tmp_path)
    assert (tmp_path / f"results/cpu/{op}.json").is_file()
    assert (tmp_path / f"plots/cpu/{op}.png").is_file()
