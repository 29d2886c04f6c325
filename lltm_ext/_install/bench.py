"""`python -m lltm_ext bench`: the scripts of benchmarks/, which a wheel contains as lltm_ext/benchmarks."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys

from lltm_ext._install import build_record, doctor

INSTALLED = build_record.PACKAGE / "benchmarks"
FOLDER = INSTALLED if INSTALLED.is_dir() else build_record.PACKAGE.parent / "benchmarks"
OPS = sorted(
    {script.stem for script in FOLDER.glob("*.py")}
    - {"harness", "ceiling", "overview", "pages", "tutorial_extension"}
)
NEEDED = ("matplotlib", "rich")  # the extra "bench" lists them, too


def main(args: argparse.Namespace) -> int:
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        command = doctor.with_this_python(f"python -m pip install {' '.join(missing)}")
        print(f"bench needs {' and '.join(missing)}. Run: {command}", file=sys.stderr)
        return 1
    options = {"--out": args.out.absolute(), "--device": args.device, "--seconds": args.seconds}
    given = [part for pair in options.items() if pair[1] is not None for part in map(str, pair)]
    # The scripts import harness.py and this lltm_ext.
    folders = [str(FOLDER), str(build_record.PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    failed = False
    for op in OPS if args.op == "all" else [args.op]:
        script = [sys.executable, str(FOLDER / f"{op}.py"), *given, *["--quick"] * args.quick]
        failed |= subprocess.run(script, env=env).returncode != 0
    return int(failed)
