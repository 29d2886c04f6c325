"""What a build finds and reports, what it makes, and every way to install it."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
import torch
from tooling import RECORD, ROOT, load, purelib, run, write

import lltm_ext
from lltm_ext import _portable
from lltm_ext._install import build_native, build_record, toolchain
from lltm_ext._install.loader import is_module_run
from lltm_ext._version import label

CHECK = load("tools/check_wheel.py")
OPS = [file.stem for file in (ROOT / "src").glob("*/*.cpp") if file.stem == file.parent.name]
CUDA = torch.version.cuda
BASE_VERSION = build_record.check(torch.__version__, torch.version.cuda)["version"].split("+")[0]
BUILT_VERSION = f"{BASE_VERSION}+{label(torch.__version__, CUDA)}"


# ---- the CUDA compiler -------------------------------------------------------------------------------------


def make_toolkit(home, version="13.0.88", without="", architectures="75 90"):
    """A folder that looks like a CUDA toolkit."""
    known = "".join(f"compute_{architecture}\\n" for architecture in architectures.split())
    answers = f'--version) echo "release {version}, V{version}";; --list-gpu-arch) printf "{known}";;'
    files = dict.fromkeys((places[0] for places in toolchain.PARTS), "")
    files[toolchain.NVCC] = f'#!/bin/sh\ncase "$1" in {answers} esac\n'
    for part, text in files.items():
        if part != without:
            write(home / part, text, executable=part == toolchain.NVCC)
    return home


class Search:
    """A machine made of folders: environment variables, sys.path and /usr/local."""

    def __init__(self, folder):
        self.env = {}
        self.sys_path = [str(folder / "site-a"), str(folder / "site-b")]
        self.pypi = folder / "site-b/nvidia/cu13"
        self.local = folder / "local"

    def __call__(self, torch_cuda="13.0"):
        return toolchain.find_cuda(torch_cuda, self.env, self.sys_path, self.local)


@pytest.fixture
def search(tmp_path):
    return Search(tmp_path)


def broken_compiler(home):
    write(make_toolkit(home) / "bin/nvcc", "#!/bin/sh\nexit 1\n")
    return home


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda home: make_toolkit(home, without="bin/nvcc"), id="no compiler"),
        pytest.param(lambda home: make_toolkit(home, without="include/cuda_runtime.h"), id="no headers"),
        pytest.param(lambda home: make_toolkit(home, "12.8.93"), id="another major version"),
        pytest.param(broken_compiler, id="a compiler that does not run"),
    ],
)
def test_cuda_home_comes_first_unless_it_is_no_toolkit(search, tmp_path, make):
    make_toolkit(search.pypi)
    search.env["CUDA_HOME"] = str(make(tmp_path / "mine"))
    with pytest.warns(
        UserWarning, match=r"^CUDA_HOME \(.*mine\) is no CUDA .* toolkit; the build uses the PyPI"
    ):
        assert search().home == search.pypi
    search.env["CUDA_HOME"] = str(make_toolkit(tmp_path / "whole", "13.2.51"))
    assert search() == (tmp_path / "whole", "13.2.51")


def test_the_pypi_compiler_comes_before_the_systems(search, tmp_path):
    make_toolkit(search.pypi)
    make_toolkit(search.local / "cuda")
    search.env["PATH"] = str(make_toolkit(tmp_path / "on-path") / "bin")
    assert search().home == search.pypi


def test_an_nvcc_on_path_is_followed_through_links(search, tmp_path):
    home = make_toolkit(tmp_path / "opt/cuda")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").symlink_to(home / "bin/nvcc")
    search.env["PATH"] = str(tmp_path / "bin")
    assert search().home == home


def test_a_wrapper_script_named_nvcc_is_not_a_toolkit(search):
    home = make_toolkit(search.local / "cuda")
    script = f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n'
    wrapper = write(search.local / "bin/nvcc", script, executable=True)
    search.env["PATH"] = str(wrapper.parent)
    assert search().home == home


def test_the_system_toolkit_of_torchs_own_version_comes_first(search):
    make_toolkit(search.local / "cuda-13.2", "13.2.51")
    assert search().version == "13.2.51"
    make_toolkit(search.local / "cuda-13.0")
    assert search().version == "13.0.88"


MISSING = {
    "no compiler (nvcc) was found; looked at ": {"without": "bin/nvcc"},
    "the compiler in {} is of CUDA 12.8, another major version": {"version": "12.8.93"},
    **{f"the toolkit in {{}} lacks {part}": {"without": part} for part, *_ in toolchain.PARTS},
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_is_reported_with_the_fix(search, what):
    make_toolkit(search.pypi, **MISSING[what])
    with pytest.raises(toolchain.ToolchainError) as caught:
        search()
    message = str(caught.value)
    assert message.startswith("torch is built with CUDA 13.0, but " + what.format(search.pypi))
    assert 'Run: python -m pip install "cuda-toolkit[nvcc,crt,nvvm,cccl]==13.0.*"' in message
    assert "\n" not in message


def test_conda_is_proposed_for_cuda_12_because_pypi_has_no_nvcc_of_it(search):
    with pytest.raises(toolchain.ToolchainError, match=r"Run: conda install -c nvidia cuda-toolkit=12\.8"):
        search("12.8")


# ---- what is built: CUDA or not, architectures, jobs -------------------------------------------------------


@pytest.mark.parametrize(
    "choice,torch_cuda,wanted",
    [
        (None, "13.0", True),
        ("", "13.0", True),
        ("1", "13.0", True),
        ("0", "13.0", False),
        (None, None, False),
        ("1", None, r"torch 2\.11\.0 is built without CUDA.* Run: python"),
        ("yes", "13.0", "LLTM_EXT_CUDA must be 0 or 1, got 'yes'"),
    ],
)
def test_torch_decides_on_cuda_unless_the_variable_does(choice, torch_cuda, wanted):
    env = {} if choice is None else {"LLTM_EXT_CUDA": choice}
    if isinstance(wanted, bool):
        assert toolchain.wants_cuda("2.11.0", torch_cuda, env) is wanted
        return
    with pytest.raises(toolchain.ToolchainError, match=wanted):
        toolchain.wants_cuda("2.11.0", torch_cuda, env)


@pytest.mark.parametrize(
    "known,listed,gpus,chosen",
    [
        ("50 75 80 86 87 89 90 90a", "", "", "7.5 8.0 8.6 9.0+PTX"),
        ("75 80 86 87 88 89 90 100 110 103 120 121", "", "", "7.5 8.0 8.6 9.0 10.0 12.0+PTX"),
        ("75 80 90", "", "8.0 9.0", "8.0 9.0"),
        ("75 80 90", "all", "9.0", "7.5 8.0 9.0+PTX"),
        ("75 90", "8.0;9.0+PTX", "9.0", "8.0 9.0+PTX"),
        ("75 90", " 8.0; 9.0+PTX ", "", "8.0 9.0+PTX"),
    ],
)
def test_architectures_are_listed_or_of_the_gpus_or_all(tmp_path, known, listed, gpus, chosen):
    nvcc = make_toolkit(tmp_path, architectures=known) / "bin/nvcc"
    assert toolchain.architectures(nvcc, {"TORCH_CUDA_ARCH_LIST": listed}, gpus.split) == chosen.split()


def test_9_0_is_compiled_as_9_0a():
    """PTX of 9.0, for later GPUs, stays."""
    assert toolchain.compiled_for(["8.0", "9.0", "12.0+PTX"]) == ["8.0", "9.0a", "12.0+PTX"]
    assert toolchain.compiled_for(["9.0+PTX"]) == ["9.0a", "9.0+PTX"]


@pytest.mark.parametrize("options,taken", [("--compress-mode --std", True), ("--std", False)])
def test_device_code_is_compressed_where_the_compiler_can(tmp_path, options, taken):
    script = f'#!/bin/sh\n[ "$1" = --help ] && echo "{options}"\n'
    nvcc = write(tmp_path / "nvcc", script, executable=True)
    assert toolchain.smallest_code(nvcc) == (["--compress-mode=size"] if taken else [])


@pytest.mark.parametrize(
    "files,jobs",
    [
        pytest.param({}, 8, id="cores"),
        pytest.param({"proc/meminfo": "MemAvailable: 6291456 kB\n"}, 3, id="memory"),
        pytest.param({"proc/meminfo": "MemAvailable: 1000 kB\n"}, 1, id="little memory"),
        pytest.param({"sys/fs/cgroup/memory.max": "4294967296\n"}, 2, id="a container's memory"),
        pytest.param({"sys/fs/cgroup/memory.max": "max\n"}, 8, id="no limit"),
        pytest.param({"sys/fs/cgroup/cpu.max": "150000 50000\n"}, 3, id="quota"),
        pytest.param({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8, id="no quota"),
    ],
)
def test_jobs_follow_cores_and_memory(tmp_path, monkeypatch, files, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    for name, content in ({"proc/meminfo": "MemAvailable: 67108864 kB\n"} | files).items():
        write(tmp_path / name, content)
    assert toolchain.jobs({}, tmp_path) == jobs
    assert toolchain.jobs({"MAX_JOBS": "7"}, tmp_path) == 7


@pytest.mark.parametrize("jobs", ["many", "0", "-1", "2.5"])
def test_a_number_of_jobs_that_is_none_is_refused(jobs):
    with pytest.raises(toolchain.ToolchainError, match=f"MAX_JOBS must be a number of jobs, got '{jobs}'"):
        toolchain.jobs({"MAX_JOBS": jobs})


@pytest.mark.parametrize("architecture", ["9.x", "90", "sm_90", "Hoper"])
def test_an_architecture_that_is_none_is_refused(search, architecture):
    nvcc = make_toolkit(search.pypi) / "bin/nvcc"
    with pytest.raises(toolchain.ToolchainError, match=f"TORCH_CUDA_ARCH_LIST .* got '{architecture}'"):
        toolchain.architectures(nvcc, {"TORCH_CUDA_ARCH_LIST": f"8.0;{architecture}"})


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with git, which is not here")
def test_the_source_revision_is_gits_tree_hash(tmp_path):
    for name in ("common/math.h", "lltm/lltm.cpp", "lltm.txt", "a/b/c.cu"):  # git sorts lltm.txt before lltm/
        write(tmp_path / name, f"// {name}\n")
    run("git", "init", "-q", cwd=tmp_path)
    run("git", "add", ".", cwd=tmp_path)
    tree = run("git", "write-tree", cwd=tmp_path).stdout.strip()
    shutil.rmtree(tmp_path / ".git")
    assert toolchain.source_revision(tmp_path) == tree
    (tmp_path / "lltm.txt").write_text("edited")
    assert toolchain.source_revision(tmp_path) != tree


@pytest.mark.parametrize(
    "text,again", [('LLTM_EMBED(x, "op/x.cuh");', True), ('#include "op/x.cuh"\n', False)]
)
def test_a_module_that_embeds_headers_is_compiled_again_after_an_edit(tmp_path, text, again):
    src, folder = tmp_path / "src", tmp_path / "objects"
    others = [str(write(src / "op" / name)) for name in ("op_cpu.cpp", "op_kernel.cu")]
    files = [str(write(src / "op/op.cpp", text)), *others]
    os.utime(write(src / "op/x.cuh"), (999, 999))
    unit, *rest = build_native.in_one_unit(files, folder, src)
    assert (Path(unit).read_text(), rest) == ('#include "op/op.cpp"\n', others)
    for edited, written in ((999, False), (1001, again)):
        os.utime(unit, (1000, 1000))
        os.utime(src / "op/x.cuh", (edited, edited))
        assert build_native.in_one_unit(files, folder, src) == [unit, *rest]
        assert (Path(unit).stat().st_mtime != 1000) is written


# ---- what an isolated build requires -----------------------------------------------------------------------

COMPILER = 'cuda-toolkit[nvcc,crt,nvvm,cccl]; platform_system == "Linux"'


@pytest.fixture
def backend():
    return load("tools/build_backend.py")


def test_an_isolated_build_sees_the_torch_that_the_wheel_is_for(backend):
    assert backend.installed_torch() == (importlib.metadata.version("torch"), CUDA)


def test_an_isolated_build_sees_that_there_is_no_torch(backend, tmp_path, monkeypatch):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path, cwd=tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    assert backend.installed_torch() is None


@pytest.mark.parametrize(
    "installed,choice,requires",
    [
        pytest.param(("2.11.0", "13.0"), None, ["torch===2.11.0", "ninja", COMPILER], id="CUDA 13"),
        pytest.param(("2.11.0", "13.0"), "0", ["torch===2.11.0", "ninja"], id="CUDA 13, not wanted"),
        pytest.param(("2.10.0+cu128", "12.8"), None, ["torch===2.10.0+cu128", "ninja"], id="CUDA 12"),
        pytest.param(("2.13.0+cpu", None), None, ["torch===2.13.0+cpu", "ninja"], id="CPU"),
        pytest.param(None, None, ["torch>=2.11,==2.*", "ninja", COMPILER], id="no torch"),
    ],
)
def test_an_isolated_build_requires_that_torch_and_its_compiler(
    backend, monkeypatch, installed, choice, requires
):
    monkeypatch.setattr(backend, "installed_torch", lambda: installed)
    monkeypatch.delenv("LLTM_EXT_CUDA", raising=False)
    if choice is not None:
        monkeypatch.setenv("LLTM_EXT_CUDA", choice)
    assert backend.get_requires_for_build_wheel() == requires
    assert backend.get_requires_for_build_editable() == requires
    assert backend.get_requires_for_build_sdist() == []


# ---- the record and the import -----------------------------------------------------------------------------


def torch_of(version, cuda):
    """The code of a torch with only its versions."""
    return f"__version__ = {version!r}\nclass version: cuda = {cuda!r}\n"


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record of a build for torch 2.11 and CUDA 13.0, to edit; `check` reads what `save` wrote."""
    monkeypatch.setattr(build_record, "PACKAGE", tmp_path / "lltm_ext")
    monkeypatch.setattr(build_record, "FILE", tmp_path / "_build_record.json")
    (tmp_path / "_build_record.json").write_text(json.dumps(RECORD))
    return dict(RECORD)


@pytest.mark.parametrize("version,cuda", [("2.11.0+cu130", "13.0"), ("2.11.1", "13.0"), ("2.11.0", "13.2")])
def test_a_torch_of_the_same_minor_version_and_cuda_major_fits(record, version, cuda):
    assert build_record.check(version, cuda) == record


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("version", ["2.12.0+cu130", "2.1.0"])  # Tests of the doctor have the other ways.
def test_a_torch_that_does_not_fit_is_reported_with_the_fix(version):
    with pytest.raises(ImportError) as caught:
        build_record.check(version, "13.0")
    python = RECORD["python"]
    assert str(caught.value) == (
        f"lltm_ext 0.1.0+cu130torch2.11 was built for torch 2.11.0+cu130 with CUDA 13.0, Python {python}; "
        f'this is torch {version} with CUDA 13.0. Run: python -m pip install "torch==2.11.*" '
        "--force-reinstall --index-url https://download.pytorch.org/whl/cu130  "
        "(or have the next import build modules that fit: export LLTM_EXT_JIT=1)"
    )
    checkout = build_record.PACKAGE.parent
    (checkout / "setup.py").touch()
    with pytest.raises(ImportError, match=f"Run: cd {checkout} && python setup.py develop  "):
        build_record.check(version, "13.0")


def test_a_build_without_cuda_fits_any_torch_of_its_minor_version(record):
    build_record.FILE.write_text(json.dumps(record | {"cuda": None}))
    assert build_record.check("2.11.0", "13.0")["cuda"] is None
    with pytest.raises(ImportError, match=r'Run: python -m pip install "torch==2\.11\.\*"  \(or '):
        build_record.check("2.12.0", "13.0")


def test_the_installed_record_says_what_was_built():
    record = build_record.check(torch.__version__, torch.version.cuda)
    assert record["version"] == importlib.metadata.version("lltm_ext") == lltm_ext.__version__
    if not _portable.in_use:
        assert record["torch"] == torch.__version__
        assert record["cuda"] in (CUDA, None)
    assert bool(record["architectures"]) == bool(record["compiler"]["nvcc"]) == bool(record["cuda"])
    assert record["compiler"]["cxx"]
    assert len(record["source"]) == 40


def test_the_import_stops_at_a_torch_that_does_not_fit(tmp_path):
    write(tmp_path / "torch/__init__.py", torch_of("1.0.0", None))
    done = run(sys.executable, "-c", "import lltm_ext", cwd=tmp_path, fails=True, PYTHONPATH=str(tmp_path))
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: lltm_ext")
    assert "this is torch 1.0.0 without CUDA" in last
    assert "Run: " in last


@pytest.mark.parametrize(
    "before,arguments,found",
    [
        ("-m lltm_ext", "doctor", True),
        ("-X dev -m lltm_ext", "", True),
        ("-mlltm_ext", "doctor --json", True),
        ("-Im lltm_ext", "", True),
        ("-m clinic", "lltm_ext", False),  # it may import lltm_ext
        ("-m clinic.lltm_ext", "", False),
        ("-m lltm_ext.benchmarks.gemm", "", False),
        ("-mclinic", "doctor", False),
    ],
)
def test_only_python_m_lltm_ext_imports_the_package_without_torch(monkeypatch, before, arguments, found):
    monkeypatch.setattr(sys, "orig_argv", ["python", *before.split(), *arguments.split()])
    monkeypatch.setattr(sys, "argv", ["-m", *arguments.split()])  # Python has not found the module yet
    assert is_module_run() is found
    monkeypatch.setattr(sys, "argv", ["/site/lltm_ext/__main__.py", *arguments.split()])
    assert not is_module_run()


@pytest.mark.skipif(_portable.in_use, reason="the portable library has more to import")
def test_the_import_loads_no_other_package(tmp_path):
    """Beyond torch's own, which keeps it fast; `make bench` measures it."""
    program = "import sys, torch; old = set(sys.modules); import lltm_ext; print(*set(sys.modules) - old)"
    loaded = run(sys.executable, "-c", program, cwd=tmp_path).stdout.split()
    assert {name.partition(".")[0] for name in loaded} <= {"lltm_ext", *sys.stdlib_module_names}


# ---- building and installing -------------------------------------------------------------------------------

EPOCH = 315532800  # the Makefile has it, too
INSPECT = """
import importlib.metadata, json, lltm_ext, torch
from lltm_ext._install import build_record
assert lltm_ext.sigmoid(torch.zeros(2)).tolist() == [0.5, 0.5]
version = importlib.metadata.version("lltm_ext")
print(json.dumps({"file": lltm_ext.__file__, "version": version, "record": build_record.read()}))
"""


class Target:
    """A virtual environment with the torch of this one, and a checkout to build from.

    torch comes by links: a copy would be gigabytes. One environment and one checkout serve all tests, so
    that the modules are compiled once: the objects stay in the checkout's build/.
    """

    def __init__(self, folder, cxx):
        self.folder, self.cxx = folder, cxx
        self.checkout = folder / "checkout"
        self.python = folder / "venv/bin/python"
        self._make_environment(Path(torch.__file__).parent.parent)
        self._copy_checkout()

    def _make_environment(self, site):
        run(sys.executable, "-m", "venv", "--without-pip", self.folder / "venv", cwd=self.folder)
        linked = self.folder / "linked"
        linked.mkdir()
        for entry in site.iterdir():
            if not entry.name.startswith(("lltm_ext", "__editable__")):
                (linked / entry.name).symlink_to(entry)
        (purelib(self.python) / "linked.pth").write_text(f"{linked}\n")
        ninja = shutil.which("ninja", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
        if ninja:
            (self.python.parent / "ninja").symlink_to(ninja)

    def _copy_checkout(self):
        """What git has or would take, and rubbish that an earlier build may have left."""
        listed = run("git", "ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT).stdout.split("\0")
        for name in filter(None, listed):
            if (ROOT / name).is_file():
                shutil.copy2(ROOT / name, write(self.checkout / name))
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        library = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        for rubbish in (f"lltm_ext/_C/gone{suffix}", f"build/{library}/lltm_ext/_C/gone{suffix}"):
            write(self.checkout / rubbish)

    def run(self, *arguments, fails=False, **variables):
        """Runs its Python in the checkout.

        To save time, builds are for the architecture with the fewest kernels, and hardly optimized: nvcc
        itself reads NVCC_APPEND_FLAGS.
        """
        quick = {"CXX": self.cxx, "NVCC_APPEND_FLAGS": "-Xcicc=-O1 -Xptxas=-O0"}
        variables = {"TORCH_CUDA_ARCH_LIST": "7.5"} | quick | variables
        return run(self.python, *arguments, cwd=self.checkout, fails=fails, **variables)

    def inspect(self):
        """What is installed, imported from outside the checkout."""
        found = json.loads(run(self.python, "-c", INSPECT, cwd=self.folder).stdout)
        found["place"] = Path(found["file"]).parent.parent
        return found


@pytest.fixture(scope="module")
def target(tmp_path_factory, quick_cxx):
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("builds from what git lists, and this is not a git checkout")
    return Target(tmp_path_factory.mktemp("packaging"), quick_cxx)


@pytest.fixture
def clean_target(target):
    """The target with no lltm_ext installed, before and after."""
    yield target
    target.run("-m", "pip", "uninstall", "-q", "-y", "lltm_ext")


@pytest.fixture(scope="module")
def wheel(target):
    """Built in isolation: torch and the compiler are downloaded again, for the build only.

    That is how `make wheel` builds one from the sdist. It serves if it is of this torch and these files.
    """
    for made in (ROOT / "dist").glob("*.whl"):
        if made.name.startswith(f"lltm_ext-{BUILT_VERSION}-cp") and is_of_these_files(made):
            return made
    pip_wheel = ("-m", "pip", "wheel", "--no-deps")
    target.run(*pip_wheel, "-w", target.folder / "wheel", ".", SOURCE_DATE_EPOCH=str(EPOCH))
    (built,) = (target.folder / "wheel").iterdir()
    return built


def is_of_these_files(wheel):
    archive = zipfile.ZipFile(wheel)
    record = json.loads(archive.read("lltm_ext/_build_record.json"))
    scripts = [name for name in archive.namelist() if name.endswith(".py")]
    here = {name: ROOT / name.replace("lltm_ext/benchmarks/", "benchmarks/") for name in scripts}
    return record["source"] == toolchain.source_revision(ROOT / "src") and all(
        file.is_file() and archive.read(name) == file.read_bytes() for name, file in here.items()
    )


@pytest.fixture(scope="module")
def sdist(target):
    target.run("-m", "build", "--sdist", "--outdir", target.folder / "sdist", ".")
    (built,) = (target.folder / "sdist").iterdir()
    return built


@pytest.mark.packaging
class TestWheel:
    def test_it_passes_the_check_that_guards_every_upload(self, wheel):
        assert CHECK.problems(wheel) == []

    def test_its_record_says_what_it_was_built_from(self, target, wheel):
        record = json.loads(zipfile.ZipFile(wheel).read("lltm_ext/_build_record.json"))
        of_checkout = toolchain.source_revision(target.checkout / "src")
        expected = {"version": BUILT_VERSION, "torch": torch.__version__, "cuda": CUDA, "source": of_checkout}
        by_make = not wheel.is_relative_to(target.folder)  # then it has all architectures
        all_of_them = (
            toolchain.architectures(toolchain.find_cuda(CUDA).nvcc, {"TORCH_CUDA_ARCH_LIST": "all"})
            if CUDA and by_make
            else ["7.5"]
        )
        assert record | expected | {"architectures": all_of_them if CUDA else []} == record

    def test_its_modules_name_no_folder_of_the_builder(self, target, wheel):
        archive = zipfile.ZipFile(wheel)
        modules = [name for name in archive.namelist() if name.endswith(".so")]
        assert len(modules) == len(OPS)
        folders = (ROOT, target.checkout, target.folder / "linked", Path(torch.__file__).parent.parent)
        for folder in (*folders, Path(tempfile.gettempdir(), "pip-")):  # pip unpacks the sdist there
            assert [name for name in modules if str(folder).encode() in archive.read(name)] == []

    def test_its_files_are_sorted_and_have_the_given_time(self, wheel):
        entries = zipfile.ZipFile(wheel).infolist()
        assert {entry.date_time for entry in entries} == {time.gmtime(EPOCH)[:6]}
        folders = {}
        for entry in entries:
            folders.setdefault(os.path.dirname(entry.filename), []).append(entry.filename)
        info = [name for name in folders if name.endswith(".dist-info")]  # its RECORD comes last
        assert all(names == sorted(names) for name, names in folders.items() if name not in info)


@pytest.mark.packaging
class TestSdist:
    def test_its_version_is_of_no_torch(self, sdist):
        assert sdist.name == f"lltm_ext-{BASE_VERSION}.tar.gz"
        with tarfile.open(sdist) as archive:
            lines = archive.extractfile(f"lltm_ext-{BASE_VERSION}/PKG-INFO").read().decode().splitlines()
        found = {line for line in lines if line.startswith(("Version: ", "Requires-Dist: torch"))}
        assert found == {f"Version: {BASE_VERSION}", "Requires-Dist: torch>=2.11"}

    def test_setup_py_makes_the_same_one(self, target, sdist):
        target.run("setup.py", "-q", "sdist", "--dist-dir", target.folder / "sdist-by-setup")
        (other,) = (target.folder / "sdist-by-setup").iterdir()
        assert other.name == sdist.name
        with tarfile.open(sdist) as ours, tarfile.open(other) as theirs:
            assert sorted(ours.getnames()) == sorted(theirs.getnames())

    def test_it_holds_all_sources_and_nothing_built(self, target, sdist):
        with tarfile.open(sdist) as archive:
            names = {member.name.partition("/")[2] for member in archive if member.isfile()}
        kept = {
            file
            for folder in ("src", "include", "cmake", "docs", "tools", "tests", "examples")
            for file in (target.checkout / folder).rglob("*.*")
        }
        kept |= set((target.checkout / "lltm_ext").rglob("*.py"))
        wanted = {str(file.relative_to(target.checkout)) for file in kept if file.suffix != ".pyc"}
        wanted |= {"pyproject.toml", "setup.py", "CMakeLists.txt", "MANIFEST.in", "LICENSE", "README.md"}
        assert wanted | {"lltm_ext/py.typed"} <= names
        built = (".so", ".o", "_record.json")
        assert not [name for name in names if name.endswith(built) or name.startswith("build/")]


@pytest.fixture(scope="module")
def portable_wheel(target):
    """Without kernels, which take minutes."""
    folder = target.folder / "portable"
    pip_wheel = ("-m", "pip", "wheel", "--no-build-isolation", "--no-deps")
    target.run(*pip_wheel, "-w", folder, ".", LLTM_EXT_PORTABLE="1", LLTM_EXT_CUDA="0")
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="class")
def with_portable(target, portable_wheel):
    """The target with only the portable wheel."""
    target.run("-m", "pip", "install", "-q", "--no-deps", portable_wheel)
    yield target
    target.run("-m", "pip", "uninstall", "-q", "-y", "lltm_ext")


@pytest.mark.packaging
class TestPortable:
    def test_it_is_for_every_python_and_passes_the_check(self, portable_wheel):
        assert portable_wheel.name.startswith(f"lltm_ext-{BASE_VERSION}-py3-none-")
        assert CHECK.problems(portable_wheel) == []

    def test_its_selftest_passes(self, with_portable):
        done = run(with_portable.python, "-m", "lltm_ext", "selftest", cwd=with_portable.folder)
        assert " 0 failed" in done.stdout

    def test_its_doctor_finds_no_problem(self, with_portable):
        doctor = (with_portable.python, "-m", "lltm_ext", "doctor", "--json")
        # A visible GPU would be a problem for a CPU wheel.
        found = json.loads(run(*doctor, cwd=with_portable.folder, CUDA_VISIBLE_DEVICES="").stdout)
        assert (found["ok"], found["problems"]) == (True, [])
        assert (found["record"]["portable"], found["record"]["python"]) == (True, "any")
        assert found["imports"] == {"torch": None, "lltm_ext": None}
        assert found["calls"] and set(found["calls"].values()) == {None}


@pytest.mark.packaging
class TestInstall:
    """Without kernels, which take minutes. The first test compiles, and the others have nothing left to."""

    @staticmethod
    def install(target, *arguments, **variables):
        target.run(*arguments, LLTM_EXT_CUDA="0", **variables)
        installed = target.inspect()
        assert installed["version"] == f"{BASE_VERSION}+cpu"
        record = installed["record"]
        assert record["torch"] == torch.__version__
        assert (record["cuda"], record["architectures"], record["compiler"]["nvcc"]) == (None, [], None)
        return installed

    @pytest.mark.parametrize("where", [["."], ["-e", "."]], ids=["copied", "editable"])
    def test_pip_install_without_isolation(self, clean_target, where):
        installed = self.install(clean_target, "-m", "pip", "install", "--no-build-isolation", *where)
        assert (installed["place"] == clean_target.checkout) is ("-e" in where)

    @pytest.mark.parametrize("setuptools", ["<80", ">=80,<82"])
    def test_develop_uses_the_torch_that_is_installed(self, clean_target, setuptools):
        clean_target.run("-m", "pip", "install", "-q", f"setuptools{setuptools}")
        # Without an index, isolation would have no torch.
        installed = self.install(clean_target, "setup.py", "develop", PIP_NO_INDEX="1")
        assert installed["place"] == clean_target.checkout

    def test_pip_install_of_a_wheel_made_in_isolation(self, clean_target, wheel):
        clean_target.run("-m", "pip", "install", "-q", "--no-deps", wheel)
        installed = clean_target.inspect()
        assert (installed["version"], installed["record"]["torch"]) == (BUILT_VERSION, torch.__version__)
        assert installed["place"] != clean_target.checkout


@pytest.mark.packaging
class TestSetupWithoutWhatItNeeds:
    @staticmethod
    def setup(target, folder, torch_code, *arguments, **how):
        """The last line that setup.py prints, with a torch of that code."""
        (folder / "torch.py").write_text(torch_code)
        done = target.run("setup.py", *arguments, PYTHONPATH=str(folder), **how)
        return (done.stdout or done.stderr).splitlines()[-1]

    def test_metadata_needs_no_torch(self, target, tmp_path):
        assert self.setup(target, tmp_path, "raise ImportError('hidden')", "--version") == BASE_VERSION

    @pytest.mark.parametrize(
        "torch_code,message,command",
        [
            ("raise ImportError('hidden')", "the build needs torch (hidden)", "torch"),
            # There is no such compiler.
            (
                torch_of("9.0.0", "99.0"),
                "torch is built with CUDA 99.0, but ",
                '"cuda-toolkit[nvcc,crt,nvvm,cccl]==99.0.*"',
            ),
            (
                torch_of("2.11.0+cpu", None),
                "LLTM_EXT_CUDA=1 asks for CUDA kernels, but torch 2.11.0+cpu is built without CUDA",
                "--force-reinstall",
            ),
        ],
    )
    def test_modules_are_refused_with_the_fix(self, target, tmp_path, torch_code, message, command):
        build = ("-q", "bdist_wheel")
        last = self.setup(target, tmp_path, torch_code, *build, fails=True, LLTM_EXT_CUDA="1")
        assert last.startswith(f"error: lltm_ext: {message}")
        assert f"Run: python -m pip install {command}" in last
