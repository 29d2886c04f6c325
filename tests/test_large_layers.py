"""The kernel of large layers forward, without a GPU: tests/emulation runs it on the CPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
