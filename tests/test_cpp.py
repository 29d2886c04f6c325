"""Use without the Python package: the C++ library that CMake builds, and exported models."""

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import tooling
import torch
from tooling import ROOT, load, write

import lltm_ext
from lltm_ext._install import build_record, toolchain
from lltm_ext.lltm import lltm_reference

pytestmark = pytest.mark.compiles

TORCH = Path(torch.__file__).parent


def run(*command, cwd, fails=False, **variables):
    """The output of a command, without a GPU."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    quiet = {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": str(cwd / "inductor")}
    done = tooling.run(*command, cwd=cwd, fails=fails, **(quiet | variables))
    return done.stdout + done.stderr if fails else done.stdout


def configure(source, build, *options, fails=False):
    quick = "-O0 --param=ggc-min-heapsize=2000000"  # as conftest's quick_cxx
    options = (f"-DCMAKE_CXX_FLAGS_RELEASE={quick}", "-DCMAKE_BUILD_TYPE=Release", *options)
    return run("cmake", "-G", "Ninja", "-S", source, "-B", build, *options, cwd=build.parent, fails=fails)


def build(folder):
    run("cmake", "--build", folder, "-j", str(toolchain.jobs()), cwd=folder)


# ---- the choice of a compiler ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "listed,chosen,compiled",
    [
        ("all", "", "75-real;80-real;90a-real;120"),
        ("9.0", "", "90a-real"),
        ("8.6;9.0+PTX", "", "86-real;90a-real;90"),
        ("8.6", "90", "90a-real;90"),  # CMake's variable comes first
        ("", "80-real;90-real", "80-real;90a-real"),
        ("", "90a-real;90", "90a-real;90"),  # what CMake is given when it runs again
        ("", "native", "native"),
    ],
)
def test_code_for_9_0_is_compiled_as_9_0a(nvcc, monkeypatch, capsys, listed, chosen, compiled):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    load("cmake/toolchain.py").main(str(TORCH), str(nvcc), chosen)
    printed = capsys.readouterr().out
    assert f'set(CMAKE_CUDA_ARCHITECTURES "{compiled}" ' in printed
    assert f'set(CMAKE_CUDA_COMPILER "{nvcc}" ' in printed


@pytest.mark.parametrize(
    "file,content", [("version.py", "cuda = '99.0'\n"), ("build-version", "9.9.0+cu990\n")]
)
def test_a_missing_compiler_is_reported_with_the_fix(tmp_path, file, content):
    """For a torch from PyPI and for a libtorch, of a CUDA version that does not exist."""
    (tmp_path / file).write_text(content)
    output = run(sys.executable, ROOT / "cmake/toolchain.py", tmp_path, "", "", cwd=tmp_path, fails=True)
    assert output.startswith("lltm_ext: torch is built with CUDA 99.0, but ")
    assert 'Run: python -m pip install "cuda-toolkit[nvcc,crt,nvvm,cccl]==99.0.*"' in output


@pytest.mark.packaging
def test_a_missing_torch_is_reported_with_the_fix(tmp_path):
    output = configure(ROOT, tmp_path / "build", "-DCMAKE_DISABLE_FIND_PACKAGE_Torch=ON", fails=True)
    assert "lltm_ext: there is no torch in CMAKE_PREFIX_PATH. Run: cmake -B " in " ".join(output.split())


@pytest.mark.packaging
def test_cuda_from_a_torch_without_cuda_is_refused(tmp_path):
    properties = "set_target_properties(torch PROPERTIES CXX_STANDARD 17)"
    write(tmp_path / "TorchConfig.cmake", f"add_library(torch SHARED IMPORTED)\n{properties}\n")
    output = configure(ROOT, tmp_path / "build", f"-DTorch_DIR={tmp_path}", "-DLLTM_EXT_CUDA=ON", fails=True)
    assert "LLTM_EXT_CUDA=ON asks for CUDA kernels" in output


# ---- compilation at run time -------------------------------------------------------------------------------

COMPILE = """
#include <cstdio>
#include "common/runtime/compiler.h"
int main(int, char** arguments) {
  std::puts(lltm_ext::compile("kernel", arguments[1], {}, {}, "sm_80").c_str() + 1);
}
"""


@pytest.mark.packaging
@pytest.mark.skipif(build_record.read()["cuda"] is None, reason="needs a build with CUDA")
def test_a_program_finds_both_libraries_of_nvrtc(tmp_path):
    """In Python, torch has loaded them. A program finds one by its RUNPATH, which NVRTC does not use."""
    (tmp_path / "main.cpp").write_text(COMPILE)
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    (nvrtc,) = (file for file in loaded if "/libnvrtc.so" in file)
    cuda = toolchain.find_cuda(str(torch.version.cuda)).home
    run(
        os.environ.get("CXX", "c++"), "-std=c++17", "-DLLTM_EXT_WITH_CUDA", "main.cpp", "-o", "main",
        *sorted((ROOT / "src/common/runtime").glob("c*.cpp")),
        *(f"-I{folder}" for folder in (ROOT / "src", TORCH / "include", cuda / "include")),
        f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl",
        f"-Wl,-rpath,{TORCH / 'lib'}:{Path(nvrtc).parent}",
        cwd=tmp_path,
    )  # fmt: skip
    cache = str(tmp_path / "cache")
    kernel = 'extern "C" __global__ void kernel() {}'
    assert run(tmp_path / "main", kernel, cwd=tmp_path, LLTM_EXT_CACHE=cache).startswith("ELF")


# ---- the library -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The library for the CPU only and not optimized, as `cmake --install` leaves it."""
    folder = tmp_path_factory.mktemp("cpp")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    configure(ROOT, folder / "build", prefix, "-DLLTM_EXT_CUDA=OFF")
    build(folder / "build")
    run("cmake", "--install", folder / "build", "--prefix", folder / "installed", cwd=folder)
    shutil.rmtree(folder / "build")  # from here on only what was installed
    return folder / "installed"


@pytest.fixture(scope="module")
def library(installed):
    (found,) = installed.glob("lib*/liblltm_ext.so")
    return found


@pytest.fixture(scope="module")
def examples(installed):
    """The programs of examples/cpp, built against the installed library, which knows where torch is."""
    folder = installed.parent / "examples"
    configure(ROOT / "examples/cpp", folder, f"-DCMAKE_PREFIX_PATH={installed}")
    build(folder)
    return folder


@pytest.mark.packaging
class TestLibrary:
    def test_it_has_nothing_of_python(self, library, tmp_path):
        wanted = run("nm", "--dynamic", "--undefined-only", library, cwd=tmp_path)
        assert re.findall(r" (_?Py\w+)", wanted) == []
        linked = run("readelf", "--dynamic", "--wide", library, cwd=tmp_path).split("RUNPATH")[0]
        assert "python" not in linked

    def test_it_has_the_ops_of_the_package(self, library, tmp_path):
        show = "print(*sorted(op for op in torch._C._dispatch_get_all_op_names() if 'lltm_ext' in op))"
        load = f"torch.ops.load_library({str(library)!r})"
        package = run(sys.executable, "-c", f"import torch, lltm_ext; {show}", cwd=tmp_path)
        assert run(sys.executable, "-c", f"import torch; {load}; {show}", cwd=tmp_path) == package
        assert "lltm_ext::lltm_backward" in package

    def test_python_loads_it_without_the_package(self, library, tmp_path):
        """As in the tutorial: torch.ops.load_library, then values and gradients as those of the reference."""
        inputs = [torch.randn(shape) for shape in ((7, 3, 5), (3, 4), (3, 4), (12, 5), (12, 4), (12,))]
        torch.save(inputs, tmp_path / "inputs.pt")
        code = f"""
import sys, torch
torch.ops.load_library({str(library)!r})
inputs = [x.requires_grad_() for x in torch.load("inputs.pt")]
outputs = torch.ops.lltm_ext.lltm(*inputs)
sum(y.square().sum() for y in outputs).backward()
assert "lltm_ext" not in sys.modules
torch.save([*(y.detach() for y in outputs), *(x.grad for x in inputs)], "outputs.pt")
"""
        run(sys.executable, "-c", code, cwd=tmp_path)
        for x in inputs:
            x.requires_grad_()
        input, h0, c0, *weights = inputs
        output, (h_n, c_n) = lltm_reference(input, (h0, c0), *weights)
        sum(y.square().sum() for y in (output, h_n, c_n)).backward()
        expected = [output, h_n, c_n, *(x.grad for x in inputs)]
        torch.testing.assert_close(torch.load(tmp_path / "outputs.pt"), [x.detach() for x in expected])

    def test_a_program_trains_with_it(self, examples):
        printed = run(examples / "train", cwd=examples)
        assert printed.startswith(f"lltm_ext {lltm_ext.__version__.split('+')[0]} on cpu\n")
        loss, first = map(float, re.findall(r"loss ([\d.e-]+), at first ([\d.e-]+)", printed)[0])
        assert loss < first / 4

    def test_another_torch_is_refused(self, installed, tmp_path):
        shutil.copytree(installed, tmp_path / "installed")
        (config,) = (tmp_path / "installed").glob("lib*/cmake/lltm_ext/lltm_ext-config.cmake")
        release = torch.__version__.split("+")[0]
        config.write_text(config.read_text().replace(f'"{release}"', '"1.2.3"').replace(release, "1.2.3"))
        prefix = f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'};{torch.utils.cmake_prefix_path}"
        output = configure(ROOT / "examples/cpp", tmp_path / "build", prefix, fails=True)
        assert f"was built for torch 1.2.3; {TORCH}" in " ".join(output.split())


# ---- exported models ---------------------------------------------------------------------------------------


@pytest.mark.packaging
def test_an_exported_model_gives_the_same_text_from_python_and_from_a_program(examples, tmp_path):
    vocabulary = "\nabcdefghijklmnopqrstuvwxyz é€"  # some of one byte in UTF-8, some of two, one of three
    char_lm = load("examples/char_lm.py")
    model = char_lm.CharLM(len(vocabulary), 24)
    saved = {"state_dict": model.state_dict(), "vocabulary": vocabulary, "hidden_size": 24}
    torch.save(saved, tmp_path / "model.pt")

    export = (sys.executable, ROOT / "examples/export.py", "--checkpoint", "model.pt", "--device", "cpu")
    from_python = run(*export, "--prompt", "é€a ", cwd=tmp_path)
    texts, bits = re.findall(r"(.*?----\n)(\d+\.\d+) bits/char", from_python, re.DOTALL)[0]
    assert len(texts) > 3 * 120
    assert "differ from the model's by at most" in from_python

    from_program = run(examples / "run_exported", "model.pt2", "é€a ", cwd=tmp_path)
    assert from_program.startswith(texts)
    assert float(from_program.removeprefix(texts).split()[0]) == pytest.approx(float(bits), abs=1e-5)

    output = run(examples / "run_exported", "model.pt2", "a?", cwd=tmp_path, fails=True)
    assert "the model does not know '?'" in output
