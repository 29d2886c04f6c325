"""The kernel of large layers: on the CPU, where tests/emulation runs it, and whole layers on a GPU.

(Cell by cell: test_custom_cell.py.)
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import lltm_ext

ROOT = Path(__file__).parents[1]
EMULATION = ROOT / "tests" / "emulation"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
# As in test_persistent_kernels.py, but -O1: the program's products take longer than its compilation.
FLAGS = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")


def test_the_kernel_computes_what_a_loop_over_the_steps_does(tmp_path):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "large_layers"
    includes = [f"-I{path}" for path in (EMULATION, ROOT / "src")]  # the emulation replaces some headers
    subprocess.run([COMPILER, *FLAGS, *includes, EMULATION / "large_layers.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("batch,hidden", [(256, 1024), (70, 1536), (1100, 512)])
def test_both_directions_are_those_of_two_layers(batch, hidden):
    options = {"device": "cuda", "dtype": torch.float16}
    both = lltm_ext.LSTM(24, hidden, bidirectional=True, **options)
    x = torch.randn(9, batch, 24, **options)
    output, (h, c) = both(x)
    for i, direction in enumerate(("", "_reverse")):
        alone = lltm_ext.LSTM(24, hidden, **options)
        alone.load_state_dict({name: both.state_dict()[name + direction] for name in alone.state_dict()})
        expected, states = alone(x.flip(0) if direction else x)
        expected = expected.flip(0) if direction else expected
        found = output[..., i * hidden : (i + 1) * hidden], h[i : i + 1], c[i : i + 1]
        assert all(map(torch.equal, found, (expected, *states))), direction
