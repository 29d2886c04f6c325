"""Random calls of each public function (calls.py), each function in a process of its own."""

from pathlib import Path

import forks
import pytest

CALLS = Path(__file__).with_name("calls.py")
OPS = ["fake_quantize", "stochastic_round", "gemm", "lltm_cell", "lltm", "lstm", "gru"]
ALIKE = ["sigmoid", "relu", "round", "binarize", "LSTM", "GRU", "RNN"]  # they share their code


@pytest.mark.parametrize("op", OPS + ALIKE)
def test_random_calls_equal_the_reference_or_are_refused_by_name(op, device, tmp_path, pytestconfig):
    log, examples = tmp_path / "last_call", pytestconfig.getoption("--examples")
    examples //= 2 if op in ALIKE else 1
    options = ["--op", op, "--examples", examples, "--device", device, "--log", log]
    done = forks.run(CALLS, *options, cwd=tmp_path, timeout=3600)
    last = log.read_text() if log.exists() else "no call"
    assert done.returncode == 0, f"status {done.returncode}, the last call was {last}\n{done.stderr[-6000:]}"
