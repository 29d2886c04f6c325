"""The portable library: the same kernels on torch's stable C ABI, for every Python and every newer torch.

A native module is built for one torch and one Python. A portable wheel has ``_C/portable.so`` instead: all
its ops in one file, independent of Python. What the stable ABI cannot express is in Python:
gradients, autocast, fake tensors and the types of errors in _portable_rules.py, the raw bindings in
_portable_bindings.py. LACKING names the ops that it does not have, and why.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "_C" / "portable.so"
OLDEST_TORCH = "2.10"

in_use = False

LACKING = {
    "custom_cell": "NVRTC, which compiles users' cells, is another in each CUDA",
    "elementwise": "NVRTC, which compiles its formulas, is another in each CUDA",
    "fake_quantize": "its host code is not on the stable ABI yet",
    "stochastic_round": "the stable ABI of torch 2.10 has no random generators",
}


def load(torch: ModuleType) -> None:
    """Loads the library, which registers its ops, and gives lltm_ext._C its modules."""
    global in_use
    from lltm_ext import _C

    if not LIBRARY.is_file():
        raise ImportError(
            f"lltm_ext lacks {LIBRARY}. Run: python -m pip install --force-reinstall --no-deps lltm_ext"
        )
    torch.ops.load_library(str(LIBRARY))
    from lltm_ext._portable_bindings import bindings

    for stub in sorted((PACKAGE / "_C").glob("*.pyi")):
        op = stub.stem
        if op in LACKING:
            continue
        module = ModuleType(f"{_C.__name__}.{op}", f"lltm_ext._C.{op}, of the portable library.")
        vars(module).update(bindings(stub))
        sys.modules[module.__name__] = module
        setattr(_C, op, module)
    for package in (_C, sys.modules["lltm_ext"]):
        vars(package)["__getattr__"] = lacks
    in_use = True


def lacks(name: str) -> NoReturn:
    """The __getattr__ of lltm_ext and lltm_ext._C: says why an op is missing, under any of its names."""
    for op, why in LACKING.items():
        if name.removesuffix("Function").lower() == op.replace("_", "") or name == op:
            raise ImportError(
                f"lltm_ext: the portable library, which is in use here, lacks {name}, because {why}. "
                "A wheel for this torch and Python has it, and so have modules that the next import "
                "builds: export LLTM_EXT_JIT=1"
            )
    raise AttributeError(f"module 'lltm_ext' has no attribute {name!r}")
