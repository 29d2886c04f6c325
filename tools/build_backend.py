"""The build backend (PEP 517): setuptools', with the torch and CUDA compiler that an isolated build needs.

The modules fit only the torch that they were built against, so an isolated build gets the same torch as the
environment that the wheel is for, and the compiler of its CUDA version.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403 (build_wheel, build_sdist, build_editable, ...)

version = runpy.run_path(str(Path(__file__).resolve().parent.parent / "lltm_ext/_version.py"))

# 2.11 is the first that PyPI has with CUDA 13. If pip could fall back to an older one it would, and pair it
# with a compiler newer than any torch's. pip resolves what has an == first: pip 23 does not find the compiler
# of torch's CUDA if it has already chosen the newest one.
ANY_TORCH = "torch>=2.11,==2.*"

FIND_TORCH = """
import importlib.metadata, importlib.util, json, pathlib, runpy
spec = importlib.util.find_spec("torch")
build = spec and runpy.run_path(str(pathlib.Path(spec.origin).with_name("version.py")))
print(json.dumps(build and [importlib.metadata.version("torch"), build["cuda"]]))
"""


def installed_torch() -> tuple[str, str | None] | None:
    """(version, CUDA version) of the torch in the environment that the wheel is for; None if there is none.

    -E: build isolation works by PYTHON* variables. The file is read because importing torch takes seconds.
    """
    found = subprocess.run([sys.executable, "-E", "-c", FIND_TORCH], stdout=subprocess.PIPE, check=True)
    answer = json.loads(found.stdout)
    return answer and tuple(answer)


def get_requires_for_build_wheel(config_settings=None):
    torch, cuda = installed_torch() or (None, "13.0")
    # `===` asks for the same build; `==2.11.0` would also take a 2.11.0+cpu that some index offers.
    requires = [f"torch==={torch}" if torch else ANY_TORCH, "ninja"]
    # PyPI has no nvcc of CUDA 12, so the system's toolkit must be used.
    if cuda and int(version["major"](cuda)) >= 13 and os.environ.get("LLTM_EXT_CUDA") != "0":
        requires.append(f'{version["TOOLKIT"]}; platform_system == "Linux"')
    return requires


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings=None):
    return []
