"""The kernel of scan, without a GPU: tests/emulation runs it on the CPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).parents[1]
EMULATION = ROOT / "tests" / "emulation"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
# As in test_persistent_kernels.py, whose emulation this is.
FLAGS = ("-std=c++17", "-Og", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_the_kernel_computes_what_a_loop_over_the_steps_does(tmp_path):
    program = tmp_path / "scan"
    includes = [f"-I{EMULATION}", f"-I{ROOT / 'src'}"]  # the emulation first: it replaces some headers
    subprocess.run([COMPILER, *FLAGS, *includes, EMULATION / "scan.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
