"""Checks wheels before they are given away: `python tools/check_wheel.py dist/*.whl`."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import json
import sys
import zipfile
from pathlib import Path

LIMIT = 10_000_000
ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
RECORDS = {"lltm_ext/_build_record.json", "lltm_ext/_portable_record.json"}


def problems(wheel: Path) -> list[str]:
    """What is wrong with the wheel; an empty list if nothing is."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}  # auditwheel lists folders
        metadata_file = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_file))
        records = sorted(names & RECORDS)
        if len(records) != 1:
            return [f"holds {' and '.join(records)}" if records else "no build record"]
        record = json.loads(archive.read(records[0]))
        dist_info = metadata_file.rpartition("/")[0]
        found = unlike_its_record(archive, f"{dist_info}/RECORD")
        tags = email.message_from_bytes(archive.read(f"{dist_info}/WHEEL")).get_all("Tag", [])
        licence = f"{dist_info}/licenses/LICENSE"
        if licence in names and archive.read(licence) != (ROOT / "LICENSE").read_bytes():
            found.append("another LICENSE than the project's")

    versions = {
        "file name": wheel.name.split("-")[1],
        "METADATA": metadata["Version"],
        "record": record["version"],
    }
    portable = "portable" in record
    torch_minor = ".".join(record["torch"].split(".")[:2])
    required = f"torch>={torch_minor}" if portable else f"torch=={torch_minor}.*"
    ops = [folder.name for folder in SRC.iterdir() if (folder / f"{folder.name}.cpp").is_file()]
    wanted = {"lltm_ext/__init__.py", "lltm_ext/py.typed", licence}
    built = {"portable.so"} if portable else {f"{op}.{record['python']}.so" for op in ops}
    wanted |= {f"lltm_ext/_C/{name}" for name in built | {f"{op}.pyi" for op in ops}}
    wanted |= {f"lltm_ext/benchmarks/{script.name}" for script in (ROOT / "benchmarks").glob("*.py")}
    wanted |= {f"lltm_ext/_src/{file.relative_to(SRC)}" for file in SRC.rglob("*") if file.is_file()}
    modules = {name for name in names if name.endswith(".so")}
    sources = {name for name in names if name.startswith("lltm_ext/_src/")}

    if len(set(versions.values())) != 1:
        found.append(f"versions differ: {versions}")
    python, abi, platform = wheel.stem.split("-")[-3:]
    if set(tags) != {f"{python}-{abi}-{part}" for part in platform.split(".")}:
        found.append(f"the file name says {python}-{abi}-{platform}, WHEEL {' '.join(tags)}")
    if not record["python"].startswith("any" if abi == "none" else f"cpython-{abi.removeprefix('cp')}-"):
        found.append(f"the file name says {abi}, the record {record['python']}")
    if record["version"].partition("+")[2] != label(record):
        found.append(f"the version {record['version']} is of another build than the record, {label(record)}")
    if metadata["License-Expression"] != "BSD-3-Clause":
        found.append(f"its licence is {metadata['License-Expression']}")
    if required not in metadata.get_all("Requires-Dist", []):
        found.append(f"does not require {required}")
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


def label(record: dict[str, str]) -> str:
    """What a version says of the build: cu130torch2.11. The portable one's says nothing."""
    if "portable" in record:
        return ""
    if record["cuda"] is None:
        return "cpu"
    return f"cu{record['cuda'].replace('.', '')}torch{'.'.join(record['torch'].split('.')[:2])}"


def unlike_its_record(archive: zipfile.ZipFile, record: str) -> list[str]:
    """The files whose hash in RECORD is another, or that stand in one of the two alone."""
    rows = csv.reader(archive.read(record).decode().splitlines())
    listed = {name: hash_ for name, hash_, _ in rows if name != record}
    held = {}
    for name in archive.namelist():
        if name != record and not name.endswith("/"):
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest())
            held[name] = f"sha256={digest.decode().rstrip('=')}"
    differing = {name for name, _ in listed.items() ^ held.items()}
    return [f"{name} is not as RECORD says" for name in sorted(differing)]


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
