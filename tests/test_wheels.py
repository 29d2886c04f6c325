"""The wheels of a release: which one pip takes from an index of them, what is published with them."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tooling import ROOT, load, purelib, run, write

HERE = f"cp{sys.version_info.major}{sys.version_info.minor}"


check_wheel, wheels = load("tools/check_wheel.py"), load("tools/wheels.py")  # wheels imports check_wheel


def make_wheel(wheelhouse, torch, cuda, version="0.1.0", python=HERE):
    """A wheel with the metadata of ours and no modules."""
    version = f"{version}+cu{cuda.replace('.', '')}torch{torch}"
    tag = f"{python}-{python}-manylinux_2_17_x86_64"
    abi = f"cpython-{python.removeprefix('cp')}-x86_64-linux-gnu"
    record = {"version": version, "torch": f"{torch}.0", "cuda": cuda, "python": abi}
    return write_wheel(wheelhouse, tag, record, f"torch=={torch}.*")


def make_portable_wheel(wheelhouse, cuda="13.0"):
    record = {"version": "0.1.0", "torch": "2.10", "cuda": cuda, "python": "any", "portable": True}
    return write_wheel(wheelhouse, "py3-none-manylinux_2_17_x86_64", record, "torch>=2.10")


def write_wheel(wheelhouse, tag, record, requires):
    version, cuda = record["version"], record["cuda"]
    record |= {"compiler": {"cxx": "g++ (GCC) 13.3.0", "nvcc": cuda and f"{cuda}.88"}}
    info = f"lltm_ext-{version}.dist-info"
    files = {
        "lltm_ext/_build_record.json": json.dumps(record),
        f"{info}/METADATA": f"Metadata-Version: 2.4\nName: lltm_ext\nVersion: {version}\n"
        f"License-Expression: BSD-3-Clause\nRequires-Python: >=3.10\nRequires-Dist: {requires}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n",
    }
    rows = [f"{name},sha256={url_sha256(text.encode())},{len(text)}\n" for name, text in files.items()]
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"])
    wheel = wheelhouse / f"lltm_ext-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def url_sha256(content):
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


# ---- the index ---------------------------------------------------------------------------------------------


class User:
    """An environment with only the metadata of a torch, and pip with only the index it is given."""

    def __init__(self, folder):
        self.python = folder / "bin/python"
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.site = purelib(self.python)

    def has_torch(self, version):
        info = self.site / f"torch-{version}.dist-info"
        write(info / "METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        write(info / "RECORD")

    def pip_install(self, *arguments):
        env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    def installed(self):
        return {info.stem for info in self.site.glob("*.dist-info")}


@pytest.fixture(scope="module")
def user_site(tmp_path_factory):
    return User(tmp_path_factory.mktemp("user") / "venv")


@pytest.fixture
def user(user_site):
    """With nothing installed."""
    for entry in user_site.site.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return user_site


@pytest.fixture
def wheelhouse(tmp_path):
    """Three builds of torch, one in two versions; another Python; the portable wheel. Published."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    for torch_, cuda in (("2.11", "13.0"), ("2.11", "12.8"), ("2.15", "13.2")):
        make_wheel(folder, torch_, cuda)
    make_wheel(folder, "2.11", "13.0", python="cp39")
    make_wheel(folder, "2.15", "13.2", version="0.2.0")
    make_portable_wheel(folder)
    wheels.publish(folder)
    return folder


@pytest.mark.parametrize(
    "index,torch_,takes",
    [
        ("index/cu130/torch2.11", "2.11.0+cu130", "0.1.0+cu130torch2.11"),
        ("index/cu130/torch2.11", "2.11.1", "0.1.0+cu130torch2.11"),
        ("index/cu128/torch2.11", "2.11.0+cu128", "0.1.0+cu128torch2.11"),
        ("index/cu132/torch2.15", "2.15.0", "0.2.0+cu132torch2.15"),
        ("index", "2.10.0+cu128", "0.1.0"),
        ("index", "2.15.0+cpu", "0.1.0"),
    ],
)
def test_pip_takes_the_wheel_for_the_installed_torch_and_keeps_torch(user, wheelhouse, index, torch_, takes):
    user.has_torch(torch_)
    done = user.pip_install("lltm_ext", "--index-url", f"{wheelhouse.as_uri()}/{index}")
    assert done.returncode == 0, done.stderr
    assert user.installed() == {f"torch-{torch_}", f"lltm_ext-{takes}"}


@pytest.mark.parametrize(
    "index,torch_,reason",
    [
        ("index/cu130/torch2.11", "2.15.0+cu132", "torch==2.11.*"),
        ("index", "2.9.1", "torch>=2.10"),
        ("index/cu130/torch2.11", "2.11.0", "HASHES"),  # The file differs from the index.
    ],
)
def test_pip_refuses_a_wheel_that_does_not_fit_and_keeps_torch(user, wheelhouse, index, torch_, reason):
    user.has_torch(torch_)
    if reason == "HASHES":
        (wheel,) = wheelhouse.glob(f"*cu130torch2.11-{HERE}-*.whl")
        wheel.write_bytes(wheel.read_bytes() + b"\0")
    done = user.pip_install("lltm_ext", "--index-url", f"{wheelhouse.as_uri()}/{index}")
    assert done.returncode != 0
    assert reason in done.stderr
    assert user.installed() == {f"torch-{torch_}"}


def test_an_index_lists_its_project_and_drops_removed_wheels(wheelhouse):
    assert '<a href="lltm-ext/">' in (wheelhouse / "index/cu132/torch2.15/index.html").read_text()
    for wheel in wheelhouse.glob("*cu132*"):
        wheel.unlink()
    wheels.publish(wheelhouse)
    pages = sorted(str(page.relative_to(wheelhouse)) for page in wheelhouse.glob("index/**/lltm-ext"))
    natives = ["index/cu128/torch2.11/lltm-ext", "index/cu130/torch2.11/lltm-ext"]
    assert pages == [*natives, "index/lltm-ext"]
    assert not list(wheelhouse.glob("*cu132*"))


# ---- checksums and bills of materials ----------------------------------------------------------------------


def test_sha256sum_agrees_with_the_checksums(wheelhouse):
    if shutil.which("sha256sum") is None:
        pytest.skip("no sha256sum here")
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=wheelhouse).returncode == 0
    listed = {line.split("  ")[1] for line in (wheelhouse / "SHA256SUMS").read_text().splitlines()}
    assert listed == {file.name for file in wheelhouse.iterdir() if file.suffix in (".whl", ".json")}
    (wheelhouse / sorted(listed)[0]).write_text("changed")
    assert subprocess.run(check, cwd=wheelhouse, capture_output=True).returncode == 1


def test_the_bill_of_materials_is_cyclonedx_and_names_torch_and_the_compilers(wheelhouse):
    pytest.importorskip("cyclonedx", reason="validates with cyclonedx-python-lib")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    wheel = next(wheelhouse.glob("*cu128*.whl"))
    text = wheel.with_name(f"{wheel.name}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    ours = bill["metadata"]["component"]
    assert ours["purl"] == "pkg:pypi/lltm-ext@0.1.0%2Bcu128torch2.11"
    assert ours["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    assert ours["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    assert [(part["name"], part["version"]) for part in bill["components"]] == [("torch", "2.11.0")]
    tools = {(tool["name"], tool["version"]) for tool in bill["metadata"]["tools"]["components"]}
    assert tools >= {("cxx", "g++ (GCC) 13.3.0"), ("nvcc", "12.8.88")}


def test_the_bill_of_a_portable_wheel_accepts_a_newer_torch(wheelhouse):
    (file,) = wheelhouse.glob("*-py3-none-*.cdx.json")
    bill = json.loads(file.read_text())
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/lltm-ext@0.1.0"
    (part,) = bill["components"]
    assert (part["name"], part["version"], part["description"]) == ("torch", "2.10", "2.10 or newer")


def test_publishing_again_changes_nothing(wheelhouse):
    def everything():
        return {file: file.read_bytes() for file in wheelhouse.rglob("*") if file.is_file()}

    before = everything()
    wheels.publish(wheelhouse)
    assert everything() == before


# ---- the check ---------------------------------------------------------------------------------------------


def changed_wheel(wheel, name, old, new, added):
    """What the check says of a wheel with another name and changed texts."""
    changed = wheel.parent / name
    with zipfile.ZipFile(wheel) as good, zipfile.ZipFile(changed, "w") as bad:
        for file in good.namelist():
            bad.writestr(file, good.read(file).replace(old, new))
        bad.writestr(added, "")
        bad.writestr("lltm_ext/_src/", "")  # auditwheel lists folders, too
    return "\n".join(check_wheel.problems(changed))


def test_the_check_names_another_build_and_files_that_are_missing_or_strange(tmp_path):
    name = f"lltm_ext-0.1.0+cu128torch2.11-{HERE}-cp399-manylinux_2_28_x86_64.whl"
    wheel = make_wheel(tmp_path, "2.11", "13.0")
    found = changed_wheel(wheel, name, b"Dist: torch==", b"Dist: torch>=", "tests/test_relu.py")
    assert "record differ: " in found
    assert "does not require torch==2.11.*" in found
    for file in ("lltm_ext/_C/sigmoid.pyi", "lltm_ext/_src/sigmoid/sigmoid.cpp", "lltm_ext/relu.py"):
        assert f"lacks {file}" in found
    assert "licenses/LICENSE" in found
    assert re.findall("contains.*", found) == ["contains tests/test_relu.py, which does not belong there"]


def test_the_check_names_a_portable_wheel_that_is_for_one_python_or_torch(tmp_path):
    wheel = make_portable_wheel(tmp_path)
    found = check_wheel.problems(wheel)
    assert [problem for problem in found if not problem.startswith("lacks ")] == []
    assert [problem for problem in found if problem.endswith(".so")] == ["lacks lltm_ext/_C/portable.so"]
    name = f"lltm_ext-0.1.0-{HERE}-{HERE}-manylinux_2_17_x86_64.whl"
    changed = changed_wheel(wheel, name, b"torch>=2.10", b"torch==2.11.*", "lltm_ext/_C/relu.so")
    assert f"{HERE} in the file name, any in the record" in changed
    assert "does not require torch>=2.10" in changed
    assert "contains lltm_ext/_C/relu.so, which does not belong there" in changed


# ---- errors ------------------------------------------------------------------------------------------------


def error(*arguments):
    with pytest.raises(SystemExit) as caught:
        wheels.main([str(argument) for argument in arguments])
    return str(caught.value)


def test_an_interpreter_that_is_missing_or_does_not_run_is_named(tmp_path, monkeypatch):
    build = ("build", "3.99-torch2.11", "--sdist", tmp_path / "lltm_ext-0.1.0.tar.gz")
    assert error(*build) == "wheels: [Errno 2] No such file or directory: 'python3.99'"
    write(tmp_path / "python3.99", "#!/bin/sh\nexit 127\n", executable=True)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert error(*build).startswith("wheels: Command '['python3.99', '-m', 'venv', ")


@pytest.mark.parametrize("recipe", ["3.12", "3.12-2.11", "torch2.11", "2.7-torch2.11", "portable"])
def test_a_name_without_python_or_torch_is_refused(tmp_path, recipe):
    message = error("build", recipe, "--sdist", tmp_path / "lltm_ext-0.1.0.tar.gz")
    expected = "expected a wheel such as 3.12-torch2.11 or portable-torch2.11"
    assert message == f"wheels: {expected}, got {recipe!r}"


def test_no_wheel_and_a_wheel_for_cpus_are_not_published(tmp_path):
    assert error("publish", tmp_path) == f"wheels: {tmp_path} has no wheel"
    wheel = make_portable_wheel(tmp_path, cuda=None)
    assert error("publish", tmp_path) == f"wheels: {wheel.name} is for CPUs only"


# ---- a wheel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("python,portable", [("portable", "1"), (HERE.replace("cp3", "3."), "0")])
def test_the_wheel_that_is_named_is_built(tmp_path, monkeypatch, python, portable):
    """Whatever the environment has. The steps that would take minutes are replaced."""
    installed, built, pythons = [], [], set()

    def steps(*command, cwd=ROOT, **variables):
        if "venv" in command:
            pythons.add(command[0])
            Path(command[-1]).mkdir()
        elif "install" in command:
            installed.extend(command)
        elif "wheel" in command:
            Path(command[-2]).mkdir()
            (Path(command[-2]) / "a.whl").touch()
            built.append(variables)

    monkeypatch.setenv("LLTM_EXT_PORTABLE", "1")
    monkeypatch.setattr(wheels, "run", steps)
    monkeypatch.setattr(check_wheel, "main", lambda wheels: 0)
    monkeypatch.setattr(wheels, "repair", lambda wheel, folder, platform: wheel)
    monkeypatch.setattr(wheels, "test", lambda *arguments: None)
    made = wheels.build(f"{python}-torch2.11", tmp_path / "lltm_ext-0.1.0.tar.gz", [], "auto", "")
    assert made == tmp_path / "a.whl"
    assert made.is_file()
    assert "torch==2.11.*" in installed
    assert built == [{"LLTM_EXT_PORTABLE": portable}]
    assert pythons == {sys.executable if portable == "1" else f"python{python}"}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_builds_the_wheels_of_the_list_for_which_pypi_has_a_compiler():
    listed = json.loads((ROOT / "tools/wheels.json").read_text())
    # A `make wheels WHEELS=…` that runs this test passes its variables on.
    passed_on = ("MAKE", "MFLAGS", "WHEELS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(passed_on)}
    commands = subprocess.run(
        ["make", "-n", "wheels"], cwd=ROOT, env=env, capture_output=True, text=True
    ).stdout
    for entry in listed:
        if not entry["cuda"].startswith("12."):
            assert f"tools/wheels.py build {entry['wheel']} --sdist" in commands
