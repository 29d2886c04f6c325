"""Tries the portable wheel with several torches and writes docs/matrix.md; `make matrix` calls it.

    python tools/matrix.py wheelhouse/lltm_ext-0.1.0-py3-none-….whl 2.10 2.11 2.12

Each torch gets a new environment, the wheel from a file, the selftest and the CPU tests of the ops.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from wheels import ROOT, environment, fail, run

PAGE = ROOT / "docs/matrix.md"
FILES = (
    *("sigmoid", "relu", "round", "gemm", "fake_quantize", "stochastic_round", "elementwise", "lltm_cell"),
    *("lltm", "lstm", "recurrence", "cells", "dispatcher"),
)
# In torch.compile and torch.export the versions differ most, and the tests take longest.
OPTIONS = ("-q", "-n", "2", "--dist", "loadfile", "-m", "not packaging and not compiles")
ASK = """import json, platform, torch
print(json.dumps([torch.__version__, torch.version.cuda, platform.python_version()]))"""
HEAD = "| torch | its CUDA | Python | selftest | tests of the ops on the CPU |\n|---|---|---|---|---|\n"


def row(wheel: Path, torch: str, python: str) -> str:
    with tempfile.TemporaryDirectory(prefix=f"torch{torch}-") as name:
        folder = Path(name)
        tools = environment(python, folder / "user")
        run(tools / "pip", "install", "-q", f"torch=={torch}.*", f"{wheel}[test]")
        version, cuda, of_python = json.loads(
            subprocess.check_output([tools / "python", "-c", ASK], cwd=folder)
        )
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        command = [tools / "python", "-m", "lltm_ext", "selftest"]
        selftest = subprocess.run(command, cwd=folder, env=env, capture_output=True)
        report, files = folder / "report.xml", [ROOT / f"tests/test_{name}.py" for name in FILES]
        command = [tools / "pytest", *OPTIONS, f"--junitxml={report}", "-p", "no:cacheprovider", *files]
        subprocess.run(command, cwd=folder, env=env, check=False)
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
        count = {what: int(suite.attrib[what]) for what in ("tests", "failures", "errors", "skipped")}
        failed = count["failures"] + count["errors"]
        passed = count["tests"] - failed - count["skipped"]
        verdict = "passes" if selftest.returncode == 0 else "**fails**"
        tests = f"{passed:,} pass" + (f", **{failed} fail**" if failed else "")
        return f"| {version} | {cuda or 'none'} | {of_python} | {verdict} | {tests} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("torch", nargs="+", help="versions such as 2.11")
    parser.add_argument("--python", default="python3")
    args = parser.parse_args()
    if not args.wheel.is_file():
        fail(f"{args.wheel} is no file")
    rows: list[str] = []
    for torch in args.torch:
        rows.append(row(args.wheel.resolve(), torch, args.python))
        PAGE.write_text(HEAD + "".join(sorted(rows)))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
