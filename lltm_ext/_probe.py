"""Tries drivers, imports and ops in another process, which they may kill or hang.

`ask` runs this file as a script, which writes each answer as a line of JSON as soon as it is known. Standard
library only, but for what it tries.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
SECONDS = 120  # for a question: a first import of torch from a slow disk takes tens


# ---- asking ------------------------------------------------------------------------------------------------


def ask(question: str, *arguments: Any, env: Mapping[str, str] = os.environ) -> tuple[list[Any], str | None]:
    """The answers, and how the process ended, if not well."""
    command = [sys.executable, __file__, question, json.dumps(arguments)]
    seconds = SECONDS * (5 if question == "calls" else 1)
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, env=dict(env))
        output, end = done.stdout, how_it_ended(done)
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"it does not end within {seconds} s"
    return [json.loads(line) for line in output.splitlines()], end


def how_it_ended(done: subprocess.CompletedProcess[bytes]) -> str | None:
    if done.returncode == 0:
        return None
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return ": ".join([f"it kills the process ({how})", *last])


def try_imports(modules: Mapping[str, str | None]) -> dict[str, str | None]:
    """The error of each import, or None. After one that kills the process, another process goes on."""
    found: dict[str, str | None] = {}
    while len(found) < len(modules) and not found.get("torch"):
        rest = {name: file for name, file in modules.items() if name == "torch" or name not in found}
        answers, end = ask("imports", sys.path, rest)
        found |= dict(answers)
        killer = next((name for name in modules if name not in found), None)
        if killer and not found.get("torch"):
            found[killer] = end
    return found


def try_ops(first: str, modules: str | None = None) -> dict[str, str | None]:
    """The error of one call of each op, or None. After one that kills the process, another process goes on.

    `first` goes to the front of sys.path; `modules` is the folder of modules that are not in the package.
    """
    found: dict[str, str | None] = {}
    while True:
        path = [first, *map(os.path.abspath, sys.path)]
        answers, end = ask("calls", path, modules, list(found))
        found |= dict(answers)
        if end is None:
            return found
        found[answers[-1][0] if answers else "import lltm_ext"] = end
        if not answers:
            return found


# ---- answering ---------------------------------------------------------------------------------------------


def driver() -> Iterator[dict[str, Any]]:
    """{"cuda": ..., "version": ...} of the driver, then {"name", "capability"} of each GPU; or {"error"}."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver
        return
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    yield {"cuda": f"{number.value // 1000}.{number.value % 1000 // 10}", "version": driver_version()}
    error = cuda.cuInit(0)
    if error:
        yield from [] if error == NO_DEVICE else [{"error": error_text(cuda, error)}]
        return
    cuda.cuDeviceGetCount(ctypes.byref(number))
    for ordinal in range(number.value):
        name, device = ctypes.create_string_buffer(256), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, len(name), device)
        capability = [ctypes.c_int(), ctypes.c_int()]
        for value, attribute in zip(capability, (MAJOR, MINOR), strict=True):
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        yield {"name": name.value.decode(), "capability": ".".join(str(value.value) for value in capability)}


def error_text(cuda: ctypes.CDLL, error: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(error, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} (CUDA error {error})"


def driver_version() -> str | None:
    """'580.65.06', as nvidia-smi has it."""
    version = ctypes.create_string_buffer(80)
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    management.nvmlInit_v2()
    management.nvmlSystemGetDriverVersion(version, len(version))
    return version.value.decode() or None


def imports(path: Sequence[str], modules: Mapping[str, str | None]) -> Iterator[tuple[str, str | None]]:
    """Imports one module after the other: each name, and its error or None. Stops at a torch that fails.

    Those with a file are loaded from it: through their package they would run its __init__ first.
    """
    sys.path[:] = path
    warnings.simplefilter("ignore")
    for name, file in modules.items():
        try:
            import_module(name, file)
        except BaseException as error:  # SystemExit too
            yield name, f"{type(error).__name__}: {error}"
            if name == "torch":
                return
        else:
            yield name, None


def import_module(name: str, file: str | None) -> None:
    if file is None:
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no module of this Python")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def calls(path: Sequence[str], modules: str | None, done: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """[name, None] before each call of an op, and [name, error] after one that fails."""
    sys.path[:] = path
    warnings.simplefilter("ignore")
    os.environ["LLTM_EXT_JIT"] = "0"  # what does not fit is an error here
    if modules is not None:
        importlib.import_module("lltm_ext_cli").find_package()
        importlib.import_module("lltm_ext._record").use(modules)
        importlib.reload(sys.modules["lltm_ext"])
    yield from importlib.import_module("lltm_ext._selftest").trial(done)


def main(question: str, arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints is not an answer
    questions: dict[str, Callable[..., Iterator[Any]]] = {
        "driver": driver,
        "imports": imports,
        "calls": calls,
    }
    for answer in questions[question](*json.loads(arguments)):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
