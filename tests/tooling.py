"""What the tests of builds, wheels and commands share."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOABI = sysconfig.get_config_var("SOABI")
CONSOLE_SCRIPT = "import sys, lltm_ext_cli; sys.exit(lltm_ext_cli.main())"
# Of a build that the tests make up.
RECORD = {
    "version": "0.1.0+cu130torch2.11",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "architectures": ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0+PTX"],
    "compiler": {"cxx": "c++ 12.2.0", "nvcc": "13.0.88"},
    "python": SOABI,
    "source": "0" * 40,
}
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


def purelib(python):
    """The folder that an interpreter's packages are in."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(python, "-c", ask, cwd=Path(python).parent).stdout.strip())


def write(file, text="", executable=False):
    """Writes a file, and makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    if executable:
        file.chmod(0o755)
    return file
