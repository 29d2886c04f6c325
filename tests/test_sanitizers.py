"""`make test-asan`: the modules really are instrumented."""

import os
import subprocess
import sys

import pytest

OVERREAD = """
import numpy, torch, lltm_ext
longer = numpy.lib.stride_tricks.as_strided(numpy.ones(1000), (1001,))
lltm_ext.sigmoid(torch.from_numpy(longer))
"""


@pytest.mark.skipif("libasan" not in os.environ.get("LD_PRELOAD", ""), reason="is for make test-asan")
def test_a_read_behind_the_end_is_reported_with_its_line(tmp_path):
    command = [sys.executable, "-c", OVERREAD]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "heap-buffer-overflow" in done.stderr
    assert "src/common/elementwise_cpu.h:" in done.stderr
