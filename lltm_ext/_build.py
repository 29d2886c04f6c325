"""How the modules are compiled: into a wheel by setup.py, into a cache by lltm_ext.jit.

src/<op>/ with an <op>.cpp becomes the module lltm_ext._C.<op>; there is no list to edit. Variables that steer
a build: LLTM_EXT_CUDA=0/1, CUDA_HOME, TORCH_CUDA_ARCH_LIST, MAX_JOBS (_toolchain.py says how each is chosen
when it is not set).

Standard library only until a torch is handed in, and importable before the modules are built.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lltm_ext import _toolchain as toolchain
from lltm_ext._version import __version__

PACKAGE = Path(__file__).resolve().parent

# Most modules are one long file and little else, so that a single one leaves most cores idle.
MODULES_AT_ONCE = 4


def source_folder() -> Path:
    """The sources: in an installed package a part of it, in a checkout its neighbour."""
    installed = PACKAGE / "_src"
    return installed if installed.is_dir() else PACKAGE.parent / "src"


def ops(src: Path) -> list[str]:
    """Those of most files first: modules are built side by side, and no long one should end alone."""
    found = sorted(file.stem for file in src.glob("*/*.cpp") if file.stem == file.parent.name)
    return sorted(found, key=lambda op: -len(sources(src, op, cuda=True)))


def sources(src: Path, op: str, cuda: bool) -> list[str]:
    # Each file becomes <stem>.o, so a folder holds no x.cu beside an x.cpp: kernels stand in <op>_kernel.cu.
    patterns = ("*.cpp", "*.cu") if cuda else ("*.cpp",)
    return [str(file) for pattern in patterns for file in sorted((src / op).glob(pattern))]


def record(
    torch: ModuleType, src: Path, cuda: toolchain.Cuda | None, architectures: list[str], version: str
) -> dict[str, Any]:
    """What _record.py reads at import. No time and no path: the same source gives the same bytes."""
    return {
        "version": version,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if cuda else None,
        "architectures": architectures,
        "compiler": {"cxx": toolchain.cxx_version(), "nvcc": cuda and cuda.version},
        "python": sysconfig.get_config_var("SOABI"),
        "source": toolchain.source_revision(src),
    }


def tools(torch: ModuleType) -> tuple[toolchain.Cuda | None, list[str]]:
    """The CUDA compiler, if any, and the architectures to compile for. torch's build reads them in the
    environment, as soon as cpp_extension is imported."""
    toolchain.check_host()
    with_cuda = toolchain.wants_cuda(torch.__version__, torch.version.cuda)
    cuda = toolchain.find_cuda(torch.version.cuda) if with_cuda else None
    architectures = toolchain.architectures(cuda.nvcc) if cuda else []
    os.environ["PATH"] = toolchain.search_path()
    if cuda:
        toolchain.fix_addresses()
        os.environ["CUDA_HOME"] = str(cuda.home)
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(toolchain.compiled_for(architectures))
    return cuda, architectures


def macros(cuda: toolchain.Cuda | None, architectures: list[str]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    if cuda:
        found.append(("LLTM_EXT_WITH_CUDA", None))
    if any(architecture.startswith("9.0") for architecture in architectures):
        found.append(("LLTM_EXT_SM90A", None))
    return found


def flags(src: Path, cuda: toolchain.Cuda | None) -> dict[str, list[str]]:
    """No -std: torch knows the one that its headers need.

    -g0: Python's own flags may carry -g, which makes a module of 0.3 MB one of 11 MB.
    The maps keep the paths of this folder and of torch's out of the modules' error messages.
    """
    folders = (src.resolve().parent, Path(str(sys.modules["torch"].__file__)).parent.parent)
    maps = [f"-ffile-prefix-map={folder}/=" for folder in folders]
    smallest = toolchain.smallest_code(cuda.nvcc) if cuda else []
    return {
        "cxx": ["-O3", "-g0", "-fvisibility=hidden", *maps],
        "nvcc": ["-O3", "-Xcompiler=-fvisibility=hidden", *smallest],
    }


def _extension(make: Any, src: Path, op: str, cuda: toolchain.Cuda | None, architectures: list[str]) -> Any:
    """`make` is torch's CUDAExtension or CppExtension."""
    root = str(src.resolve())
    compile_args = flags(src, cuda)
    # -fopenmp: without it at::parallel_for runs on one thread.
    # The assembler's -I: src/elementwise embeds headers, for the compiler of ops made at run time.
    compile_args["cxx"] += ["-fopenmp", f"-Wa,-I{root}"]
    return make(
        f"lltm_ext._C.{op}",
        sources(src, op, cuda is not None),
        include_dirs=[root],
        # Per operator: torch's headers include no ops but those they use.
        define_macros=[("AT_PER_OPERATOR_HEADERS", None), *macros(cuda, architectures)],
        extra_compile_args=compile_args,
        extra_link_args=["-Wl,-s", "-fopenmp"],
    )


@contextmanager
def at_the_same_place(command: Any, src: Path, cuda: toolchain.Cuda | None) -> Iterator[None]:
    """Has the command build_ext compile a wheel at paths of one length, on which nvcc's code depends.

    An editable install, whose errors are to name the files that one edits, is built where they stand.
    """
    if cuda is None or command.editable_mode:
        yield
        return
    from torch.utils import cpp_extension

    kept = command.extensions, command.build_temp, cpp_extension.CUDA_HOME
    with toolchain.same_place(src, cuda, Path(command.build_temp)) as place:
        command.extensions = [_moved(extension, src, place) for extension in command.extensions]
        command.build_temp = str(place / "objects")
        cpp_extension.CUDA_HOME = str(place / "cuda")
        try:
            yield
        finally:
            command.extensions, command.build_temp, cpp_extension.CUDA_HOME = kept


def _moved(extension: Any, src: Path, place: Path) -> Any:
    moved = copy.copy(extension)
    moved.sources = [str(place / "src" / Path(file).relative_to(src)) for file in extension.sources]
    moved.include_dirs = [str(place / "src"), str(place / "cuda/include"), *extension.include_dirs]
    compile_args = extension.extra_compile_args
    moved.extra_compile_args = {
        "cxx": [*compile_args["cxx"], f"-ffile-prefix-map={place}/="],
        # Else the names of intermediate files have the process's number in them.
        "nvcc": [*compile_args["nvcc"], "--objdir-as-tempdir"],
    }
    return moved


def against(torch: ModuleType, src: Path) -> dict[str, Any]:
    """The arguments of setup() that build the modules of `src` against this torch."""
    cuda, architectures = tools(torch)
    modules = ops(src)
    jobs = toolchain.jobs()
    at_once = min(jobs, len(modules), MODULES_AT_ONCE)
    os.environ["MAX_JOBS"] = str(jobs // at_once)
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    torch_minor = toolchain.minor(torch.__version__)
    label = f"cu{torch.version.cuda.replace('.', '')}torch{torch_minor}" if cuda else "cpu"
    version = f"{__version__}+{label}"

    class BuildModules(BuildExtension):
        def finalize_options(self) -> None:
            # Objects stay between calls, so that an edit compiles one file again: setuptools would give each
            # editable install a new folder.
            kind = "cuda" if cuda else "cpu"
            default = f"build/{sys.implementation.cache_tag}-torch{torch.__version__}-{kind}"
            self.build_temp: str = self.build_temp or default
            super().finalize_options()
            self.parallel = at_once

        def run(self) -> None:
            compiler = (
                f"nvcc {cuda.version} of {cuda.home} for {' '.join(architectures)}" if cuda else "no nvcc"
            )
            print(f"lltm_ext {version}: {compiler}, {jobs} jobs", flush=True)
            self.start, self.built, self.failed = time.monotonic(), 0, False
            super().run()
            package = Path(self.get_ext_fullpath("lltm_ext._build_record")).parent
            built = record(torch, src, cuda, architectures, version)
            (package / "_build_record.json").write_text(json.dumps(built, indent=2) + "\n")

        def build_extensions(self) -> None:
            with at_the_same_place(self, src, cuda):
                temp = Path(self.build_temp).resolve()
                folder = toolchain.cudart_folder(cuda.home, temp) if cuda else None
                self.compiler.library_dirs += [str(folder)] if folder else []
                super().build_extensions()

        def build_extension(self, ext: Any) -> None:
            """In a thread of its own, and so in a folder of its own: torch writes a build.ninja there."""
            if self.failed:  # another module: nobody wants to wait for this one
                return
            op = ext.name.rpartition(".")[2]
            own = copy.copy(self)
            own.build_temp = str(Path(self.build_temp, op))
            try:
                super(BuildModules, own).build_extension(ext)
            except BaseException:
                self.failed = True
                raise
            self.built += 1
            seconds = time.monotonic() - self.start
            print(f"lltm_ext: {self.built} of {len(modules)} modules, {op}, {seconds:.0f} s", flush=True)

    make = CUDAExtension if cuda else CppExtension
    return {
        "version": version,
        "install_requires": [f"torch=={torch_minor}.*"],  # the C++ ABI changes from minor to minor
        "ext_modules": [_extension(make, src, op, cuda, architectures) for op in modules],
        "cmdclass": {"build_ext": BuildModules},
    }


def into(folder: str) -> None:
    """Builds the modules into `folder`, laid out as in a wheel."""
    import setuptools  # type: ignore[import-untyped]
    import torch

    setuptools.setup(
        name="lltm_ext",
        packages=[],
        script_name="lltm_ext",
        script_args=["-q", "build_ext", f"--build-lib={folder}", f"--build-temp={folder}/objects"],
        **against(torch, source_folder()),
    )
