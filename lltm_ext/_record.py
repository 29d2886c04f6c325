"""The record of the build, and the check that this torch is the one that the modules were built for.

The modules link to torch's C++ library, whose ABI changes from minor to minor version: loaded beside
another torch they die of undefined symbols, or worse. So `import lltm_ext` comes here first.
"""

from __future__ import annotations

import json
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

from lltm_ext import _portable

PACKAGE = Path(__file__).resolve().parent
FILE = PACKAGE / "_build_record.json"


def read() -> dict[str, Any]:
    """What the modules were built from and for: see `record` in _build.py."""
    if not FILE.is_file():
        raise ImportError(
            f"lltm_ext: {PACKAGE} is a source folder whose modules have not been built. "
            f"Run: cd {PACKAGE.parent} && python setup.py develop  "
            "(or import from another folder, if you meant the installed lltm_ext)"
        )
    record: dict[str, Any] = json.loads(FILE.read_text())
    return record


def provide(torch: ModuleType) -> dict[str, Any]:
    """The record of modules that fit; else, with LLTM_EXT_JIT=1, of some built now; or the portable one's."""
    try:
        return check(torch)
    except ImportError:
        if os.environ.get("LLTM_EXT_JIT") != "1":
            if _portable.fits(torch):
                return _portable.provide(torch)
            raise
    from lltm_ext import _toolchain, jit

    try:
        jit.use(jit.build())
    except _toolchain.ToolchainError as error:
        raise ImportError(f"lltm_ext: {error}") from error
    return check(torch)


def check(torch: ModuleType) -> dict[str, Any]:
    """The record, or an ImportError that says what was built for, what is here and which command mends it."""
    record = read()
    if f".{record['python']}.so" not in EXTENSION_SUFFIXES:
        raise ImportError(_message(record, f"this Python loads *{EXTENSION_SUFFIXES[0]}"))
    built, here = record["torch"], str(torch.__version__)
    if _minor(built) != _minor(here) or _major(record["cuda"]) not in (None, _major(torch.version.cuda)):
        raise ImportError(_message(record, f"this is {_named(here, torch.version.cuda)}"))
    return record


def _message(record: dict[str, Any], here: str) -> str:
    built = f"{_named(record['torch'], record['cuda'])}, Python {record['python']}"
    return (
        f"lltm_ext {record['version']} was built for {built}; {here}. Run: {_remedy(record)}  "
        "(or have the next import build modules that fit: export LLTM_EXT_JIT=1)"
    )


def _remedy(record: dict[str, Any]) -> str:
    """A source folder is rebuilt for the torch that is here; a wheel wants the torch it was built for."""
    if (PACKAGE.parent / "setup.py").is_file():
        return f"cd {PACKAGE.parent} && python setup.py develop"
    return torch_command(record)


def torch_command(record: dict[str, Any]) -> str:
    """Installs a torch that the modules fit."""
    torch = f'python -m pip install "torch=={_minor(record["torch"])}.*"'
    if record["cuda"] is None:
        return torch
    cuda = record["cuda"].replace(".", "")
    return f"{torch} --force-reinstall --index-url https://download.pytorch.org/whl/cu{cuda}"


def _named(torch: str, cuda: str | None) -> str:
    return f"torch {torch} with CUDA {cuda}" if cuda else f"torch {torch} without CUDA"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _major(cuda: str | None) -> str | None:
    return cuda.split(".")[0] if cuda else None
