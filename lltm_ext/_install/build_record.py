"""The record of the build: whether its modules fit a torch, and the commands that install what does fit.

The modules link to torch's C++ library, whose ABI changes from minor to minor version.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from lltm_ext._version import major, minor, number

PACKAGE = Path(__file__).resolve().parent.parent
FILE = PACKAGE / "_build_record.json"


def read() -> dict[str, Any]:
    """What the modules or the portable library were built from and for: see build_native.Target.record."""
    if not FILE.is_file():
        raise ImportError(
            f"lltm_ext: {PACKAGE} is a source folder whose modules have not been built. "
            f"Run: {in_checkout()}  (or import from another folder, if you meant the installed lltm_ext)"
        )
    try:
        record: dict[str, Any] = json.loads(FILE.read_text())
    except ValueError as error:
        raise ImportError(f"lltm_ext: {FILE} can't be read ({error}). Run: {reinstall()}") from error
    return record


def use(folder: Path | str) -> None:
    """Imports the modules of lltm_ext._C from that folder and no other."""
    from lltm_ext import _C

    global FILE
    _C.__path__ = [str(Path(folder, "_C"))]
    FILE = Path(folder, FILE.name)


def modules_fit(torch: str, cuda: str | None) -> bool:
    """Whether there are native modules for the torch of this version and CUDA."""
    return FILE.is_file() and "portable" not in read() and _problem(read(), torch, cuda) is None


def check(torch: str, cuda: str | None) -> dict[str, Any]:
    """The record, if the modules fit the torch of this version and CUDA.

    Raises:
        ImportError: if they do not fit; names both builds and the command that fixes it.
    """
    record = read()
    if problem := _problem(record, torch, cuda):
        other_python = "portable" not in record and not _loads(record)
        remedy = (
            in_checkout() if is_checkout() else from_index(record) if other_python else install_torch(record)
        )
        raise ImportError(
            f"lltm_ext {record['version']} was built for {built_for(record)}; {problem}. "
            f"Run: {remedy}  (or have the next import build modules that fit: export LLTM_EXT_JIT=1)"
        )
    return record


def _problem(record: dict[str, Any], torch: str, cuda: str | None) -> str | None:
    """What the modules do not fit, or None."""
    if "portable" in record:
        fits = number(minor(torch)) >= number(record["torch"])
    elif not _loads(record):
        return f"this Python loads *{EXTENSION_SUFFIXES[0]}"
    else:
        same_cuda = record["cuda"] is None or major(record["cuda"]) == major(cuda or "")
        fits = same_cuda and minor(record["torch"]) == minor(torch)
    return None if fits else f"this is torch {describe(torch, cuda)}"


def _loads(record: dict[str, Any]) -> bool:
    """Whether this Python loads native modules of a build."""
    return f".{record['python']}.so" in EXTENSION_SUFFIXES


def built_for(record: dict[str, Any]) -> str:
    if "portable" in record:
        return f"torch {record['torch']} and newer, any Python"
    return f"torch {describe(record['torch'], record['cuda'])}, Python {record['python']}"


def describe(torch: str, cuda: str | None) -> str:
    return f"{torch} with CUDA {cuda}" if cuda else f"{torch} without CUDA"


# ---- commands ----------------------------------------------------------------------------------------------


def install_torch(record: dict[str, Any]) -> str:
    """The command that installs a torch that the modules fit."""
    if "portable" in record:
        return f'python -m pip install --upgrade "torch>={record["torch"]}"'
    torch = f'python -m pip install "torch=={minor(record["torch"])}.*"'
    if record["cuda"] is None:
        return torch
    cuda = record["cuda"].replace(".", "")
    return f"{torch} --force-reinstall --index-url https://download.pytorch.org/whl/cu{cuda}"


def from_index(record: dict[str, Any]) -> str:
    """The command that installs the wheel of the same lltm_ext for this Python."""
    version = record["version"].partition("+")[0]
    return f"python -m pip install --force-reinstall --no-deps lltm_ext=={version}"


def reinstall(record: dict[str, Any] | None = None) -> str:
    """The command that installs the same lltm_ext again, from where it came from, or from an index."""
    if is_checkout():
        return in_checkout()
    wheel = f"lltm_ext=={record['version']}" if record else "lltm_ext"
    for distribution in importlib.metadata.distributions(name="lltm_ext"):
        if Path(str(distribution.locate_file("lltm_ext"))) == PACKAGE:
            url = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
            path = url.removeprefix("file://")
            wheel = path if path and (path == url or Path(path).exists()) else wheel
            break
    return f"python -m pip install --force-reinstall --no-deps {shlex.quote(wheel)}"


def from_source(record: dict[str, Any], variable: str) -> str:
    """The command that builds the same lltm_ext here, with a variable of the build such as CXX=g++."""
    if is_checkout():
        return in_checkout(f"{variable} ")
    version = record["version"].partition("+")[0]
    pip = "python -m pip install --force-reinstall --no-deps --no-binary lltm_ext"
    return f"{variable} {pip} lltm_ext=={version}"


def is_checkout() -> bool:
    return (PACKAGE.parent / "setup.py").is_file()


def in_checkout(variable: str = "") -> str:
    return f"cd {PACKAGE.parent} && {variable}python setup.py develop"
