"""Whether this process was started as `python -m lltm_ext`."""

from __future__ import annotations

import sys


def is_program() -> bool:
    """Whether Python imports the package only to find its __main__.

    Until `python -m` has found its module, sys.argv[0] is "-m". sys.orig_argv then ends in the module's name
    and its arguments: `-m lltm_ext doctor`, or `-mlltm_ext doctor`.
    """
    if sys.argv[:1] != ["-m"]:
        return False
    name = sys.orig_argv[-len(sys.argv)]
    return (name.partition("m")[2] if name.startswith("-") else name) == "lltm_ext"
