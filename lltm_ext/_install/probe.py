"""Asks another process what may kill it or hang: the driver, imports, calls of ops. child.py answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lltm_ext._version import number

CHILD = Path(__file__).with_name("child.py")
SECONDS = 300  # A first import of torch from a slow disk takes tens of seconds.


def run_in_child(question: str, *arguments: Any) -> tuple[list[Any], str | None]:
    """Returns the answers, and how the process ended if it failed."""
    # -B writes no bytecode, which does not belong in the wheel that the folder may become.
    command = [sys.executable, "-B", str(CHILD), question, json.dumps(arguments)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS)
        output, end = done.stdout, how_it_ended(done)
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"it does not end within {SECONDS} s"
    return [json.loads(line) for line in output.splitlines()], end


def how_it_ended(done: subprocess.CompletedProcess[bytes]) -> str | None:
    if done.returncode == 0:
        return None
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return ": ".join([f"it kills the process ({how})", *last])


def driver() -> dict[str, Any]:
    """The driver's `version`, `cuda` and `gpus`, and an `error`; each may be missing."""
    answers, end = run_in_child("driver")
    found = {name: value for answer in answers for name, value in answer.items()}
    return found | {"error": f"asking the driver failed: {end}"} if end else found


def gpus() -> list[str]:
    """The compute capabilities of the GPUs that this process may use.

    Another process asks, because after a process has used the driver, its forks cannot use CUDA.
    """
    found = driver()
    listed = [] if "error" in found else found.get("gpus", [])
    return sorted({gpu["capability"] for gpu in listed}, key=number)


def try_package(site: str, modules: str | None = None) -> dict[str, str | None]:
    """The error of each step, or None: imports of torch, the modules and lltm_ext, then a call of each op.

    `site` is the folder of lltm_ext; `modules` that of other modules than its own. Nothing is tried after an
    import that fails, or a step that kills the process.
    """
    answers, end = run_in_child("steps", [site, *map(os.path.abspath, sys.path)], modules)
    found: dict[str, str | None] = dict(answers)
    if end is not None:
        found[answers[-1][0] if answers else "lltm_ext"] = end
    return found
