"""Checks wheels before they are published: `python tools/check_wheel.py dist/*.whl`."""

from __future__ import annotations

import email
import json
import runpy
import sys
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
RECORD = "lltm_ext/_build_record.json"
version = runpy.run_path(str(ROOT / "lltm_ext/_version.py"))


def contents(wheel: Path) -> tuple[dict[str, Any], Message, set[str]]:
    """Its build record, its METADATA and the names of its files."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}  # auditwheel lists folders
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return json.loads(archive.read(RECORD)), email.message_from_bytes(archive.read(metadata)), names


def problems(wheel: Path) -> list[str]:
    """What is wrong with the wheel; an empty list if nothing is."""
    record, metadata, names = contents(wheel)
    (dist_info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    portable = "portable" in record
    torch_minor = version["minor"](record["torch"])
    required = f"torch>={torch_minor}" if portable else f"torch=={torch_minor}.*"
    label = "" if portable else version["label"](record["torch"], record["cuda"])
    *_, abi, _ = wheel.stem.split("-")
    fits = record["python"].startswith("any" if abi == "none" else f"cpython-{abi.removeprefix('cp')}-")
    versions = (wheel.name.split("-")[1], metadata["Version"], record["version"])
    checks = {
        f"the versions of file name, METADATA and record differ: {versions}": len(set(versions)) == 1,
        f"the version {record['version']} is not of the record's build, {label}": label
        == versions[2].partition("+")[2],
        f"the ABI is {abi} in the file name, {record['python']} in the record": fits,
        f"does not require {required}": required in metadata.get_all("Requires-Dist", []),
    }

    ops = [folder.name for folder in SRC.iterdir() if (folder / f"{folder.name}.cpp").is_file()]
    modules = ["portable.so"] if portable else [f"{op}.{record['python']}.so" for op in ops]
    wanted = {f"lltm_ext/_C/{name}" for name in [*modules, *(f"{op}.pyi" for op in ops)]}
    wanted |= {f"{dist_info}/{name}" for name in ("licenses/LICENSE", "entry_points.txt")}
    wanted |= {"lltm_ext/py.typed", "lltm_ext_cli.py", RECORD}
    wanted |= {str(file.relative_to(ROOT)) for file in (ROOT / "lltm_ext").rglob("*.py")}
    wanted |= {f"lltm_ext/benchmarks/{file.name}" for file in (ROOT / "benchmarks").glob("*.py")}
    wanted |= {f"lltm_ext/_src/{file.relative_to(SRC)}" for file in SRC.rglob("*") if file.is_file()}
    extra = {name for name in names - wanted if not name.startswith(f"{dist_info}/")}
    return [
        *(problem for problem, fine in checks.items() if not fine),
        *(f"lacks {name}" for name in sorted(wanted - names)),
        *(f"contains {name}, which does not belong there" for name in sorted(extra)),
    ]


def main(wheels: list[str]) -> int:
    if not wheels:
        print("no wheel to check", file=sys.stderr)
        return 2
    found = {wheel: problems(wheel) for wheel in map(Path, wheels)}
    for wheel, wrong in found.items():
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MiB, " + ("; ".join(wrong) or "fine"))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
