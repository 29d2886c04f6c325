"""Checks wheels before they are given away: `python tools/check_wheel.py dist/*.whl`."""

from __future__ import annotations

import email
import json
import sys
import zipfile
from pathlib import Path

LIMIT = 10 * 2**20
ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"


def problems(wheel: Path) -> list[str]:
    """What is wrong with the wheel; an empty list if nothing is."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata_file = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_file))
        if "lltm_ext/_build_record.json" not in names:
            return ["no build record"]
        record = json.loads(archive.read("lltm_ext/_build_record.json"))

    dist_info = metadata_file.rpartition("/")[0]
    versions = {
        "file name": wheel.name.split("-")[1],
        "METADATA": metadata["Version"],
        "record": record["version"],
    }
    torch_pin = f"torch=={'.'.join(record['torch'].split('.')[:2])}.*"
    ops = [folder.name for folder in SRC.iterdir() if (folder / f"{folder.name}.cpp").is_file()]
    wanted = {"lltm_ext/__init__.py", "lltm_ext/py.typed", f"{dist_info}/licenses/LICENSE"}
    wanted |= {f"lltm_ext/_C/{op}.{record['python']}.so" for op in ops} | {
        f"lltm_ext/_C/{op}.pyi" for op in ops
    }
    wanted |= {f"lltm_ext/benchmarks/{script.name}" for script in (ROOT / "benchmarks").glob("*.py")}
    wanted |= {f"lltm_ext/_src/{file.relative_to(SRC)}" for file in SRC.rglob("*") if file.is_file()}
    modules = {name for name in names if name.endswith(".so")}
    sources = {name for name in names if name.startswith("lltm_ext/_src/")}

    found = []
    if len(set(versions.values())) != 1:
        found.append(f"versions differ: {versions}")
    if torch_pin not in metadata.get_all("Requires-Dist", []):
        found.append(f"does not require {torch_pin}")
    if wheel.stat().st_size >= LIMIT:
        found.append(f"{wheel.stat().st_size} bytes, {LIMIT} are the limit")
    found += [f"lacks {name}" for name in sorted(wanted - names)]
    found += [f"holds {name}, a module of no op" for name in sorted(modules - wanted)]
    found += [f"holds {name}, which is not in src/" for name in sorted(sources - wanted)]
    found += [
        f"holds {name}, which does not belong there"
        for name in sorted(names - modules - sources)
        if not name.startswith(("lltm_ext/", f"{dist_info}/")) or name.endswith((".cpp", ".cu", ".h", ".cuh"))
    ]
    return found


def main(wheels: list[str]) -> int:
    if not wheels:
        print("no wheel to check", file=sys.stderr)
        return 2
    wrong = 0
    for wheel in map(Path, wheels):
        found = problems(wheel)
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MiB, " + ("; ".join(found) or "fine"))
        wrong += bool(found)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
