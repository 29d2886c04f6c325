"""What the tests of builds, wheels and commands share."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTROLLING = ("CUDA_HOME", "CUDA_PATH", "LLTM_EXT_", "TORCH_CUDA_ARCH_LIST", "PYTHON", "MAX_JOBS")


def load(path):
    """A script of the repository as a module, which others can import by its name."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command, cwd, fails=False, **variables):
    """Runs a command with none of the variables that control a build, except those given."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(CONTROLLING)} | variables
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    output = f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert (done.returncode != 0) == fails, output
    return done


def write(file, text="", executable=False):
    """Writes a file, and makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    if executable:
        file.chmod(0o755)
    return file
