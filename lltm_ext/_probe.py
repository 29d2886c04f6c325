"""Tries drivers, imports and ops in another process, which they may kill or hang.

`ask` runs this file as a script, which writes each answer as a line of JSON at once. It uses only
the standard library, except for what it tries.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
SECONDS = 120  # the limit: a first import of torch from a slow disk takes tens of seconds


# ---- asking ------------------------------------------------------------------------------------------------


def ask(question: str, *arguments: Any) -> tuple[list[Any], str | None]:
    """The answers, and how the process ended if it failed."""
    # -B: the folder may become a wheel, in which bytecode does not belong.
    command = [sys.executable, "-B", __file__, question, json.dumps(arguments)]
    seconds = SECONDS * (5 if question == "calls" else 1)
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds)
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
    """The error of each import, or None. `modules` maps names to files, or to None. Stops if torch fails."""
    return _try_each("imports", sys.path, modules)


def try_ops(first: str, modules: str | None = None) -> dict[str, str | None]:
    """The error of one call of each op, or None.

    `first` goes to the front of sys.path; `modules` is the folder of modules that are not in the package.
    """
    return _try_each("calls", [first, *map(os.path.abspath, sys.path)], modules)


def _try_each(question: str, *arguments: Any) -> dict[str, str | None]:
    """The answers, each of [name, error or None]. After a name that kills the process, another continues."""
    found: dict[str, str | None] = {}
    while True:
        answers, end = ask(question, *arguments, found)
        found |= dict(answers)
        if end is not None:
            found[answers[-1][0] if answers else "import lltm_ext"] = end
        if end is None or not answers:
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
    if error := cuda.cuInit(0):
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(error, ctypes.byref(text))
        if error != NO_DEVICE:
            yield {"error": f"{(text.value or b'unknown error').decode()} (CUDA error {error})"}
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


def imports(
    path: Sequence[str], modules: Mapping[str, str | None], done: Mapping[str, str | None]
) -> Iterator[tuple[str, str | None]]:
    """[name, None] before each import, and [name, error] after one that fails.

    A module with a file is loaded from it: through its package, the package's __init__ would run first.
    """
    sys.path[:] = path
    warnings.simplefilter("ignore")
    for name, file in modules.items():
        if name in done and name != "torch":  # which the other modules need
            continue
        error = done.get(name)
        if error is None:
            yield name, None
            try:
                import_module(name, file)
            except BaseException as raised:  # SystemExit too
                error = f"{type(raised).__name__}: {raised}"
                yield name, error
        if error and name == "torch":
            return


def import_module(name: str, file: str | None) -> None:
    if file is None:
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def calls(
    path: Sequence[str], modules: str | None, done: Mapping[str, str | None]
) -> Iterator[tuple[str, str | None]]:
    """[name, None] before each call of an op, and [name, error] after one that fails."""
    sys.path[:] = path
    warnings.simplefilter("ignore")
    os.environ["LLTM_EXT_JIT"] = "0"  # modules that do not fit are an error here
    if modules is not None:
        importlib.import_module("lltm_ext_cli").find_package()
        importlib.import_module("lltm_ext._record").use(modules)
        importlib.reload(sys.modules["lltm_ext"])
    yield from importlib.import_module("lltm_ext._selftest").trial(done)


def main(question: str, arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints is not an answer
    for answer in globals()[question](*json.loads(arguments)):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
