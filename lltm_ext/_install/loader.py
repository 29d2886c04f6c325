"""What `import lltm_ext` asks first: whether it needs torch now, and which modules to load."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from lltm_ext import _portable
from lltm_ext._install import build_record, toolchain


def is_module_run() -> bool:
    """Whether Python imports the package only to find its __main__, for `python -m lltm_ext`.

    Until `python -m` has found its module, sys.argv[0] is "-m". sys.orig_argv then ends in the module's name
    and its arguments: `-m lltm_ext doctor`, or `-mlltm_ext doctor`.
    """
    if sys.argv[:1] != ["-m"]:
        return False
    name = sys.orig_argv[-len(sys.argv)]
    return (name.partition("m")[2] if name.startswith("-") else name) == "lltm_ext"


def provide(torch: ModuleType) -> dict[str, Any]:
    """The record of the modules that will be imported. With LLTM_EXT_JIT=1, builds them if none fit.

    A module is not loaded before this check: with another torch it fails with undefined symbols, or worse.
    """
    version, cuda = str(torch.__version__), torch.version.cuda
    if os.environ.get("LLTM_EXT_JIT") == "1" and not build_record.modules_fit(version, cuda):
        from lltm_ext import jit

        try:
            build_record.use(jit.build())
        except toolchain.ToolchainError as error:
            raise ImportError(f"lltm_ext: {error}") from error
    record = build_record.check(version, cuda)
    if "portable" in record:
        _portable.load(torch)
    return record
