"""The portable library: the same kernels on torch's stable C ABI, for every Python and every newer torch.

A native module is built for one torch and one Python. A portable wheel has ``_C/portable.so`` instead: all
its ops in one file, independent of Python. What the stable ABI cannot express is in Python:
gradients, autocast, fake tensors and the types of errors in _portable_rules.py, the raw bindings in
_portable_bindings.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "_C" / "portable.so"
OLDEST_TORCH = "2.10"

in_use = False

IN_PYTHON = ("stochastic_round",)  # the stable ABI has no random generators


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
        module = ModuleType(f"{_C.__name__}.{op}", f"lltm_ext._C.{op}, of the portable library.")
        vars(module).update(bindings(stub))
        sys.modules[module.__name__] = module
        setattr(_C, op, module)
    in_use = True
