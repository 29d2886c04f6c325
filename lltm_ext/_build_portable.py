"""How the portable library is compiled: `LLTM_EXT_PORTABLE=1 pip wheel .` (_portable.py says what it is).

All ops but those it lacks, as one shared library on torch's stable C ABI. The bindings are the native ones:
a folder of this build, first on the include path, has src/stable/torch.h in place of every header of torch,
ATen and c10 that they name. CUDA's runtime is linked statically: the library is for any torch's CUDA.

Standard library only until a torch is handed in, like _build.py.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from lltm_ext import _build, _portable
from lltm_ext import _toolchain as toolchain
from lltm_ext._version import __version__

INCLUDED = re.compile(r"^#include <((?:ATen|c10|torch)/[^>]+)>", re.MULTILINE)


def sources(src: Path, cuda: bool) -> list[str]:
    ops = sorted(set(_build.ops(src)) - set(_portable.LACKING))
    return [file for op in ops for file in _build.sources(src, op, cuda)]


def stand_in(src: Path, folder: Path) -> None:
    """Fills `folder` with a header of src/stable for each of torch's that the bindings include."""
    bindings = [file for pattern in ("*.h", "*.cpp") for file in src.rglob(pattern)]
    texts = [file.read_text() for file in bindings if file.parent.name != "stable"]
    for name in {name for text in texts for name in INCLUDED.findall(text)}:
        header = folder / name
        if not header.is_file():  # else a build would compile all again
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text('#include "stable/torch.h"\n')


def against(torch: ModuleType, src: Path) -> dict[str, Any]:
    """The arguments of setup() that build the library with this torch's headers."""
    cuda, architectures = _build.tools(torch)
    os.environ["MAX_JOBS"] = str(toolchain.jobs())
    from setuptools.command.bdist_wheel import bdist_wheel  # type: ignore[import-untyped]
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    oldest = ".".join(map(str, _portable.OLDEST_TORCH))

    class BuildLibrary(BuildExtension):
        def finalize_options(self) -> None:
            kind = "cuda" if cuda else "cpu"
            self.build_temp: str = self.build_temp or f"build/portable-torch{torch.__version__}-{kind}"
            super().finalize_options()

        def get_ext_filename(self, name: str) -> str:
            return f"{Path(*name.split('.'))}.so"  # of no Python in particular

        def build_extensions(self) -> None:
            with _build.at_the_same_place(self, src, cuda):
                headers = Path(self.build_temp, "torch").resolve()
                stand_in(src, headers)
                for extension in self.extensions:
                    extension.include_dirs.insert(0, str(headers))
                super().build_extensions()

        def run(self) -> None:
            super().run()
            built = _build.record(torch, src, cuda, architectures, __version__)
            built |= {"portable": True, "torch": oldest, "headers": torch.__version__, "python": "any"}
            package = Path(self.get_ext_fullpath("lltm_ext._C.portable")).parent.parent
            (package / _portable.RECORD.name).write_text(json.dumps(built, indent=2) + "\n")

    class Wheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    make = CUDAExtension if cuda else CppExtension
    major, minor = _portable.OLDEST_TORCH
    library = make(
        "lltm_ext._C.portable",
        sources(src, cuda is not None),
        include_dirs=[str(src.resolve())],
        define_macros=[
            ("LLTM_EXT_STABLE_ABI", None),
            ("TORCH_TARGET_VERSION", f"0x{major:02x}{minor:02x}000000000000ULL"),
            *_build.macros(cuda, architectures),
        ],
        extra_compile_args=_build.flags(src, cuda),
        # libtorch.so, of which nothing is called, brings libtorch_cuda.so where torch has it.
        extra_link_args=["-Wl,-s", "-Wl,--no-as-needed", "-ltorch"],
    )
    # In the place of all that torch's build would link.
    library.libraries = ["torch_cpu", *(["cudart_static", "dl", "rt", "pthread"] if cuda else [])]
    return {
        "version": __version__,
        "install_requires": [f"torch>={oldest}"],
        "ext_modules": [library],
        "cmdclass": {"build_ext": BuildLibrary, "bdist_wheel": Wheel},
    }
