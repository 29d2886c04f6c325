"""`python -m lltm_ext doctor`: broken installations, with the message and the command that users get.

Most break a copy of the installed package, with an edited record and a torch of a few lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from lltm_ext import _doctor, _portable, _probe, _record, _toolchain
from lltm_ext._doctor import Facts, Finding, Gpu

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
SOABI = sysconfig.get_config_var("SOABI")
CONSOLE_SCRIPT = "import sys, lltm_ext_cli; sys.exit(lltm_ext_cli.main())"
RECORD: dict[str, Any] = {
    "version": "0.1.0+cu130torch2.11",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "architectures": ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0+PTX"],
    "compiler": {"cxx": "c++ 12.2.0", "nvcc": "13.0.88"},
    "python": SOABI,
    "source": "0" * 40,
}
INSTALL_TORCH = (
    '-m pip install "torch==2.11.*" --force-reinstall --index-url https://download.pytorch.org/whl/cu130'
)
REINSTALL = "-m pip install --force-reinstall --no-deps lltm_ext==0.1.0+cu130torch2.11"


class Site:
    """A folder with a copy of lltm_ext and a fake torch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.package, self.elsewhere = folder, folder / "lltm_ext", folder / "elsewhere"
        self.elsewhere.mkdir()
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(_record.PACKAGE, self.package, ignore=ignored)
        self.record()
        self.torch("2.11.0+cu130", "13.0")
        for stub in (self.package / "_C").glob("*.pyi"):
            if stub.stem != "relu":
                stub.unlink()
        self.module = self.package / f"_C/relu.{SOABI}.so"
        shutil.copy(_record.PACKAGE / "_C" / self.module.name, self.module)

    def record(self, **changed: Any) -> None:
        (self.package / "_build_record.json").write_text(json.dumps(RECORD | changed))

    def torch(self, version: str, cuda: str | None, code: str = "") -> None:
        (self.folder / "torch").mkdir(exist_ok=True)
        (self.folder / "torch/version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
        code = f"from torch import version\n__version__ = version.__version__\n{code}\n"
        (self.folder / "torch/__init__.py").write_text(code)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """With only the standard library and this folder: -S leaves out what is installed."""
        steering = ("CUDA_", "CXX", "LLTM_EXT_", "PYTHON")
        env = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=self.elsewhere,
            env=env | {"PYTHONPATH": str(self.folder)} | variables,
            capture_output=True,
            text=True,
        )

    def problems(self, **variables: str) -> list[dict[str, str]]:
        """The problems that the doctor reports; its exit status agrees."""
        done = self.run("-m", "lltm_ext", "doctor", "--json", **variables)
        assert done.stderr == ""
        found = json.loads(done.stdout)
        assert done.returncode == (1 if found["problems"] else 0)
        assert found["ok"] is not bool(found["problems"])
        return found["problems"]

    def problem(self, **variables: str) -> tuple[str, str]:
        """The only problem: its text, and its command without this Python's path."""
        (found,) = self.problems(**variables)
        return found["what"], found["command"].replace(f"{sys.executable} ", "")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    if _portable.in_use:
        pytest.skip("breaks a native module, and the portable library is in use")
    return Site(tmp_path)


# ---- broken installations ----------------------------------------------------------------------------------


def test_no_torch(site: Site) -> None:
    shutil.rmtree(site.folder / "torch")
    what, command = site.problem()
    assert what == f"torch is not installed for {sys.executable}"
    assert command == INSTALL_TORCH


def test_torch_of_another_minor_version(site: Site) -> None:
    site.torch("2.12.0+cu130", "13.0")
    what, command = site.problem()
    assert what.startswith("lltm_ext 0.1.0+cu130torch2.11 was built for torch 2.11.0+cu130 with CUDA 13.0")
    assert "; this is torch 2.12.0+cu130 with CUDA 13.0" in what
    assert command == INSTALL_TORCH


def test_torch_of_another_cuda_major_version(site: Site) -> None:
    site.torch("2.11.0+cu128", "12.8")
    what, command = site.problem()
    assert "; this is torch 2.11.0+cu128 with CUDA 12.8" in what
    assert command == INSTALL_TORCH


def test_a_cpu_torch_with_a_cuda_wheel(site: Site) -> None:
    site.torch("2.11.0+cpu", None)
    what, command = site.problem()
    assert "; this is torch 2.11.0+cpu without CUDA" in what
    assert command == INSTALL_TORCH


def test_modules_of_another_python(site: Site) -> None:
    site.record(python="cpython-39-x86_64-linux-gnu")
    what, _ = site.problem()
    assert "Python cpython-39-x86_64-linux-gnu; this Python loads" in what


@pytest.mark.parametrize(
    "code,error",
    [
        ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
        ("import os; os.abort()", "it kills the process (signal 6)"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_torch_that_does_not_import(site: Site, code: str, error: str) -> None:
    site.torch("2.11.0+cu130", "13.0", code)
    what, command = site.problem()
    assert what.startswith(f"torch in {site.folder}/torch does not import: {error}")
    assert command == INSTALL_TORCH


def test_half_a_torch(site: Site) -> None:
    (site.folder / "torch/version.py").unlink()
    what, command = site.problem()
    assert f"torch in {site.folder}/torch does not import: ImportError" in what
    assert command == INSTALL_TORCH


def test_a_missing_module(site: Site) -> None:
    site.module.unlink()
    assert site.problem() == (f"lltm_ext lacks {site.module}", REINSTALL)


def test_a_missing_portable_library(site: Site) -> None:
    site.record(portable=True, torch="2.10", python="any")
    assert site.problem() == (f"lltm_ext lacks {site.package}/_C/portable.so", REINSTALL)


def test_a_damaged_module(site: Site) -> None:
    site.module.write_bytes(b"\0" * 100)
    what, command = site.problem()
    assert what.startswith("lltm_ext._C.relu does not import: ImportError: ")
    assert command == REINSTALL


def test_a_module_without_torchs_libraries(site: Site) -> None:
    """The module is the real one, the torch is fake."""
    what, command = site.problem()
    assert what.startswith("lltm_ext._C.relu does not import: ImportError: lib")
    assert "cannot open shared object file" in what
    assert command == INSTALL_TORCH


@needs_cc
def test_a_module_that_kills_the_process(site: Site) -> None:
    source = site.folder / "abort.c"
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) static void die() { abort(); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", site.module, source], check=True)
    what, command = site.problem()
    assert what.startswith("lltm_ext._C.relu does not import: it kills the process (signal 6)")
    assert command == REINSTALL


def test_after_a_module_that_kills_the_process_the_others_are_tried(tmp_path: Path) -> None:
    killer = tmp_path / "killer.py"
    killer.write_text("import os; os.abort()")
    found = _probe.try_imports({"json": None, "killer": str(killer), "csv": None, "absent": None})
    assert found["json"] is found["csv"] is None
    assert str(found["killer"]).startswith("it kills the process (signal 6)")
    assert found["absent"] == "ModuleNotFoundError: No module named 'absent'"


def test_a_module_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probe, "SECONDS", 2)
    hanging = tmp_path / "hanging.py"
    hanging.write_text("import time; time.sleep(60)")
    found = _probe.try_imports({"json": None, "hanging": str(hanging)})
    assert found == {"json": None, "hanging": "it does not end within 2 s"}


TRIAL = """
import os
def trial(done):
    for op in ("relu", "killer", "gemm", "wrong"):
        if op not in done:
            yield op, None
            if op == "killer":
                os.abort()
            if op == "wrong":
                yield op, "RuntimeError: wrong"
"""


def test_every_op_is_called_also_after_one_that_kills_the_process(tmp_path: Path) -> None:
    (tmp_path / "lltm_ext").mkdir()
    (tmp_path / "lltm_ext/__init__.py").touch()
    (tmp_path / "lltm_ext/_selftest.py").write_text(TRIAL)
    found = _probe.try_ops(str(tmp_path))
    assert found["relu"] is found["gemm"] is None
    assert str(found["killer"]).startswith("it kills the process (signal 6)")
    assert found["wrong"] == "RuntimeError: wrong"
    (tmp_path / "lltm_ext/__init__.py").write_text("import os; os.abort()")
    (call,) = _probe.try_ops(str(tmp_path))
    assert call == "import lltm_ext"


def test_an_op_that_kills_the_process_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    calls = {"relu on cpu": None, "gemm on cpu": "it kills the process (signal 6)", "round on cpu": "no"}
    status, text = doctor(machine(H200, calls=calls), capsys)
    assert status == 1
    assert "\ncalls      gemm on cpu FAILS, round on cpu FAILS\n" in text
    problem = (
        "problem: gemm on cpu fails: it kills the process (signal 6) (and 1 more); built by c++ 12.2.0, "
    )
    assert f"{problem}which may link libstdc++ statically\n" in text
    assert "CXX=g++ python " in text


def test_what_a_module_prints_is_not_an_answer(tmp_path: Path) -> None:
    noisy = tmp_path / "noisy.py"
    noisy.write_text("print('[1, 2]')")
    assert _probe.try_imports({"noisy": str(noisy)}) == {"noisy": None}


def test_a_source_folder(site: Site) -> None:
    (site.package / "_build_record.json").unlink()
    (site.folder / "setup.py").touch()
    what, command = site.problem()
    assert what.startswith(f"lltm_ext: {site.package} is a source folder whose modules have not been built")
    assert command == f"cd {site.folder} && setup.py develop"


def test_in_a_source_folder_missing_build_tools_are_problems(site: Site) -> None:
    (site.package / "_build_record.json").unlink()
    first, *rest = site.problems(PATH=str(site.elsewhere))
    assert "is a source folder" in first["what"]
    assert {"what": "c++ does not run", "command": "apt-get install g++"} in [
        {"what": problem["what"].partition(" (")[0], "command": problem["command"]} for problem in rest
    ]


def test_a_damaged_record(site: Site) -> None:
    (site.package / "_build_record.json").write_text("{")
    what, command = site.problems()[0].values()
    assert what.startswith(f"{site.package}/_build_record.json can't be read (")
    assert command.endswith("-m pip install --force-reinstall --no-deps lltm_ext")


def test_the_command_reinstalls_the_same_wheel(site: Site) -> None:
    wheel = site.folder / "lltm_ext-0.1.0.whl"
    wheel.touch()
    metadata = site.folder / "lltm_ext-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lltm_ext\nVersion: 0.1.0\n")
    (metadata / "direct_url.json").write_text(json.dumps({"url": wheel.as_uri()}))
    site.module.unlink()
    _, command = site.problem()
    assert command == f"-m pip install --force-reinstall --no-deps {wheel}"


def test_the_console_script_runs_where_torch_does_not_import(site: Site) -> None:
    site.torch("2.11.0+cu130", "13.0", "import os; os.abort()")
    cli = Path(_record.PACKAGE.parent, "lltm_ext_cli.py")
    shutil.copy(cli, site.folder)
    done = site.run("-c", CONSOLE_SCRIPT, "doctor", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert "kills the process (signal 6)" in json.loads(done.stdout)["problems"][0]["what"]


def test_the_console_script_loads_torch_for_a_selftest(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONSOLE_SCRIPT, "selftest"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, " 0 failed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_another_program_with_a_doctor_command_imports_torch(site: Site) -> None:
    site.torch("1.0.0", None)
    (site.folder / "clinic").mkdir()
    (site.folder / "clinic/__init__.py").write_text("import lltm_ext")
    (site.folder / "clinic/__main__.py").touch()
    done = site.run("-m", "clinic", "doctor")
    assert done.stdout == ""
    assert "ImportError: lltm_ext 0.1.0" in done.stderr


# ---- what a build needs ------------------------------------------------------------------------------------


def test_no_cuda_compiler() -> None:
    facts = Facts(torch="2.11.0", torch_cuda="99.0")  # there is no such compiler
    missing = _doctor.find_tool(lambda: _doctor.find_nvcc(facts))
    assert isinstance(missing, Finding)
    assert missing.what.startswith("torch is built with CUDA 99.0, but ")
    assert missing.what.endswith("(or set LLTM_EXT_CUDA=0 to build for the CPU only)")
    assert missing.command == 'python -m pip install "cuda-toolkit[nvcc,crt,nvvm,cccl]==99.0.*"'


def test_no_cpp_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    tools = _doctor.find_facts().tools
    compiler, package = tools["c++"], f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    assert isinstance(compiler, Finding)
    assert compiler.what.startswith("c++ does not run (")
    assert compiler.command == "apt-get install g++"
    assert tools["ninja"] == ("ninja was not found", "python -m pip install ninja")
    header = f"{tmp_path} lacks Python.h, Python's own header"
    assert tools["Python.h"] == (header, f"apt-get install {package}")


# ---- modules built at run time -----------------------------------------------------------------------------


def test_modules_that_an_import_builds_are_not_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    unfit = "lltm_ext 0.1.0 was built for torch 2.11.0; this is torch 2.12.0. Run: fix it  (or do not)"
    facts = machine(H200, unfit=unfit, variables={"LLTM_EXT_JIT": "1"})
    status, text = doctor(facts, capsys)
    assert status == 0
    assert (
        "note: lltm_ext 0.1.0 was built for torch 2.11.0; this is torch 2.12.0. With LLTM_EXT_JIT=1, an"
        in text
    )
    assert "fix it" not in text


def test_missing_build_tools_are_a_problem_when_an_import_builds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ninja = Finding("ninja was not found", "python -m pip install ninja")
    variables = {"LLTM_EXT_JIT": "1"}
    facts = machine(H200, unfit="this is torch 2.12.0", variables=variables, tools={"ninja": ninja})
    status, text = doctor(facts, capsys)
    assert status == 1
    assert "problem: ninja was not found\n    python -m pip install ninja\n" in text


# ---- drivers and GPUs, as given facts ----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor names other commands for a checkout."""
    monkeypatch.setattr(_doctor, "is_checkout", lambda: False)


H200, V100, ORIN = Gpu("NVIDIA H200", "9.0"), Gpu("Tesla V100", "7.0"), Gpu("Orin", "8.7")


def machine(*gpus: Gpu, **changed: Any) -> Facts:
    """A machine without problems, but for what is given."""
    usual = {
        "record": RECORD,
        "torch": "2.11.0+cu130",
        "torch_cuda": "13.0",
        "torch_folder": "/site/torch",
        "driver": "580.65.06",
        "driver_cuda": "13.0",
    }
    return Facts(gpus=list(gpus), **(usual | changed))


def doctor(facts: Facts, capsys: pytest.CaptureFixture[str], json: bool = False) -> tuple[int, str]:
    """The exit status, and the output with `python` for this Python."""
    status = _doctor.main(argparse.Namespace(json=json), lambda: facts)
    return status, capsys.readouterr().out.replace(f"{sys.executable} ", "python ")


def test_a_supported_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = doctor(machine(H200), capsys)
    assert status == 0
    assert "GPU 0      NVIDIA H200, compute capability 9.0\n" in text
    assert text.endswith("\nproblems: none\n")


def test_a_gpu_older_than_any_supported_one(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = doctor(machine(V100, H200), capsys)
    assert status == 1
    assert "problem: GPU 0, Tesla V100, has compute capability 7.0; lltm_ext is built for 7.5 8.0 " in text
    assert "12.0+PTX, and can be built for 7.5 and newer\n    export CUDA_VISIBLE_DEVICES=1\n" in text
    assert text.endswith("\nproblems: 1\n")


def test_the_supported_gpus_keep_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    facts = machine(V100, H200, variables={"CUDA_VISIBLE_DEVICES": "5,GPU-abc"})
    assert "export CUDA_VISIBLE_DEVICES=GPU-abc\n" in doctor(facts, capsys)[1]


def test_a_gpu_that_this_wheel_was_not_built_for(capsys: pytest.CaptureFixture[str]) -> None:
    facts = machine(ORIN, record=RECORD | {"architectures": ["9.0"]})
    status, text = doctor(facts, capsys)
    assert status == 1
    assert "problem: GPU 0, Orin, has compute capability 8.7; lltm_ext is built for 9.0\n" in text
    pip = "python -m pip install --force-reinstall --no-deps --no-binary lltm_ext lltm_ext==0.1.0"
    assert f"    TORCH_CUDA_ARCH_LIST=8.7 {pip}\n" in text


@pytest.mark.parametrize(
    "architectures,capability,runs",
    [
        ("8.0", "8.0", True),
        ("8.0", "8.6", True),
        ("8.6", "8.0", False),
        ("8.0", "9.0", False),
        ("8.0+PTX", "9.0", True),
        ("9.0+PTX", "8.9", False),
        ("9.0a", "9.0", True),
        ("12.0a", "12.1", False),
        ("10.0", "10.3", True),
        ("7.5 8.0 12.0+PTX", "7.0", False),
        ("7.5 8.0 12.0+PTX", "12.1", True),
        ("Hopper", "8.0", True),  # a name: not known here
    ],
)
def test_which_code_runs_on_which_gpu(architectures: str, capability: str, runs: bool) -> None:
    assert _toolchain.runs_on(architectures.split(), capability) is runs


def test_a_cpu_build_where_there_is_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    cpu = RECORD | {"version": "0.1.0+cpu", "cuda": None, "architectures": []}
    status, text = doctor(machine(H200, record=cpu), capsys)
    assert status == 1
    assert (
        "problem: lltm_ext 0.1.0+cpu is built for the CPU only, but there is a GPU\n    LLTM_EXT_CUDA=1 "
        in text
    )
    assert doctor(machine(H200, record=cpu, torch_cuda=None), capsys)[0] == 0  # torch's choice too


@pytest.mark.parametrize(
    "driver,runs,built,needed,oldest",
    [("550.54.14", "12.4", "13.0", "13.0", "580"), ("535.54.03", "12.2", "12.8", "12.4", "550")],
)
def test_a_driver_that_is_too_old(
    capsys: pytest.CaptureFixture[str], driver: str, runs: str, built: str, needed: str, oldest: str
) -> None:
    record = RECORD | {"cuda": built}
    status, text = doctor(machine(H200, record=record, driver=driver, driver_cuda=runs), capsys)
    assert status == 1
    assert (
        f"the NVIDIA driver ({driver}) runs CUDA {runs} at most, lltm_ext is built with CUDA {built} "
        f"and needs {needed}\n    apt-get install nvidia-driver-{oldest}\n"
    ) in text


def test_a_driver_older_than_the_wheels_cuda_but_of_its_major_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = machine(H200, record=RECORD | {"cuda": "12.8"}, driver="550.54.14", driver_cuda="12.4")
    assert doctor(found, capsys)[0] == 0


def test_a_driver_that_does_not_work(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = doctor(machine(driver_error="unknown error (CUDA error 999)"), capsys)
    assert status == 1
    assert (
        "the NVIDIA driver does not work: unknown error (CUDA error 999) (if nvidia-smi fails too, reboot)\n"
        in text
    )


@pytest.mark.parametrize(
    "changed,message,command",
    [
        (
            {"driver": None, "driver_cuda": None},
            "no NVIDIA driver: CPU tensors only",
            "docker run --gpus all",
        ),
        ({"variables": {"CUDA_VISIBLE_DEVICES": ""}}, "shows no GPU", "unset CUDA_VISIBLE_DEVICES"),
        ({}, "the NVIDIA driver shows no GPU", "nvidia-smi --list-gpus"),
    ],
)
def test_no_gpu_is_no_error(
    capsys: pytest.CaptureFixture[str], changed: dict[str, Any], message: str, command: str
) -> None:
    status, text = doctor(machine(**changed), capsys)
    assert status == 0
    note = text.partition("note: ")[2]
    assert message in note
    assert f"\n    {command}\n" in note


def test_missing_build_tools_are_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    ninja = Finding("ninja was not found", "python -m pip install ninja")
    status, text = doctor(machine(H200, tools={"ninja": ninja}), capsys)
    assert status == 0
    assert "note: only to build lltm_ext: ninja was not found\n    python -m pip install ninja\n" in text


def test_json_and_text_agree(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = doctor(machine(V100), capsys, json=True)
    found = json.loads(text)
    assert (status, found["ok"], found["gpus"]) == (1, False, [{"name": "Tesla V100", "capability": "7.0"}])
    assert found["record"] == RECORD
    (problem,) = found["problems"]
    assert problem["command"] == "export CUDA_VISIBLE_DEVICES="


# ---- a driver made by the test -----------------------------------------------------------------------------

LIBCUDA = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int* version) { *version = 13010; return 0; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) {
  strcpy(name, device == 10 ? "first" : "second");
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {  // of the compute capability: 75 and 76
  *value = attribute - 66 - (device == 11);
  return 0;
}
int cuGetErrorString(int error, const char** text) { *text = "no good"; return 0; }
"""
LIBNVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char* version, unsigned size) { strcpy(version, "590.1"); return 0; }
"""


def ask_a_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, init: str) -> Facts:
    """The facts of a driver whose cuInit returns, or does, that."""
    for name, source in (("libcuda.so.1", LIBCUDA), ("libnvidia-ml.so.1", LIBNVML)):
        compiler = ["cc", "-shared", "-fPIC", f"-DINIT={init}", "-x", "c", "-", "-o", str(folder / name)]
        subprocess.run(compiler, input=source, text=True, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    facts = Facts()
    _doctor.find_driver(facts)
    return facts


@needs_cc
def test_the_driver_reports_its_version_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ask_a_driver(tmp_path, monkeypatch, "0")
    assert (facts.driver, facts.driver_cuda, facts.driver_error) == ("590.1", "13.1", None)
    assert facts.gpus == [("first", "9.10"), ("second", "8.9")]


@needs_cc
@pytest.mark.parametrize(
    "init,error",
    [
        ("803", "no good (CUDA error 803)"),
        ("100", None),  # CUDA_ERROR_NO_DEVICE
        ("(abort(), 0)", "asking the driver failed: it kills the process (signal 6)"),
    ],
)
def test_a_driver_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str, error: str | None
) -> None:
    facts = ask_a_driver(tmp_path, monkeypatch, init)
    assert (facts.driver_cuda, facts.driver_error, facts.gpus) == ("13.1", error, [])


# ---- this installation -------------------------------------------------------------------------------------


def test_this_installation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lltm_ext", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["record"] == _record.read()
    assert found["missing"] == []
    ops = set() if _portable.in_use else {stub.stem for stub in (_record.PACKAGE / "_C").glob("*.pyi")}
    assert found["imports"] == dict.fromkeys(["torch", *(f"lltm_ext._C.{op}" for op in ops), "lltm_ext"])
    assert found["calls"] and set(found["calls"].values()) == {None}
    assert [tool for tool in found["tools"] if tool != "nvcc"] == ["c++", "ninja", "Python.h"]
    assert done.returncode == (1 if found["problems"] else 0)
