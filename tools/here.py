"""Prints the variables of a build for this machine, chosen as for a build at run time (lltm_ext/jit.py).

`make demo` and `make test` build so: kernels for all GPUs take minutes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import lltm_ext_cli

lltm_ext_cli.find_package()  # its __init__ loads the modules, which are yet to be built
from lltm_ext import jit  # noqa: E402

variables = jit.environment_for(*jit.wanted())
print(
    *(f"{name}={variables[name]}" for name in ("LLTM_EXT_CUDA", "TORCH_CUDA_ARCH_LIST") if name in variables)
)
