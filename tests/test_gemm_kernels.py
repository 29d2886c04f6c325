"""The kernels of gemm that need no instructions of Hopper, on the CPU (tests/emulation)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).parents[1]
EMULATION = ROOT / "tests" / "emulation"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
# As in test_persistent_kernels.py.
FLAGS = ("-std=c++17", "-Og", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_the_kernels_compute_every_sum_in_every_layout(tmp_path):
    program = tmp_path / "gemm"
    includes = [f"-I{path}" for path in (EMULATION, ROOT / "src")]  # the emulation replaces some headers
    subprocess.run([COMPILER, *FLAGS, *includes, EMULATION / "gemm.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
