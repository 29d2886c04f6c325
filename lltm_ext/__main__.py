"""The commands `python -m lltm_ext` and `lltm-ext`: doctor, selftest, bench."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import lltm_ext
from lltm_ext._install.bench import OPS
from lltm_ext._version import __version__


def parser() -> argparse.ArgumentParser:
    is_module = Path(sys.argv[0]).name == "__main__.py"
    parser = argparse.ArgumentParser(
        "python -m lltm_ext" if is_module else "lltm-ext", description="Checks and measures this lltm_ext."
    )
    parser.add_argument("--version", action="version", version=f"lltm_ext {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="doctor | selftest | bench")

    doctor = commands.add_parser("doctor", help="reports problems and the commands that fix them")
    doctor.add_argument("--json", action="store_true", help="machine-readable output")

    commands.add_parser("selftest", help="every op and algorithm against its reference, on every device here")

    bench = commands.add_parser("bench", help="our ops and their peers: tables and plots")
    bench.add_argument("op", nargs="?", choices=("all", *OPS), default="all")
    bench.add_argument("--out", type=Path, default=Path(), help="folder for results/ and plots/ (default: .)")
    bench.add_argument("--quick", action="store_true", help="few and small sizes: to see that it runs")
    bench.add_argument("--device", help="cuda, cuda:1 or cpu (default: the GPU, if there is one)")
    bench.add_argument("--seconds", help="time for each candidate of a comparison")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    if args.command is None:
        options.print_help()
        return 0
    if args.command == "selftest" and not hasattr(lltm_ext, "__version__"):
        importlib.reload(lltm_ext)  # it was imported without torch, for the doctor
    status: int = importlib.import_module(f"lltm_ext._install.{args.command}").main(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
