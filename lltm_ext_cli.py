"""The command `lltm-ext`. It is not in the package, whose import loads torch, which may be broken."""

from __future__ import annotations

import importlib.util
import sys


def find_package() -> None:
    """Makes lltm_ext's modules importable without running its __init__; importlib.reload runs that."""
    if "lltm_ext" not in sys.modules:
        spec = importlib.util.find_spec("lltm_ext")
        assert spec is not None
        sys.modules["lltm_ext"] = importlib.util.module_from_spec(spec)


def main() -> int:
    find_package()
    from lltm_ext.__main__ import main

    return main()
