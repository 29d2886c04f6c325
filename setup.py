"""Builds the wheel: src/<op>/ with an <op>.cpp becomes the module lltm_ext._C.<op>; there is no list to edit.

All that does not depend on torch stands in pyproject.toml. Variables that steer a build: LLTM_EXT_CUDA=0/1,
CUDA_HOME, TORCH_CUDA_ARCH_LIST, MAX_JOBS (lltm_ext/_toolchain.py says how each is chosen when it is not set).
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit('setuptools is older than 77. Run: python -m pip install --upgrade "setuptools<82"')

ROOT = Path(__file__).resolve().parent


def load(name):
    """A module of lltm_ext by its path: the package itself cannot be imported before it is built."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "lltm_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toolchain = load("_toolchain")
VERSION = load("_version").__version__


def ops():
    return sorted(file.stem for file in Path("src").glob("*/*.cpp") if file.stem == file.parent.name)


def sources(op, cuda):
    # Each file becomes <stem>.o, so a folder holds no x.cu beside an x.cpp: kernels stand in <op>_kernel.cu.
    patterns = ("*.cpp", "*.cu") if cuda else ("*.cpp",)
    return [str(file) for pattern in patterns for file in sorted(Path("src", op).glob(pattern))]


def extension(make, op, cuda, architectures):
    """`make` is torch's CUDAExtension or CppExtension. No -std: torch knows the one that its headers need."""
    macros = [("LLTM_EXT_WITH_CUDA", None)] if cuda else []
    if any(architecture.startswith("9.0") for architecture in architectures):
        macros.append(("LLTM_EXT_SM90A", None))
    return make(
        f"lltm_ext._C.{op}",
        sources(op, cuda),
        include_dirs=[str(ROOT / "src")],
        define_macros=macros,
        extra_compile_args={
            # -g0: Python's own flags may carry -g, which makes a module of 0.3 MB one of 11 MB.
            # The map keeps the path of this folder out of the modules' error messages.
            # -fopenmp: without it at::parallel_for runs on one thread.
            # The assembler's -I: src/elementwise embeds headers, for the compiler of ops made at run time.
            "cxx": [
                "-O3",
                "-g0",
                "-fopenmp",
                "-fvisibility=hidden",
                f"-ffile-prefix-map={ROOT}/=",
                f"-Wa,-I{ROOT / 'src'}",
            ],
            "nvcc": [
                "-O3",
                "-Xcompiler=-fvisibility=hidden",
                *(toolchain.smallest_code(cuda.nvcc) if cuda else []),
            ],
        },
        extra_link_args=["-Wl,-s", "-fopenmp"],
    )


def build_record(torch, cuda, architectures, version):
    """What lltm_ext/_record.py reads at import. No time and no path: the same source gives the same bytes."""
    return {
        "version": version,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if cuda else None,
        "architectures": architectures,
        "compiler": {"cxx": toolchain.cxx_version(), "nvcc": cuda and cuda.version},
        "python": sysconfig.get_config_var("SOABI"),
        "source": toolchain.source_revision(ROOT / "src"),
    }


def against(torch):
    """The arguments of setup() for a build against this torch."""
    with_cuda = toolchain.wants_cuda(torch.__version__, torch.version.cuda)
    cuda = toolchain.find_cuda(torch.version.cuda) if with_cuda else None
    architectures = toolchain.architectures(cuda.nvcc) if cuda else []

    # torch reads these as soon as cpp_extension is imported; the scripts' folder is where pip puts ninja.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    os.environ["MAX_JOBS"] = str(toolchain.jobs())
    if cuda:
        os.environ["CUDA_HOME"] = str(cuda.home)
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(toolchain.compiled_for(architectures))
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    torch_minor = toolchain.minor(torch.__version__)
    label = f"cu{torch.version.cuda.replace('.', '')}torch{torch_minor}" if cuda else "cpu"
    version = f"{VERSION}+{label}"

    class BuildModules(BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            # Objects stay between calls, so that an edit compiles one file again: setuptools would give each
            # editable install a new folder.
            kind = "cuda" if cuda else "cpu"
            self.build_temp = f"build/{sys.implementation.cache_tag}-torch{torch.__version__}-{kind}"

        def run(self):
            compiler = (
                f"nvcc {cuda.version} of {cuda.home} for {' '.join(architectures)}" if cuda else "no nvcc"
            )
            print(f"lltm_ext {version}: {compiler}, {os.environ['MAX_JOBS']} jobs", flush=True)
            super().run()
            package = Path(self.get_ext_fullpath("lltm_ext._build_record")).parent
            record = build_record(torch, cuda, architectures, version)
            (package / "_build_record.json").write_text(json.dumps(record, indent=2) + "\n")

        def build_extensions(self):
            folder = toolchain.cudart_folder(cuda.home, ROOT / self.build_temp) if cuda else None
            self.compiler.library_dirs += [str(folder)] if folder else []
            super().build_extensions()

    return {
        "version": version,
        "install_requires": [f"torch=={torch_minor}.*"],  # the C++ ABI changes from minor to minor
        "ext_modules": [
            extension(CUDAExtension if cuda else CppExtension, op, cuda, architectures) for op in ops()
        ],
        "cmdclass": {"build_ext": BuildModules},
    }


def without_modules(why):
    """The arguments of setup() for an sdist or metadata, without modules. Asked for one, it says why not."""

    class Refuse(build_ext):
        def run(self):
            raise PlatformError(f"lltm_ext: {why}")

    return {
        "version": VERSION,
        "install_requires": ["torch>=2.11"],
        "ext_modules": [setuptools.Extension(f"lltm_ext._C.{op}", sources(op, None)) for op in ops()],
        "cmdclass": {"build_ext": Refuse},
    }


def arguments():
    if "sdist" in sys.argv:
        return without_modules("an sdist is for no torch in particular. Run: python setup.py bdist_wheel")
    try:
        import torch
    except ImportError as error:
        needed = 'torch ninja "cuda-toolkit[nvcc,crt,nvvm,cccl]"'
        return without_modules(f"the build needs torch ({error}). Run: python -m pip install {needed}")
    try:
        return against(torch)
    except toolchain.ToolchainError as error:
        return without_modules(str(error))


class Build(build):
    def run(self):
        # What an earlier call left, a module of an op since removed, must not get into the wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class Develop(setuptools.Command):
    """`setup.py develop` against the torch that is installed: setuptools >= 80 itself builds in isolation."""

    user_options = []
    initialize_options = finalize_options = lambda self: None

    def run(self):
        pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e", str(ROOT)]
        subprocess.run(pip, check=True)


chosen = arguments()
chosen["cmdclass"].update(build=Build, develop=Develop)
setuptools.setup(
    # Named: discovery would take src/ for a src-layout.
    packages=["lltm_ext", "lltm_ext._C", "lltm_ext.benchmarks"],
    package_dir={"lltm_ext.benchmarks": "benchmarks"},  # for `python -m lltm_ext bench`
    package_data={"lltm_ext": ["py.typed"], "lltm_ext._C": ["*.pyi"]},
    include_package_data=False,
    **chosen,
)
