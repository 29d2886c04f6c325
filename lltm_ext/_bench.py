"""`python -m lltm_ext bench`: the scripts of benchmarks/, which a wheel contains as lltm_ext/benchmarks."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys

from lltm_ext import _doctor, _record

INSTALLED = _record.PACKAGE / "benchmarks"
FOLDER = INSTALLED if INSTALLED.is_dir() else _record.PACKAGE.parent / "benchmarks"
OPS = sorted({script.stem for script in FOLDER.glob("*.py")} - {"harness", "ceiling", "tutorial_extension"})
NEEDED = ("matplotlib", "rich")  # the extra "bench"


def main(args: argparse.Namespace) -> int:
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        command = _doctor.with_this_python(f"python -m pip install {' '.join(missing)}")
        print(f"bench needs {' and '.join(missing)}. Run: {command}", file=sys.stderr)
        return 1
    ops = OPS if args.op == "all" else [args.op]
    statuses = [run(op, flags(args)) for op in ops]
    return int(any(statuses))  # negative after a signal


def flags(args: argparse.Namespace) -> list[str]:
    given = {"--out": args.out.absolute(), "--device": args.device, "--seconds": args.seconds}
    quick = ["--quick"] if args.quick else []
    return quick + [str(part) for pair in given.items() if pair[1] is not None for part in pair]


def run(op: str, flags: list[str]) -> int:
    """In its own process, which finds harness.py and this lltm_ext."""
    path = [str(FOLDER), str(_record.PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    return subprocess.run([sys.executable, str(FOLDER / f"{op}.py"), *flags], env=env).returncode
