"""python examples/lltm_in_steps/5_wheel/run.py"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from check import DEVICES, check, report, with_pointwise

with tempfile.TemporaryDirectory() as folder:
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source = shutil.copytree(Path(__file__).parent, f"{folder}/source")  # for setuptools' build folder
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", folder, source], check=True)
    (wheel,) = Path(folder).glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", f"{folder}/installed", wheel], check=True)
    sys.path.insert(0, f"{folder}/installed")  # before this script's folder, which has no module
    from lltm_wheel import pointwise

sequence = with_pointwise(pointwise)
for device in DEVICES:
    check(sequence, device)
report("5_wheel", sequence, DEVICES[-1])
