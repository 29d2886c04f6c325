"""The process that probe.py asks: it writes each answer as a line of JSON at once, before it may die.

It is run as a script, and uses only the standard library, except for what it tries.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def driver() -> Iterator[dict[str, Any]]:
    """Yields {"version", "cuda"} of the driver, then {"gpus"} of {"name", "capability"}; or {"error"}."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # There is no driver.
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
    yield {"gpus": [gpu(cuda, ordinal) for ordinal in range(number.value)]}


def gpu(cuda: ctypes.CDLL, ordinal: int) -> dict[str, str]:
    name, device, value = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in (MAJOR, MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(str(value.value))
    return {"name": name.value.decode(), "capability": ".".join(capability)}


def driver_version() -> str | None:
    """The driver's version as nvidia-smi gives it, such as '580.65.06'."""
    version = ctypes.create_string_buffer(80)
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    management.nvmlInit_v2()
    management.nvmlSystemGetDriverVersion(version, len(version))
    return version.value.decode() or None


def steps(path: Sequence[str], modules: str | None) -> Iterator[tuple[str, str | None]]:
    """Yields (name, None) before a step, (name, error) if it fails. Ends at a failed import."""
    sys.path[:] = path
    warnings.simplefilter("ignore")
    os.environ["LLTM_EXT_JIT"] = "0"  # Modules that do not fit are an error here.
    importlib.import_module("lltm_ext_cli").find_package()
    if modules is not None:
        importlib.import_module("lltm_ext._install.build_record").use(modules)
    (folder,) = importlib.import_module("lltm_ext._C").__path__
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    ops = sorted(file.name.removesuffix(suffix) for file in Path(folder).glob(f"*{suffix}"))
    for name in ("torch", *(f"lltm_ext._C.{op}" for op in ops), "lltm_ext"):
        yield name, None
        try:
            if name == "lltm_ext":  # A reload runs its __init__, which find_package left out.
                importlib.reload(sys.modules[name])
            else:
                importlib.import_module(name)
        except BaseException as error:  # SystemExit is one, too
            yield name, f"{type(error).__name__}: {error}"
            return
    yield from importlib.import_module("lltm_ext._install.selftest").trial()


def main(question: str, arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a module prints is not an answer.
    for answer in globals()[question](*json.loads(arguments)):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
