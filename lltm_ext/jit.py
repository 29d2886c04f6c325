"""Builds the modules at run time, from the sources in the package.

With ``LLTM_EXT_JIT=1``, ``import lltm_ext`` calls :func:`build` if its own modules are for another torch,
CUDA or Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from lltm_ext._install import build_native, build_record, probe, toolchain
from lltm_ext._version import __version__


def build() -> Path:
    """Builds the modules for this torch, Python and GPU, unless that was done, and returns their folder.

    They stay in torch's cache of extensions (``TORCH_EXTENSIONS_DIR``). Of several processes one builds, and
    the others wait for it. ``LLTM_EXT_CUDA``, ``TORCH_CUDA_ARCH_LIST``, ``CUDA_HOME`` and ``MAX_JOBS`` work
    as for a wheel. By default the build is for the GPUs that are here, or for the CPU only if there is none.

    Raises:
        RuntimeError: if a build lacks something, a compiler fails or an op does not work; with what to do.
    """
    with_cuda, architectures = wanted()
    folder = _cache() / _name(with_cuda, architectures)
    if not _is_complete(folder):
        try:
            with _lock(folder):
                if not _is_complete(folder):  # another process may have built it meanwhile
                    _build_new(folder, environment_for(with_cuda, architectures))
        except OSError as error:  # The folder is read-only or its disk is full.
            raise toolchain.ToolchainError(
                f"{folder.parent} cannot be written ({error}). "
                "Run: export TORCH_EXTENSIONS_DIR=/tmp/torch_extensions  (or another folder of yours)"
            ) from error
    return folder


def wanted() -> tuple[bool, list[str]]:
    """Whether to build for CUDA, and the architectures: an empty list means all that a wheel has."""
    if not toolchain.wants_cuda(torch.__version__, torch.version.cuda):
        return False, []
    architectures = toolchain.named_architectures() or probe.gpus()
    return bool(architectures) or os.environ.get("LLTM_EXT_CUDA") == "1", architectures


def _cache() -> Path:
    """The cache of torch.utils.cpp_extension, which is not imported because it imports setuptools."""
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(user, "torch_extensions")
    return Path(root).expanduser().resolve() / "lltm_ext"


def _name(with_cuda: bool, architectures: list[str]) -> str:
    """Names everything that the modules depend on, so that no others are loaded."""
    src = build_native.source_folder()
    if not src.is_dir():
        raise toolchain.ToolchainError(f"there are no sources in {src}. Run: {build_record.reinstall()}")
    target = f"cuda{torch.version.cuda}-{'_'.join(architectures) or 'all'}" if with_cuda else "cpu"
    python, source = sysconfig.get_config_var("SOABI"), toolchain.source_revision(src)[:12]
    return f"{__version__}-torch{torch.__version__}-{target}-{python}-{source}"


def _is_complete(folder: Path) -> bool:
    """Whether a build is there, with no module missing or changed."""
    try:
        return bool(json.loads((folder / build_record.FILE.name).read_text())["modules"] == _digests(folder))
    except (OSError, ValueError, KeyError):
        return False


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("_C/*.so")}


def _lock(folder: Path) -> AbstractContextManager[Any]:
    """Lets one process in at a time. The operating system releases the lock of a process that is killed."""
    lock = FileLock(f"{folder}.lock")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        _log("another process is building the modules; waiting for it")
        return lock.acquire()


def environment_for(with_cuda: bool, architectures: list[str]) -> dict[str, str]:
    """The variables of the build. Raises a ToolchainError if something that it needs is missing."""
    toolchain.check_host()
    if not with_cuda:
        return os.environ | {"LLTM_EXT_CUDA": "0"}
    assert torch.version.cuda is not None
    cuda = toolchain.find_cuda(torch.version.cuda)
    if architectures and not toolchain.named_architectures():
        architectures = toolchain.architectures_of(architectures, cuda.nvcc)
    return os.environ | {"LLTM_EXT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": ";".join(architectures)}


def _build_new(folder: Path, environment: dict[str, str]) -> None:
    """Builds next to `folder` and renames it at the end, so that a killed build leaves no `folder`."""
    start = time.monotonic()
    cpu_only = environment["LLTM_EXT_CUDA"] == "0" and torch.version.cuda is not None
    reason = "LLTM_EXT_CUDA=0, or no GPU is here and TORCH_CUDA_ARCH_LIST names none"
    why = f" for the CPU only ({reason})" if cpu_only else ""
    _log(f"building the modules for torch {torch.__version__}{why}, once, into {folder}")
    for left in folder.parent.glob(f"{folder.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{folder.name}.", suffix=".part", dir=folder.parent, ignore_cleanup_errors=True
    ) as part:
        package = Path(part, "lltm_ext")
        _compile(part, environment, Path(f"{folder}.log"))
        build_native.try_modules(str(build_record.PACKAGE.parent), str(package))
        _add_digests(package)
        shutil.rmtree(folder, ignore_errors=True)  # it may be damaged
        package.rename(folder)
    _log(f"built in {time.monotonic() - start:.0f} s")


# This runs in another process, because torch and setuptools read the environment when they are imported.
_BUILD = """
import sys, lltm_ext_cli
lltm_ext_cli.find_package()
from lltm_ext._install import build_native
build_native.into(sys.argv[1])
"""


def _compile(folder: str, environment: dict[str, str], log: Path) -> None:
    """Builds into a folder. Prints the progress and writes all output to the log."""
    path = os.pathsep.join([str(build_record.PACKAGE.parent), *map(os.path.abspath, sys.path)])
    with (
        log.open("w", encoding="utf-8") as written,
        subprocess.Popen(
            [sys.executable, "-c", _BUILD, folder],
            cwd=folder,
            env=environment | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                written.write(line)
                if line.startswith("lltm_ext: "):
                    _log(line.removeprefix("lltm_ext: ").rstrip())
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8").splitlines() or ["no output"]
        error = next((line.strip() for line in lines if "error: " in line.lower()), lines[-1])
        remedy = "export MAX_JOBS=1  (memory was too little)" if "Killed" in error else f"less {log}"
        raise toolchain.ToolchainError(f"the modules did not build: {error}. Run: {remedy}")


def _add_digests(package: Path) -> None:
    file = package / build_record.FILE.name
    record = json.loads(file.read_text()) | {"modules": _digests(package)}
    file.write_text(json.dumps(record, indent=2) + "\n")


def _log(message: str) -> None:
    print(f"lltm_ext: {message}", file=sys.stderr, flush=True)
