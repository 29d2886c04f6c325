"""The build backend (PEP 517): setuptools', and the torch and CUDA compiler that an isolated build needs.

`pip install .` builds in an environment of its own. The modules fit only the torch that they were built
against, so that environment gets the very torch of the one that the wheel is for, and the compiler beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from setuptools.build_meta import *  # noqa: F403 (build_wheel, build_sdist, build_editable, ...)

# torch's own pin of cuda-toolkit makes this the compiler of torch's CUDA version. PyPI has no nvcc of CUDA
# 12: there a system toolkit must do.
CUDA_COMPILER = 'cuda-toolkit[nvcc,crt,nvvm,cccl]; platform_system == "Linux"'

# 2.11 is the first that PyPI has with CUDA 13. If pip could fall back to an older one it would, and pair it
# with a compiler newer than any torch's.
ANY_TORCH = "torch>=2.11"

ASK_FOR_TORCH = """
import importlib.metadata, importlib.util, json, pathlib, runpy
spec = importlib.util.find_spec("torch")
if spec is None:
    print("null")
else:
    build = runpy.run_path(str(pathlib.Path(spec.origin).with_name("version.py")))
    print(json.dumps([importlib.metadata.version("torch"), build["cuda"]]))
"""


def installed_torch() -> tuple[str, str | None] | None:
    """(version, CUDA version) of the torch in the environment that the wheel is for; None if there is none.

    Build isolation is made of PYTHON* variables, and `-E` passes them over. Importing torch takes seconds.
    """
    answer = subprocess.run(
        [sys.executable, "-E", "-c", ASK_FOR_TORCH], capture_output=True, text=True, check=True
    )
    found = json.loads(answer.stdout)
    return found and tuple(found)


def get_requires_for_build_wheel(config_settings=None):
    torch = installed_torch()
    # `===`: the same build, where `==2.11.0` would also take a 2.11.0+cpu that some index offers.
    requires = [f"torch==={torch[0]}" if torch else ANY_TORCH, "ninja"]
    has_pypi_compiler = torch is None or (torch[1] is not None and int(torch[1].split(".")[0]) >= 13)
    if has_pypi_compiler and os.environ.get("LLTM_EXT_CUDA") != "0":
        requires.append(CUDA_COMPILER)
    return requires


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings=None):
    return []
