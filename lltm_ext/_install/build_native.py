"""How the modules are compiled: into a wheel by setup.py, into a cache by lltm_ext.jit.

src/<op>/ with an <op>.cpp becomes the module lltm_ext._C.<op>; there is no list to edit. A module whose files
include headers of src/common/runtime also compiles the sources there. LLTM_EXT_CUDA=0/1, CUDA_HOME,
TORCH_CUDA_ARCH_LIST and MAX_JOBS control a build; toolchain.py has their defaults.

It uses only the standard library until a torch is passed in. It can be imported before the modules are built.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from lltm_ext._install import build_record, probe, toolchain
from lltm_ext._version import __version__, label, major, minor

# A module with kernels is one long file and a few short ones: one at a time would leave most cores idle.
MODULES_AT_ONCE = 4


def source_folder() -> Path:
    """Where the sources are: inside an installed package, or next to it in a checkout."""
    installed = build_record.PACKAGE / "_src"
    return installed if installed.is_dir() else build_record.PACKAGE.parent / "src"


def ops(src: Path) -> list[str]:
    """The op with most files comes first: modules are built in parallel, and it must not start last."""
    found = (file.stem for file in src.glob("*/*.cpp") if file.stem == file.parent.name)
    return sorted(found, key=lambda op: (-len(list((src / op).iterdir())), op))


def sources(src: Path, op: str, cuda: bool) -> list[str]:
    # Each file becomes <stem>.o, so a folder holds no x.cu next to an x.cpp: kernels are in <op>_kernel.cu.
    patterns = ("*.cpp", "*.cu") if cuda else ("*.cpp",)
    files = [file for pattern in patterns for file in sorted((src / op).glob(pattern))]
    if any('#include "common/runtime/' in file.read_text() for file in files):
        files += sorted((src / "common/runtime").glob("*.cpp"))
    return [str(file) for file in files]


def in_one_unit(files: list[str], folder: Path, src: Path) -> list[str]:
    """These files with a file in `folder` in place of the C++ ones, which includes them.

    Compiled one by one, they take 1.6 times as long: most of it is torch's headers. <op>_cpu.cpp includes
    few of these, so another core can compile it. The file is written again, and so compiled again, if a
    header is newer that one of them embeds: no compiler lists these.
    """
    cpp = [file for file in files if file.endswith(".cpp") and not file.endswith("_cpu.cpp")]
    text = "".join(f'#include "{Path(file).relative_to(src).as_posix()}"\n' for file in cpp)
    newest = 0.0
    if any("LLTM_EMBED(" in Path(file).read_text() for file in cpp):
        headers = (header for pattern in ("*.h", "*.cuh") for header in src.rglob(pattern))
        newest = max((header.stat().st_mtime for header in headers), default=0.0)
    unit = folder / "all.cpp"
    if not unit.exists() or unit.read_text() != text or unit.stat().st_mtime < newest:
        folder.mkdir(parents=True, exist_ok=True)
        unit.write_text(text)
    return [str(unit), *(file for file in files if file not in cpp)]


class Target:
    """What a build is for: this torch, with or without CUDA, and the architectures."""

    def __init__(self, torch: ModuleType, src: Path) -> None:
        toolchain.check_host()
        self.torch, self.src = torch, src
        with_cuda = toolchain.wants_cuda(torch.__version__, torch.version.cuda)
        self.cuda = toolchain.find_cuda(torch.version.cuda) if with_cuda else None
        self.architectures = toolchain.architectures(self.cuda.nvcc) if self.cuda else []
        self.jobs = toolchain.jobs()
        # torch.utils.cpp_extension reads these when it is imported.
        os.environ["PATH"] = toolchain.search_path()
        if self.cuda:
            os.environ["CUDA_HOME"] = str(self.cuda.home)
            os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(toolchain.compiled_for(self.architectures))

    def extension(self, name: str, files: list[str], macros: list[tuple[str, str | None]]) -> Any:
        """torch's Extension, which does not link anything yet."""
        from torch.utils.cpp_extension import CppExtension, CUDAExtension

        root = self.src.resolve()
        # The maps keep absolute paths out of error messages. Python's own flags may contain -g, hence -g0.
        folders = (root.parent, Path(str(self.torch.__file__)).parent.parent)
        maps = [f"-ffile-prefix-map={folder}/=" for folder in folders]
        escaped = [flag.replace(",", r"\,") for flag in maps]  # a comma ends an option of nvcc's
        hidden = "-fvisibility=hidden"
        macros = macros + ([("LLTM_EXT_WITH_CUDA", None)] if self.cuda else [])
        if any(architecture.startswith("9.0") for architecture in self.architectures):
            macros.append(("LLTM_EXT_SM90A", None))
        smallest = toolchain.smallest_code(self.cuda.nvcc) if self.cuda else []
        return (CUDAExtension if self.cuda else CppExtension)(
            f"lltm_ext._C.{name}",
            files,
            include_dirs=[str(root)],
            define_macros=macros,
            extra_compile_args={  # torch adds the -std that its headers need
                "cxx": ["-O3", "-g0", hidden, *maps],
                "nvcc": ["-O3", *(f"-Xcompiler={flag}" for flag in (hidden, *escaped)), *smallest],
            },
            extra_link_args=["-Wl,-s"],
        )

    def record(self, version: str) -> dict[str, Any]:
        """The build's record (build_record.py). Without times and paths, equal sources give equal bytes."""
        return {
            "version": version,
            "torch": str(self.torch.__version__),
            "cuda": self.torch.version.cuda if self.cuda else None,
            "architectures": self.architectures,
            "compiler": {"cxx": toolchain.cxx_version(), "nvcc": self.cuda and self.cuda.version},
            "python": sysconfig.get_config_var("SOABI"),
            "source": toolchain.source_revision(self.src),
        }

    def command(self, name: str, record: dict[str, Any]) -> Any:
        """The command build_ext, which keeps objects in a folder of that name and writes the record."""
        from torch.utils.cpp_extension import BuildExtension

        # setuptools would give each editable install a new folder.
        objects = f"build/{name}-torch{self.torch.__version__}-{'cuda' if self.cuda else 'cpu'}"
        listed, cuda, jobs = " ".join(self.architectures), self.cuda, self.jobs

        class Command(BuildExtension):
            def finalize_options(self) -> None:
                self.build_temp: str = self.build_temp or objects
                super().finalize_options()

            def swig_sources(self, files: list[str], extension: Any) -> list[str]:
                """Orders the files, which setuptools has just sorted, for ninja: the longest start first."""
                return sorted(files, key=lambda file: "hopper" not in file)

            def run(self) -> None:
                nvcc = f"nvcc {cuda.version} of {cuda.home} for {listed}" if cuda else "no nvcc"
                print(f"lltm_ext {record['version']}: {nvcc}, {jobs} jobs", flush=True)
                super().run()
                package = Path(self.get_ext_fullpath("lltm_ext._C")).parent
                (package / build_record.FILE.name).write_text(json.dumps(record, indent=2) + "\n")

        return Command


def module(target: Target, op: str) -> Any:
    extension = target.extension(
        op,
        sources(target.src, op, target.cuda is not None),
        [("AT_PER_OPERATOR_HEADERS", None)],  # torch's headers include only the ops they use
    )
    # at::parallel_for runs on one thread without -fopenmp. By -I the assembler finds the headers that modules
    # embed for the compiler at run time (common/runtime/compiler.h).
    extension.extra_compile_args["cxx"] += ["-fopenmp", "-Xassembler", f"-I{target.src.resolve()}"]
    extension.extra_link_args += ["-fopenmp"]
    if target.cuda:  # PyPI's runtime has no libcudart.so, only a file of this name
        extension.libraries.remove("cudart")
        extension.extra_link_args += [f"-l:libcudart.so.{major(target.cuda.version)}"]
    return extension


def against(torch: ModuleType, src: Path) -> dict[str, Any]:
    """The arguments of setup() that build the modules of `src` against this torch."""
    target = Target(torch, src)
    modules = ops(src)
    at_once = min(target.jobs, MODULES_AT_ONCE if target.cuda else len(modules))
    os.environ["MAX_JOBS"] = str(target.jobs // at_once)
    version = f"{__version__}+{label(torch.__version__, torch.version.cuda if target.cuda else None)}"

    class BuildModules(target.command(str(sys.implementation.cache_tag), target.record(version))):  # type: ignore[misc]
        def run(self) -> None:
            self.parallel, self.start, self.built, self.failed = at_once, time.monotonic(), 0, False
            super().run()

        def build_extension(self, ext: Any) -> None:
            """Builds in its own thread and folder, because torch writes a build.ninja there."""
            if self.failed:  # Another module failed.
                return
            op = ext.name.rpartition(".")[2]
            own = copy.copy(self)
            own.build_temp = str(Path(self.build_temp, op))
            ext.sources = in_one_unit(ext.sources, Path(own.build_temp), src)
            try:
                super(BuildModules, own).build_extension(ext)
            except BaseException:
                self.failed = True
                raise
            self.built += 1
            seconds = time.monotonic() - self.start
            print(f"lltm_ext: {self.built} of {len(modules)} modules, {op}, {seconds:.0f} s", flush=True)

    return {
        "version": version,
        "install_requires": [f"torch=={minor(torch.__version__)}.*"],  # the C++ ABI changes at each minor
        "ext_modules": [module(target, op) for op in modules],
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


def try_modules(site: str, modules: str | None = None) -> None:
    """Calls each op of the lltm_ext in `site` once, or of these modules. Raises where one fails."""
    for step, error in probe.try_package(site, modules).items():
        if error:
            raise toolchain.ToolchainError(
                f"the modules were built by {toolchain.cxx_version()}, but fail when they are tried: {step}: "
                f"{error}. Run: export CXX=g++  (or another C++ compiler than this one, which may link "
                "libstdc++ statically)"
            )
