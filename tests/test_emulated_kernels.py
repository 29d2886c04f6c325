"""The kernels of scan, of gemm without instructions of Hopper, and of steps of rows, on the CPU."""

import subprocess

import pytest
from test_persistent_kernels import COMPILER, EMULATION, FLAGS, ROOT

pytestmark = pytest.mark.compiles


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("op", ["gemm", "rows", "scan"])
def test_the_kernels_compute_what_a_loop_does_in_every_layout(op, tmp_path):
    program = tmp_path / op
    includes = [f"-I{path}" for path in (EMULATION, ROOT / "src")]  # the emulation replaces some headers
    subprocess.run([COMPILER, *FLAGS, *includes, EMULATION / f"{op}.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
