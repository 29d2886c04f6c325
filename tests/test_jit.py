"""The build at run time: when it happens, what it builds for, its messages, and how it recovers.

Most tests build one tiny module, which takes a second or two. Those marked `packaging` build all of ours.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from tooling import write

from lltm_ext import jit
from lltm_ext._install import build_native, build_record, probe, toolchain

pytestmark = pytest.mark.compiles

PACKAGE = build_record.PACKAGE
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
BUILD_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CXX", "LLTM_EXT_CUDA", "LLTM_EXT_JIT", "TORCH_CUDA_ARCH_LIST")


class Installed:
    """A copy of the package whose record names another torch, with its own cache."""

    def __init__(self, folder, src):
        self.folder, self.cache = folder, folder / "cache"
        self.package = folder / "site/lltm_ext"
        ignored = shutil.ignore_patterns("*.so", "_src", "__pycache__")
        shutil.copytree(PACKAGE, self.package, ignore=ignored)
        shutil.copy(PACKAGE.parent / "lltm_ext_cli.py", self.package.parent)
        shutil.copytree(src, self.package / "_src")
        record = json.loads((PACKAGE / "_build_record.json").read_text())
        (self.package / "_build_record.json").write_text(json.dumps(record | {"torch": "1.0.0"}))

    def start(self, program, **variables):
        env = {name: value for name, value in os.environ.items() if name not in BUILD_VARIABLES}
        env |= {"PYTHONPATH": str(self.package.parent), "TORCH_EXTENSIONS_DIR": str(self.cache)}
        env |= {"LLTM_EXT_CUDA": "0"} | variables
        pipes = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
        }
        return subprocess.Popen([sys.executable, "-c", program], cwd=self.folder, env=env, **pipes)

    def run(self, program, fails=False, **variables):
        """What the program writes to stdout and to stderr."""
        process = self.start(program, **variables)
        stdout, stderr = process.communicate()
        assert (process.returncode != 0) == fails, stdout + stderr
        return stdout, stderr


# ---- an import of modules that do not fit ------------------------------------------------------------------


@pytest.fixture
def unfit(tmp_path):
    return Installed(tmp_path, build_native.source_folder())


@pytest.mark.parametrize(
    "break_it,variables,message",
    [
        (None, {"CXX": "/nowhere/c++"}, r"/nowhere/c\+\+ does not run .* Run: apt-get install g\+\+"),
        (None, {"LLTM_EXT_CUDA": "2"}, "LLTM_EXT_CUDA must be 0 or 1, got '2'. Run: unset"),
        (
            lambda it: it.cache.touch(),
            {},
            ".*/cache/lltm_ext cannot be written .*: export TORCH_EXTENSIONS_DIR=",
        ),
        (
            lambda it: shutil.rmtree(it.package / "_src"),
            {},
            "there are no sources in .*/src. Run: python -m pip install --force-reinstall",
        ),
    ],
    ids=["no compiler", "no such choice", "no cache", "no sources"],
)
def test_what_stops_a_build_is_reported_with_the_fix(unfit, break_it, variables, message):
    if break_it is not None:
        break_it(unfit)
    last = unfit.run("import lltm_ext", fails=True, LLTM_EXT_JIT="1", **variables)[1].splitlines()[-1]
    assert re.match(f"ImportError: lltm_ext: {message}", last)


def test_modules_that_fit_are_used_whatever_the_variable_says(tmp_path):
    program = "import sys, lltm_ext; print('lltm_ext.jit' in sys.modules)"
    command, env = [sys.executable, "-c", program], os.environ | {"LLTM_EXT_JIT": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


# ---- what it is built for ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "torch_cuda,variables,gpus,wanted",
    [
        pytest.param(None, {}, ["9.0"], (False, []), id="a torch without CUDA"),
        pytest.param("13.0", {}, ["8.6", "9.0"], (True, ["8.6", "9.0"]), id="the GPUs that are here"),
        pytest.param("13.0", {}, [], (False, []), id="no GPU"),
        pytest.param("13.0", {"LLTM_EXT_CUDA": "0"}, ["9.0"], (False, []), id="the CPU asked for"),
        pytest.param("13.0", {"LLTM_EXT_CUDA": "1"}, [], (True, []), id="CUDA asked for, no GPU"),
        pytest.param("13.0", {"TORCH_CUDA_ARCH_LIST": "8.0"}, [], (True, ["8.0"]), id="architectures"),
    ],
)
def test_the_build_is_for_the_gpus_here_unless_a_variable_says_otherwise(
    monkeypatch, torch_cuda, variables, gpus, wanted
):
    for name in BUILD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(probe, "gpus", lambda: gpus)
    assert jit.wanted() == wanted


@pytest.mark.parametrize(
    "gpus,compiled",
    [
        pytest.param(["9.0"], ["9.0"], id="known"),
        pytest.param(["8.6", "8.9", "9.0"], ["8.0+PTX", "9.0"], id="unknown to the compiler"),
        pytest.param(["12.1"], ["12.0+PTX"], id="newer than the compiler"),
        pytest.param(["6.1", "8.0"], ["8.0"], id="one too old and another"),
    ],
)
def test_a_gpu_that_the_compiler_does_not_know_gets_ptx(nvcc, gpus, compiled):
    assert toolchain.architectures_of(gpus, nvcc) == compiled


def test_a_gpu_too_old_is_reported_with_the_fix(nvcc):
    message = r"capability 7\.0, .* 7\.5\. Run: export LLTM_EXT_CUDA=0"
    with pytest.raises(toolchain.ToolchainError, match=message):
        toolchain.architectures_of(["7.0"], nvcc)


def test_the_cache_is_torchs(monkeypatch, tmp_path):
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert jit._cache() == Path(get_default_build_root(), "lltm_ext")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit._cache() == Path(get_default_build_root(), "lltm_ext")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "mine"))
    assert jit._cache() == tmp_path / "mine/lltm_ext"


# ---- a build of one tiny module ----------------------------------------------------------------------------

BUILD = """
from lltm_ext import jit
from lltm_ext._install import build_record
build_record.use(jit.build())
from lltm_ext._C import tiny
print(tiny.__file__)
"""
TRIAL = """
def trial():
    from lltm_ext._C import tiny
    yield "tiny", None
    if tiny.answer() != 42:
        yield "tiny", f"RuntimeError: answer: expected 42, got {tiny.answer()}"
"""
TINY = """
#include <Python.h>
#ifndef ANSWER
#define ANSWER 42
#endif
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS}, {}};
static PyModuleDef tiny = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, methods};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_tiny() { return PyModule_Create(&tiny); }
"""


class Tiny(Installed):
    """The package with one tiny op, and a compiler that counts the files it compiles, each in `seconds`."""

    def __init__(self, folder):
        write(folder / "src/tiny/tiny.cpp", TINY)
        super().__init__(folder, folder / "src")
        write(self.package / "__init__.py")  # ours needs modules that the tiny build lacks
        write(self.package / "_install/selftest.py", TRIAL)
        self.source = self.package / "_src/tiny/tiny.cpp"

    def compiler(self, seconds=0, answer="42"):
        file = self.folder / f"c++-{len(list(self.folder.glob('c++-*')))}"  # another may be running
        count = f'case "$*" in *" -c "*) echo >> {self.folder}/compiled; sleep {seconds};; esac'
        script = f'#!/bin/sh\n{count}\nexec c++ "-DANSWER={answer}" "$@"\n'
        return str(write(file, script, executable=True))

    @property
    def compiled(self):
        file = self.folder / "compiled"
        return len(file.read_text()) if file.exists() else 0

    @property
    def kept(self):
        """What is in the cache: a folder for the build, its lock and its log."""
        return sorted(entry.name.rpartition(".")[2] for entry in (self.cache / "lltm_ext").iterdir())


@pytest.fixture
def tiny(tmp_path):
    yield Tiny(tmp_path)


def test_an_edited_source_has_another_build(tmp_path, monkeypatch):
    monkeypatch.setattr(build_native, "source_folder", lambda: tmp_path)
    (tmp_path / "op.cpp").write_text("one")
    first = jit._name(False, [])
    (tmp_path / "op.cpp").write_text("two")
    assert jit._name(False, []) != first


def has_nvcc():
    try:
        return torch.version.cuda is not None and bool(toolchain.find_cuda(torch.version.cuda))
    except toolchain.ToolchainError:
        return False


@pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
def test_kernels_are_built_for_the_architectures_named(tiny):
    (tiny.source.parent / "tiny_kernel.cu").write_text("__global__ void kernel() {}\n")
    cuda = {"LLTM_EXT_CUDA": "", "TORCH_CUDA_ARCH_LIST": "8.0"}
    module = Path(tiny.run(BUILD, **cuda)[0].strip())
    folder = module.parent.parent
    assert f"-cuda{torch.version.cuda}-8.0-" in folder.name
    record = json.loads((folder / "_build_record.json").read_text())
    assert (record["cuda"], record["architectures"]) == (torch.version.cuda, ["8.0"])
    assert "code=sm_80" in Path(f"{folder}.log").read_text()
    assert tiny.run(BUILD, **cuda, CXX="/nowhere/c++", CUDA_HOME="/nowhere")[0].strip() == str(module)


@pytest.mark.parametrize("file", ["_C/tiny.so", "_build_record.json"])
@pytest.mark.parametrize("damage", ["none", "cut short", "altered", "gone"])
def test_a_changed_build_is_not_complete(tmp_path, file, damage):
    write(tmp_path / "_C/tiny.so", "a module")
    write(tmp_path / "_build_record.json", "{}")
    jit._add_digests(tmp_path)
    content = (tmp_path / file).read_bytes()
    changed = {"none": content, "cut short": content[:-4], "altered": content.replace(b"modul", b"nodul")}
    if damage == "gone":
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(changed[damage])
    assert jit._is_complete(tmp_path) is (damage == "none")


def test_two_processes_at_once_make_one_build_which_later_ones_use_without_a_compiler(tiny):
    both = [tiny.start(BUILD, CXX=tiny.compiler(seconds=4)) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    module, progress = outputs[0][0], "".join(errors for _, errors in outputs)
    assert outputs[1][0] == module
    assert Path(module.strip()).is_relative_to(tiny.cache) and module.strip().endswith(f"/_C/tiny{SUFFIX}")
    assert tiny.compiled == progress.count("1 of 1 modules, tiny") == 1
    waited = ["another process is building the modules; waiting for it" in errors for _, errors in outputs]
    assert sorted(waited) == [False, True]
    again, progress = tiny.run(BUILD, CXX="/nowhere/c++")
    assert again == module
    assert "lltm_ext" not in progress


def test_a_killed_build_is_repeated(tiny):
    process = tiny.start(BUILD, CXX=tiny.compiler(seconds=60))
    try:
        while tiny.compiled == 0 and process.poll() is None:
            time.sleep(0.05)
        assert tiny.compiled == 1
        process.kill()  # its compiler goes on
        process.wait()
        assert "part" in tiny.kept
        module, progress = tiny.run(BUILD, CXX=tiny.compiler())
        assert Path(module.strip()).is_file()
        assert "waiting" not in progress
        assert "part" not in tiny.kept
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_build_on_a_full_disk_is_reported_and_repeated(tiny):
    """As on one, a write stops in the middle: here at the largest size of a file."""
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))"
    last = tiny.run(f"{full}\n{BUILD}", fails=True)[1].splitlines()[-1]
    assert "cannot be written ([Errno 27] File too large). Run: export TORCH_EXTENSIONS_DIR=" in last
    assert tiny.kept == ["lock", "log"]
    assert Path(tiny.run(BUILD)[0].strip()).is_file()


def test_a_compiler_error_names_the_log(tiny):
    tiny.source.write_text("not C++\n")
    last = tiny.run(BUILD, fails=True)[1].splitlines()[-1]
    assert "the modules did not build: " in last and "tiny.cpp:1:1: error: " in last
    log = Path(last.rpartition("Run: less ")[2])
    assert "tiny.cpp" in log.read_text()
    assert tiny.kept == ["lock", "log"]


def test_modules_that_fail_when_they_are_tried_are_reported_and_not_kept(tiny):
    for answer, how in (
        ("*(volatile long*)nullptr", "it kills the process (signal 11)"),
        ("41", "RuntimeError: answer: expected 42, got 41"),  # which uses nothing of the first
    ):
        last = tiny.run(BUILD, fails=True, CXX=tiny.compiler(answer=answer))[1].splitlines()[-1]
        assert f"but fail when they are tried: tiny: {how}. Run: export CXX=g++" in last
        assert tiny.kept == ["lock", "log"]
    assert tiny.compiled == 2
    assert Path(tiny.run(BUILD, CXX=tiny.compiler())[0].strip()).is_file()


# ---- the build of ours -------------------------------------------------------------------------------------

USE = """
import json, torch
import lltm_ext
from lltm_ext._install import build_record
x = torch.linspace(-2, 2, 5, requires_grad=True)
lltm_ext.round(lltm_ext.sigmoid(x)).sum().backward()
output, _ = lltm_ext.LLTM(4, 5)(torch.ones(2, 3, 4))
record = build_record.read() | {"file": lltm_ext._C.relu.__file__}
record |= {"grad": x.grad.tolist(), "shape": list(output.shape), "version": lltm_ext.__version__}
print(json.dumps(record))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory, quick_cxx):
    installed = Installed(tmp_path_factory.mktemp("built"), build_native.source_folder())
    output, progress = installed.run(USE, LLTM_EXT_JIT="1", CXX=quick_cxx)
    return installed, json.loads(output), progress


@pytest.mark.packaging
class TestEveryModule:
    def test_everything_works_as_from_the_wheel(self, built):
        installed, found, _ = built
        assert Path(str(found["file"])).is_relative_to(installed.cache)
        x = torch.linspace(-2, 2, 5)
        expected = torch.sigmoid(x) * (1 - torch.sigmoid(x))
        torch.testing.assert_close(torch.tensor(found["grad"]), expected)
        assert found["shape"] == [2, 3, 5]

    def test_its_record_and_progress_say_what_was_built(self, built):
        installed, found, progress = built
        assert (found["torch"], found["cuda"], found["architectures"]) == (torch.__version__, None, [])
        assert str(found["version"]).endswith("+cpu")
        assert found["source"] == toolchain.source_revision(installed.package / "_src")
        ops = build_native.ops(build_native.source_folder())
        lines = [line for line in progress.splitlines() if f" of {len(ops)} modules, " in line]
        assert sorted(line.split(", ")[1] for line in lines) == sorted(ops)

    def test_the_second_import_builds_nothing(self, built):
        installed, found, _ = built
        nothing = {"LLTM_EXT_JIT": "1", "PATH": "/nowhere", "CXX": "/nowhere/c++"}
        output, progress = installed.run(USE, **nothing)
        assert json.loads(output)["file"] == found["file"]
        assert "lltm_ext: " not in progress
