"""What the doctor asks in a process of its own, which a broken driver or module may kill or hang.

Run as a script, `python _probe.py QUESTION ARGUMENTS` (JSON): a line of JSON for each answer, as soon as it
is known. Standard library only; where it asks a module, it imports it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


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
    """Imports one module after the other: each name, and its error or None. It ends at a torch that fails.

    Those with a file are loaded from there: through their package they would bring its __init__ with them.
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


def main(question: str, arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints is no answer
    questions: dict[str, Callable[..., Iterator[Any]]] = {"driver": driver, "imports": imports}
    for answer in questions[question](*json.loads(arguments)):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
