"""`python -m lltm_ext doctor`: broken installations, with the message and the command that users get.

Most break a copy of the installed package, with an edited record and a torch of a few lines.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig

import pytest
from tooling import CONSOLE_SCRIPT, RECORD, SOABI, write

from lltm_ext import _portable
from lltm_ext._install import build_record, doctor, probe, toolchain
from lltm_ext._install.doctor import Facts, Finding

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
INDEX = "https://download.pytorch.org/whl/cu130"
INSTALL_TORCH = f'-m pip install "torch==2.11.*" --force-reinstall --index-url {INDEX}'
REINSTALL = "-m pip install --force-reinstall --no-deps lltm_ext==0.1.0+cu130torch2.11"


class Site:
    """A folder with a copy of lltm_ext and a fake torch."""

    def __init__(self, folder):
        self.folder, self.package, self.elsewhere = folder, folder / "lltm_ext", folder / "elsewhere"
        self.record_file = self.package / "_build_record.json"
        self.elsewhere.mkdir()
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(build_record.PACKAGE, self.package, ignore=ignored)
        self.record()
        self.torch("2.11.0+cu130", "13.0")
        shutil.copy(build_record.PACKAGE.parent / "lltm_ext_cli.py", folder)
        self.module = self.package / f"_C/relu.{SOABI}.so"
        shutil.copy(build_record.PACKAGE / "_C" / self.module.name, self.module)

    def record(self, **changed):
        self.record_file.write_text(json.dumps(RECORD | changed))

    def torch(self, version, cuda, code=""):
        write(self.folder / "torch/version.py", f"__version__ = {version!r}\ncuda = {cuda!r}\n")
        code = f"from torch import version\n__version__ = version.__version__\n{code}\n"
        write(self.folder / "torch/__init__.py", code)

    def run(self, *arguments, **variables):
        """With only the standard library and this folder: -S leaves out what is installed."""
        steering = ("CUDA_", "CXX", "LLTM_EXT_", "PYTHON")
        env = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
        env |= {"PYTHONPATH": str(self.folder)} | variables
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, cwd=self.elsewhere, env=env, capture_output=True, text=True)

    def problems(self, **variables):
        """The problems that the doctor reports; its exit status agrees."""
        done = self.run("-m", "lltm_ext", "doctor", "--json", **variables)
        assert done.stderr == ""
        found = json.loads(done.stdout)
        assert done.returncode == (1 if found["problems"] else 0)
        assert found["ok"] is not bool(found["problems"])
        return found["problems"]


@pytest.fixture
def site(tmp_path):
    if _portable.in_use:
        pytest.skip("breaks a native module, and the portable library is in use")
    return Site(tmp_path)


# ---- broken installations ----------------------------------------------------------------------------------


def missing_module(site):
    site.module.unlink()
    write(site.package / "__init__.py", "import sys\nif sys.argv[0] != '-m': from lltm_ext._C import relu")


def missing_library(site):
    site.module.unlink()
    site.record(portable=True, torch="2.10", python="any")


def killing_module(site):
    source = "#include <stdlib.h>\n__attribute__((constructor)) static void die() { abort(); }\n"
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", site.module]
    subprocess.run(compiler, input=source, text=True, check=True)


def torch_is(version, cuda, code=""):
    return lambda site: site.torch(version, cuda, code)


FAILS, KILLED = "does not import: ", "it kills the process (signal 6)"
OF_TORCH = {
    "no torch": (lambda site: shutil.rmtree(site.folder / "torch"), "torch is not installed for /"),
    "another minor version": (torch_is("2.12.0", "13.0"), "; this is torch 2.12.0 with CUDA 13.0 "),
    "another CUDA": (torch_is("2.11.0+cu128", "12.8"), "; this is torch 2.11.0+cu128 with CUDA 12.8 "),
    "no CUDA": (torch_is("2.11.0+cpu", None), "; this is torch 2.11.0+cpu without CUDA "),
    "an error": (
        torch_is("2.11.0", "13.0", "raise OSError('no')"),
        f"torch in {{site}}/torch {FAILS}OSError: no",
    ),
    "a crash": (torch_is("2.11.0", "13.0", "import os; os.abort()"), FAILS + KILLED),
    "an exit": (torch_is("2.11.0", "13.0", "import sys; sys.exit(3)"), f"{FAILS}SystemExit: 3"),
    "half a torch": (lambda site: (site.folder / "torch/version.py").unlink(), f"{FAILS}ImportError"),
    # The module is the real one, the torch is fake.
    "no libraries": (lambda site: None, f"lltm_ext._C.relu {FAILS}ImportError: lib"),
}
OF_LLTM_EXT = {
    "a missing module": (missing_module, f"lltm_ext {FAILS}ImportError: cannot import name 'relu'"),
    "a missing library": (
        missing_library,
        f"lltm_ext {FAILS}ImportError: lltm_ext lacks {{site}}/lltm_ext/_C/",
    ),
    "a damaged module": (
        lambda it: it.module.write_bytes(b"\0" * 100),
        f"lltm_ext._C.relu {FAILS}ImportError: ",
    ),
    "a crash": (killing_module, f"lltm_ext._C.relu {FAILS}{KILLED}"),
}


def assert_one_problem(site, what, command):
    (problem,) = site.problems()
    assert what.format(site=site.folder) in problem["what"]
    assert problem["command"] == f"{sys.executable} {command}"


@pytest.mark.parametrize("broken", OF_TORCH)
def test_a_torch_that_does_not_fit_or_work_is_replaced(site, broken):
    break_it, what = OF_TORCH[broken]
    break_it(site)
    assert_one_problem(site, what, INSTALL_TORCH)


def test_the_wheel_of_another_python_is_replaced(site):
    site.record(python="cpython-39")
    what = "Python cpython-39; this Python loads"
    assert_one_problem(site, what, "-m pip install --force-reinstall --no-deps lltm_ext==0.1.0")


@needs_cc
@pytest.mark.parametrize("broken", OF_LLTM_EXT)
def test_an_lltm_ext_that_does_not_work_is_installed_again(site, broken):
    break_it, what = OF_LLTM_EXT[broken]
    break_it(site)
    assert_one_problem(site, what, REINSTALL)


def test_a_source_folder_is_built_with_tools_that_may_be_missing(site):
    site.record_file.unlink()
    (site.folder / "setup.py").touch()
    first, *tools = site.problems(PATH=str(site.elsewhere))
    assert f"{site.package} is a source folder whose modules have not been built" in first["what"]
    assert first["command"] == f"cd {site.folder} && {sys.executable} setup.py develop"
    assert "apt-get install g++" in [problem["command"] for problem in tools]


def test_a_damaged_record(site):
    site.record_file.write_text("{")
    problem = site.problems()[0]
    assert f"{site.record_file} can't be read (" in problem["what"]
    assert problem["command"].endswith("-m pip install --force-reinstall --no-deps lltm_ext")


def test_the_command_reinstalls_the_same_wheel(site):
    wheel = site.folder / "lltm_ext-0.1.0.whl"
    wheel.touch()
    metadata = site.folder / "lltm_ext-0.1.0.dist-info"
    write(metadata / "METADATA", "Metadata-Version: 2.1\nName: lltm_ext\nVersion: 0.1.0\n")
    write(metadata / "direct_url.json", json.dumps({"url": wheel.as_uri()}))
    missing_module(site)
    assert_one_problem(site, "'relu'", f"-m pip install --force-reinstall --no-deps {wheel}")


def test_the_console_script_runs_where_torch_does_not_import(site):
    site.torch("2.11.0+cu130", "13.0", "import os; os.abort()")
    done = site.run("-c", CONSOLE_SCRIPT, "doctor", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert "kills the process (signal 6)" in json.loads(done.stdout)["problems"][0]["what"]


def test_another_program_with_a_doctor_command_imports_torch(site):
    site.torch("1.0.0", None)
    write(site.folder / "clinic/__init__.py", "import lltm_ext")
    write(site.folder / "clinic/__main__.py")
    done = site.run("-m", "clinic", "doctor")
    assert done.stdout == ""
    assert "ImportError: lltm_ext 0.1.0" in done.stderr


# ---- steps in another process ------------------------------------------------------------------------------

TRIAL = """
def trial():
    yield "relu on cpu", None
    yield "relu on cpu", "RuntimeError: wrong"
    yield "gemm on cpu", None
    print("[1, 2]")  # that is no answer
    import os; os.abort()
"""


def test_steps_are_tried_until_one_kills_the_process(site, monkeypatch):
    site.module.unlink()
    (site.package / "__init__.py").write_text("")
    (site.package / "_install/selftest.py").write_text(TRIAL)
    found = probe.try_package(str(site.folder))
    assert found["torch"] is found["lltm_ext"] is None
    assert found["relu on cpu"] == "RuntimeError: wrong"
    assert str(found["gemm on cpu"]).startswith("it kills the process (signal 6)")
    monkeypatch.setattr(probe, "SECONDS", 1)
    site.torch("2.11.0", "13.0", "import time; time.sleep(60)")
    assert probe.try_package(str(site.folder)) == {"torch": "it does not end within 1 s"}


# ---- what a build needs ------------------------------------------------------------------------------------


def test_missing_build_tools_are_found(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(probe, "run_in_child", lambda *question: ([], None))
    monkeypatch.setattr(doctor, "find_nvcc", lambda facts: toolchain.find_cuda("99.0").version)
    assert [tool.command for tool in doctor.find_facts().missing_tools] == [
        'python -m pip install "cuda-toolkit[nvcc,crt,nvvm,cccl]==99.0.*"',
        "apt-get install g++",
        "python -m pip install ninja",
        f"apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev",
    ]


# ---- machines, as given facts ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    """The doctor names other commands for a checkout."""
    monkeypatch.setattr(build_record, "is_checkout", lambda: False)


H200 = {"name": "NVIDIA H200", "capability": "9.0"}
V100 = {"name": "Tesla V100", "capability": "7.0"}
ORIN = {"name": "Orin", "capability": "8.7"}
CPU = RECORD | {"version": "0.1.0+cpu", "cuda": None, "architectures": []}
INSTALL_NINJA = "python -m pip install ninja"
NINJA = [Finding("ninja was not found", INSTALL_NINJA)]
OLD_GPU = "GPU 0, Tesla V100, has compute capability 7.0; lltm_ext is built for "
UNFIT = "lltm_ext 0.1.0 was built for torch 2.11.0; this is torch 2.12.0. Run: fix it  (or do not)"
JIT = {"unfit": UNFIT, "variables": {"LLTM_EXT_JIT": "1"}}
FROM_SOURCE = "python -m pip install --force-reinstall --no-deps --no-binary lltm_ext lltm_ext==0.1.0"
CALLS = {"relu on cpu": None, "gemm on cpu": KILLED, "round on cpu": "no"}
SYMBOL = {"torch": None, "lltm_ext._C.relu": "undefined symbol: _ZN2at"}
DEVICES = "CUDA_VISIBLE_DEVICES"


def machine(*gpus, **changed):
    """A machine without problems, but for what is given."""
    torch = {"torch": "2.11.0+cu130", "torch_cuda": "13.0", "torch_folder": "/site/torch"}
    driver = {"driver": "580.65.06", "driver_cuda": "13.0"}
    return Facts(gpus=list(gpus), **({"record": RECORD} | torch | driver | changed))


def run_doctor(facts, capsys, json=False):
    """The exit status, and the output with `python` for this Python."""
    status = doctor.main(argparse.Namespace(json=json), lambda: facts)
    return status, capsys.readouterr().out.replace(f"{sys.executable} ", "python ")


def old_driver(built, driver, runs):
    return machine(H200, record=RECORD | {"cuda": built}, driver=driver, driver_cuda=runs)


PROBLEMS = {
    f"gemm on cpu fails: {KILLED} (and 1 more); built by c++ 12.2.0, which may link libstdc++ statically": (
        machine(H200, calls=CALLS),
        f"CXX=g++ {FROM_SOURCE}",
    ),
    "round on cpu fails: no": (machine(H200, calls={"round on cpu": "no"}), f"python {REINSTALL}"),
    "relu does not import: undefined symbol: _ZN2at": (
        machine(H200, imports=SYMBOL),
        f"python {INSTALL_TORCH}",
    ),
    "ninja was not found": (machine(H200, missing_tools=NINJA, **JIT), INSTALL_NINJA),
    f"{OLD_GPU}7.5 8.0 8.6 9.0 10.0 12.0+PTX, and can be built for 7.5 and newer": (
        machine(V100, H200),
        f"export {DEVICES}=1",
    ),
    "and can be built for 7.5 and newer": (
        machine(V100, H200, variables={DEVICES: "5,GPU-abc"}),
        f"export {DEVICES}=GPU-abc",
    ),
    "GPU 0, Orin, has compute capability 8.7; lltm_ext is built for 9.0": (
        machine(ORIN, record=RECORD | {"architectures": ["9.0"]}),
        f"TORCH_CUDA_ARCH_LIST=8.7 {FROM_SOURCE}",
    ),
    "lltm_ext 0.1.0+cpu is built for the CPU only, but there is a GPU": (
        machine(H200, record=CPU),
        f"LLTM_EXT_CUDA=1 {FROM_SOURCE}",
    ),
    "(550.54.14) runs CUDA 12.4 at most, lltm_ext is built with CUDA 13.0 and needs 13.0": (
        old_driver("13.0", "550.54.14", "12.4"),
        "apt-get install nvidia-driver-580",
    ),
    "(535.54.03) runs CUDA 12.2 at most, lltm_ext is built with CUDA 12.8 and needs 12.4": (
        old_driver("12.8", "535.54.03", "12.2"),
        "apt-get install nvidia-driver-550",
    ),
    "the NVIDIA driver does not work: unknown error (if nvidia-smi fails too, reboot)": (
        machine(driver_error="unknown error"),
        "nvidia-smi",
    ),
}
NOTES = {
    "this is torch 2.12.0. With LLTM_EXT_JIT=1, an import of lltm_ext builds modules that fit, once": (
        machine(H200, **JIT),
        "",
    ),
    "no NVIDIA driver: CPU tensors only. To give a container access to the host's GPUs": (
        machine(driver=None, driver_cuda=None),
        "docker run --gpus all",
    ),
    f"{DEVICES}= shows no GPU: CPU tensors only": (machine(variables={DEVICES: ""}), f"unset {DEVICES}"),
    "the NVIDIA driver shows no GPU: CPU tensors only": (machine(), "nvidia-smi --list-gpus"),
    "only to build lltm_ext: ninja was not found": (machine(H200, missing_tools=NINJA), INSTALL_NINJA),
}
FINE = {
    "a supported GPU": machine(H200),
    "a build for the CPU, of a torch for the CPU": machine(H200, record=CPU, torch_cuda=None),
    "a driver older than the wheel's CUDA but of its major version": old_driver("12.8", "550.54.14", "12.4"),
}


@pytest.mark.parametrize("what", [*PROBLEMS, *NOTES])
def test_a_cause_is_reported_with_the_fix(monkeypatch, capsys, what):
    """As of a wheel from an index; a package from a folder is installed from there again."""
    monkeypatch.setattr(build_record.importlib.metadata, "distributions", lambda **_: [])
    facts, command = (PROBLEMS | NOTES)[what]
    status, text = run_doctor(facts, capsys)
    kind, _, found = text.partition("\n\n")[2].partition("\n\n")[0].partition(": ")
    assert (status, kind) == ((1, "problem") if what in PROBLEMS else (0, "note"))
    text_of_it, _, its_command = found.partition("\n    ")
    assert text_of_it.endswith(what)
    assert its_command == command
    assert text.endswith(f"\nproblems: {status or 'none'}\n")


@pytest.mark.parametrize("name", FINE)
def test_what_is_fine_is_not_reported(capsys, name):
    status, text = run_doctor(FINE[name], capsys)
    assert (status, text.count("\n\n")) == (0, 1)
    assert text.endswith("\nproblems: none\n")


def test_the_table_has_a_row_for_each_fact(capsys):
    imports = {"torch": None, "lltm_ext._C.relu": "no", "lltm_ext": None}
    text = run_doctor(machine(H200, imports=imports, calls=CALLS), capsys)[1]
    assert "\nimport     torch, relu FAILS, lltm_ext\n" in text
    assert "\ncalls      gemm on cpu FAILS, round on cpu FAILS\n" in text
    assert "\nGPU 0      NVIDIA H200, compute capability 9.0\n" in text


def test_json_has_the_facts_and_the_problems(capsys):
    status, text = run_doctor(machine(V100), capsys, json=True)
    found = json.loads(text)
    assert (status, found["ok"], found["gpus"], found["record"]) == (1, False, [V100], RECORD)
    (problem,) = found["problems"]
    assert problem["command"] == "export CUDA_VISIBLE_DEVICES="


CODE_THAT_RUNS = {
    "8.0": "8.0 8.6",
    "8.0+PTX": "9.0",
    "9.0a": "9.0",
    "10.0": "10.3",
    "7.5 8.0 12.0+PTX": "12.1",
    "Hopper": "8.0",  # a name is not known here
}
CODE_THAT_DOES_NOT = {
    "8.6": "8.0",
    "8.0": "9.0",
    "9.0+PTX": "8.9",
    "12.0a": "12.1",
    "7.5 8.0 12.0+PTX": "7.0",
}


@pytest.mark.parametrize("runs,table", [(True, CODE_THAT_RUNS), (False, CODE_THAT_DOES_NOT)])
def test_which_code_runs_on_which_gpu(runs, table):
    for architectures, capabilities in table.items():
        for capability in capabilities.split():
            assert toolchain.runs_on(architectures.split(), capability) is runs, (architectures, capability)


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


def ask_a_driver(folder, monkeypatch, init):
    """The facts of a driver whose cuInit returns, or does, that."""
    for name, source in (("libcuda.so.1", LIBCUDA), ("libnvidia-ml.so.1", LIBNVML)):
        compiler = ["cc", "-shared", "-fPIC", f"-DINIT={init}", "-x", "c", "-", "-o", str(folder / name)]
        subprocess.run(compiler, input=source, text=True, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    facts = Facts()
    doctor.find_driver(facts)
    return facts


@needs_cc
@pytest.mark.parametrize(
    "init,error",
    [
        ("0", None),
        ("803", "no good (CUDA error 803)"),
        ("100", None),  # CUDA_ERROR_NO_DEVICE
        ("(abort(), 0)", "asking the driver failed: it kills the process (signal 6)"),
    ],
)
def test_the_driver_reports_its_version_and_gpus(tmp_path, monkeypatch, init, error):
    facts = ask_a_driver(tmp_path, monkeypatch, init)
    assert (facts.driver, facts.driver_cuda, facts.driver_error) == ("590.1", "13.1", error)
    gpus = [("first", "9.10"), ("second", "8.9")] if init == "0" else []
    assert [(gpu["name"], gpu["capability"]) for gpu in facts.gpus] == gpus
    assert probe.gpus() == [capability for _, capability in reversed(gpus)]


# ---- this installation -------------------------------------------------------------------------------------


def test_this_installation(tmp_path):
    command = [sys.executable, "-m", "lltm_ext", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["record"] == build_record.read()
    ops = set() if _portable.in_use else {stub.stem for stub in (build_record.PACKAGE / "_C").glob("*.pyi")}
    assert found["imports"] == dict.fromkeys(["torch", *(f"lltm_ext._C.{op}" for op in ops), "lltm_ext"])
    assert found["calls"] and set(found["calls"].values()) == {None}
    assert [tool for tool in found["tools"] if tool != "nvcc"] == ["c++", "ninja", "Python.h"]
    assert done.returncode == (1 if found["problems"] else 0)
