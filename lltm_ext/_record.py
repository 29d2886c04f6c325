"""The record of the build, and the check that the modules fit this torch, before any is loaded.

The modules link to torch's C++ library, whose ABI changes from minor to minor version: with another torch
they fail with undefined symbols, or worse.
"""

from __future__ import annotations

import json
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

from lltm_ext import _portable
from lltm_ext._version import major, minor, number

PACKAGE = Path(__file__).resolve().parent
FILE = PACKAGE / "_build_record.json"


def read() -> dict[str, Any]:
    """What the modules or the portable library were built from and for: see write_record in _build.py."""
    if not FILE.is_file():
        raise ImportError(
            f"lltm_ext: {PACKAGE} is a source folder whose modules have not been built. "
            f"Run: cd {PACKAGE.parent} && python setup.py develop  "
            "(or import from another folder, if you meant the installed lltm_ext)"
        )
    record: dict[str, Any] = json.loads(FILE.read_text())
    return record


def provide(torch: ModuleType) -> dict[str, Any]:
    """The record of the modules that will be imported. With LLTM_EXT_JIT=1, builds them if none fit."""
    if os.environ.get("LLTM_EXT_JIT") == "1" and not modules_fit(torch):
        from lltm_ext import _toolchain, jit

        try:
            use(jit.build())
        except _toolchain.ToolchainError as error:
            raise ImportError(f"lltm_ext: {error}") from error
    record = check(torch)
    if "portable" in record:
        _portable.load(torch)
    return record


def use(folder: Path | str) -> None:
    """Imports the modules of lltm_ext._C from that folder and no other."""
    from lltm_ext import _C

    global FILE
    _C.__path__ = [str(Path(folder, "_C"))]
    FILE = Path(folder, FILE.name)


def modules_fit(torch: ModuleType) -> bool:
    """Whether there are native modules for this torch."""
    return FILE.is_file() and "portable" not in read() and _problem(read(), torch) is None


def check(torch: ModuleType) -> dict[str, Any]:
    """The record, if the modules fit this torch.

    Raises:
        ImportError: if they do not fit; names both builds and the command that fixes it.
    """
    record = read()
    if problem := _problem(record, torch):
        checkout = (PACKAGE.parent / "setup.py").is_file()
        remedy = f"cd {PACKAGE.parent} && python setup.py develop" if checkout else torch_command(record)
        raise ImportError(
            f"lltm_ext {record['version']} was built for {built_for(record)}; {problem}. "
            f"Run: {remedy}  (or have the next import build modules that fit: export LLTM_EXT_JIT=1)"
        )
    return record


def _problem(record: dict[str, Any], torch: ModuleType) -> str | None:
    """What the modules do not fit, or None."""
    built, cuda, here = record["torch"], record["cuda"], minor(str(torch.__version__))
    if "portable" in record:
        fits = number(here) >= number(built)
    elif f".{record['python']}.so" not in EXTENSION_SUFFIXES:
        return f"this Python loads *{EXTENSION_SUFFIXES[0]}"
    else:
        fits = minor(built) == here and (cuda is None or major(cuda) == major(torch.version.cuda or ""))
    return None if fits else f"this is torch {describe(str(torch.__version__), torch.version.cuda)}"


def built_for(record: dict[str, Any]) -> str:
    if "portable" in record:
        return f"torch {record['torch']} and newer, any Python"
    return f"torch {describe(record['torch'], record['cuda'])}, Python {record['python']}"


def torch_command(record: dict[str, Any]) -> str:
    """Installs a torch that the modules fit."""
    if "portable" in record:
        return f'python -m pip install --upgrade "torch>={record["torch"]}"'
    torch = f'python -m pip install "torch=={minor(record["torch"])}.*"'
    if record["cuda"] is None:
        return torch
    cuda = record["cuda"].replace(".", "")
    return f"{torch} --force-reinstall --index-url https://download.pytorch.org/whl/cu{cuda}"


def describe(torch: str, cuda: str | None) -> str:
    return f"{torch} with CUDA {cuda}" if cuda else f"{torch} without CUDA"
